"""Equality first: what the peers compute has to be the same before their times mean anything."""

import math

import torch
from torch import Tensor

from benchmarks.measure import Part
from benchmarks.workload import OWN, Peers


def compare(peers: Peers, tolerance: float) -> tuple[dict[str, float], dict[str, str]]:
    """Run every peer once and return its difference from Lanewise's result, and notes on peers that cannot do the work.

    A peer that raises is removed from `peers`; one that differs by more than the tolerance is an error. A `Part`
    is compared with the first rows of the result.
    """
    own = leaves(peers[OWN]())
    differences: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name in [n for n in peers if n != OWN]:
        try:
            other = leaves(peers[name]())
        except Exception as error:
            notes[name] = first_line(error)
            del peers[name]
            continue
        if len(own) != len(other):
            raise AssertionError(f"{name} returns {len(other)} arrays, {OWN} {len(own)}")
        pairs = [(a[: len(b)] if isinstance(peers[name], Part) else a, b) for a, b in zip(own, other)]
        differences[name] = max((difference(a, b) for a, b in pairs), default=math.nan)
        if not differences[name] <= tolerance:
            raise AssertionError(f"{name} differs from {OWN} by {differences[name]:.1e}")
    return differences, notes


def leaves(tree: object) -> list[Tensor]:
    """The arrays of a result in order, as tensors; dictionaries by name, for JAX sorts them."""
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves(tree[name])]
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, Tensor):
        return [tree.detach()]
    return [torch.from_numpy(tree.__array__().copy())]  # pyright: ignore[reportAttributeAccessIssue]  (a JAX array)


def difference(left: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest entry where that exceeds one; infinite for unlike shapes."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf
    return ((left - right).abs().max() / right.abs().max().clamp(min=1)).item()


def first_line(error: Exception) -> str:
    """The type and the first line of an error's message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
