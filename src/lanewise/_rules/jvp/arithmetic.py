"""Forward rules of pointwise operations of several operands. A derivative is `(t, y, *operands) -> tangent`."""

import math

import torch

from lanewise._core.plane import tracked
from lanewise._rules.jvp.families import elementwise, fitted, jointly_linear, jvp_rule, multilinear

aten = torch.ops.aten

_LN2 = math.log(2)


def _inverse_square(a, b):
    """1 / (a^2 + b^2), and 0 where both are 0"""
    square = a * a + b * b
    none = square == 0
    return square.masked_fill(none, 1).reciprocal().masked_fill(none, 0)


def _share(gap):
    """sigmoid(gap), in which no exponential is infinite: of complex numbers that would be NaN"""
    if not gap.is_complex():
        return gap.sigmoid()
    more = gap.real >= 0
    small = torch.where(more, -gap, gap).exp()
    return torch.where(more, 1, small) / (1 + small)


# fmt: off
elementwise(aten.add.Scalar, lambda t, y, x, c, alpha=1: t)
elementwise(
    aten.addcdiv.default,
    lambda t, y, c, a, b, *, value=1: t,
    lambda t, y, c, a, b, *, value=1: t * value / b,
    lambda t, y, c, a, b, *, value=1: t * -value * a / (b * b),
)
elementwise(
    aten.addcmul.default,
    lambda t, y, c, a, b, *, value=1: t,
    lambda t, y, c, a, b, *, value=1: t * value * b,
    lambda t, y, c, a, b, *, value=1: t * value * a,
)
elementwise(
    aten.atan2.default,
    lambda t, y, a, b: t * b * _inverse_square(a, b),
    lambda t, y, a, b: -t * a * _inverse_square(a, b),
)
elementwise(aten.copysign.Scalar, lambda t, y, a, b: t * (y / a).masked_fill(a == 0, 0))
elementwise(aten.copysign.Tensor, lambda t, y, a, b: t * (y / a).masked_fill(a == 0, 0))
# A y that is recorded below must not be saved there: torch itself does not, so functions may write to it.
elementwise(aten.fmod.Scalar, lambda t, y, a, c: t)
elementwise(aten.fmod.Tensor, lambda t, y, a, b: t, lambda t, y, a, b: -t * torch.div(a, b, rounding_mode="trunc"))
elementwise(aten.hypot.default, lambda t, y, a, b: t * (a / y), lambda t, y, a, b: t * (b / y))
elementwise(
    aten.ldexp.Tensor, lambda t, y, a, b: t * torch.exp2(b), lambda t, y, a, b: t * (y * _LN2)
)
elementwise(aten.lerp.Scalar, lambda t, y, a, b, w: t * (1 - w), lambda t, y, a, b, w: t * w)
elementwise(
    aten.lerp.Tensor,
    lambda t, y, a, b, w: t * (1 - w),
    lambda t, y, a, b, w: t * w,
    lambda t, y, a, b, w: t * (b - a),
)
# A quotient with exp(a - b), which may be infinite, would have no derivative of its own.
elementwise(
    aten.logaddexp.default, lambda t, y, a, b: t * _share(a - b), lambda t, y, a, b: t * _share(b - a)
)
elementwise(
    aten.logaddexp2.default,
    lambda t, y, a, b: t * ((a - b) * _LN2).sigmoid(),
    lambda t, y, a, b: t * ((b - a) * _LN2).sigmoid(),
)
elementwise(aten.polar.default, lambda t, y, a, b: t * torch.complex(b.cos(), b.sin()), lambda t, y, a, b: y * t * 1j)
elementwise(aten.remainder.Scalar, lambda t, y, a, c: t)
elementwise(
    aten.remainder.Tensor, lambda t, y, a, b: t, lambda t, y, a, b: -t * torch.div(a, b, rounding_mode="floor")
)
elementwise(
    aten.special_xlog1py.default,
    lambda t, y, a, b: torch.special.xlog1py(t, b).masked_fill((a == 0) & (b <= -1), 0),
    lambda t, y, a, b: t * (a / (b + 1)),
)
elementwise(
    aten.special_xlog1py.other_scalar,
    lambda t, y, a, c: torch.special.xlog1py(t, c) if c > -1 else t * torch.special.xlog1py(a != 0, c),
)
elementwise(aten.sub.Scalar, lambda t, y, x, c, alpha=1: t)
elementwise(
    aten.xlogy.Scalar_Other, lambda t, y, a, c: torch.xlogy(t, c) if c > 0 else t * torch.xlogy(a != 0, c)
)
elementwise(
    aten.xlogy.Tensor,
    lambda t, y, a, b: torch.xlogy(t, b).masked_fill((a == 0) & (b <= 0), 0),
    lambda t, y, a, b: t * (a / b),
)
# fmt: on

jointly_linear(aten.complex.default)
multilinear(aten.linalg_cross.default)


