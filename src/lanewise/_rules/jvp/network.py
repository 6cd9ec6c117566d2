"""Forward rules of neural network operations: pooling, resizing, padding, normalisation, embedding bags."""

import torch
from torch import Tensor

from lanewise._core.dual import DualLevel
from lanewise._core.plane import lift, tracked
from lanewise._rules.jvp.families import decomposed, jvp_rule, linear, rule_on_plane
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

linear(
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._fft_r2c.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    aten.affine_grid_generator.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.channel_shuffle.default,
    aten.col2im.default,
    aten.im2col.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_linear1d.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten.upsample_trilinear3d.default,
)


@jvp_rule(aten.native_dropout.default)
def native_dropout(level, x, p, train):
    """t with the same mask and scale"""
    out, mask = aten.native_dropout.default(x.value, p, train)
    if train is False:
        return (out, mask), [x.tangent.mul(1), None]
    return (out, mask), [x.tangent * mask * (0 if p == 1 else 1 / (1 - p)), None]


def _pool(op, dims):
    """`(values, indices)` of windows, the indices counting the elements of the last dims: t is taken there."""

    def rule(level, x, *args, **kwargs):
        out = op(x.value, *args, **kwargs)
        indices = out[1].flatten(-dims)
        return out, [x.tangent.flatten(-dims).gather(-1, indices).reshape(out[0].shape), None]

    jvp_rule(op)(rule)


_pool(aten.adaptive_max_pool2d.default, 2)
_pool(aten.adaptive_max_pool3d.default, 3)
_pool(aten.max_pool2d_with_indices.default, 2)
_pool(aten.max_pool3d_with_indices.default, 3)


# --- normalisation: n = (x - mean) rstd, and its tangent is rstd (t - mean(t) - n mean(n t)) --------------------------


def _normal(x, t, mean, rstd, dims):
    """n, and the tangents of n, mean and rstd."""
    centred = x - mean
    normal = centred * rstd
    t_mean = t.mean(dims, True)
    slope = (normal * t).mean(dims, True)
    return normal, rstd * (t - t_mean - normal * slope), t_mean, -rstd * rstd * slope


def differentiable_statistics(x, mean, rstd, dims, eps):
    """The mean and rstd that the kernel gave, or such as autograd sees as functions of x where it records below."""
    if not tracked(x):
        return mean, rstd
    return x.mean(dims, True), (x.var(dims, correction=0, keepdim=True) + eps).rsqrt()


def _affine(level, out, normal, t_normal, w, b, shape):
    """The tangent of n w + b, of the dtype of the output, which may have less precision than w and b."""
    pw, tw, tb = level.primal(w), level.tangent(w), level.tangent(b)
    total = t_normal
    if total is not None and pw is not None:
        total = total * pw.reshape(shape)
    if tw is not None:
        part = normal * tw.reshape(shape)
        total = part if total is None else total + part
    if tb is not None:
        total = tb.reshape(shape).expand(normal.shape).contiguous() if total is None else total + tb.reshape(shape)
    return total if total is None or total.dtype is out.dtype else total.to(out.dtype)


@jvp_rule(aten.native_layer_norm.default)
def layer_norm(level, x, shape, w, b, eps):
    """Over the last dims"""
    px, t = level.primal(x), level.tangent(x)
    out = aten.native_layer_norm.default(px, shape, level.primal(w), level.primal(b), eps)
    dims = list(range(px.dim() - len(shape), px.dim()))
    mean, rstd = differentiable_statistics(px, out[1], out[2], dims, eps)
    if t is None:
        return out, [_affine(level, out[0], (px - mean) * rstd, None, w, b, shape), None, None]
    normal, t_normal, t_mean, t_rstd = _normal(px, t, mean, rstd, dims)
    return out, [_affine(level, out[0], normal, t_normal, w, b, shape), t_mean, t_rstd]


