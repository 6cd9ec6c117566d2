"""Whether a function leaves traces of how often it runs: what it prints, draws, changes, or has drawn from."""

import random
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._core.again.holdings import look
from lanewise._core.again.libraries import of_library
from lanewise._core.again.outside import Before, Reach, functions_of

# So many entries of objects are looked at.
_MOST = 5000

# By function: whether what comes with it may leave traces, and the modules in it, which may do so while they train. By
# class: whether its methods may.
_functions: "weakref.WeakKeyDictionary[Any, tuple[bool, list[weakref.ref]]]" = weakref.WeakKeyDictionary()
_classes: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()


def without_traces(func: Any, args: Iterable[Any]) -> list[Tensor] | None:
    """Where nothing but its result tells that a function has run with these arguments, or how often, as far as is seen.

    Returns:
        The tensors from outside that are within its reach, which it does not write to as far as is seen; None where
        there are traces.
    """
    args = [arg for arg in args if not isinstance(arg, Tensor)]
    reach = Reach(func, *args)
    if reach.writes or any(effects.shows for effects in reach.functions.values()):
        return None
    if reach.changes:
        before = Before([reach], args)
        if before.held or before.names or before.tensors:
            return None
    if args or type(func) is not types.FunctionType:
        found, modules = _objects_do(reach, args)
    elif func in _functions:
        found, modules = _functions[func]
    else:
        found, modules = _functions[func] = _objects_do(reach, args)
    if found or any(_trains(module()) for module in modules):
        return None
    return [thing for thing in reach.things if type(thing) is Tensor]


def _objects_do(reach: Reach, args: list[Any]) -> tuple[bool, list[weakref.ref]]:
    held = look([*args, *reach.roots()], _MOST)
    if held is None:
        return True, []
    things = [thing for thing, _, _ in held]
    modules = [weakref.ref(thing) for thing in things if isinstance(thing, nn.Module)]
    return any(_class_does(type(thing)) for thing in things), modules


def _trains(module: Any) -> bool:
    """Whether a module updates its buffers when it is called."""
    return module is not None and module.training and bool(module._buffers)


def _class_does(kind: type) -> bool:
    found = _classes.get(kind)
    if found is None:
        _classes[kind] = False  # while it is looked at
        found = hasattr(kind, "__next__") or issubclass(kind, (torch.Generator, random.Random))
        found = found or str(kind.__module__).startswith("numpy.random")
        if not found and not of_library(kind.__module__):
            reach = Reach(*functions_of(kind))
            found = reach.changes or reach.writes or any(each.shows for each in reach.functions.values())
        _classes[kind] = found
    return found
