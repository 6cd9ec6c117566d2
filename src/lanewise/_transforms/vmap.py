"""`vmap`: one function of one example, run for all examples at once."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.plane import sync
from lanewise._core.trees import broadcast_prefix, flatten, unflatten
from lanewise.errors import ArgumentError


def vmap(
    func: Callable, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *, chunk_size=None
) -> Callable:
    """Map `func` over a dimension of its arguments.

    >>> import torch
    >>> vmap(torch.dot)(torch.ones(3, 2), torch.ones(3, 2))
    tensor([2., 2., 2.])
    """

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten(args)
        dims = leaf_dims(in_dims, args, leaves)
        size = next(leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)
        with BatchLevel(size, randomness) as level:
            lanes = [
                leaf if dim is None else level.wrap(leaf.movedim(dim, 0) if dim else leaf)
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            out = func(*unflatten(lanes, spec), **kwargs)
            return leave(level, out, out_dims)

    return mapped


def leaf_dims(in_dims: Any, args: tuple, leaves: list) -> list[int | None]:
    """The mapped dim of each leaf, None where it has none."""
    if isinstance(in_dims, int) and all(isinstance(leaf, Tensor) for leaf in leaves):
        return [in_dims] * len(leaves)
    dims = broadcast_prefix(in_dims, args, lambda entry: entry is None or isinstance(entry, int))
    if dims is None:
        raise ArgumentError(f"in_dims is not compatible with the structure of `inputs`: {in_dims}")
    return dims


def leave(level: BatchLevel, out: Any, out_dims: Any) -> Any:
    """The results on the plane below, lanes at `out_dims`."""
    if isinstance(out, Tensor) and isinstance(out_dims, int):
        return level.below(leave_leaf, level, out, out_dims)
    leaves, spec = flatten(out)
    dims = broadcast_prefix(out_dims, out, lambda entry: entry is None or isinstance(entry, int))
    assert dims is not None
    return unflatten([level.below(leave_leaf, level, leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)], spec)


def leave_leaf(level: BatchLevel, leaf: Any, dim: int | None) -> Any:
    if not isinstance(leaf, Tensor) or dim is None:
        return leaf
    if type(leaf) is BatchTensor and leaf.level is level:
        if not leaf.mapped:
            sync(leaf)
        if leaf.mapped:
            return leaf.value.movedim(0, dim) if dim else leaf.value
        leaf = leaf.value
    return leaf.expand(level.size, *leaf.shape).movedim(0, dim)
