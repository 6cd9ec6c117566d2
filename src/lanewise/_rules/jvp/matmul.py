"""Forward rules of matrix products and convolutions: one product for the primal, one for each tangent."""

import functools

import torch

from lanewise._core.layouts import product_of_layouts
from lanewise._rules.batch.attention import encoder_layer, for_each_head, for_shared_heads, multi_head_attention
from lanewise._rules.jvp.families import decomposed, fitted, jvp_rule, multilinear

aten = torch.ops.aten

multilinear(aten.dot.default, aten.vdot.default)
multilinear(aten._trilinear.default, operands=3)


def _product(op, add):
    """A bilinear product whose second part can be added in the same call."""

    def rule(level, a, b):
        pa, pb = level.primal(a), level.primal(b)
        ta, tb = level.tangent(a), level.tangent(b)
        product = op if pa.layout is pb.layout else functools.partial(product_of_layouts, op)
        out = product(pa, pb)
        if tb is None:
            return out, product(ta, pb)
        if ta is None:
            return out, product(pa, tb)
        return out, add(op(ta, pb), pa, tb)

    return rule


jvp_rule(aten.mm.default, guarded=False)(_product(torch.mm, torch.addmm))
jvp_rule(aten.bmm.default, guarded=False)(_product(torch.bmm, torch.baddbmm))
jvp_rule(aten.mv.default, guarded=False)(_product(torch.mv, torch.addmv))


def _added_product(op, product):
    """beta c + alpha a b: the tangents of a and b go through the same operation, that of c where there is one."""

    def rule(level, c, a, b, *, beta=1, alpha=1):
        pc, pa, pb = level.primal(c), level.primal(a), level.primal(b)
        tc, ta, tb = level.tangent(c), level.tangent(a), level.tangent(b)
        out = op(pc, pa, pb, beta=beta, alpha=alpha)
        total, factor = tc, beta
        if beta == 0:
            total = None
        for x, y in ((ta, pb), (pa, tb)):
            if x is None or y is None:
                continue
            if total is None:
                total = product(x, y)
                total = total if alpha == 1 else total * alpha
            else:
                total = op(total, x, y, beta=factor, alpha=alpha)
            factor = 1
        if total is tc and tc is not None:
            total = fitted(tc if beta == 1 else tc * beta, out, c, tc)
        return out, total

    jvp_rule(op, guarded=False)(rule)


_added_product(aten.addmm.default, torch.mm)
_added_product(aten._sparse_addmm.default, torch.mm)
_added_product(aten.addmv.default, torch.mv)
_added_product(aten.addr.default, torch.outer)
_added_product(aten.addbmm.default, lambda a, b: torch.bmm(a, b).sum(0))
_added_product(aten.baddbmm.default, torch.bmm)


@jvp_rule(aten.convolution.default)
def convolution(level, x, w, bias, *settings):
    """conv(t_x, w) + conv(x, t_w) + t_bias"""
    px, pw, pb = level.primal(x), level.primal(w), level.primal(bias)
    tx, tw, tb = level.tangent(x), level.tangent(w), level.tangent(bias)
    out = aten.convolution.default(px, pw, pb, *settings)
    total = None
    if tw is not None:
        total = aten.convolution.default(px, tw, tb, *settings)
    if tx is not None:
        part = aten.convolution.default(tx, pw, tb if tw is None else None, *settings)
        total = part if total is None else total + part
    if total is None:
        total = tb.reshape(-1, *[1] * (out.dim() - 2)).expand(out.shape).contiguous()
    return out, total


# --- attention: the fused kernels have no formula of the second order -------------------------------------------------


def _scores(q, k, is_causal, attn_mask, scale):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    return scores


@decomposed(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """softmax(q k' / sqrt(d)) v and the log of the softmax's divisor"""
    scores = _scores(q, for_each_head(k, q), is_causal, attn_mask, scale)
    return torch.softmax(scores, -1) @ for_each_head(v, q), scores.logsumexp(-1)


@decomposed(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    g, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):  # fmt: skip
    """From the weights p = exp(scores - logsumexp): gradients of q, k and v"""
    keys, values = for_each_head(k, q), for_each_head(v, q)
    p = (_scores(q, keys, is_causal, attn_mask, scale) - logsumexp.unsqueeze(-1)).exp()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gs = p * (g @ values.transpose(-2, -1) - (g * out).sum(-1, True)) * scale
    return gs @ keys, for_shared_heads(gs.transpose(-2, -1) @ q, k), for_shared_heads(p.transpose(-2, -1) @ g, v)


decomposed(aten._native_multi_head_attention.default)(multi_head_attention)
decomposed(aten._transformer_encoder_layer_fwd.default)(encoder_layer)
