"""Lines that code of lanes prints, held back until it is certain that it does not run again for them."""

import builtins
import itertools
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Disagreement, Lanes, Restart, machine


class Column(NamedTuple):
    """What a level says of some lanes: the place of each in the root of the level, and its number in its `vmap`."""

    level: Any
    places: Sequence[int]
    numbers: Sequence[int]


class Line:
    """A text of one lane.

    Attributes:
        places: The place of the lane in each level.
        key: The numbers of the lane, outermost first.
        made, told: When there first was such a line, and when code said last what it is.
        again: Whether that code runs again for the lane, and will say so once more.
    """

    __slots__ = ("text", "places", "key", "file", "made", "told", "again")

    def __init__(self, text: str, places: dict[Any, int], key: tuple[int, ...]) -> None:
        self.text = text
        self.places = places
        self.key = key
        self.file = sys.stdout
        self.made = self.told = next(_lines.clock)
        self.again = False


class _Lines(threading.local):
    """Lines that are held back, in order.

    Attributes:
        awaited: Those that code will print again, by the numbers of their lane.
        since: When the function of a level first printed, for the levels that may have it print again.
    """

    def __init__(self) -> None:
        self.held: list[Line] = []
        self.awaited: dict[tuple[int, ...], deque[Line]] = {}
        self.since: dict[Any, int] = {}
        self.clock = itertools.count()


_lines = _Lines()


def columns(level: Any, lanes: Lanes | None) -> list[Column]:
    """Some lanes of a level (None: all), and those of levels around it whose lanes are part of its pairs."""
    if not isinstance(level, LaneLevel):
        each = range(level.size) if lanes is None else lanes.positions(lanes.root()).tolist()
        return [Column(level, each, each)]
    places = (level.lanes if lanes is None else lanes).positions(level.root).tolist()
    around = level.root.parent
    if around is None:
        return [Column(level, places, places)]
    pairs = [divmod(place, level.own_size) for place in places]
    outer = [
        Column(found.level, [found.places[i] for i, _ in pairs], [found.numbers[i] for i, _ in pairs])
        for found in columns(level.outer, around)
    ]
    return [*outer, Column(level, places, [j for _, j in pairs])]


def hold(levels: list[Any], line: Line) -> None:
    """Print a line once the outermost of the open levels has ended, with which nothing runs again."""
    for level in levels:
        if level not in _lines.since:
            _lines.since[level] = line.told
            level.closing = [*(level.closing or ()), lambda level=level: _end(level)]
    before = _lines.awaited.get(line.key)
    if before:
        place = before.popleft()
        place.text, place.places, place.file, place.told = line.text, line.places, line.file, line.told
        place.again = False
    else:
        _lines.held.append(line)


def now() -> int:
    """A time, for `take_back`."""
    return next(_lines.clock) if _lines.held else 0


def take_back(level: LaneLevel, begun: int, lanes: Lanes) -> None:
    """Some lanes of a level run again from where they were at the time `begun`."""
    if _lines.held:
        places = frozenset(lanes.positions(level.root).tolist())
        for line in _lines.held:
            if line.told >= begun and line.places.get(level) in places:
                line.again = True
        _await()


def _await() -> None:
    _lines.awaited.clear()
    for line in _lines.held:
        if line.again:
            _lines.awaited.setdefault(line.key, deque()).append(line)


def _end(level: Any) -> None:
    """The function of a level ends: what it printed is for nothing where it starts again."""
    begun = _lines.since.pop(level)
    error = sys.exc_info()[1]
    given_up = isinstance(error, (Disagreement, Restart)) and error.level is level
    if given_up or any(owner is level and kind in (Disagreement, Restart) for kind, owner, *_ in machine.raised):
        _lines.held = [line for line in _lines.held if line.made < begun]
        for line in _lines.held:
            line.again = line.again or line.told >= begun
    elif not _lines.since:
        lines, _lines.held = _lines.held, []
        for line in lines:
            # Where an error ends the function, those lanes may not have run again.
            if error is not None or not line.again:
                builtins.print(line.text, file=line.file)
    _await()
