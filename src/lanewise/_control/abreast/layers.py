"""Layers of networks for lanes abreast: as functions, and as modules of torch whose parameters all lanes share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise._control.abreast.products import spread_product, spread_value
from lanewise._control.abreast.values import (
    FUNCTIONS,
    LAYERS,
    METHODS,
    Declined,
    Lanes,
    Spread,
    expanded,
    has_lanes,
    lane_count,
    rank_of,
    value_of,
)
from lanewise._rules.batch.attention import attention_of_lanes
from lanewise._rules.batch.conv import convolution_with_own
from lanewise._rules.batch.layers import convolution_options, for_all_images
from lanewise._rules.batch.linear import with_own_weights
from lanewise._rules.batch.pooling import pooled
from lanewise._rules.batch.spread import Convolution, GroupNorm, LayerNorm, apply, linear_of_torch
from lanewise._rules.batch.spread import Layer as SpreadLayer
from lanewise._torch_compat import is_grad_enabled

# As they are now: others may be put in their place later.
_functions = {name: getattr(F, name) for name in dir(F) if callable(getattr(F, name))}


def _linear(x: Any, weight: Any, bias: Any = None) -> Lanes:
    """x [*S, n], weight [m, n], bias [m] -> [*S, m]"""
    if type(weight) is Spread:
        return spread_product(x, weight, bias)
    if rank_of(weight) != 2 or not rank_of(x) or (bias is not None and rank_of(bias) != 1):
        raise Declined
    if type(weight) is not Lanes and type(bias) is not Lanes:
        return Lanes(linear_of_torch(value_of(x), weight, bias))
    if type(weight) is not Lanes:
        raise Declined
    value = expanded(x, lane_count((weight,)))
    if value.dtype is not weight.value.dtype:
        raise Declined
    own: Any = bias.value if type(bias) is Lanes else bias
    return Lanes(with_own_weights(value, weight.value, own))


FUNCTIONS[F.linear] = _linear


def _layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Lanes:
    if len(normalized_shape) > rank_of(x):
        raise Declined
    if _with_lanes(weight, bias):
        return _spread(LayerNorm(list(normalized_shape), eps), x, weight, bias)
    return Lanes(torch.layer_norm(value_of(x), normalized_shape, weight, bias, eps))


def _rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Lanes:
    if len(normalized_shape) > rank_of(x) or _with_lanes(weight):
        raise Declined
    return Lanes(torch.rms_norm(value_of(x), normalized_shape, weight, eps))


def _with_lanes(*parameters: Any) -> bool:
    return any(type(parameter) in (Lanes, Spread) for parameter in parameters)


def _spread(layer: SpreadLayer, x: Any, *parameters: Any) -> Lanes:
    """A layer whose parameters all lanes share, and that are differentiated for each."""
    value = value_of(x)
    return Lanes(apply(layer, value, *[spread_value(parameter, value) for parameter in parameters]))


FUNCTIONS[F.layer_norm] = FUNCTIONS[torch.layer_norm] = _layer_norm
FUNCTIONS[F.rms_norm] = FUNCTIONS[torch.rms_norm] = _rms_norm


def _group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Lanes:
    shape = value_of(x).shape[1:]
    if len(shape) < 2 or shape[1] % num_groups or shape.numel() // num_groups < 2:
        raise Declined
    if _with_lanes(weight, bias):
        return _spread(GroupNorm(num_groups, eps), x, weight, bias)
    return Lanes(for_all_images(torch.group_norm, value_of(x), num_groups, weight, bias, eps))


FUNCTIONS[F.group_norm] = _group_norm


def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Lanes:
    if training or rank_of(x) < 2 or _with_lanes(running_mean, running_var):
        raise Declined
    apart = _with_lanes(weight, bias)
    shared = (None, None) if apart else (weight, bias)
    out = for_all_images(F.batch_norm, value_of(x), running_mean, running_var, *shared, False, 0.1, eps)
    if not apart:
        return Lanes(out)
    ones = [1] * (out.dim() - 3)
    scale, shift = [expanded(each, len(out)).view(len(out), 1, -1, *ones) for each in (weight, bias)]
    return Lanes(out * scale + shift)


FUNCTIONS[F.batch_norm] = _batch_norm


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Lanes:
    operands = [value_of(x) for x in (query, key, value)]
    rank = rank_of(query)
    if dropout_p or enable_gqa or not 2 <= rank <= 4 or any(x.dim() != rank + 1 for x in operands):
        raise Declined
    if type(attn_mask) is Lanes or (attn_mask is not None and (attn_mask.dim() > 2 or attn_mask.requires_grad)):
        raise Declined
    q, k, v = operands
    return Lanes(attention_of_lanes(q, k, v, attn_mask, is_causal, scale))


FUNCTIONS[F.scaled_dot_product_attention] = _attention


def _images(call: Callable, rank: int) -> Callable:
    """A layer of images [N, C, *sp] or [C, *sp], `rank` dims in `sp`."""

    def run(x: Any, /, *options: Any, **named: Any) -> Lanes:
        if _with_lanes(*options, *named.values()):
            raise Declined
        value = value_of(x)
        if value.dim() == rank + 2:
            return Lanes(call(value, *options, **named))
        if value.dim() != rank + 3:
            raise Declined
        return Lanes(for_all_images(lambda images: call(images, *options, **named), value))

    return run


def _convolution(call: Callable, rank: int) -> Callable:
    shared = _images(call, rank)

    def run(
        x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Lanes:
        """x [N, C, *sp] or [C, *sp], weight [D, C / groups, *k], bias [D] -> [N, D, *sp_out] or [D, *sp_out]"""
        if not _with_lanes(weight, bias):
            return shared(x, weight, bias, stride, padding, dilation, groups)
        value = value_of(x)
        if type(weight) not in (Lanes, Spread) or not rank + 2 <= value.dim() <= rank + 3:
            raise Declined
        own = weight.value
        options = convolution_options(own.shape[3:], stride, padding, dilation)
        if own.dim() != rank + 3 or options is None:
            raise Declined
        if type(weight) is Spread:
            if value.dim() == rank + 3:
                return _spread(Convolution(*options, groups), x, weight, bias)
            out = _spread(Convolution(*options, groups), Lanes(value.unsqueeze(1)), weight, bias)
            return Lanes(out.value.squeeze(1))
        if is_grad_enabled() and (value.requires_grad or own.requires_grad):
            raise Declined  # the gradient of such a weight has faster forms than torch's
        if value.dim() != rank + 3 or bias is not None or value.dtype is not own.dtype:
            raise Declined
        return Lanes(convolution_with_own(value, own, options, groups))

    return run


for _rank in (1, 2, 3):
    _call = getattr(F, f"conv{_rank}d")
    FUNCTIONS[_call] = _convolution(_call, _rank)
    for _name in ("avg_pool", "adaptive_avg_pool"):
        _call = getattr(F, f"{_name}{_rank}d")
        FUNCTIONS[_call] = _images(_call, _rank)


def _pooled(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices:
        raise Declined
    sizes = [_pair(each) for each in (kernel_size, kernel_size if stride is None else stride, padding, dilation)]
    return pooled(x, (*sizes, ceil_mode))[0]


def _pair(size: Any) -> list[int]:
    return [size, size] if type(size) is int else list(size)


FUNCTIONS[F.max_pool2d] = _images(_pooled, 2)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Lanes:
    """input [C] or [N, C], target [] or [N] of class numbers -> []; torch.nn.functional.cross_entropy"""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        raise Declined
    rank = rank_of(input)
    if rank not in (1, 2) or rank_of(target) != rank - 1 or reduction not in ("mean", "sum"):
        raise Declined
    count = lane_count((input, target))
    scores, classes = expanded(input, count), expanded(target, count)
    if classes.dtype is not torch.int64 or scores.dtype.itemsize < 4:
        raise Declined
    if rank == 1:
        each = F.cross_entropy(scores, classes, ignore_index=ignore_index, reduction="none")
    else:
        each = F.cross_entropy(scores.mT, classes, ignore_index=ignore_index, reduction="none").sum(1)
    if reduction == "mean":
        counted = classes != ignore_index
        each = each / (counted if rank == 1 else counted.sum(1))
    return Lanes(each)


FUNCTIONS[F.cross_entropy] = _cross_entropy


def _of_ranks(ranks: tuple[int, ...], run: Callable, module: Any, x: Any) -> Lanes:
    if rank_of(x) not in ranks:
        raise Declined
    return run(module, x)


# --- modules ---------------------------------------------------------------------------------------------------------


class Layer:
    """A class of torch's modules, computed by functions of F as its `forward` does.

    Attributes:
        run: `run(module, x)`
        used: The functions of F that are called for it, by name.
        methods: Those of the class that are, `forward` first.
    """

    __slots__ = ("run", "used", "methods")

    def __init__(self, kind: type, names: str, run: Callable, methods: str = "") -> None:
        self.run = run
        self.used = tuple([(name, _functions[name]) for name in names.split()])
        self.methods = tuple([(name, getattr(kind, name)) for name in ("forward", *methods.split())])
        LAYERS[kind] = self

    def stands_for(self, module: nn.Module, kind: type) -> bool:
        """Whether nobody has put others in the place of these."""
        for name, own in self.methods:
            if getattr(kind, name) is not own or name in module.__dict__:
                return False
        for name, function in self.used:
            if getattr(F, name) is not function:
                return False
        return True


def _elementwise(kind: type, name: str, *options: str) -> None:
    function = _functions[name]

    def run(module: Any, x: Any) -> Lanes:
        if type(x) is not Lanes or (getattr(module, "inplace", False)):
            raise Declined
        return Lanes(function(x.value, *[getattr(module, option) for option in options]))

    Layer(kind, name, run)


_elementwise(nn.ReLU, "relu")
_elementwise(nn.ReLU6, "relu6")
_elementwise(nn.SiLU, "silu")
_elementwise(nn.Mish, "mish")
_elementwise(nn.LogSigmoid, "logsigmoid")
_elementwise(nn.Softsign, "softsign")
_elementwise(nn.SELU, "selu")
_elementwise(nn.ELU, "elu", "alpha")
_elementwise(nn.CELU, "celu", "alpha")
_elementwise(nn.LeakyReLU, "leaky_relu", "negative_slope")
_elementwise(nn.Softplus, "softplus", "beta", "threshold")
_elementwise(nn.Hardtanh, "hardtanh", "min_val", "max_val")


def _of_value(kind: type, names: str, call: Callable) -> None:
    """`call(module, value)` of a value with the lanes in front."""

    def run(module: Any, x: Any) -> Lanes:
        if type(x) is not Lanes:
            raise Declined
        return Lanes(call(module, x.value))

    Layer(kind, names, run)


def _of_rows(module: Any, value: Tensor) -> Tensor:
    if value.dim() < 2:
        raise Declined
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if _with_lanes(weight, bias):
        return _linear(Lanes(value), weight, bias).value
    return linear_of_torch(value, weight, bias)


def _normalized(module: Any, value: Tensor) -> Tensor:
    shape, own = module.normalized_shape, module._parameters
    return _layer_norm(Lanes(value), shape, own["weight"], own["bias"], module.eps).value


_of_value(nn.GELU, "gelu", lambda module, value: _functions["gelu"](value, approximate=module.approximate))
_of_value(nn.Tanh, "", lambda module, value: torch.tanh(value))
_of_value(nn.Sigmoid, "", lambda module, value: torch.sigmoid(value))
_of_value(nn.Linear, "linear", _of_rows)
_of_value(nn.LayerNorm, "layer_norm", _normalized)
Layer(nn.Identity, "", lambda module, x: x)
Layer(nn.RMSNorm, "rms_norm", lambda module, x: _rms_norm(x, module.normalized_shape, module.weight, module.eps))
Layer(
    nn.GroupNorm,
    "group_norm",
    lambda module, x: _group_norm(x, module.num_groups, module.weight, module.bias, module.eps),
)


def _evaluated(module: Any, x: Any) -> Lanes:
    mean, var = module.running_mean, module.running_var
    if module.training or mean is None or var is None:
        raise Declined
    has_lanes((mean, var))
    return _batch_norm(x, mean, var, module.weight, module.bias, False, 0.1, module.eps)


# With the number of dims that a batch has.
for _kind, _ranks in ((nn.BatchNorm1d, (2, 3)), (nn.BatchNorm2d, (4,)), (nn.BatchNorm3d, (5,))):
    Layer(_kind, "batch_norm", partial(_of_ranks, _ranks, _evaluated))
Layer(nn.Dropout, "dropout", lambda module, x: FUNCTIONS[F.dropout](x, module.p, module.training, module.inplace))
Layer(nn.Unflatten, "", lambda module, x: METHODS["unflatten"](x, module.dim, module.unflattened_size))
Layer(nn.Flatten, "", lambda module, x: FUNCTIONS[torch.flatten](x, module.start_dim, module.end_dim))
Layer(
    nn.Embedding,
    "embedding",
    lambda module, x: FUNCTIONS[F.embedding](
        x,
        module.weight,
        module.padding_idx,
        module.max_norm,
        module.norm_type,
        module.scale_grad_by_freq,
        module.sparse,
    ),
)


def _convolved(name: str) -> Callable:
    function = FUNCTIONS[_functions[name]]

    def run(module: Any, x: Any) -> Lanes:
        if module.padding_mode != "zeros":
            raise Declined
        options = module.stride, module.padding, module.dilation, module.groups
        return function(x, module.weight, module.bias, *options)

    return run


for _kind, _name in ((nn.Conv1d, "conv1d"), (nn.Conv2d, "conv2d"), (nn.Conv3d, "conv3d")):
    Layer(_kind, _name, _convolved(_name), "_conv_forward")


def _max_pooled(module: Any, x: Any) -> Lanes:
    if module.return_indices:
        raise Declined
    options = module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
    return FUNCTIONS[F.max_pool2d](x, *options)


Layer(nn.MaxPool2d, "max_pool2d", _max_pooled)
