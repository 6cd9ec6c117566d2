"""What functions written for lanes abreast (written.py) call: each operation, whether its operands have lanes or not.

Nothing here has an effect but the result: functions, modules and methods that are not known to be so are declined.
"""

import builtins
import functools
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise._control.abreast import elementwise, layers, products, shapes, sums  # noqa: F401
from lanewise._control.abreast.shapes import ATTRIBUTES
from lanewise._control.abreast.shapes import item as item_of_lanes
from lanewise._control.abreast.values import (
    FUNCTIONS,
    LAYERS,
    METHODS,
    NUMBERS,
    Declined,
    Lanes,
    Spread,
    aligned,
    check_operand,
    check_shared,
    has_lanes,
)
from lanewise._control.abreast.written import RUNTIME, written
from lanewise._control.rewriting.source import Unsupported
from lanewise._core.short.hot import PLAIN
from lanewise._torch_compat import has_module_hooks

bounds = slice

# What operators of Python compute with, without an effect.
_BASIC = frozenset(
    [*NUMBERS, *PLAIN, str, tuple, list, type(None), torch.Size, torch.dtype, torch.device, range, slice]
)


_VIEWS = ({}.keys(), {}.values(), {}.items())


def _operator(call: Callable) -> Callable:
    def run(x: Any, y: Any) -> Any:
        kind, other = type(x), type(y)
        if kind is Lanes:
            a = x.value
            if other in NUMBERS:
                return Lanes(call(a, y))
            if other is Lanes:
                b = y.value
                if a.dim() == b.dim() and a.dtype is b.dtype:
                    return Lanes(call(a, b))
            else:
                check_operand(y)
                if y.dim() < a.dim() and a.dtype is y.dtype:
                    return Lanes(call(a, y))
        elif other is Lanes:
            if kind in NUMBERS:
                return Lanes(call(x, y.value))
            check_operand(x)
            if x.dim() < y.value.dim() and x.dtype is y.value.dtype:
                return Lanes(call(x, y.value))
        elif kind in _BASIC and other in _BASIC:
            return call(x, y)
        else:
            raise Declined
        return Lanes(call(*aligned((x, y), (x, y))))

    return run


add, sub, mul, truediv, floordiv, mod, pow, and_, or_, xor, lt, le, eq, ne, gt, ge = [
    _operator(getattr(operator, name))
    for name in "add sub mul truediv floordiv mod pow and_ or_ xor lt le eq ne gt ge".split()
]


def _sign(call: Callable) -> Callable:
    def run(x: Any) -> Any:
        if type(x) is Lanes:
            return Lanes(call(x.value))
        if type(x) not in _BASIC:
            raise Declined
        return call(x)

    return run


neg, invert = _sign(operator.neg), _sign(operator.invert)


def matmul(x: Any, y: Any) -> Any:
    if type(x) is Lanes or type(y) is Lanes:
        return products.product(x, y)
    if type(x) not in PLAIN or type(y) not in PLAIN:
        raise Declined
    return x @ y


def updated(old: Any, new: Any) -> Any:
    """The result of `old += ...`, which for a number is a new one. For a tensor or a list it is a write."""
    if type(old) not in NUMBERS and type(old) not in (str, tuple):
        raise Declined
    return new


def itself(x: Any) -> Any:
    """What is asked which object it is: lanes are others than the tensors that they stand for."""
    if type(x) is Lanes or type(x) is Spread:
        raise Declined
    return x


def basic(x: Any) -> Any:
    """What Python compares without calling code of the user's."""
    if type(x) not in _BASIC and type(x) not in _ASKED:
        raise Declined
    return x


def truth(x: Any) -> Any:
    """What is asked whether it is true."""
    kind = type(x)
    if kind not in _BASIC and kind not in _ASKED and (hasattr(kind, "__bool__") or hasattr(kind, "__len__")):
        raise Declined
    return x


_ASKED = frozenset([dict, set, frozenset, nn.ModuleList, nn.ModuleDict, nn.Sequential, *map(type, _VIEWS)])


_ITERATED = frozenset(
    [Lanes, list, tuple, dict, range, str, torch.Size]
    + [type(view) for view in _VIEWS]
    + [nn.ModuleList, nn.ParameterList, nn.Sequential, *PLAIN]
)


class _Rounds:
    """An iterator made here, as by `zip`: nobody else goes through it."""

    __slots__ = ("iterator",)

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> "_Rounds":
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


def rounds(x: Any) -> Any:
    """What a loop goes through; an iterator from outside would be used up."""
    kind = type(x)
    if (
        kind in _ITERATED
        or kind is _Rounds
        or _is_record(kind)
        or (kind is types.GeneratorType and RUNTIME in x.gi_code.co_freevars)
    ):
        return x
    raise Declined


