"""Rows of lanes: taking them from a value, and putting them into one; and which operations add up."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lanewise._core.parting.lanes import Lanes
from lanewise._core.short.hot import inert
from lanewise._torch_compat import OUTSIDE_KEY, include_key, saved_tensor_hooks, tls_is_included

aten = torch.ops.aten

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

# Operations that add their operands up, or put them side by side: one that lacks a lane counts as zero there.
SUMS = frozenset(
    {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor, aten.where.self}
    | {aten.cat.default, aten.stack.default}
)

# Products and quotients: one that lacks a lane has no number there.
PRODUCTS = frozenset(
    {aten.mul.Tensor, aten.div.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}
)


def _added(product: Callable) -> Callable:
    def apart(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        return (x if beta == 1 else x * beta) + (product(a, b) if alpha == 1 else product(a, b) * alpha)

    return apart


# Sums of a product that are one operation: apart, the product has the lanes of both factors, the sum those of either.
FUSED: dict[Any, Callable] = {
    aten.addcmul.default: lambda x, a, b, *, value=1: x + (a * b if value == 1 else a * b * value),
    aten.addcdiv.default: lambda x, a, b, *, value=1: x + (a / b if value == 1 else a / b * value),
    aten.addmm.default: _added(torch.mm),
    aten.addmv.default: _added(torch.mv),
    aten.addr.default: _added(torch.outer),
    aten.baddbmm.default: _added(torch.bmm),
    aten.addbmm.default: _added(lambda a, b: torch.bmm(a, b).sum(0)),
}


def unseen(run: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """`run`, whose places of lanes no saved-tensor hook of the user's gets to see: no loop has them."""

    @functools.wraps(run)
    def hidden(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        if saved_tensor_hooks() is None:
            return run(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            return run(*args, **kwargs)

    return hidden


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def by_outer_lane(value: Tensor, outer: int, own: int) -> Tensor:
    return value.unflatten(0, (outer, own))


def gather(level: Any, value: Tensor, places: Tensor) -> Tensor:
    """Rows of a value on the plane below the level."""
    return _below(level, gather_rows, value, places)


def gather_lanes(level: Any, value: Tensor, lanes: Lanes, home: Lanes) -> Tensor:
    """The rows of `lanes`, a part of the home of a value: every operand whose lanes have parted comes here."""
    start = lanes.start_in(home)
    if start is None:
        return _below(level, gather_rows, value, lanes.positions(home))
    return _below(level, _copy_stretch, value, start, lanes.size)


def _below(level: Any, run: Callable, value: Tensor, *args: Any) -> Tensor:
    if level.parent is not None or not inert(value) or not value.is_cpu:
        return level.below(run, value, *args)
    inside = tls_is_included(OUTSIDE_KEY)
    if inside:
        include_key(OUTSIDE_KEY, False)
    try:
        return run(value, *args)
    finally:
        if inside:
            include_key(OUTSIDE_KEY, True)


def _copy_stretch(value: Tensor, start: int, size: int) -> Tensor:
    # A copy, as rows gathered are: what is written to the value later does not change what was read.
    return in_order(lambda rows: rows.narrow(0, start, size).clone(memory_format=torch.contiguous_format), value)


@unseen
def gather_rows(value: Tensor, places: Tensor) -> Tensor:
    if value.is_contiguous():
        return value.index_select(0, places.to(value.device))
    return in_order(lambda rows: rows.index_select(0, places.to(value.device)), value)


def in_order(run: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`run(*rows)`, a contiguous `[n, *S]`, with the dims of a lane in the order that they have in the first's memory.

    Whether `reshape` and `contiguous` of an example give a view or a copy depends on it.
    """
    first = rows[0]
    if first.is_contiguous() or first.dim() < 3 or 0 in (strides := first.stride()):
        return run(*rows)
    dims = range(first.dim())
    order = [0, *sorted(dims[1:], key=lambda dim: -strides[dim])]
    back = sorted(dims, key=order.__getitem__)
    if order == list(dims):
        return run(*rows)
    return run(*[each.permute(order) for each in rows]).permute(back)


# From so many lanes on, a choice by bits is faster than torch.where, whose kernel branches on each element: 9 us in
# place of 39 for 10,000 numbers whose mask is in no order.
_MANY = 2048
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@unseen
def choose_rows(mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rows of `first` where the mask [n] holds, of `second` elsewhere, both [n, *S]."""
    mask = mask.view(-1, *[1] * (first.dim() - 1)).to(first.device)
    if first.dim() == 1 and first.shape[0] >= _MANY and first.is_cpu and inert(first) and inert(second):
        bits = _BITS.get(first.element_size())
        if bits is not None:
            other = second.view(bits)
            chosen = first.view(bits).bitwise_xor(other).bitwise_and_(mask.to(bits).neg_()).bitwise_xor_(other)
            return chosen.view(first.dtype)
    return torch.where(mask, first, second)


def split_rows(mask: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a plain value `[n]` where the mask [n] holds, and where it does not; zeros elsewhere."""
    bits = _BITS.get(value.element_size()) if value.shape[0] >= _MANY and value.is_cpu else None
    if bits is None:
        return torch.where(mask, value, 0), torch.where(mask, 0, value)
    every = value.view(bits)
    first = every & mask.to(bits).neg_()
    return first.view(value.dtype), first.bitwise_xor(every).view(value.dtype)


def all_pairs(value: Tensor, strides: Sequence[int], front: bool) -> Tensor:
    """`[outer, B, *S]` -> `[outer * B, *S]`, of which a row has the views that one with those strides has.

    A view of the value itself, where that lies so, and the pairs need not lie in front.
    """
    outer, size, *shape = value.shape
    mergeable = 1 in (outer, size) or value.stride(0) == size * value.stride(1)
    if not value.numel() or (mergeable and not front and value.stride()[2:] == tuple(strides)):
        return value.flatten(0, 1)
    dims = [dim for dim, stride in enumerate(strides) if stride and shape[dim] > 1]
    dims.sort(key=lambda dim: strides[dim])
    # From the inside out: a dim that begins beyond the end of the one inside of it does so in the copy.
    sizes: list[int] = []
    taken: list[Any] = []
    end = step = inner = 1
    for dim in dims:
        stride = strides[dim]
        if stride < end:
            return value.flatten(0, 1)  # elements overlap, and cannot be written to
        if stride > end:
            if not sizes:
                sizes, taken = [1], [0]
            step = inner * _padded(sizes, inner, stride)
        sizes.append(shape[dim])
        taken.append(slice(shape[dim]))
        inner, step, end = step, step * shape[dim], stride * shape[dim]
    if sizes:
        sizes[-1] -= 1
        _padded(sizes, inner, value.stride(0) | value.stride(1))
    rows = value.new_empty((outer, size, *sizes[::-1]))[(slice(None), slice(None), *taken[::-1])]
    order = dims[::-1]
    rows = rows.permute(0, 1, *[2 + order.index(dim) for dim in sorted(dims)])
    for dim in range(len(shape)):
        if dim not in dims:
            rows, value = rows.unsqueeze(2 + dim), value.narrow(2 + dim, 0, 1)
    return rows.copy_(value).flatten(0, 1).expand(outer * size, *shape)


def _padded(sizes: list[int], inner: int, stride: int) -> int:
    """The last of the sizes, made larger until it is divided by what divides a stride, for views as another dtype."""
    unit = min(stride & -stride, 16)
    sizes[-1] += 1
    while sizes[-1] * inner % unit:
        sizes[-1] += 1
    return sizes[-1]


@unseen
def put_rows(value: Tensor, places: Tensor, rows: Tensor) -> None:
    value.index_copy_(0, places.to(value.device), rows.to(value.dtype))


def put_filled(value: Tensor, places: Tensor, rows: Tensor) -> None:
    """Rows that one number fills, put into a value whose elements may share their memory."""
    for dim in range(1, value.dim()):
        if value.stride(dim) == 0 and value.shape[dim] > 1:
            value, rows = value.narrow(dim, 0, 1), rows.narrow(dim, 0, 1)
    put_rows(value, places, rows)


# torch carries these out where elements share their memory, too: each is given the same number.
PUTS: dict[Any, Callable] = dict.fromkeys((aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default), put_filled)


@unseen
def spread_rows(value: Tensor, places: Tensor, size: int) -> Tensor:
    """Rows put at `places` of zeros; places that repeat add up."""
    return value.new_zeros((size, *value.shape[1:])).index_add(0, places.to(value.device), value)


@unseen
def fill_rows(value: Tensor, places: Tensor, size: int) -> Tensor:
    rows = value[:1].expand(size, *value.shape[1:]) if value.shape[0] else value.new_ones((size, *value.shape[1:]))
    return rows.index_copy(0, places.to(value.device), value)
