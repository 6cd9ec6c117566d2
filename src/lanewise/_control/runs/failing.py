"""Errors of some lanes: which of them a loop over the examples would come to, and whose they are around."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs.naming import naming_lanes
from lanewise._core.again.journal import Journal
from lanewise._core.draws.same_draws import SameDraws
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import can_settle, narrow
from lanewise._core.parting.lane_level import LaneLevel, lanes_of
from lanewise._core.parting.lanes import (
    BeginAgain,
    Disagreement,
    Lanes,
    OperationFailed,
    Restart,
    machine,
    true_places,
)
from lanewise._torch_compat import StopRecomputation
from lanewise.errors import CheckError, LanewiseError

# What says how to go on, or comes from outside, is of no lanes.
_OF_NONE = (Disagreement, Restart, BeginAgain, KeyboardInterrupt, GeneratorExit, StopRecomputation)


def is_of_lanes(error: BaseException) -> bool:
    """Whether an error is that of the lanes that run, and code around may catch it."""
    return not isinstance(error, _OF_NONE) and all(raised is OperationFailed for raised, *_ in machine.raised)


def attempt(level: LaneLevel, thunk: partial) -> tuple[Any, Exception | None]:
    """What `thunk` returns, or an error that a loop may not come to, as lanes before may have another."""
    try:
        with naming_lanes(level):
            return thunk(), None
    except Exception as error:
        own = isinstance(error, LanewiseError) and not isinstance(error, CheckError)
        if own or isinstance(error, (MemoryError, torch.OutOfMemoryError)) or not is_of_lanes(error):
            raise
        return None, error


class Failure:
    """An error of some lanes.

    Attributes:
        error: The error.
        lanes: Those that have it.
        drawn: What they have drawn.
    """

    __slots__ = ("error", "lanes", "drawn")

    def __init__(self, error: Exception, level: LaneLevel, draws: SameDraws) -> None:
        self.error = error
        self.lanes = level.lanes
        self.drawn = draws.of(level.lanes, level.root)

    def comes(self, level: LaneLevel, draws: SameDraws) -> Exception:
        """The error, which the lanes have that are to go on."""
        level.lanes = self.lanes
        draws.merge(level.root, [self.lanes], [self.drawn])
        return self.error


def earlier(level: LaneLevel, base: Lanes, pieces: list[Lanes]) -> Tensor:
    """The positions in `base` of lanes that a loop comes to before the first of those that run.

    Among pairs, of those of the same lane around. Not those of `pieces`, which have come to an end.
    """
    number, first = _numbers(level, base)
    with on_plane(None):
        mask = number < first
        for piece in pieces:
            mask[piece.positions(base)] = False
        return true_places(mask)


def end_there(level: LaneLevel, base: Lanes, journal: Journal, draws: SameDraws) -> None:
    """An error of the lanes that run leaves their `vmap`: all is as a loop leaves it that comes no further."""
    if journal.copies and not journal.outlives():
        number, first = _numbers(level, base)
        with on_plane(None):
            later = true_places((number > first) & (first >= 0))
        journal.undo(level, later)
    if draws.histories:
        draws.end(level, _firsts(level) % level.own_size)


def _numbers(level: LaneLevel, base: Lanes) -> tuple[Tensor, Tensor]:
    """The numbers of lanes in their `vmap`, and of the first that runs for the same lane around; -1 for none."""
    with on_plane(None):
        places = base.positions(level.root)
        return places % level.own_size, _firsts(level)[places // level.own_size]


def _firsts(level: LaneLevel) -> Tensor:
    """For each lane around, or `[1]`, the number of the first of its own lanes that runs, -1 for none."""
    size = level.own_size
    with on_plane(None):
        running = level.lanes.positions(level.root)
        first = torch.full((level.root.size // size,), size, device=running.device)
        first.scatter_reduce_(0, running // size, running % size, "amin")
        return first.masked_fill_(first == size, -1)


def leave_others(level: LaneLevel) -> None:
    """After an error of some pairs of lanes: lanes around that have none of them are left behind, and run again."""
    outer: Any = level.outer
    around = level.root.parent
    if outer is None or around is None or lanes_of(outer) is not around or not can_settle(outer):
        return
    with on_plane(None):
        mask = torch.zeros(around.size, dtype=torch.bool)
        mask[level.root.index[level.lanes.positions(level.root)]] = True
        failing = true_places(mask)
    if failing.shape[0] in (0, around.size):
        return
    if isinstance(outer, LaneLevel):
        narrow(outer, failing)
    else:
        machine.raised.append((OperationFailed, outer, True))
