"""Normalisation layers. Lanes go into the rows, the batch or the channels, so that one kernel serves all of them."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import current_level, route_name
from lanewise._core.plane import lift
from lanewise._rules.batch.families import decompose, lane_rule, too_few_dims
from lanewise._rules.batch.operands import split_lanes, unwatched
from lanewise._rules.batch.running import update_running
from lanewise._rules.batch.tracking import constant, is_tracked
from lanewise._torch_compat import never_compile
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


def _rows(level: BatchLevel, value: Tensor, rank: int) -> Tensor:
    """A mapped operand [B, *S] of lower rank, ready to broadcast with `[B, *T]` of `rank` logical dims."""
    return value.reshape(level.size, *([1] * (rank - value.dim() + 1)), *value.shape[1:])


def _scaled(level: BatchLevel, value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """value [B, *T] * weight + bias, both of trailing shape, mapped or not"""
    rank = value.dim() - 1
    if weight is not None:
        value = value * (_rows(level, weight.value, rank) if level.mapped(weight) else weight)
    if bias is not None:
        value = value + (_rows(level, bias.value, rank) if level.mapped(bias) else bias)
    return value


def _inverse_deviation(spread: Tensor, rstd: Tensor) -> Tensor:
    """rstd as a function of `spread`, the mean square that it was computed from.

    What a kernel saves has no derivative, and the epsilon it used is not passed on: it is the difference that is left.
    """
    epsilon = constant(rstd).square().reciprocal() - constant(spread)
    return (spread + epsilon).rsqrt()


# --- layer norm ------------------------------------------------------------------------------------------------------


@lane_rule(aten.native_layer_norm.default, guarded=False)
def layer_norm(level, x, shape, weight, bias, eps):
    """x [B, *S, *shape], weight and bias [B, *shape] -> out, mean and rstd [B, *S, 1...]"""
    if x.dim() < len(shape):
        raise too_few_dims(aten.native_layer_norm.default, x, len(shape))
    value = level.physical(x)
    if level.mapped(weight) or level.mapped(bias):
        out, mean, rstd = torch.native_layer_norm(value, shape, None, None, eps)
        if not level.mapped(x):
            out, mean, rstd = (t.expand(level.size, *t.shape) for t in (out, mean, rstd))
        return _scaled(level, out, weight, bias), mean, rstd
    return torch.native_layer_norm(value, shape, weight, bias, eps)


@lane_rule(aten.native_layer_norm_backward.default, guarded=False)
def layer_norm_backward(level, grad, x, shape, mean, rstd, weight, bias, output_mask):
    """grad, x [B, *S, *shape], mean, rstd [B, *S, 1...] -> gradients in x, weight [B, *shape] and bias [B, *shape]"""
    grad, x, mean, rstd = (level.expanded(t) for t in (grad, x, mean, rstd))
    inner = list(range(grad.dim() - len(shape), grad.dim()))
    outer = list(range(1, grad.dim() - len(shape)))
    scaled = _scaled(level, grad, weight, None) if level.mapped(weight) else grad
    scale = None if level.mapped(weight) else weight
    tracked = is_tracked(grad, x, scaled, scale)
    if tracked:
        mean = x.mean(inner, keepdim=True)
        rstd = _inverse_deviation((x - mean).square().mean(inner, keepdim=True), rstd)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0] and tracked:
        unit = (x - mean) * rstd
        slopes = scaled if scale is None else scaled * scale
        centred = slopes - slopes.mean(inner, keepdim=True) - unit * (slopes * unit).mean(inner, keepdim=True)
        grad_x = (centred * rstd).to(x.dtype)
    elif output_mask[0]:
        saved = mean.contiguous(), rstd.contiguous()  # the kernel reads them by pointer
        grad_x, _, _ = aten.native_layer_norm_backward(scaled, x, shape, *saved, scale, None, [True, False, False])
    if output_mask[1] and weight is not None:
        product = (x - mean) * rstd * grad if tracked else (x - mean).mul_(rstd).mul_(grad)
        grad_weight = (product.sum(outer) if outer else product).to(weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = grad.sum(outer) if outer else grad.clone()
    return grad_x, grad_weight, grad_bias


_plain_rms_norm = torch.rms_norm


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    """`torch.rms_norm` while a level is open: as a whole below, for it falls apart into six operations."""
    level = current_level()
    if isinstance(level, BatchLevel) and level.lanes is None and level.mapped(input) and not level.mapped(weight):
        operands = [input] if weight is None else [input, weight]
        inner = tuple(normalized_shape)
        if unwatched(level, operands) and tuple(input.shape[input.dim() - len(inner) :]) == inner:
            return level.wrap(level.below(_rms_norm, input.value, normalized_shape, weight, eps))
    return _plain_rms_norm(input, normalized_shape, weight, eps)


never_compile(_rms_norm)
route_name("rms_norm", _rms_norm)


@lane_rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(level, grad, x, shape, rstd, weight, output_mask):
    """grad, x [B, *S, *shape], rstd [B, *S, 1...] -> gradients in x and weight [B, *shape]"""
    grad, x, rstd = (level.expanded(t) for t in (grad, x, rstd))
    inner = list(range(grad.dim() - len(shape), grad.dim()))
    outer = list(range(1, grad.dim() - len(shape)))
    if is_tracked(grad, x, None if weight is None else level.physical(weight)):
        rstd = _inverse_deviation(x.square().mean(inner, keepdim=True), rstd)
    unit = x * rstd
    grad_x = grad_weight = None
    if output_mask[0]:
        slopes = _scaled(level, grad, weight, None)
        grad_x = ((slopes - unit * (slopes * unit).mean(inner, keepdim=True)) * rstd).to(x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = ((grad * unit).sum(outer) if outer else grad * unit).to(weight.dtype)
    return grad_x, grad_weight


# --- group norm ------------------------------------------------------------------------------------------------------


def _affine(level: BatchLevel, parameter: Tensor | None) -> Tensor | None:
    """A parameter [B, C] or [C] as [B * C]"""
    return None if parameter is None else level.expanded(parameter).reshape(-1).contiguous()


@lane_rule(aten.native_group_norm.default, guarded=False)
def group_norm(level, x, weight, bias, images, channels, positions, groups, eps):
    """x [B, N, C, *sp], weight and bias [B, C] -> out, mean and rstd [B, N, groups]"""
    lanes, value = level.size, level.physical(x)
    own = not level.mapped(weight) and not level.mapped(bias)
    if level.mapped(x):
        value = value.flatten(0, 1)
        images = lanes * images
    scale, shift = (weight, bias) if own else (None, None)
    parts = aten.native_group_norm(value.contiguous(), scale, shift, images, channels, positions, groups, eps)
    if level.mapped(x):
        parts = [split_lanes(t, lanes, x.shape[0]) for t in parts]
    else:
        parts = [t.expand(lanes, *t.shape) for t in parts]
    out, mean, rstd = parts
    if not own:
        out = _scaled_channels(level, out, weight, bias)
    return out, mean, rstd


@lane_rule(aten.native_group_norm_backward.default)
def group_norm_backward(level, grad, x, mean, rstd, weight, images, channels, positions, groups, output_mask):
    """grad, x [B, N, C, *sp], mean, rstd [B, N, groups] -> gradients in x, weight [B, C] and bias [B, C]

    torch's kernel has no derivative of its own, so where one is wanted below, the formula is written out.
    """
    grad, x, mean, rstd = (level.expanded(t) for t in (grad, x, mean, rstd))
    if is_tracked(grad, x, mean, rstd, level.physical(weight) if weight is not None else None):
        scale = None if weight is None else level.expanded(weight)
        return _group_norm_backward_formula(grad, x, mean, rstd, scale, groups, output_mask)
    scale = None if weight is None else level.physical(weight)
    return group_norm_backward_of_lanes(grad, x, mean, rstd, scale, groups, output_mask)


def group_norm_backward_of_lanes(grad, x, mean, rstd, weight, groups, output_mask):
    """grad, x [B, N, C, *sp], mean, rstd [B, N, groups], weight [C] or [B, C] -> the gradients of each lane"""
    lanes, images, channels = x.shape[:3]
    # The kernel reads memory without looking at strides.
    folded = [t.transpose(0, 1).flatten(1, 2).contiguous() for t in (grad, x, mean, rstd)]
    scale = None if weight is None else weight.expand(lanes, channels).reshape(-1).contiguous()
    sizes = (images, lanes * channels, prod(x.shape[3:]), lanes * groups)
    grad_x, grad_weight, grad_bias = aten.native_group_norm_backward(*folded, scale, *sizes, output_mask)
    return (
        grad_x.reshape(images, lanes, *x.shape[2:]).transpose(0, 1) if output_mask[0] else None,
        grad_weight.view(lanes, channels) if output_mask[1] else None,
        grad_bias.view(lanes, channels) if output_mask[2] else None,
    )


def _group_norm_backward_formula(grad, x, mean, rstd, weight, groups, output_mask):
    lanes, images, channels, *extent = x.shape
    grouped = (lanes, images, groups, channels // groups, *extent)
    ones = [1] * (len(extent) + 1)
    inner = list(range(3, len(grouped)))
    unit = (x.reshape(grouped) - mean.reshape(lanes, images, groups, *ones)) * rstd.reshape(
        lanes, images, groups, *ones
    )
    slopes = grad if weight is None else grad * weight.reshape(lanes, 1, channels, *ones[1:])
    slopes = slopes.reshape(grouped)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        centred = slopes - slopes.mean(inner, keepdim=True) - unit * (slopes * unit).mean(inner, keepdim=True)
        grad_x = (centred * rstd.reshape(lanes, images, groups, *ones)).reshape(x.shape).to(x.dtype)
    over = [1, *range(3, x.dim())]
    if output_mask[1]:
        grad_weight = (grad * unit.reshape(x.shape)).sum(over).to(x.dtype)
    if output_mask[2]:
        grad_bias = grad.sum(over)
    return grad_x, grad_weight, grad_bias


# --- batch norm ------------------------------------------------------------------------------------------------------


def _into_channels(level: BatchLevel, x: Tensor) -> Tensor:
    """x [B, N, C, *sp] -> [N, B * C, *sp]"""
    return level.expanded(x).transpose(0, 1).flatten(1, 2)


def _out_of_channels(level: BatchLevel, x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_into_channels`; `like` [N, C, *sp] is one lane."""
    return x.reshape(like.shape[0], level.size, *like.shape[1:]).transpose(0, 1)


