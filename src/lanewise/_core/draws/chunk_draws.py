"""`randomness="different"` in chunks, and where code runs again for some lanes: no two lanes get the same numbers.

All chunks begin with the same state. A draw for all lanes of the call, of which each chunk takes its own, gives each
lane its numbers, as long as all chunks make the same draws. A chunk that draws for some of its lanes, or that draws
otherwise than another chunk did from the same state, goes on with numbers of its own. So do lanes for which code runs
again, from the state that others began with, where it draws otherwise than it did for those.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.random import Generators, digest
from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import machine, with_around
from lanewise._torch_compat import generator_identity

# The state of torch's generator on the CPU: bytes in all, and where the 624 words of the Mersenne twister lie.
_CPU_BYTES = 5056
_WORDS = slice(3, 627)


class _Loop:
    """A chunk loop that is open: the generators of the user's that were drawn from in it, each with its first state."""

    def __init__(self) -> None:
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def reseat(self) -> None:
        """Before another chunk: it starts from the same states."""
        with on_plane(None):
            for generator, first in self.generators.values():
                generator.set_state(first)


class _Loops(threading.local):
    """The chunk loops of this thread.

    Attributes:
        open: Those that are open, outermost first.
        draws: What was drawn in them, by the state it was drawn from.
    """

    def __init__(self) -> None:
        self.open: list[_Loop] = []
        self.draws: dict[tuple, tuple] = {}


_loops = _Loops()


@contextmanager
def chunk_loop() -> Iterator[_Loop]:
    """Inside, chunks are run one after the other."""
    loop = _Loop()
    _loops.open.append(loop)
    try:
        yield loop
    finally:
        _loops.open.remove(loop)
        if not _loops.open:
            _loops.draws.clear()


def note_first(generator: torch.Generator) -> None:
    """Before a draw from a generator of the user's: the chunk loops around know it from here on.

    A loop does not know how one began that its first chunks have not drawn from: it is where they have left it.
    """
    key = generator_identity(generator)
    for loop in _loops.open:
        if key not in loop.generators:
            with on_plane(None):
                loop.generators[key] = generator, generator.get_state()


class Streams:
    """What the lanes of a level have drawn.

    Attributes:
        own: Seeds of its own, not those of other chunks, and from what draws they were begun, which may be made again.
        draws: What was drawn first from a state, where code may run again for other lanes.
    """

    __slots__ = ("own", "draws")

    def __init__(self) -> None:
        self.own: set[Any] = set()
        self.draws: dict[bytes, tuple] = {}


def keep_apart(level: Any, op: Any, args: tuple, kwargs: dict) -> None:
    """Before a draw of different numbers for the lanes that run: go on with others where those may be taken."""
    starts, again = _starts(level), _runs_again(level)
    if not starts and not again:
        return
    generator = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)), None)
    if starts and generator is not None:
        note_first(generator)
    if level.streams is None:
        level.streams = Streams()
    kind = (op, *map(_kind, args), *((name, _kind(arg)) for name, arg in sorted(kwargs.items())))
    with on_plane(None):
        if starts:
            _apart_from_chunks(level, generator, starts, kind)
        if again:
            state = digest(generator)
            if level.streams.draws.setdefault(state, kind) != kind:
                seed = _begin_stream(generator, state + repr(kind).encode())
                if starts:
                    level.streams.own.add(seed)


def _runs_again(level: Any) -> bool:
    """Whether code may run again for other lanes from the state that the generators have now, or has done so."""
    if level.streams is not None and level.streams.draws:
        return True
    return machine.level is not level and any(call.level is level for call in machine.boundaries)


def _apart_from_chunks(level: Any, generator: torch.Generator | None, starts: list[int], kind: tuple) -> None:
    own = level.streams.own
    if (torch.initial_seed() if generator is None else generator.initial_seed()) in own:
        return
    state = digest(generator)
    if (state, kind) not in own and level.total != level.size:
        if not _loops.open:  # a backward pass draws again what was drawn
            return
        planes, below = 0, level.parent
        while below is not None:
            planes, below = planes + 1, below.parent
        if _loops.draws.setdefault((state, planes), kind) == kind:
            return
    own.add((state, kind))
    own.add(_begin_stream(generator, state + repr((starts, kind)).encode()))


