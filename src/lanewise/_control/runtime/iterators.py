"""Iterators within reach where lanes part: what some lanes take from one would be gone for the others."""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

from lanewise._core.again.holdings import attributes_of, held, slots_of
from lanewise._core.again.libraries import of_library
from lanewise._core.parting.causes import Cause, cause_here
from lanewise._core.parting.lanes import Restart

# So many objects are looked at.
_MOST = 200
_PLAIN, _ITERATOR, _SEQUENCE, _MAPPING, _FUNCTION, _METHOD, _OBJECT, _MODULE = range(8)
# What every module has.
_OF_MODULES = frozenset(vars(nn.Module()))

# By type: how to look at an object.
_ways: dict[type, int] = {
    **dict.fromkeys((list, tuple, set, deque), _SEQUENCE),
    **dict.fromkeys((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), _METHOD),
    dict: _MAPPING,
    types.FunctionType: _FUNCTION,
    functools.partial: _FUNCTION,
}


def _way(kind: type) -> int:
    found = _ways.get(kind)
    if found is not None:
        return found
    library = of_library(kind.__module__)
    if hasattr(kind, "__next__"):
        found = _ITERATOR
    elif library:
        found = _PLAIN
    else:
        found = _MODULE if issubclass(kind, nn.Module) else _OBJECT
    if library:  # (Classes of the user's come and go.)
        _ways[kind] = found
    return found


def reach_iterators(things: Iterable[Any]) -> bool:
    """Whether one of the objects is an iterator, or has one."""
    pending = [thing for thing in things if _way(type(thing)) is not _PLAIN]
    seen: set[int] = set()
    for thing in pending:  # which grows on the way
        way = _way(type(thing))
        if way is _ITERATOR:
            return True
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        below = _below(thing, way)
        if len(pending) + len(below) <= _MOST:
            pending += [part for part in below if _way(type(part)) is not _PLAIN]
    return False


def _below(thing: Any, way: int) -> Any:
    """What an object holds."""
    if way is _SEQUENCE:
        return thing
    if way is _MAPPING:
        return thing.values()
    if way is _METHOD:
        return (thing.__self__,)
    if way is _FUNCTION:
        if type(thing) is functools.partial:
            return (thing.func, *thing.args, *thing.keywords.values())
        return [] if thing.__closure__ is None else [_content(cell) for cell in thing.__closure__]
    attributes = attributes_of(thing) or {}
    if way is _MODULE:
        return [value for name, value in attributes.items() if name not in _OF_MODULES]
    return [*attributes.values(), *[held(slot, thing) for slot in slots_of(type(thing))]]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def hold_iterators(variables: Any) -> bool:
    """Whether an iterator is within reach of the variables where lanes part: each lane would have one of its own."""
    return reach_iterators(
        [value for name, value in variables.items() if name[0] != "." and not name.startswith("_lw")]
    )


def refuse_iterators(level: Any, depth: int) -> None:
    """Where lanes part in a frame so far up: an iterator within its reach would be one for all of them."""
    variables: Any = sys._getframe(depth + 1).f_locals
    found = hold_iterators(variables)
    if type(variables) is dict:
        variables.clear()  # before Python 3.13 the frame keeps the dict, and what is in it
    if found:
        raise Restart(level, cause=iterator_shared())


def iterator_shared() -> Cause | None:
    """Why code has to run as written that has an iterator where lanes part."""
    return cause_here(
        "a variable holds an iterator, or an object that has one, where lanes part", "a list: list(iterator)"
    )
