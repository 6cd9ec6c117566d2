"""Forward rules of reductions, scans, sorting and softmax."""

import math
from typing import Any

import torch

from lanewise._core.plane import replace_tensors
from lanewise._rules.jvp.arithmetic import log_of_sum
from lanewise._rules.jvp.families import decomposed, jvp_rule, linear, rule_on_plane, torch_jvp

aten = torch.ops.aten

linear(
    aten.cumsum.default,
    aten.mean.default,
    aten.mean.dim,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.trace.default,
)


def _dims(dim, rank):
    """The dims of a reduction, all of them for None and []."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return [dim] if isinstance(dim, int) else list(dim)


def _kept(y, dim, keepdim, rank):
    """A reduced value with the dims it was reduced over kept as 1s."""
    if keepdim or not rank:
        return y
    for d in sorted(d % rank for d in _dims(dim, rank)):
        y = y.unsqueeze(d)
    return y


def _sum(x, dim, keepdim):
    return x.sum(_dims(dim, x.dim()), keepdim) if x.dim() else x.sum()


@jvp_rule(aten.nansum.default)
def nansum(level, x, dim=None, keepdim=False, *, dtype=None):
    """The sum of t where x is a number"""
    out = torch.nansum(x.value, dim, keepdim, dtype=dtype)
    return out, _sum(x.tangent.masked_fill(x.value.isnan(), 0), dim, keepdim).to(out.dtype)


def _spread(x, t, y, dim, keepdim):
    """The mean of t over the elements of x that are the extreme value y."""
    hits = x == _kept(y, dim, keepdim, x.dim())
    return _sum(t.masked_fill(~hits, 0), dim, keepdim) / _sum(hits, dim, keepdim)


@jvp_rule(aten.amax.default, guarded=False)
def amax(level, x, dim=(), keepdim=False):
    """The mean of t over the elements that are largest"""
    y = torch.amax(x.value, dim, keepdim)
    return y, _spread(x.value, x.tangent, y, dim, keepdim)


@jvp_rule(aten.amin.default, guarded=False)
def amin(level, x, dim=(), keepdim=False):
    """The mean of t over the elements that are smallest"""
    y = torch.amin(x.value, dim, keepdim)
    return y, _spread(x.value, x.tangent, y, dim, keepdim)


def _of_all(op: Any) -> None:
    @jvp_rule(op, guarded=False)
    def chosen(level, x):
        """The mean of t over the elements that equal the one that is chosen"""
        y = op(x.value)
        return y, _spread(x.value, x.tangent, y, None, False)


_of_all(aten.max.default)
_of_all(aten.median.default)
_of_all(aten.min.default)
_of_all(aten.nanmedian.default)


@jvp_rule(aten.aminmax.default, guarded=False)
def aminmax(level, x, *, dim=None, keepdim=False):
    """The mean of t over the elements that are smallest, and largest"""
    low, high = out = aten.aminmax.default(x.value, dim=dim, keepdim=keepdim)
    tangents = [_spread(x.value, x.tangent, y, dim, keepdim) for y in (low, high)]
    return out, tangents


def _chooses(op, dim_position, keeps=True):
    """`(values, indices)` along a dim: the tangent is taken at the indices."""

    def rule(level, x, *args, **kwargs):
        values, indices = out = op(x.value, *args, **kwargs)
        t, dim = x.tangent, args[dim_position] if dim_position < len(args) else kwargs.get("dim", -1)
        if t.dim() == 0:
            return out, [t.mul(1), None]
        if keeps or (args[dim_position + 1] if len(args) > dim_position + 1 else kwargs.get("keepdim", False)):
            return out, [t.gather(dim, indices), None]
        return out, [t.gather(dim, indices.unsqueeze(dim)).squeeze(dim), None]

    jvp_rule(op, guarded=False)(rule)


_chooses(aten.cummax.default, 0)
_chooses(aten.cummin.default, 0)
_chooses(aten.kthvalue.default, 1, keeps=False)
_chooses(aten.max.dim, 0, keeps=False)
_chooses(aten.median.dim, 0, keeps=False)
_chooses(aten.min.dim, 0, keeps=False)
_chooses(aten.mode.default, 0, keeps=False)
_chooses(aten.nanmedian.dim, 0, keeps=False)
_chooses(aten.sort.default, 0)
_chooses(aten.topk.default, 1)


@jvp_rule(aten.sort.stable, guarded=False)
def sort_stable(level, x, *, stable, dim=-1, descending=False):
    """t in the order of x"""
    out = aten.sort.stable(x.value, stable=stable, dim=dim, descending=descending)
    return out, [x.tangent.gather(dim, out[1]) if x.dim() else x.tangent.mul(1), None]


def over(t, y):
    """t / y, and 0 where y is 0, in its derivatives too"""
    zero = y == 0
    return (t / y.masked_fill(zero, 1)).masked_fill(zero, 0)


def _correction(correction):
    return 1 if correction is None else correction


def _variance_tangent(x, t, dim, correction, keepdim):
    """2 / (n - correction) sum((x - mean) t)"""
    dims = _dims(dim, x.dim())
    count = 1
    for d in dims:
        count *= x.shape[d]
    weighted = _along(x - x.mean(dims, True) if dims else x - x, t).sum(dims, keepdim)
    divisor = max(count - _correction(correction), 0)
    return weighted * (2 / divisor) if divisor else weighted / 0


@jvp_rule(aten.var.correction, guarded=False)
def var(level, x, dim=None, *, correction=None, keepdim=False):
    """2 / (n - correction) sum((x - mean) t)"""
    out = torch.var(x.value, dim, correction=_correction(correction), keepdim=keepdim)
    return out, _variance_tangent(x.value, x.tangent, dim, correction, keepdim)


@jvp_rule(aten.std.correction, guarded=False)
def std(level, x, dim=None, *, correction=None, keepdim=False):
    """The variance's tangent over 2 std; 0 where std is 0"""
    out = torch.std(x.value, dim, correction=_correction(correction), keepdim=keepdim)
    t = _variance_tangent(x.value, x.tangent, dim, correction, keepdim)
    return out, over(t, 2 * out)


