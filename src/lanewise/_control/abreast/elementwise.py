"""Elementwise operations of lanes abreast."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise._control.abreast.values import (
    FUNCTIONS,
    METHODS,
    Declined,
    Lanes,
    aligned,
    both,
    value_of,
    without_tensors,
)


def of_one(call: Callable) -> Callable:
    """An operation of one tensor, whose options are none."""

    def run(x: Any, /, *options: Any, **named: Any) -> Lanes:
        if options or named:
            without_tensors((*options, *named.values()))
            if any(option is True for option in options):
                raise Declined  # perhaps `inplace`
            if "inplace" in named or "out" in named or "memory_format" in named:
                raise Declined
        return Lanes(call(value_of(x), *options, **named))

    return run


def of_several(call: Callable) -> Callable:
    """An operation of tensors that broadcast, and numbers."""

    def run(*operands: Any, **named: Any) -> Lanes:
        if named:
            without_tensors(named.values())
            if "out" in named:
                raise Declined
        return Lanes(call(*aligned(operands, operands), **named))

    return run


both(
    "abs absolute acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 "
    "expm1 floor frac isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative "
    "positive rad2deg reciprocal relu round rsqrt sigmoid sgn sign sin sinc sinh sqrt square tan tanh trunc "
    "bitwise_not signbit",
    of_one,
)
both(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow maximum minimum fmax "
    "fmin atan2 arctan2 hypot copysign eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and "
    "bitwise_or bitwise_xor lerp addcmul addcdiv logaddexp logaddexp2 xlogy clamp_min clamp_max",
    of_several,
)
for _function in (
    F.celu,
    F.elu,
    F.gelu,
    F.hardshrink,
    F.hardsigmoid,
    F.hardswish,
    F.hardtanh,
    F.leaky_relu,
    F.logsigmoid,
    F.mish,
    F.relu,
    F.relu6,
    F.selu,
    F.sigmoid,
    F.silu,
    F.softplus,
    F.softshrink,
    F.softsign,
    F.tanh,
    F.tanhshrink,
    torch.celu,
    torch.selu,
):
    FUNCTIONS[_function] = of_one(_function)
for _name in "float double long int bool half bfloat16 clone detach".split():
    METHODS[_name] = of_one(getattr(Tensor, _name))
FUNCTIONS[torch.clone] = of_one(torch.clone)
FUNCTIONS[torch.detach] = of_one(torch.detach)


def _clamp(call: Callable) -> Callable:
    def run(x: Any, min: Any = None, max: Any = None) -> Lanes:
        without_tensors((min, max))
        return Lanes(call(value_of(x), min, max))

    return run


both("clamp clip", _clamp)


def _to(x: Any, dtype: Any) -> Lanes:
    if type(dtype) is not torch.dtype:
        raise Declined
    return Lanes(value_of(x).to(dtype))


METHODS["to"] = _to
METHODS["type"] = _to
METHODS["type_as"] = lambda x, other: _to(x, (other.value if type(other) is Lanes else other).dtype)


def _contiguous(x: Any) -> Lanes:
    return Lanes(value_of(x).contiguous())


METHODS["contiguous"] = _contiguous


def _where(condition: Any, x: Any, y: Any) -> Lanes:
    return Lanes(torch.where(*aligned((condition, x, y), (x, y))))


FUNCTIONS[torch.where] = _where
METHODS["where"] = lambda x, condition, y: _where(condition, x, y)


def _masked_fill(x: Any, mask: Any, value: Any) -> Lanes:
    without_tensors((value,))
    below, mask_below = aligned((x, mask), (x,))
    return Lanes(torch.masked_fill(below, mask_below, value))


FUNCTIONS[torch.masked_fill] = METHODS["masked_fill"] = _masked_fill


def _like(call: Callable) -> Callable:
    def run(x: Any, *options: Any, dtype: Any = None) -> Lanes:
        without_tensors(options)
        return Lanes(call(value_of(x), *options, dtype=dtype))

    return run


for _function in (torch.zeros_like, torch.ones_like, torch.full_like):
    FUNCTIONS[_function] = _like(_function)


def _new(name: str) -> Callable:
    def run(x: Any, *options: Any, dtype: Any = None) -> Tensor:
        without_tensors(options)
        return getattr(value_of(x), name)(*options, dtype=dtype)

    return run


for _name in "new_zeros new_ones new_full".split():
    METHODS[_name] = _new(_name)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Lanes:
    if (training and p) or inplace:
        raise Declined
    value_of(x)
    return x


FUNCTIONS[F.dropout] = _dropout
