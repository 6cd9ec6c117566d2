"""Layers of networks as one operation on the plane below, where nobody records them on that of their operands.

torch takes them apart into views and into kernels with several results, each of which would take a way of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import standing
from lanewise._core.plane import recorded
from lanewise._core.python.factories import route_past
from lanewise._core.short.direct import unwatched
from lanewise._core.short.hot import PLAIN
from lanewise._rules.batch.conv import convolution, for_each_dim
from lanewise._rules.batch.pooling import pooled
from lanewise._rules.batch.spread import Convolution, GroupNorm, LayerNorm, apply, is_spread
from lanewise._torch_compat import is_grad_enabled

aten = torch.ops.aten


def level_for(x: Any, *parameters: Any) -> BatchLevel | None:
    """The level of x, where a layer of x and of parameters without lanes can go below as a whole.

    What hangs on a leaf made inside is recorded on the plane of the lanes, also where captured parameters are not.
    """
    if type(x) is not BatchTensor or not x.mapped:
        return None
    level = x.level
    recording = is_grad_enabled()
    if level.lanes is not None or not unwatched(level) or (recording and recorded(x)):
        return None
    recording = recording and not level.unrecorded
    dtype = x.dtype
    for parameter in parameters:
        if parameter is None:
            continue
        if type(parameter) not in PLAIN or parameter.dtype is not dtype or parameter.layout is not torch.strided:
            return None
        if recording and parameter.requires_grad:
            return None
    return level


def spread_for(x: Any, *parameters: Any, always: bool = False) -> tuple | None:
    """The level of x, and parameters as they are below, where one of them is spread over the lanes (spread.py).

    `always`: also where none is.
    """
    if type(x) is not BatchTensor or not x.mapped or x.level.parent is not None:
        return None
    level = x.level
    if level.lanes is not None or not unwatched(level) or type(x.value) is not Tensor:
        return None
    values = []
    found = always
    for parameter in parameters:
        value = parameter
        if type(parameter) is BatchTensor:
            value = parameter.value
            if parameter.level is not level or not parameter.mapped or recorded(parameter) or not is_spread(value):
                return None
            found = True
        elif parameter is not None:
            if type(parameter) not in PLAIN or parameter.layout is not torch.strided:
                return None
            if parameter.requires_grad and not always:
                return None
            value = parameter.expand(level.size, *parameter.shape)
        if value is not None and value.dtype is not x.dtype:
            return None
        values.append(value)
    return (level, values) if found and not recorded(x) else None


def for_all_images(call: Callable, x: Tensor, *args: Any) -> Tensor:
    """`call` of x [B, N, *S] with B * N images -> [B, N, *T]"""
    out = call(x.flatten(0, 1), *args)
    return out.view(*x.shape[:2], *out.shape[1:])


def _convolution(name: str, rank: int) -> None:
    call = getattr(F, name)

    def convolve(x: Any, weight: Any, bias: Any = None, *options: Any) -> Any:
        """x [N, C, *sp] or [C, *sp], weight [D, C / groups, *k], bias [D] -> [N, D, *sp_out] or [D, *sp_out]"""
        if type(weight) is BatchTensor or type(bias) is BatchTensor:
            return _convolve_with_own(rank, x, weight, bias, *options)
        level = level_for(x, weight, bias)
        if level is None or weight.dim() != rank + 2:
            return NotImplemented
        if x.dim() == rank + 1:
            return level.wrap(level.below(call, x.value, weight, bias, *options))
        if x.dim() != rank + 2:
            return NotImplemented
        return level.wrap(level.below(for_all_images, call, x.value, weight, bias, *options))

    for overload in ("default", "padding"):
        route_past(getattr(getattr(aten, name), overload), convolve)


def _convolve_with_own(
    rank: int, x: Any, weight: Any, bias: Any, stride: Any = (1,), padding: Any = (0,), dilation: Any = (1,), groups=1
) -> Any:
    """A convolution whose parameters have lanes."""
    if x.dim() not in (rank + 1, rank + 2) or weight.dim() != rank + 2 or not x.numel():
        return NotImplemented
    given = convolution_options(weight.shape[2:], stride, padding, dilation)
    if given is None:
        return NotImplemented
    options = (*given, groups)
    found = spread_for(x, weight, bias)
    if found is not None:
        level, values = found
        return level.wrap(level.below(_of_images, Convolution(*options), x.value, x.dim() == rank + 2, *values))
    level = x.level if x.dim() == rank + 2 and _are_lanes(x, weight, bias) else None
    return NotImplemented if level is None else level.wrap(level.below(convolution, level, x, weight, bias, *options))


def convolution_options(taps: Any, stride: Any, padding: Any, dilation: Any) -> tuple | None:
    """The options of `aten.convolution` but for the groups; None where both sides are not padded alike."""
    rank = len(taps)
    stride, dilation = for_each_dim(stride, rank), for_each_dim(dilation, rank)
    if padding == "valid":
        padding = (0,)
    elif padding == "same":
        padding = [step * (extent - 1) / 2 for step, extent in zip(dilation, taps, strict=True)]
        if any(each % 1 for each in padding) or any(step != 1 for step in stride):
            return None
        padding = [int(each) for each in padding]
    return stride, for_each_dim(padding, rank), dilation, False, [0] * rank


def _are_lanes(x: Any, *parameters: Any) -> bool:
    """Whether all have the lanes of one level, and nobody records them there."""
    if type(x) is not BatchTensor or x.level.lanes is not None or not unwatched(x.level):
        return False
    level, dtype = x.level, x.dtype
    return all(
        each is None or (level.mapped(each) and each.dtype is dtype and not recorded(each)) for each in (x, *parameters)
    )


def _of_images(layer: Convolution, x: Tensor, several: bool, *parameters: Any) -> Tensor:
    return apply(layer, x, *parameters) if several else apply(layer, x.unsqueeze(1), *parameters).squeeze(1)


for _rank in (1, 2, 3):
    _convolution(f"conv{_rank}d", _rank)


def _in_gradients(level: BatchLevel) -> bool:
    """Whether gradients of lanes are recorded below: those of torch's norms are wrong in the third order."""
    return level.unrecorded and standing.orders > 0


