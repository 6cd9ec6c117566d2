"""Code that changes objects where converted code does not see it: Python calls it by itself, or it makes an object.

What it changes, it changes for all lanes, also while some wait. A function that may come to such code runs as it was
written.
"""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

from lanewise._core.again.effects import CHANGING, MADE, effects_of, steps_of
from lanewise._core.again.fresh import loads, only
from lanewise._core.again.libraries import is_library, of_library

# Methods that make an object, which is for the running lanes to change.
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
# Methods of statements in which converted code sees that their object changes, and of iterators, which each lane has
# for itself.
_SEEN = frozenset(
    f"__{name}__"
    for name in "setattr delattr setitem delitem next "
    "iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior".split()
)
# Methods that are converted where they are called, and one that is called at any time.
_CALLED = frozenset({"__call__", "__del__"})
# Methods that stay as they are written where their class is made in converted code.
ANSWERS = frozenset(
    "__bool__ __bytes__ __complex__ __contains__ __float__ __format__ __hash__ __index__ __int__ __len__ "
    "__length_hint__ __repr__ __str__".split()
)

# How Python comes to a function: because it is called; by itself; by itself, to keep what it gives; in a statement that
# shows what changes; where an object is made; by `with`.
_AS_CALLED, _BY_ITSELF, _KEEPING, _STATED, _IN_MAKING, _AS_CONTEXT = range(6)
# Context managers of the standard library that change nothing.
_QUIET_CONTEXTS = frozenset({contextlib.nullcontext, contextlib.suppress})


class Unseen:
    """What the methods of a class may change unseen.

    Attributes:
        asked: Code that Python comes to by itself, and that may change objects, or None.
        making: Whether to make an object may change others.
        context: Whether to enter or leave it as a context may change objects.
        asks: Such code, also where it makes an object, and the attributes of other objects that it asks for.
    """

    __slots__ = ("asked", "making", "context", "asks")

    def __init__(self, kind: type) -> None:
        maker = [base for base in inspect.getmro(type(kind)) if not of_library(base.__module__)]
        bases = [base for base in kind.__mro__ if not of_library(base.__module__)]
        functions = [found for base in bases for name, value in vars(base).items() for found in _functions(name, value)]
        names = {name for name, _, _ in functions}
        calls = [vars(base)["__call__"] for base in maker if "__call__" in vars(base)]
        functions += [("__call__", func, _IN_MAKING) for value in calls for _, func, _ in _functions("__call__", value)]
        effects = {func: effects_of(func.__code__, func.__globals__) for _, func, _ in functions}
        changing = {name for name, func, how in functions if how is _KEEPING or effects[func].changes}
        others = {name for name, func, _ in functions if effects[func].changes and _changes_others(func.__code__)}
        for found in (changing, others):
            before = -1
            while len(found) > before:  # and those that call such methods
                before = len(found)
                found |= {name for name, func, how in functions if effects[func].attributes & found}
        limits = {_BY_ITSELF: changing, _KEEPING: changing, _STATED: others}
        self.asked = next((func.__code__ for name, func, how in functions if name in limits.get(how, ())), None)
        self.making = any(how is _IN_MAKING and name in others for name, _, how in functions)
        self.context = any(how is _AS_CONTEXT and name in changing for name, _, how in functions)
        self.asks = [
            (func.__code__, effects[func].attributes - names) for _, func, how in functions if how is not _AS_CALLED
        ]

    def by_methods(self, names: set[str]) -> types.CodeType | None:
        """Code that Python comes to by itself, and that asks other objects for attributes with some names."""
        return next((code for code, attributes in self.asks if not names.isdisjoint(attributes)), None)


# By class.
_classes: "weakref.WeakKeyDictionary[type, Unseen]" = weakref.WeakKeyDictionary()


def unseen_of_class(kind: type) -> Unseen | None:
    """What the methods of a class may change unseen; None for those of a library."""
    if of_library(kind.__module__):
        return None
    found = _classes.get(kind)
    if found is None:
        found = _classes[kind] = Unseen(kind)
    return found


def context_changes(manager: Any) -> bool:
    """Whether a context manager may change objects where it is entered or left."""
    kind = type(manager)
    if kind is contextlib._GeneratorContextManager:
        code, variables = manager.gen.gi_code, manager.gen.gi_frame.f_globals
        return not of_library(str(variables.get("__name__"))) and effects_of(code, variables).changes
    found = unseen_of_class(kind)
    return found.context if found is not None else kind.__module__ == "contextlib" and kind not in _QUIET_CONTEXTS


