"""Python numbers that differ from lane to lane: what `int(x)`, `float(x)` and `x.item()` give where lanes may part.

Such a number does what a Python number does: it promotes no dtype of a tensor it meets, `k += 1` binds the name anew, an
integer does not overflow. Where only one number will do (a size, a key, a place in a list) the lanes that have the most
frequent one go on, and the others run again.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.joins import component, rows_of
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import machine
from lanewise._core.level import on_plane

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_RANK = {bool: 0, int: 1, float: 2, complex: 3}
_LARGEST = 2**63 - 1

# Operations in which a number stands for a tensor without dims; in all others one Python number has to do.
_POINTWISE = frozenset(
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow rsub radd rmul rdiv rtruediv "
    "rpow rmod rfloordiv truediv floordiv mod eq ne lt le gt ge greater greater_equal less less_equal not_equal "
    "where clamp clip clamp_min clamp_max maximum minimum fmax fmin atan2 arctan2 hypot lerp masked_fill copysign "
    "bitwise_and bitwise_or bitwise_xor and or xor rand ror rxor iadd isub imul itruediv ifloordiv ipow float_power "
    "xlogy logaddexp heaviside index_fill".split()
)
# Functions of torch that want a list of numbers and take one, and ask it natively: they do not see `__torch_function__`.
TAKE_LISTS = frozenset(
    "tensor as_tensor roll sum nansum mean nanmean amax amin std std_mean var var_mean norm logsumexp nuclear_norm "
    "frobenius_norm linalg_norm linalg_vector_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices "
    "max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "fractional_max_pool3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d col2im im2col upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d fft_fft2 fft_fftn fft_ifft2 fft_ifftn fft_rfft2 "
    "fft_rfftn fft_irfft2 fft_irfftn fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn fft_fftshift fft_ifftshift".split()
)
_SCALARS_BY_NAME = frozenset({"alpha", "beta", "value", "dim", "dtype"})


class LaneNumber:
    """A Python number with lanes.

    Attributes:
        kind: bool, int, float or complex.
        value: A tensor `[]` of that kind's widest dtype, without history.
        bound: For an int: the absolute value is at most that, None where nobody has looked.
    """

    __slots__ = ("kind", "value", "bound")

    def __init__(self, kind: type, value: Tensor, bound: int | None = None) -> None:
        self.kind = kind
        self.value = value
        self.bound = bound

    # --- one Python number -------------------------------------------------------------------------------------------

    def resolve(self) -> Any:
        """The number of the lanes that go on."""
        return self.value.item()

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.resolve())

    def __float__(self) -> float:
        return float(self.resolve())

    def __complex__(self) -> complex:
        return complex(self.resolve())

    def __index__(self) -> int:
        if _RANK[self.kind] > _RANK[int]:
            raise TypeError(f"'{self.kind.__name__}' object cannot be interpreted as an integer")
        return int(self.resolve())

    def __hash__(self) -> int:
        return hash(self.resolve())

    def __str__(self) -> str:
        return str(self.resolve())

    def __format__(self, spec: str) -> str:
        return format(self.resolve(), spec)

    def __repr__(self) -> str:
        return f"LaneNumber({self.kind.__name__}, {self.value!r})"

    def __reduce__(self) -> Any:
        return self.kind, (self.resolve(),)

    # --- attributes and methods of numbers ---------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.resolve(), name)

    # --- tensors -----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_with_numbers(func, *args, **(kwargs or {}))

    # --- unary -------------------------------------------------------------------------------------------------------

    def __neg__(self) -> Any:
        return _unary(self, torch.neg)

    def __pos__(self) -> Any:
        return _unary(self, torch.clone)

    def __abs__(self) -> Any:
        if self.kind is complex:
            return LaneNumber(float, self.value.abs())
        return _unary(self, torch.abs)

    def __invert__(self) -> Any:
        if _RANK[self.kind] > _RANK[int]:
            raise TypeError(f"bad operand type for unary ~: '{self.kind.__name__}'")
        return -self - 1

    def __trunc__(self) -> Any:
        return self._whole(torch.trunc)

    def __floor__(self) -> Any:
        return self._whole(torch.floor)

    def __ceil__(self) -> Any:
        return self._whole(torch.ceil)

    def __round__(self, digits: Any = None) -> Any:
        if self.kind is float and digits is not None:
            return for_each_lane(round, self, digits)
        return self._whole(torch.round) if digits is None else +self

    def _whole(self, rounded: Callable) -> Any:
        if self.kind is not float:
            return +self
        value = rounded(self.value)
        if not LaneNumber(bool, value.abs() < 2.0**62):
            return for_each_lane(int, LaneNumber(float, value))
        return LaneNumber(int, value.to(torch.int64))


def _largest(number: Any) -> int:
    """A bound for the absolute value of an int."""
    if not isinstance(number, LaneNumber):
        return abs(int(number))
    if number.bound is None:
        if number.kind is bool:
            number.bound = 1
        else:
            rows = _rows(number.value)
            number.bound = max(int(rows.max()), -int(rows.min())) if rows.numel() else 0
    return number.bound


def _rows(value: Tensor) -> Tensor:
    """The plain numbers `[n]` of the lanes that run, `[1]` where they are the same in all."""
    level = _level_of(value)
    if level is None:
        return torch.tensor([value.item()])
    here = level.here(value) if isinstance(level, LaneLevel) else value
    return rows_of(level, value) if here.mapped else torch.tensor([value.item()])


def _level_of(value: Any) -> Any:
    level = machine.level
    if level is not None and component(level, value) is not None:
        return level
    return getattr(value, "level", None)


def kind_of(number: Any) -> type | None:
    """The type of a Python number or of one with lanes, None for what is no number."""
    kind = type(number)
    if kind is LaneNumber:
        return number.kind
    if kind in _RANK:
        return kind
    return next((known for known in (bool, int, float, complex) if isinstance(number, known)), None)


def number_of(tensor: Tensor) -> Any:
    """`x.item()`: a number with lanes, or a Python number where all lanes share it."""
    if tensor.numel() != 1 or tensor.dtype is torch.uint64:
        return tensor.item()
    level = machine.level
    part = None if level is None else component(level, tensor)
    if part is None or (part.level is level and not part.mapped):
        return tensor.item()
    part = part.detach().reshape(())
    kind = bool if part.dtype is torch.bool else complex if part.is_complex() else int
    if part.is_floating_point():
        kind = float
    return LaneNumber(kind, part.to(_DTYPES[kind]))


def nested_numbers(tensor: Tensor) -> Any:
    """`x.tolist()`: nested lists of numbers."""
    if not tensor.dim():
        return number_of(tensor)
    return [nested_numbers(entry) for entry in tensor.unbind()]


def as_tensor(number: Any) -> Tensor:
    """The tensor that `torch.tensor(number)` makes."""
    dtype = torch.get_default_dtype() if number.kind is float else _DTYPES[number.kind]
    return number.value.to(dtype)


# --- arithmetic --------------------------------------------------------------------------------------------------------


def _unary(number: LaneNumber, function: Callable) -> LaneNumber:
    value = number.value
    if number.kind is bool:
        value = value.to(torch.int64)
    return LaneNumber(int if number.kind is bool else number.kind, function(value), number.bound)


def _operand(number: Any, kind: type) -> Any:
    if isinstance(number, LaneNumber):
        return number.value if number.kind is kind else number.value.to(_DTYPES[kind])
    return kind(number)


class _TooLarge(Exception):
    """An int that 64 bits do not hold."""


def _bound(combined: Callable[[int, int], int], a: Any, b: Any) -> int:
    """A bound for a result, found anew from the numbers where the bounds known do not do."""
    bound = combined(_largest(a), _largest(b))
    if bound <= _LARGEST:
        return bound
    for number in (a, b):
        if isinstance(number, LaneNumber):
            number.bound = None
    bound = combined(_largest(a), _largest(b))
    if bound > _LARGEST:
        raise _TooLarge
    return bound


def _sum_like(function: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        kind = int if kind is bool else kind
        bound = _bound(operator.add, a, b) if kind is int else None
        return LaneNumber(kind, function(_operand(a, kind), _operand(b, kind)), bound)

    return run


def _product(a: Any, b: Any, kind: type) -> LaneNumber:
    kind = int if kind is bool else kind
    bound = _bound(operator.mul, a, b) if kind is int else None
    return LaneNumber(kind, operator.mul(_operand(a, kind), _operand(b, kind)), bound)


def _refuse_zero(b: Any, message: str) -> None:
    if b == 0:
        raise ZeroDivisionError(message)


def _quotient(a: Any, b: Any, kind: type) -> LaneNumber:
    _refuse_zero(b, "division by zero")
    kind = complex if kind is complex else float
    return LaneNumber(kind, operator.truediv(_operand(a, kind), _operand(b, kind)))


def _floor_like(function: Callable, message: str) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        if kind is complex:
            raise TypeError("unsupported operand types: 'complex'")
        _refuse_zero(b, message)
        kind = int if kind is bool else kind
        bound = max(_largest(a), _largest(b)) if kind is int else None
        return LaneNumber(kind, function(_operand(a, kind), _operand(b, kind)), bound)

    return run


def _power(a: Any, b: Any, kind: type) -> Any:
    if kind is complex:
        return LaneNumber(complex, operator.pow(_operand(a, complex), _operand(b, complex)))
    if kind is not float:
        if not b >= 0:
            _refuse_zero(a, "0.0 cannot be raised to a negative power")
            return _power(a, b, float)
        bound = _bound(_largest_power, a, b)
        return LaneNumber(int, torch.pow(_operand(a, int), _operand(b, int)), bound)
    return for_each_lane(operator.pow, a, b)


def _largest_power(base: int, exponent: int) -> int:
    return max(base, 1) ** exponent if base < 2 or exponent < 64 else _LARGEST + 1


def _logical(function: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        if _RANK[kind] > _RANK[int]:
            raise TypeError(f"unsupported operand type: '{kind.__name__}'")
        return LaneNumber(kind, function(_operand(a, kind), _operand(b, kind)))

    return run


def _shift(times: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> Any:
        if isinstance(b, LaneNumber):
            b = b.resolve()
        if b < 0:
            raise ValueError("negative shift count")
        return times(a, 2**b) if times is not operator.floordiv or b < 62 else for_each_lane(operator.rshift, a, b)

    return run


def _comparison(function: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        return LaneNumber(bool, function(_operand(a, kind), _operand(b, kind)))

    return run


_OPERATORS: dict[str, Callable] = {
    "add": _sum_like(operator.add),
    "sub": _sum_like(operator.sub),
    "mul": _product,
    "truediv": _quotient,
    "floordiv": _floor_like(operator.floordiv, "integer division or modulo by zero"),
    "mod": _floor_like(operator.mod, "integer modulo by zero"),
    "pow": _power,
    "and": _logical(operator.and_),
    "or": _logical(operator.or_),
    "xor": _logical(operator.xor),
    "lshift": _shift(operator.mul),
    "rshift": _shift(operator.floordiv),
}


def _method(name: str, run: Callable, reflected: bool) -> Callable:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def method(self: LaneNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            own = weak(self, [other])
            return function(other, own) if reflected else function(own, other)
        kind = kind_of(other)
        if kind is None:
            return NotImplemented
        kind = max(kind, self.kind, key=_RANK.__getitem__)
        a, b = (other, self) if reflected else (self, other)
        try:
            if type(other) is int and abs(other) > _LARGEST:
                raise _TooLarge
            return run(a, b, kind)
        except _TooLarge:
            return function(one_number(a), one_number(b))

    return method


for _op, _run in _OPERATORS.items():
    setattr(LaneNumber, f"__{_op}__", _method(_op, _run, False))
    setattr(LaneNumber, f"__r{_op}__", _method(_op, _run, True))
for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LaneNumber, f"__{_op}__", _method(_op, _comparison(getattr(operator, _op)), False))
LaneNumber.__divmod__ = lambda self, other: (self // other, self % other)  # type: ignore[attr-defined]
LaneNumber.__rdivmod__ = lambda self, other: (other // self, other % self)  # type: ignore[attr-defined]


def for_each_lane(function: Callable, *numbers: Any) -> Any:
    """A Python function of numbers, called for each lane."""
    level = next(
        (found for n in numbers if isinstance(n, LaneNumber) and (found := _level_of(n.value)) is not None), None
    )
    rows = [_rows(n.value) if isinstance(n, LaneNumber) else torch.tensor([math.nan]) for n in numbers]
    count = max([row.shape[0] for row in rows], default=1)
    if level is None or any(row.shape[0] not in (1, count) for row in rows):
        return function(*[n.resolve() if isinstance(n, LaneNumber) else n for n in numbers])
    columns = [
        [n] * count
        if not isinstance(n, LaneNumber)
        else (row.tolist() if row.shape[0] == count else row.tolist() * count)
        for n, row in zip(numbers, rows)
    ]
    results = []
    for place, entries in enumerate(zip(*columns)):
        try:
            results.append(function(*entries))
        except Exception:
            if isinstance(level, LaneLevel):
                with on_plane(None):
                    only = torch.tensor([place])
                level.lanes = type(level.lanes)(level.lanes, only, 1)
            raise
    kinds = {type(result) for result in results}
    large = kinds == {int} and max(map(abs, results)) > _LARGEST
    if len(kinds) != 1 or not kinds <= set(_RANK) or large:
        return function(*[n.resolve() if isinstance(n, LaneNumber) else n for n in numbers])
    kind = kinds.pop()
    with on_plane(None):
        plain = torch.tensor(results, dtype=_DTYPES[kind])
    return LaneNumber(kind, level.wrap(plain))


# --- tensors and numbers -----------------------------------------------------------------------------------------------


def weak(number: LaneNumber, tensors: list[Tensor]) -> Tensor:
    """The number as a tensor `[]` that does not promote `tensors`."""
    zero = number.kind(0)
    dtype = None
    for tensor in tensors:
        found = torch.result_type(tensor, zero)
        dtype = found if dtype is None else torch.promote_types(dtype, found)
    if dtype is None:
        return as_tensor(number)
    out = number.value.to(dtype)
    device = tensors[0].device
    return out if out.device == device else out.to(device)


def call_with_numbers(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function of torch some of whose arguments may be numbers with lanes."""
    for arg in args:
        if type(arg) in _HOLDERS and _has_numbers(arg):
            break
    else:
        if not kwargs or not any(_has_numbers(arg) for arg in kwargs.values()):
            return func(*args, **kwargs)
    name = func.__name__.strip("_")
    if name == "tensor":
        return _made(func, args, kwargs)
    if name in ("getitem", "setitem"):
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


