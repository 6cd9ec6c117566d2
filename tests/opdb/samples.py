"""Lane data from op_db: each sample drawn once per lane, so that every lane holds other numbers of one domain."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

OPS = {op.full_name: op for op in op_db}
MAX_LANES = 3
_DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
_POOL = 48  # how many of an op's samples are looked at when choosing a few that differ
_MAX_NUMEL = 4096

UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


@dataclass
class LaneSample:
    """One sample of an op: `f(*lanes[i])` is the op on the tensors of lane i, everything else fixed."""

    f: Callable[..., tuple[torch.Tensor, ...]]
    lanes: list[tuple[torch.Tensor, ...]]
    diff: tuple[int, ...]  # positions of the tensors that may be differentiated
    distinct: bool  # False: the lanes are copies, since other draws had another structure
    text: str
    name: str  # of the op


def choose_dtype(op) -> torch.dtype:
    """The first dtype of a fixed preference that the op runs on."""
    supported = op.supported_dtypes("cpu")
    return next((dtype for dtype in _DTYPES if dtype in supported), sorted(supported, key=str)[0])


def _draw(op, dtype: torch.dtype, grad: bool, seed: int) -> list:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), _POOL))


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if callable(value):
        return getattr(value, "__name__", "callable")
    return repr(value)


def _kind(sample) -> tuple:
    """What makes two samples alike for a rule: ranks, unit and empty sizes, dtypes, and the other arguments."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    parts = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((leaf.dtype, tuple(min(size, 2) for size in leaf.shape)))
        else:
            parts.append(_describe(leaf))
    return str(spec), tuple(parts)


def _plain(sample) -> bool:
    leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return all(t.layout is torch.strided and not t.is_nested for t in tensors)


def _choose(samples: list, cap: int) -> list[int]:
    """Positions of up to `cap` samples: first one of each structure, then those that differ in sizes or values."""
    plain = [i for i, s in enumerate(samples) if _plain(s)]
    small = [i for i in plain if _numel(samples[i]) <= _MAX_NUMEL]
    structures: dict[str, list[int]] = {}
    seen: set[tuple] = set()
    for i in small or plain:
        kind = _kind(samples[i])
        if kind not in seen:
            seen.add(kind)
            structures.setdefault(kind[0], []).append(i)
    chosen: list[int] = []
    queues = list(structures.values())
    # Each structure gives its first sample, then its last, then the rest, so that long lists of one kind do not crowd.
    for queue in queues:
        queue[1:] = queue[:0:-1]
    while queues and len(chosen) < cap:
        for queue in queues:
            if len(chosen) < cap:
                chosen.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return sorted(chosen)


def _numel(sample) -> int:
    leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _as_tensors(out: Any) -> tuple[torch.Tensor, ...]:
    leaves, _ = tree_flatten(out)
    return tuple(leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf) for leaf in leaves if leaf is not None)


def _function(call: Callable, sample, leaves: list, spec, places: list[int]) -> Callable:
    def f(*tensors):
        full = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            full[place] = tensor
        first, args, kwargs = tree_unflatten(full, spec)
        return _as_tensors(sample.output_process_fn_grad(call(first, *args, **kwargs)))

    return f


def _without_tensors(call: Callable, sample, name: str) -> LaneSample:
    """A factory: the lanes differ in nothing that it sees."""

    def f(_):
        return _as_tensors(call(sample.input, *sample.args, **sample.kwargs))

    lanes = [(torch.tensor(float(i)),) for i in range(MAX_LANES)]
    return LaneSample(f, lanes, (), True, _text(sample), name)


def _text(sample) -> str:
    text = ", ".join([_describe(sample.input), *map(_describe, sample.args)])
    text += "".join(f", {name}={_describe(value)}" for name, value in sample.kwargs.items())
    return text[:300]


def _on_a_copy(variant: Callable) -> Callable:
    def call(first, *args, **kwargs):
        return variant(first.clone(), *args, **kwargs)

    return call


def lane_samples(op, grad: bool, cap: int = 6, inplace: bool = False) -> Iterator[LaneSample]:
    """Up to `cap` samples of `op` that differ in shapes and arguments, each with MAX_LANES lanes of data."""
    dtype = choose_dtype(op)
    draws = [_draw(op, dtype, grad, seed) for seed in range(MAX_LANES)]
    call = _on_a_copy(op.get_inplace()) if inplace else op.get_op()
    for i in _choose(draws[0], cap):
        sample = draws[0][i]
        if inplace and sample.broadcasts_input:
            continue
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not places:
            yield _without_tensors(call, sample, op.full_name)
            continue
        lanes = [tuple(leaves[k].detach() for k in places)]
        distinct = True
        for draw in draws[1:]:
            other = tree_flatten((draw[i].input, draw[i].args, draw[i].kwargs))[0] if i < len(draw) else []
            if i < len(draw) and _kind(draw[i])[1] == _kind(sample)[1]:
                lane = tuple(other[k].detach() for k in places)
                distinct &= all(a.shape == b.shape for a, b in zip(lane, lanes[0], strict=True))
            else:
                distinct = False
            lanes.append(lane if distinct else tuple(t.clone() for t in lanes[0]))
        diff = tuple(n for n, k in enumerate(places) if leaves[k].requires_grad)
        f = _function(call, sample, leaves, spec, places)
        yield LaneSample(f, lanes, diff, distinct, _text(sample), op.full_name)