def _functions(name: str, value: Any) -> Iterator[tuple[str, types.FunctionType, int]]:
    """The function of an attribute of a class, if it has one of the user's, and how Python comes to it."""
    how = _AS_CALLED
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value, how = value.fget, _BY_ITSELF
    elif isinstance(value, functools.cached_property):
        value, how = value.func, _KEEPING
    elif not isinstance(value, types.FunctionType) and not of_library(type(value).__module__):
        value, how = getattr(type(value), "__get__", None), _BY_ITSELF
    if not isinstance(value, types.FunctionType) or is_library(value):
        return
    if how is _AS_CALLED:
        special = name[:2] == name[-2:] == "__" and name not in _CALLED
        if name in _MAKING:
            how = _IN_MAKING
        elif name in _SEEN:
            how = _STATED
        elif name in ("__enter__", "__exit__"):
            how = _AS_CONTEXT
        elif special or value.__code__.co_flags & inspect.CO_GENERATOR:
            how = _BY_ITSELF
    yield name, value, how


def _changes_others(code: types.CodeType) -> bool:
    """Whether a method may change other objects than its own, and those that it has given it: `self.rows = []`."""
    steps = steps_of(code)
    own = only(steps, MADE).keys() - code.co_varnames[: code.co_argcount]
    first = frozenset(code.co_varnames[: bool(code.co_argcount)])
    given = {
        step.argval
        for place, step in enumerate(steps)
        if step.opname == "STORE_ATTR" and loads(steps[place - 1], first) and steps[place - 2].opname in MADE
    }
    for place, step in enumerate(steps):
        name, before = step.argval, steps[place - 1] if place else None
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return True
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
            return True
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in CHANGING:
            return True
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in CHANGING:
            # (`object.__setattr__(self, ...)` is how a frozen object is made.)
            plain = before is not None and str(before.argval).endswith(("object__", "object"))
            if not (plain or loads(before, own) or _is_given(steps, place - 1, first, given)):
                return True
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            if not (loads(before, first) or _is_augmented(steps, place, first)):
                return True
        if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            if not (loads(steps[place - 2], own) or _is_given(steps, place - 2, first, given)):
                return True
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return any(effects_of(each, {}).changes for each in inner)


def _is_given(steps: list, place: int, first: frozenset[str], given: set[str]) -> bool:
    """Whether an instruction loads an attribute of the first argument that it has been given."""
    return (
        place > 0
        and steps[place].opname == "LOAD_ATTR"
        and steps[place].argval in given
        and loads(steps[place - 1], first)
    )


def _is_augmented(steps: list, place: int, first: frozenset[str]) -> bool:
    """Whether the attribute that an instruction binds is that of the first argument, changed: `self.n += 1`."""
    read = next(
        (
            at
            for at in range(place - 1, 1, -1)
            if steps[at].opname == "LOAD_ATTR" and steps[at].argval == steps[place].argval
        ),
        0,
    )
    return steps[place - 1].opname in ("SWAP", "ROT_TWO") and loads(steps[read - 2], first)


def unseen_in(code: types.CodeType, variables: dict, names: set[str]) -> types.CodeType | None:
    """Code in a function, or its own, that runs unseen and may change objects: that of a generator, say.

    `names`: of methods that may do so.
    """
    if code not in _codes:
        _codes[code] = list(_unseen_codes(code, variables))
    return next((each for each, surely, asks in _codes[code] if surely or not names.isdisjoint(asks)), None)


# By code: that in it, or its own, which runs unseen; whether it may change objects, and the attributes it asks for.
_codes: dict[types.CodeType, list[tuple[types.CodeType, bool, set[str]]]] = {}


def _unseen_codes(code: types.CodeType, variables: dict) -> Iterator[tuple[types.CodeType, bool, set[str]]]:
    of_class = "__qualname__" in code.co_names and "__module__" in code.co_names
    if code.co_flags & inspect.CO_GENERATOR and code.co_name != "<genexpr>":
        effects = effects_of(code, variables)
        yield code, effects.changes, effects.attributes
    elif not {"exec", "eval"}.isdisjoint(code.co_names) or (of_class and "cached_property" in code.co_names):
        yield code, True, set()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if of_class and inner.co_name in ANSWERS:
                effects = effects_of(inner, variables)
                yield inner, effects.changes, effects.attributes
            yield from _unseen_codes(inner, variables)
