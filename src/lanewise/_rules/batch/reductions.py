"""Reductions, scans and other operations along dims that their arguments name."""

import torch

from lanewise._rules.batch.families import along_dims, decompose, full_reduction, lane_rule, shift_dims

aten = torch.ops.aten

along_dims(
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.all.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.cummax.default,
    aten.cummin.default,
    aten.cumprod.default,
    aten.cumprod_.default,
    aten.cumsum.default,
    aten.cumsum_.default,
    aten.glu.default,
    aten.glu_backward.default,
    aten.glu_jvp.default,
    aten.kthvalue.default,
    aten.linalg_vector_norm.default,
    aten.logcumsumexp.default,
    aten.max.dim,
    aten.mean.dim,
    aten.median.dim,
    aten.min.dim,
    aten.mode.default,
    aten.nanmedian.dim,
    aten.nansum.default,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.prod.dim_int,
    aten.std.correction,
    aten.std_mean.correction,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var_mean.correction,
)
full_reduction(aten._is_all_true.default, aten.all.dim)  # torch.distributions asks it of each parameter
full_reduction(aten.all.default, aten.all.dim)
full_reduction(aten.any.default, aten.any.dim)
full_reduction(aten.mean.default, aten.mean.dim)
full_reduction(aten.prod.default, aten.prod.dim_int)
full_reduction(aten.sum.default, aten.sum.dim_IntList)


def _norm(x, p=2, *, dtype=None):
    return torch.linalg.vector_norm(x, 2 if p is None else p, dtype=dtype)


decompose(aten.norm.Scalar, _norm)
decompose(aten.norm.ScalarOpt_dtype, _norm)


@lane_rule(aten.count_nonzero.default)
def count_nonzero(level, x, dim=None):
    """x [B, *S] -> [B, *S without dim]"""
    counted = x.value != 0
    if x.dim() == 0:
        return counted.to(torch.int64)
    return counted.sum(list(range(1, x.dim() + 1)) if dim is None else shift_dims(dim, x.dim()))


def _over_dims(op):
    @lane_rule(op)
    def over_dims(level, x, dim=None, keepdim=False):
        """x [B, *S] -> [B, *S without dims]; of no dims, each element by itself"""
        if dim is not None and not dim:
            found = x.value.bool()
            return found.to(torch.uint8) if x.dtype is torch.uint8 else found
        if not x.dim():
            return op(x.value.unsqueeze(1), [1])
        return op(x.value, shift_dims(dim, x.dim()), keepdim)


_over_dims(aten.all.dims)
_over_dims(aten.any.dims)
