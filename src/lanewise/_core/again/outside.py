"""What a function may change outside of it, so that what a run changed can be put back when the function starts again.

A function that changes no object pays nothing for that: its code is looked at once. One that may do so has what it can
reach looked at before each call: its arguments, what it has captured, and the globals that it names.
"""

import collections
import functools
import os
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._core.again.effects import CACHED, MUTATING, Effects, effects_of, is_bound, known, of_no_account
from lanewise._core.again.holdings import Held, attributes_of, look, put_back
from lanewise._core.again.libraries import is_library, of_library
from lanewise._core.again.unseen import unseen_in, unseen_of_class

# So many entries of objects are looked at before a call.
_MOST = 5000
# Tensors of so many elements are copied where they may be written to.
_SMALL = 1024
# Among so many, objects with methods of the user's are looked for.
_NEAR = 200
# So many functions and objects are followed from a function.
_MANY = 500
_CONTAINERS = frozenset({list, tuple, dict, set, collections.OrderedDict, collections.deque, collections.defaultdict})
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})
# What `contextmanager` makes of a generator: converted code sees it entered.
_CONTEXT = contextmanager(lambda: iter(())).__code__
# Methods that change an object which is new.
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__set_name__", "__init_subclass__", "__class_getitem__"})


class Reach:
    """What a function may change: functions that it may call, and objects that come with it.

    Attributes:
        functions: The function and those of the user's that it names or has captured.
        things: What it is bound to.
        bound: Names of the attributes that they bind, of classes and modules perhaps.
        by_name: Whether they may bind others.
        changes: Whether they may change anything.
        writes: Whether they may write to tensors in place.
    """

    __slots__ = ("functions", "things", "bound", "by_name", "changes", "writes", "_classes", "_contexts", "_pending")

    def __init__(self, *things: Any, verdict: bool = False) -> None:
        """`verdict`: only whether they change anything is asked."""
        self.functions: dict[types.FunctionType, Effects] = {}
        self.things: list[Any] = []
        self.bound: set[str] = set()
        self.changes = self.writes = self.by_name = False
        self._classes: set[type] = set()
        self._contexts: set[Any] = set()
        self._pending = list(things)
        followed: set[int] = set()
        for thing in self._pending:  # which grows on the way, and keeps what it has, so that no id is used again
            if verdict and self.changes:
                break
            if id(thing) not in followed:
                followed.add(id(thing))
                self._follow(thing)
            if len(followed) > _MANY:
                self.changes = True
                break
        del self._pending

    def _follow(self, thing: Any) -> None:
        kind = type(thing)
        if kind is types.FunctionType:
            if thing.__code__ is _CONTEXT:
                self._contexts.add(thing.__wrapped__)
            if hasattr(thing, "__wrapped__"):
                self._pending.append(thing.__wrapped__)
            if thing not in self.functions and not is_library(thing):
                self._read(thing)
        elif kind is CACHED:
            self._pending.append(thing.__wrapped__)
        elif kind is types.BuiltinFunctionType:
            if is_bound(thing):
                self.things.append(thing.__self__)
                self.changes = self.changes or thing.__name__ in MUTATING
        elif kind is types.MethodType:
            self._pending += [thing.__self__, thing.__func__]
        elif kind is functools.partial:
            self._pending += [thing.func, *thing.args, *thing.keywords.values()]
        elif kind is weakref.ref:
            self._pending.append(thing())
        elif issubclass(kind, types.ModuleType):
            if not of_library(thing.__name__):
                self.things.append(thing)
        elif issubclass(kind, Tensor):
            if kind is Tensor:
                self.things.append(thing)
        else:
            self.things.append(thing)
            self._classes |= {thing, kind} if issubclass(kind, type) else {kind}
            for changing in _changing(thing):
                if isinstance(changing, type):
                    self.changes = True
                    self._classes.add(changing)
                    self._pending += functions_of(changing)
                else:
                    self._pending.append(changing)

    def _read(self, func: types.FunctionType) -> None:
        variables = func.__globals__
        effects = self.functions[func] = effects_of(func.__code__, variables)
        self.changes = self.changes or effects.changes
        self.writes = self.writes or effects.writes
        self.by_name = self.by_name or effects.by_name
        self.bound |= effects.bound
        for cell in func.__closure__ or ():
            try:
                self._pending.append(cell.cell_contents)
            except ValueError:
                pass  # not bound yet
        if "environ" in effects.attributes:
            self._pending.append(os.environ)
        for name in effects.names:
            value = variables.get(name)
            if issubclass(type(value), types.ModuleType):
                self.things.append(value)
                found = [vars(value).get(attribute) for attribute in effects.attributes]
                self._pending += [each for each in found if not of_no_account(each)]
            elif not of_no_account(value):
                self._pending.append(value)

    def unseen(self) -> types.CodeType | None:
        """Code that may change objects where converted code does not see it (unseen.py), or None."""
        names = {func.__name__ for func, effects in self.functions.items() if effects.changes}
        kinds = [found for kind in self._classes if (found := unseen_of_class(kind)) is not None]
        for kind in kinds:
            if (code := kind.asked or kind.by_methods(names)) is not None:
                return code
        for func in self.functions.keys() - self._contexts:
            if (code := unseen_in(func.__code__, func.__globals__, names)) is not None:
                return code
        return None

    def roots(self) -> Iterable[Any]:
        """Where to look for objects that a call may change."""
        yield from self.things
        for func in self.functions:
            yield from func.__closure__ or ()
            yield from func.__defaults__ or ()
            yield from (func.__kwdefaults__ or {}).values()
            if func.__dict__:
                yield func.__dict__


