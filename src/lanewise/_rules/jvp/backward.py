"""Forward rules of the formulas that backward passes run, so that forward over reverse stays on the fast path.

They are linear in the cotangent g; where the derivative itself depends on x, its own derivative is here.
"""

import math

import torch

from lanewise._core.plane import tracked
from lanewise._rules.jvp.families import decomposed, elementwise, jvp_rule, linear, multilinear

aten = torch.ops.aten

_ROOT_TWO_PI = math.sqrt(2 * math.pi)

linear(
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten.diagonal_backward.default,
    aten.embedding_dense_backward.default,
    aten.hardshrink_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.nll_loss2d_backward.default,
    aten.nll_loss_backward.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.softshrink_backward.default,
    aten.threshold_backward.default,
    aten.unfold_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)


multilinear(aten._embedding_bag_per_sample_weights_backward.default)


def _embedding_bag_backward(op, position):
    """Linear in g, and in the weights of the samples, which stand at `position`."""

    def rule(level, *args):
        primals = [level.primal(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        total = None
        for place in (0, position):
            t = level.tangent(args[place])
            if t is not None:
                part = op(*primals[:place], t, *primals[place + 1 :])
                total = part if total is None else total + part
        return op(*primals), total

    jvp_rule(op)(rule)


_embedding_bag_backward(aten._embedding_bag_backward.default, 10)
_embedding_bag_backward(aten._embedding_bag_dense_backward.default, 8)


def _gelu_curvature(x, approximate):
    """The second derivative of gelu."""
    if approximate == "none":
        return (2 - x * x) * (-x * x / 2).exp() / _ROOT_TWO_PI
    scale = math.sqrt(2 / math.pi)
    th = torch.tanh(scale * (x + 0.044715 * x * x * x))
    slope = scale * (1 + 0.134145 * x * x)
    return (1 - th * th) * (slope - x * th * slope * slope + 0.134145 * scale * x * x)


def _silu_curvature(x):
    s = x.sigmoid()
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _softplus_curvature(x, beta, threshold):
    s = torch.sigmoid(x * beta)
    return (beta * s * (1 - s)).masked_fill(x * beta > threshold, 0)


def _elu_curvature(t, g, alpha, scale, factor, is_result, x):
    """For x <= 0 the derivative is factor (y + alpha scale), or alpha scale factor exp(factor x)."""
    slope = g * factor if is_result else g * (alpha * scale * factor * factor) * (x * factor).exp()
    return (t * slope).masked_fill(x > 0, 0)


def _log_sigmoid_curvature(x):
    s = x.sigmoid()
    return s * (s - 1)


def _logit_backward(g, x, eps, power=1):
    limit = 0 if eps is None or eps < 0 else eps
    outside = (x < limit) | (x > 1 - limit)
    x = x.masked_fill(outside, 0.5)
    slope = g / (x * (1 - x)) ** power
    return slope.masked_fill(outside, math.nan if eps is None or eps < 0 else 0)


# fmt: off
elementwise(
    aten.hardsigmoid_backward.default,
    lambda t, y, g, x: (t / 6).masked_fill(x.abs() >= 3, 0),
    None,
)
elementwise(
    aten.elu_backward.default,
    lambda t, y, g, *rest: aten.elu_backward.default(t, *rest),
    None, None, None, None,
    lambda t, y, g, alpha, scale, factor, is_result, x: _elu_curvature(t, g, alpha, scale, factor, is_result, x),
)
elementwise(
    aten.gelu_backward.default,
    lambda t, y, g, x, *, approximate="none": aten.gelu_backward.default(t, x, approximate=approximate),
    lambda t, y, g, x, *, approximate="none": t * g * _gelu_curvature(x, approximate),
)
elementwise(
    aten.hardswish_backward.default,
    lambda t, y, g, x: aten.hardswish_backward.default(t, x),
    lambda t, y, g, x: (t * g / 3).masked_fill(x.abs() >= 3, 0),
)
elementwise(
    aten.log_sigmoid_backward.default,
    lambda t, y, g, x, buffer: t * (-x).sigmoid(),
    lambda t, y, g, x, buffer: t * g * _log_sigmoid_curvature(x),
)
elementwise(
    aten.logit_backward.default,
    lambda t, y, g, x, eps=None: _logit_backward(t, x, eps),
    lambda t, y, g, x, eps=None: _logit_backward(t * g * (2 * x - 1), x, eps, 2),
)
elementwise(
    aten.sigmoid_backward.default,
    lambda t, z, g, y: aten.sigmoid_backward.default(t, y),
    lambda t, z, g, y: g * (t * (1 - 2 * y)).conj(),
)
elementwise(
    aten.silu_backward.default,
    lambda t, y, g, x: aten.silu_backward.default(t, x),
    lambda t, y, g, x: t * g * _silu_curvature(x),
)
elementwise(
    aten.softplus_backward.default,
    lambda t, y, g, x, beta, threshold: aten.softplus_backward.default(t, x, beta, threshold),
    lambda t, y, g, x, beta, threshold: t * g * _softplus_curvature(x, beta, threshold),
)
elementwise(
    aten.tanh_backward.default,
    lambda t, z, g, y: aten.tanh_backward.default(t, y),
    lambda t, z, g, y: g * (-2 * t * y).conj(),
)
# fmt: on


@jvp_rule(aten.convolution_backward.default)
def convolution_backward(level, g, x, w, bias_sizes, *settings):
    """Bilinear in g and w, g and x, and linear in g, for the gradients of x, w and the bias"""
    *settings, mask = settings
    pg, px, pw = level.primal(g), level.primal(x), level.primal(w)
    out = aten.convolution_backward.default(pg, px, pw, bias_sizes, *settings, mask)
    tg, tx, tw = level.tangent(g), level.tangent(x), level.tangent(w)
    totals = [None, None, None]

    def add(parts):
        for n, part in enumerate(parts):
            if part is not None:
                totals[n] = part if totals[n] is None else totals[n] + part

    if tg is not None:
        add(aten.convolution_backward.default(tg, px, pw, bias_sizes, *settings, mask))
    if tw is not None and mask[0]:
        add(aten.convolution_backward.default(pg, px, tw, None, *settings, [True, False, False]))
    if tx is not None and mask[1]:
        add(aten.convolution_backward.default(pg, tx, pw, None, *settings, [False, True, False]))
    return out, totals


@jvp_rule(aten._softmax_backward_data.default)
def softmax_backward(level, g, y, dim, dtype):
    """y (g - sum(g y)), bilinear in g and (y, y)"""
    pg, py = level.primal(g), level.primal(y)
    out = aten._softmax_backward_data.default(pg, py, dim, dtype)
    tg, ty = level.tangent(g), level.tangent(y)
    total = None if tg is None else aten._softmax_backward_data.default(tg, py, dim, dtype)
    if ty is not None:
        weighted = pg * ty
        part = weighted - ty * (pg * py).sum(dim, True) - py * weighted.sum(dim, True)
        part = part if part.dtype is out.dtype else part.to(out.dtype)
        total = part if total is None else total + part
    return out, total


@jvp_rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(level, g, y, dim, dtype):
    """g - exp(y) sum(g)"""
    pg, py = level.primal(g), level.primal(y)
    out = aten._log_softmax_backward_data.default(pg, py, dim, dtype)
    tg, ty = level.tangent(g), level.tangent(y)
    total = None if tg is None else aten._log_softmax_backward_data.default(tg, py, dim, dtype)
    if ty is not None:
        part = -ty * py.exp() * pg.sum(dim, True)
        part = part if part.dtype is out.dtype else part.to(out.dtype)
        total = part if total is None else total + part
    return out, total


def _scale(reduction, x):
    return 1 / max(x.numel(), 1) if reduction == 1 else 1


@decomposed(aten.mse_loss_backward.default)
def mse_loss_backward(g, x, y, reduction):
    return g * (x - y) * (2 * _scale(reduction, x - y))


@decomposed(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(g, x, y, weight=None, reduction=1):
    """g (x - y) / (x (1 - x)), the divisor kept from 0 as torch does"""
    out = g * (x - y) / (x * (1 - x)).clamp_min(1e-12)
    if weight is not None:
        out = out * weight
    return out * _scale(reduction, x)


@decomposed(aten.glu_backward.default)
def glu_backward(g, x, dim):
    """x = [a, b] -> [g s(b), g a s'(b)]"""
    a, b = x.chunk(2, dim)
    s = b.sigmoid()
    return torch.cat([g * s, g * a * s * (1 - s)], dim)


@decomposed(aten._prelu_kernel_backward.default)
def prelu_backward(g, x, w):
    positive = x > 0
    return g * torch.where(positive, 1, w), (g * x).masked_fill(positive, 0)


def _statistics(x, mean, rstd, dims):
    """The mean and rstd that were saved, or such as autograd sees as functions of x where it records below."""
    if not tracked(x):
        return mean, rstd
    var = x.var(dims, correction=0, keepdim=True)
    eps = rstd.detach() ** -2 - var.detach()
    return x.mean(dims, True), (var + eps).rsqrt()


@decomposed(aten.native_layer_norm_backward.default)
def layer_norm_backward(g, x, shape, mean, rstd, w, b, mask):
    """With n = (x - mean) rstd and h = g w: rstd (h - mean(h) - n mean(h n)), sum(g n), sum(g)"""
    kept = x.dim() - len(shape)
    inner, outer = list(range(kept, x.dim())), list(range(kept))
    mean, rstd = _statistics(x, mean, rstd, inner)
    normal = (x - mean) * rstd
    h = g if w is None else g * w
    gx = gw = gb = None
    if mask[0]:
        gx = rstd * (h - h.mean(inner, True) - normal * (h * normal).mean(inner, True))
        gx = gx.to(x.dtype)
    if mask[1]:
        gw = (g * normal).sum(outer) if outer else g * normal
        gw = gw if w is None else gw.to(w.dtype)
    if mask[2]:
        gb = g.sum(outer) if outer else g.clone()
        gb = gb if b is None else gb.to(b.dtype)
    return gx, gw, gb


@decomposed(aten.native_group_norm_backward.default)
def group_norm_backward(g, x, mean, rstd, w, n, channels, size, groups, mask):
    """As for layer_norm, over the channels of a group and all positions"""
    grouped = (n, groups, channels // groups, size)
    mean, rstd = mean.reshape(n, groups, 1, 1), rstd.reshape(n, groups, 1, 1)
    mean, rstd = _statistics(x.reshape(grouped), mean, rstd, [2, 3])
    normal = (x.reshape(grouped) - mean) * rstd
    gg = g.reshape(grouped)
    gx = gw = gb = None
    if mask[0]:
        h = gg if w is None else gg * w.reshape(1, groups, channels // groups, 1)
        gx = rstd * (h - h.mean([2, 3], True) - normal * (h * normal).mean([2, 3], True))
        gx = gx.reshape(x.shape).to(x.dtype)
    if mask[1]:
        gw = (gg * normal).sum([0, 3]).reshape(channels)
        gw = gw if w is None else gw.to(w.dtype)
    if mask[2]:
        gb = gg.sum([0, 3]).reshape(channels)
    return gx, gw, gb


@decomposed(aten.native_batch_norm_backward.default)
def batch_norm_backward(g, x, w, running_mean, running_var, save_mean, save_invstd, train, eps, mask):
    """As for layer_norm, over the examples and positions of each channel; without `train` the statistics are fixed"""
    dims = [0, *range(2, x.dim())]
    channel = [1, -1] + [1] * (x.dim() - 2)
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    mean, rstd = mean.reshape(channel), rstd.reshape(channel)
    if train:
        mean, rstd = _statistics(x, mean, rstd, dims)
    normal = (x - mean) * rstd
    gx = gw = gb = None
    if mask[0]:
        h = g if w is None else g * w.reshape(channel)
        gx = rstd * (h - h.mean(dims, True) - normal * (h * normal).mean(dims, True)) if train else rstd * h
        gx = gx.to(x.dtype)
    if mask[1]:
        gw = (g * normal).sum(dims)
    if mask[2]:
        gb = g.sum(dims)
    return gx, gw, gb


@decomposed(aten.batch_norm_backward.default)
def batch_norm_backward_of_update(g, x, w, running_mean, running_var, save_mean, save_invstd, update, eps, mask, _):
    """The same, with the memory that a kernel of its own may ask for"""
    return batch_norm_backward(g, x, w, running_mean, running_var, save_mean, save_invstd, update, eps, mask)
