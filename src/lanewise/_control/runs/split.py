"""A function whose lanes part: run with all that agree, then run again for those that were left behind."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.rewriting.convert import converted
from lanewise._control.runs.boundary import boundary
from lanewise._control.runs.failing import is_of_lanes, leave_others
from lanewise._control.runs.one_by_one import Alone
from lanewise._control.runs.results import apart, with_numbers
from lanewise._control.runs.watches import Budget, Telling
from lanewise._control.runs.written import give_back, tell_around, write_components
from lanewise._control.runtime.merging import Mixed
from lanewise._control.runtime.numbers import LaneNumber
from lanewise._core.again.around import undo_writes_around
from lanewise._core.again.journal import Journal
from lanewise._core.again.outside import held_before, reach_of
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.draws.random import Generators, reseat_generators
from lanewise._core.level import current_level, on_plane
from lanewise._core.parting.absent import note
from lanewise._core.parting.causes import Cause, changed_by
from lanewise._core.parting.interleaved import FrontHookedLevel, FrontLevel, lanes_in_front, layout_in_loop
from lanewise._core.parting.joins import settle
from lanewise._core.parting.lane_level import LaneLevel, lanes_of
from lanewise._core.parting.lanes import Restart, arrived, machine, raise_caught
from lanewise._core.parting.leaks import check_results
from lanewise._core.parting.picked import by_number
from lanewise._core.parting.rows import all_pairs
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import recorded, tracked
from lanewise._core.recording.tensor_hooks import HookedLevel, own_value, sets_late_hooks
from lanewise._core.trees import Spec, flatten, unflatten
from lanewise._transforms.arguments import Call
from lanewise._transforms.parting import check_lost, code_of, remember
from lanewise._transforms.ragged import Components, by_component, is_ragged
from lanewise._transforms.vmap import lane_rows, leave

# Code of functions that change what lanes share in a way that converted code cannot, and how, where that is known: they
# run as they were written.
_as_written: dict[Any, Cause | None] = {}


def run_apart(
    call: Call,
    leaves: list,
    dims: list,
    spec: Spec,
    out_dims: Any,
    randomness: str,
    place: tuple[int, int, int],
    results: Sequence[Any] = (),
    budget: Budget | None = None,
) -> Any:
    """One chunk of a `vmap` whose lanes part.

    `results`: those of all lanes on the plane around, if they are known.
    `budget`: where that gives the run up, None comes back, and nothing has changed.
    """
    generators = None if randomness == "error" else Generators()
    jagged = {
        position: Components(leaf, dim, *place[:2])
        for position, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
        if dim is not None and by_component(leaf, dim)
    }
    flat = not (
        jagged or is_ragged(out_dims) or any(isinstance(leaf, BatchTensor) and recorded(leaf) for leaf in leaves)
    )
    code = code_of(call.func)
    held = held_before(reach_of(call.func), leaves)
    unseen = None if held is None else held.unseen
    func = None if unseen or code in _as_written or results else converted(call.func)
    exact = False
    while True:
        level = _level(place, randomness, flat, code)
        if code in by_number:
            level.by_number = True
        if exact:
            level.zeros = None
        if jagged:
            level.has_absent = None  # the function may write to the components, through which a history leaves unseen
        lanes = [
            leaf if dim is None or position in jagged else _entered(level, lane_rows(leaf, dim, place))
            for position, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
        ]
        given = [lane.value for lane, dim in zip(lanes, dims) if dim is not None and not by_component(lane, dim)]
        versions = [None if each.is_inference() else each._version for each in given]
        level.journal, level.arguments = Journal(given), given
        if isinstance(level, FrontLevel):
            level.leave_arguments()
        writes: list[tuple] = []
        try:
            with level:
                if results:
                    note_question(level)  # each example has asked by itself
                thunk = partial(_run, level, func or call.func, lanes, jagged, spec, writes)
                join = partial(with_numbers, out_dims=out_dims)
                alone = None if jagged else Alone(code, call.func, lanes, spec, not is_ragged(out_dims))
                partings = machine.partings
                try:
                    with (budget or Telling(level.root.size)).of(level):
                        out = boundary(
                            level,
                            thunk,
                            join,
                            structured=func is not None,
                            results=results,
                            alone=alone,
                            cause=_as_written.get(code) if unseen is None else changed_by(unseen),
                        )
                except BaseException as error:
                    if is_of_lanes(error):
                        give_back(level, leaves, dims, lanes, place)
                        leave_others(level)
                    raise
                if machine.raised:
                    raise_caught(level, Restart)
                check_lost(level, code)
                leaves_below = [getattr(each, "value", None) for each in flatten(out)[0] if level.owns(each)]
                check_results(level, leaves_below, machine.partings > partings)
                if versions != [None if each.is_inference() else each._version for each in given]:
                    level.has_absent = None  # what has been written to arguments leaves unseen
                give_back(level, leaves, dims, lanes, place)
                tell_around(level, leaves, dims, lanes, place)
                for write in writes:
                    level.below(write_components, *write)
                return leave(level, apart(level, out, out_dims), out_dims, call.func, leaves)
        except BaseException as error:
            restart = arrived(level, error, Restart)
            if restart is None:
                tell_around(level, leaves, dims, lanes, place)
                level.journal.undo_updates()
                raise
            level.journal.undo(level)
            undo_writes_around(level)
            if held is not None:
                held.put_back()
            flat = flat and restart.flat
            if restart.slow:
                return None
            remember(level, code)
            if not restart.structured:
                func = None
                if restart.once:
                    exact = True
                else:
                    _as_written[code] = restart.cause
            if generators is not None:
                generators.reseat()
                reseat_generators(level)


def _run(
    level: LaneLevel, func: Callable, lanes: list, jagged: dict[int, Components], spec: Spec, writes: list[tuple]
) -> Any:
    """Call the function for the lanes that run, of components of nested tensors for those of one shape.

    What it has written to components goes to `writes`, for `write_components`.
    """
    # Each run gets tensors of its own: what one does to their shapes in place is not done to those of others.
    lanes = [level.alias(lane) if level.owns(lane) else lane for lane in lanes]
    if level.hooked:
        for lane in lanes:
            if level.owns(lane) and tracked(lane.value):
                lane.value, lane.origin = own_value(level, lane.value), None
    if not jagged:
        args, kwargs = unflatten(lanes, spec)
        return _settled(level, func(*args, **kwargs))
    _part_by_shape(level, list(jagged.values()))
    places = level.lanes.positions(level.root).tolist()
    rows = {position: level.below(components.stacked, places) for position, components in jagged.items()}
    args, kwargs = unflatten(
        [
            lane if position not in rows else rows[position] if jagged[position].sparse else level.wrap(rows[position])
            for position, lane in enumerate(lanes)
        ],
        spec,
    )
    before, versions = level.lanes, {position: value._version for position, value in rows.items()}
    out = _settled(level, func(*args, **kwargs))
    for position, value in rows.items():
        if value._version != versions[position] and not jagged[position].sparse:
            done = level.lanes
            writes.append((jagged[position], done.positions(level.root), value, done.positions(before)))
    return out


def _settled(level: LaneLevel, out: Any) -> Any:
    """A result in which tensors stand for numbers, where some lanes have these and others tensors."""
    kind = type(out)
    if kind is Mixed:
        return out.settled(level)
    if kind is tuple or kind is list:
        return kind([_settled(level, entry) for entry in out])
    if kind is dict:
        return {key: _settled(level, entry) for key, entry in out.items()}
    if isinstance(out, (Tensor, *_PLAIN)):
        return out
    leaves, spec = flatten(out)
    return unflatten(leaves, spec)


_PLAIN = (int, float, complex, str, bytes, type(None), LaneNumber)


def _part_by_shape(level: LaneLevel, components: list[Components]) -> None:
    """Go on with the largest group of lanes whose components have the same shapes."""
    numbers: dict[tuple, int] = {}
    each = [
        numbers.setdefault(tuple(one.kind(place) for one in components), len(numbers))
        for place in level.lanes.positions(level.root).tolist()
    ]
    with on_plane(None):
        rows = torch.tensor(each, dtype=torch.int64)
    note_question(level)
    settle(level, level.wrap(rows))


def _level(place: tuple[int, int, int], randomness: str, flat: bool, code: Any) -> LaneLevel:
    """A level for the lanes of this call, or for all pairs of them and those of the `vmap` right around (`flat`).

    Not for pairs where the one draws for each lane and the other once for all, and not where each draws and code around
    may run again for some lanes: with fewer of them, there would be other numbers for each.
    """
    start, length, total = place
    around = current_level()
    hooks, front = code in sets_late_hooks, code in lanes_in_front
    kind = (FrontHookedLevel if hooks else FrontLevel) if front else HookedLevel if hooks else LaneLevel
    if not flat or not isinstance(around, BatchLevel):
        return kind(length, randomness, total, start)
    if "error" in (randomness, around.randomness):
        randomness = "error"
    elif randomness != around.randomness or (randomness == "different" and _runs_as_written(around)):
        return kind(length, randomness, total, start)
    return kind(length, randomness, total, start, around)


def _runs_as_written(level: BatchLevel) -> bool:
    """Whether lanes of a level are left behind for all that has been drawn for them."""
    return isinstance(level, LaneLevel) and machine.level is not level


def _entered(level: LaneLevel, rows: Tensor) -> BatchTensor:
    """An argument `[B, *S]` on the plane of the level."""
    outer = level.outer
    if outer is None:
        return level.wrap(rows)
    layout = layout_in_loop(rows) if outer.mapped(rows) else None
    strides = (rows.stride() if layout is None else layout.strides)[1:]
    if isinstance(outer, LaneLevel):
        rows = outer.here(rows)
    value = outer.below(
        _of_pairs, outer.physical(rows), outer.mapped(rows), lanes_of(outer).size, strides, level.in_front
    )
    if outer.mapped(rows):
        note(level, value, "rows", level.root, lanes_of(outer), level.root.index)
    return level.wrap(value)


def _of_pairs(value: Tensor, mapped: bool, outer: int, strides: Sequence[int], front: bool) -> Tensor:
    """`[outer, B, *S]`, or `[B, *S]` for all outer lanes -> `[outer * B, *S]`"""
    if not mapped:
        value = value.expand(outer, *value.shape)
    return all_pairs(value, strides, front)
