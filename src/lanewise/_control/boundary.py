"""A call whose lanes part: run with all that agree, then run again for those that were left behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.results import lane_names
from lanewise._core.autograd import merge_gradients, shared_gradients, show_gradients
from lanewise._core.chunk_draws import Ends
from lanewise._core.joins import boundary_of
from lanewise._core.journal import Journal
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import Boundary, Lanes, Restart, child, machine, merge_target
from lanewise._core.level import on_plane
from lanewise._core.random import Generators, drawn_without_leave, reseat_generators
from lanewise._core.same_draws import SameDraws
from lanewise._core.trees import flatten, unflatten
from lanewise.errors import SlowPathWarning, warn_at_user_line

# After so many runs with fewer than two lanes done in each, the rest run one by one; so do lanes known to differ all.
_MANY = 8


def boundary(
    level: LaneLevel, thunk: partial, join: Callable[..., Any], *, structured: bool = False, alone: bool = False
) -> Any:
    """Run `thunk` for all lanes that run, as often as they part, and `join(level, target, pieces, values)`.

    Where `thunk` calls converted code (`structured`), most of the time they part and meet again in there. What a run
    wrote for lanes that it left behind is undone before they run again, and they draw the same random numbers. Lanes
    that were seen to differ in a value do not run together again.

    `alone`: no values of the level but the arguments reach `thunk`, so that one lane can run on the plane below.
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
    run: Callable[[], Any] = thunk
    before = shared_gradients(level)
    drawn, level.drawn = level.drawn, None
    shared: list[list[tuple]] = []
    try:
        machine.level = level if structured else None
        machine.boundaries.append(here)
        while True:
            with _naming_lanes(level):
                values.append(run())
            done = level.lanes
            pieces.append(done)
            if done is base:
                return values[0]
            if ends is not None:
                ends.note([generator for generator, _ in (level.drawn or {}).values()])
            shared.append(shared_gradients(level))
            drawn_by.append(draws.of(done, level.root))
            show_gradients(level, before)
            waiting = waiting[1:] if run is not thunk else _without(base, waiting, done)  # type: ignore[index]
            if not waiting.shape[0]:
                if ends is not None:
                    ends.go_on()
                break
            rows = waiting[:1] if one_by_one else here.alike(waiting)
            if not one_by_one:
                # Where the largest group is of one lane, so are all others.
                few = len(pieces) >= _MANY and base.size - waiting.shape[0] < 2 * len(pieces)
                one_by_one = few or rows.shape[0] == 1
                if one_by_one:
                    rows = waiting[:1]
                    runs = len(pieces) + waiting.shape[0]
                    if runs > _MANY and 2 * runs > base.size:
                        _warn_one_by_one(base)
                    # (A lane by itself would not write to the records of what each lane does.)
                    if alone and generators is None and level.outer is None and not journal.own:
                        run = _alone(level, thunk)
            if journal.refits and around is level:
                raise Restart(level)
            if call is not None and journal.outlives():
                raise Restart(level)  # in the function around, what was written to is made anew, with its history
            journal.undo(level, rows)
            draws.back(mark)
            if generators is not None:
                generators.reseat()
                reseat_generators(level)
            level.lanes = child(base, rows)
    finally:
        del machine.boundaries[depth:]
        machine.level = around
        level.lanes = base
        level.journal = outer_journal
        level.drawn = {**(level.drawn or {}), **(drawn or {})} or None
        if outer_journal is not None:
            journal.pass_on(outer_journal)
    target = merge_target(base, pieces)
    merge_gradients(level, target, pieces, shared)
    draws.merge(level.root, pieces, drawn_by)
    return join(level, target, pieces, values)


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


def _alone(level: LaneLevel, thunk: partial) -> Callable[[], Any]:
    """The call for a lane that runs alone, on the plane below, as a loop over the examples would make it."""
    leaves, spec = flatten((thunk.args, thunk.keywords))
    given = [(place, leaf) for place, leaf in enumerate(leaves) if level.owns(leaf)]

    def run() -> Any:
        row = int(level.lanes.positions(level.root))
        for place, leaf in given:
            value = level.physical(leaf)
            leaves[place] = level.below(torch.select, value, 0, row) if leaf.mapped else value
        args, kwargs = unflatten(leaves, spec)
        running, machine.level = machine.level, None
        state = torch.get_rng_state()
        try:
            out = level.user_code_below(partial(thunk.func, *args, **kwargs))
        finally:
            machine.level = running
        if not torch.equal(state, torch.get_rng_state()):
            # Below, nobody asks for `randomness`, which is "error" here.
            raise drawn_without_leave("in a lane that ran by itself")
        if isinstance(out, Tensor):
            return level.adopt(out)
        results, structure = flatten(out)
        return unflatten([level.adopt(leaf) if isinstance(leaf, Tensor) else leaf for leaf in results], structure)

    return run


def _warn_one_by_one(base: Lanes) -> None:
    warn_at_user_line(
        SlowPathWarning(
            f"vmap: the {base.size} lanes take {_MANY} different ways and more through code that is run again for each "
            "of them: the rest run one by one, at about the speed of a Python loop"
        )
    )


class _naming_lanes:
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
                name_lanes(error, self.level, lanes)


def name_lanes(error: Exception, level: LaneLevel, lanes: Lanes) -> None:
    """Put the lanes that ran on an error: the attribute `lanes`, and a note where Python has notes."""
    places = lane_names(level, lanes)
    error.lanes = places  # type: ignore[attr-defined]
    shown = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
    if hasattr(error, "add_note"):
        error.add_note(  # type: ignore[attr-defined]
            f"lanewise: raised while {'lane' if len(places) == 1 else 'lanes'} {shown} ran"
        )
