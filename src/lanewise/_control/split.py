"""A function whose lanes part: run with all that agree, then run again for those that were left behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.results import put_together
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.journal import Journal
from lanewise._core.lane_level import LaneLevel, lanes_of
from lanewise._core.lanes import Boundary, Lanes, Restart, child, machine, merge_target
from lanewise._core.level import current_level, on_plane
from lanewise._core.plane import recorded
from lanewise._core.trees import Spec, unflatten
from lanewise._transforms.arguments import Call
from lanewise._transforms.chunks import Generators
from lanewise._transforms.vmap import lane_rows, leave
from lanewise.errors import SlowPathWarning, warn_at_user_line

# After so many runs with fewer than two lanes done in each, the rest run one by one.
_MANY = 16


def run_apart(
    call: Call, leaves: list, dims: list, spec: Spec, out_dims: Any, randomness: str, place: tuple[int, int, int]
) -> tuple[list, list, Spec]:
    """One chunk of a `vmap` whose lanes part."""
    generators = None if randomness == "error" else Generators()
    flat = not any(isinstance(leaf, BatchTensor) and recorded(leaf) for leaf in leaves)
    while True:
        level = _level(place, randomness, flat)
        lanes = [
            leaf if dim is None else _entered(level, lane_rows(leaf, dim, place))
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        given = [lane.value for lane, dim in zip(lanes, dims) if dim is not None]
        level.journal = Journal(given)
        try:
            with level:
                args, kwargs = unflatten(lanes, spec)
                out = boundary(level, partial(call.func, *args, **kwargs), put_together)
                return leave(level, out, out_dims, call.func, leaves)
        except Restart as restart:
            if restart.level is not level:
                raise
            level.journal.undo(level)
            flat = flat and restart.flat
            if generators is not None:
                generators.reseat()


def _level(place: tuple[int, int, int], randomness: str, flat: bool) -> LaneLevel:
    """A level for the lanes of this call, or for all pairs of them and those of the `vmap` right around (`flat`)."""
    start, length, total = place
    around = current_level()
    return LaneLevel(length, randomness, total, start, around if flat and isinstance(around, BatchLevel) else None)


def _entered(level: LaneLevel, rows: Tensor) -> BatchTensor:
    """An argument `[B, *S]` on the plane of the level."""
    outer = level.outer
    if outer is None:
        return level.wrap(rows)
    if isinstance(outer, LaneLevel):
        rows = outer.here(rows)
    value = outer.below(_all_pairs, outer.physical(rows), outer.mapped(rows), lanes_of(outer).size)
    return level.wrap(value)


def _all_pairs(value: Tensor, mapped: bool, outer: int) -> Tensor:
    """`[outer, B, *S]`, or `[B, *S]` for all outer lanes -> `[outer * B, *S]`"""
    if not mapped:
        value = value.expand(outer, *value.shape)
    return value.flatten(0, 1)


def boundary(level: LaneLevel, thunk: Callable[[], Any], join: Callable[..., Any]) -> Any:
    """Run `thunk` for all lanes that run, as often as they part, and `join(level, target, pieces, values)`.

    What a run wrote for lanes that it left behind is undone before they run again, and they draw the same random
    numbers.
    """
    base = level.lanes
    around, outer_journal = machine.level, level.journal
    machine.level = None
    machine.boundaries.append(Boundary(level, base))
    journal = level.journal = Journal(None, base)
    generators = None if level.randomness == "error" else Generators()
    pieces: list[Lanes] = []
    values: list[Any] = []
    waiting: Tensor | None = None
    one_by_one: list[int] | None = None
    try:
        while True:
            with _naming_lanes(level):
                values.append(thunk())
            done = level.lanes
            pieces.append(done)
            if done is base:
                return values[0]
            waiting = _without(base, waiting, done)
            if not waiting.shape[0]:
                break
            if one_by_one is None and len(pieces) >= _MANY and base.size - waiting.shape[0] < 2 * len(pieces):
                _warn_one_by_one(base)
                one_by_one = []
            rows = waiting if one_by_one is None else waiting[:1]
            journal.undo(level, rows)
            if generators is not None:
                generators.reseat()
            level.lanes = child(base, rows)
    finally:
        machine.boundaries.pop()
        machine.level = around
        level.lanes = base
        level.journal = outer_journal
        if outer_journal is not None:
            journal.pass_on(outer_journal)
    target = merge_target(base, pieces)
    return join(level, target, pieces, values)


def _without(base: Lanes, waiting: Tensor | None, done: Lanes) -> Tensor:
    """The positions in `base` that are still waiting."""
    places = done.positions(base)
    with on_plane(None):
        mask = torch.zeros(base.size, dtype=torch.bool, device=places.device)
        if waiting is None:
            mask[:] = True
        else:
            mask[waiting] = True
        mask[places] = False
        return mask.nonzero().squeeze(1)


def _warn_one_by_one(base: Lanes) -> None:
    warn_at_user_line(
        SlowPathWarning(
            f"vmap: the {base.size} lanes take {_MANY} different ways and more through code that is run again for each "
            "of them: the rest run one by one, at about the speed of a Python loop"
        )
    )


class _naming_lanes:
    """Says of an error which lanes ran when it was raised."""

    __slots__ = ("level",)

    def __init__(self, level: LaneLevel) -> None:
        self.level = level

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not hasattr(error, "lanes"):
            lanes = self.level.lanes
            if lanes is not self.level.root and lanes.size:
                name_lanes(error, self.level, lanes)


def name_lanes(error: Exception, level: LaneLevel, lanes: Lanes) -> None:
    """Put the lanes that ran on an error: the attribute `lanes`, and a note where Python has notes."""
    places = lanes.positions(level.root).tolist()
    error.lanes = places  # type: ignore[attr-defined]
    shown = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
    if hasattr(error, "add_note"):
        error.add_note(  # type: ignore[attr-defined]
            f"lanewise: raised while {'lane' if len(places) == 1 else 'lanes'} {shown} ran"
        )
