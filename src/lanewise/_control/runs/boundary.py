"""A call whose lanes part: run with all that agree, then run again for those that were left behind."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs import pacing
from lanewise._control.runs.failing import Failure, attempt, earlier, end_there, is_of_lanes
from lanewise._control.runs.one_by_one import Alone, pieces_of
from lanewise._control.runs.telling import Told, told
from lanewise._core.again.journal import Journal
from lanewise._core.again.lines import now, take_back
from lanewise._core.draws.chunk_draws import Ends
from lanewise._core.draws.random import Generators, reseat_generators
from lanewise._core.draws.same_draws import SameDraws
from lanewise._core.level import on_plane
from lanewise._core.parting.causes import Cause
from lanewise._core.parting.joins import MANY_WAYS, boundary_of, can_settle, narrow
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Boundary, Lanes, Restart, child, machine, merge_target
from lanewise._core.recording.leaf_gradients import merge_gradients, shared_gradients, show_gradients
from lanewise.errors import SlowPathWarning, warn_at_user_line

# After many runs with fewer lanes than these done in each, the rest run one by one; so do lanes known to differ all.
# (An operation on a few lanes takes about as long as in a loop over four examples.)
_WORTH = 4
# More runs than one for so many lanes are worth telling of.
_FEW = 8


def boundary(
    level: LaneLevel,
    thunk: partial,
    join: Callable[..., Any],
    *,
    structured: bool = False,
    results: Sequence[Any] = (),
    alone: Alone | None = None,
    cause: Cause | None = None,
) -> Any:
    """Run `thunk` for all lanes that run, as often as they part, and `join(level, target, pieces, values)`.

    Where `thunk` calls converted code (`structured`), most of the time they part and meet again in there. What a run
    wrote for lanes that it left behind is undone before they run again, and they draw the same random numbers. Lanes
    that were seen to differ in a value do not run together again.

    After an error, those run that have it. That of a `vmap` is the one that a loop over the lanes comes to.

    `results`: those of all lanes on the plane below, if they are known.
    `alone`: how they run one by one; None where they have to do so on the level.
    `cause`: why `thunk` runs as it was written, though it can be converted.
    """
    base = level.lanes
    around, outer_journal, depth = machine.level, level.journal, len(machine.boundaries)
    call = boundary_of(level)
    draws = SameDraws() if call is None else call.draws
    here = Boundary(level, base, draws)
    mark = draws.mark()
    drawn_by: list[dict] = []
    # The function of the `vmap` itself: what was there before is what it was given.
    given = outer_journal.given if call is None and outer_journal is not None else None
    journal = level.journal = Journal(given, base)
    generators = None if level.randomness == "error" else Generators()
    ends = Ends() if level.randomness == "different" else None
    pieces: list[Lanes] = []
    values: list[Any] = []
    waiting: Tensor | None = None
    one_by_one = False
    why: Told | None = None
    before = shared_gradients(level)
    printed = now()
    drawn, level.drawn = level.drawn, None
    shared: list[list[tuple]] = []
    failure: Failure | None = None
    failed = base

    def start_again(rows: Tensor) -> None:
        take_back(level, printed, base if waiting is None else child(base, waiting))
        if journal.refits and around is level:
            raise Restart(level)
        if call is not None and journal.outlives():
            raise Restart(level)  # in the function around, what was written to is made anew, with its history
        if structured and level.randomness == "different" and generators is not None:
            if level.drawn or not generators.equals(Generators()):
                raise Restart(level)  # converted code draws for the lanes of each branch by themselves
        journal.undo(level, rows)
        draws.back(mark)
        if generators is not None:
            generators.reseat()
            reseat_generators(level)
        level.lanes = child(base, rows)

    try:
        machine.level = level if structured else None
        machine.boundaries.append(here)
        if results:
            waiting = _no_places()
            for lanes, value in pieces_of(level, base, results):
                pieces.append(lanes)
                values.append(value)
                shared.append([])
                drawn_by.append({})
        elif alone is not None and alone.known(base.size) and alone.may_run(level, journal):
            with on_plane(None):
                waiting = torch.arange(base.size)
            one_by_one, why = True, alone.told
        while waiting is None or waiting.shape[0]:
            if one_by_one and waiting is not None and alone is not None and alone.may_run(level, journal):
                started = time.thread_time()
                for lanes, value, gradients in alone.run(level, child(base, waiting), before):
                    pieces.append(lanes)
                    values.append(value)
                    shared.append(gradients)
                    drawn_by.append({})
                if why is not None and base.size > MANY_WAYS and time.thread_time() - started >= pacing.FREE:
                    _warn_one_by_one(base.size, why)
                break
            begun_with = level.lanes
            value, error = attempt(level, thunk)
            if error is not None:
                failure = Failure(error, level, draws)
                waiting = earlier(level, base, pieces) if call is None and level.lanes.size else _no_places()
                if waiting.shape[0]:
                    start_again(waiting)
                continue
            done = level.lanes
            if level.zeros is None and done is not begun_with:
                # Once more, for these alone from the start: what came before they parted has rows of others, too.
                show_gradients(level, before)
                start_again(done.positions(base))
                continue
            values.append(value)
            pieces.append(done)
            if done is base:
                if call is None:
                    draws.end(level)
                return values[0]
            if ends is not None:
                ends.note([generator for generator, _ in (level.drawn or {}).values()])
            shared.append(shared_gradients(level))
            drawn_by.append(draws.of(done, level.root))
            show_gradients(level, before)
            waiting = _without(base, waiting, done)
            if not waiting.shape[0]:
                if ends is not None:
                    ends.go_on()
                if not one_by_one and len(pieces) > MANY_WAYS and base.size < _FEW * len(pieces):
                    ways = f"took {len(pieces)} different ways"
                    _warn(base.size, ways, "may take longer than", told(here.calls, cause))
                break
            rows = waiting[:1] if one_by_one else here.alike(waiting)
            if not one_by_one:
                # Where the largest group is of one lane, so are all others.
                few = len(pieces) >= MANY_WAYS and base.size - waiting.shape[0] < _WORTH * len(pieces)
                one_by_one = few or rows.shape[0] == 1
                if one_by_one:
                    rows = waiting if alone is not None and alone.may_run(level, journal) else waiting[:1]
                    runs = len(pieces) + waiting.shape[0]
                    if runs > MANY_WAYS and _WORTH * runs > base.size:
                        why = told(here.calls, cause)
                        if rows is not waiting:
                            _warn_one_by_one(base.size, why)
                        if alone is not None:
                            alone.note(base.size, why)
            start_again(rows)
        if failure is not None:
            raise failure.comes(level, draws)
    except BaseException as error:
        if is_of_lanes(error) and level.lanes.size:
            failed = level.lanes
            if call is None:
                end_there(level, base, journal, draws)
        raise
    finally:
        del machine.boundaries[depth:]
        machine.level = around
        level.lanes = failed if call is None else base
        level.journal = outer_journal
        level.drawn = {**(level.drawn or {}), **(drawn or {})} or None
        if outer_journal is not None:
            journal.pass_on(outer_journal)
        if failed is not base and call is not None and can_settle(level):
            narrow(level, failed.positions(base))
    target = merge_target(base, pieces)
    merge_gradients(level, base, pieces, shared)
    draws.merge(level.root, pieces, drawn_by)
    if call is None:
        draws.end(level)
    return join(level, target, pieces, values)


def _no_places() -> Tensor:
    with on_plane(None):
        return torch.arange(0)


def _without(base: Lanes, waiting: Tensor | None, done: Lanes) -> Tensor:
    """The positions in `base` that are still waiting."""
    places = done.positions(base)
    with on_plane(None):
        mask = torch.zeros(base.size, dtype=torch.bool, device=places.device)
        if waiting is None:
            mask[:] = True
        else:
            mask[waiting] = True
        mask[places] = False
        return mask.nonzero().squeeze(1)


def _warn_one_by_one(lanes: int, why: Told) -> None:
    _warn(lanes, f"take {MANY_WAYS} different ways and more", "takes about as long as", why)


def _warn(lanes: int, ways: str, long: str, why: Told) -> None:
    warn_at_user_line(
        SlowPathWarning(
            f"vmap: the {lanes} lanes {ways} through code that is run again for each of them, which {long} a "
            f"Python loop over them{why.rows}\nWrite instead:\n  {why.instead}"
        )
    )
