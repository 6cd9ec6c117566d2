"""Fake quantization: of elements by a scale of the whole tensor, or of each channel.

Lanes with scales of their own, or gradients of scales, are channels of one tensor.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lanewise._core.missing import lane_loop
from lanewise._core.plane import map_tensors
from lanewise._rules.batch.families import lane_rule, leading, shift_dim
from lanewise._rules.batch.operands import lane_of_zeros, no_lanes
from lanewise._torch_compat import OpOverload

aten = torch.ops.aten

leading(aten.fake_quantize_per_tensor_affine_cachemask.default)


def _rule(op: OpOverload) -> Callable:
    """A rule by hand, for an operation that refuses empty tensors."""

    def register(fn: Callable) -> Callable:
        @lane_rule(op)
        def run(level, *args):
            if level.size:
                return fn(level, *args)
            one = op(*[map_tensors(lambda part: lane_of_zeros(level, part), arg) for arg in args])
            return map_tensors(no_lanes, one)

        return fn

    return register


@lane_rule(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def by_a_tensor(level, x, *options):
    """x [B, *S], scale [1], offset [1], whether it is on [1] -> two of [B, *S]"""
    op = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    if any(map(level.mapped, options[:3])):
        return lane_loop(level, op, (x, *options), {})
    return op(x.value, *map(level.physical, options[:3]), *options[3:])


@_rule(aten.fake_quantize_per_channel_affine_cachemask.default)
def by_channels(level, x, scale, offset, axis, *limits):
    """x [B, *S], scale and offset [C] or [B, C] -> two of [B, *S]"""
    op = aten.fake_quantize_per_channel_affine_cachemask.default
    axis = shift_dim(axis, x.dim())
    if not (level.mapped(scale) or level.mapped(offset)):
        return op(x.value, level.physical(scale), level.physical(offset), axis, *limits)
    channels = level.expanded(x).movedim(axis, 1)
    out = op(channels.flatten(0, 1), *_of_channels(level, scale, offset), 0, *limits)
    return tuple(_back(part, channels, axis) for part in out)


@_rule(aten._fake_quantize_learnable_per_tensor_affine.default)
def learned(level, x, scale, offset, *options):
    """x [B, *S], scale and offset [1] or [B, 1] -> [B, *S]"""
    if not (level.mapped(scale) or level.mapped(offset)):
        given = level.physical(scale), level.physical(offset)
        return aten._fake_quantize_learnable_per_tensor_affine.default(x.value, *given, *options)
    given = _of_channels(level, scale, offset)
    return aten._fake_quantize_learnable_per_channel_affine.default(level.expanded(x), *given, 0, *options)


@_rule(aten._fake_quantize_learnable_per_tensor_affine_backward.default)
def learned_backward(level, grad, x, scale, offset, *options):
    """grad and x [B, *S] -> the gradients [B, *S] of x, and [B, 1] of scale and offset"""
    op = aten._fake_quantize_learnable_per_channel_affine_backward.default
    dx, *others = op(level.expanded(grad), level.expanded(x), *_of_channels(level, scale, offset), 0, *options)
    return dx, *[other.unsqueeze(1) for other in others]


@_rule(aten._fake_quantize_learnable_per_channel_affine.default)
def learned_by_channels(level, x, scale, offset, axis, *options):
    """x [B, *S], scale and offset [C] or [B, C] -> [B, *S]"""
    axis = shift_dim(axis, x.dim())
    channels = level.expanded(x).movedim(axis, 1)
    given = _of_channels(level, scale, offset)
    op = aten._fake_quantize_learnable_per_channel_affine.default
    return _back(op(channels.flatten(0, 1), *given, 0, *options), channels, axis)


@_rule(aten._fake_quantize_learnable_per_channel_affine_backward.default)
def learned_by_channels_backward(level, grad, x, scale, offset, axis, *options):
    """grad and x [B, *S] -> the gradients [B, *S] of x, and [B, C] of scale and offset"""
    axis = shift_dim(axis, x.dim())
    channels = level.expanded(x).movedim(axis, 1)
    cotangents = level.expanded(grad).movedim(axis, 1).flatten(0, 1)
    given = _of_channels(level, scale, offset)
    op = aten._fake_quantize_learnable_per_channel_affine_backward.default
    dx, *others = op(cotangents, channels.flatten(0, 1), *given, 0, *options)
    return _back(dx, channels, axis), *[other.unflatten(0, channels.shape[:2]) for other in others]


def _of_channels(level, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """scale and offset [C] of each lane, as [B * C]"""
    return level.expanded(scale).reshape(-1), level.expanded(offset).reshape(-1)


def _back(out: Tensor, channels: Tensor, axis: int) -> Tensor:
    """out [B * C, *S], as channels [B, C, *S] are, with those at a dim of its own."""
    return out.unflatten(0, channels.shape[:2]).movedim(1, axis)