@jvp_rule(aten.var_mean.correction, guarded=False)
def var_mean(level, x, dim=None, *, correction=None, keepdim=False):
    """Those of var and mean"""
    out = torch.var_mean(x.value, dim, correction=_correction(correction), keepdim=keepdim)
    t = _variance_tangent(x.value, x.tangent, dim, correction, keepdim)
    return out, [t, x.tangent.mean(_dims(dim, x.dim()), keepdim)]


@jvp_rule(aten.std_mean.correction, guarded=False)
def std_mean(level, x, dim=None, *, correction=None, keepdim=False):
    """Those of std and mean"""
    out = torch.std_mean(x.value, dim, correction=_correction(correction), keepdim=keepdim)
    t = _variance_tangent(x.value, x.tangent, dim, correction, keepdim)
    return out, [over(t, 2 * out[0]), x.tangent.mean(_dims(dim, x.dim()), keepdim)]


@decomposed(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype)
def norm(x, p=2, dim=None, keepdim=False, *, dtype=None):
    """The norm; torch's formula gives the tangent of a matrix two dims, and writes to what its derivative needs"""
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@jvp_rule(aten.linalg_vector_norm.default)
def vector_norm(level, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """sum(sgn(x) t (|x| / y)^(p - 1)), which is sum(x t) / y for the 2-norm; 0 where x or y is 0"""
    value, t = (x.value, x.tangent) if dtype is None else (x.value.to(dtype), x.tangent.to(dtype))
    y = torch.linalg.vector_norm(value, ord, dim, keepdim)
    if ord == 0:
        return y, None
    if ord == 2:
        return y, over(_sum(_along(value, t), dim, keepdim), y)
    part = _along(value.sgn(), t)
    if ord == 1:
        return y, _sum(part, dim, keepdim)
    size, longest = value.abs(), _kept(y, dim, keepdim, value.dim())
    if math.isinf(ord):
        return y, _spread(size, part, y, dim, keepdim)
    flat = (size == 0) | (longest == 0)
    ratio = (size / longest.masked_fill(longest == 0, 1)).masked_fill(flat, 1)
    return y, _sum((part * ratio ** (ord - 1)).masked_fill(flat, 0), dim, keepdim)


def _along(x, t):
    return (x.conj() * t).real if x.is_complex() else x * t


@decomposed(aten.renorm.default)
def renorm(x, p, dim, maxnorm):
    """x, its slices along dim scaled down to the norm maxnorm, as the kernel does"""
    norms = torch.linalg.vector_norm(x, p, [d for d in range(x.dim()) if d != dim % x.dim()], keepdim=True)
    return x * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)


