"""Python numbers that differ from lane to lane: what `int(x)`, `float(x)` and `x.item()` give where lanes may part.

Such a number does what a Python number does: it promotes no dtype of a tensor it meets, `k += 1` binds the name anew,
an integer does not overflow. Where only one number will do (a size, a key, a place in a list) the lanes that have the
most frequent one go on, and the others run again.
"""

import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runtime.number_classes import TAKE_PLAIN, Several, shown_class
from lanewise._core.batch import BatchTensor
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import component, rows_of
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import Plane
from lanewise._core.python.surface import asking, text_of_one

DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
RANK = {bool: 0, int: 1, float: 2, complex: 3}
_LARGEST, _MOST_STEPS = 2**63 - 1, 100


class LaneNumber:
    """A Python number with lanes.

    Attributes:
        kind: bool, int, float or complex.
        value: A tensor `[]` of that kind's widest dtype, without history.
        bound: For an int: the absolute value is at most that, None where nobody has looked.
        of: Where there are no lanes: what works it out from the numbers it comes of, and in how many steps.
    """

    __slots__ = ("kind", "value", "bound", "of")

    # How functions of torch are called with such numbers (tensor_calls.py).
    call: Callable[..., Any]

    def __init__(self, kind: type, value: Tensor, bound: int | None = None) -> None:
        while isinstance(value, Plane) and (type(value) is not BatchTensor or not value.mapped):
            value = value.value  # a plane above takes what is made there for its own; a number has no tangent
        self.kind = kind
        self.value = value
        self.bound = bound
        self.of: tuple[Callable[[], Any], int] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # What `isinstance` and `functools.singledispatch` go by in code that runs as it was written.
        return shown_class(self)

    def resolve(self) -> Any:
        """The number of the lanes that go on."""
        if self.of is not None:
            with suppress(ArithmeticError, ValueError):
                return self.of[0]()
        if self.kind is complex:
            return complex(self.value.real.item(), self.value.imag.item())
        if self.kind is float:
            bool(LaneNumber(bool, (self.value == 0) & self.value.signbit()))  # lanes with -0.0 and with 0.0 differ
        return self.value.item()

    def __bool__(self) -> bool:
        return bool(self.value != 0)

    def __int__(self) -> int:
        return int(self.resolve())

    def __float__(self) -> float:
        return float(self.resolve())

    def __complex__(self) -> complex:
        return complex(self.resolve())

    def __index__(self) -> int:
        if RANK[self.kind] > RANK[int]:
            raise TypeError(f"'{self.kind.__name__}' object cannot be interpreted as an integer")
        return int(self.resolve())

    def __hash__(self) -> int:
        return hash(self.resolve())

    def __format__(self, spec: str) -> str:
        return text_of_one(self.value, spec)

    def __str__(self) -> str:
        return text_of_one(self.value, "")

    def __repr__(self) -> str:
        if asking.is_used(sys._getframe(1)):
            return text_of_one(self.value, "")
        return f"LaneNumber({self.kind.__name__}, {self.value!r})"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        with on_plane(None):
            array = torch.tensor(self.resolve(), dtype=DTYPES[self.kind]).numpy()
        return array if dtype is None else array.astype(dtype)

    def __copy__(self) -> "LaneNumber":
        return self

    def __deepcopy__(self, memo: dict) -> "LaneNumber":
        return self

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
        return NotImplemented if any(issubclass(t, Several) for t in types) else cls.call(func, *args, **(kwargs or {}))

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
        if RANK[self.kind] > RANK[int]:
            raise TypeError(f"bad operand type for unary ~: '{self.kind.__name__}'")
        return -self - 1

    def __trunc__(self) -> Any:
        return self._whole(torch.trunc)

    def __floor__(self) -> Any:
        return self._whole(torch.floor)

    def __ceil__(self) -> Any:
        return self._whole(torch.ceil)

    def __round__(self, digits: Any = None) -> Any:
        return self._whole(torch.round) if digits is None else for_each_lane(round, +self, digits)

    def _whole(self, rounded: Callable) -> Any:
        if self.kind is complex:
            raise TypeError("must be real number, not complex")
        if self.kind is not float:
            return +self
        value = rounded(self.value)
        # Asked so that without lanes, where the answer is no, nothing is too large; and neither is NaN small.
        if LaneNumber(bool, (value.abs() < 2.0**62).logical_not()):
            return for_each_lane(int, LaneNumber(float, value))
        return expressed(LaneNumber(int, value.to(torch.int64)), int, self)


