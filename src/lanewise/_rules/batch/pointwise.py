"""Pointwise operations: each element of the result depends on one element of each broadcast operand."""

from collections.abc import Callable

import torch
from torch import Tensor

from lanewise._core.batch import BATCH_RULES, BatchLevel
from lanewise._rules.batch.families import bind, decompose, lane_rule, pointwise
from lanewise._rules.batch.operands import aligner, common_shape, logical_dtype
from lanewise._torch_compat import current_autograd_node

aten = torch.ops.aten

# fmt: off
pointwise(
    aten.__ilshift__.Scalar, aten.__ilshift__.Tensor, aten.__lshift__.Scalar, aten.__lshift__.Tensor,
    aten.__rshift__.Scalar, aten.__rshift__.Tensor, aten._conj_physical.default,
    aten.abs.default, aten.abs_.default, aten.acos.default, aten.acos_.default, aten.acosh.default,
    aten.acosh_.default, aten.add.Scalar, aten.add.Tensor, aten.add_.Scalar, aten.add_.Tensor, aten.addcdiv.default,
    aten.addcdiv_.default, aten.addcmul.default, aten.addcmul_.default, aten.alias_copy.default, aten.angle.default,
    aten.asin.default, aten.asin_.default, aten.asinh.default, aten.asinh_.default, aten.atan.default,
    aten.atan2.default, aten.atan2_.default, aten.atan_.default, aten.atanh.default, aten.atanh_.default,
    aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor, aten.bitwise_and.Tensor, aten.bitwise_and_.Scalar,
    aten.bitwise_and_.Tensor, aten.bitwise_left_shift.Scalar_Tensor, aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift_.Tensor, aten.bitwise_left_shift_.Tensor_Scalar,
    aten.bitwise_not.default, aten.bitwise_not_.default, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor,
    aten.bitwise_or.Tensor, aten.bitwise_or_.Scalar, aten.bitwise_or_.Tensor,
    aten.bitwise_right_shift.Scalar_Tensor, aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift_.Tensor, aten.bitwise_right_shift_.Tensor_Scalar, aten.bitwise_xor.Scalar,
    aten.bitwise_xor.Scalar_Tensor, aten.bitwise_xor.Tensor, aten.bitwise_xor_.Scalar, aten.bitwise_xor_.Tensor,
    aten.ceil.default, aten.ceil_.default, aten.celu.default, aten.celu_.default,
    aten.clamp.default, aten.clamp_.Tensor, aten.clamp_.default, aten.clamp_max.Tensor, aten.clamp_max.default,
    aten.clamp_max_.Tensor, aten.clamp_max_.default, aten.clamp_min.Tensor, aten.clamp_min.default,
    aten.clamp_min_.Tensor, aten.clamp_min_.default, aten.complex.default,
    aten.conj_physical_.default, aten.copysign.Scalar, aten.copysign.Tensor, aten.copysign_.Scalar,
    aten.copysign_.Tensor, aten.cos.default, aten.cos_.default, aten.cosh.default, aten.cosh_.default,
    aten.deg2rad.default, aten.deg2rad_.default, aten.digamma.default, aten.digamma_.default, aten.div.Scalar,
    aten.div.Scalar_mode, aten.div.Tensor, aten.div.Tensor_mode, aten.div_.Scalar,
    aten.div_.Scalar_mode, aten.div_.Tensor, aten.div_.Tensor_mode, aten.elu.default, aten.elu_.default,
    aten.elu_backward.default, aten.eq.Scalar, aten.eq.Tensor, aten.eq_.Scalar, aten.eq_.Tensor,
    aten.erf.default, aten.erf_.default, aten.erfc.default, aten.erfc_.default, aten.erfinv.default,
    aten.erfinv_.default, aten.exp.default, aten.exp2.default, aten.exp2_.default, aten.exp_.default,
    aten.expm1.default, aten.expm1_.default, aten.fill.Scalar, aten.fill_.Scalar, aten.floor.default,
    aten.floor_.default, aten.floor_divide.default, aten.floor_divide_.Tensor, aten.fmax.default, aten.fmin.default,
    aten.fmod.Scalar, aten.fmod.Tensor, aten.fmod_.Scalar, aten.fmod_.Tensor, aten.frac.default, aten.frac_.default,
    aten.frexp.Tensor, aten.gcd.default, aten.gcd_.default, aten.ge.Scalar, aten.ge.Tensor, aten.ge_.Scalar,
    aten.ge_.Tensor, aten.gelu.default, aten.gelu_.default, aten.gt.Scalar,
    aten.gt.Tensor, aten.gt_.Scalar, aten.gt_.Tensor, aten.hardshrink.default, aten.hardshrink_backward.default,
    aten.hardsigmoid.default, aten.hardsigmoid_.default, aten.hardsigmoid_backward.default, aten.hardswish.default,
    aten.hardswish_.default, aten.hardswish_backward.default, aten.hardtanh.default, aten.hardtanh_.default,
    aten.hardtanh_backward.default, aten.heaviside.default, aten.heaviside_.default, aten.hypot.default,
    aten.hypot_.default, aten.i0.default, aten.i0_.default, aten.igamma.default, aten.igamma_.default,
    aten.igammac.default, aten.igammac_.default, aten.isinf.default, aten.isnan.default, aten.isneginf.default,
    aten.isposinf.default, aten.lcm.default, aten.lcm_.default, aten.ldexp.Tensor,
    aten.le.Scalar, aten.le.Tensor, aten.le_.Scalar, aten.le_.Tensor, aten.leaky_relu.default,
    aten.leaky_relu_.default, aten.leaky_relu_backward.default, aten.lerp.Scalar, aten.lerp.Tensor,
    aten.lerp_.Scalar, aten.lerp_.Tensor, aten.lgamma.default, aten.lgamma_.default, aten.log.default,
    aten.log10.default, aten.log10_.default, aten.log1p.default, aten.log1p_.default, aten.log2.default,
    aten.log2_.default, aten.log_.default, aten.log_sigmoid_forward.default,
    aten.logaddexp.default, aten.logaddexp2.default, aten.logical_and.default, aten.logical_and_.default,
    aten.logical_not.default, aten.logical_not_.default, aten.logical_or.default, aten.logical_or_.default,
    aten.logical_xor.default, aten.logical_xor_.default, aten.logit.default, aten.logit_.default,
    aten.logit_backward.default, aten.lt.Scalar, aten.lt.Tensor, aten.lt_.Scalar,
    aten.lt_.Tensor, aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.maximum.default, aten.minimum.default,
    aten.mish.default, aten.mish_.default, aten.mul.Scalar, aten.mul.Tensor, aten.mul_.Scalar,
    aten.mul_.Tensor, aten.mvlgamma.default, aten.mvlgamma_.default, aten.nan_to_num.default,
    aten.nan_to_num_.default, aten.native_dropout_backward.default, aten.ne.Scalar, aten.ne.Tensor, aten.ne_.Scalar,
    aten.ne_.Tensor, aten.neg.default, aten.neg_.default, aten.nextafter.default, aten.nextafter_.default,
    aten.polar.default, aten.polygamma.default, aten.polygamma_.default, aten.pow.Scalar, aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor, aten.pow_.Scalar, aten.pow_.Tensor, aten.rad2deg.default, aten.rad2deg_.default,
    aten.reciprocal.default, aten.reciprocal_.default, aten.relu.default, aten.relu_.default, aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor, aten.remainder.Tensor, aten.remainder_.Scalar, aten.remainder_.Tensor,
    aten.round.decimals, aten.round.default, aten.round_.decimals, aten.round_.default, aten.rsqrt.default,
    aten.rsqrt_.default, aten.rsub.Scalar, aten.rsub.Tensor, aten.sgn.default, aten.sgn_.default,
    aten.sigmoid.default, aten.sigmoid_.default, aten.sigmoid_backward.default,
    aten.sign.default, aten.sign_.default, aten.signbit.default, aten.silu.default, aten.silu_.default,
    aten.sin.default, aten.sin_.default, aten.sinc.default, aten.sinc_.default,
    aten.sinh.default, aten.sinh_.default, aten.softplus.default, aten.softplus_backward.default,
    aten.softshrink.default, aten.softshrink_backward.default, aten.special_airy_ai.default,
    aten.special_bessel_j0.default, aten.special_bessel_j1.default, aten.special_bessel_y0.default,
    aten.special_bessel_y1.default, aten.special_chebyshev_polynomial_t.default,
    aten.special_chebyshev_polynomial_t.n_scalar, aten.special_chebyshev_polynomial_t.x_scalar,
    aten.special_chebyshev_polynomial_u.default, aten.special_chebyshev_polynomial_u.n_scalar,
    aten.special_chebyshev_polynomial_u.x_scalar, aten.special_chebyshev_polynomial_v.default,
    aten.special_chebyshev_polynomial_v.n_scalar, aten.special_chebyshev_polynomial_v.x_scalar,
    aten.special_chebyshev_polynomial_w.default, aten.special_chebyshev_polynomial_w.n_scalar,
    aten.special_chebyshev_polynomial_w.x_scalar, aten.special_entr.default, aten.special_erfcx.default,
    aten.special_hermite_polynomial_h.default, aten.special_hermite_polynomial_h.n_scalar,
    aten.special_hermite_polynomial_h.x_scalar, aten.special_hermite_polynomial_he.default,
    aten.special_hermite_polynomial_he.n_scalar, aten.special_hermite_polynomial_he.x_scalar,
    aten.special_i0e.default, aten.special_i1.default, aten.special_i1e.default,
    aten.special_laguerre_polynomial_l.default, aten.special_laguerre_polynomial_l.n_scalar,
    aten.special_laguerre_polynomial_l.x_scalar, aten.special_legendre_polynomial_p.default,
    aten.special_legendre_polynomial_p.n_scalar, aten.special_legendre_polynomial_p.x_scalar,
    aten.special_log_ndtr.default, aten.special_modified_bessel_i0.default, aten.special_modified_bessel_i1.default,
    aten.special_modified_bessel_k0.default, aten.special_modified_bessel_k1.default, aten.special_ndtri.default,
    aten.special_scaled_modified_bessel_k0.default, aten.special_scaled_modified_bessel_k1.default,
    aten.special_shifted_chebyshev_polynomial_t.default, aten.special_shifted_chebyshev_polynomial_t.n_scalar,
    aten.special_shifted_chebyshev_polynomial_t.x_scalar, aten.special_shifted_chebyshev_polynomial_u.default,
    aten.special_shifted_chebyshev_polynomial_u.n_scalar, aten.special_shifted_chebyshev_polynomial_u.x_scalar,
    aten.special_shifted_chebyshev_polynomial_v.default, aten.special_shifted_chebyshev_polynomial_v.n_scalar,
    aten.special_shifted_chebyshev_polynomial_v.x_scalar, aten.special_shifted_chebyshev_polynomial_w.default,
    aten.special_shifted_chebyshev_polynomial_w.n_scalar, aten.special_shifted_chebyshev_polynomial_w.x_scalar,
    aten.special_spherical_bessel_j0.default, aten.special_xlog1py.default, aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar, aten.special_zeta.default, aten.special_zeta.other_scalar,
    aten.special_zeta.self_scalar, aten.sqrt.default, aten.sqrt_.default, aten.sub.Scalar, aten.sub.Tensor,
    aten.sub_.Scalar, aten.sub_.Tensor, aten.tan.default, aten.tan_.default, aten.tanh.default, aten.tanh_.default,
    aten.tanh_backward.default, aten.threshold.default, aten.threshold_.default,
    aten.threshold_backward.default, aten.trunc.default, aten.trunc_.default, aten.where.Scalar, aten.where.ScalarOther,
    aten.where.ScalarSelf, aten.where.self,
    aten.xlogy.Scalar_Other,
    aten.xlogy.Scalar_Self, aten.xlogy.Tensor, aten.xlogy_.Scalar_Other, aten.xlogy_.Tensor, aten.zero_.default,
)
# fmt: on


