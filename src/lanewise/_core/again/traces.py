"""Whether a function leaves traces of how often it runs: what it prints, draws, changes, or has drawn from."""

import collections
import random
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._core.again.holdings import look
from lanewise._core.again.libraries import of_library
from lanewise._core.again.outside import Before, Reach, functions_of, looking
from lanewise._torch_compat import has_module_hooks

# So many entries of objects are looked at.
_MOST = 5000

# By class: whether its methods may leave traces.
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
    # Each time: what objects hold, and whether a module trains, may be other than before.
    held = look([*args, *reach.roots()], _MOST)
    if held is None or any(_does(thing) for thing, _, _ in held):
        return None
    return [thing for thing in reach.things if type(thing) is Tensor]


def _does(thing: Any) -> bool:
    if isinstance(thing, nn.Module) and (has_module_hooks(thing) or (thing.training and thing._buffers)):
        return True
    if isinstance(thing, collections.defaultdict) and thing.default_factory is not None:
        return True  # it keeps what it is asked for
    return _class_does(type(thing))


def _class_does(kind: type) -> bool:
    found = _classes.get(kind)
    if found is None:
        with looking(kind) as first:
            if not first:
                return False
            found = hasattr(kind, "__next__") or issubclass(kind, (torch.Generator, random.Random))
            found = found or str(kind.__module__).startswith("numpy.random")
            if not found and not of_library(kind.__module__):
                reach = Reach(*functions_of(kind))
                found = reach.changes or reach.writes or any(each.shows for each in reach.functions.values())
            _classes[kind] = found
    return found
