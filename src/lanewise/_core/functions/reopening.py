"""The level of an application of a Function, on other planes than those it was opened on.

A formula runs below planes that the function itself ran above, or long after its `vmap` has ended. It may find values
of lanes elsewhere than among its operands, in a closure or on an object, and these belong to the level that the
function ran on: so that level is the one on which the formula runs, too.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lanewise._core.again.journal import Journal
from lanewise._core.batch import BatchLevel
from lanewise._core.dual import DualLevel
from lanewise._core.level import Level, on_plane, standing
from lanewise._core.parting.interleaved import arguments_of
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes
from lanewise._core.plane import Plane
from lanewise._torch_compat import FACTORY_KEY, OUTSIDE_KEY, current_graph_task_id, include_key, tls_is_included

# One thread at a time: passes of several may come to one level.
_reopening, _PATIENCE = threading.RLock(), 10.0
_SEAT = ("order", "include", "exclude", "grad_mode", "begun", "pinned", "parent", "modes", "task")


def is_open(level: BatchLevel) -> bool:
    """Whether code of the level is running in this thread."""
    return level.alive and level in standing.levels


@contextmanager
def reopened(level: BatchLevel, place: tuple, running: Lanes) -> Iterator[BatchLevel | None]:
    """A level that has ended, to be entered above the current plane; None if another thread keeps it for long.

    Args:
        level: The level.
        place: What `BatchLevel` is made of: its size, its randomness, and where its lanes are among all.
        running: Its lanes that ran when the Function was applied.
    """
    if not _reopening.acquire(timeout=_PATIENCE):
        yield None  # it waits for this thread, perhaps
        return
    try:
        if level.alive:
            yield None
            return
        given = arguments_of(level)
        vars(level).clear()  # what was to be done at its end, and what was known of its function
        _seat(level, running)
        level.size, level.randomness, level.total, level.start = place
        level.journal, level.arguments = Journal([]), given
        yield level
    finally:
        _reopening.release()


class reseated:
    """Stand on a level that is open, above the current plane, which lies below planes that are below the level."""

    __slots__ = ("level", "running", "seat", "lanes", "plane", "inside", "outside")

    def __init__(self, level: BatchLevel, running: Lanes) -> None:
        self.level = level
        self.running = running

    def __enter__(self) -> BatchLevel:
        level = self.level
        self.seat = [(name, getattr(level, name)) for name in _SEAT]
        self.lanes = level.lanes
        modes = level.modes
        _seat(level, self.running)
        level.modes = modes
        self.inside, self.outside = tls_is_included(FACTORY_KEY), tls_is_included(OUTSIDE_KEY)
        self.plane = on_plane(level)
        self.plane.__enter__()
        include_key(FACTORY_KEY, True)
        include_key(OUTSIDE_KEY, True)
        return level

    def __exit__(self, *exc: object) -> None:
        include_key(FACTORY_KEY, self.inside)
        include_key(OUTSIDE_KEY, self.outside)
        self.plane.__exit__(*exc)
        for name, value in self.seat:
            setattr(self.level, name, value)
        self.level.lanes = self.lanes


def _seat(level: BatchLevel, running: Lanes) -> None:
    """Put a level above the current plane, with these of its lanes."""
    Level.__init__(level)
    if isinstance(level, LaneLevel):
        level.lanes = running
        level.task = current_graph_task_id()
    else:
        level.all_lanes = running


def without_tangents(values: tuple, operands: tuple) -> tuple:
    """Values without tangents that no operand has: those of what a formula finds elsewhere, which count for nothing."""
    if not any(isinstance(value, Plane) for value in values):
        return values
    known: set[Level] = set()
    for part in operands:
        while isinstance(part, Plane):
            known.add(part.level)
            part = part.value

    def primal(value: Any) -> Any:
        while isinstance(value, Plane) and isinstance(value.level, DualLevel) and value.level not in known:
            value = value.level.primal(value)
        return value

    return tuple(map(primal, values))
