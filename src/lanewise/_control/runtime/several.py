"""What is a tensor in some lanes and a Python number in others, as an operand: in each lane, what its own would do.

Such a value (a Mixed, merging.py) is an attribute, or an entry of a list, as any other. An operation on it is computed
for each of the values, for the lanes that have it, and all go on together; a tensor stands for numbers where that gives
the same. What asks for one value, such as `type(y)` in code that runs as it was written, goes on with the lanes that
have the most frequent one.
"""

import copy
import opcode
import operator
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from lanewise._control.rewriting.builders import RUNTIME
from lanewise._control.runtime import replacements
from lanewise._control.runtime.choices import answered, for_each_value
from lanewise._control.runtime.merging import Mixed, number_kind
from lanewise._control.runtime.number_classes import Several
from lanewise._control.runtime.numbers import DTYPES, LaneNumber, one_number
from lanewise._control.runtime.tensor_calls import call_with_numbers
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import innermost, narrow
from lanewise._core.parting.lanes import Restart, machine
from lanewise._core.plane import Plane, escaped
from lanewise._core.python.surface import asking, text_of_one
from lanewise._core.trees import stand_for_leaves

# Operations that give the same for a number as for a tensor without dims, where the other operand is a tensor and comes
# first, or second. (Torch takes the reciprocal of a tensor that divides a number.)
_SECOND = frozenset("add sub mul div truediv gt ge lt le eq ne".split())
_FIRST = _SECOND - {"div", "truediv"}


def each_kind(run: Callable, *operands: Any) -> Any:
    """`run(*operands)` for each of the values that operands have; as one, what comes out."""
    if all(operand.level is machine.level for operand in operands if type(operand) is Mixed):
        return for_each_value(run, 0, operands, 0)
    return run(*[operand.resolve() if type(operand) is Mixed else operand for operand in operands])


def _stands(value: Mixed, other: Any) -> Any:
    """A tensor that is in an operation with another one what numbers are; None where it may not be."""
    if not isinstance(other, Tensor) or value.level is not machine.level:
        return None
    for held in value.values:
        if isinstance(held, Tensor):
            if held.dtype is not other.dtype or held.dtype not in _EXACT:
                return None
        elif (kind := number_kind(held)) is not float and kind is not int:
            return None
    return value.whole(value.level)


_EXACT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _binary(name: str, function: Callable, reflected: bool) -> Callable:
    def method(self: Mixed, other: Any) -> Any:
        if name in _FIRST and (tensor := _stands(self, other)) is not None:
            return function(other, tensor) if reflected else function(tensor, other)
        return each_kind(function, other, self) if reflected else each_kind(function, self, other)

    return method


def _in_place(function: Callable) -> Callable:
    def method(self: Mixed, other: Any) -> Any:
        return each_kind(lambda own, other: function(replacements.changes(own), other), self, other)

    return method


def _unary(function: Callable) -> Callable:
    return lambda self, *args: each_kind(lambda own: function(own, *args), self)


def _asked(function: Callable) -> Callable:
    """What gives nothing but one of Python's own values."""
    return lambda self, *args: function(self.resolve(), *args)


_BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()
for _name in _BINARY:
    _own = f"{_name}_" if _name in ("and", "or") else _name
    setattr(Mixed, f"__{_name}__", _binary(_name, getattr(operator, _own), False))
    setattr(Mixed, f"__r{_name}__", _binary(_name, getattr(operator, _own), True))
    setattr(Mixed, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Mixed, f"__{_name}__", _binary(_name, getattr(operator, _name), False))
for _name, _function in {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "round": round,
    "getitem": replacements.entry_at,
}.items():
    setattr(Mixed, f"__{_name}__", _unary(_function))
for _name, _function in {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "hash": hash,
    "len": len,
    "iter": iter,
    "contains": operator.contains,
    "reversed": reversed,
    "trunc": replacements.int_,
}.items():
    setattr(Mixed, f"__{_name}__", _asked(_function))
Mixed.__divmod__ = lambda self, other: each_kind(divmod, self, other)  # type: ignore[attr-defined]
Mixed.__rdivmod__ = lambda self, other: each_kind(divmod, other, self)  # type: ignore[attr-defined]


def _text(value: Mixed, spec: str | None, frame: FrameType) -> str:
    """The text of each lane's own, or of all where it is only shown (texts.py)."""
    if value.level.alive and not asking.is_used(frame):
        return " or ".join([repr(held) for held in value.values])
    own = value.resolve()
    if isinstance(own, Plane):
        return text_of_one(own, spec)
    return format(own, spec or "") if type(own) is LaneNumber or spec is not None else repr(own)


