"""Functions that write no values of lanes to what is the same in all of them.

What a function makes, and what it computes from captured tensors alone, takes part as a wrapper, since values of lanes
may be written into it later. For a function that does not write, plain tensors do: they pass no code of this library.
Whether it does is seen at the first call, on a `WatchedLevel`. Later calls run on a `SharedLevel`, where whatever a
plain tensor cannot stand for starts the `vmap` again, with wrappers from then on. So it is with functions whose
gradients are recorded below (recorded.py), and with those that nobody differentiates inside.
"""

from typing import Any

from torch import Tensor

from lanewise._core.again.journal import Journal
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.draws.random import is_random
from lanewise._core.level import standing
from lanewise._core.parting.lanes import Disagreement
from lanewise._core.plane import STATISTICS, Plane, tracked, written_statistics
from lanewise._core.short.recorded import RecordedLevel, SpreadLevel
from lanewise._core.trees import flatten
from lanewise._torch_compat import (
    OUTSIDE_KEY,
    dispatch_mode_count,
    exclude_key,
    is_grad_enabled,
    is_inference_mode_enabled,
    next_node_number,
)
from lanewise._torch_compat import forward_ad as _native

# So many tensors that are the same in all lanes make it worth while.
_WORTH = 8

# Code of functions that run with wrappers.
with_wrappers: set[Any] = set()
# Code of those that need none, with gradients recorded and without.
_without: dict[bool, set[Any]] = {True: set(), False: set()}
# Code of those whose gradients are recorded below, likewise.
_below: dict[bool, set[Any]] = {True: set(), False: set()}
# Of these, code of those that differentiate parameters of layers, which are the same in all lanes.
_spread: dict[bool, set[Any]] = {True: set(), False: set()}
# Code of those for which autograd records on the lowest plane alone, likewise.
_unrecorded: dict[bool, set[Any]] = {True: set(), False: set()}
# Code of those that take no such gradients inside another `vmap`.
_without_gradients: set[Any] = set()
# So many are remembered.
_MOST = 10_000


class WatchedLevel(BatchLevel):
    """The level of a first call.

    Attributes:
        adopted: How many tensors it has adopted.
        fit: Whether plain tensors would have done.
        gradients: How many gradients of its lanes were taken.
        recordable: Whether all of them could have been recorded below (recorded.py).
        spread: Whether that is so with parameters of layers spread over the lanes. None while that is to be seen.
        quiet: Whether no transform has run inside, and nobody has asked what autograd records on this plane.
    """

    __slots__ = ("adopted", "fit", "gradients", "recordable", "spread", "quiet")
    watching = True

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.adopted = 0
        self.fit = self.parent is None
        self.gradients = 0
        self.recordable = True
        self.spread: bool | None = False
        self.quiet = True

    def adopt(self, value: Tensor, origin: tuple | None = None) -> BatchTensor:
        self.adopted += 1
        if value.requires_grad or (origin is not None and not isinstance(origin[0], Plane)):
            self.fit = False
        return super().adopt(value, origin)

    def lift(self, wrapper: BatchTensor) -> None:
        self.fit = False
        super().lift(wrapper)

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        if (func._schema.is_mutable or written_statistics(func, args, kwargs)) and any(map(self.mapped, operands)):
            self.fit = False
        return super().interpret(func, args, kwargs, operands)

    def note_within(self) -> None:
        self.fit = False
        self.note_autograd()

    def note_autograd(self) -> None:
        self.quiet = False
        self.recordable = self.recordable and not standing.orders

    def note_recording(self) -> None:
        self.quiet = False

    def note_gradient(self, recordable: bool) -> None:
        """One was taken, which could have been recorded below, or not."""
        self.gradients += 1
        self.recordable = self.recordable and recordable

    def has_shared(self) -> bool:
        """Whether plain tensors would have done for all that was the same in all lanes, and there was some."""
        return (
            self.fit
            and self.adopted >= _WORTH
            and type(self.journal) is list
            and self.around is None
            and self.picked is None  # a plain tensor takes no number of each lane as an index
            and next_node_number() == self.begun
        )

    def has_recorded(self) -> bool:
        """Whether autograd has recorded something, and nobody asked what."""
        return self.quiet and self.parent is None and next_node_number() != self.begun


