"""A function whose lanes part: run with all that agree, then run again for those that were left behind."""

from functools import partial
from typing import Any

from torch import Tensor

from lanewise._control.boundary import boundary
from lanewise._control.convert import converted
from lanewise._control.results import put_together, without_numbers
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.journal import Journal
from lanewise._core.lane_level import LaneLevel, lanes_of
from lanewise._core.lanes import Restart
from lanewise._core.level import current_level
from lanewise._core.plane import recorded
from lanewise._core.trees import Spec, unflatten
from lanewise._transforms.arguments import Call
from lanewise._transforms.chunks import Generators
from lanewise._transforms.parting import code_of
from lanewise._transforms.vmap import lane_rows, leave

# Code of functions that change what lanes share in a way that converted code cannot: they run as they were written.
_as_written: set[Any] = set()


def run_apart(
    call: Call, leaves: list, dims: list, spec: Spec, out_dims: Any, randomness: str, place: tuple[int, int, int]
) -> tuple[list, list, Spec]:
    """One chunk of a `vmap` whose lanes part."""
    generators = None if randomness == "error" else Generators()
    flat = not any(isinstance(leaf, BatchTensor) and recorded(leaf) for leaf in leaves)
    code = code_of(call.func)
    func = None if code in _as_written else converted(call.func)
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
                thunk = partial(func or call.func, *args, **kwargs)
                out = without_numbers(boundary(level, thunk, put_together, structured=func is not None))
                return leave(level, out, out_dims, call.func, leaves)
        except Restart as restart:
            if restart.level is not level:
                raise
            level.journal.undo(level)
            flat = flat and restart.flat
            if not restart.structured:
                func = None
                _as_written.add(code)
            if generators is not None:
                generators.reseat()


def _level(place: tuple[int, int, int], randomness: str, flat: bool) -> LaneLevel:
    """A level for the lanes of this call, or for all pairs of them and those of the `vmap` right around (`flat`).

    Not for pairs where the one draws for each lane and the other once for all.
    """
    start, length, total = place
    around = current_level()
    if not flat or not isinstance(around, BatchLevel):
        return LaneLevel(length, randomness, total, start)
    if "error" in (randomness, around.randomness):
        randomness = "error"
    elif randomness != around.randomness:
        return LaneLevel(length, randomness, total, start)
    return LaneLevel(length, randomness, total, start, around)


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