# The power has the dtype of the exponents, whatever that of x.
decompose(aten.ldexp_.default, lambda x, other: x.mul_(torch.pow(2.0, other)))


@lane_rule(aten.clamp.Tensor)
def clamp(level, x, *bounds, **named):
    """x [B, *S] or [*S], bounds [B, *T] or [*T] -> [B, *broadcast]"""
    operands, _ = bind(aten.clamp.Tensor, (x, *bounds), named)
    given = [operand for operand in operands if operand is not None]
    align = aligner(level, given)
    full = (level.size, *common_shape(*given))
    # The gradients of two bounds that are wider than x go wrong in torch.
    x, *bounds = operands
    dtype = logical_dtype(given)
    return torch.clamp(align(x).to(dtype).expand(full), *(None if bound is None else align(bound) for bound in bounds))


def _by_bools(choice: Callable[[BatchLevel, tuple, dict], Tensor]) -> Callable[[BatchLevel, tuple, dict], Tensor]:
    """`where`: its condition, which may be of uint8, takes no part in promotion."""

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Tensor:
        condition = args[0]
        if condition.dtype is not torch.bool:
            below = level.physical(condition).bool()
            args = (level.wrap(below) if level.mapped(condition) else below, *args[1:])
        return choice(level, args, kwargs)

    return run


