"""Scaled dot-product attention and the fused layers built on it. Lanes are folded into the batch dim N."""

import math

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import standing
from lanewise._core.plane import recorded, tracked
from lanewise._core.python.factories import route_past
from lanewise._core.short.direct import unwatched
from lanewise._rules.batch.families import decompose, lane_rule, shift_dim
from lanewise._rules.batch.operands import at_hand, split_lanes
from lanewise._rules.batch.spread import linear_of_torch
from lanewise._rules.batch.tracking import is_tracked
from lanewise._torch_compat import apply_plainly, cast_as_called, forward_level, is_grad_enabled

aten = torch.ops.aten

# As it is now: what others put in its place later calls it, and so comes here.
_attention_of_torch = F.scaled_dot_product_attention


def _fold(level: BatchLevel, tensor: Tensor) -> Tensor:
    """[B, N, *S] or [N, *S] -> [B * N, *S]"""
    return level.expanded(tensor).flatten(0, 1)


def _fold_mask(level: BatchLevel, mask: Tensor | None, images: int) -> Tensor | None:
    """A mask [B, L, S] or [B, N or 1, H or 1, L, S], or either without B, as one for `B * N` images.

    A mask without lanes stays as it is where it is the same for all images.
    """
    if mask is None:
        return None
    if not level.mapped(mask) and (mask.dim() == 2 or mask.shape[0] == 1):
        return mask
    value = level.expanded(mask)
    if mask.dim() == 2:
        value = value[:, None, None]
    return value.expand(level.size, images, *value.shape[2:]).flatten(0, 1)


