"""Convolutions: lanes go into the batch dim, the channels or the groups, whichever needs the fewest copies."""

from math import prod

import torch

from lanewise._rules.batch.families import decompose, lane_rule, too_few_dims
from lanewise._rules.batch.operands import at_hand, lane_of_zeros, no_lanes, split_lanes
from lanewise._rules.batch.tracking import is_tracked

aten = torch.ops.aten
CACHE = 1 << 20  # bytes
LARGE = 75_000  # elements of one lane's windows
FEW = 3  # channels of a group


# --- moving lanes into channels and back -----------------------------------------------------------------------------


def into_channels(x, groups=1):
    """x [B, N, groups * C, *sp] -> [N, groups * B * C, *sp], group by group"""
    if groups == 1:
        if x.shape[1] == 1:
            return x.flatten(0, 2).unsqueeze(0)  # one view less
        return x.transpose(0, 1).flatten(1, 2)
    return x.unflatten(2, (groups, x.shape[2] // groups)).movedim(0, 2).flatten(1, 3)


def out_of_channels(x, lanes, groups=1):
    """The inverse of `into_channels`."""
    if groups == 1:
        images, channels, *extent = x.shape
        return x.view(images, lanes, channels // lanes, *extent).transpose(0, 1)
    return x.unflatten(1, (groups, lanes, x.shape[1] // (groups * lanes))).movedim(2, 0).flatten(2, 3)


def into_filters(w, groups=1):
    """w [B, groups * C, D, *k] -> [groups * B * C, D, *k], group by group"""
    if groups == 1:
        return w.flatten(0, 1)
    return w.unflatten(1, (groups, w.shape[1] // groups)).movedim(0, 1).flatten(0, 2)


def out_of_filters(w, lanes, groups=1):
    """The inverse of `into_filters`."""
    if groups == 1:
        return split_lanes(w, lanes, w.shape[0] // lanes)
    return w.unflatten(0, (groups, lanes, w.shape[0] // (groups * lanes))).movedim(1, 0).flatten(1, 2)


def into_depth(w):
    """w [B, C, D, *k] -> [C, B * D, *k]"""
    return w.movedim(0, 1).flatten(1, 2)


def out_of_depth(w, lanes):
    """The inverse of `into_depth`."""
    return w.unflatten(1, (lanes, w.shape[1] // lanes)).movedim(1, 0)


def fold(x):
    """x [B, N, *S] -> [B * N, *S]"""
    return x.flatten(0, 1)


def unfold(x, lanes, images):
    """The inverse of `fold` for `images` in each lane."""
    return split_lanes(x, lanes, images)


def shape_of(x, *shape):
    """A tensor of the given shape that holds no memory, for arguments of which only the shape matters."""
    return x.new_empty(1).expand(shape)


# --- forward ---------------------------------------------------------------------------------------------------------


@lane_rule(aten.convolution.default)
def convolution(level, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """x [B, N, I, *sp], weight [B, O, I / groups, *k], bias [B, O] -> [B, N, O, *sp_out]; any may lack B"""
    if weight.dim() < x.dim():
        raise too_few_dims(aten.convolution.default, weight, x.dim())
    options = (stride, padding, dilation, transposed, output_padding)
    own_bias = bias if bias is not None and not level.mapped(bias) else None
    lanes = level.size
    if not level.mapped(weight):
        if not level.mapped(x):
            out = aten.convolution(x, weight, own_bias, *options, groups).expand(lanes, *([-1] * x.dim()))
        else:
            out = unfold(torch.convolution(fold(x.value), weight, own_bias, *options, groups), lanes, x.shape[0])
        return _with_bias(level, out, bias) if own_bias is None else out
    level.note_autograd()  # the gradient of a weight has faster forms here than torch's
    if lanes == 0:
        one = aten.convolution(lane_of_zeros(level, x), lane_of_zeros(level, weight), None, *options, groups)
        return _with_bias(level, no_lanes(one), bias)
    if level.mapped(x):
        out = convolution_with_own(x.value, weight.value, options, groups)
    else:
        filters = into_depth(weight.value) if transposed else into_filters(weight.value, groups)
        out = out_of_channels(aten.convolution(x, filters, None, *options, groups), lanes, groups)
    return _with_bias(level, out, bias)


def convolution_with_own(x, weight, options, groups):
    """x [B, N, I, *sp], weight [B, O, I / groups, *k] -> [B, N, O, *sp_out], in the fastest form"""
    transposed = options[3]
    lanes, images = x.shape[:2]
    filters, depth, *taps = weight.shape[1:]
    if not transposed and groups == 1 and _one_tap(taps, options[0], options[1]):
        # A product of matrices, 1.1 to 1.5 times faster than groups.
        banks, pixels = weight.flatten(2), x.flatten(3)
        out = torch.bmm(banks, pixels.squeeze(1)) if images == 1 else torch.matmul(banks.unsqueeze(1), pixels)
        return out.reshape(lanes, images, filters, *x.shape[3:])
    form = "grouped"
    few = depth <= FEW and (depth > 1 or filters > groups) and not transposed
    if few and at_hand(x, weight) and not is_tracked(x, weight):
        form = forward_form(filters // groups, depth, prod(taps), _positions(x[0], taps, options))
    if form == "alone":
        pairs = zip(x.unbind(), weight.unbind(), strict=True)
        return torch.stack([aten.convolution(image, bank, None, *options, groups) for image, bank in pairs])
    if form == "windows":
        return convolve_windows(x, weight, options, groups)
    return convolution_of_lanes(x, weight, options, groups)


def convolution_of_lanes(x, weight, options, groups):
    """x [B, N, I, *sp], weight [B, O, I / groups, *k] -> [B, N, O, *sp_out]"""
    lanes = x.shape[0]
    folded = into_channels(x)
    if 1 in folded.shape[2:]:
        # Strides of such a dim may tell torch that channels lie last, for which the derivative has no kernel.
        folded = folded.reshape(-1).view(folded.shape)
    out = aten.convolution(folded, weight.flatten(0, 1), None, *options, lanes * groups)
    return out_of_channels(out, lanes)


def forward_form(filters, depth, taps, positions):
    """The fastest form of a convolution where each lane has a weight of its own, from the numbers of one group.

    Measured on one thread by `python -m benchmarks.conv_per_lane`: with fewer than four channels in a group, oneDNN's
    grouped kernel takes 1.2 to 1.8 times as long as windows where filters are few and small, and as one lane at a time
    where images are large.
    """
    if depth > FEW or filters == depth == 1:
        return "grouped"
    if depth * taps * positions >= LARGE:
        return "alone"
    return "windows" if filters <= 16 and taps <= 9 else "grouped"


def _positions(x, kernel, options):
    """How often a kernel finds a place in x [N, I, *sp]."""
    count = x.shape[0]
    each = zip(x.shape[2:], kernel, *(for_each_dim(values, len(kernel)) for values in options[:3]), strict=True)
    for extent, taps, step, pad, spread in each:
        count *= (extent + 2 * pad - (taps - 1) * spread - 1) // step + 1
    return count


def convolve_windows(x, weight, options, groups):
    """x [B, N, I, *sp], weight [B, O, I / groups, *k] -> [B, N, O, *sp_out], a few lanes at a time"""
    lanes, filters, depth, *kernel = weight.shape
    windows = _windows(x, kernel, options)
    shape = (lanes, filters, *windows.shape[2 + len(kernel) :])
    rows, positions = depth * prod(kernel), prod(shape[2:])
    banks = weight.reshape(lanes * groups, filters // groups, rows)
    count = max(1, CACHE // (groups * rows * positions * x.element_size()))
    if count >= lanes:
        out = torch.bmm(banks, windows.reshape(-1, rows, positions))
    else:
        out = x.new_empty(lanes * groups, filters // groups, positions)
        for start in range(0, lanes, count):
            columns = windows[start : start + count].reshape(-1, rows, positions)
            part = slice(start * groups, (start + count) * groups)
            torch.bmm(banks[part], columns, out=out[part])
    return out.view(shape).transpose(1, 2).contiguous()


def _windows(x, kernel, options):
    """x [B, N, I, *sp] -> the windows that a kernel sees, [B, I, *k, N, *sp_out], a view"""
    stride, padding, dilation = (for_each_dim(values, len(kernel)) for values in options[:3])
    if any(padding):
        x = torch.nn.functional.pad(x, [p for extent in reversed(padding) for p in (extent, extent)])
    for axis, (taps, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(3 + axis, (taps - 1) * spread + 1, step)
        x = x[..., ::spread] if spread > 1 else x
    rank = len(kernel)
    return x.permute(0, 2, *range(3 + rank, 3 + 2 * rank), 1, *range(3, 3 + rank))


def _one_tap(taps, stride, padding):
    return prod(taps) == 1 and all(step == 1 for step in stride) and not any(padding)


def _with_bias(level, out, bias):
    if bias is None:
        return out
    value = level.physical(bias)
    ones = [1] * (out.dim() - 3)
    rows = bias.shape[0]
    return out + (value.reshape(level.size, 1, rows, *ones) if level.mapped(bias) else value.reshape(rows, *ones))


# --- backward --------------------------------------------------------------------------------------------------------


@lane_rule(aten.convolution_backward.default)
def convolution_backward(
    level, grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """grad [B, N, O, *sp_out], x [B, N, I, *sp], weight [B, O, I / groups, *k] -> gradients in x, weight and bias"""
    options = (stride, padding, dilation, transposed, output_padding)
    wants_x, wants_weight, wants_bias = output_mask
    if level.size == 0:
        like = level.physical(grad)
        shapes = (x.shape, weight.shape, [grad.shape[1]])
        return tuple(like.new_empty(0, *s) if wanted else None for s, wanted in zip(shapes, output_mask, strict=True))
    grad_x = grad_weight = grad_bias = None
    if wants_x:
        grad_x = _input_gradient(level, grad, x, weight, options, groups)
    if wants_weight:
        grad_weight = _weight_gradient(level, grad, x, weight.shape, options, groups)
    if wants_bias:
        grad_bias = level.physical(grad).sum([-dim for dim in range(1, grad.dim() - 1)] + [-grad.dim()])
        if not level.mapped(grad):
            grad_bias = grad_bias.expand(level.size, -1)
    return grad_x, grad_weight, grad_bias


def _input_gradient(level, grad, x, weight, options, groups):
    """[B, N, I, *sp]; of x only the shape matters"""
    lanes, images, channels, *extent = level.size, *x.shape
    transposed = options[3]
    like = level.physical(x)
    if not level.mapped(weight):
        if not level.mapped(grad):
            dummy = shape_of(like, *x.shape)
            return _backward(grad, dummy, weight, options, groups, 0).expand(lanes, *x.shape)
        dummy = shape_of(like, lanes * images, channels, *extent)
        return unfold(_backward(fold(grad.value), dummy, weight, options, groups, 0), lanes, images)
    if not transposed and groups == 1 and _one_tap(weight.shape[2:], options[0], options[1]):
        return torch.matmul(weight.value.flatten(2).mT.unsqueeze(1), level.expanded(grad).flatten(3)).view(
            lanes, *x.shape
        )
    dummy = shape_of(like, images, lanes * channels, *extent)
    if not level.mapped(grad) and groups == 1:
        filters = into_filters(weight.value) if transposed else into_depth(weight.value)
        return out_of_channels(_backward(grad, dummy, filters, options, 1, 0), lanes)
    folded = into_channels(level.expanded(grad))
    return out_of_channels(_backward(folded, dummy, weight.value.flatten(0, 1), options, lanes * groups, 0), lanes)


def _weight_gradient(level, grad, x, shape, options, groups):
    """[B, O, I / groups, *k], `shape` without B; transposed [B, I, O / groups, *k]"""
    lanes, filters, depth, *kernel = level.size, *shape
    transposed = options[3]
    like = level.physical(x)
    if level.mapped(grad) and level.mapped(x):
        return weight_gradient_of_lanes(grad.value, x.value, shape, options, groups)
    if not level.mapped(grad) and not level.mapped(x):
        return _backward(grad, x, shape_of(like, *shape), options, groups, 1).expand(lanes, *shape)
    # Lanes of one side go into its channels; those are filters or their depth.
    into_rows = level.mapped(grad) != transposed
    dummy = shape_of(like, *((lanes * filters, depth) if into_rows else (filters, lanes * depth)), *kernel)
    folded = into_channels(grad.value, groups) if level.mapped(grad) else grad
    inputs = into_channels(x.value, groups) if level.mapped(x) else x
    out = _backward(folded, inputs, dummy, options, groups, 1)
    return out_of_filters(out, lanes, groups) if into_rows else out_of_depth(out, lanes)


def weight_gradient_of_lanes(grad, x, shape, options, groups):
    """grad [B, N, O, *sp_out], x [B, N, I, *sp], `shape` of one lane's weight -> [B, *shape]"""
    filters, depth, *kernel = shape
    lanes, transposed = x.shape[0], options[3]
    if not grad.numel() or not x.numel():
        return x.new_zeros(lanes, *shape)
    positions = grad.shape[1] * prod(grad.shape[3:])
    form = per_lane_form(lanes * groups, filters // groups, depth, prod(kernel), positions)
    if not transposed and form == "correlate" and groups > 1:
        return _by_correlation(grad, x, kernel, options)
    if not transposed and form == "alone":
        dummy = shape_of(x, *shape)
        pairs = zip(grad.unbind(), x.unbind(), strict=True)
        return torch.stack([_backward(slopes, image, dummy, options, groups, 1) for slopes, image in pairs])
    if not transposed and form != "grouped":
        return _by_windows(grad, x, kernel, options, groups)
    dummy = x.new_empty(lanes * filters, depth, *kernel)  # the kernel would copy one without memory
    out = _backward(into_channels(grad), into_channels(x), dummy, options, lanes * groups, 1)
    return split_lanes(out, lanes, filters)


def _backward(grad, x, weight, options, groups, which):
    mask = [which == 0, which == 1, False]
    return aten.convolution_backward(grad, x, weight, None, *options, groups, mask)[which]


def per_lane_form(banks, filters, depth, taps, positions):
    """The fastest form of the weight gradient of one lane each, from the numbers of one group; `banks` groups in all.

    Measured on one thread by `python -m benchmarks.conv_weight_grad`: oneDNN's grouped kernel blocks channels by eight
    and is up to 3 times faster there; it is slower by 1.3 to 5 times elsewhere, for kernels of one tap, and for filters
    that are large beside the positions they slide over. Depthwise, a correlation is up to 30 times faster for kernels
    of more than 3 x 3, and by up to a sixth for large images; else the grouped kernel is, by a tenth. Large images of
    few channels are fastest one lane at a time, by 1.5 to 3 times.
    """
    if filters == depth == 1:
        return "correlate" if taps > 9 or positions >= 784 else "grouped"
    if depth <= FEW and depth * taps * positions >= LARGE:
        return "alone"
    weights = filters * depth * taps
    # It also makes a copy of all weights, which is cheap as long as they stay in a cache.
    small = banks * weights <= 300_000
    enough = (positions > 36 and weights <= 1000 * positions) or (positions > 8 and small and banks > 16)
    return "grouped" if filters % 8 == 0 and depth % 8 == 0 and taps > 1 and enough else "windows"


def _by_correlation(grad, x, kernel, options):
    """Depthwise: grad [B, N, C, *sp_out], x [B, N, C, *sp] -> [B, C, 1, *k], x correlated with grad"""
    stride, padding, dilation = options[:3]
    lanes, images, channels = x.shape[:3]
    maps = x.transpose(1, 2).reshape(1, lanes * channels * images, *x.shape[3:])
    filters = grad.transpose(1, 2).reshape(lanes * channels, images, *grad.shape[3:])
    zeros = [0] * len(kernel)
    out = aten.convolution(maps, filters, None, dilation, padding, stride, False, zeros, lanes * channels)
    for axis, taps in enumerate(kernel):
        out = out.narrow(2 + axis, 0, taps)
    return out.reshape(lanes, channels, 1, *kernel)


def _by_windows(grad, x, kernel, options, groups):
    """grad [B, N, O, *sp_out], x [B, N, I, *sp] -> [B, O, I / groups, *k]: grad times the windows that it saw

    The windows are a view; they are copied a few lanes at a time, so that the copy stays in a cache of 1 MiB.
    """
    windows = _windows(x, kernel, options)
    lanes, images, channels = x.shape[:3]
    filters = grad.shape[2]
    positions, rows = images * prod(grad.shape[3:]), channels // groups * prod(kernel)
    slopes = grad.transpose(1, 2).reshape(lanes * groups, filters // groups, positions)
    count = max(1, CACHE // (groups * rows * positions * x.element_size()))
    parts = [
        torch.bmm(
            slopes[start * groups : (start + count) * groups],
            windows[start : start + count].reshape(-1, rows, positions).transpose(1, 2),
        )
        for start in range(0, lanes, count)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(lanes, filters, channels // groups, *kernel)


def for_each_dim(values, rank):
    values = [values] if type(values) is int else values
    return list(values) * rank if len(values) == 1 else list(values)


# --- the same operation under other names ----------------------------------------------------------------------------

decompose(aten._convolution.default, lambda *args: aten.convolution(*args[:9]))
decompose(
    aten.mkldnn_convolution.default,
    lambda x, weight, bias, padding, stride, dilation, groups: aten.convolution(
        x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
    ),
)
decompose(
    aten.cudnn_convolution.default,
    lambda x, weight, padding, stride, dilation, groups, *_: aten.convolution(
        x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups
    ),
)
decompose(
    aten.cudnn_convolution_transpose.default,
    lambda x, weight, padding, output_padding, stride, dilation, groups, *_: aten.convolution(
        x, weight, None, stride, padding, dilation, True, output_padding, groups
    ),
)
decompose(
    aten.conv_tbc.default,
    lambda x, weight, bias, pad=0: (
        torch.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad).permute(2, 0, 1).contiguous()
    ),
)
