"""Lanes that each take a way of their own: run one by one on the plane below, as a loop over the examples would."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs.naming import naming_lanes
from lanewise._control.runs.telling import Told
from lanewise._core.again.journal import Journal
from lanewise._core.draws.random import drawn_without_leave
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, Restart, Stretch, child, machine
from lanewise._core.recording.leaf_gradients import shared_gradients, show_gradients
from lanewise._core.trees import Spec, flatten, unflatten

# By code of a function: of so many lanes each took a way of its own, and what is told of that.
_each_its_own: dict[Any, tuple[int, Told]] = {}


class _Times:
    """What calls of a function take with about so many lanes, by the time that the thread works.

    Attributes:
        parted: Seconds of a call whose lanes part and meet again, the least that was seen.
        calls: How many such calls there were, in which lanes parted often and did little in between.
        needed: After so many it is tried how long they take one by one. (The first one also converts code.)
    """

    __slots__ = ("parted", "calls", "needed")

    def __init__(self) -> None:
        self.parted = math.inf
        self.calls = 0
        self.needed = 2


# By code of a function, and by the number of binary digits of how many lanes there are.
_times: dict[Any, _Times] = {}

# Functions in which a `vmap` was seen to return a Python number: where those of lanes differ, or others have a tensor,
# all of them are to have one with the lanes inside, as they do where the lanes of both run together.
_not_alone: set[Any] = set()

# Lanes that part so often in a call, and work for less than so many seconds in between, may be quicker one by one. So
# many seconds that takes at least, to begin with and for each lane.
_OFTEN, _LITTLE, _BEGIN, _EACH = 8, 4e-4, 2e-4, 1e-5
# After so many lanes the clock is looked at. Where they took too long, so many times the calls pass before another try.
_STRIDE, _LATER = 8, 8


class Alone:
    """How lanes of a `vmap` run one by one.

    Attributes:
        code: What the function is known by.
        func: The function as it was written.
        leaves, spec: Its arguments. No values of the level but these reach it.
        quiet: Whether it changes no objects.
    """

    __slots__ = ("code", "func", "leaves", "spec", "quiet")

    def __init__(self, code: Any, func: Callable, leaves: list, spec: Spec, quiet: bool) -> None:
        self.code = code
        self.func = func
        self.leaves = leaves
        self.spec = spec
        self.quiet = quiet

    def may_run(self, level: LaneLevel, journal: Journal) -> bool:
        """Whether the plane below will do. (There, a lane does not write to the records of what each lane does.)"""
        if level.randomness != "error" or level.outer is not None or journal.own:
            return False
        return self._kind not in _not_alone

    @property
    def _kind(self) -> Any:
        """The code of the function, and of the transform that has made it of that."""
        return self.code, getattr(self.func, "__code__", None)

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

    def note_time(self, lanes: int, partings: int, seconds: float) -> None:
        """So many lanes of converted code, which wrote to nothing of before, parted so often and took so long."""
        if not self.quiet or partings < _OFTEN or not _BEGIN + _EACH * lanes < seconds < _LITTLE * partings:
            return
        times = _times.setdefault((self.code, lanes.bit_length()), _Times())
        times.parted = min(times.parted, seconds)
        times.calls += 1

    def limit(self, lanes: int) -> float:
        """How long so many lanes of converted code may take one by one: as long as together. 0: not worth a try."""
        times = _times.get((self.code, lanes.bit_length())) if self.quiet else None
        return 0.0 if times is None or times.calls < times.needed else times.parted

    def _took_longer(self, lanes: int) -> None:
        times = _times[self.code, lanes.bit_length()]
        times.parted, times.calls, times.needed = math.inf, 0, _LATER * times.needed

    def run(self, level: LaneLevel, lanes: Lanes, gradients: list, limit: float = math.inf) -> list[tuple]:
        """The call for each of the lanes.

        `gradients`: what shared leaves show before.
        `limit`: the seconds after which no other lane begins, if those before it can stay though the rest starts again.

        Returns:
            Sets of lanes, their results, and what shared leaves show then: one set where the results can be stacked.
        """
        leaves, spec, func = list(self.leaves), self.spec, self.func
        places = lanes.positions(level.root).tolist()
        given = [(place, level.physical(leaf), leaf.mapped) for place, leaf in enumerate(leaves) if level.owns(leaf)]
        flat = spec == _positional(len(leaves))
        results: list[Any] = []
        shown: list[list[tuple]] = []
        timed = limit < math.inf
        begun = time.thread_time() if timed else 0.0
        versions = [None if value.is_inference() else value._version for _, value, _ in given] if timed else []

        def may_stop() -> bool:
            return not any(shown) and None not in versions and versions == [value._version for _, value, _ in given]

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
                if timed and not len(results) % _STRIDE and time.thread_time() - begun > limit and may_stop():
                    break

        def give_up() -> None:
            _not_alone.add(self._kind)
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
        if timed and time.thread_time() - begun > limit:
            self._took_longer(lanes.size)
        level.lanes = lanes
        together = None if any(shown) else _stacked(level, results)
        if together is not None:
            return [(_first(lanes, len(results)), together, [])]
        found = []
        for place, (result, own) in enumerate(zip(results, shown)):
            parts, structure = flatten(result)
            parts = [level.adopt(part) if isinstance(part, Tensor) else part for part in parts]
            found.append((_one_of(lanes, place), unflatten(parts, structure), own))
        return found


@functools.cache
def _positional(count: int) -> Spec:
    """The structure of `(args, kwargs)` where so many leaves are the arguments."""
    return flatten(((None,) * count, {}))[1]


def _first(lanes: Lanes, count: int) -> Lanes:
    return lanes if count == lanes.size else child(lanes, Stretch(0, count))


def _one_of(lanes: Lanes, place: int) -> Lanes:
    return child(lanes, Stretch(place, 1))


def _stacked(level: LaneLevel, results: list[Any]) -> Any:
    """Results `[*S]` of lanes that ran alone as one with lanes; None where they are not tensors of the same kinds."""
    if all(type(result) is Tensor for result in results):
        return _one(level, results) if _all_alike(results) else None
    first, spec = flatten(results[0])
    columns = [first]
    for result in results[1:]:
        parts, structure = flatten(result)
        if structure != spec:
            return None
        columns.append(parts)
    by_leaf = list(zip(*columns))
    if not all(all(isinstance(part, Tensor) for part in parts) and _all_alike(parts) for parts in by_leaf):
        return None
    return unflatten([_one(level, parts) for parts in by_leaf], spec)


def _one(level: LaneLevel, parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if parts[-1] is first and all(part is first for part in parts):
        return first if len(parts) > 1 else level.wrap(level.below(first.unsqueeze, 0))
    return level.wrap(level.below(torch.stack, parts))


def _all_alike(parts: Sequence[Tensor]) -> bool:
    if parts[0].is_nested:
        return False  # its shape may not be asked for
    shape, dtype, device = parts[0].shape, parts[0].dtype, parts[0].device
    for part in parts:
        if part.layout is not torch.strided or part.is_nested:
            return False
        if part.shape != shape or part.dtype is not dtype or part.device != device:
            return False
    return True
