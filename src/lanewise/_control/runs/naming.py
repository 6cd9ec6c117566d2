"""What lanes are called in messages, and the errors that say which lanes they come from."""

from typing import Any

from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes
from lanewise._core.recording.hooks import HookLevel
from lanewise.errors import name_lanes


def lane_names(level: LaneLevel, lanes: Lanes) -> list:
    """What to call lanes of a level: their numbers, or pairs of numbers with those of the `vmap` around it, in order.

    They are numbers among all lanes, those of other chunks included.
    """
    return sorted(_names(level, lanes))


def _names(level: LaneLevel, lanes: Lanes) -> list:
    if isinstance(level, HookLevel) and isinstance(level.outer, LaneLevel):
        return _names(level.outer, lanes)
    places = lanes.positions(level.root).tolist()
    if level.outer is None or isinstance(level, HookLevel):
        _, start = (level.outer or level).place
        return [start + place for place in places]
    around = level.root.parent
    assert around is not None
    start = level.outer.place[1]
    outer = _names(level.outer, around) if isinstance(level.outer, LaneLevel) else range(start, start + around.size)
    pairs = [divmod(place, level.own_size) for place in places]
    return [(*_as_tuple(outer[i]), level.place[1] + j) for i, j in pairs]


def _as_tuple(name: Any) -> tuple:
    return name if isinstance(name, tuple) else (name,)


class naming_lanes:
    """Says of an error which lanes ran when it was raised."""

    __slots__ = ("level",)

    def __init__(self, level: LaneLevel) -> None:
        self.level = level

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not getattr(error, "lanes", None):
            lanes = self.level.lanes
            if lanes is not self.level.root and lanes.size:
                name_lanes(error, lane_names(self.level, lanes))