def _stand_ins(level: BatchLevel, x: Tensor, statistics: list[Tensor | None]) -> list[Tensor | None]:
    """For captured running statistics, zeros for a kernel to write into: with lanes if x or any of them has."""
    lanes = any(level.mapped(t) for t in (x, *statistics))
    blanks: list[Tensor | None] = []
    for statistic in statistics:
        if statistic is None or level.owns(statistic):
            blanks.append(None)
        else:
            shape = (level.size, *statistic.shape) if lanes else statistic.shape
            blank = torch.zeros(shape, dtype=statistic.dtype, device=statistic.device)
            blanks.append(level.wrap(blank) if lanes else blank)
    return blanks


def _batch_norm(level, x, weight, bias, mean, var, training, momentum, eps):
    """One kernel: over the input alone, over `B * N` images, or over `B * C` channels -> out, mean and deviation."""
    lanes, statistics_vary = level.size, level.mapped(mean) or level.mapped(var)
    options = (training, momentum, eps)
    if lanes == 0:
        out = _scaled_channels(level, level.expanded(x) * 1, weight, bias)
        return out, *[out.new_empty(0, x.shape[1] if training else 0)] * 2
    if not level.mapped(x) and not statistics_vary:
        out, *saved = (t.expand(lanes, *t.shape) for t in aten.native_batch_norm(x, None, None, mean, var, *options))
        return _scaled_channels(level, out, weight, bias), *saved
    if not training and not statistics_vary:
        own = not level.mapped(weight) and not level.mapped(bias)
        affine = (weight, bias) if own else (None, None)
        out, *saved = _of_images(x.value.flatten(0, 1), *affine, mean, var, *options)
        out = split_lanes(out, lanes, x.shape[0])
        saved = [t.expand(lanes, *t.shape) for t in saved]
        return out if own else _scaled_channels(level, out, weight, bias), *saved
    if mean is None and var is None and x.shape[0] == 1 and _normalizes_groups(x.value):
        # Statistics of one image, as for instance norm: the kernel of group norm takes half the time.
        value = x.value.flatten(0, 1).contiguous()
        out, *saved = aten.native_group_norm(
            value, None, None, *value.shape[:2], prod(x.shape[2:]), value.shape[1], eps
        )
        return _scaled_channels(level, out.unsqueeze(1), weight, bias), *saved
    scale, shift, centre, spread = (_affine(level, t) for t in (weight, bias, mean, var))
    out, *saved = _of_images(_into_channels(level, x), scale, shift, centre, spread, *options)
    if training:
        for statistic, written in ((mean, centre), (var, spread)):
            if statistic is not None and written is not None and not statistic.value.is_contiguous():
                statistic.value.copy_(written.view(statistic.value.shape))
    saved = [t.reshape(lanes, t.numel() // lanes) for t in saved]
    return _out_of_channels(level, out, x), *saved


def _of_images(images: Tensor, *args: Any) -> tuple:
    """`native_batch_norm` of images [N, C, *sp].

    Of a single one, torch's backward pass takes strides of views for channels that lie last, or not: it gets both the
    image and its cotangent with channels in front.
    """
    if images.shape[0] != 1 or images.dim() < 4:
        return aten.native_batch_norm(images, *args)
    out, *saved = aten.native_batch_norm(images.contiguous(), *args)
    return out.reshape(-1).view(out.shape), *saved


def _normalizes_groups(value: Tensor) -> bool:
    """Whether group norm has a faster kernel, with statistics in the dtype that batch norm gives them in.

    They have a derivative there, for which the backward formula of batch norm has none.
    """
    return (
        not is_tracked(value) and value.is_cpu and value.dtype in (torch.float32, torch.float64) and value.numel() > 0
    )


def _scaled_channels(level, out, weight, bias):
    """out [B, N, C, *sp] * weight + bias"""
    ones = [1] * (out.dim() - 3)
    weight, bias = (
        None
        if t is None
        else (t.value.reshape(level.size, 1, t.shape[0], *ones) if level.mapped(t) else t.reshape(-1, *ones))
        for t in (weight, bias)
    )
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _check_channels(x: Tensor, *each: Tensor | None) -> None:
    """Kernels read one number for each channel without looking whether they are there."""
    if x.dim() < 2:
        raise TransformError(at_user_line(f"batch norm: expected 2 dimensions or more, got {list(x.shape)}"))
    for given in each:
        if given is not None and given.shape != (x.shape[1],):
            raise TransformError(
                at_user_line(
                    f"batch norm: expected one number for each of the {x.shape[1]} channels of {list(x.shape)}, got "
                    f"{list(given.shape)}"
                )
            )


def _batch_norm_rule(op, read):
    """Register `op`; `read` sorts its arguments after the bias into mean, var, whether it trains, momentum and eps."""

    @lane_rule(op, raw=True)
    def batch_norm(level, x, weight, bias, *rest):
        """x [B, N, C, *sp]; weight, bias, running_mean, running_var [B, C] -> out, and statistics for later"""
        mean, var, training, momentum, eps = read(*rest)
        statistics = [mean, var]
        _check_channels(x, weight, bias, mean, var)
        for statistic in statistics:
            if training and level.owns(statistic):
                lift(statistic)
        operands = [x, weight, bias, *statistics]
        mapped = any(level.mapped(t) for t in operands)
        captured = training and mapped and level.size > 0
        blanks = _stand_ins(level, x, statistics) if captured else [None, None]
        given = [x, weight, bias, *[t if blank is None else blank for t, blank in zip(statistics, blanks)]]
        kept = [t.value if level.owns(t) and not (mapped and t.mapped) else t for t in given]
        options = [*kept, training, momentum, eps]
        parts = _batch_norm(level, *options) if mapped else aten.native_batch_norm(*options)
        if captured:
            update_running(level, statistics, blanks, operands, momentum)
        if len(op._schema.returns) == 4:
            reserved = parts[0].new_empty(level.size, 0) if mapped else parts[0].new_empty(0)
            parts = (*parts, reserved.to(torch.uint8))
        return tuple(level.wrap(t) if mapped else level.adopt(t) for t in parts)


_batch_norm_rule(aten.native_batch_norm.default, lambda mean, var, *options: (mean, var, *options))
_batch_norm_rule(aten._native_batch_norm_legit.default, lambda mean, var, *options: (mean, var, *options))
_batch_norm_rule(aten._native_batch_norm_legit.no_stats, lambda *options: (None, None, *options))
_batch_norm_rule(
    aten._native_batch_norm_legit_no_training.default, lambda mean, var, *options: (mean, var, False, *options)
)
_batch_norm_rule(aten._batch_norm_with_update.default, lambda mean, var, *options: (mean, var, True, *options))
_batch_norm_rule(aten._batch_norm_no_update.default, lambda mean, var, *options: (mean, var, False, *options))


@lane_rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(level, grad, x, weight, mean, var, save_mean, save_invstd, train, eps, output_mask):
    """grad, x [B, N, C, *sp] -> gradients in x, weight [B, C] and bias [B, C]"""
    if grad.shape != x.shape:
        raise TransformError(at_user_line(f"batch norm: a gradient {list(grad.shape)} for {list(x.shape)}"))
    _check_channels(x, weight, mean, var)
    shape = (level.size, x.shape[1])
    if level.size == 0:
        blank = level.physical(x).new_empty
        sizes = ((0, *x.shape), shape, shape)
        return tuple(blank(size) if wanted else None for size, wanted in zip(sizes, output_mask, strict=True))
    statistics = [_affine(level, t) for t in (weight, mean, var, save_mean, save_invstd)]
    folded = [_into_channels(level, t) for t in (grad, x)]
    if x.shape[0] == 1:
        folded = [t.contiguous() for t in folded]  # see `_of_images`
    grad_x, grad_weight, grad_bias = aten.native_batch_norm_backward(*folded, *statistics, train, eps, output_mask)
    return (
        _out_of_channels(level, grad_x, x) if output_mask[0] else None,
        grad_weight.view(shape) if output_mask[1] else None,
        grad_bias.view(shape) if output_mask[2] else None,
    )


# Kernels of one vendor keep state in a buffer that cannot be split into lanes; the native ones compute the same.
decompose(
    aten.batch_norm_backward.default,
    lambda grad, x, weight, mean, var, save_mean, save_var, update, eps, mask, reserve: aten.native_batch_norm_backward(
        grad, x, weight, mean, var, save_mean, save_var, update, eps, mask
    ),
)
decompose(
    aten.cudnn_batch_norm.default,
    lambda x, *rest: (*aten.native_batch_norm(x, *rest), x.new_empty(0, dtype=torch.uint8)),
)
decompose(
    aten.cudnn_batch_norm_backward.default,
    lambda x, grad, weight, mean, var, save_mean, save_var, eps, reserve: aten.native_batch_norm_backward(
        grad, x, weight, mean, var, save_mean, save_var, True, eps, [True, True, True]
    ),
)


# --- weight norm ---------------------------------------------------------------------------------------------------


def _weight_norm(v, g, dim=0):
    """v [n, *S], g [n, 1...] (or the last dim) -> g v / |v| and |v|"""
    norms = torch.norm_except_dim(v, 2, dim)
    return v * (g / norms), norms


def _weight_norm_backward(grad, v, g, norms, dim):
    """-> gradients in v and g; the norms that were saved know nothing of v"""
    norms = torch.norm_except_dim(v, 2, dim)
    along = (grad * v).sum([axis for axis in range(v.dim()) if norms.shape[axis] == 1 != v.shape[axis]], keepdim=True)
    return (g / norms) * (grad - v * (along / norms.square())), along / norms


decompose(aten._weight_norm_interface.default, _weight_norm)
decompose(aten._weight_norm_interface_backward.default, _weight_norm_backward)