def one_number(value: Any) -> Any:
    """The numbers in an argument resolved."""
    kind = type(value)
    if kind is LaneNumber:
        return value.resolve()
    if kind is list or kind is tuple:
        return kind([one_number(entry) for entry in value])
    if kind is slice:
        return slice(one_number(value.start), one_number(value.stop), one_number(value.step))
    return value


def _made(func: Callable, args: tuple, kwargs: dict) -> Any:
    """`torch.tensor` of nested lists."""
    data, rest = args[0], args[1:]
    if not rest and kwargs.get("dtype") is None:
        kinds = set(_kinds(data))
        if kinds <= set(_RANK):
            kind = max(kinds, key=_RANK.__getitem__)
            float_dtype = torch.get_default_dtype()
            dtype = {float: float_dtype, complex: torch.complex128 if float_dtype is torch.float64 else torch.complex64}
            kwargs = {**kwargs, "dtype": dtype.get(kind, _DTYPES[kind])}
    if isinstance(data, LaneNumber):
        value = data.value.to(device=kwargs.get("device") or "cpu", dtype=kwargs.get("dtype"))
        return value.requires_grad_() if kwargs.get("requires_grad") else value
    return func(_tensors_in(data), *rest, **kwargs)


def _kinds(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        for entry in data:
            yield from _kinds(entry)
    else:
        yield kind_of(data)


def _tensors_in(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_tensors_in(entry) for entry in data]
    return data.value if isinstance(data, LaneNumber) else data
