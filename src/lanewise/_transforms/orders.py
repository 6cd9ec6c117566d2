"""Derivatives of derivatives: operations whose formula in torch is wrong at a higher order, written out instead.

torch.autograd gives wrong numbers for the second derivative of `_weight_norm`, and for the third of `layer_norm` and
`batch_norm` (so of instance norm too). Inside `grad`, `vjp` and the like, weight norm is a composition of simpler
operations, whose derivatives are right at every order, and inside nested ones the other two are as well. The kernels
sit on a dispatch key that is switched on for that time. (What is wrong at the first order is in gradients.py.)

Some gradients have no derivative, or one that is not finite, in forward mode neither: those operations are compositions
where a gradient is differentiated in any way.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise._core.dual import DualLevel
from lanewise._core.level import current_level, leave_uncompiled, standing
from lanewise._core.plane import recorded
from lanewise._rules.batch.spread import normalized
from lanewise._rules.jvp.arithmetic import log_of_sum
from lanewise._rules.jvp.linalg import det_written_out
from lanewise._rules.jvp.losses import (
    ctc_written_out,
    multi_margin_loss,
    whole_cross_entropy,
    whole_cross_entropy_of_each,
    whole_multilabel_margin_loss,
)
from lanewise._rules.jvp.pointwise import i0, i1, sinc
from lanewise._rules.jvp.reductions import products_of_segments, scan, sums_of_segments
from lanewise._torch_compat import (
    ORDER_KEY,
    ORDER_KEY_NAME,
    ORDER_KEY_SET,
    ExcludeDispatchKeyGuard,
    include_key,
    never_compile,
)

aten = torch.ops.aten


_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, ORDER_KEY_NAME)
aten_kernels = torch.library.Library("aten", "IMPL")


def one_order_more() -> None:
    """A reverse pass begins to record."""
    standing.orders += 1
    if standing.orders == 1:
        include_key(ORDER_KEY, True)
        leave_uncompiled()


def back_to_orders(orders: int) -> None:
    """It has recorded: as many do as before."""
    standing.orders = orders
    if orders == 0:
        include_key(ORDER_KEY, False)


def recording() -> bool:
    """Whether a reverse pass of a transform records."""
    return standing.orders > 0


def written_out(op: Any, depth: int) -> Callable[[Callable], Callable]:
    """Register what stands for an operation in so many nested reverse passes and more."""

    def register(compose: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExcludeDispatchKeyGuard(ORDER_KEY_SET):
                return (op if standing.orders < depth else compose)(*args, **kwargs)

        never_compile(run)
        aten_kernels.impl(op.name().removeprefix("aten::"), run, ORDER_KEY_NAME)
        return compose

    return register


def without_derivative(library: torch.library.Library, name: str, compose: Callable) -> None:
    """Register what stands for an operation where its gradient is differentiated by another transform."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(ORDER_KEY_SET):
            if differentiations() > 1 and any(isinstance(arg, Tensor) and recorded(arg) for arg in args):
                return compose(*args, **kwargs)
            packet, _, overload = name.partition(".")
            return getattr(getattr(getattr(torch.ops, library.ns), packet), overload or "default")(*args, **kwargs)

    never_compile(run)
    library.impl(name, run, ORDER_KEY_NAME)


def differentiations() -> int:
    """How many transforms that are open differentiate."""
    total, level = standing.orders, current_level()
    while level is not None:
        total += isinstance(level, DualLevel)
        level = level.parent
    return total


