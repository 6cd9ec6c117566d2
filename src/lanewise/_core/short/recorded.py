"""Gradients of lanes that autograd records on the plane below, for all lanes at once.

No lane depends on another, so the gradients of scalars of all lanes are those of their sum. Recorded below, the
operations of the function take the short ways, and the backward pass comes to no code of this library: a function of
many small operations takes half of the time. Whether that does for a function is seen at its first call, on a
`WatchedLevel` (shared.py). Later calls run on a `RecordedLevel`, where whatever the plane of the lanes would have to
know of starts the `vmap` again, as it ran at first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import standing
from lanewise._core.parting.lanes import Disagreement
from lanewise._core.plane import recorded, with_memory
from lanewise._core.recording.graphs import freed, needs_graph, note_leaf
from lanewise._core.recording.passes import run_backward
from lanewise._torch_compat import ORDER_KEY_SET, is_any_autocast_enabled, saved_tensor_hooks


class RecordedLevel(BatchLevel):
    """The level of a function whose gradients are recorded on the lowest plane, below all levels that are open.

    Attributes:
        recording: Whether one is being recorded.
        repeats: Whether what one was taken with respect to is the same in all lanes.
        spreads: Whether that may be large, which layers alone compute with (the rules' spread.py).
    """

    __slots__ = ("recording", "repeats")
    watching = True
    tentative = True
    spreads = False

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.recording = False
        self.repeats = False

    @contextmanager
    def recorded_below(self) -> Iterator[bool]:
        """While a gradient's function runs: the planes below record, which it is told whether they did outside."""
        chain = list(_down_from(self))
        before = [(level, level.grad_mode, level.include) for level in chain]
        recording, self.recording = self.recording, True
        for level in chain:
            level.grad_mode = True
            level.include = level.include | ORDER_KEY_SET
        try:
            yield all(grads for _, grads, _ in before)
        finally:
            self.recording = recording
            for level, grads, include in before:
                level.grad_mode, level.include = grads, include

    @property
    def unrecorded(self) -> bool:
        return self.recording

    def note_within(self) -> None:
        """Start again: what comes is of the plane of the lanes, where nothing is recorded."""
        if self.recording:
            raise Disagreement(self)

    note_autograd = note_within

    def check_refit(self, tensor: BatchTensor) -> None:
        """Before the shape of a tensor changes in place: autograd refuses that of a leaf."""
        super().check_refit(tensor)
        value = lowest(self, tensor)
        if value is not None and value.requires_grad and value.is_leaf:
            self.note_within()

    def check_end(self, results: Sequence[Any]) -> None:
        """A result that was kept in a gradient's function has a history here that it is not to have outside.

        Nor have lanes been asked for numbers where these are the same in all.
        """
        if self.repeats and self.asked:
            raise Disagreement(self)
        for out in results:
            value = lowest(self, out)
            if value is not None and value.requires_grad and not needs_graph([value], []):
                raise Disagreement(self)


class SpreadLevel(RecordedLevel):
    """One on which parameters of layers are repeated for the lanes, without a copy."""

    __slots__ = ()
    spreads = True


# So many numbers at most, of all lanes, is an argument without lanes repeated to.
_MOST_REPEATED = 4096


def is_large(level: Any, leaf: Tensor) -> bool:
    """Whether an argument that is the same in all lanes is one that few operations can do with repeated."""
    return leaf.dim() > 1 or leaf.numel() * level.size > _MOST_REPEATED


def can_record(level: Any, leaves: Sequence[Any], spread: bool) -> bool:
    """Whether gradients with respect to these can be recorded on the lowest plane, below all levels that are open.

    What is the same in all lanes is repeated for it, which is worth while for what is no factor of a matrix product, or
    (`spread`) for parameters of layers.
    """
    # Inside another gradient's function, it may have a history: here, or where that is recorded below, there.
    nested = standing.orders > 0
    for leaf in leaves:
        if recorded(leaf) and not nested:
            return False
        value = lowest(level, leaf)
        if value is None:
            value = leaf
            if level.parent is not None or (not spread and is_large(level, leaf)):
                return False
        if type(value) is not Tensor or not value.is_floating_point() or (value.requires_grad and not nested):
            return False
    return not is_any_autocast_enabled() and saved_tensor_hooks() is None


def leaves_below(level: RecordedLevel, leaves: Sequence[Tensor], outer: bool) -> list[BatchTensor]:
    """Aliases of values, with lanes, to differentiate with respect to on the lowest plane.

    `outer`: whether they keep the history that they have there.
    """
    values = _at_bottom(level, _aliases, [_lanes_of(level, leaf) for leaf in leaves], outer)
    for leaf, value in zip(leaves, values, strict=True):
        note_leaf(value)
        level.repeats = level.repeats or not level.mapped(leaf)
    return [_raised(level, value) for value in values]


def _lanes_of(level: RecordedLevel, leaf: Tensor) -> Tensor:
    return lowest(level, leaf) if level.mapped(leaf) else leaf.expand(level.size, *leaf.shape)


def _aliases(values: list[Tensor], outer: bool) -> list[Tensor]:
    keeps = [outer and value.requires_grad for value in values]
    return [v.view_as(v) if keep else v.detach().requires_grad_() for v, keep in zip(values, keeps, strict=True)]


def pulled_below(level: RecordedLevel, out: Tensor, inputs: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    """Gradients `[*S]`, on the plane of the lanes, of a scalar of each lane: `out`, with respect to values below.

    Zeros where one was not used.
    """
    return [_raised(level, gradient) for gradient in _at_bottom(level, _pulled, out, inputs, create_graph)]


def _pulled(value: Tensor, inputs: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    return _pass_through(value, torch.ones_like(value), inputs, create_graph, create_graph)


def _pass_through(
    value: Tensor, cotangent: Tensor, inputs: Sequence[Tensor], keep: bool, create_graph: bool
) -> list[Tensor]:
    grads: Sequence[Any] = [None] * len(inputs)
    if value.requires_grad:
        options = {"allow_unreachable": True, "accumulate_grad": False}
        grads = run_backward((value,), (cotangent,), keep, create_graph, tuple(inputs), **options)
    grads = [torch.zeros_like(x) if grad is None else with_memory(grad) for grad, x in zip(grads, inputs, strict=True)]
    return freed(grads, inputs) if create_graph else grads


def rows_below(
    level: RecordedLevel, outs: Sequence[Tensor], counts: Sequence[int], inputs: Sequence[Tensor], create_graph: bool
) -> list[Tensor]:
    """Jacobians `[rows, *S]`, on the plane of the lanes, of all numbers that each lane has in `outs`, a pass for each.

    `counts`: how many numbers each of these has in a lane.
    """
    return [_raised(level, rows) for rows in _at_bottom(level, _rows, level, outs, counts, inputs, create_graph)]


def _rows(
    level: Any, outs: Sequence[Tensor], counts: Sequence[int], inputs: Sequence[Tensor], create_graph: bool
) -> list[Tensor]:
    depth = len(list(_down_from(level)))
    rows = []
    for out, count in zip(outs, counts, strict=True):
        for place in range(count):
            cotangent = torch.zeros((*out.shape[:depth], count), dtype=out.dtype, device=out.device)
            cotangent[..., place] = 1
            rows.append(_pass_through(out, cotangent.view(out.shape), inputs, True, create_graph))
    if not rows:
        return [x.new_empty((*x.shape[:depth], 0, *x.shape[depth:])) for x in inputs]
    return [torch.stack(column, depth) for column in zip(*rows)]


# --- the lowest plane ------------------------------------------------------------------------------------------------


def _down_from(level: Any) -> Iterator[Any]:
    while level is not None:
        yield level
        level = level.parent


def lowest(level: Any, tensor: Any) -> Any:
    """The plain value of a tensor that has lanes of a level and of all below it; else None."""
    while level is not None:
        if not level.mapped(tensor):
            return None
        tensor, level = tensor.value, level.parent
    return tensor


def _raised(level: Any, value: Tensor) -> Any:
    """A plain value with lanes of a level and of all below it, on its plane."""
    return value if level is None else level.wrap(_raised(level.parent, value))


def _at_bottom(level: Any, run: Any, *args: Any) -> Any:
    return run(*args) if level is None else level.below(_at_bottom, level.parent, run, *args)
