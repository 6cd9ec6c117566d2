"""`randomness="same"` where lanes part: each draws what it would if all had begun with the same state of the generator.

One draw serves all lanes that have drawn as often before. Lanes that have not are at another state: the generator is
put there before they draw. Where lanes at several states go on together, the largest group of them goes on alone.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.chunk_draws import note_first
from lanewise._core.draws.random import Generators, digest, no_state_for_lanes, note_generator
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import settle
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Disagreement, Lanes, machine, with_around
from lanewise._torch_compat import current_graph_task_id, generator_identity


class State:
    """That of the default generators, or of one of the user's. States with one `digest` are equal."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        with on_plane(None):
            self.saved: Any = Generators() if generator is None else generator.get_state()
            self.digest = digest(generator)

    def restore(self) -> None:
        if self.generator is None:
            self.saved.reseat()
        else:
            self.generator.set_state(self.saved)


def firsts(states: Iterable[State]) -> list[int]:
    """For each of them the place of the first that is equal to it."""
    places: dict[bytes, int] = {}
    return [places.setdefault(state.digest, place) for place, state in enumerate(states)]


class _Numbering:
    """The states of one generator that lanes may come back to, by number.

    It outlives those that run with it: a number stands for one state, also in what runs again.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.count = 0
        self.states: dict[int, State] = {}


class _History:
    """What lanes have drawn from one generator.

    Attributes:
        now: The number of the generator's present state. Each draw leads to a new one.
        numbers: That of the state each lane is at `[root.size]`, None where it is `now` for all.
        begun: `now` and `numbers` before the first draw.
    """

    def __init__(self, numbering: _Numbering, now: int = 0, numbers: Tensor | None = None) -> None:
        self.numbering = numbering
        self.now = now
        self.numbers = numbers
        self.begun = now, numbers

    def copy(self) -> "_History":
        twin = _History(self.numbering, *self.begun)
        twin.now, twin.numbers = self.now, self.numbers
        return twin

    def for_pairs(self, level: LaneLevel) -> "_History":
        """That of the lanes of a `vmap` inside: each begins where its lane of the level around is."""
        self.leave()
        if self.numbers is None:
            return _History(self.numbering, self.now)
        outer, lanes, index = _pairs_of(level)
        with on_plane(None):
            return _History(self.numbering, self.now, self.of(lanes, outer.root)[index.cpu()])

    def end(self, level: LaneLevel, last: Tensor | None) -> None:
        """After the last lane has come to its end: the generator goes on from where that one is, as after a loop."""
        if self.numbers is None:
            return
        outer, lanes, _ = _pairs_of(level)
        with on_plane(None):
            numbers = self._alike(self.numbers, self.numbers.unique().tolist())
            ends = _of_last(numbers.view(1 if outer is None else lanes.size, -1), last).tolist()
        if last is None and outer is not None and outer.randomness == "same" and len(set(ends)) > 1:
            # The level around is not known to have parted: its lanes are all to go on from one state.
            raise parted_by_draws(outer, "vmap")
        self.go_to(ends[-1])

    def end_pairs(self, level: LaneLevel, pairs: "_History", last: Tensor | None) -> None:
        """After a `vmap` inside: each lane goes on from where the last of its own lanes is."""
        outer, lanes, _ = _pairs_of(level)
        with on_plane(None):
            ends = _of_last(pairs.of(level.root, level.root).view(lanes.size, -1), last)
            self.numbers = self.of(outer.root, outer.root).index_copy(0, lanes.positions(outer.root).cpu(), ends)
        self.now = pairs.now

    def begin(self, level: LaneLevel) -> None:
        """Before a draw for the lanes that run."""
        if self.meet(level):
            self.move(level, level.lanes)

    def meet(self, level: LaneLevel) -> bool:
        """Put the generator at the state of the lanes that run, of which fewer may go on. False where none run."""
        if self.numbers is None:
            return level.lanes.size > 0
        numbers = self.of(level.lanes, level.root)
        with on_plane(None):
            found = numbers.unique().tolist()
        if not found:
            return False
        if len(found) > 1:
            settle(level, level.wrap(self._alike(numbers, found)))
        self.go_to(int(self.of(level.lanes, level.root)[0]))
        return True

    def go_to(self, number: int) -> None:
        """Put the generator at the state of that number."""
        if number != self.now:
            self.leave()
            self.numbering.states[number].restore()
            self.now = number

    def move(self, level: LaneLevel, lanes: Lanes) -> None:
        """The generator goes on to a new state, which is that of `lanes`."""
        if self.numbers is None and lanes is level.root:
            self._advance()
            return
        with on_plane(None):
            numbers = self.of(level.root, level.root)
            if int((numbers == self.now).sum()) > lanes.size:
                self.leave()
            self._advance()
            self.numbers = numbers.index_fill(0, lanes.positions(level.root).cpu(), self.now)

    def _advance(self) -> None:
        self.numbering.count += 1
        self.now = self.numbering.count

    def begin_apart(self, level: LaneLevel) -> list[State]:
        """The states that the lanes which run are at, before they draw one after the other and go on to a new one."""
        self.leave()
        states = [self.numbering.states[number] for number in self.of(level.lanes, level.root).tolist()]
        self.move(level, level.lanes)
        return states

    def part(self, level: LaneLevel, which: list[int], states: list[State]) -> None:
        """After a draw: each lane that runs goes on from a state of its own, `states[which[lane]]`.

        That of the first is the generator's present one.
        """
        known = {0: self.now}
        for first in dict.fromkeys(which):
            if first:
                self._advance()
                known[first] = self.now
                self.numbering.states[self.now] = states[first]
        with on_plane(None):
            numbers = self.of(level.root, level.root)
            own = torch.tensor([known[first] for first in which])
            self.numbers = numbers.index_copy(0, level.lanes.positions(level.root).cpu(), own)
        self.now = known[0]

    def leave(self) -> None:
        """Keep the present state, to which lanes may come back."""
        if self.now not in self.numbering.states:
            self.numbering.states[self.now] = State(self.numbering.generator)

    def _alike(self, numbers: Tensor, found: list[int]) -> Tensor:
        """The numbers, one for all equal states."""
        self.leave()
        with on_plane(None):
            for number, place in zip(found, firsts(self.numbering.states[number] for number in found), strict=True):
                numbers = numbers.masked_fill(numbers == number, found[place])
        return numbers

    def of(self, lanes: Lanes, root: Lanes) -> Tensor:
        """The number of the state that each of the lanes is at `[lanes.size]`"""
        with on_plane(None):
            if self.numbers is None:
                return torch.full((lanes.size,), self.now)
            return self.numbers[lanes.positions(root).cpu()]

    def merge(self, root: Lanes, pieces: list[Lanes], each: list[Tensor]) -> None:
        """Lanes that were run one after the other go on together, each set at the numbers it has."""
        with on_plane(None):
            self.numbers = self.of(root, root).clone()
            for lanes, own in zip(pieces, each, strict=True):
                self.numbers[lanes.positions(root).cpu()] = own


def _of_last(numbers: Tensor, last: Tensor | None) -> Tensor:
    """Those of the last lane of each row, or of the given ones."""
    return numbers[:, -1] if last is None else numbers.gather(1, last.cpu()[:, None]).squeeze(1)


class SameDraws:
    """What the lanes of a level have drawn, from each generator."""

    def __init__(self) -> None:
        self.histories: dict[int, _History] = {}

    def begin(self, level: LaneLevel, args: tuple, kwargs: dict) -> None:
        """Before a draw for the lanes that run, of which fewer may go on."""
        if not _draws_same(level):
            return
        generator = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)), None)
        self.history(level, generator).begin(level)

    def history(self, level: LaneLevel, generator: torch.Generator | None) -> _History:
        """What lanes have drawn from a generator, or from the default ones."""
        key = 0 if generator is None else generator_identity(generator)
        if key not in self.histories:
            if generator is not None:
                note_first(generator)
                note_generator(level, generator)
            around = _around(level, generator)
            self.histories[key] = _History(_Numbering(generator)) if around is None else around.for_pairs(level)
        return self.histories[key]

    def end(self, level: LaneLevel, last: Tensor | None = None) -> None:
        """After the last lane: what is drawn next begins as after a loop over the lanes.

        `last`: the lane that ends it, for each lane around or `[1]`, where errors do.
        """
        for history in self.histories.values() if level.root.size else ():
            around = _around(level, history.numbering.generator)
            if around is None:
                history.end(level, last)
            else:
                around.end_pairs(level, history, last)

    def copy(self) -> "SameDraws":
        """The same, for a function that is to run again from here."""
        twin = SameDraws()
        for key, history in self.histories.items():
            twin.histories[key] = history.copy()
        return twin

    def mark(self) -> dict:
        """What lanes have drawn so far, to come back to."""
        return {key: (history.now, history.numbers) for key, history in self.histories.items()}

    def back(self, mark: dict) -> None:
        """To a mark. Whoever runs lanes again puts the generators back."""
        for key, history in self.histories.items():
            history.leave()
            history.now, history.numbers = mark.get(key, history.begun)

    def of(self, lanes: Lanes, root: Lanes) -> dict:
        """What lanes have drawn that have come to an end."""
        return {key: history.of(lanes, root) for key, history in self.histories.items()}

    def merge(self, root: Lanes, pieces: list[Lanes], each: list[dict]) -> None:
        """Sets of lanes that were run one after the other go on together."""
        for key, history in self.histories.items():
            now, numbers = history.begun
            begun = _History(history.numbering, now, numbers)
            rows = [own[key] if key in own else begun.of(lanes, root) for own, lanes in zip(each, pieces, strict=True)]
            history.merge(root, pieces, rows)


def history_of(level: Any, generator: torch.Generator | None) -> _History | None:
    """What the lanes of a level have drawn from a generator, None where they may not part here."""
    return next((history for other, history in histories(generator) if other is level), None)


def histories(generator: torch.Generator | None) -> list[tuple[LaneLevel, _History]]:
    """Each level whose lanes draw the same numbers and may part here, with what they have drawn from a generator.

    Not that of a `vmap` whose lanes are part of the pairs of another one: it learns of it at the end of that.
    """
    if generator is not None and generator_identity(generator) == generator_identity(torch.default_generator):
        generator = None
    return [(call.level, call.draws.history(call.level, generator)) for call in _calls()]


def _calls() -> list[Any]:
    """The innermost call of each such level."""
    found: dict[int, Any] = {}
    paired: set[int] = set()
    for call in reversed(machine.boundaries):
        level = call.level
        if level.order in found or level.order in paired or not _draws_same(level):
            continue
        found[level.order] = call
        paired.update(around.order for around in with_around(level.outer))
    return list(found.values())


class Marks:
    """What the lanes around have drawn before the first of several chunks: each chunk goes on from there."""

    def __init__(self) -> None:
        self.marks = [(call.draws, call.draws.mark()) for call in _calls()]

    def back(self) -> None:
        """Before another chunk, and before the generators are put back."""
        for draws, mark in self.marks:
            draws.back(mark)


def parted_by_draws(level: Any, what: str) -> BaseException:
    """What is raised where lanes of a level, or of those around it, come to states of their own and cannot part yet."""
    parts = next((each for each in with_around(level) if each.restartable), None)
    return no_state_for_lanes(what) if parts is None else Disagreement(parts)


def _around(level: LaneLevel, generator: torch.Generator | None) -> _History | None:
    """What lanes of the level around have drawn, each with its lanes here as pairs."""
    for call in reversed(machine.boundaries) if level.outer is not None else ():
        if call.level is level.outer and _draws_same(call.level):
            return call.draws.history(call.level, generator)
    return None


def _pairs_of(level: LaneLevel) -> tuple[Any, Any, Any]:
    """The level around, its lanes that are part of pairs, and which of them each pair has."""
    return level.outer, level.root.parent, level.root.index


def _draws_same(level: LaneLevel) -> bool:
    return level.randomness == "same" and current_graph_task_id() == level.task