class UnrecordedLevel(BatchLevel):
    """The level of a function of captured tensors that require grad, which nobody differentiates inside.

    What is recorded on the plane of the lanes is of use there alone: layers are recorded on the one below only.
    """

    __slots__ = ()
    watching = True
    tentative = True
    unrecorded = True

    def note_within(self) -> None:
        """Start again: what comes may ask for what has not been recorded."""
        raise Disagreement(self)

    note_autograd = note_recording = note_within


class SharedLevel(BatchLevel):
    """The level of a function that writes no values of lanes to what is the same in all: that stays plain tensors.

    Attributes:
        updated: Whether running statistics were updated, for which the function starts again at its end: it is known
            then how to undo that.
    """

    __slots__ = ("_journal", "updated")
    watching = True
    shares = True
    tentative = True

    def __init__(self, *place: Any) -> None:
        self.updated = False
        super().__init__(*place)

    def __enter__(self) -> "SharedLevel":
        try:
            # It stays among the keys that are included, which tells where the user's code runs.
            exclude_key(OUTSIDE_KEY, True)
            return super().__enter__()
        except BaseException:
            self._leave()  # an interrupt
            raise

    def _leave(self) -> None:
        exclude_key(OUTSIDE_KEY, False)
        super()._leave()

    def note_within(self) -> Any:
        """Start again, with wrappers."""
        raise Disagreement(self)

    def adopt(self, value: Tensor, origin: tuple | None = None) -> BatchTensor:
        return self.note_within()

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        if is_random(op):
            return super().factory(op, args, kwargs)
        return self.below(lambda: op(*args, **kwargs))

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        if func in STATISTICS:
            self.updated = self.updated or bool(written_statistics(func, args, kwargs))
        elif func._schema.is_mutable:
            self.note_within()
        return super().interpret(func, args, kwargs, operands)

    def check_end(self) -> None:
        """What autograd records has leaves and hooks, which belong to each lane, as running statistics may."""
        if self.updated or next_node_number() != self.begun:
            self.note_within()

    @property
    def journal(self) -> Any:
        """Not begun, for the arguments are not written to."""
        return self._journal

    @journal.setter
    def journal(self, journal: Any) -> None:
        if type(journal) is Journal and not self.updated:
            self.note_within()
        self._journal = journal


def class_of_level(code: Any, args: tuple, randomness: str) -> type[BatchLevel]:
    """The class of level for a call, by `vmap`, of a function that is not known to run with wrappers."""
    if (
        randomness != "error"
        or standing.orders
        or _native._current_level >= 0
        or dispatch_mode_count()
        or is_inference_mode_enabled()
    ):
        return BatchLevel
    nested = bool(standing.levels)
    if nested and not (code not in _without_gradients and _are_whole(standing.levels)):
        return BatchLevel
    for arg in args:
        for leaf in arg.values() if type(arg) is dict else (arg,):
            if not isinstance(leaf, Tensor) or (tracked(leaf) if nested else leaf.requires_grad):
                return BatchLevel
    grads = is_grad_enabled()
    if code in _without[grads]:
        return BatchLevel if nested else SharedLevel
    if code in _unrecorded[grads]:
        return BatchLevel if nested else UnrecordedLevel
    if code in _below[grads]:
        return SpreadLevel if code in _spread[grads] else RecordedLevel
    return WatchedLevel


def _are_whole(levels: list) -> bool:
    """Whether these are of `vmap`s whose lanes run together, and the running code is on the plane of the last."""
    for level in levels:
        if not isinstance(level, BatchLevel) or level.lanes is not None or level.directions:
            return False
    return standing.here is levels[-1]


def runs_otherwise(level: Any, code: Any, out: Any) -> bool:
    """At the end of a function, on a level of one of these classes: whether it runs on another than a BatchLevel."""
    if type(level) is SharedLevel:
        level.check_end()
        return True
    if isinstance(level, RecordedLevel):
        level.check_end(flatten(out)[0])
        return True
    if type(level) is UnrecordedLevel:
        return True
    if level.has_shared():
        known = _without[level.grad_mode]
    elif level.gradients and level.recordable:
        known = _below[level.grad_mode]
        if level.spread:
            _spread[level.grad_mode].add(code)
    elif level.has_recorded():
        known = _unrecorded[level.grad_mode]
    else:
        known = with_wrappers if level.parent is None else _without_gradients
    if len(known) >= _MOST:
        known.clear()
    known.add(code)
    return known is not with_wrappers


def forget(code: Any) -> None:
    """Run a function with wrappers from now on."""
    with_wrappers.add(code)
    for known in (*_without.values(), *_below.values(), *_spread.values(), *_unrecorded.values()):
        known.discard(code)
