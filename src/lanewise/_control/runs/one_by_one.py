"""Lanes that each take a way of their own: run one by one on the plane below, as a loop over the examples would."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs.naming import naming_lanes
from lanewise._control.runs.telling import Told
from lanewise._core.again.journal import Journal
from lanewise._core.draws.random import drawn_without_leave
from lanewise._core.level import on_plane
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, Restart, Stretch, child, machine
from lanewise._core.parting.unasked import note_question
from lanewise._core.recording.leaf_gradients import shared_gradients, show_gradients
from lanewise._core.trees import LEAF, Spec, flatten, unflatten
from lanewise._transforms.numbers import fits, same_number

# By code of a function: of so many lanes each took a way of its own, and what is told of that.
_each_its_own: dict[Any, tuple[int, Told]] = {}


def noted(code: Any) -> Told | None:
    """Why lanes of a function each take a way of their own, and where, if they do."""
    return _each_its_own[code][1] if code in _each_its_own else None


# Functions in which a `vmap` was seen to return a Python number: where those of lanes differ, or others have a tensor,
# all of them are to have one with the lanes inside, as they do where the lanes of both run together.
_kept_together: set[Any] = set()


def _kind(code: Any, func: Callable) -> Any:
    """The code of a function, and of the transform that has made it of that."""
    return code, getattr(func, "__code__", None)


def may_be_alone(code: Any, func: Callable) -> bool:
    """Whether lanes of a function, known by `code`, may run one by one: whether no such `vmap` is in it."""
    return _kind(code, func) not in _kept_together


def keep_together(code: Any, func: Callable) -> None:
    """They may not from now on."""
    _kept_together.add(_kind(code, func))


class Alone:
    """How lanes of a `vmap` run one by one.

    Attributes:
        code: What the function is known by.
        func: The function as it was written.
        leaves, spec: Its arguments. No values of the level but these reach it.
        numbers: Whether numbers that they return may become a tensor with lanes.
    """

    __slots__ = ("code", "func", "leaves", "spec", "numbers")

    def __init__(self, code: Any, func: Callable, leaves: list, spec: Spec, numbers: bool) -> None:
        self.code = code
        self.func = func
        self.leaves = leaves
        self.spec = spec
        self.numbers = numbers

    def may_run(self, level: LaneLevel, journal: Journal) -> bool:
        """Whether the plane below will do. (There, a lane does not write to the records of what each lane does.)"""
        if level.randomness != "error" or level.outer is not None or journal.own:
            return False
        return may_be_alone(self.code, self.func)

    def known(self, lanes: int) -> bool:
        """Whether so many lanes are likely to take a way of their own each."""
        return self.code in _each_its_own and 0 < lanes <= _each_its_own[self.code][0]

    def note(self, lanes: int, told: Told) -> None:
        """So many lanes did, for that reason."""
        if self.code not in _each_its_own or lanes > _each_its_own[self.code][0]:
            _each_its_own[self.code] = lanes, told

    @property
    def told(self) -> Told:
        """Where they parted, and why."""
        return _each_its_own[self.code][1]

    def run(self, level: LaneLevel, lanes: Lanes, gradients: list) -> list[tuple]:
        """The call for each of the lanes.

        `gradients`: what shared leaves show before.

        Returns:
            Sets of lanes, their results, and what shared leaves show then: one set where the results can be stacked.
        """
        leaves, spec, func = list(self.leaves), self.spec, self.func
        places = lanes.positions(level.root).tolist()
        given = [(place, level.physical(leaf), leaf.mapped) for place, leaf in enumerate(leaves) if level.owns(leaf)]
        flat = spec == positional(len(leaves))
        results: list[Any] = []
        shown: list[list[tuple]] = []

        def run_each() -> None:
            for number, row in enumerate(places):
                level.lanes = _one_of(lanes, number)
                for place, value, mapped in given:
                    leaves[place] = value.select(0, row) if mapped else value
                if flat:
                    results.append(func(*leaves))
                else:
                    args, kwargs = unflatten(leaves, spec)
                    results.append(func(*args, **kwargs))
                own = shared_gradients(level)
                shown.append(own)
                if own or gradients:
                    show_gradients(level, gradients)

        def give_up() -> None:
            keep_together(self.code, func)
            raise Restart(level, structured=True)

        running, machine.level = machine.level, None
        around, machine.alone = machine.alone, give_up
        state = torch.get_rng_state()
        try:
            with naming_lanes(level):
                level.user_code_below(run_each)
        finally:
            machine.level = running
            machine.alone = around
        if not torch.equal(state, torch.get_rng_state()):
            # Below, nobody asks for `randomness`, which is "error" here.
            raise drawn_without_leave("in a lane that ran by itself")
        level.lanes = lanes
        note_question(level)  # each has asked by itself, on the plane below
        if not any(shown):
            return [(piece, value, []) for piece, value in pieces_of(level, lanes, results, self.numbers)]
        each = _one_each(level, lanes, results)
        return [(piece, value, own) for (piece, value), own in zip(each, shown)]


@functools.cache
def positional(count: int) -> Spec:
    """The structure of `(args, kwargs)` where so many leaves are the arguments."""
    return flatten(((None,) * count, {}))[1]


def _one_of(lanes: Lanes, place: int) -> Lanes:
    return child(lanes, Stretch(place, 1))


# --- results ---------------------------------------------------------------------------------------------------------

_NUMBERS = frozenset([bool, int, float, complex])
_BY_VALUE = frozenset([str, bytes, type(None)])


def pieces_of(level: LaneLevel, lanes: Lanes, results: Sequence[Any], others: bool = False) -> list[tuple[Lanes, Any]]:
    """Results `[*S]` that lanes have on the plane below, on this one: as one with lanes, or one for each.

    `others`: as for `stacked`.
    """
    found = level.below(stacked, results, others)
    if found is None:
        return _one_each(level, lanes, results)
    leaves, spec = found
    running, level.lanes = level.lanes, lanes
    parts = [level.wrap(leaf) if has_lanes else leaf for leaf, has_lanes in leaves]
    level.lanes = running
    return [(lanes, unflatten(parts, spec))]


def _one_each(level: LaneLevel, lanes: Lanes, results: Sequence[Any]) -> list[tuple[Lanes, Any]]:
    found = []
    for place, result in enumerate(results):
        parts, structure = flatten(result)
        parts = [level.adopt(part) if isinstance(part, Tensor) else part for part in parts]
        found.append((_one_of(lanes, place), unflatten(parts, structure)))
    return found


def stacked(results: Sequence[Any], others: bool = True) -> tuple[list[tuple[Any, bool]], Spec] | None:
    """Results `[*S]` of several lanes: each leaf of them stacked `[n, *S]`, or what it is in all; and whether it is.

    None where they cannot be stacked as they are, or are no tensors and these count not (`others`).
    """
    if all(isinstance(result, Tensor) for result in results):
        leaf = _together(results, others)
        return None if leaf is None else ([leaf], LEAF)
    first, spec = flatten(results[0])
    columns = [first]
    for result in results[1:]:
        parts, structure = flatten(result)
        if structure != spec:
            return None
        columns.append(parts)
    leaves = [_together(column, others) for column in zip(*columns)]
    return None if None in leaves else (leaves, spec)  # type: ignore[return-value]


def _together(column: Sequence[Any], others: bool) -> tuple[Any, bool] | None:
    first = column[0]
    if isinstance(first, Tensor):
        if len(column) > 1 and column[-1] is first and all(part is first for part in column):
            return first, False
        return (torch.stack(list(column)), True) if _all_alike(column) else None
    kind = type(first)
    if not others or any(type(part) is not kind for part in column):
        return None
    if all(part is first for part in column):
        return first, False
    if kind in _NUMBERS:
        if all(same_number(part, first) for part in column):
            return first, False
        if kind is int and not all(map(fits, column)):
            return None
        with on_plane(None):
            return torch.tensor(column), True
    return (first, False) if kind in _BY_VALUE and all(part == first for part in column) else None


def _all_alike(parts: Sequence[Any]) -> bool:
    first = parts[0]
    if first.is_nested:
        return False  # its shape may not be asked for
    shape, dtype, device = first.shape, first.dtype, first.device
    for part in parts:
        if not isinstance(part, Tensor) or part.layout is not torch.strided or part.is_nested:
            return False
        if part.shape != shape or part.dtype is not dtype or part.device != device:
            return False
    return True
