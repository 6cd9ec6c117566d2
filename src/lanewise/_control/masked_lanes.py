"""Calls of `vmap` in the form that masks serve: the lanes of each argument in front, in one dim.

The lanes of a `vmap` of a `vmap` are the pairs of both: what the one maps and the other does not is repeated.
"""

from typing import Any

import torch
from torch import Tensor

from lanewise._control.masked_calls import run_masked, watched
from lanewise._core.trees import PrefixMismatch, Spec, flatten_with_prefix, unflatten
from lanewise._transforms.vmap import lane_rows, mapping_of


class _Argument:
    """An argument on its way through one `vmap` after the other, outermost first.

    Attributes:
        value: A tensor with the dims of its lanes in front, or what all lanes share.
        has: For each `vmap` whether it has lanes there.
    """

    __slots__ = ("value", "has")

    def __init__(self, value: Any, mapped: bool) -> None:
        self.value = value
        self.has = [mapped]

    def _place(self, dim: int | None) -> int | None:
        """Where a dim of an example is in the value, if there is such a dim."""
        before = sum(self.has)
        rank = self.value.dim() - before if _is_plain(self.value) else 0
        return None if dim is None or not -rank <= dim < rank else before + dim % rank

    def size(self, dim: int | None) -> int | None:
        """The size of a dim of an example."""
        place = self._place(dim)
        return None if place is None else self.value.shape[place]

    def map(self, dim: int | None, size: int) -> bool:
        """Take a dim of an example as the lanes of a further `vmap`, if it has so many."""
        if dim is not None:
            place, before = self._place(dim), sum(self.has)
            if place is None or self.value.shape[place] != size:
                return False
            if place != before:
                self.value = self.value.movedim(place, before)
        self.has.append(dim is not None)
        return True

    def flat(self, sizes: list[int]) -> Any:
        """The value for all lanes, or what they share."""
        if not any(self.has):
            return self.value
        value = self.value
        if len(sizes) > 1:
            for place, has in enumerate(self.has):
                if not has:
                    value = value.unsqueeze(place)
            rest = value.shape[len(sizes) :]
            value = value.expand(*sizes, *rest).reshape(-1, *rest)
        return value.contiguous()


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def run_masked_lanes(
    func: Any, leaves: list, dims: list, spec: Spec, out_dims: Any, place: tuple[int, int, int]
) -> tuple[list, list, Spec] | None:
    """The leaves of a result, lanes at their dims; the dims and the structure. None where the lanes have to part."""
    if watched():
        return None
    args, kwargs = unflatten(leaves, spec)
    in_dims, named = unflatten(dims, spec)
    named = named or dict.fromkeys(kwargs)
    sizes: list[int] = [place[1]]
    outs: list[Any] = []
    given: list[_Argument] = []
    for arg, dim in zip((*args, *kwargs.values()), (*in_dims, *named.values())):
        if dim is not None:
            if type(dim) is not int or not _is_plain(arg):
                return None
            arg = lane_rows(arg, dim, place)
        given.append(_Argument(arg, dim is not None))
    while (inner := mapping_of(func)) is not None:
        entries = None if kwargs else inner.dims_of(len(given))
        size = None if entries is None else next(filter(None, map(_Argument.size, given, entries)), None)
        if entries is None or size is None or not all(each.map(dim, size) for each, dim in zip(given, entries)):
            return None
        sizes.append(size)
        outs.append(inner.out_dims)
        func = inner.func
    lanes = [0 if any(each.has) else None for each in given]
    out = run_masked(func, tuple([each.flat(sizes) for each in given]), lanes, tuple(kwargs))
    return None if out is None else _put_back(out, sizes, [out_dims, *outs])


def _put_back(out: Any, sizes: list[int], out_dims: list[Any]) -> tuple[list, list, Spec] | None:
    """Results whose lanes are in front, in one dim -> the lanes of each `vmap` where its `out_dims` say."""
    try:
        leaves, dims, spec = flatten_with_prefix(out_dims[0], out)
    except PrefixMismatch:
        return None
    for position, dim in enumerate(dims):
        value = leaves[position]
        if len(sizes) > 1:
            value = value.unflatten(0, sizes)
        for place, to in reversed([*enumerate([dim, *out_dims[1:]])]):
            rank = value.dim() - place
            if type(to) is not int or not -rank <= to < rank:
                return None
            value = value.movedim(place, place + to % rank) if to else value
        leaves[position] = value
    return leaves, dims, spec