def unpacked(x: Any, pattern: tuple) -> Any:
    """What is unpacked to variables. `pattern`: None for each of them, and such a tuple for one unpacked further."""
    parts = rounds(x)
    if all(inner is None for inner in pattern):
        return parts
    if type(parts) is types.GeneratorType or type(parts) is _Rounds:
        raise Declined
    for part, inner in zip(parts, pattern):
        if inner is not None:
            unpacked(part, inner)
    return parts


def unpacked_rounds(x: Any, pattern: tuple) -> Any:
    """What a loop goes through, unpacking each."""
    return (unpacked(each, pattern) for each in rounds(x))


_HOLDERS = frozenset(
    [list, tuple, dict, str, range, torch.Size, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.Sequential]
)


def item(x: Any, index: Any) -> Any:
    """`x[index]`"""
    kind = type(x)
    if kind is Lanes:
        return item_of_lanes(x, index)
    if kind in PLAIN:
        if not has_lanes((index,)):
            return x[index]
        check_shared(x)
        return item_of_lanes(x, index)
    if kind not in _HOLDERS and not _is_record(kind):
        raise Declined
    return x[index]


def _is_record(kind: type) -> bool:
    """Whether it is a named tuple, or one of torch's."""
    return issubclass(kind, tuple) and kind.__getitem__ is tuple.__getitem__ and kind.__iter__ is tuple.__iter__


_TENSOR_ATTRIBUTES = frozenset("shape dtype device ndim T mT requires_grad layout is_cuda".split())
# Of an object whose class has these, reading an attribute runs no code.
_PLAIN_DESCRIPTORS = (
    types.FunctionType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.BuiltinFunctionType,
    staticmethod,
    classmethod,
    type,
    type(NamedTuple("Pair", [("first", int)]).first),  # type: ignore[attr-defined]
)
# By class and name, whether reading the attribute of an object runs no code.
_simple: dict[tuple[type, str], bool] = {}


def _is_simple(kind: type, name: str) -> bool:
    found = _simple.get((kind, name))
    if found is None:
        found = _simple[kind, name] = _reads_simply(kind, name)
    return found


def _reads_simply(kind: type, name: str) -> bool:
    if kind.__getattribute__ is not object.__getattribute__ and not issubclass(kind, tuple):
        return False
    asked = getattr(kind, "__getattr__", None)
    if asked is not None and asked is not nn.Module.__getattr__:
        return False
    for base in kind.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            return not hasattr(type(value), "__get__") or isinstance(value, _PLAIN_DESCRIPTORS)
    return True


def get(x: Any, name: str) -> Any:
    """`x.name`"""
    kind = type(x)
    if kind is Lanes:
        found = ATTRIBUTES.get(name)
        if found is None:
            raise Declined
        return found(x.value, x.value.dim() - 1)
    if kind in PLAIN:
        if name not in _TENSOR_ATTRIBUTES:
            raise Declined
    elif kind is not types.ModuleType and not _is_simple(kind, name):
        raise Declined
    return getattr(x, name)


_METHODS_OF = {
    dict: frozenset("items keys values get".split()),
    str: frozenset("startswith endswith split lower upper".split()),
    tuple: frozenset(["index", "count"]),
    list: frozenset(["index", "count"]),
    torch.Size: frozenset(["numel", "index", "count"]),
    nn.ModuleDict: frozenset("items keys values".split()),
}