def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *options: Any) -> Any:
    """x [N, C, *sp], weight and bias [C] -> [N, C, *sp]"""
    if x.dim() < 2 or not x.numel():
        return NotImplemented
    level = level_for(x, weight, bias)
    if level is not None and not _in_gradients(level):
        args = groups, weight, bias, eps, *options
        return level.wrap(level.below(for_all_images, _plain_group_norm, x.value, *args))
    found = spread_for(x, weight, bias, always=level is not None)
    if found is None or x.shape[1] % groups:
        return NotImplemented
    level, values = found
    return level.wrap(level.below(apply, GroupNorm(groups, eps), x.value, *values))


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *options: Any) -> Any:
    """x [N, C, *sp], the others [C] -> [N, C, *sp], by the statistics that were kept"""
    if training or mean is None or var is None or x.dim() < 2 or not x.numel():
        return NotImplemented
    level = level_for(x, weight, bias, mean, var)
    if level is None or level.size * x.shape[0] == 1:  # the rule looks after a single image
        return NotImplemented
    args = weight, bias, mean, var, training, *options
    return level.wrap(level.below(for_all_images, _plain_batch_norm, x.value, *args))


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *options: Any) -> Any:
    """x [*S, *shape], weight and bias [*shape] -> [*S, *shape]"""
    if list(x.shape[x.dim() - len(shape) :]) != list(shape):
        return NotImplemented
    level = level_for(x, weight, bias)
    if level is not None and not _in_gradients(level):
        args = shape, weight, bias, eps, *options
        return level.wrap(level.below(_plain_layer_norm, x.value, *args))
    found = spread_for(x, weight, bias, always=level is not None)
    if found is None:
        return NotImplemented
    level, values = found
    return level.wrap(level.below(apply, LayerNorm(list(shape), eps), x.value, *values))


def _max_pool2d(x: Any, *options: Any) -> Any:
    """x [N, C, H, W] or [C, H, W] -> [N, C, *sp_out] or [C, *sp_out]"""
    level = level_for(x)
    if level is None or x.dim() not in (3, 4):
        return NotImplemented
    if x.dim() == 3:
        return level.wrap(level.below(_values, x.value, *options))
    return level.wrap(level.below(for_all_images, _values, x.value, *options))


def _values(x: Tensor, *options: Any) -> Tensor:
    return pooled(x, options)[0]


_plain_batch_norm, _plain_group_norm, _plain_layer_norm = torch.batch_norm, torch.group_norm, torch.layer_norm
route_past(aten.batch_norm.default, _batch_norm)
route_past(aten.group_norm.default, _group_norm)
route_past(aten.layer_norm.default, _layer_norm)
route_past(aten.max_pool2d.default, _max_pool2d)