@jvp_rule(aten.add.Tensor, guarded=False)
def add(level, x, y, *, alpha=1):
    """t_x + alpha t_y, broadcast to the sum"""
    out = torch.add(level.primal(x), level.primal(y), alpha=alpha)
    return out, _combined(level, out, x, y, alpha)


@jvp_rule(aten.sub.Tensor, guarded=False)
def sub(level, x, y, *, alpha=1):
    """t_x - alpha t_y, broadcast to the difference"""
    out = torch.sub(level.primal(x), level.primal(y), alpha=alpha)
    return out, _combined(level, out, x, y, -alpha)


@jvp_rule(aten.rsub.Tensor, guarded=False)
def rsub(level, x, y, *, alpha=1):
    """t_y - alpha t_x, broadcast to the difference"""
    out = torch.rsub(level.primal(x), level.primal(y), alpha=alpha)
    return out, _combined(level, out, y, x, -alpha)


def _combined(level, out, x, y, factor):
    tx, ty = level.tangent(x), level.tangent(y)
    if ty is None:
        return fitted(tx, out, x, tx)
    if tx is None:
        return fitted(ty if factor == 1 else ty * factor, out, y, ty)
    if tx.shape == ty.shape and tx.dtype is ty.dtype:
        return fitted(torch.add(tx, ty, alpha=factor), out, x, tx)
    return fitted(tx, out, x, tx) + fitted(ty * factor, out, y, ty)


@jvp_rule(aten.mul.Tensor, guarded=False)
def mul(level, x, y):
    """t_x y + x t_y"""
    px, tx = level.primal(x), level.tangent(x)
    py, ty = level.primal(y), level.tangent(y)
    out = px * py
    if ty is None:
        return out, fitted(tx * py, out, x, tx)
    if tx is None:
        return out, fitted(px * ty, out, y, ty)
    if px.dtype is py.dtype and tx.dtype is ty.dtype:
        return out, torch.addcmul(tx * py, px, ty)
    return out, fitted(tx * py, out, x, tx) + fitted(px * ty, out, y, ty)


@jvp_rule(aten.div.Tensor, guarded=False)
def div(level, x, y):
    """(t_x - t_y x / y) / y, at y = 0 infinite"""
    out = level.primal(x) / level.primal(y)
    return out, _quotients_tangent(level, out, x, y)


@jvp_rule(aten.div.Tensor_mode)
def div_mode(level, x, y, *, rounding_mode=None):
    """As without a mode, or 0 where the quotient is rounded"""
    out = torch.div(level.primal(x), level.primal(y), rounding_mode=rounding_mode)
    return out, None if rounding_mode is not None else _quotients_tangent(level, out, x, y)


def _quotients_tangent(level, out, x, y):
    tx, px = level.tangent(x), level.primal(x)
    ty, py = level.tangent(y), level.primal(y)
    if ty is None:
        return fitted(tx / py, out, x, tx)
    slope = ty * (px / py if tracked(out) else out)
    if tx is None:
        return fitted(-slope / py, out, y, ty)
    if tx.dtype is ty.dtype or (tx.dtype is px.dtype and ty.dtype is py.dtype):
        return fitted((tx - slope) / py, out, x, tx)
    return fitted(tx / py, out, x, tx) - fitted(slope / py, out, y, ty)


@jvp_rule(aten.pow.Tensor_Tensor)
def pow_tensors(level, x, e):
    """t_x e x^(e - 1) + t_e y log x; 0 for the one where e is 0, for the other where x is 0 and e is not negative"""
    base, exponent = level.primal(x), level.primal(e)
    tx, te = level.tangent(x), level.tangent(e)
    y = base.pow(exponent)
    total = None
    if tx is not None:
        # Only where it is not 0 by itself: there the exponent has a derivative.
        flat = (exponent == 0) & ((base == 0) | ~base.isfinite())
        slope = exponent * base.pow((exponent - 1).masked_fill(flat, 0))
        total = fitted(tx * slope.masked_fill(flat, 0), y, x, tx)
    if te is not None:
        flat = (base == 0) & (exponent.real >= 0 if exponent.is_complex() else exponent >= 0)
        part = fitted(te * (y * base.log()).masked_fill(flat, 0), y, e, te)
        total = part if total is None else total + part
    return y, total


@jvp_rule(aten.pow.Scalar)
def pow_of_scalar(level, base, e):
    """t y log base"""
    exponent, t = e.value, e.tangent
    y = torch.pow(base, exponent)
    if base == 0:
        slope = (y * -math.inf).masked_fill((exponent.real if exponent.is_complex() else exponent) >= 0, 0)
    else:
        slope = y * torch.log(torch.as_tensor(base, dtype=y.dtype, device=y.device))
    return y, fitted(t * slope, y, e, t)


