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

# By function, and by class: whether what comes with it may leave traces, or its methods.
_functions: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()
_classes: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()


def leaves_traces(func: Any, args: Iterable[Any]) -> bool:
    """Whether something but its result may tell that a function has run with these arguments, or how often."""
    args = [arg for arg in args if not isinstance(arg, Tensor)]
    reach = Reach(func, *args)
    if reach.writes or any(effects.shows for effects in reach.functions.values()):
        return True
    if reach.changes:
        before = Before([reach], args)
        if before.held or before.names or before.tensors:
            return True
    if args or type(func) is not types.FunctionType:
        return _objects_do(reach, args)
    found = _functions.get(func)
    if found is None:
        found = _functions[func] = _objects_do(reach, args)
    return found


def _objects_do(reach: Reach, args: list[Any]) -> bool:
    held = look([*args, *reach.roots()], _MOST)
    return held is None or any(_does(thing) for thing, _, _ in held)


def _does(thing: Any) -> bool:
    if isinstance(thing, nn.Module) and thing.training and thing._buffers:
        return True
    return _class_does(type(thing))


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
