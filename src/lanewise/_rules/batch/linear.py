"""`linear` on lanes as one operation, and its backward pass as another.

torch makes both of views and products, of which each would take its own way to the plane: half of the operations of a
multilayer perceptron under `vmap(jacrev)` are such views.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.plane import Plane, recorded, sync
from lanewise._core.python.factories import route_past
from lanewise._core.recording.passes import engine_goes_on
from lanewise._core.short.direct import unwatched
from lanewise._core.short.hot import PLAIN
from lanewise._rules.batch.layers import level_for, spread_for
from lanewise._rules.batch.matmul import product
from lanewise._rules.batch.spread import Linear, apply, for_own_weight, linear_of_torch, rows_of
from lanewise._torch_compat import apply_plainly, is_grad_enabled, set_grad_enabled

aten = torch.ops.aten


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x `[*S, n]`, weight `[m, n]`, bias `[m]` -> `[*S, m]`; NotImplemented unless x or the weight has lanes."""
    level = level_for(x, weight, bias)
    if level is not None and weight.dim() == 2 and x.dim():
        return level.wrap(level.below(linear_of_torch, x.value, weight, bias))
    found = spread_for(x, weight, bias)
    if found is not None and weight.dim() == 2 and x.dim():
        level, values = found
        return level.wrap(level.below(apply, Linear(), x.value, *values))
    with_lanes = x if type(x) is BatchTensor and x.mapped else weight
    if type(with_lanes) is not BatchTensor or not with_lanes.mapped or x.is_complex():
        return NotImplemented
    level = with_lanes.level
    if level.lanes is not None or not unwatched(level) or weight.dim() != 2 or not x.dim():
        return NotImplemented
    dtype = x.dtype
    records = False
    for operand in (x, weight) if bias is None else (x, weight, bias):
        kind = type(operand)
        if operand.dtype is not dtype or operand.layout is not torch.strided:
            return NotImplemented
        if kind is not BatchTensor and kind not in PLAIN:
            return NotImplemented
        if kind is BatchTensor:
            if operand.level is level:
                sync(operand)
            elif operand.level.order > level.order:
                return NotImplemented
        records = records or recorded(operand)
    if bias is not None and bias.dim() != 1:
        return NotImplemented
    if records and is_grad_enabled():
        return apply_plainly(_Linear, x, weight, bias, level)
    return _forward(level, x, weight, bias)


def _forward(level: BatchLevel, x: Any, weight: Any, bias: Any) -> BatchTensor:
    run: Any = linear_of_torch
    if type(bias) is BatchTensor and bias.level is level:
        run = with_own_bias if bias.mapped else run
        bias = bias.value
    if type(weight) is BatchTensor and weight.level is level:
        run = with_own_weights if weight.mapped else run
        weight = weight.value
    value = x.value if type(x) is BatchTensor and x.level is level and x.mapped else level.expanded(x)
    return level.wrap(level.below(run, value, weight, bias))


def with_own_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [B, *S, n], weight [m, n], bias [B, m] -> [B, *S, m]"""
    return linear_of_torch(x, weight) + bias.view(bias.shape[0], *[1] * (x.dim() - 2), bias.shape[1])


def with_own_weights(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, *S, n], weight [B, m, n], bias [B, m] or [m] -> [B, *S, m]"""
    out = product(rows_of(x), weight.mT, bias.unsqueeze(1) if bias is not None and bias.dim() == 2 else bias)
    return out.view(*x.shape[:-1], weight.shape[1])


class _Linear(Function):
    """On the plane of its operands; the planes below record what is done there."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, level: BatchLevel
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)  # where lanes part, none of them may have a cotangent
        set_grad_enabled(True)
        try:
            return _forward(level, x, weight, bias)
        finally:
            set_grad_enabled(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple:  # type: ignore[override]
        if cotangent is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = [
            needed and engine_goes_on(ctx, position) for position, needed in enumerate(ctx.needs_input_grad[:3])
        ]
        return (
            _for_x(cotangent, weight) if for_x else None,
            _for_weight(cotangent, x) if for_weight else None,
            _for_bias(cotangent) if for_bias else None,
            None,
        )


def _for_x(cotangent: Any, weight: Any) -> Tensor:
    """cotangent [*S, m], weight [m, n] -> [*S, n]; down to plain torch without an operation on the planes between."""
    level = _plain_level(cotangent, weight)
    if level is None:
        return torch.matmul(cotangent, weight)
    if level.mapped(weight):
        return level.wrap(level.below(_for_own_x, cotangent.value, weight.value))
    return level.wrap(level.below(_for_x, cotangent.value, level.physical(weight)))


def _for_own_x(cotangent: Tensor, weight: Tensor) -> Tensor:
    """cotangent [B, *S, m], weight [B, m, n] -> [B, *S, n]"""
    return product(rows_of(cotangent), weight).view(*cotangent.shape[:-1], weight.shape[2])


def _for_weight(cotangent: Any, x: Any) -> Tensor:
    """cotangent [*S, m], x [*S, n] -> [m, n]"""
    level = _plain_level(cotangent, x)
    if level is None:
        return _all_rows(cotangent).mT @ _all_rows(x)
    return level.wrap(level.below(for_own_weight, cotangent.value, level.expanded(x)))


def _for_bias(cotangent: Any) -> Tensor:
    """cotangent [*S, m] -> [m]"""
    if cotangent.dim() == 1:
        return cotangent
    level = _plain_level(cotangent, None)
    if level is None:
        return _all_rows(cotangent).sum(0)
    return level.wrap(level.below(_summed_rows, cotangent.value))


def _summed_rows(cotangent: Tensor) -> Tensor:
    """cotangent [B, *S, m] -> [B, m]"""
    return rows_of(cotangent).sum(1)


def _all_rows(x: Tensor) -> Tensor:
    """[*S, n] -> [s, n]"""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _plain_level(cotangent: Any, other: Any) -> BatchLevel | None:
    """The level of lanes that none of both is above, where neither is recorded; None for the operations themselves."""
    if type(cotangent) is not BatchTensor or not cotangent.mapped or cotangent.level.lanes is not None:
        return None
    level = cotangent.level
    if is_grad_enabled() and (recorded(cotangent) or (other is not None and recorded(other))):
        return None
    if isinstance(other, Plane):
        if other.level.order > level.order:
            return None
        if other.level is level:
            sync(other)
    return level


route_past(aten.linear.default, _linear)
