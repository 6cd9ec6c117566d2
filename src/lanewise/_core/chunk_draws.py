"""`randomness="different"` in chunks: no two lanes get the same numbers of a generator.

All chunks begin with the same state. A draw for all lanes of the call, of which each chunk takes its own, gives each
lane its numbers, as long as all chunks make the same draws. A chunk that draws for some of its lanes, or that draws
otherwise than another chunk did from the same state, goes on with numbers of its own.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import on_plane
from lanewise._core.random import Generators, reseat

# The state of torch's generator on the CPU: bytes in all, and where the 624 words of the Mersenne twister lie.
_CPU_BYTES = 5056
_WORDS = slice(3, 627)


class _Loop(threading.local):
    """The chunk loops of this thread: how many are open, and what was drawn in them, by the state it was drawn from."""

    depth = 0

    def __init__(self) -> None:
        self.draws: dict[tuple, tuple] = {}


_loop = _Loop()


@contextmanager
def chunk_loop() -> Iterator[None]:
    """Inside, chunks are run one after the other."""
    _loop.depth += 1
    try:
        yield
    finally:
        _loop.depth -= 1
        if not _loop.depth:
            _loop.draws.clear()


def keep_apart(level: Any, op: Any, args: tuple, kwargs: dict) -> None:
    """Before a draw of different numbers for the lanes that run: go on with others where those may be taken."""
    starts = _starts(level)
    if not starts:
        return
    generator = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)), None)
    if generator is not None:
        reseat(generator, level.order, starts[0])
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    if level.streams is None:
        level.streams = set()
    if seed in level.streams:
        return
    kind = (op, *map(_kind, args), *((name, _kind(arg)) for name, arg in sorted(kwargs.items())))
    with on_plane(None):
        state = _digest(generator)
        if state not in level.streams and level.total != level.size:
            if not _loop.depth:  # a backward pass draws again what was drawn
                return
            planes, below = 0, level.parent
            while below is not None:
                planes, below = planes + 1, below.parent
            if _loop.draws.setdefault((state, planes), kind) == kind:
                return
        level.streams.add(state)
        level.streams.add(_begin_stream(generator, state + repr((starts, kind)).encode()))


def _starts(level: Any) -> list[int]:
    """The first lane of each chunk, that of the level and those around whose lanes are part of its pairs.

    Empty where there are no other chunks.
    """
    starts, chunked = [], False
    while level is not None:
        total, start = level.place
        starts.append(start)
        chunked = chunked or total != level.own_size
        level = getattr(level, "outer", None)
    return starts if chunked else []


def _kind(arg: Any) -> Any:
    """What of an argument says how many numbers are drawn."""
    if isinstance(arg, Tensor):
        return arg.shape, arg.dtype
    return None if isinstance(arg, torch.Generator) else repr(arg)


def _digest(generator: torch.Generator | None) -> bytes:
    """What stands for the state of a generator, or of the default ones."""
    if generator is None:
        now = Generators()
        states = [now.cpu, *(state for _, _, state in now.devices)]
    else:
        states = [generator.get_state()]
    return hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=16).digest()


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