# By class: whether a method of it may change objects.
_classes: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()
# By module: what `_changing` finds.
_modules: "weakref.WeakKeyDictionary[nn.Module, list[Any]]" = weakref.WeakKeyDictionary()


def _changing(thing: Any) -> list[Any]:
    """Classes with methods that may change objects, and functions, that an object is of or has."""
    if issubclass(type(thing), type):
        return [kind for kind in (thing, type(thing)) if _class_changes(kind)]
    if not issubclass(type(thing), nn.Module):
        return _found_below([thing], _NEAR)
    found = _modules.get(thing)
    if found is None:
        modules = list(thing.modules())
        found = _modules[thing] = _found_below(modules, _NEAR + 10 * len(modules))
    return found


def _found_below(pending: list[Any], most: int) -> list[Any]:
    """Such classes and functions among objects and what they hold, the nearest first, up to so many objects."""
    found: dict[Any, None] = {}
    seen: set[int] = set()
    for thing in pending:  # which grows on the way
        kind = type(thing)
        if (kind in _QUIET and not is_bound(thing)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        held: Any = ()
        if kind in _FUNCTIONS or is_bound(thing):
            found[thing] = None
        elif kind in _CONTAINERS:
            held = thing.values() if issubclass(kind, dict) else thing
        elif not of_library(kind.__module__):
            if _class_changes(kind):
                found[kind] = None
            held = (attributes_of(thing) or {}).values()
        if len(pending) + len(held) <= most:
            pending += held
    return list(found)


def _class_changes(kind: type) -> bool:
    if of_library(kind.__module__):
        return False
    found = _classes.get(kind)
    if found is None:
        with looking(kind) as first:
            if not first:
                return False
            unseen: Any = unseen_of_class(kind)
            found = unseen.asked is not None or unseen.making
            found = _classes[kind] = found or Reach(*functions_of(kind), verdict=True).changes
    return found


class _Looking(threading.local):
    """The classes that this thread is looking at."""

    def __init__(self) -> None:
        self.at: set[type] = set()


_looking = _Looking()


@contextmanager
def looking(kind: type) -> Iterator[bool]:
    """While a class is looked at, which may come to itself: whether this is the first look."""
    if kind in _looking.at:
        yield False
        return
    _looking.at.add(kind)
    try:
        yield True
    finally:
        _looking.at.discard(kind)


def functions_of(kind: type) -> list[Any]:
    """The methods of a class that is no library's, but for those that make an object and change no other."""
    found: list[Any] = []
    unseen = unseen_of_class(kind)
    making = unseen is not None and unseen.making
    for base in kind.__mro__:
        if of_library(base.__module__):
            continue
        for name, value in vars(base).items():
            if isinstance(value, property):
                found += [each for each in (value.fget, value.fset) if each is not None]
            elif isinstance(value, (staticmethod, classmethod)):
                found.append(value.__func__)
            elif isinstance(value, functools.cached_property):
                found.append(value.func)
            elif isinstance(value, types.FunctionType):
                if making or name not in _MAKING:
                    found.append(value)
            elif isinstance(getter := getattr(type(value), "__get__", None), types.FunctionType):
                found.append(getter)
    return found


# --- what it held before ----------------------------------------------------------------------------------------------


class _Unset:
    """In place of a global or an attribute that was not bound."""


class Before:
    """What objects outside held before a call.

    Attributes:
        held: Objects, and what they held.
        names: Classes, modules and dicts of globals, names in them, and what these stood for.
        tensors: Small tensors that may be written to, the versions they had, and copies.
        unseen: Code that may change objects where converted code does not see it (unseen.py), or None.
    """

    __slots__ = ("held", "names", "tensors", "unseen")

    def __init__(self, reaches: list[Reach], args: Iterable[Any]) -> None:
        self.unseen = next((code for reach in reaches if (code := reach.unseen()) is not None), None)
        roots = [*args, *[root for reach in reaches for root in reach.roots()]]
        self.held: list[Held] = look(roots, _MOST, whole=False)  # type: ignore[assignment]
        self.names: list[tuple[Any, str, Any]] = []
        kinds = {type(thing) for thing, _, _ in self.held}
        shared: list[Any] = []
        for reach in reaches:
            for func, effects in reach.functions.items():
                self._note(func.__globals__, effects.stored)
            kinds.update([each for each in reach.things if issubclass(type(each), type)])
            modules = [each for each in reach.things if issubclass(type(each), types.ModuleType)]
            classes = {base for kind in kinds for base in kind.__mro__ if not of_library(base.__module__)}
            for owner in (*classes, *modules):
                self._note(owner, {*reach.bound, *(vars(owner) if reach.by_name else ())})
            shared += [value for kind in classes for value in vars(kind).values() if _may_change(value)]
        if shared:
            self.held += look(shared, _MOST, whole=False) or ()
        self.tensors: list[tuple[Tensor, int, Tensor]] = []
        if any(reach.writes for reach in reaches):
            found = {id(part): part for parts in (roots, *[each[2] for each in self.held]) for part in parts}
            with torch.no_grad():
                self.tensors = [
                    (tensor, tensor._version, tensor.clone())
                    for tensor in found.values()
                    if type(tensor) is Tensor
                    and not tensor.requires_grad
                    and tensor.layout is torch.strided
                    and tensor.numel() <= _SMALL
                ]

    def _note(self, owner: Any, names: Iterable[str]) -> None:
        variables = owner if type(owner) is dict else vars(owner)
        self.names += [(owner, name, variables.get(name, _Unset)) for name in names]

    def put_back(self) -> None:
        """Make them hold it again."""
        with torch.no_grad():
            for tensor, version, copy in self.tensors:
                if tensor._version != version:
                    tensor.copy_(copy)
        for held in self.held:
            put_back(held)
        for owner, name, value in self.names:
            if type(owner) is dict:
                if value is not _Unset:
                    owner[name] = value
                else:
                    owner.pop(name, None)
            elif vars(owner).get(name, _Unset) is not value:
                if value is not _Unset:
                    setattr(owner, name, value)
                else:
                    delattr(owner, name)


# In place of a Reach, or None, before a function was looked at.
NOT_LOOKED_AT: Any = object()


def _may_change(value: Any) -> bool:
    """Whether an attribute of a class is an object that may change."""
    return type(value) in _CONTAINERS or not (issubclass(type(value), type) or of_library(type(value).__module__))


def reach_of(*funcs: Any) -> Reach | None:
    """What functions may change; None where they change no objects."""
    if _are_quiet([*funcs]):
        return None
    reach = Reach(*funcs)
    return reach if reach.changes else None


# Types of objects that change nothing, as far as they have been met.
_QUIET = {types.BuiltinFunctionType, Tensor, nn.Parameter, int, float, str, bool, type(None)}


def _are_quiet(pending: list[Any]) -> bool:
    """Whether it is known at once that functions change no objects, and have none."""
    seen: set[types.FunctionType] = set()
    for thing in pending:  # which grows on the way
        kind = type(thing)
        if kind is not types.FunctionType:
            if (kind in _QUIET and not is_bound(thing)) or (kind is type and not _class_changes(thing)):
                continue
            return False
        if thing in seen:
            continue
        seen.add(thing)
        effects = known.get(thing.__code__)
        if thing.__dict__ or len(seen) > _MANY:
            return False
        if effects is None:
            if is_library(thing):
                continue
            return False
        if effects.changes:
            return False
        for cell in thing.__closure__ or ():
            try:
                pending.append(cell.cell_contents)
            except ValueError:
                return False
        variables = thing.__globals__
        for name in effects.names:
            pending.append(variables.get(name))
    return True


def held_before(reach: Reach | None, args: Iterable[Any]) -> Before | None:
    """What objects hold before a call of a function with these arguments, where it or they may change them."""
    args = [arg for arg in args if not isinstance(arg, Tensor)]
    found = [] if reach is None else [reach]
    if args and any(map(_changing, args)):
        found.append(Reach(*args))
    return Before(found, args) if any(each.changes for each in found) else None
