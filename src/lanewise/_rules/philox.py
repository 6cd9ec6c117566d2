"""The Philox4x32-10 generator (Salmon et al., 2011): four random words from a key and a counter, the same on any plane.

Words of 32 bits lie in int64. A product of two of them wraps around, which leaves its bits as they are.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import on_plane
from lanewise._rules.batch.families import lane_rule
from lanewise._rules.batch.operands import aligner
from lanewise._rules.jvp.families import constant

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Counters at a time: what the rounds work on stays in the cache.
_SPAN = 1 << 14

_library = torch.library.Library("lanewise", "DEF")
_library.define("philox(Tensor key, Tensor counter) -> Tensor")
_library.define("philox_words(Tensor key, int domain, int count) -> Tensor")


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers [2, 1] and what is added to the key in each round [rounds, 2]"""
    steps = torch.tensor([[r * w & _MASK for w in _WEYL] for r in range(_ROUNDS)], device=device)
    return torch.tensor(_MULTIPLIERS, device=device).unsqueeze(1), steps


def _rounds(even: Tensor, odd: Tensor, keys: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Words 0 and 2 of counters, [2, ...], words 1 and 3, and the keys of the rounds [rounds, 2, ...] -> those after"""
    for key in keys:
        products = (even * multipliers).flip(0)
        even = ((products >> 32) ^ odd ^ key).bitwise_and_(_MASK)
        odd = products  # of which the low halves count
    return even, odd & _MASK


def _philox(key: Tensor, counter: Tensor) -> Tensor:
    """key [*K, 2], counter [*C, 4], of shapes that broadcast -> words [*K or *C, 4]"""
    multipliers, steps = _constants(key.device)
    shape = torch.broadcast_shapes(key.shape[:-1], counter.shape[:-1])
    words = counter.expand(*shape, 4).reshape(-1, 2, 2).permute(2, 1, 0)
    own = key.expand(*shape, 2).reshape(-1, 2).t()
    even, odd = _rounds(words[0], words[1], (own + steps.unsqueeze(2)) & _MASK, multipliers)
    return torch.stack([even, odd], 2).permute(1, 0, 2).reshape(*shape, 4)


def _philox_words(key: Tensor, domain: int, count: int) -> Tensor:
    """key [*K, 2] -> the first `count` words of the stream `domain` of each key [*K, count]"""
    blocks = (count + 3) // 4
    lead = key.shape[:-1]
    keys = key.reshape(-1, 2)
    multipliers, steps = _constants(key.device)
    schedule = (keys.t() + steps.unsqueeze(2)) & _MASK
    span = max(_SPAN // max(len(keys), 1), 1)
    parts = []
    for start in range(0, max(blocks, 1), span):
        places = torch.arange(start, min(start + span, blocks), device=key.device)
        even = torch.stack([places & _MASK, torch.full_like(places, domain)]).unsqueeze(1)
        odd = torch.stack([places >> 32, torch.zeros_like(places)]).unsqueeze(1)
        even, odd = _rounds(even, odd, schedule.unsqueeze(3), multipliers.unsqueeze(2))
        parts.append(torch.stack([even[0], odd[0], even[1], odd[1]], 2))
    words = torch.cat(parts, 1) if len(parts) != 1 else parts[0]
    return words.reshape(*lead, 4 * blocks)[..., :count]


def _plainly(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel, whose own tensors belong to no plane."""

    def run(*args: Any) -> Tensor:
        with on_plane(None):
            return kernel(*args)

    return run


_library.impl("philox", _plainly(_philox), "CompositeExplicitAutograd")
_library.impl("philox_words", _plainly(_philox_words), "CompositeExplicitAutograd")
philox = torch.ops.lanewise.philox.default
philox_words = torch.ops.lanewise.philox_words.default
constant(philox, philox_words)


@lane_rule(philox)
def _philox_lanes(level: BatchLevel, key: Tensor, counter: Tensor) -> Tensor:
    """key [B, *K, 2], counter [B, *C, 4] -> words [B, *K or *C, 4]"""
    align = aligner(level, [key, counter])
    return philox(align(key), align(counter))


@lane_rule(philox_words)
def _philox_words_lanes(level: BatchLevel, key: Tensor, domain: int, count: int) -> Tensor:
    """key [B, *K, 2] -> words [B, *K, count]"""
    return philox_words(key.value, domain, count)  # type: ignore[attr-defined]


# --- rules of torch's own vmap, which torch.compile traces ------------------------------------------------------------


def _in_front(value: Tensor, dim: int | None, rank: int) -> Tensor:
    """Lanes in front [B, 1, ..., *S] of so many dims; without lanes, the value."""
    if dim is None:
        return value
    value = value.movedim(dim, 0)
    return value.reshape(value.shape[0], *[1] * (rank + 1 - value.dim()), *value.shape[1:])


def _philox_traced(_: Any, in_dims: tuple, key: Tensor, counter: Tensor) -> tuple[Tensor, int]:
    rank = max(value.dim() - (dim is not None) for value, dim in zip((key, counter), in_dims))
    return philox(_in_front(key, in_dims[0], rank), _in_front(counter, in_dims[1], rank)), 0


def _philox_words_traced(_: Any, in_dims: tuple, key: Tensor, domain: int, count: int) -> tuple[Tensor, int]:
    return philox_words(key.movedim(in_dims[0], 0), domain, count), 0


torch.library.register_vmap("lanewise::philox", _philox_traced, lib=_library)
torch.library.register_vmap("lanewise::philox_words", _philox_words_traced, lib=_library)