Mixed.__repr__ = lambda self: _text(self, None, sys._getframe(1))  # type: ignore[method-assign]
Mixed.__str__ = Mixed.__repr__  # type: ignore[method-assign]
Mixed.__format__ = lambda self, spec: _text(self, spec, sys._getframe(1))  # type: ignore[method-assign]


def _attribute(self: Mixed, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(self.resolve(), name)


def _array(value: Mixed, dtype: Any = None, copy: Any = None) -> Any:
    """What NumPy asks for."""
    own = value.resolve()
    if isinstance(own, Tensor):
        array = own.numpy()
    else:
        with on_plane(None):
            array = torch.tensor(one_number(own), dtype=DTYPES[type(one_number(own))]).numpy()
    return array if dtype is None else array.astype(dtype)


def _copied(value: Mixed, memo: dict) -> Any:
    return copy.deepcopy(value.resolve(), memo)


Mixed.__array__ = _array  # type: ignore[attr-defined]
Mixed.__copy__ = lambda self: self  # type: ignore[attr-defined]
Mixed.__deepcopy__ = _copied  # type: ignore[attr-defined]
Mixed.__getattr__ = _attribute  # type: ignore[attr-defined]


# --- classes ---------------------------------------------------------------------------------------------------------

# Modules that ask whether a value is one of the classes that they handle, which no number or result is.
_HONEST = ("lanewise.", "torch.nn.modules.module", "torch.nn.parameter")
_MATCH_CLASS = opcode.opmap["MATCH_CLASS"]
# By code object: whether it may ask for classes.
_asks: dict[CodeType, bool] = {}


def _shown_class(value: Mixed, frame: FrameType) -> type:
    """The class, for what asks without a call that converted code sees: `isinstance` where code runs as it was written.

    Functions of torch ask, too, and take for a tensor's memory what says that it is one. So only numbers say what they
    are.
    """
    code = frame.f_code
    if (asks := _asks.get(code)) is None:
        asks = _asks[code] = _may_ask(code)
    if not asks or str(frame.f_globals.get("__name__")).startswith(_HONEST):
        return Mixed
    if not value.level.alive:
        raise escaped(value.level, "isinstance")
    level: Any = innermost(value.level)
    shares = value.shares(level.lanes)
    numbers = [share for share in shares if number_kind(value.values[share[0]]) is not None]
    if not numbers:
        raise Restart(value.level)
    number, here = max(numbers, key=lambda share: share[1].shape[0])
    if here.shape[0] < level.lanes.size:
        narrow(level, here)
    return number_kind(value.values[number])  # type: ignore[return-value]


def _may_ask(code: CodeType) -> bool:
    names = code.co_names
    by_name = "__class__" in names or ("isinstance" in names and RUNTIME not in code.co_freevars)
    return by_name or _MATCH_CLASS in code.co_code[::2]


Mixed.shown_class = _shown_class  # type: ignore[attr-defined]


# --- functions -------------------------------------------------------------------------------------------------------


def call(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A function of torch, some of whose arguments are of several kinds."""
    name = getattr(func, "__name__", "").strip("_")
    if name in _SECOND and len(args) == 2 and not kwargs and type(args[1]) is Mixed:
        if (tensor := _stands(args[1], args[0])) is not None:
            return func(args[0], tensor)
    found: list[Mixed] = []
    _look(args, found)
    _look(kwargs, found)

    def run(*values: Any) -> Any:
        known = {id(mixed): value for mixed, value in zip(found, values)}
        return call_with_numbers(func, *_put(args, known), **_put(kwargs, known))

    return each_kind(run, *found)


def _look(thing: Any, found: list[Mixed]) -> None:
    if type(thing) is Mixed:
        found.append(thing)
    elif type(thing) in (tuple, list, dict):
        for entry in thing.values() if type(thing) is dict else thing:
            _look(entry, found)


def _put(thing: Any, known: dict[int, Any]) -> Any:
    if type(thing) is Mixed:
        return known[id(thing)]
    if type(thing) is tuple or type(thing) is list:
        return type(thing)([_put(entry, known) for entry in thing])
    return {key: _put(entry, known) for key, entry in thing.items()} if type(thing) is dict else thing


Several.call = staticmethod(call)  # type: ignore[attr-defined]
Mixed.__torch_function__ = classmethod(  # type: ignore[attr-defined]
    lambda cls, func, types, args=(), kwargs=None: call(func, args, kwargs or {})
)
stand_for_leaves[Mixed] = Mixed.resolve


def _is_instance(value: Mixed, kinds: Any) -> Any:
    return answered(value, lambda own: replacements.isinstance_(own, kinds))


Mixed.isinstance = _is_instance  # type: ignore[attr-defined]
Several.each_kind = staticmethod(each_kind)  # type: ignore[attr-defined]
