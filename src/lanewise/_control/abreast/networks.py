"""Modules of torch that are made of several layers, for lanes abreast: attention, transformers, recurrent networks."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._control.abreast.layers import Layer
from lanewise._control.abreast.running import add, call
from lanewise._control.abreast.values import FUNCTIONS, Declined, Lanes, Spread, check_shared, has_lanes, value_of
from lanewise._rules.batch.attention import attention_of_lanes
from lanewise._rules.batch.spread import linear_of_torch
from lanewise._torch_compat import is_grad_enabled


def _multihead_attention(
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """query [N, L, E] or [L, E], key and value likewise -> out, and weights [N, L, S] where they are wanted"""
    if (module.training and module.dropout) or key_padding_mask is not None or is_causal:
        raise Declined
    if attn_mask is not None and _may_be_fused(module):
        raise Declined
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise Declined
    rank = value_of(query).dim() - 1
    if rank not in (2, 3) or any(value_of(x).dim() != rank + 1 for x in (key, value)):
        raise Declined
    turned = rank == 3 and not module.batch_first
    heads, width = module.num_heads, module.head_dim
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key and key is value:
        parts = _linear(_images(query, turned), weight, bias).unflatten(-1, (3, heads, width)).unbind(3)
    else:
        triples = zip((query, key, value), _thirds(weight), _thirds(bias), strict=True)
        parts = [_linear(_images(x, turned), w, b).unflatten(-1, (heads, width)) for x, w, b in triples]
    q, k, v = [part.transpose(2, 3) for part in parts]
    mask = _additive(attn_mask, q, k)
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1 / width)) @ k.mT
        found = torch.softmax(scores if mask is None else scores + mask, -1)
        out = found @ v
        found = found.mean(2) if average_attn_weights else found
        weights = Lanes(found.squeeze(1) if rank == 2 else found)
    else:
        out = attention_of_lanes(q, k, v, mask, False, None)
    projection = module.out_proj
    out = _linear(out.transpose(2, 3).flatten(3), projection.weight, projection.bias)
    out = out.squeeze(1) if rank == 2 else out
    return Lanes(out.transpose(1, 2) if turned else out), weights


def _may_be_fused(module: nn.Module) -> bool:
    """Whether torch may take kernels of its own for the whole module, in which a mask means something else."""
    return not (module.training or (is_grad_enabled() and any(each.requires_grad for each in module.parameters())))


def _linear(value: Tensor, weight: Any, bias: Any) -> Tensor:
    has_lanes((weight, bias))
    return FUNCTIONS[linear_of_torch](Lanes(value), weight, bias).value


def _thirds(parameter: Any) -> Any:
    """The parts of a parameter that are for the query, the key and the value."""
    if type(parameter) in (Lanes, Spread):
        return [type(parameter)(part) for part in parameter.value.chunk(3, 1)]
    return (None, None, None) if parameter is None else parameter.chunk(3)


def _images(x: Lanes, turned: bool) -> Tensor:
    """[B, N, L, E] of lanes [N, L, E], [L, E], or [L, N, E] if `turned`"""
    value = x.value
    if value.dim() == 3:
        return value.unsqueeze(1)
    return value.transpose(1, 2) if turned else value


def _additive(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask [L, S] that all share, true where nobody may look, as what is added to scores."""
    if mask is None:
        return None
    shape, dtype = (query.shape[-2], key.shape[-2]), query.dtype
    if not isinstance(mask, Tensor) or mask.shape != shape or mask.requires_grad:
        raise Declined
    check_shared(mask)
    if mask.dtype is dtype:
        return mask
    if mask.dtype is not torch.bool:
        raise Declined
    return torch.zeros(shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


Layer(
    nn.MultiheadAttention,
    "multi_head_attention_forward scaled_dot_product_attention linear softmax",
    _multihead_attention,
)


_PARTS_OF_ENCODER_LAYER = {
    "self_attn": nn.MultiheadAttention,
    "linear1": nn.Linear,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
    "dropout": nn.Dropout,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}


def _encoder_layer(
    module: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    if src_key_padding_mask is not None or is_causal or (src_mask is not None and _may_be_fused(module)):
        raise Declined
    # (What is put in the place of a part is called in another way, or by torch's kernels not at all.)
    for name, kind in _PARTS_OF_ENCODER_LAYER.items():
        if type(getattr(module, name)) is not kind:
            raise Declined

    def attended(x: Any) -> Any:
        out, _ = call(module.self_attn, x, x, x, attn_mask=src_mask, need_weights=False)
        return call(module.dropout1, out)

    def fed(x: Any) -> Any:
        x = call(module.dropout, call(module.activation, call(module.linear1, x)))
        return call(module.dropout2, call(module.linear2, x))

    if module.norm_first:
        x = add(src, attended(call(module.norm1, src)))
        return add(x, fed(call(module.norm2, x)))
    x = call(module.norm1, add(src, attended(src)))
    return call(module.norm2, add(x, fed(x)))


Layer(nn.TransformerEncoderLayer, "", _encoder_layer, "_sa_block _ff_block")


def _encoder(module: nn.TransformerEncoder, src: Any, mask: Any = None) -> Any:
    x = src
    for layer in module.layers:
        if type(layer) is not nn.TransformerEncoderLayer:
            raise Declined  # it is told more
        x = call(layer, x, src_mask=mask)
    return x if module.norm is None else call(module.norm, x)


Layer(nn.TransformerEncoder, "", _encoder)


def _recurrent(module: nn.RNNBase, x: Any, hx: Any = None) -> tuple[Any, Any]:
    """x [N, T, F], [T, N, F] or [T, F] -> what the module gives, for as many sequences as all lanes have"""
    value = value_of(x)
    rank = value.dim() - 1
    if hx is not None or rank not in (2, 3) or (module.training and module.dropout):
        raise Declined
    if is_grad_enabled() and any(each.requires_grad for each in (value, *module.parameters())):
        raise Declined  # torch's kernels have no second derivative
    first = module.batch_first
    if rank == 2:
        out, state = module(value if first else value.transpose(0, 1))
        return Lanes(out if first else out.transpose(0, 1)), _apart(state, lambda each: each.transpose(0, 1))
    lanes = value.shape[0]
    folded = value.flatten(0, 1) if first else value.transpose(0, 1).flatten(1, 2)
    out, state = module(folded)
    out = out.unflatten(0, (lanes, -1)) if first else out.unflatten(1, (lanes, -1)).transpose(0, 1)
    return Lanes(out), _apart(state, lambda each: each.unflatten(1, (lanes, -1)).transpose(0, 1))


def _apart(state: Any, turned: Callable[[Tensor], Tensor]) -> Any:
    """The last states, one or a pair, with the lanes in front."""
    return tuple([Lanes(turned(each)) for each in state]) if type(state) is tuple else Lanes(turned(state))


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    Layer(_kind, "", _recurrent)
