"""What converted code calls: the converted form of a function, a method or a module, or what stands in for it."""

import bisect
import collections
import contextvars
import functools
import heapq
import itertools
import opcode
import operator
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._control.rewriting.compiling import converted_code, instantiate
from lanewise._control.rewriting.source import Unsupported
from lanewise._control.runs.boundary import boundary
from lanewise._control.runtime import seeds
from lanewise._control.runtime.changes import Parts, built, changed_inside, changes, changes_first, narrowed, watched
from lanewise._control.runtime.iterators import iterator_shared, reach_iterators
from lanewise._control.runtime.merging import join
from lanewise._control.runtime.number_classes import Several
from lanewise._control.runtime.numbers import LaneNumber, kind_of, one_number
from lanewise._control.runtime.tensor_calls import TAKE_LISTS, call_with_numbers
from lanewise._core.again.effects import CACHED, MUTATING, TO_ARRAYS
from lanewise._core.again.libraries import is_library
from lanewise._core.parting.causes import Cause, cause_here
from lanewise._core.parting.lanes import Lanes, Restart, Target, machine
from lanewise._core.short.direct import METHODS, TAKE_NUMBERS
from lanewise._torch_compat import has_module_hooks

# What stands in for a function inside converted code, by the function; for a method, by the function of the method.
replaced: dict[Any, Callable] = {**seeds.stand_ins}
replaced_methods: dict[Any, Callable] = {}
# What stands in for methods of lists and tuples, by their names.
list_methods: dict[str, Callable] = {}

# Functions that change their first argument, and such methods by name.
_FIRST = frozenset(
    [setattr, delattr, heapq.heappush, heapq.heappop, heapq.heapify, heapq.heapreplace, heapq.heappushpop]
    + [bisect.insort, bisect.insort_left, bisect.insort_right, operator.setitem, operator.delitem]
    + [
        function
        for name, function in vars(operator).items()
        if name[0] == "i" and name[:2] != "in" and hasattr(operator, f"__{name}__")
    ]
)
_SPECIAL = frozenset({"__setitem__", "__delitem__", "__setattr__", "__delattr__", "__next__", "__iadd__", "__ior__"})
_UNBOUND = frozenset({types.MethodDescriptorType, types.WrapperDescriptorType})

# What stands in for functions of builtin modules, once they were asked for.
_known: dict[Any, Any] = {}

# By code object of a function: what `_function` does with it.
_ways: dict[types.CodeType, Any] = {}
_PASS, _WRAPPER, _CALLBACKS, _APART, _BY_IDENTITY = "pass", "wrapper", "callbacks", "apart", "by identity"
_IS_OP = opcode.opmap["IS_OP"]

# Modules of libraries with functions that call their arguments.
_CALLING = ("lanewise.", "torch._functorch.", "torch.autograd.functional", "torch.utils.checkpoint")
# Modules of functions that are operations on tensors, or stand in for such.
_OPERATIONS = ("torch.", "lanewise._core.")
# Modules of classes, and classes, whose objects take no integers with lanes.
_LAYERS = "torch.nn.modules."
# NumPy's generators, which take no seeds but Python's own numbers.
_SEEDED = "numpy.random"
# Classes whose objects call a function that they are given.
_TAKE_FUNCTIONS = frozenset(
    [itertools.accumulate, itertools.dropwhile, itertools.filterfalse, itertools.groupby, itertools.starmap]
    + [itertools.takewhile, collections.defaultdict]
)
_TAKE_ONE = frozenset({collections.deque, itertools.permutations})
# Classes whose objects call a method, or ask for an attribute, by its name.
_BY_NAME = frozenset({operator.methodcaller, operator.attrgetter, operator.itemgetter})
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial, nn.Module)


def fn(func: Any) -> Any:
    """What converted code calls in place of `func`."""
    if machine.level is None:
        return func
    kind = type(func)
    if kind is types.BuiltinFunctionType:
        return _known.get(func) or _builtin(func)
    if kind is types.FunctionType:
        way = _ways.get(func.__code__)
        return instantiate(func, way) if type(way) is types.CodeType else _function(func)
    if kind is types.MethodType and func.__func__ in METHODS:
        return func
    return callee(func)


