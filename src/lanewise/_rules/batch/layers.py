"""Layers of networks as one operation on the plane below, where nobody records them on that of their operands.

torch takes them apart into views and into kernels with several results, each of which would take a way of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.plane import recorded
from lanewise._core.python.factories import route_past
from lanewise._core.short.direct import unwatched
from lanewise._core.short.hot import PLAIN
from lanewise._rules.batch.pooling import pooled
from lanewise._torch_compat import OpOverload, is_grad_enabled

aten = torch.ops.aten


def _level_for(x: Any, *parameters: Any) -> BatchLevel | None:
    """The level of x, where a layer of x and of parameters without lanes can go below as a whole."""
    if type(x) is not BatchTensor or not x.mapped:
        return None
    level = x.level
    if level.lanes is not None or not unwatched(level):
        return None
    records = recorded(x)
    dtype = x.dtype
    for parameter in parameters:
        if parameter is None:
            continue
        if type(parameter) not in PLAIN or parameter.dtype is not dtype or parameter.layout is not torch.strided:
            return None
        records = records or parameter.requires_grad
    return None if records and is_grad_enabled() and not level.unrecorded else level


def _for_all_images(call: Callable, x: Tensor, *args: Any) -> Tensor:
    """`call` of x [B, N, *S] with B * N images -> [B, N, *T]"""
    out = call(x.flatten(0, 1), *args)
    return out.view(*x.shape[:2], *out.shape[1:])


def _convolution(op: OpOverload, rank: int) -> None:
    def convolve(x: Any, weight: Any, bias: Any = None, *options: Any) -> Any:
        """x [N, C, *sp] or [C, *sp], weight [D, C / groups, *k], bias [D] -> [N, D, *sp_out] or [D, *sp_out]"""
        level = _level_for(x, weight, bias)
        if level is None or weight.dim() != rank + 2:
            return NotImplemented
        if x.dim() == rank + 1:
            return level.wrap(level.below(op, x.value, weight, bias, *options))
        if x.dim() != rank + 2:
            return NotImplemented
        return level.wrap(level.below(_for_all_images, op, x.value, weight, bias, *options))

    route_past(op, convolve)


for _rank in (1, 2, 3):
    for _name in ("default", "padding"):
        _convolution(getattr(getattr(aten, f"conv{_rank}d"), _name), _rank)


def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, *options: Any) -> Any:
    """x [N, C, *sp], weight and bias [C] -> [N, C, *sp]"""
    level = _level_for(x, weight, bias)
    if level is None or x.dim() < 2 or not x.numel():
        return NotImplemented
    return level.wrap(level.below(_for_all_images, aten.group_norm.default, x.value, groups, weight, bias, *options))


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, *options: Any) -> Any:
    """x [*S, *shape], weight and bias [*shape] -> [*S, *shape]"""
    level = _level_for(x, weight, bias)
    if level is None or list(x.shape[x.dim() - len(shape) :]) != list(shape):
        return NotImplemented
    return level.wrap(level.below(aten.layer_norm.default, x.value, shape, weight, bias, *options))


def _max_pool2d(x: Any, *options: Any) -> Any:
    """x [N, C, H, W] or [C, H, W] -> [N, C, *sp_out] or [C, *sp_out]"""
    level = _level_for(x)
    if level is None or x.dim() not in (3, 4):
        return NotImplemented
    if x.dim() == 3:
        return level.wrap(level.below(_values, x.value, *options))
    return level.wrap(level.below(_for_all_images, _values, x.value, *options))


def _values(x: Tensor, *options: Any) -> Tensor:
    return pooled(x, options)[0]


route_past(aten.group_norm.default, _group_norm)
route_past(aten.layer_norm.default, _layer_norm)
route_past(aten.max_pool2d.default, _max_pool2d)