class Ends:
    """The states of generators after each of several runs that began with the same: all of them have been used."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[torch.Generator | None, set[bytes]]] = {}

    def note(self, generators: Iterable[torch.Generator]) -> None:
        """After a run. `generators`: those of the user's that were drawn from."""
        with on_plane(None):
            self._note(0, None)
            for generator in generators:
                self._note(generator_identity(generator), generator)

    def _note(self, key: int, generator: torch.Generator | None) -> None:
        self.states.setdefault(key, (generator, set()))[1].add(digest(generator))

    def go_on(self) -> None:
        """After the last: where the runs have drawn differently, no state of them is one to go on from."""
        with on_plane(None):
            for generator, states in self.states.values():
                if len(states) > 1:
                    _begin_stream(generator, b"".join(sorted(states)))


class OwnDraws:
    """What code of a user's draws that no rule looks into: numbers of the lanes that it runs for, in all chunks.

    The state to draw from is a hash of these lanes, and of the state that others may begin with, too. Where code has
    drawn, all go on from a state that is known by the latter alone.
    """

    __slots__ = ("level", "name", "before", "state", "drawn")

    def __init__(self, level: Any, name: str) -> None:
        self.level = level
        self.name = name.encode()
        self.drawn = False
        with on_plane(None):
            self.before = Generators()
            self.state = digest(None)

    @contextmanager
    def of_lane(self, place: int) -> Iterator[None]:
        """Inside, code runs for the lane at that place of those that run."""
        level, place = self.level, _number(self.level, place)
        with self._of(level.place[1] + place if getattr(level, "outer", None) is None else (_starts(level), place)):
            yield

    @contextmanager
    def of_chunk(self) -> Iterator[None]:
        """Inside, code runs for all lanes that run."""
        with self._of(("from", _starts(self.level), _number(self.level, 0))):
            yield
        self.end()

    @contextmanager
    def _of(self, lanes: Any) -> Iterator[None]:
        with on_plane(None):
            _begin_stream(None, self.state + self.name + repr(lanes).encode())
            begun = Generators()
        yield
        with on_plane(None):
            if not begun.equals(Generators()):
                self.drawn = True
            elif not self.drawn:
                self.before.reseat()

    def end(self) -> None:
        """After the last of them."""
        if self.drawn:
            with on_plane(None):
                _begin_stream(None, self.state + self.name)


def own_draws(level: Any, name: str) -> AbstractContextManager:
    """Inside, code of a user's runs for all lanes that run, and says itself what each of them draws."""
    apart = level.randomness == "different" and level.size and (hasattr(level, "root") or _starts(level))
    return OwnDraws(level, name).of_chunk() if apart else nullcontext()


def _number(level: Any, place: int) -> int:
    """The number of a lane that runs, among all lanes of its level."""
    return int(level.lanes.positions(level.root)[place]) if level.alive and hasattr(level, "root") else place


def _starts(level: Any) -> list[int]:
    """The first lane of each chunk, that of the level and those around whose lanes are part of its pairs.

    Empty where there are no other chunks.
    """
    starts, chunked = [], False
    for each in with_around(level):
        total, start = each.place
        starts.append(start)
        chunked = chunked or total != each.own_size
    return starts if chunked else []


def _kind(arg: Any) -> Any:
    """What of an argument says how many numbers are drawn."""
    if isinstance(arg, Tensor):
        return arg.shape, arg.dtype
    return None if isinstance(arg, torch.Generator) else repr(arg)


def _begin_stream(generator: torch.Generator | None, key: bytes) -> int:
    """Put a generator, or the default ones, at a state that is a hash of the key; returns its seed."""
    words = hashlib.shake_128(key).digest(8 + 4 * 624)
    seed = int.from_bytes(words[:8], "little") >> 1
    if generator is None:
        # (`torch.manual_seed` would keep a seed for each device that is not in use yet.)
        generator = torch.default_generator
        for module, index, _ in Generators().devices:
            module.manual_seed(seed) if index is None else module.default_generators[index].manual_seed(seed)
    generator.manual_seed(seed)
    if generator.device.type == "cpu":
        # Of a seed, the generator on the CPU takes 32 bits: too few for many chunks.
        state = generator.get_state()
        assert state.numel() == _CPU_BYTES
        drawn = torch.frombuffer(bytearray(words[8:]), dtype=torch.int32)
        state.view(torch.int64)[_WORDS] = drawn.to(torch.int64) & 0xFFFFFFFF
        generator.set_state(state)
    return seed