def method(x: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """`x.name(...)`"""
    kind = type(x)
    if kind is Lanes:
        run = METHODS.get(name)
        if run is None:
            raise Declined
        for arg in args:
            if type(arg) is not int:
                has_lanes(args)
                break
        if kwargs:
            has_lanes(kwargs.values())
        return run(x, *args, **kwargs)
    if kind in PLAIN:
        run = METHODS.get(name)
        if run is None:
            raise Declined
        if has_lanes(args) or (kwargs and has_lanes(kwargs.values())):
            check_shared(x)
            return run(x, *args, **kwargs)
        return getattr(x, name)(*args, **kwargs)
    known = _METHODS_OF.get(kind)
    if known is not None:
        if name not in known:
            raise Declined
        return getattr(x, name)(*args, **kwargs)
    return call(get(x, name), *args, **kwargs)


# Functions that draw, write or call others, where no operand has lanes; and what tells that others write.
NOT_PURE: set[Any] = {F.batch_norm, F.dropout, F.embedding, F.scaled_dot_product_attention}
_WRITING = frozenset(["out", "inplace"])
# Functions that have no effect; of lanes they are asked only what is here.
_PURE = frozenset(
    [range, int, float, bool, str, min, max, abs, round, divmod, math.prod, torch.is_tensor, torch.finfo, torch.iinfo]
    + [function for name, function in vars(math).items() if isinstance(function, types.BuiltinFunctionType)]
    + [torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace, torch.logspace, torch.tensor]
    + [torch.Size, torch.device, torch.triu_indices, torch.tril_indices, torch.hann_window, torch.cartesian_prod]
)
_CALLED = frozenset([types.FunctionType, types.BuiltinFunctionType, types.MethodType, type])
# Those that go through what they are given; and those that do so as they are gone through.
_HOLDING = frozenset([len, list, tuple, dict])
_ITERATING = frozenset([zip, enumerate, reversed])


def call(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`func(...)`"""
    kind = type(func)
    if isinstance(func, nn.Module):
        return _module(func, kind, args, kwargs)
    if kind is functools.partial:
        return call(func.func, *func.args, *args, **{**func.keywords, **kwargs})
    if kind not in _CALLED:
        raise Declined
    run = FUNCTIONS.get(func)
    if run is not None:
        if has_lanes(args) or (kwargs and has_lanes(kwargs.values())):
            return run(*args, **kwargs)
        if func in NOT_PURE or not _WRITING.isdisjoint(kwargs) or any(arg is True for arg in args):
            raise Declined
        return _plain(func(*args, **kwargs))
    if kind is types.FunctionType:
        return own(func)(*args, **kwargs)
    if kind is types.MethodType and type(func.__func__) is types.FunctionType:
        return own(func.__func__)(func.__self__, *args, **kwargs)
    if func in _HOLDING or func in _ITERATING:
        for each in args[:1] if func is enumerate else args:
            rounds(each)
        if func is reversed and type(args[0]) is Lanes:
            raise Declined  # of a tensor it is `flip`
        found = func(*args, **kwargs)
        return found if func in _HOLDING else _Rounds(found)
    if func is isinstance and type(args[0]) is _Rounds:
        raise Declined
    if func is isinstance and type(args[0]) in (Lanes, Spread):
        return isinstance(args[0].value.detach(), args[1])
    if func is isinstance or func is callable:
        return func(*args)
    if func is builtins.sum:
        return _sum(*args, **kwargs)
    if func is builtins.abs and type(args[0]) is Lanes:
        return METHODS["abs"](args[0])
    if func in _PURE and all(type(each) in _BASIC for each in (*args, *kwargs.values())):
        if has_lanes(args) or has_lanes(kwargs.values()):
            raise Declined
        return _plain(func(*args, **kwargs))
    raise Declined


def _sum(parts: Any, /, start: Any = 0) -> Any:
    return functools.reduce(add, rounds(parts), start)


def _plain(out: Any) -> Any:
    """A result without lanes, which is no leaf that gradients are wanted for."""
    if isinstance(out, Tensor):
        if out.requires_grad and out.is_leaf:
            raise Declined
        check_shared(out)
    return out


def _module(module: nn.Module, kind: type, args: tuple, kwargs: dict) -> Any:
    if kind.__call__ is not _call_of_modules or has_module_hooks(module):
        raise Declined
    layer = LAYERS.get(kind)
    if layer is not None:
        if not layer.stands_for(module, kind):
            raise Declined
        for parameter in module._parameters.values():
            if isinstance(parameter, Tensor):
                check_shared(parameter)
        return layer.run(module, *args, **kwargs)
    if kind is nn.Sequential and kind.forward is _forward_of_sequential:
        if kwargs or "forward" in module.__dict__:
            raise Declined
        (x,) = args
        for part in module._modules.values():
            x = _module(part, type(part), (x,), {}) if isinstance(part, nn.Module) else call(part, x)
        return x
    forward = kind.forward
    if type(forward) is not types.FunctionType or "forward" in module.__dict__:
        raise Declined
    return own(forward)(module, *args, **kwargs)


_call_of_modules = nn.Module.__call__
_forward_of_sequential = nn.Sequential.forward
_LIBRARIES = ("torch", "lanewise")

# By code object: that for lanes abreast, None where there is none.
_codes: dict[types.CodeType, types.CodeType | None] = {}


def own(func: types.FunctionType) -> types.FunctionType:
    """A function of the user's, written for lanes abreast."""
    code = func.__code__
    found = _codes.get(code, code)
    if found is code:
        found = None
        module = str(func.__globals__.get("__name__")).split(".")[0]
        if module not in _LIBRARIES:
            try:
                found = written(func)
            except Unsupported:
                pass
        _codes[code] = found
    if found is None:
        raise Declined
    cells = dict(zip(code.co_freevars, func.__closure__ or ()))
    cells[RUNTIME] = _cell
    closure = tuple([cells[name] for name in found.co_freevars])
    new = types.FunctionType(found, func.__globals__, func.__name__, func.__defaults__, closure)
    new.__kwdefaults__ = func.__kwdefaults__
    return new


_cell = types.CellType(sys.modules[__name__])
