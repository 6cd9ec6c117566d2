"""Functions of torch, called with Python numbers that differ from lane to lane."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runtime.numbers import DTYPES, LaneNumber, kind_of, one_number, weak

# Operations in which a number stands for a tensor without dims; in all others one Python number has to do.
_POINTWISE = frozenset(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow rsub radd rmul rdiv rtruediv "
    "rpow rmod rfloordiv truediv floordiv mod eq ne lt le gt ge greater greater_equal less less_equal not_equal "
    "where clamp clip clamp_min clamp_max maximum minimum fmax fmin atan2 arctan2 hypot lerp masked_fill copysign "
    "bitwise_and bitwise_or bitwise_xor and or xor rand ror rxor iadd isub imul itruediv ifloordiv ipow float_power "
    "xlogy logaddexp heaviside index_fill".split()
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
_SCALARS_BY_NAME = frozenset({"alpha", "beta", "value", "dim", "dtype"})


def call_with_numbers(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of torch some of whose arguments may be numbers with lanes."""
    for arg in args:
        if type(arg) in _HOLDERS and _has_numbers(arg):
            break
    else:
        if not kwargs or not any(_has_numbers(arg) for arg in kwargs.values()):
            return func(*args, **kwargs)
    name = func.__name__.strip("_")
    if name in ("tensor", "as_tensor", "asarray", "scalar_tensor"):
        return _made(func, args, kwargs)
    if name == "new_tensor":
        options = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        return _made(torch.tensor, args[1:], options)
    if name in ("getitem", "get_item", "setitem"):
        x, index, *value = args
        return func(x, _index(index), *[weak(v, [x]) if isinstance(v, LaneNumber) else v for v in value])
    if name in ("fill", "full", "full_like", "new_full") and isinstance(args[-1], LaneNumber):
        if name == "fill":
            return args[0].copy_(weak(args[-1], [args[0]]))
        out = func(*one_number(args[:-1]), args[-1].kind(0), **kwargs)
        return out.copy_(args[-1].value.to(out.dtype))
    if name not in _POINTWISE:
        return func(*one_number(args), **{key: one_number(value) for key, value in kwargs.items()})
    operands = args[1:] if name == "where" else args
    tensors = [arg for arg in (*operands, *kwargs.values()) if isinstance(arg, Tensor)]
    new_args = [weak(arg, tensors) if isinstance(arg, LaneNumber) else arg for arg in args]
    new_kwargs = {
        key: value
        if not isinstance(value, LaneNumber)
        else (value.resolve() if key in _SCALARS_BY_NAME else weak(value, tensors))
        for key, value in kwargs.items()
    }
    if name in ("clamp", "clip", "clamp_min", "clamp_max", "lerp"):
        # All bounds are tensors or none is.
        new_args = [_alike(arg, tensors) for arg in new_args]
        new_kwargs = {key: _alike(value, tensors) for key, value in new_kwargs.items()}
    return func(*new_args, **new_kwargs)


_HOLDERS = frozenset({LaneNumber, list, tuple, slice})


def _alike(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in (int, float):
        return torch.full((), value, dtype=torch.result_type(tensors[0], value), device=tensors[0].device)
    return value


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple([_index(part) for part in index])
    if isinstance(index, LaneNumber):
        return index.value if index.kind is int else index.resolve()
    return one_number(index)


def _has_numbers(value: Any) -> bool:
    kind = type(value)
    if kind is LaneNumber:
        return True
    if kind is list or kind is tuple:
        return any(_has_numbers(entry) for entry in value)
    return kind is slice and LaneNumber in (type(value.start), type(value.stop), type(value.step))


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