def callee(func: Any) -> Any:
    """What stands in for `func` where lanes may part."""
    kind = type(func)
    if kind is types.BuiltinFunctionType:
        return _builtin(func)
    if kind is types.FunctionType:
        return _function(func)
    if kind is types.MethodType:
        own = TAKE_NUMBERS.get(func.__func__)
        return _method(func) if own is None else callee(own.__get__(func.__self__))
    if isinstance(func, type):
        stand_in = replaced.get(func)
        if stand_in is not None:
            return stand_in
        if func in _TAKE_FUNCTIONS:
            func = functools.partial(_with_callbacks, func)
        elif str(func.__module__).startswith(_LAYERS) or func in _TAKE_ONE:
            func = functools.partial(_with_one_number, func)
        elif str(func.__module__).startswith(_SEEDED):
            func = functools.partial(_with_numbers_resolved, func)
        return functools.partial(built, func) if narrowed() else func
    if kind is types.MethodWrapperType and func.__name__ in _SPECIAL:
        changes(func.__self__)
    if kind in _UNBOUND and (func.__name__ in MUTATING or func.__name__ in _SPECIAL):
        return functools.partial(changes_first, func)
    return _object(func)


def _builtin(func: Any) -> Any:
    owner = func.__self__
    if isinstance(owner, Tensor):
        return functools.partial(call_with_numbers, func) if func.__name__ in TAKE_LISTS else func
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        stand_in = replaced.get(func)
        if stand_in is None:
            stand_in = functools.partial(call_with_numbers, func) if func.__name__ in TAKE_LISTS else func
            if func in _FIRST:
                stand_in = functools.partial(changes_first, func)
        _known[func] = stand_in
        return stand_in
    if isinstance(owner, torch.Generator):
        return functools.partial(seeds.generator_method, func)
    if func.__name__ in MUTATING or _keeps_state(owner, func.__name__):
        changes(owner)
        if isinstance(owner, (dict, set)):
            return functools.partial(_with_key, func)
    if (type(owner) is list or type(owner) is tuple) and func.__name__ in list_methods:
        return functools.partial(list_methods[func.__name__], owner)
    return func


def _keeps_state(owner: Any, name: str) -> bool:
    """Whether a method changes what an object of Python's or NumPy's keeps in C: the state of a generator, say.

    (Generators of a module draw for all lanes.)
    """
    if isinstance(owner, random.Random):
        return owner is not getattr(random.random, "__self__", None)
    if isinstance(owner, contextvars.ContextVar):
        return name in ("set", "reset")
    module = type(owner).__module__
    if module == "numpy":
        return name in TO_ARRAYS
    return module.startswith(_SEEDED) and owner is not getattr(sys.modules[_SEEDED].rand, "__self__", None)