@written_out(aten.layer_norm.default, depth=2)
def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """x [*N, *S], weight [*S], bias [*S] -> [*N, *S]"""
    if tuple(x.shape[x.dim() - len(normalized_shape) :]) != tuple(normalized_shape):
        return torch.layer_norm(x, normalized_shape, weight, bias, eps, cudnn_enable)
    out = normalized(x, list(range(-len(normalized_shape), 0)), eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


@written_out(aten.batch_norm.default, depth=2)
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    """x [N, C, *S], all others [C] -> [N, C, *S]"""
    if not training or x.numel() == 0:
        return torch.batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if running_mean is not None:
        # For what it writes into the running statistics.
        with torch.no_grad():
            torch.batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    channels = [1, -1] + [1] * (x.dim() - 2)
    out = normalized(x, [0, *range(2, x.dim())], eps)
    out = out if weight is None else out * weight.reshape(channels)
    return (out if bias is None else out + bias.reshape(channels)).to(x.dtype)


@written_out(aten._weight_norm.default, depth=1)
def weight_norm(v, g, dim=0):
    """v [*S], g with size 1 but for `dim` -> v g / |v|, the norm over all dims but `dim`"""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def vector_norm(x, ord: Any = 2, dim=None, keepdim=False, *, dtype=None):
    """x [*S] -> its norm along dims; torch's gradient is divided by it, and masked where it is 0"""
    if ord in (0, 1) or math.isinf(ord):
        return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype)
    with torch.no_grad():
        zero = torch.linalg.vector_norm(x.detach(), ord, dim, True) == 0
    norm = torch.linalg.vector_norm(torch.where(zero, 1, x), ord, dim, True, dtype=dtype).masked_fill(zero, 0)
    if keepdim:
        return norm
    return norm.squeeze(dim) if isinstance(dim, int) or dim else norm.reshape(())


@written_out(aten._cdist_forward.default, depth=1)
def cdist(a, b, p, mode=None):
    """a [*N, M, D], b [*N, R, D] -> the distances [*N, M, R]; the gradient of torch's own has no derivative"""
    if standing.orders == 1 and not math.isinf(p):
        return aten._cdist_forward(a, b, p, mode)
    return vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


@written_out(aten._pdist_forward.default, depth=1)
def pdist(x, p=2.0):
    """x [N, D] -> the distances of all pairs [N (N - 1) / 2]; torch's gradient of maxima that are equal is their sum"""
    if standing.orders == 1 and not math.isinf(p):
        return aten._pdist_forward(x, p)
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device).unbind(0)
    return vector_norm(x[first] - x[second], p, -1)


def ctc_loss(x, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """x [T, N, C] -> losses [N], and the gradient that torch gives, which has exp(x) added at the steps that count"""
    loss, sums = ctc_written_out(x, targets, input_lengths, target_lengths, blank)
    counts = torch.arange(x.shape[0], device=x.device) < torch.as_tensor(input_lengths, device=x.device).unsqueeze(-1)
    total = (x.exp().sum(-1) * counts.mT).sum(0) if x.dim() == 3 else (x.exp().sum(-1) * counts).sum()
    moved = loss + (total - total.detach())
    return moved.masked_fill(loss == torch.inf, 0) if zero_infinity else moved, sums


def euclidean_dist(a, b):
    """a [*N, M, D], b [*N, R, D] -> the distances [*N, M, R]; torch's gradient is divided by them, and then masked"""
    return vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), 2, -1)


def dist(x, y, p=2):
    """x, y [*S], which broadcast -> the norm of the difference []"""
    return vector_norm(x - y, p, None)


def logit(x, eps=None):
    """x [*S] -> [*S], the same beyond eps from 0 and 1; torch divides by 0 there before it masks"""
    if eps is None or eps <= 0:
        return torch.logit(x, eps)
    with torch.no_grad():
        fixed = x.detach()
        inside, out = (fixed >= eps) & (fixed <= 1 - eps), torch.logit(fixed, eps)
    return torch.where(inside, torch.logit(torch.where(inside, x, 0.5), eps), out)


def renorm(x, p, dim, maxnorm):
    """x [*S] -> its slices along dim scaled down to the norm maxnorm, as the kernel does"""
    norms = vector_norm(x, p, [d for d in range(x.dim()) if d != dim % x.dim()], keepdim=True)
    return x * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)


def logaddexp2(x, y):
    """x, y [*S] -> [*S], to the base 2"""
    return log_of_sum(x, y, math.log(2))


def logcumsumexp(x, dim):
    """x [*S] -> [*S]; torch's gradient takes the logarithms of gradients, which may be 0"""
    return torch.logcumsumexp(x, dim) if x.is_complex() else scan(log_of_sum, x, dim)


def power(x, e):
    """x, e [*S] -> [*S]; torch's gradient of x where e is 0 is a constant 0, which says nothing of e nearby

    Where x is 0 too, its derivative is 0 times infinity.
    """
    if x.is_complex() or e.is_complex():
        return torch.pow(x, e)
    if not recorded(e):
        return torch.pow(torch.where((x == 0) & (e == 0), 1, x), e)
    level = (e == 0) & (x > 0)
    return torch.where(level, (e * torch.where(level, x, 1).log()).exp(), torch.pow(x, e))


