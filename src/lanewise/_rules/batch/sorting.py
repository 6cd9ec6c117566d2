"""Sorting, searching, extremes, counting."""

import torch

from lanewise._rules.batch.families import along_dims, decompose, lane_rule, leading, shift_dim
from lanewise._rules.batch.operands import at_least_1d
from lanewise._rules.batch.ranking import argsort_rows, greatest_of_rows, sort_rows
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

along_dims(
    aten.count_nonzero.dim_IntList,
    aten.logsumexp.default,
)
along_dims(aten.argsort.stable, rather=argsort_rows)
along_dims(aten.sort.default, aten.sort.stable, rather=sort_rows)
along_dims(aten.topk.default, rather=greatest_of_rows)


# --- extremes --------------------------------------------------------------------------------------------------------


def _arg_extreme(op):
    @lane_rule(op)
    def arg(level, x, dim=None, keepdim=False):
        """x [B, *S] -> the place of the extreme along dim, or in the flat lane"""
        values = at_least_1d(level, x)
        if dim is None:
            out = op(values.flatten(1), 1)
            return out.view(level.size, *[1] * x.dim()) if keepdim else out
        if not x.dim():
            return op(values, shift_dim(dim, 1))
        return op(values, shift_dim(dim, x.dim()), keepdim)


_arg_extreme(aten.argmax.default)
_arg_extreme(aten.argmin.default)


@lane_rule(aten.aminmax.default)
def aminmax(level, x, *, dim=None, keepdim=False):
    """x [B, *S] -> the least and the greatest along dim, or of the lane"""
    values = at_least_1d(level, x)
    if dim is None or not x.dim():
        low, high = torch.aminmax(values.flatten(1), dim=1)
        return tuple(out.view(level.size, *[1] * x.dim()) if keepdim else out for out in (low, high))
    return tuple(torch.aminmax(values, dim=shift_dim(dim, x.dim()), keepdim=keepdim))


# --- searching -------------------------------------------------------------------------------------------------------


def _check_boundaries(boundaries):
    if not boundaries.dim():
        raise TransformError(at_user_line("boundaries tensor must be 1 dimension or more, but got dim(0)", "x[None]"))


@lane_rule(aten.searchsorted.Tensor)
def searchsorted(level, boundaries, x, *, sorter=None, **options):
    """boundaries [B, *, n] or [n], x [B, *, m], or [B, *S] where the boundaries of a lane are one row -> like x"""
    _check_boundaries(boundaries)
    common = torch.result_type(boundaries, x) if boundaries.dtype != x.dtype else x.dtype
    values = at_least_1d(level, x).to(common).contiguous()
    if boundaries.dim() == 1 and not level.mapped(boundaries) and not level.mapped(sorter):
        out = torch.searchsorted(boundaries.to(common), values, sorter=sorter, **options)
    else:
        rows = level.expanded(boundaries).to(common).contiguous()
        order = None if sorter is None else level.expanded(sorter).contiguous()
        flat = values.flatten(1) if boundaries.dim() == 1 else values
        out = torch.searchsorted(rows, flat, sorter=order, **options).view(values.shape)
    return out if x.dim() else out.squeeze(1)


@lane_rule(aten.searchsorted.Scalar)
def searchsorted_scalar(level, boundaries, x, *, sorter=None, **options):
    """boundaries [B, n], a number -> [B]"""
    _check_boundaries(boundaries)
    if boundaries.dim() > 1:
        raise TransformError(
            at_user_line(
                "torch.searchsorted: input value can be a scalar only when boundaries tensor dimension is 1, got "
                f"{list(boundaries.shape)}"
            )
        )
    order = None if sorter is None else level.expanded(sorter).contiguous()
    common = torch.result_type(boundaries, x)
    rows = level.expanded(boundaries).to(common).contiguous()
    return torch.searchsorted(rows, rows.new_full((level.size, 1), x), sorter=order, **options).squeeze(1)


