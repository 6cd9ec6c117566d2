"""Ranges whose bounds differ from lane to lane, and the order in which lanes leave a loop over one."""

import operator
from collections.abc import Iterator
from typing import Any

import torch

from lanewise._control.runtime.numbers import LaneNumber
from lanewise._control.runtime.replacements import as_number, stands_for, with_lanes
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import component, plainly
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, Stretch, child
from lanewise._core.parting.lanes import numpy as np


class LaneRange:
    """A range whose bounds differ from lane to lane."""

    __slots__ = ("start", "stop", "step")

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        self.start = start
        self.stop = stop
        self.step = step

    def rounds(self, loop: Any) -> Iterator[Any]:
        """Its numbers; `loop.more` says before each which lanes have it."""
        number, step, stop = self.start, self.step, self.stop
        rising = step > 0
        queue = _queue(loop.frame.level, self)
        if queue is not None:
            queue.stand_in(loop)
        while True:
            more = None if queue is None else queue.sides(loop.frame.level.lanes)
            if more is None:
                queue = None
                more = number < stop if rising else number > stop
            loop.more = more
            yield number
            number = number + step

    def plain(self) -> range:
        """The range of the lanes that go on."""
        return range(operator.index(self.start), operator.index(self.stop), operator.index(self.step))

    def __iter__(self) -> Iterator[int]:
        return iter(self.plain())

    def __reversed__(self) -> Iterator[int]:
        return reversed(self.plain())

    def __len__(self) -> int:
        return len(self.plain())

    def __getitem__(self, index: Any) -> Any:
        return self.plain()[index]

    def __contains__(self, number: Any) -> bool:
        return number in self.plain()

    def __eq__(self, other: Any) -> bool:
        return self.plain() == (other.plain() if isinstance(other, LaneRange) else other)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __repr__(self) -> str:
        return f"range({self.start!r}, {self.stop!r}, {self.step!r})"


@stands_for(range)
def range_(*args: Any) -> Any:
    """`range(...)`"""
    if not any(with_lanes(arg) for arg in args):
        return range(*args)
    bounds = [as_number(arg) for arg in args]
    if not any(isinstance(bound, LaneNumber) for bound in bounds):
        return range(*bounds)
    for bound in bounds:
        kind = bound.kind if isinstance(bound, LaneNumber) else type(bound)
        if not issubclass(kind, int):
            raise TypeError(f"'{kind.__name__}' object cannot be interpreted as an integer")
    start, stop = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    step = bounds[2] if len(bounds) == 3 else 1
    if isinstance(step, LaneNumber):
        step = step.resolve()  # its sign says which way to go
    if step == 0:
        raise ValueError("range() arg 3 must not be zero")
    return LaneRange(start, stop, step)


# --- the order of leaving --------------------------------------------------------------------------------------------

# So many lanes, in so many groups that leave together, are worth an order; and so many rounds its numbers can count.
_LANES, _GROUPS, _ROUNDS = 256, 4, 2**16


class Sides(tuple):
    """Which lanes go on, and which do not: both known beforehand."""


class _Queue:
    """The lanes of a loop, those first that stay longest: each round is for a first stretch of them.

    A loop-carried value is then cut short in each round, where it would be gathered, and no lane is asked again.

    Attributes:
        lanes: The set in that order.
        staying: How many go on, by round.
        round: That about to begin.
    """

    __slots__ = ("lanes", "staying", "round")

    def __init__(self, lanes: Lanes, staying: list[int]) -> None:
        self.lanes = lanes
        self.staying = staying
        self.round = 0

    def stand_in(self, loop: Any) -> None:
        """Let the loop run for the lanes in this order; at its end they come together as they were."""
        loop.frame.level.lanes = loop.top = self.lanes
        loop.parts = True

    def sides(self, lanes: Lanes) -> Sides | bool | None:
        """What the lanes that run do next; None where others than those expected do: some have left by themselves."""
        size = self.staying[self.round - 1] if self.round else self.lanes.size
        if lanes.size != size or not lanes.within(self.lanes) or lanes.start_in(self.lanes) != 0:
            return None
        stay = self.staying[self.round]
        self.round += 1
        if stay in (0, size):
            return stay > 0
        return Sides((Stretch(0, stay), Stretch(stay, size - stay)))


def _queue(level: LaneLevel | None, numbers: LaneRange) -> _Queue | None:
    """The order in which the lanes that run leave a loop over `numbers`; None where it is not worth it."""
    start, stop, step = numbers.start, numbers.stop, numbers.step
    if np is None or level is None or level.lanes.size < _LANES or type(start) is not int:
        return None
    part = component(level, stop.value) if isinstance(stop, LaneNumber) else None
    if part is None or part.level is not level or not part.mapped or part.dtype is not torch.int64:
        return None
    rows = plainly(level.here(part).value)
    if not rows.is_cpu:
        return None
    stops = rows.reshape(-1).numpy()
    low, high = int(stops.min()), int(stops.max())
    most = len(range(start, high if step > 0 else low, step)) if max(-low, high, abs(start)) < 2**62 else _ROUNDS
    if most >= _ROUNDS:
        return None
    # [n]: how many rounds each lane takes.
    rounds = (abs(np.maximum(stops, start) - start if step > 0 else start - np.minimum(stops, start)) - 1) // abs(
        step
    ) + 1
    leaving = np.bincount(rounds, minlength=most + 1)
    if np.count_nonzero(leaving) < _GROUPS:
        return None
    # Of 16 bits, which NumPy sorts by their digits: ten times as fast as torch, which compares.
    order = np.argsort((most - rounds).astype(np.uint16), kind="stable")
    staying = stops.shape[0] - leaving.cumsum()
    with on_plane(None):
        places = torch.from_numpy(order)
    return _Queue(child(level.lanes, places), staying.tolist())