def hardsigmoid(x):
    """x [*S] -> [*S]"""
    return F.hardtanh(x + 3, 0, 6) / 6


def segment_reduce(x, reduce, *, axis=0, initial=None, **segments):
    """x [*N, L, *S] -> [*N, segments, *S]; of all reductions only the product's slope is not constant"""
    if reduce == "prod":
        return products_of_segments(x, axis, initial, **segments)
    with torch.no_grad():
        fixed = x.detach()
        out = aten.segment_reduce(fixed, reduce, axis=axis, initial=initial, **segments)
        kept = {key: value for key, value in segments.items() if key in ("lengths", "offsets")}
        slope = aten._segment_reduce_backward(
            torch.ones_like(out), out, fixed, reduce, axis=axis, initial=initial, **kept
        )
    # 0, but for its derivative.
    moved = (x - fixed).nan_to_num(0) * slope
    return out + sums_of_segments(moved, axis, **kept)


def embedding_bag(weight, indices, offsets, by_count=False, mode=0, sparse=False, factors=None, last=False, padding=-1):
    """weight [V, D], indices [N], offsets [B] -> [B, D], and what the kernel gives beside it"""
    with torch.no_grad():
        fixed = None if factors is None else factors.detach()
        _, *rest = aten._embedding_bag(weight.detach(), indices, offsets, by_count, mode, sparse, fixed, last, padding)
    if by_count or sparse:
        return aten._embedding_bag(weight, indices, offsets, by_count, mode, sparse, factors, last, padding)
    if mode == 2:
        empty = (rest[1] == 0).unsqueeze(-1)
        return weight.gather(0, rest[2].clamp_min(0).to(torch.int64)).masked_fill(empty, 0), *rest
    starts = offsets[:-1] if last else offsets
    bags = (
        torch.searchsorted(starts.contiguous(), torch.arange(indices.shape[0], device=indices.device), right=True) - 1
    )
    counted = (indices != padding).to(weight.dtype)
    scale = counted if factors is None else counted * factors
    if mode == 1:
        sizes = torch.zeros_like(starts, dtype=weight.dtype).index_add(0, bags, counted)
        scale = scale / sizes.clamp_min(1)[bags]
    rows = weight.index_select(0, indices) * scale.unsqueeze(-1)
    return weight.new_zeros(starts.shape[0], weight.shape[1]).index_add(0, bags, rows), *rest


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """query [*N, L, E], key [*N, S, E], value [*N, S, V] -> [*N, L, V]; what is dropped the kernel has to say"""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The formula adds it.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
    given, options = (query, key, value, attn_mask, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
    if dropout_p:
        return F.scaled_dot_product_attention(*given, **options)
    return aten._scaled_dot_product_attention_math(*given, **options)[0]


def attention_on_cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """The kernel that attention comes to, where lanes have been folded into it; and [*N, L] for what it keeps"""
    out = aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return out, query.new_zeros(query.shape[:-1])


_nn_kernels = torch.library.Library("torch_nn", "IMPL")
for _name, _compose in {
    "_ctc_loss": ctc_loss,
    "_ctc_loss.Tensor": ctc_loss,
    "_embedding_bag": embedding_bag,
    "_euclidean_dist": euclidean_dist,
    "_linalg_det": det_written_out,
    "_scaled_dot_product_flash_attention_for_cpu": attention_on_cpu,
    "dist": dist,
    "hardsigmoid": hardsigmoid,
    "i0": i0,
    "linalg_vector_norm": vector_norm,
    "logaddexp2": logaddexp2,
    "logcumsumexp": logcumsumexp,
    "logit": logit,
    "multi_margin_loss": multi_margin_loss,
    "multilabel_margin_loss_forward": whole_multilabel_margin_loss,
    "pow.Tensor_Tensor": power,
    "renorm": renorm,
    "scaled_dot_product_attention": attention,
    "segment_reduce": segment_reduce,
    "sinc": sinc,
    "special_i1": i1,
}.items():
    without_derivative(aten_kernels, _name, _compose)
without_derivative(_nn_kernels, "_linear_cross_entropy_batch_chunked", whole_cross_entropy)
without_derivative(_nn_kernels, "_linear_cross_entropy_batch_chunked_no_reduction", whole_cross_entropy_of_each)
