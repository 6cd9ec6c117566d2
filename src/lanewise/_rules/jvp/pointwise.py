"""Forward rules of pointwise operations of one operand, and of those that only choose, round or compare."""

import math

import torch

from lanewise._rules.jvp.families import (
    constant,
    decomposed,
    elementwise,
    jvp_rule,
    linear,
    torch_jvp,
)

aten = torch.ops.aten

# --- one operand: t is its tangent, y the result ---------------------------------------------------------------------

_LN2 = math.log(2)
_LN10 = math.log(10)
_ROOT_PI = math.sqrt(math.pi)


def _logit_tangent(t, x, eps):
    limit = 0 if eps is None or eps < 0 else eps
    outside = (x < limit) | (x > 1 - limit)
    x = x.masked_fill(outside, 0.5)
    return (t / (x * (1 - x))).masked_fill(outside, math.nan if eps is None or eps < 0 else 0)


def _silu_slope(x, y):
    s = x.sigmoid()
    return s + y * (1 - s)


def _mish_slope(x):
    th = torch.nn.functional.softplus(x).tanh()
    return th + x * x.sigmoid() * (1 - th * th)


# fmt: off
elementwise(aten.acos.default, lambda t, y, x: -t * (1 - x * x).rsqrt())
elementwise(aten.asin.default, lambda t, y, x: t * (1 - x * x).rsqrt())
elementwise(aten.asinh.default, lambda t, y, x: t * (1 + x * x).rsqrt())
elementwise(aten.atan.default, lambda t, y, x: t / (1 + x * x))
elementwise(aten.atanh.default, lambda t, y, x: t / (1 - x * x))
elementwise(aten.cos.default, lambda t, y, x: -t * x.sin())
elementwise(aten.cosh.default, lambda t, y, x: t * x.sinh())
elementwise(aten.deg2rad.default, lambda t, y, x: t * (math.pi / 180))
elementwise(aten.digamma.default, lambda t, y, x: t * torch.polygamma(1, x))
elementwise(aten.div.Scalar, lambda t, y, x, c: t / c)
elementwise(aten.erf.default, lambda t, y, x: t * (2 / _ROOT_PI * (-x * x).exp()))
elementwise(aten.erfc.default, lambda t, y, x: t * (-2 / _ROOT_PI * (-x * x).exp()))
elementwise(aten.erfinv.default, lambda t, y, x: t * (_ROOT_PI / 2 * (y * y).exp()))
elementwise(aten.exp.default, lambda t, y, x: t * y)
elementwise(aten.exp2.default, lambda t, y, x: t * (y * _LN2))
elementwise(aten.expm1.default, lambda t, y, x: t * (y + 1))
elementwise(aten.i0.default, lambda t, y, x: t * torch.special.i1(x))
elementwise(aten.lgamma.default, lambda t, y, x: t * x.digamma())
elementwise(aten.log.default, lambda t, y, x: t / x)
elementwise(aten.log10.default, lambda t, y, x: t / (x * _LN10))
elementwise(aten.log1p.default, lambda t, y, x: t / (x + 1))
elementwise(aten.log2.default, lambda t, y, x: t / (x * _LN2))
elementwise(aten.masked_fill.Scalar, lambda t, y, x, mask, value: t.masked_fill(mask, 0))
elementwise(aten.mul.Scalar, lambda t, y, x, c: t * c)
elementwise(aten.nan_to_num.default, lambda t, y, x, *to, **by_name: t.masked_fill(~x.isfinite(), 0))
elementwise(aten.neg.default, lambda t, y, x: -t)
elementwise(aten.rad2deg.default, lambda t, y, x: t * (180 / math.pi))
elementwise(aten.reciprocal.default, lambda t, y, x: -t * (y * y))
elementwise(aten.rsqrt.default, lambda t, y, x: t * (-0.5 * y * y * y))
elementwise(aten.rsub.Scalar, lambda t, y, x, c, alpha=1: t * -alpha)
elementwise(aten.sin.default, lambda t, y, x: t * x.cos())
elementwise(aten.sinh.default, lambda t, y, x: t * x.cosh())
elementwise(aten.special_entr.default, lambda t, y, x: t * (-1 - x.log()))
elementwise(aten.special_erfcx.default, lambda t, y, x: t * (2 * x * y - 2 / _ROOT_PI))
elementwise(aten.special_ndtri.default, lambda t, y, x: t * (math.sqrt(2 * math.pi) * (y * y / 2).exp()))
elementwise(aten.sqrt.default, lambda t, y, x: t / (2 * y))
elementwise(aten.tan.default, lambda t, y, x: t * (1 + y * y))