@jvp_rule(aten.logsumexp.default)
def logsumexp(level, x, dim, keepdim=False):
    """The mean of t with the weights softmax(x)"""
    out = torch.logsumexp(x.value, dim, keepdim)
    if not x.dim():
        return out, x.tangent.mul(1)
    if not x.numel():
        return out, torch.zeros_like(out)
    top = (x.value.real if x.is_complex() else x.value).amax(_dims(dim, x.dim()), True).detach()
    # Where all are the same infinity, they share.
    weights = (x.value - top).masked_fill((x.value == top) & top.isinf(), 0).exp()
    return out, _sum(weights * x.tangent, dim, keepdim) / _sum(weights, dim, keepdim)


@jvp_rule(aten._softmax.default, guarded=False)
def softmax(level, x, dim, half_to_float):
    """y (t - sum(y t))"""
    y = aten._softmax.default(x.value, dim, half_to_float)
    if half_to_float:
        t = x.tangent.to(y.dtype)
        return y, y * (t - (y * t).sum(dim, True))
    return y, aten._softmax_backward_data.default(x.tangent, y, dim, y.dtype)


@jvp_rule(aten._log_softmax.default, guarded=False)
def log_softmax(level, x, dim, half_to_float):
    """t - sum(exp(y) t)"""
    y = aten._log_softmax.default(x.value, dim, half_to_float)
    t = x.tangent.to(y.dtype) if half_to_float else x.tangent
    return y, t - (y.exp() * t).sum(dim, True)


@jvp_rule(aten._safe_softmax.default)
def safe_softmax(level, x, dim, dtype=None):
    """y (t - sum(y t)); rows of -inf alone give 0"""
    y = aten._safe_softmax.default(x.value, dim, dtype)
    t = x.tangent.to(y.dtype)
    return y, y * (t - (y * t).sum(dim, True))


@rule_on_plane(aten.segment_reduce.default)
def segment_reduce(level, x, reduce, *, axis=0, initial=None, **segments):
    """The sums over the segments of t times the slope, which is the gradient of the sum of the results"""
    if reduce == "prod" and level.tangent(x) is not None:
        return products_of_segments(x, axis, initial, **segments)
    return level.pair(*level.below(_reduced_segments, level, x, reduce, axis, initial, segments))


def _reduced_segments(level, x, reduce, axis, initial, segments):
    (), segments = replace_tensors(level.primal, (), segments)
    px, t = level.primal(x), level.tangent(x)
    out = aten.segment_reduce.default(px, reduce, axis=axis, initial=initial, **segments)
    if t is None:
        return out, None
    if reduce in ("sum", "mean"):
        return out, aten.segment_reduce.default(t, reduce, axis=axis, initial=0, **segments)
    # The slope of a maximum or a minimum is constant, and torch's has no derivative.
    kept = {key: value for key, value in segments.items() if key in ("lengths", "offsets")}
    slope = aten._segment_reduce_backward.default(
        torch.ones_like(out), out.detach(), px.detach(), reduce, axis=axis, initial=initial, **kept
    )
    return out, aten.segment_reduce.default(slope * t, "sum", axis=axis, initial=0, **segments)


