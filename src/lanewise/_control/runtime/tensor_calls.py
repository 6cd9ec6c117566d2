"""Functions of torch, called with Python numbers that differ from lane to lane."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runtime.number_classes import Several
from lanewise._control.runtime.numbers import DTYPES, RANK, LaneNumber, kind_of, number_of, one_number, weak

# Operations in which a number stands for a tensor without dims; in all others one Python number has to do.
_POINTWISE = frozenset(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow rsub radd rmul rdiv rtruediv "
    "rpow rmod rfloordiv truediv floordiv mod eq ne lt le gt ge greater greater_equal less less_equal not_equal "
    "lshift rshift rlshift rrshift where clamp clip clamp_min clamp_max maximum minimum fmax fmin atan2 arctan2 hypot "
    "lerp masked_fill copysign bitwise_and bitwise_or bitwise_xor and or xor rand ror rxor iadd isub imul idiv "
    "itruediv ifloordiv ipow float_power xlogy logaddexp heaviside index_fill".split()
)
# Functions of torch that take one number for a list, and ask for it natively: they do not see `__torch_function__`.
TAKE_LISTS = frozenset(
    "tensor as_tensor asarray new_tensor zeros ones empty rand randn new_zeros new_ones new_empty view reshape expand "
    "permute tile repeat flip split roll sum nansum mean nanmean amax amin std std_mean var var_mean norm logsumexp "
    "nuclear_norm frobenius_norm linalg_norm linalg_vector_norm conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d "
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d col2im im2col upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d fft_fft2 fft_fftn fft_ifft2 fft_ifftn fft_rfft2 fft_rfftn fft_irfft2 fft_irfftn fft_hfft2 "
    "fft_hfftn fft_ihfft2 fft_ihfftn fft_fftshift fft_ifftshift".split()
)
# Pointwise operations that take tensors only, and those that take a number for their first operand, too.
_TENSORS_ONLY = frozenset("atan2 arctan2 fmax fmin maximum minimum hypot logaddexp heaviside".split())
_NUMBER_FIRST = frozenset(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder pow float_power xlogy bitwise_and "
    "bitwise_or bitwise_xor where".split()
)
# Those that refuse a number which the tensor's dtype does not hold.
_HOLDING = frozenset("pow ipow clamp clip clamp_min clamp_max masked_fill index_fill where".split())
_DIFFERENCES = frozenset("sub subtract rsub isub".split())  # of which torch refuses truth values
_BOUNDED = frozenset("clamp clip clamp_min clamp_max lerp".split())
_OF_NO_TRUTHS = frozenset("pow ipow clamp clip clamp_min clamp_max".split())  # by a truth value
_FILLS = frozenset({"masked_fill", "index_fill"})
# Those that take a number as it is, where a tensor has 16 bits: they compute with 32, and round once.
_ROUNDED_ONCE = {
    **dict.fromkeys("mul multiply rmul imul".split(), torch.mul),
    **dict.fromkeys("div divide true_divide truediv itruediv idiv".split(), torch.div),
    **dict.fromkeys("floor_divide floordiv ifloordiv".split(), torch.floor_divide),
    "lerp": torch.lerp,
}
# Those whose results are floats, also of integers.
_WITH_FRACTIONS = frozenset("div divide true_divide truediv xlogy copysign".split())
_SHORT = frozenset({torch.float16, torch.bfloat16})
_SCALARS_BY_NAME = frozenset({"alpha", "beta", "value", "dim", "dtype"})


def call_with_numbers(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A function of torch some of whose arguments may be numbers with lanes."""
    for arg in args:
        if (type(arg) in _HOLDERS or isinstance(arg, Several)) and _has_numbers(arg):
            break
    else:
        if not kwargs or not any(_has_numbers(arg) for arg in kwargs.values()):
            return func(*args, **kwargs)
    if any(map(_has_several, (args, *kwargs.values()))):
        return Several.call(func, args, kwargs)
    name = func.__name__.strip("_")
    if _of_torch(func) in _MAKERS:
        return _made(func, args, kwargs)
    if name == "new_tensor":
        options = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        return _made(torch.tensor, args[1:], options)
    if name in ("getitem", "get_item", "setitem"):
        x, index, *value = args
        return func(x, _index(index), *[_entry(v, x) if isinstance(v, LaneNumber) else v for v in value])
    if name in ("fill", "full", "full_like", "new_full") and isinstance(args[-1], LaneNumber):
        out = args[0] if name == "fill" else func(*one_number(args[:-1]), args[-1].kind(0), **kwargs)
        return out.copy_(args[-1].value) if _held(args[-1], out.dtype) else func(*one_number(args), **kwargs)
    if name not in _POINTWISE or not _takes(name, args, kwargs):
        return func(*one_number(args), **{key: one_number(value) for key, value in kwargs.items()})
    if name in ("rdiv", "rtruediv"):
        return args[0].reciprocal() * args[1]  # as `Tensor.__rtruediv__` has it
    operands = args[1:] if name == "where" else args
    tensors = [arg for arg in (*operands, *kwargs.values()) if isinstance(arg, Tensor)]
    if name in _ROUNDED_ONCE and isinstance(args[-1], LaneNumber) and args[-1].kind is not complex:
        if all(x.dtype in _SHORT for x in tensors):
            return _rounded_once(func, name, args, kwargs)
    if name in _BOUNDED:
        bound = partial(_bound, _common_dtype(tensors, [*args, *kwargs.values()]), tensors[0].device)
        return func(*map(bound, args), **{key: bound(value) for key, value in kwargs.items()})
    if name in _WITH_FRACTIONS and kwargs.get("rounding_mode") is None and all(x.dtype in _WHOLE for x in tensors):
        tensors = [torch.empty((), dtype=torch.get_default_dtype())]  # what integers are divided in
    new_args = [_operand(name, arg, tensors) if isinstance(arg, LaneNumber) else arg for arg in args]
    new_kwargs = {
        key: value
        if not isinstance(value, LaneNumber)
        else (value.resolve() if key in _SCALARS_BY_NAME else weak(value, tensors))
        for key, value in kwargs.items()
    }
    return func(*new_args, **new_kwargs)