# The kernels of torch's backward formulas compute t times the derivative in one pass.
elementwise(aten.celu.default, lambda t, y, x, alpha=1: aten.elu_backward.default(t, alpha, 1, 1 / alpha, False, x))
elementwise(
    aten.elu.default,
    lambda t, y, x, alpha=1, scale=1, factor=1: aten.elu_backward.default(t, alpha, scale, factor, False, x),
)
elementwise(
    aten.gelu.default,
    lambda t, y, x, *, approximate="none": aten.gelu_backward.default(t, x, approximate=approximate),
)
elementwise(aten.frac.default, lambda t, y, x: t)
elementwise(aten.hardshrink.default, lambda t, y, x, limit=0.5: aten.hardshrink_backward.default(t, x, limit))
elementwise(aten.hardsigmoid.default, lambda t, y, x: (t / 6).masked_fill(x.abs() >= 3, 0))
elementwise(aten.hardswish.default, lambda t, y, x: aten.hardswish_backward.default(t, x))
elementwise(aten.hardtanh.default, lambda t, y, x, low=-1, high=1: aten.hardtanh_backward.default(t, x, low, high))
elementwise(
    aten.leaky_relu.default, lambda t, y, x, slope=0.01: aten.leaky_relu_backward.default(t, x, slope, False)
)
elementwise(aten.logit.default, lambda t, y, x, eps=None: _logit_tangent(t, x, eps))
elementwise(aten.mish.default, lambda t, y, x: t * _mish_slope(x))
elementwise(aten.relu.default, lambda t, y, x: aten.threshold_backward.default(t, y, 0))
elementwise(aten.silu.default, lambda t, y, x: t * _silu_slope(x, y))
elementwise(
    aten.softplus.default, lambda t, y, x, beta=1, limit=20: aten.softplus_backward.default(t, x, beta, limit)
)
elementwise(aten.softshrink.default, lambda t, y, x, limit=0.5: aten.softshrink_backward.default(t, x, limit))
elementwise(aten.threshold.default, lambda t, y, x, limit, value: aten.threshold_backward.default(t, x, limit))

# Real or complex.
elementwise(aten.abs.default, lambda t, y, x: (t * x.sgn().conj()).real if x.is_complex() else t * x.sgn())
elementwise(
    aten.acosh.default,
    lambda t, y, x: t * ((x + 1).rsqrt() * (x - 1).rsqrt() if x.is_complex() else (x * x - 1).rsqrt()),
)
elementwise(
    aten.angle.default, lambda t, y, x: (t / x).imag.masked_fill(x == 0, 0) if x.is_complex() else t.mul(0)
)
elementwise(
    aten.sigmoid.default,
    lambda t, y, x: t * (y * (1 - y)) if y.is_complex() else aten.sigmoid_backward.default(t, y),
)
elementwise(
    aten.tanh.default, lambda t, y, x: t * (1 - y * y) if y.is_complex() else aten.tanh_backward.default(t, y)
)
# fmt: on

linear(aten._conj_physical.default, aten.native_dropout_backward.default)


@jvp_rule(aten.sgn.default)
def sgn(level, x):
    """0, but for complex numbers, which turn with their argument"""
    if x.is_complex():
        return torch_jvp(level, aten.sgn.default, x)
    return x.value.sgn(), None


@jvp_rule(aten.polygamma.default, guarded=False)
def polygamma(level, n, x):
    """t polygamma(n + 1, x)"""
    return torch.polygamma(n, x.value), x.tangent * torch.polygamma(n + 1, x.value)


@jvp_rule(aten.pow.Tensor_Scalar, guarded=False)
def pow_scalar(level, x, exponent):
    """t e x^(e - 1)"""
    base, t = x.value, x.tangent
    y = base.pow(exponent)
    if exponent == 0:
        return y, None
    if exponent == 1:
        return y, t
    if exponent == 2:
        return y, t * (2 * base)
    return y, t * (exponent * base.pow(exponent - 1))


# --- a power series about 0, where torch has 0 / 0 in its derivatives -------------------------------------------------


def near_zero(x, bound, coefficients, far):
    """The sum of c_k x^(2 k) where |x| is at most the bound, `far` of x elsewhere."""
    near = x.abs() <= bound
    square = torch.where(near, x, 0).square()
    series = torch.full_like(square, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        series = series * square + c
    return torch.where(near, series, far(torch.where(near, 1, x)))


_SINC = [(-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(10)]
_I0 = [1 / (4**k * math.factorial(k) ** 2) for k in range(11)]
_I1 = [1 / (2 * 4**k * math.factorial(k) * math.factorial(k + 1)) for k in range(11)]


@decomposed(aten.sinc.default)
def sinc(x):
    """sin(pi x) / (pi x), and 1 at 0"""
    return near_zero(x, 0.25, _SINC, lambda x: (math.pi * x).sin() / (math.pi * x))


def i0(x):
    """The Bessel function, whose derivative is i1"""
    return near_zero(x, 1, _I0, torch.i0)


def i1(x):
    """The Bessel function, whose derivative is i0(x) - i1(x) / x"""
    return x * i1_over(x)


def i1_over(x):
    return near_zero(x, 1, _I1, lambda x: torch.special.i1(x) / x)


elementwise(aten.special_i1.default, lambda t, y, x: t * (torch.i0(x) - i1_over(x)))


# --- only choosing, rounding, comparing ------------------------------------------------------------------------------

constant(
    aten._has_same_storage_numel.default,
    aten.all.default,
    aten.all.dim,
    aten.any.default,
    aten.any.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.bucketize.Scalar,
    aten.bucketize.Tensor,
    aten.ceil.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
    aten.div.Scalar_mode,
    aten.empty_like.default,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.floor.default,
    aten.floor_divide.default,
    aten.full_like.default,
    aten.ge.Scalar,
    aten.ge.Tensor,
    aten.gt.Scalar,
    aten.gt.Tensor,
    aten.heaviside.default,
    aten.is_same_size.default,
    aten.isinf.default,
    aten.isnan.default,
    aten.isneginf.default,
    aten.isposinf.default,
    aten.le.Scalar,
    aten.le.Tensor,
    aten.linspace.Scalar_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Tensor_Tensor,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.logspace.Scalar_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Tensor_Tensor,
    aten.lt.Scalar,
    aten.lt.Tensor,
    aten.multinomial.default,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.nonzero.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.generator,
    aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
    aten.randn_like.default,
    aten.round.decimals,
    aten.round.default,
    aten.searchsorted.Scalar,
    aten.searchsorted.Tensor,
    aten.sign.default,
    aten.signbit.default,
    aten.trunc.default,
    aten.zeros_like.default,
)