def expressed(out: Any, function: Callable, *numbers: Any) -> Any:
    """A result, which where there are no lanes also says what it is of: `n * 0 + 2` is 2, whatever `n` may be."""
    level = machine.level
    if type(out) is LaneNumber and isinstance(level, LaneLevel) and not level.root.size:
        steps = 1 + max([n.of[1] for n in numbers if type(n) is LaneNumber and n.of is not None], default=0)
        if steps <= _MOST_STEPS:
            out.of = (lambda: function(*map(one_number, numbers))), steps
    return out


def largest(number: Any) -> int:
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
    part = component(level, value)
    here: Any = value if part is None else part
    here = level.here(here) if isinstance(level, LaneLevel) else here
    return rows_of(level, here) if here.mapped else torch.tensor([value.item()])


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
    if kind in RANK:
        return kind
    return next((known for known in (bool, int, float, complex) if isinstance(number, known)), None)


def number_of(tensor: Tensor) -> Any:
    """`x.item()`: a number with lanes, or a Python number where all lanes share it."""
    if tensor.numel() != 1:
        return tensor.item()
    found = _with_lanes(tensor)
    return tensor.item() if found is None else LaneNumber(found[0], found[1].reshape(()))


def _with_lanes(tensor: Tensor) -> tuple[type, Tensor] | None:
    """The kind of number that the entries are, and these as a tensor of lanes; None where all lanes share them."""
    level = machine.level
    part = None if level is None or tensor.dtype is torch.uint64 else component(level, tensor)
    if part is None or (part.level is level and not part.mapped):
        return None
    note_question(part.level)
    part = part.detach()
    kind = bool if part.dtype is torch.bool else complex if part.is_complex() else int
    if part.is_floating_point():
        kind = float
    return kind, part.to(DTYPES[kind], copy=True)  # what is written to the tensor later is not written to the number


def nested_numbers(tensor: Tensor) -> Any:
    """`x.tolist()`: nested lists of numbers."""
    found = _with_lanes(tensor) if tensor.dim() else None
    if found is None:
        return [nested_numbers(entry) for entry in tensor.unbind()] if tensor.dim() else number_of(tensor)
    return _nested(*found)


def _nested(kind: type, numbers: Tensor) -> Any:
    entries = numbers.unbind()
    return [LaneNumber(kind, entry) if not entry.dim() else _nested(kind, entry) for entry in entries]


def as_tensor(number: Any) -> Tensor:
    """The tensor that `torch.tensor(number)` makes."""
    dtype = torch.get_default_dtype()
    return number.value.to({float: dtype, complex: dtype.to_complex()}.get(number.kind, DTYPES[number.kind]))


# --- arithmetic ------------------------------------------------------------------------------------------------------


_PLAIN = {torch.neg: operator.neg, torch.abs: abs, torch.clone: operator.pos}


def _unary(number: LaneNumber, function: Callable) -> LaneNumber:
    value = number.value
    if number.kind is bool:
        value = value.to(torch.int64)
    kind = int if number.kind is bool else number.kind
    return expressed(LaneNumber(kind, function(value), number.bound), _PLAIN[function], number)


def _operand(number: Any, kind: type) -> Any:
    if isinstance(number, LaneNumber):
        return number.value if number.kind is kind else number.value.to(DTYPES[kind])
    return kind(number)


class _TooLarge(Exception):
    """An int that 64 bits do not hold."""


def _bound(combined: Callable[[int, int], int], a: Any, b: Any) -> int:
    """A bound for a result, found anew from the numbers where the bounds known do not do."""
    bound = combined(largest(a), largest(b))
    if bound <= _LARGEST:
        return bound
    for number in (a, b):
        if isinstance(number, LaneNumber):
            number.bound = None
    bound = combined(largest(a), largest(b))
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


def _refuse_zero(b: Any, function: Callable, *zero: Any) -> None:
    """Where `b` is zero, raise as Python does."""
    if b == 0:
        function(*zero)


def _quotient(a: Any, b: Any, kind: type) -> LaneNumber:
    _refuse_zero(b, operator.truediv, kind(1), kind(0))
    kind = complex if kind is complex else float
    return LaneNumber(kind, operator.truediv(_operand(a, kind), _operand(b, kind)))