def products_of_segments(x, axis, initial, *, lengths: Any = None, offsets: Any = None, **_):
    """The products of the last elements up to each, by doubling their number while they lie in its segment"""
    x, starts, ends, segment = _segments(x, axis, lengths, offsets)
    at = torch.arange(x.shape[-1], device=x.device)
    first = starts.gather(-1, segment.clamp_max(starts.shape[-1] - 1))
    reach = 1
    while reach < x.shape[-1]:
        before = torch.cat([torch.ones_like(x[..., :reach]), x[..., :-reach]], -1)
        x = x * before.masked_fill(at - reach < first, 1)
        reach *= 2
    x = torch.cat([x, torch.ones_like(starts[..., :1], dtype=x.dtype)], -1)  # something to take where all is empty
    out = x.gather(-1, (ends - 1).clamp_min(0)).masked_fill(ends == starts, 1)
    return (out if initial is None else out * initial).movedim(-1, axis)


def sums_of_segments(x, axis, *, lengths: Any = None, offsets: Any = None, **_):
    """The sums of the elements of each segment"""
    x, starts, _, segment = _segments(x, axis, lengths, offsets)
    # What lies behind the last segment goes into one that is cut off.
    total = torch.zeros_like(starts, dtype=x.dtype)
    total = torch.cat([total, total.new_zeros((*total.shape[:-1], 1))], -1)
    return total.scatter_add(-1, segment, x)[..., :-1].movedim(-1, axis)


def _segments(x, axis, lengths, offsets):
    """x [*, L], the first element of each segment and the one after its last [*, S], the segment of each element"""
    x = x.movedim(axis, -1)
    if offsets is None:
        offsets = torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))
    starts, ends = offsets[..., :-1], offsets[..., 1:]
    # Like x, [*, S], the segments of x after its first dims.
    shape = (*starts.shape[:-1], *[1] * (x.dim() - starts.dim()), starts.shape[-1])
    starts, ends = (v.reshape(shape).expand(*x.shape[:-1], -1) for v in (starts, ends))
    at = torch.arange(x.shape[-1], device=x.device)
    return x, starts, ends, torch.searchsorted(ends.contiguous(), at.expand(x.shape).contiguous(), right=True)


@jvp_rule(aten._segment_reduce_backward.default)
def segment_reduce_backward(level, g, y, x, reduce, **options):
    """Linear in g, and in nothing else but for products"""
    if reduce == "prod":
        return torch_jvp(level, aten._segment_reduce_backward.default, g, y, x, reduce, **options)
    t = level.tangent(g)
    (g, y, x), options = replace_tensors(level.primal, (g, y, x), options)
    out = aten._segment_reduce_backward.default(g, y, x, reduce, **options)
    return out, None if t is None else aten._segment_reduce_backward.default(t, y, x, reduce, **options)


# --- products: torch divides by the elements, which is wrong twice differentiated at zeros ----------------------------


@decomposed(aten.prod.default)
def prod(x, *, dtype=None):
    """The product of all elements, in pairs"""
    return torch.prod(x.reshape(-1), 0, dtype=dtype)


@decomposed(aten.prod.dim_int)
def prod_dim(x, dim, keepdim=False, *, dtype=None):
    """The product along a dim, in pairs"""
    if dtype is not None:
        x = x.to(dtype)
    elif not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.int64)
    if not x.dim():
        return x.clone()
    x = x.movedim(dim, 0)
    if not x.shape[0]:
        y = x.new_ones(x.shape[1:])
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        pairs = x[:half] * x[half : 2 * half]
        x = torch.cat([pairs, x[2 * half :]]) if x.shape[0] % 2 else pairs
    if x.shape[0]:
        y = x[0].clone()
    return y.unsqueeze(dim) if keepdim else y


@decomposed(aten.cumprod.default)
def cumprod(x, dim, *, dtype=None):
    """The products of the first elements, by doubling the length of the runs"""
    return scan(torch.mul, x if dtype is None else x.to(dtype), dim)


@decomposed(aten.logcumsumexp.default, aten._logcumsumexp.default)
def logcumsumexp(x, dim):
    """The same with sums of exponentials"""
    return scan(log_of_sum, x, dim)


def scan(combine, x, dim):
    """The results of `combine` on all elements so far, by doubling the length of the runs"""
    if not x.dim():
        return x.clone()
    x, reach = x.movedim(dim, 0), 1
    while reach < x.shape[0]:
        x = torch.cat([x[:reach], combine(x[reach:], x[:-reach])])
        reach *= 2
    return x.movedim(0, dim).clone()
