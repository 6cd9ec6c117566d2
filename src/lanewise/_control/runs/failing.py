"""Errors of some lanes: which of them a loop over the examples would come to, and whose they are around."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs.naming import naming_lanes
from lanewise._core.again.journal import Journal
from lanewise._core.draws.random import Generators
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import boundary_of, can_settle, narrow
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
from lanewise.errors import CheckError, LanewiseError

# What says how to go on, or comes from outside, is of no lanes.
_OF_NONE = (Disagreement, Restart, BeginAgain, KeyboardInterrupt, GeneratorExit)


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
    """

    __slots__ = ("error", "lanes")

    def __init__(self, error: Exception, lanes: Lanes) -> None:
        self.error = error
        self.lanes = lanes


def earlier(level: LaneLevel, base: Lanes, pieces: list[Lanes]) -> Tensor:
    """The positions in `base` of lanes that a loop comes to before the first of those that run.

    Among pairs, of those of the same lane around. Not those of `pieces`, which have come to an end.
    """
    with on_plane(None):
        number, first = _numbers(level, base)
        mask = number < first
        for piece in pieces:
            mask[piece.positions(base)] = False
        return true_places(mask)


def _after(level: LaneLevel, base: Lanes) -> Tensor:
    """The positions in `base` of lanes that it comes to after that."""
    with on_plane(None):
        number, first = _numbers(level, base)
        return true_places((number > first) & (first >= 0))


def _numbers(level: LaneLevel, base: Lanes) -> tuple[Tensor, Tensor]:
    """The numbers of lanes in their `vmap`, and of the first that runs for the same lane around; -1 for none."""
    size = level.root.size if level.outer is None else level.own_size
    places, running = base.positions(level.root), level.lanes.positions(level.root)
    first = torch.full((level.root.size // size,), size, device=places.device)
    first.scatter_reduce_(0, running // size, running % size, "amin")
    first[first == size] = -1
    return places % size, first[places // size]


def undo_after(level: LaneLevel, base: Lanes, journal: Journal) -> None:
    """After an error of the lanes that run, undo what was written for those that a loop does not come to."""
    if journal.copies and not journal.outlives():
        journal.undo(level, _after(level, base))


def leave_others(level: LaneLevel, generators: Generators | None) -> None:
    """After an error of some pairs of lanes: lanes around that have none of them are left behind, and run again.

    `generators`: their states before the level began, None where nothing may be drawn.
    """
    outer: Any = level.outer
    around = level.root.parent
    if outer is None or around is None or lanes_of(outer) is not around or not can_settle(outer):
        return
    with on_plane(None):
        mask = torch.zeros(around.size, dtype=torch.bool)
        mask[level.root.index[level.lanes.positions(level.root)]] = True
        failing = true_places(mask)
    if failing.shape[0] == around.size:
        return
    if not isinstance(outer, LaneLevel):
        machine.raised.append((OperationFailed, outer))
        return
    if level.randomness == "different" and generators is not None:
        if level.drawn or not generators.equals(Generators()):
            # With fewer lanes around, there would be other numbers for each of them.
            if machine.level is not outer:
                raise Restart(level, structured=True, flat=False)
            call = boundary_of(outer)
            if call is not None:
                call.drew = True
    narrow(outer, failing)