_where = BATCH_RULES[aten.where.self]
_where.run = _by_bools(_where.run)


def _full_size(op):
    """Rule of a pointwise kernel that does not broadcast, or not all its operands: all get the full size first."""

    def run(level, *operands, **options):
        align = aligner(level, list(operands))
        # On CUDA the buffer of log_sigmoid is empty.
        full = (level.size, *common_shape(*[x for x in operands if x.shape != (0,)]))
        return op(*[align(x) if x.shape == (0,) else align(x).expand(full) for x in operands], **options)

    lane_rule(op)(run)


_full_size(aten._prelu_kernel.default)
_full_size(aten._prelu_kernel_backward.default)
_full_size(aten.log_sigmoid_backward.default)
_full_size(aten.gelu_backward.default)  # in bfloat16, on the CPU


# Formulas of torch that, for subclasses of tensors, multiply a mask of the elements that were chosen by their share.
_SHARING = frozenset(["MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0"])


def _masking(product: Callable[[BatchLevel, tuple, dict], Tensor]) -> Callable[[BatchLevel, tuple, dict], Tensor]:
    """A product that is zero outside the mask of such a formula, whatever the share is."""

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Tensor:
        out = product(level, args, kwargs)
        mask = args[0]
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return out
        node = current_autograd_node()
        if node is None or node.name() not in _SHARING:
            return out
        missing, value = out.dim() - 1 - mask.dim(), level.physical(mask)
        if level.mapped(mask) and missing:
            value = value.reshape(value.shape[0], *[1] * missing, *value.shape[1:])
        return torch.where(value, out, 0)

    return run


_of_masks = BATCH_RULES[aten.mul.Tensor]
_of_masks.run = _masking(_of_masks.run)