@jvp_rule(aten.native_group_norm.default)
def group_norm(level, x, w, b, n, channels, size, groups, eps):
    """Over the channels of a group and all positions"""
    px, t = level.primal(x), level.tangent(x)
    out = aten.native_group_norm.default(px, level.primal(w), level.primal(b), n, channels, size, groups, eps)
    grouped = (n, groups, channels // groups, size)
    mean, rstd = out[1].reshape(n, groups, 1, 1), out[2].reshape(n, groups, 1, 1)
    mean, rstd = differentiable_statistics(px.reshape(grouped), mean, rstd, [2, 3], eps)
    weights = (1, groups, channels // groups, 1)
    tangents: list[Tensor | None] = [None, None, None]
    if t is None:
        normal, t_normal = (px.reshape(grouped) - mean) * rstd, None
    else:
        normal, t_normal, t_mean, t_rstd = _normal(px.reshape(grouped), t.reshape(grouped), mean, rstd, [2, 3])
        tangents[1:] = [t_mean.reshape(n, groups), t_rstd.reshape(n, groups)]
    total = _affine(level, out[0], normal, t_normal, w, b, weights)
    tangents[0] = None if total is None else total.reshape(px.shape)
    return out, tangents


def _batch_norm(op, statistics):
    """`statistics(*args)` gives running_mean, running_var, training, momentum and eps of a variant.

    Running statistics of this plane get the tangents that they have; those from outside just their new values.
    """

    def rule(level: DualLevel, *args):
        x, w, b, *rest = args
        running_mean, running_var, training, momentum, eps = statistics(*rest)
        if training and level.tangent(x) is not None:
            for running in (running_mean, running_var):
                if level.owns(running):
                    lift(running)
        return level.pair(*level.below(run, level, args, running_mean, running_var, training, momentum, eps))

    def run(level: DualLevel, args, running_mean, running_var, training, momentum, eps):
        x, w, b = args[:3]
        px, t = level.primal(x), level.tangent(x)
        dims = [0, *range(2, px.dim())]
        channel = [1, -1] + [1] * (px.dim() - 2)
        if not training:
            fixed = level.primal(running_mean), (level.primal(running_var) + eps).rsqrt()
        out = op(*[level.primal(arg) if isinstance(arg, Tensor) else arg for arg in args])
        tangents: list[Tensor | None] = [None] * len(out)
        if not training:
            mean, rstd = fixed
            normal = (px - mean.reshape(channel)) * rstd.reshape(channel)
            t_normal = None if t is None else t * rstd.reshape(channel)
            t_mean, t_var = level.tangent(running_mean), level.tangent(running_var)
            if t_mean is not None:
                part = -(t_mean * rstd).reshape(channel).expand(px.shape)
                t_normal = part if t_normal is None else t_normal + part
            if t_var is not None:
                part = normal * (-0.5 * t_var * rstd * rstd).reshape(channel)
                t_normal = part if t_normal is None else t_normal + part
        else:
            mean, rstd = differentiable_statistics(px, out[1].reshape(channel), out[2].reshape(channel), dims, eps)
            normal, t_normal = (px - mean) * rstd, None
            if t is not None:
                normal, t_normal, t_mean, t_rstd = _normal(px, t, mean, rstd, dims)
                tangents[1:3] = [t_mean.reshape(-1), t_rstd.reshape(-1)]
                count = px.numel() // px.shape[1]
                t_var = (2 / max(count - 1, 1)) * ((px - mean) * t).sum(dims)
                for running, tangent in ((running_mean, tangents[1]), (running_var, t_var)):
                    if level.tangent(running) is not None:
                        running.tangent.mul_(1 - momentum).add_(tangent, alpha=momentum)
        tangents[0] = _affine(level, out[0], normal, t_normal, w, b, channel)
        return out, tangents

    rule_on_plane(op)(rule)


_batch_norm(aten._batch_norm_with_update.default, lambda mean, var, momentum, eps: (mean, var, True, momentum, eps))
_batch_norm(
    aten._native_batch_norm_legit.default, lambda mean, var, train, momentum, eps: (mean, var, train, momentum, eps)
)
_batch_norm(aten._native_batch_norm_legit.no_stats, lambda train, momentum, eps: (None, None, True, momentum, eps))
_batch_norm(aten.native_batch_norm.default, lambda mean, var, train, momentum, eps: (mean, var, train, momentum, eps))


@rule_on_plane(aten.rrelu_with_noise.default)
def rrelu(level: DualLevel, x, noise, *args, **kwargs):
    """In training, t times the slopes that are written to `noise`; else those of leaky_relu"""
    lower, upper, training, *_ = (*args, *(1 / 8, 1 / 3, False)[len(args) :])

    def run():
        drawn = level.primal(noise)
        out = aten.rrelu_with_noise.default(level.primal(x), drawn, *args, **kwargs)
        t = level.tangent(x)
        if t is None:
            return out, None
        if training:
            return out, t * drawn
        return out, aten.leaky_relu_backward.default(t, level.primal(x), (lower + upper) / 2, False)

    return level.pair(*level.below(run))


@decomposed(aten.rrelu_with_noise_.default)
def rrelu_in_place(x, noise, *args, **kwargs):
    """What it gives, written to x"""
    return x.copy_(aten.rrelu_with_noise.default(x, noise, *args, **kwargs))


@jvp_rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(level, w, indices, offsets, scale=False, mode=0, sparse=False, factors=None, *rest):
    """Linear in the rows, and in their weights; for the maximum, t of the rows that give it"""
    op = aten._embedding_bag.default
    tail = (level.primal(indices), level.primal(offsets), scale, mode, sparse)
    pw, pf = level.primal(w), level.primal(factors)
    out = op(pw, *tail, pf, *rest)
    tw, tf = level.tangent(w), level.tangent(factors)
    total = None
    if tw is not None and mode == 2:
        rows = out[3].clamp_min(0).to(torch.int64)
        total = tw.gather(0, rows).masked_fill((out[2] == 0).unsqueeze(-1), 0)
    elif tw is not None:
        total = op(tw, *tail, pf, *rest)[0]
    if tf is not None:
        part = op(pw, *tail, tf, *rest)[0]
        total = part if total is None else total + part
    return out, [total, None, None, None]


@decomposed(aten.glu.default)
def glu(x, dim=-1):
    """x = [a, b] -> a sigmoid(b)"""
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


@decomposed(aten._prelu_kernel.default)
def prelu(x, w):
    """x where it is positive, w x elsewhere"""
    return torch.where(x > 0, x, w * x)


@decomposed(aten._weight_norm_interface.default)
def weight_norm(v, g, dim=0):
    """v g / |v|, and |v|, the norm over all dims but one; torch's formula takes the norms for constants"""
    norms = torch.norm_except_dim(v, 2, dim)
    return v * (g / norms), norms


@jvp_rule(aten._nested_tensor_from_mask.default)
def nested_tensor_from_mask(level: DualLevel, x, mask, mask_check=True):
    """What nn.TransformerEncoder makes of a padded input, where nothing records gradients"""
    raise TransformError(
        at_user_line(
            "jvp: nested tensors have no tangents. Where no gradients are recorded, nn.TransformerEncoder makes one of "
            "an input with src_key_padding_mask",
            "nn.TransformerEncoder(layer, n, enable_nested_tensor=False)\n"
            "encoder.use_nested_tensor = False  # of one that is there",
        )
    )
