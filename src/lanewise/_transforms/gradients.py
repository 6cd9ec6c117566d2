"""Gradients that torch has wrong for some arguments: inside `grad` and the like, these operations are written out.

torch.autograd takes `dim=()` of a variance for no dims, lets pass what is equal to two limits of `clamp` that are the
same, counts what a maximum leaves out, and knows neither which of several writes to one place is the last nor that a
tensor stands twice in a list that is written to.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.dual import share_memory
from lanewise._core.level import on_plane
from lanewise._core.plane import Plane, recorded, tensors_of
from lanewise._rules.jvp.arithmetic import log_of_sum
from lanewise._rules.jvp.indexing import LEAST, cut, indexed_products, scattered_products
from lanewise._rules.jvp.special import SLOPES
from lanewise._rules.lists import entry_by_entry, operations_on_lists
from lanewise._transforms.orders import differentiations, written_out

aten = torch.ops.aten


def _never(ask: Callable[[], Tensor], *operands: Tensor) -> bool:
    """Whether something is false everywhere, where that is known at once: of what is plain, and in the CPU's memory."""
    if any(isinstance(x, Plane) or x.device.type != "cpu" for x in operands):
        return False
    with on_plane(None), torch.no_grad():
        return not ask().any()


def _records(x: Any) -> bool:
    """Whether an operand has a history; kernels get a tensor that stands for a number as the number."""
    return isinstance(x, Tensor) and recorded(x)


def _variances(op: Any) -> None:
    @written_out(op, depth=1)
    def over_named_dims(x, dim=None, *, correction=None, keepdim=False):
        """x [*S] -> over `dim`; over all where it is (), which torch's gradient takes for none"""
        return op(
            x, list(range(x.dim())) if dim is not None and not dim else dim, correction=correction, keepdim=keepdim
        )


for _op in (aten.std.correction, aten.std_mean.correction, aten.var.correction, aten.var_mean.correction):
    _variances(_op)


@written_out(aten.clamp.default, depth=1)
def clamp(x, min=None, max=None):
    """x [*S] -> [*S], the same for all x where the limits are; torch's gradient lets pass what is equal to them"""
    out = torch.clamp(x, min, max)
    return out if min is None or min != max else out.masked_fill(out == min, min)


@written_out(aten.clamp.Tensor, depth=1)
def clamp_between(x, min=None, max=None):
    """x, min, max [*S] -> [*S]; where the limits meet, the upper one, of which torch's gradient is 0 for x below it"""
    out = torch.clamp(x, min, max)
    if min is None or max is None or _never(lambda: min == max, min, max):
        return out
    return torch.where((min == max) & (out == max), max, out)


@written_out(aten.clamp_.default, depth=1)
def clamp_(x, min=None, max=None):
    """The same in place"""
    return torch.clamp_(x, min, max) if min is None or min != max else x.copy_(clamp(x.clone(), min, max))


@written_out(aten.clamp_.Tensor, depth=1)
def clamp_between_(x, min=None, max=None):
    """The same in place"""
    return torch.clamp_(x, min, max) if min is None or max is None else x.copy_(clamp_between(x.clone(), min, max))


@written_out(aten.scatter_reduce.two, depth=1)
def scatter_reduce(x, dim, index, source, reduce, *, include_self=True):
    """x [*S], index [*I], source [*J] -> [*S]; torch's gradient counts what is left out where it equals the result"""
    if reduce == "prod" and differentiations() > 1:
        return scattered_products(x, dim, index, source, include_self)
    if not include_self and reduce in LEAST:
        x = x.scatter(dim, index, LEAST[reduce])
    return aten.scatter_reduce(x, dim, index, cut(source, index), reduce, include_self=include_self)


@written_out(aten.index_reduce.default, depth=1)
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    """x [*S, N, *T], index [I], source [*S, I, *T] -> [*S, N, *T]"""
    if reduce == "prod" and differentiations() > 1:
        return indexed_products(x, dim, index, source, include_self)
    if not include_self and reduce in LEAST:
        x = x.index_fill(dim, index, LEAST[reduce])
    return aten.index_reduce(x, dim, index, source, reduce, include_self=include_self)