def _bucketize(search):
    def bucketize(x, boundaries, **options):
        if boundaries.dim() != 1:
            why = f"bucketize: boundaries tensor must be 1 dimension, but got {list(boundaries.shape)}"
            raise TransformError(at_user_line(why, "torch.searchsorted(boundaries, x)  # a row for each row of x"))
        return search(boundaries, x, **options)

    return bucketize


decompose(aten.bucketize.Tensor, _bucketize(aten.searchsorted.Tensor))
decompose(aten.bucketize.Scalar, _bucketize(aten.searchsorted.Scalar))
leading(aten.isin.Tensor_Scalar)


@lane_rule(aten.isin.Tensor_Tensor)
def isin(level, x, test, *, assume_unique=False, invert=False):
    """x [B, *S], test [B, *T] or [*T] -> bool [B, *S]"""
    if not level.mapped(test):
        return torch.isin(x.value, test, assume_unique=assume_unique, invert=invert)
    common = torch.promote_types(x.dtype, test.dtype) if x.dtype != test.dtype else x.dtype
    common = torch.uint8 if common is torch.bool else common
    values = at_least_1d(level, x).flatten(1).to(common)
    ranked = at_least_1d(level, test).flatten(1).to(common).sort(1).values
    count = ranked.shape[1]
    if count:
        places = torch.searchsorted(ranked, values.contiguous()).clamp_max(count - 1)
        found = ranked.gather(1, places) == values
    else:
        found = torch.zeros_like(values, dtype=torch.bool)
    return (found.logical_not() if invert else found).view(level.size, *x.shape)


@lane_rule(aten.isin.Scalar_Tensor)
def isin_scalar(level, x, test, *, assume_unique=False, invert=False):
    """a number, test [B, *T] -> bool [B]"""
    found = (at_least_1d(level, test) == x).flatten(1).any(1)
    return found.logical_not() if invert else found


# --- segments, norms of slices ---------------------------------------------------------------------------------------


@lane_rule(aten.segment_reduce.default)
def segment_reduce(
    level, data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None
):
    """data [B, *S], lengths or offsets [B, *L] -> [B, *reduced]"""
    return aten.segment_reduce(
        level.expanded(data).contiguous(),
        reduce,
        lengths=None if lengths is None else level.expanded(lengths).contiguous(),
        indices=None if indices is None else level.expanded(indices).contiguous(),
        offsets=None if offsets is None else level.expanded(offsets).contiguous(),
        axis=shift_dim(axis, data.dim()),
        unsafe=unsafe or not level.size,
        initial=initial,
    )


@lane_rule(aten._segment_reduce_backward.default)
def segment_reduce_backward(level, grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    """grad, output [B, *reduced], data [B, *S] -> [B, *S]"""
    return aten._segment_reduce_backward(
        *[level.expanded(t).contiguous() for t in (grad, output, data)],
        reduce,
        lengths=None if lengths is None else level.expanded(lengths).contiguous(),
        offsets=None if offsets is None else level.expanded(offsets).contiguous(),
        axis=shift_dim(axis, data.dim()),
        initial=initial,
    )


@lane_rule(aten.renorm.default)
def renorm(level, x, p, dim, maxnorm):
    """x [B, *S] -> the same, slices along dim scaled down to a norm of maxnorm"""
    if x.dim() < 2:
        raise TransformError(at_user_line(f"renorm: input needs at least 2 dimensions, got {x.dim()} dimensions"))
    rows = x.value.movedim(shift_dim(dim, x.dim()), 1)
    return aten.renorm(rows.flatten(0, 1), p, 0, maxnorm).view(rows.shape).movedim(1, shift_dim(dim, x.dim()))


@lane_rule(aten.renorm_.default)
def renorm_(level, x, p, dim, maxnorm):
    """x [B, *S] scaled in place; a copy is read, which the gradient needs as it was"""
    return x.value.copy_(renorm(level, level.wrap(x.value.clone()), p, dim, maxnorm))