@lane_rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(level, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """query [B, N, H, L, E], key and value [B, N, H, S, E] -> out [B, N, H, L, E], logsumexp [B, N, H, L]"""
    lanes, images = level.size, query.shape[0]
    q, k, v = (_fold(level, t) for t in (query, key, value))
    mask = _fold_mask(level, attn_mask, images)
    if mask is not None and tracked(mask):
        # Seen from this plane the mask needs no gradient, so torch chose a kernel that gives it none.
        scores = _scores(q, for_each_head(k, q), mask, is_causal, scale)
        parts = aten._safe_softmax(scores, -1) @ for_each_head(v, q), scores.logsumexp(-1)
    else:
        parts = _fused(q, k, v, mask, dropout_p, is_causal, scale)
    return tuple(split_lanes(t, lanes, images) for t in parts)


def _fused(query, key, value, mask, dropout_p, is_causal, scale):
    """torch's kernel of query [N, H, L, E], with a second derivative where autograd records it on the lowest plane."""
    operands = (query, key, value)
    plain = at_hand(*operands) if mask is None else at_hand(*operands, mask) and not mask.requires_grad
    if plain and standing.orders < 2 and not dropout_p and forward_level() < 0 and is_tracked(*operands):
        return apply_plainly(_Fused, *operands, mask, is_causal, scale)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(*operands, dropout_p, is_causal, attn_mask=mask, scale=scale)


class _Fused(Function):
    """torch's kernel of operands [*N, H, L, E] -> out [*N, H, L, V] and logsumexp, of all images one after another"""

    @staticmethod
    def forward(ctx, query, key, value, mask, is_causal, scale):  # type: ignore[override]
        kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
        images = [t.flatten(0, -4) for t in (query, key, value)]
        out, logsumexp = kernel(*images, 0.0, is_causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        ctx.options = is_causal, scale
        return out.view(*query.shape[:-3], *out.shape[1:]), logsumexp

    @staticmethod
    def backward(ctx, cotangent, _):  # type: ignore[override]
        if cotangent is None:
            return (None,) * 6
        *operands, mask, out, logsumexp = ctx.saved_tensors
        is_causal, scale = ctx.options
        grad, query, key, value = (t.flatten(0, -4) for t in (cotangent, *operands))
        if is_grad_enabled():
            parts = attention_backward_formula(grad, query, key, value, mask, is_causal, scale)
        else:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            options = {"attn_mask": mask, "scale": scale}
            parts = kernel(grad, query, key, value, out, logsumexp, 0.0, is_causal, **options)
        return *[part.view(t.shape) for part, t in zip(parts, operands, strict=True)], None, None, None


@lane_rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    level, grad, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """grad, out [B, N, H, L, E] -> gradients in query, key and value

    torch's kernel has no derivative of its own, so where one is wanted below, the formula is written out.
    """
    lanes, images = level.size, query.shape[0]
    g, q, k, v, out, logsumexp = (_fold(level, t) for t in (grad, query, key, value, out, logsumexp))
    mask = _fold_mask(level, attn_mask, images)
    if is_tracked(g, q, k, v, out):
        parts = attention_backward_formula(g, q, k, v, mask, is_causal, scale)
    else:
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask=mask, scale=scale
        )
    return tuple(split_lanes(t, lanes, images) for t in parts)


def for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values [N, H', S, E] -> [N, H, S, E]: where H' < H, so many heads of the query share one."""
    shared = query.shape[1] // x.shape[1]
    return x if shared == 1 else x.repeat_interleave(shared, 1)


def for_shared_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient in `for_each_head(x, query)` -> that in x."""
    heads = x.shape[1]
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _scores(query, key, mask, is_causal, scale):
    """scale q k' + mask, -inf where a row may not look"""
    scores = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * query @ key.mT
    if is_causal:
        rows, columns = scores.shape[-2:]
        ahead = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores


def attention_backward_formula(grad, query, key, value, mask, is_causal, scale):
    """Gradients of softmax(scale q k' + mask) v in q, k and v, by differentiable operations."""
    keys, values = for_each_head(key, query), for_each_head(value, query)
    weights = aten._safe_softmax(_scores(query, keys, mask, is_causal, scale), -1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    grad_weights = grad @ values.mT
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    grad_keys, grad_values = scale * grad_scores.mT @ query, weights.mT @ grad
    return scale * grad_scores @ keys, for_shared_heads(grad_keys, key), for_shared_heads(grad_values, value)


@lane_rule(aten._fused_sdp_choice.default, raw=True)
def fused_choice(
    level, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """The kernel that torch picks for one lane's shapes, if it is one that has a rule here; else the plain formula"""
    flash = query.device.type == "cpu" and query.dim() == 4 and dropout_p == 0.0 and not enable_gqa
    if not flash:
        return int(torch.nn.attention.SDPBackend.MATH.value)
    lane = [torch.empty(t.shape, dtype=t.dtype) for t in (query, key, value)]
    return aten._fused_sdp_choice.default(*lane, None, dropout_p, is_causal, scale=scale)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Attention as one operation on the plane below, where nobody records it on this one; else NotImplemented.

    torch's fused kernels have no second derivative, the operations that they stand for have.
    """
    if type(query) is not BatchTensor or query.level.lanes is not None or dropout_p or enable_gqa:
        return NotImplemented
    level = query.level
    if not level.size or not 2 <= query.dim() <= 4 or not unwatched(level):
        return NotImplemented
    in_training = level.unrecorded and not standing.orders
    for operand in (query, key, value):
        if not level.mapped(operand) or operand.dim() != query.dim() or operand.dtype is not query.dtype:
            return NotImplemented
        if is_grad_enabled() and (recorded(operand) if in_training else tracked(operand)):
            return NotImplemented
    if attn_mask is not None and (type(attn_mask) is not Tensor or attn_mask.requires_grad or attn_mask.dim() > 2):
        return NotImplemented
    values = (query.value, key.value, value.value)
    return level.wrap(level.below(attention_of_lanes, *values, attn_mask, is_causal, scale))


def attention_of_lanes(query, key, value, mask, is_causal, scale):
    """query [B, *N, L, E] with up to two dims N -> [B, *N, L, V]; in the four dims that the fused kernels take"""
    operands = (query, key, value)
    missing = 5 - query.dim()
    if is_tracked(*operands):
        wide = [t.view(t.shape[0], *[1] * missing, *t.shape[1:]) for t in operands] if missing else operands
        if _is_fused(wide, mask, is_causal, scale):
            out = apply_plainly(_Fused, *wide, _added(mask, query.dtype), is_causal, scale)[0]
            return out.flatten(0, missing) if missing else out
    if missing == 2:
        query, key, value = (t.unsqueeze(1) for t in operands)
        return _attention_of_torch(query, key, value, mask, 0.0, is_causal, scale=scale).squeeze(1)
    if missing == 1:
        return _attention_of_torch(query, key, value, mask, 0.0, is_causal, scale=scale)
    lanes = query.shape[:2]
    query, key, value = (t.flatten(0, 1) for t in operands)
    return _attention_of_torch(query, key, value, mask, 0.0, is_causal, scale=scale).unflatten(0, lanes)


def _added(mask, dtype):
    """A mask [L, S] as what the kernel adds to scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)


_FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value


def _is_fused(operands, mask, is_causal, scale):
    """Whether torch takes the kernel that has no second derivative, of a query, key and value [B, N, H, L, E]."""
    if not operands[0].shape[0] or not at_hand(*operands) or forward_level() >= 0:
        return False
    kind = (
        *[(t.shape, t.stride(), t.dtype) for t in operands],
        None if mask is None else (mask.shape, mask.dtype),
        is_causal,
        scale,
        torch.backends.cuda.flash_sdp_enabled(),
    )
    found = _fused_kinds.get(kind)
    if found is None:
        if len(_fused_kinds) >= _MOST_KINDS:
            _fused_kinds.clear()
        with torch.no_grad():
            lane = (t[0] for t in operands)  # which copies nothing, whatever the strides
            choice = aten._fused_sdp_choice.default(*lane, mask, 0.0, is_causal, scale=scale)
        found = _fused_kinds[kind] = choice == _FLASH
    return found


# To ask takes as long as to attend to a few elements.
_fused_kinds: dict[tuple, bool] = {}
_MOST_KINDS = 1000


route_past(aten.scaled_dot_product_attention.default, _attention)


@lane_rule(aten._safe_softmax.default, guarded=False)
def safe_softmax(level, x, dim, dtype=None):
    """x [B, *S] -> [B, *S], zeros where all of a row is -inf; torch's own looks at each element for that"""
    axis = shift_dim(dim, max(x.dim(), 1))
    value = x.value if x.dim() else x.value.unsqueeze(1)
    out = torch.softmax(value, axis, dtype)
    if value.shape[axis] == 0:
        return out
    masked = value.amax(axis, keepdim=True) == -math.inf
    if at_hand(value) and not masked.any():
        return out if x.dim() else out.squeeze(1)
    # A row of -inf has a softmax of nan, and so would be its gradient, whatever is filled in afterwards.
    out = torch.softmax(value.masked_fill(masked, 0), axis, dtype).masked_fill(masked, 0)
    return out if x.dim() else out.squeeze(1)


# --- layers ----------------------------------------------------------------------------------------------------------


def multi_head_attention(
    query,
    key,
    value,
    embed_dim,
    heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """query [N, L, E], key and value [N, S, E] -> out [N, L, E] and weights [N, L, S] or [N, heads, L, S]"""
    parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (linear_of_torch(x, w, b).unflatten(-1, (heads, embed_dim // heads)).transpose(1, 2) for x, w, b in parts)
    scores = q @ k.mT / math.sqrt(embed_dim // heads)
    if mask is not None:
        if mask_type == 1:
            mask = mask[:, None, None, :]
        scores = scores.masked_fill(mask.bool(), -math.inf)
    weights = torch.softmax(scores, -1)
    out = linear_of_torch((weights @ v).transpose(1, 2).flatten(-2), proj_weight, proj_bias)
    if not need_weights:
        return out, out.new_empty(0)
    return out, weights.mean(1) if average_attn_weights else weights


def _under_autocast(layer):
    """A layer whose kernel asks torch for products, which autocast casts."""

    def run(*args, **kwargs):
        with cast_as_called():
            return layer(*args, **kwargs)

    return run


decompose(aten._native_multi_head_attention.default, _under_autocast(multi_head_attention))


def encoder_layer(
    x,
    embed_dim,
    heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    """x [N, L, E] -> [N, L, E]"""
    attention = (embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)
    act = F.gelu if use_gelu else F.relu

    def feed_forward(y):
        return linear_of_torch(act(linear_of_torch(y, ffn_weight_1, ffn_bias_1)), ffn_weight_2, ffn_bias_2)

    def norm_1(y):
        return F.layer_norm(y, [embed_dim], norm_weight_1, norm_bias_1, eps)

    def norm_2(y):
        return F.layer_norm(y, [embed_dim], norm_weight_2, norm_bias_2, eps)

    def added(y, x):
        return (y + x).to(y.dtype)  # in place, in the kernel, which under autocast computes y in another dtype

    if norm_first:
        y = norm_1(x)
        x = added(multi_head_attention(y, y, y, *attention)[0], x)
        return added(feed_forward(norm_2(x)), x)
    x = norm_1(added(multi_head_attention(x, x, x, *attention)[0], x))
    return norm_2(added(feed_forward(x), x))


decompose(aten._transformer_encoder_layer_fwd.default, _under_autocast(encoder_layer))
