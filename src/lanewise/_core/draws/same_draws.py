"""`randomness="same"` where lanes part: each draws what it would if all had begun with the same state of the generator.

One draw serves all lanes that have drawn as often before. Lanes that have not are at another state: the generator is
put there before they draw. Where lanes at several states go on together, the largest group of them goes on alone.
"""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.random import Generators, note_generator, reseat
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import settle
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, machine
from lanewise._torch_compat import current_graph_task_id, generator_identity


class State:
    """Those of the default generators, or of one of the user's."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        with on_plane(None):
            self.saved: Any = Generators() if generator is None else generator.get_state()

    def restore(self) -> None:
        if self.generator is None:
            self.saved.reseat()
        else:
            self.generator.set_state(self.saved)

    def equals(self, other: "State") -> bool:
        with on_plane(None):
            return self.saved.equals(other.saved) if self.generator is None else torch.equal(self.saved, other.saved)

    @staticmethod
    def alike(states: list["State"]) -> list[int]:
        """For each of them the place of the first that is equal to it."""
        firsts: list[int] = []
        each = []
        for place, state in enumerate(states):
            first = next((first for first in firsts if states[first].equals(state)), place)
            if first == place:
                firsts.append(place)
            each.append(first)
        return each


class _History:
    """What lanes have drawn from one generator.

    Attributes:
        now: The number of the generator's present state. Each draw leads to a new one.
        numbers: That of the state each lane is at `[root.size]`, None where it is `now` for all.
        states: Those that the generator has left behind, by number.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.now = self.count = 0
        self.numbers: Tensor | None = None
        self.states: dict[int, State] = {}

    def copy(self) -> "_History":
        twin = _History(self.generator)
        twin.now, twin.count, twin.numbers, twin.states = self.now, self.count, self.numbers, dict(self.states)
        return twin

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
        number = int(self.of(level.lanes, level.root)[0])
        if number != self.now:
            self.leave()
            self.states[number].restore()
            self.now = number
        return True

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
        self.count += 1
        self.now = self.count

    def begin_apart(self, level: LaneLevel) -> list[State]:
        """The states that the lanes which run are at, before they draw one after the other and go on to a new one."""
        self.leave()
        states = [self.states[number] for number in self.of(level.lanes, level.root).tolist()]
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
                self.states[self.now] = states[first]
        with on_plane(None):
            numbers = self.of(level.root, level.root)
            own = torch.tensor([known[first] for first in which])
            self.numbers = numbers.index_copy(0, level.lanes.positions(level.root).cpu(), own)
        self.now = known[0]

    def leave(self) -> None:
        """Keep the present state, to which lanes may come back."""
        if self.now not in self.states:
            self.states[self.now] = State(self.generator)

    def _alike(self, numbers: Tensor, found: list[int]) -> Tensor:
        """The numbers, one for all equal states."""
        self.leave()
        for place, number in enumerate(found):
            first = next(one for one in found[: place + 1] if self.states[one].equals(self.states[number]))
            with on_plane(None):
                numbers = numbers.masked_fill(numbers == number, first)
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


class SameDraws:
    """What the lanes of a level have drawn, from each generator."""

    def __init__(self) -> None:
        self.histories: dict[int, _History] = {}

    def begin(self, level: LaneLevel, args: tuple, kwargs: dict) -> None:
        """Before a draw for the lanes that run, of which fewer may go on."""
        if level.randomness != "same" or current_graph_task_id() != level.task:
            return
        generator = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)), None)
        self.history(level, generator).begin(level)

    def history(self, level: LaneLevel, generator: torch.Generator | None) -> _History:
        """What lanes have drawn from a generator, or from the default ones."""
        key = 0 if generator is None else generator_identity(generator)
        if key not in self.histories:
            if generator is not None:
                total, start = level.place
                if total != level.own_size:
                    reseat(generator, level.order, start)
                note_generator(level, generator)
            self.histories[key] = _History(generator)
        return self.histories[key]

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
            history.now, history.numbers = mark.get(key, (0, None))

    def of(self, lanes: Lanes, root: Lanes) -> dict:
        """What lanes have drawn that have come to an end."""
        return {key: history.of(lanes, root) for key, history in self.histories.items()}

    def merge(self, root: Lanes, pieces: list[Lanes], each: list[dict]) -> None:
        """Sets of lanes that were run one after the other go on together."""
        for key, history in self.histories.items():
            # 0: what a generator begins with.
            rows = [own.get(key, torch.zeros((), dtype=torch.int64)) for own in each]
            history.merge(root, pieces, rows)


def history_of(level: Any, generator: torch.Generator | None) -> _History | None:
    """What the lanes of a level have drawn from a generator, None where they may not part here."""
    return next((history for other, history in histories(generator) if other is level), None)


def histories(generator: torch.Generator | None) -> list[tuple[LaneLevel, _History]]:
    """Each level whose lanes draw the same numbers and may part here, with what they have drawn from a generator."""
    if generator is not None and generator_identity(generator) == generator_identity(torch.default_generator):
        generator = None
    found = {}
    for call in reversed(machine.boundaries):
        level = call.level
        if level.order not in found and level.randomness == "same" and current_graph_task_id() == level.task:
            found[level.order] = level, call.draws.history(level, generator)
    return list(found.values())