def _takes(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether an operation takes the numbers among its operands, in the lanes that run: torch refuses some of them."""
    if name in _TENSORS_ONLY or (isinstance(args[0], LaneNumber) and name not in _NUMBER_FIRST):
        return False
    if name in _DIFFERENCES and any(
        isinstance(arg, LaneNumber) and arg.kind is bool for arg in (*args, *kwargs.values())
    ):
        return False
    if name == "lerp":
        return isinstance(args[0], Tensor) and (args[0].is_floating_point() or args[0].is_complex())
    if name not in _HOLDING or not isinstance(args[0], Tensor):
        return True
    x = args[0]
    numbers = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, LaneNumber)]
    tensors = [arg for arg in args[name == "where" :] if isinstance(arg, Tensor)]
    if x.dtype is torch.bool and name in _OF_NO_TRUTHS and all(number.kind is bool for number in numbers):
        return False
    if name == "where" and not (tensors and tensors[0].dtype in _WHOLE):
        return True
    if numbers and name in ("pow", "ipow"):
        exponent = numbers[0]
        if exponent.kind is int and x.dtype in _WHOLE and LaneNumber(bool, exponent.value < 0):
            return False
        if exponent.kind is not complex and x.dtype in _SHORT and LaneNumber(bool, _is_multiplied(exponent.value)):
            return False
    dtype = x.dtype if name in _FILLS else _common_dtype(tensors, [*args, *kwargs.values()])
    return all(_held(number, dtype) for number in numbers)


def _common_dtype(tensors: list[Tensor], operands: list) -> torch.dtype:
    """What the tensors and the numbers among the operands of an operation promote to."""
    kinds = [kind for operand in operands if not isinstance(operand, Tensor) and (kind := kind_of(operand)) is not None]
    number = max(kinds, key=RANK.__getitem__)(0)
    return torch.result_type(tensors[0], number)


def _bound(dtype: torch.dtype, device: torch.device, value: Any) -> Any:
    """A bound, or a weight: where one is a tensor, all are."""
    if isinstance(value, LaneNumber):
        return value.value.to(dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device) if type(value) in (int, float) else value


def _is_multiplied(exponent: Tensor) -> Tensor:
    """Whether torch multiplies for such a power, where it rounds in between."""
    return torch.stack([exponent == special for special in (2, 3, -1, -2, 0.5, -0.5)]).any(0)


_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _held(number: LaneNumber, dtype: torch.dtype) -> bool:
    """Whether a dtype holds the number but for rounding: what torch asks before it converts one."""
    value = number.value
    if number.kind is complex or dtype is torch.bool:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        low, high = (limits.min if dtype.is_signed else -limits.max), limits.max
        if number.kind is float:
            outside = ((value > low - 1.0) & (value < high + 1.0)).logical_not()
        else:
            outside = (value < low) | (value > high)
    else:
        largest = torch.finfo(dtype).max
        outside = (value > largest) | (value < -largest)
        if number.kind is float:
            outside = outside & value.isfinite()
    return not LaneNumber(bool, outside)


def _operand(name: str, number: LaneNumber, tensors: list[Tensor]) -> Tensor:
    if name == "float_power":
        return number.value.to(torch.complex128 if number.kind is complex else torch.float64)
    if name in _FILLS and number.kind is not complex:
        return number.value.to(dtype=tensors[0].dtype, device=tensors[0].device)
    return weak(number, tensors)


def _entry(number: LaneNumber, x: Tensor) -> Any:
    """What is written to an entry of a tensor."""
    if number.kind is complex and not x.is_complex():
        return weak(number, [x])
    return number.value.to(x.dtype) if _held(number, x.dtype) else number.resolve()


def _rounded_once(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """An operation on tensors of 16 bits with a number for its last operand."""
    x, number = args[0], args[-1]
    wide = [operand.to(torch.float32) for operand in args[:-1]]
    out = _ROUNDED_ONCE[name](*wide, number.value.to(device=x.device, dtype=torch.float32), **kwargs)
    in_place = name[0] == "i" or (func.__name__.endswith("_") and not func.__name__.endswith("__"))
    return x.copy_(out) if in_place else out.to(x.dtype)


# Other libraries have functions of these names.
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})


def _of_torch(func: Callable) -> Callable:
    """The function that a name of torch leads to outside of a transform."""
    while (plain := getattr(func, "__wrapped__", None)) is not None:
        func = plain
    return func


_HOLDERS = frozenset({LaneNumber, list, tuple, slice})


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple([_index(part) for part in index])
    if isinstance(index, LaneNumber):
        return index.value if index.kind is int else index.resolve()
    return one_number(index)


def _has_numbers(value: Any) -> bool:
    kind = type(value)
    if kind is LaneNumber or issubclass(kind, Several):
        return True
    if kind is list or kind is tuple:
        return any(_has_numbers(entry) for entry in value)
    return kind is slice and LaneNumber in (type(value.start), type(value.stop), type(value.step))


def _has_several(value: Any) -> bool:
    if type(value) is list or type(value) is tuple:
        return any(map(_has_several, value))
    return issubclass(type(value), Several)


def _made(func: Callable, args: tuple, kwargs: dict) -> Any:
    """`torch.tensor` and the like, of nested lists or of a number."""
    data, rest = args[0], args[1:]
    if func.__name__ == "scalar_tensor" and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.get_default_dtype()}
    if not rest and kwargs.get("dtype") is None:
        dtypes = set(_dtypes(data))
        if None not in dtypes:
            kwargs = {**kwargs, "dtype": functools.reduce(torch.promote_types, dtypes)}
    if isinstance(data, LaneNumber):
        value = data.value.to(device=kwargs.get("device") or "cpu", dtype=kwargs.get("dtype"), copy=True)
        return value.requires_grad_() if kwargs.get("requires_grad") else value
    return func(_tensors_in(data), *rest, **kwargs)


def _dtypes(data: Any) -> Any:
    """Those that torch finds for the entries of a nested list; None for what is neither a number nor a tensor."""
    if isinstance(data, (list, tuple)):
        for entry in data:
            yield from _dtypes(entry)
    elif isinstance(data, Tensor):
        yield data.dtype
    else:
        kind, real = kind_of(data), torch.get_default_dtype()
        own = {float: real, complex: torch.complex128 if real is torch.float64 else torch.complex64}
        yield None if kind is None else own.get(kind, DTYPES[kind])


def _tensors_in(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_tensors_in(entry) for entry in data]
    return data.value if isinstance(data, LaneNumber) else data


LaneNumber.call = staticmethod(call_with_numbers)


def real_part(value: Any, kind: type) -> Any:
    """A complex tensor, of which Python asks for a real number, as its real part."""
    if not (isinstance(value, Tensor) and value.is_complex() and value.numel() == 1):
        return value
    if number_of(value.imag) == 0:
        return value.real
    return kind(torch.tensor(1j))  # which raises as that of one example does