def _extreme(op, loses):
    """The larger or smaller of two: the tangent of the one that wins; ties share."""

    def rule(level, x, y):
        a, b = level.primal(x), level.primal(y)
        out = op(a, b)
        total = None
        for operand, t, mine, other in ((x, level.tangent(x), a, b), (y, level.tangent(y), b, a)):
            if t is not None:
                shared = torch.where(mine == other, t / 2, t)
                part = fitted(shared.masked_fill(loses(mine, other), 0), out, operand, t)
                total = part if total is None else total + part
        return out, total

    jvp_rule(op)(rule)


_extreme(aten.maximum.default, lambda mine, other: mine < other)
_extreme(aten.minimum.default, lambda mine, other: mine > other)


def _extreme_number(op, wins):
    """The same where NaN loses to any number; ties go to the first."""

    def rule(level, x, y):
        a, b = level.primal(x), level.primal(y)
        first = wins(a, b) | b.isnan()
        out = op(a, b)
        total = None
        for operand, t, loses in ((x, level.tangent(x), ~first), (y, level.tangent(y), first)):
            if t is not None:
                part = fitted(t.masked_fill(loses, 0), out, operand, t)
                total = part if total is None else total + part
        return out, total

    jvp_rule(op)(rule)


_extreme_number(aten.fmax.default, lambda a, b: a >= b)
_extreme_number(aten.fmin.default, lambda a, b: a <= b)


@jvp_rule(aten.clamp.default, guarded=False)
def clamp(level, x, min=None, max=None):
    """t between the limits, which belong to it unless they are the same"""
    out = torch.clamp(x.value, min, max)
    if min is not None and min == max:
        return out, None
    outside = (x.value < min) if min is not None else (x.value > max)
    if min is not None and max is not None:
        outside = outside | (x.value > max)
    return out, x.tangent.masked_fill(outside, 0)


@jvp_rule(aten.clamp_min.default, guarded=False)
def clamp_min(level, x, min):
    """t above the limit"""
    return torch.clamp_min(x.value, min), x.tangent.masked_fill(x.value < min, 0)


@jvp_rule(aten.clamp_max.default, guarded=False)
def clamp_max(level, x, max):
    """t below the limit"""
    return torch.clamp_max(x.value, max), x.tangent.masked_fill(x.value > max, 0)


@jvp_rule(aten.clamp_min.Tensor)
def clamp_min_tensor(level, x, min):
    """t_x above the limit, t_min below"""
    return _clamped(level, x, min, None)


@jvp_rule(aten.clamp_max.Tensor)
def clamp_max_tensor(level, x, max):
    """t_x below the limit, t_max above"""
    return _clamped(level, x, None, max)


@jvp_rule(aten.clamp.Tensor)
def clamp_tensor(level, x, min=None, max=None):
    """t_x between the limits, the tangent of a limit beyond it; the upper one wins where they cross"""
    return _clamped(level, x, min, max)


def _clamped(level, x, min, max):
    value, low, high = level.primal(x), level.primal(min), level.primal(max)
    out = torch.clamp(value, low, high)
    above = value > high if high is not None else torch.zeros_like(value, dtype=torch.bool)
    below = value < low if low is not None else torch.zeros_like(value, dtype=torch.bool)
    if low is not None and high is not None:
        # Where they meet, either limit has the tangent.
        above = above | (low > high) | ((low == high) & (value <= high))
        below = below & (low < high)
    total = None
    for operand, kept in ((x, ~(above | below)), (min, below), (max, above)):
        t = level.tangent(operand)
        if t is not None:
            part = fitted(t.masked_fill(~kept, 0), out, operand, t)
            total = part if total is None else total + part
    return out, total


@jvp_rule(aten.where.self)
def where(level, condition, x, y):
    """t_x where the condition holds, t_y elsewhere"""
    condition = level.primal(condition)
    out = torch.where(condition, level.primal(x), level.primal(y))
    tx, ty = level.tangent(x), level.tangent(y)
    if tx is None:
        tx = ty.new_zeros(())
    elif ty is None:
        ty = tx.new_zeros(())
    tangent = torch.where(condition, tx, ty)
    return out, tangent if tangent.shape == out.shape else tangent.expand(out.shape).contiguous()


@jvp_rule(aten.masked_fill.Tensor)
def masked_fill(level, x, mask, value):
    """t_x where the mask does not hold, t_value where it does"""
    mask = level.primal(mask)
    out = level.primal(x).masked_fill(mask, level.primal(value))
    t, tv = level.tangent(x), level.tangent(value)
    if t is None:
        t = torch.zeros_like(level.primal(x))
    return out, t.masked_fill(mask, 0 if tv is None else tv.to(t.dtype))


def log_of_sum(x, y, base=1.0):
    """logaddexp, to the base e ** base, whose derivatives are finite where x and y lie far apart, at every order"""
    first = x.real >= y.real
    more, less = torch.where(first, x, y), torch.where(first, y, x)
    if more.is_complex():
        return more + ((less - more) * base).exp().log1p() / base
    gap = torch.where(more == less, (more - less).nan_to_num(0), more - less)
    return more - torch.nn.functional.logsigmoid(gap * base) / base
