"""Pooling, padding and other operations on images `[N, C, *sp]` or `[C, *sp]`: lanes go into N."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.batch import BatchLevel
from lanewise._core.plane import map_tensors
from lanewise._core.python.factories import route
from lanewise._rules.batch.families import bind, lane_rule, too_few_dims
from lanewise._rules.batch.operands import lane_of_zeros, no_lanes, split_lanes
from lanewise._torch_compat import (
    OpOverload,
    apply_plainly,
    dispatch_mode_count,
    forward_level,
    is_grad_enabled,
)
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


def spatial(rank: int, *ops: OpOverload, single: bool = True) -> None:
    """The operation works on `[N, C, *sp]` with `rank` spatial dims, or on a `single` `[C, *sp]`; lanes go into N."""
    for op in ops:
        lane_rule(op, guarded=False)(_spatial(op, rank, single))


def _spatial(op: OpOverload, rank: int, single: bool) -> Callable:
    names = [arg.name for arg in op._schema.arguments]
    at_size = next((i for i, name in enumerate(names) if name in ("input_size", "self_size")), None)
    # Several kernels of more than one operand read memory without looking at strides, and crash on expanded values.
    dense = sum(str(arg.type) == "Tensor" for arg in op._schema.arguments) > 1

    def run(level: BatchLevel, *args: Any, **kwargs: Any) -> Any:
        bound, kwargs = bind(op, args, kwargs)
        check_rank(op, bound[0], rank, single)
        lanes, images = level.size, bound[0].shape[0]
        batched = bound[0].dim() == rank + 2
        if at_size is not None:
            bound[at_size] = [lanes * images, *bound[at_size][1:]]

        def fold(tensor: Tensor) -> Tensor:
            value = level.expanded(tensor).flatten(0, 1) if batched else level.expanded(tensor)
            return value.contiguous() if dense else value

        out = op(*[map_tensors(fold, arg) for arg in bound], **kwargs)
        return map_tensors(lambda t: split_lanes(t, lanes, images), out) if batched else out

    return run


def check_rank(op: OpOverload, x: Tensor, rank: int, single: bool = True) -> None:
    """Raise unless x is `[N, C, *sp]`, or a `single` `[C, *sp]`: lanes would be taken for a dim that is missing."""
    ranks = [rank + 1, rank + 2] if single else [rank + 2]
    if x.dim() not in ranks:
        text = f"{op}: Expected {' or '.join(f'{n}D' for n in ranks)} input, but in one lane it is {list(x.shape)}"
        if "backward" in op.name():
            raise TransformError(at_user_line(text))  # kernels do not check
        raise RuntimeError(text)


spatial(
    1,
    aten.reflection_pad1d.default,
    aten.reflection_pad1d_backward.default,
    aten.replication_pad1d.default,
    aten.replication_pad1d_backward.default,
)
spatial(
    2,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.fractional_max_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_unpool2d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad2d.default,
    aten.replication_pad2d_backward.default,
)
spatial(
    3,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool3d.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    aten.fractional_max_pool3d_backward.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.max_unpool3d.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
)


@lane_rule(aten.max_pool2d_with_indices.default, guarded=False)
def max_pool2d(level, x, *options):
    """x [B, N, C, H, W] or [B, C, H, W] -> values and indices"""
    check_rank(aten.max_pool2d_with_indices.default, x, 2)
    if x.dim() == 3:
        return pooled(x.value, options)
    return map_tensors(lambda t: split_lanes(t, level.size, x.shape[0]), pooled(x.value.flatten(0, 1), options))


def pooled(x, options):
    """`max_pool2d_with_indices` of x [N, C, H, W].

    On the CPU torch's kernel is vectorised over channels only where they lie last: from 4 channels on, a copy there and
    back takes half of the time or less. Where autograd records, a Function of its own has no need to keep the copy.
    """
    plain = type(x) is Tensor and x.device.type == "cpu" and forward_level() < 0 and not dispatch_mode_count()
    if not plain or x.shape[1] < 4 or not x.is_contiguous():
        out, indices = aten.max_pool2d_with_indices(x, *options)
        return out.contiguous(), indices.contiguous()
    if x.requires_grad and is_grad_enabled():
        return apply_plainly(_ChannelsLast, x, *options)
    return _channels_last(x, options)


def _channels_last(x, options):
    out, indices = aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), *options)
    return out.contiguous(), indices.contiguous()


class _ChannelsLast(Function):
    @staticmethod
    def forward(ctx, x, *options):  # type: ignore[override]
        out, indices = _channels_last(x, options)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return out, indices

    @staticmethod
    def backward(ctx, cotangent, _):  # type: ignore[override]
        missing = (None,) * len(ctx.options)
        if cotangent is None:
            return None, *missing
        x, indices = ctx.saved_tensors
        kernel, stride, padding, dilation, ceil_mode = _with_defaults(*ctx.options)
        return aten.max_pool2d_with_indices_backward(
            cotangent, x, kernel, stride, padding, dilation, ceil_mode, indices
        ), *missing


def _with_defaults(kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    return kernel, stride, padding, dilation, ceil_mode


def _fractional(op, rank):
    @lane_rule(op)
    def fractional_max_pool(level, x, kernel_size, output_size, samples):
        """x [B, N, C, *sp] or [B, C, *sp], samples [B, N, C, rank] -> values and indices"""
        check_rank(op, x, rank)
        value, draws = level.expanded(x), level.expanded(samples).flatten(0, 1)
        if x.dim() != rank + 2:
            return op(value, kernel_size, output_size, draws)
        out = op(value.flatten(0, 1), kernel_size, output_size, draws)
        return tuple(split_lanes(t, level.size, x.shape[0]) for t in out)


_fractional(aten.fractional_max_pool2d.default, 2)
_fractional(aten.fractional_max_pool3d.default, 3)


# --- moving pixels ---------------------------------------------------------------------------------------------------


def _moving(op):
    @lane_rule(op)
    def move(level, x, *args):
        """x [B, *batch, C, H, W]; torch's kernels give images without elements the wrong shape"""
        if x.dim() < 3:
            raise too_few_dims(op, x, 3)
        if level.size == 0:
            return no_lanes(op(lane_of_zeros(level, x), *args))
        value = x.value
        if value.dim() == 5:
            # Whose layout may look to the kernel like one of volumes, which it refuses.
            return op(value.flatten(0, 1), *args).unflatten(0, value.shape[:2])
        return op(value, *args)


_moving(aten.pixel_shuffle.default)
_moving(aten.pixel_unshuffle.default)
spatial(1, aten.col2im.default)
spatial(2, aten.im2col.default)


def _shuffling(op):
    @lane_rule(op)
    def shuffle(level, x, groups):
        """x [B, N, C, *sp] -> the same shape, channels interleaved"""
        if x.dim() < 3:
            raise too_few_dims(op, x, 3)
        return op(x.value.flatten(0, 1), groups).unflatten(0, (level.size, x.shape[0]))


_shuffling(aten.channel_shuffle.default)
_shuffling(aten.native_channel_shuffle.default)


# torch's own takes a short cut for a tensor from outside that needs no gradient: past all dispatch, to a tensor that
# would take no lane values.
route(aten.max_pool1d.default, lambda x, *args: aten.max_pool1d_with_indices.default(x, *args)[0])