def _numpy(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A function of NumPy's, while lanes wait: one that writes to an array changes it."""
    out = kwargs.get("out")
    written = [*args[: func.__name__ in TO_ARRAYS], *(out if type(out) is tuple else (out,))]
    for array in written:
        changes(array)
    return func(*args, **kwargs)


def _with_key(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A method of a dict or a set, which keeps its first argument as a key: a number with lanes cannot be one."""
    return func(*map(one_number, args[:1]), *args[1:], **kwargs)


def _with_one_number(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A class that keeps integers for functions which take no others: sizes of kernels, a length."""
    return func(*map(_one_integer, args), **{name: _one_integer(arg) for name, arg in kwargs.items()})


def _call_cached(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call what `functools.lru_cache` has made. What it keeps of lanes that run is not for others to find."""
    cache, waited, begun, inside = getattr(func, "__func__", func), narrowed(), machine.partings, []
    misses = cache.cache_info().misses
    try:
        return call_apart(functools.partial(_noting_partings, inside), func, *args, **kwargs)
    finally:
        # A global function is known not to hold what only some lanes have.
        own = cache is not func or "<locals>" in cache.__wrapped__.__qualname__
        of_some = inside or (own and (waited or machine.partings > begun))
        kind = sys.exc_info()[0]
        if of_some and cache.cache_info().misses > misses and (kind is None or issubclass(kind, Exception)):
            raise Restart(machine.level, cause=_kept()) from None


def _noting_partings(inside: list[None], func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function; `inside` has an entry then if lanes parted in it, and not for its arguments."""
    args, kwargs = tuple(map(one_number, args)), {name: one_number(arg) for name, arg in kwargs.items()}
    begun = machine.partings
    try:
        return func(*args, **kwargs)
    finally:
        if machine.partings > begun:
            inside.append(None)


def _kept() -> Cause | None:
    """Why code has to run as written that keeps results of some lanes."""
    return cause_here(
        "not all lanes come to where a cached function keeps what it gives",
        "a dict that the function has made: if k not in memo: memo[k] = ...",
    )


def _with_numbers_resolved(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    return func(*map(one_number, args), **{name: one_number(arg) for name, arg in kwargs.items()})


def _one_integer(value: Any) -> Any:
    return one_number(value) if kind_of(value) is int or type(value) is tuple else value


def _function(func: types.FunctionType) -> Any:
    code = func.__code__
    way = _ways.get(code)
    if way is None:
        way = _ways[code] = _way(func)
    if type(way) is types.CodeType:
        return instantiate(func, way)
    stand_in = replaced.get(func)
    if stand_in is not None:
        return stand_in
    if way is _APART:
        return functools.partial(call_apart, func)
    if func.__name__ in TAKE_LISTS:
        return functools.partial(call_with_numbers, func)
    if way is _WRAPPER:
        return _unwrapped(func)
    if way is _BY_IDENTITY:
        return functools.partial(_with_truths, func)
    if way is _CALLBACKS:
        return functools.partial(_with_callbacks, func)
    if narrowed() and not str(func.__globals__.get("__name__")).startswith(_OPERATIONS):
        return functools.partial(watched, func, None)
    return func


def _way(func: types.FunctionType) -> Any:
    if is_library(func):
        if func.__closure__ and hasattr(func, "__wrapped__"):
            return _WRAPPER
        module = str(func.__globals__.get("__name__"))
        if module.startswith(_CALLING) and not module.startswith("lanewise._core."):
            return _CALLBACKS
        return _BY_IDENTITY if _asks_by_identity(func.__code__) else _PASS
    code = converted_code(func)
    return _APART if isinstance(code, Unsupported) else code


def _asks_by_identity(code: types.CodeType) -> bool:
    """Whether a function may ask `flag is True`, of an argument say."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    asks = _IS_OP in code.co_code[::2] and any(constant is True or constant is False for constant in code.co_consts)
    return asks or any(map(_asks_by_identity, inner))


def _one_truth(value: Any) -> Any:
    """What code that runs as it was written may ask by `is True`, or by `type(value)`: one for the lanes that go on."""
    asked = value.kind is bool if type(value) is LaneNumber else issubclass(type(value), Several)
    return value.resolve() if asked else value


def _with_truths(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A function that runs as it was written, with one truth value for each that has lanes."""
    return func(*map(_one_truth, args), **{name: _one_truth(arg) for name, arg in kwargs.items()})


def _unwrapped(func: types.FunctionType) -> types.FunctionType:
    """A library's wrapper around functions (such as that of `@torch.no_grad()`), around their converted forms."""
    cells = []
    for cell in func.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:
            cells.append(cell)
            continue
        new = callee(inner) if isinstance(inner, _CALLABLES) and inner is not func else inner
        cells.append(cell if new is inner else types.CellType(new))
    out = types.FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__, tuple(cells))
    out.__kwdefaults__ = func.__kwdefaults__
    return out


def _with_callbacks(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A transform or its like, which calls functions that are its arguments."""
    args = tuple([callee(arg) if type(arg) in _FUNCTIONS else arg for arg in args])
    kwargs = {key: callee(arg) if type(arg) in _FUNCTIONS else arg for key, arg in kwargs.items()}
    return func(*args, **kwargs)


def _method(func: types.MethodType) -> Any:
    inner, owner = func.__func__, func.__self__
    if narrowed() and _keeps_state(owner, str(getattr(inner, "__name__", None))):
        changes(owner)
    stand_in = replaced_methods.get(inner)
    if stand_in is not None:
        return functools.partial(stand_in, owner)
    if type(inner) is not types.FunctionType:
        return functools.partial(_call_cached, func) if type(inner) is CACHED else func
    new = _function(inner)
    if is_library(inner) and narrowed():
        bound = types.MethodType(new, owner) if type(new) is types.FunctionType else functools.partial(new, owner)
        return functools.partial(watched, bound, owner)
    if new is inner:
        return func
    return types.MethodType(new, owner) if type(new) is types.FunctionType else functools.partial(new, owner)


def _object(func: Any) -> Any:
    """A module, a partial, or another object that can be called."""
    kind = type(func)
    if kind is CACHED:
        return functools.partial(_call_cached, func)
    if isinstance(func, nn.Module):
        return _module(func)
    if isinstance(func, functools.partial):
        if func.func is _with_callbacks:
            return func  # a stand-in, given to `vmap` say
        inner = callee(func.func)
        return func if inner is func.func else functools.partial(inner, *func.args, **func.keywords)
    call = getattr(type(func), "__call__", None)  # noqa: B004
    if type(call) is types.FunctionType and not is_library(call):
        return _method(types.MethodType(call, func))
    if kind in _BY_NAME and narrowed():
        return functools.partial(watched, func, None)
    if str(kind.__module__) == "numpy" and narrowed():
        return functools.partial(_numpy, func)
    if str(getattr(func, "__module__", None)) == _SEEDED:
        return functools.partial(_with_numbers_resolved, func)
    return func


def _module(module: nn.Module) -> Any:
    call = type(module).__call__
    if call is not nn.Module.__call__ and type(call) is types.FunctionType:
        return _method(types.MethodType(call, module))
    forward = module.forward
    inner = getattr(forward, "__func__", forward)
    if type(inner) is not types.FunctionType:
        return module
    if is_library(inner):
        if not any(_own_forward(part) for part in module.modules()):
            return module
        code = converted_code(inner)  # a container such as nn.Sequential, which calls modules of the user
        way: Any = _APART if isinstance(code, Unsupported) else code
    else:
        way = _ways.get(inner.__code__)
        if way is None:
            way = _ways[inner.__code__] = _way(inner)
    if type(way) is not types.CodeType or has_module_hooks(module):
        return functools.partial(call_apart, module)
    new = instantiate(inner, way)
    return new if inner is forward else types.MethodType(new, module)


def _own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is the user's."""
    forward = type(module).forward
    return type(forward) is types.FunctionType and not is_library(forward)


def call_apart(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call what cannot be converted: run again for lanes that it leaves behind."""
    level = machine.level
    if level is None:
        return func(*args, **kwargs)
    waited = narrowed()
    things = (func, getattr(func, "__self__", None), *(getattr(func, "__closure__", None) or ()), *args)
    parts, own = [Parts((*things, *kwargs.values()), own) for own in (False, True)]
    if parts.before is None or own.before is None:
        raise Restart(level, cause=changed_inside())
    runs: list[None] = []
    try:
        return boundary(level, functools.partial(_counted, runs, func, *args, **kwargs), _joined)
    finally:
        # Each run has changed what the others did, or they may fail for that.
        kind = sys.exc_info()[0]
        if (waited or len(runs) > 1) and (kind is None or issubclass(kind, Exception)):
            if parts.changed() or (len(runs) > 1 and own.changed()):
                parts.begin_again()
                raise Restart(level, cause=changed_inside()) from None
            if len(runs) > 1 and reach_iterators([*parts.things, *own.things]):
                raise Restart(level, cause=iterator_shared()) from None


def _counted(runs: list[None], func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    runs.append(None)
    return _with_truths(func, *args, **kwargs)


def _joined(level: Any, target: Target, pieces: list[Lanes], values: list[Any]) -> Any:
    return join(level, target.lanes, pieces, values)