def _in_place(op: Any, compose: Callable) -> None:
    @written_out(op, depth=1)
    def write(x, /, *args, **kwargs):
        """The same in place"""
        return x.copy_(compose(x.clone(), *args, **kwargs))


_in_place(aten.index_reduce_.default, index_reduce)
_in_place(aten.scatter_reduce_.two, scatter_reduce)


def _in_turn(op: Any) -> None:
    each = entry_by_entry(op)

    @written_out(op, depth=1)
    def write(*args, **kwargs):
        """Writes to lists; torch's gradient knows of no other write to what stands in them twice"""
        return (each if share_memory(tensors_of(args, kwargs)) else op)(*args, **kwargs)


for _op in operations_on_lists():
    if _op._schema.is_mutable:
        _in_turn(_op)


@written_out(aten.as_strided_scatter.default, depth=1)
def as_strided_scatter(x, source, size, stride, storage_offset=None):
    """x [*S], source [*size] -> [*S]; torch's gradient of x is what it leaves out"""
    x.detach().as_strided(size, stride, storage_offset)  # raises where that reads memory of other lanes
    start = x.storage_offset() if storage_offset is None else storage_offset
    ends = [
        begin + sum((n - 1) * step for n, step in zip(shape, steps))
        for begin, shape, steps in ((x.storage_offset(), x.shape, x.stride()), (start, size, stride))
    ]
    places = torch.full((max(ends) + 1,), -1, device=x.device)
    places.as_strided(size, stride, start).copy_(torch.arange(source.numel(), device=x.device).reshape(source.shape))
    taken = places.as_strided(x.shape, x.stride(), x.storage_offset())
    return torch.where(taken < 0, x, source.reshape(-1)[taken.clamp_min(0)])


@written_out(aten.polar.default, depth=1)
def polar(size, angle):
    """size, angle [*S] -> complex [*S]; torch takes the direction from the result, which may be 0"""
    return torch.complex(size * angle.cos(), size * angle.sin())


@written_out(aten.logaddexp.default, depth=1)
def logaddexp(x, y):
    """x, y [*S] -> [*S]; torch's gradient has an exponential in it, which is infinite where x and y lie far apart

    Of real numbers, it is only wrong where it is differentiated again.
    """
    other_way = x.is_complex() or y.is_complex() or differentiations() > 1
    return log_of_sum(x, y) if other_way else torch.logaddexp(x, y)


@written_out(aten.poisson_nll_loss.default, depth=1)
def poisson_nll_loss(x, target, log_input, full, eps, reduction):
    """x, target [*S] -> [*S] or []; torch has a logarithm of 0 in what it then masks"""
    if not full:
        return torch.poisson_nll_loss(x, target, log_input, full, eps, reduction)
    few = target <= 1
    more = torch.where(few, 2, target)
    stirling = more * more.log() - more + 0.5 * (2 * math.pi * more).log()
    loss = torch.poisson_nll_loss(x, target, log_input, False, eps, 0) + torch.where(few, 0, stirling)
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


# --- several writes to one place: the last one counts, and torch gives all of them its gradient -----------------------


def _that_stay(source: Tensor, places: Callable[[Tensor], Tensor], *indices: Tensor) -> Tensor:
    """The source, what is overwritten as a constant; `places` writes numbers and reads them where they were written."""

    def overwritten() -> Tensor:
        order = torch.arange(source.numel(), device=source.device).reshape(source.shape)
        return places(order) != order

    return source if _never(overwritten, *indices) else torch.where(overwritten(), source.detach(), source)


def _indices_repeat(indices: list[Tensor | None]) -> bool:
    """Whether indices may name a place twice."""
    numbers = [i for i in indices if i is not None and i.dtype not in (torch.bool, torch.uint8)]
    return any(i.numel() > 1 for i in numbers)


