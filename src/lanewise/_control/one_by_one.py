"""Lanes that each take a way of their own: run one by one on the plane below, as a loop over the examples would."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.naming import naming_lanes
from lanewise._core.journal import Journal
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import Lanes, Stretch, child, machine
from lanewise._core.leaf_gradients import shared_gradients, show_gradients
from lanewise._core.random import drawn_without_leave
from lanewise._core.trees import flatten, unflatten

# By code of a function: of so many lanes each took a way of its own, and where they parted.
_each_its_own: dict[Any, tuple[int, Any]] = {}


class Alone:
    """How lanes of a `vmap` run one by one.

    Attributes:
        code: What the function is known by.
        call: The call of the function as it was written. No values of the level but the arguments reach it.
    """

    __slots__ = ("code", "call")

    def __init__(self, code: Any, call: partial) -> None:
        self.code = code
        self.call = call

    def may_run(self, level: LaneLevel, journal: Journal) -> bool:
        """Whether the plane below will do. (There, a lane does not write to the records of what each lane does.)"""
        return level.randomness == "error" and level.outer is None and not journal.own

    def known(self, lanes: int) -> bool:
        """Whether so many lanes are likely to take a way of their own each."""
        return self.code in _each_its_own and 0 < lanes <= _each_its_own[self.code][0]

    def note(self, lanes: int, place: tuple[str, int] | None) -> None:
        """So many lanes did, and parted in that line."""
        if self.code not in _each_its_own or lanes > _each_its_own[self.code][0]:
            _each_its_own[self.code] = lanes, place

    @property
    def place(self) -> tuple[str, int] | None:
        """Where they parted."""
        return _each_its_own[self.code][1]

    def run(self, level: LaneLevel, lanes: Lanes, gradients: list) -> list[tuple]:
        """The call for each of the lanes.

        `gradients`: what shared leaves show before.

        Returns:
            Sets of lanes, their results, and what shared leaves show then: one set where the results can be stacked.
        """
        call = self.call
        leaves, spec = flatten((call.args, call.keywords))
        places = lanes.positions(level.root).tolist()
        given = [(place, level.physical(leaf), leaf.mapped) for place, leaf in enumerate(leaves) if level.owns(leaf)]
        results: list[Any] = []
        shown: list[list[tuple]] = []

        def run_each() -> None:
            for number, row in enumerate(places):
                level.lanes = _one_of(lanes, number)
                for place, value, mapped in given:
                    leaves[place] = value.select(0, row) if mapped else value
                args, kwargs = unflatten(leaves, spec)
                results.append(call.func(*args, **kwargs))
                shown.append(shared_gradients(level))
                show_gradients(level, gradients)

        running, machine.level = machine.level, None
        state = torch.get_rng_state()
        try:
            with naming_lanes(level):
                level.user_code_below(run_each)
        finally:
            machine.level = running
        if not torch.equal(state, torch.get_rng_state()):
            # Below, nobody asks for `randomness`, which is "error" here.
            raise drawn_without_leave("in a lane that ran by itself")
        level.lanes = lanes
        together = None if any(shown) else _stacked(level, results)
        if together is not None:
            return [(lanes, together, [])]
        found = []
        for place, (result, own) in enumerate(zip(results, shown)):
            parts, structure = flatten(result)
            parts = [level.adopt(part) if isinstance(part, Tensor) else part for part in parts]
            found.append((_one_of(lanes, place), unflatten(parts, structure), own))
        return found


def _one_of(lanes: Lanes, place: int) -> Lanes:
    return child(lanes, Stretch(place, 1))


def _stacked(level: LaneLevel, results: list[Any]) -> Any:
    """Results `[*S]` of lanes that ran alone as one with lanes; None where they are not tensors of the same kinds."""
    first, spec = flatten(results[0])
    columns = [first]
    for result in results[1:]:
        parts, structure = flatten(result)
        if structure != spec:
            return None
        columns.append(parts)
    by_leaf = list(zip(*columns))
    if not all(isinstance(part, Tensor) and _alike(part, parts[0]) for parts in by_leaf for part in parts):
        return None
    return unflatten([level.wrap(level.below(torch.stack, parts)) for parts in by_leaf], spec)


def _alike(part: Tensor, first: Tensor) -> bool:
    strided = part.layout is first.layout is torch.strided
    return strided and part.shape == first.shape and part.dtype is first.dtype and part.device == first.device