def _floor_like(function: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        if kind is complex:
            raise TypeError("unsupported operand types: 'complex'")
        _refuse_zero(b, function, kind(1), kind(0))
        kind = int if kind is bool else kind
        bound = max(largest(a), largest(b)) if kind is int else None
        out = function(_operand(a, kind), _operand(b, kind))
        if kind is float and function is operator.mod:
            # A zero has the sign of the divisor.
            out = torch.where(out == 0, torch.copysign(out, _operand(b, kind)), out)
        return LaneNumber(kind, out, bound)

    return run


def _power(a: Any, b: Any, kind: type) -> Any:
    if kind is complex:
        return LaneNumber(complex, operator.pow(_operand(a, complex), _operand(b, complex)))
    if kind is not float:
        if not b >= 0:
            _refuse_zero(a, operator.pow, 0, -1)
            return _power(a, b, float)
        bound = _bound(_largest_power, a, b)
        return LaneNumber(int, torch.pow(_operand(a, int), _operand(b, int)), bound)
    return for_each_lane(operator.pow, a, b)


def _largest_power(base: int, exponent: int) -> int:
    return max(base, 1) ** exponent if base < 2 or exponent < 64 else _LARGEST + 1


def _logical(function: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        if RANK[kind] > RANK[int]:
            raise TypeError(f"unsupported operand type: '{kind.__name__}'")
        return LaneNumber(kind, function(_operand(a, kind), _operand(b, kind)))

    return run


def _shift(times: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> Any:
        if RANK[kind] > RANK[int]:
            raise TypeError(f"unsupported operand type: '{kind.__name__}'")
        if isinstance(b, LaneNumber):
            b = b.resolve()
        if b < 0:
            raise ValueError("negative shift count")
        return times(a, 2**b) if times is not operator.floordiv or b < 62 else for_each_lane(operator.rshift, a, b)

    return run


def _comparison(function: Callable) -> Callable:
    def run(a: Any, b: Any, kind: type) -> LaneNumber:
        if kind is complex and function not in (operator.eq, operator.ne):
            function(1j, 1j)  # raises as Python does
        return LaneNumber(bool, function(_operand(a, kind), _operand(b, kind)))

    return run


_OPERATORS: dict[str, Callable] = {
    "add": _sum_like(operator.add),
    "sub": _sum_like(operator.sub),
    "mul": _product,
    "truediv": _quotient,
    "floordiv": _floor_like(operator.floordiv),
    "mod": _floor_like(operator.mod),
    "pow": _power,
    "and": _logical(operator.and_),
    "or": _logical(operator.or_),
    "xor": _logical(operator.xor),
    "lshift": _shift(operator.mul),
    "rshift": _shift(operator.floordiv),
}


# Comparisons with their sides exchanged.
_EXCHANGED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def _method(name: str, run: Callable, reflected: bool) -> Callable:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
    of_tensor = getattr(Tensor, f"__{name if reflected else _EXCHANGED.get(name, f'r{name}')}__")

    def method(self: LaneNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return LaneNumber.call(of_tensor, other, self)
        kind = kind_of(other)
        if kind is None:
            plain = self.resolve() if isinstance(other, TAKE_PLAIN) else None
            return NotImplemented if plain is None else function(other, plain) if reflected else function(plain, other)
        kind = max(kind, self.kind, key=RANK.__getitem__)
        a, b = (other, self) if reflected else (self, other)
        try:
            if type(other) is int and abs(other) > _LARGEST:
                raise _TooLarge
            return expressed(run(a, b, kind), function, a, b)
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
    found = results_for_each(function, numbers)
    out = None if found is None else lane_number(*found)
    return function(*map(one_number, numbers)) if out is None else out


def results_for_each(function: Callable, numbers: Sequence) -> tuple[Any, int, list] | None:
    """The level, how many lanes run, and what a Python function of numbers gives for each; None where none has lanes.

    (Where none runs, what it gives for a lane that there might be.)
    """
    level = next(
        (found for n in numbers if isinstance(n, LaneNumber) and (found := _level_of(n.value)) is not None), None
    )
    rows = [_rows(n.value) if isinstance(n, LaneNumber) else None for n in numbers]
    count = max([row.shape[0] for row in rows if row is not None], default=1)
    if level is None or any(row is not None and row.shape[0] not in (1, count) for row in rows):
        return None
    if not count:
        return level, 0, [function(*map(one_number, numbers))]
    columns = [
        [n] * count if row is None else (row.tolist() if row.shape[0] == count else row.tolist() * count)
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
    return level, count, results


def lane_number(level: Any, count: int, results: list) -> Any:
    """One number of each lane that runs as one with lanes; None where they are not of one kind, or too large."""
    kinds = {type(result) for result in results}
    if len(kinds) != 1 or not kinds <= set(RANK) or (kinds == {int} and max(map(abs, results)) > _LARGEST):
        return None
    kind = kinds.pop()
    with on_plane(None):
        plain = torch.tensor(results[:count], dtype=DTYPES[kind])
    return LaneNumber(kind, level.wrap(plain))


# --- as an operand, as one number ----------------------------------------------------------------------------------


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


def one_number(value: Any) -> Any:
    """The numbers in an argument resolved."""
    kind = type(value)
    if kind is LaneNumber or issubclass(kind, Several):
        return value.resolve()
    if kind is list or kind is tuple:
        return kind([one_number(entry) for entry in value])
    if kind is slice:
        return slice(one_number(value.start), one_number(value.stop), one_number(value.step))
    return value