def _is_plain_write(op: Any, x: Tensor, source: Any) -> bool:
    """Whether nothing that is written has a history, or it is of the memory written to, which torch refuses."""
    return not _records(source) or (op._schema.is_mutable and share_memory([x, source]))


def _index_put(op: Any) -> None:
    @written_out(op, depth=1)
    def index_put(x, indices, values, accumulate=False):
        """x [*S], values that broadcast to x[indices] -> [*S]"""
        if accumulate or _is_plain_write(op, x, values) or not _indices_repeat(indices):
            return op(x, indices, values, accumulate)

        def places(order):
            return aten.index(aten.index_put(torch.full(x.shape, -1, device=x.device), indices, order), indices)

        values = values.expand(aten.index(x.detach(), indices).shape)
        return op(x, indices, _that_stay(values, places, *[i for i in indices if i is not None]))


def _scatter(op: Any) -> None:
    @written_out(op, depth=1)
    def scatter(x, dim, index, source):
        """x [*S], index [*I], source [*J] -> [*S]"""
        if _is_plain_write(op, x, source):
            return op(x, dim, index, source)

        def places(order):
            return torch.full(x.shape, -1, device=x.device).scatter(dim, index, order).gather(dim, index)

        return op(x, dim, index, _that_stay(cut(source, index), places, index))


def _index_copy(op: Any) -> None:
    @written_out(op, depth=1)
    def index_copy(x, dim, index, source):
        """x [*S, N, *T], index [I], source [*S, I, *T] -> [*S, N, *T]"""
        if _is_plain_write(op, x, source) or index.numel() < 2:
            return op(x, dim, index, source)

        def places(order):
            return torch.full(x.shape, -1, device=x.device).index_copy(dim, index, order).index_select(dim, index)

        return op(x, dim, index, _that_stay(source, places, index))


def _put(op: Any) -> None:
    @written_out(op, depth=1)
    def put(x, index, source, accumulate=False):
        """x [*S], index, source [*I] -> [*S]"""
        if accumulate or _is_plain_write(op, x, source) or index.numel() < 2:
            return op(x, index, source, accumulate)

        def places(order):
            return torch.full(x.shape, -1, device=x.device).put(index, order).take(index)

        return op(x, index, _that_stay(source, places, index))


def _max_unpool(op: Any, dims: int) -> None:
    @written_out(op, depth=1)
    def max_unpool(x, indices, *sizes):
        """x [*N, *S], indices [*N, *S] -> [*N, *R]"""

        def places(order):
            found = op(order.to(x.dtype) + 1, indices, *sizes).flatten(-dims).gather(-1, indices.flatten(-dims))
            return (found - 1).to(torch.int64).reshape(order.shape)

        return op(_that_stay(x, places, indices), indices, *sizes)


for _op in (aten.index_put.default, aten.index_put_.default):
    _index_put(_op)
for _op in (aten.scatter.src, aten.scatter_.src):
    _scatter(_op)
for _op in (aten.index_copy.default, aten.index_copy_.default):
    _index_copy(_op)
for _op in (aten.put.default, aten.put_.default):
    _put(_op)
_max_unpool(aten.max_unpool2d.default, 2)
_max_unpool(aten.max_unpool3d.default, 3)


# --- what torch takes for a constant ----------------------------------------------------------------------------------


class _Sloped(Function):
    """A pointwise operation by its slope, a function of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Any, slope: Callable[..., Tensor], *rest: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope, ctx.rest = slope, rest
        return op(x, *rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (g * ctx.slope(x, *ctx.rest)).sum_to_size(x.shape), None, None, *[None for _ in ctx.rest]


def _sloped(op: Any, slope: Callable[..., Tensor]) -> None:
    @written_out(op, depth=1)
    def run(x, *rest):
        """x [*S] -> [*S]"""
        if _records(x):
            return _Sloped.apply(x, op, slope, *rest)
        return (op if isinstance(x, Tensor) else op.overloadpacket)(x, *rest)


for _op, _slope in SLOPES.items():
    _sloped(_op, _slope)
