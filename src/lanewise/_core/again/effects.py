"""What the code of a function does to objects, read from its instructions."""

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from lanewise._core.again.fresh import (
    CALLS,
    NOTHING,
    Own,
    assigns_to,
    loads,
    makes_containers,
    makes_tensors,
    only,
    otherwise,
    stores,
    writes_to,
)
from lanewise._core.again.libraries import is_library, of_library

# Methods that change what they are called on.
MUTATING = frozenset(
    "append extend insert pop remove clear update add discard setdefault popitem sort reverse appendleft popleft "
    "extendleft rotate intersection_update difference_update symmetric_difference_update send throw write "
    "writelines move_to_end".split()
)
# Other names of what changes objects that are given to it, or have it.
CHANGING = MUTATING | frozenset(
    "setattr delattr setitem delitem heappush heappop heapify heapreplace heappushpop insort insort_left insort_right "
    "shuffle subtract train eval put get_nowait put_nowait exec add_module load_state_dict "
    "iadd iconcat ior iand isub ixor imul seek truncate __setattr__ __delattr__ __setitem__ __delitem__".split()
)
# Those among them that write to tensors.
_WRITING = frozenset("setitem iadd ior iand isub ixor imul".split())
# Names of what shows how often it is called, or leaves gradients.
_SHOWING = frozenset(
    "print pprint input breakpoint set_trace write writelines warn debug info warning error exception critical random "
    "rand randn randint randperm seed manual_seed backward zero_grad step now batch_norm instance_norm "
    "native_batch_norm exec eval".split()
)
# Names of what gives the memory of a tensor to code that may write to it unseen, and of what else writes to arrays.
_MEMORY = frozenset("numpy asarray from_dlpack to_dlpack data_ptr untyped_storage storage".split())
TO_ARRAYS = frozenset(
    "fill fill_diagonal copyto putmask place put put_along_axis partition sort resize byteswap itemset setflags "
    "setfield at shuffle".split()
)
# Instructions that put a new container or a number on the stack, and those that only move what is there.
MADE = frozenset(
    "BUILD_LIST BUILD_MAP BUILD_SET BUILD_CONST_KEY_MAP LIST_EXTEND LIST_APPEND DICT_UPDATE DICT_MERGE SET_UPDATE "
    "MAP_ADD SET_ADD LOAD_CONST LOAD_SMALL_INT BINARY_OP COMPARE_OP UNARY_NEGATIVE".split()
)
# Those among the former that give a tensor for a tensor.
_OF_TENSORS = frozenset("LOAD_CONST BINARY_OP COMPARE_OP UNARY_NEGATIVE".split())
_IN_PLACE = frozenset({"+=", "|=", "&=", "-=", "^=", "*="})
_CONTEXT = frozenset({"ctx"})
# Methods that give a tensor the memory of another one, or a function that is called.
_REPLACING = frozenset({"set_", "map_", "map2_", "apply_"})
_BY_NAME = frozenset({"getattr", "methodcaller"})
_BY_NAME_GIVEN = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})


class Effects:
    """What code does to objects, that of functions inside it too.

    Attributes:
        changes: Whether it may change some that it has not made.
        names: Globals that it reads, but for functions of builtins and libraries.
        stored: Globals that it binds.
        attributes, bound: Names of attributes, and of those that it binds.
        by_name: Whether it may bind attributes whose names it is given.
        writes: Whether it may write to tensors in place.
        shows: Whether it may show in other ways how often it runs: it prints, draws, pulls gradients back, or writes to
            the memory of a tensor unseen.
    """

    __slots__ = ("changes", "names", "stored", "attributes", "bound", "by_name", "writes", "shows")

    def __init__(self, code: types.CodeType, variables: dict, around: Own = NOTHING) -> None:
        self.changes = False
        self.writes = not _WRITING.isdisjoint(code.co_names)
        self.by_name = not _BY_NAME_GIVEN.isdisjoint(code.co_names)
        self.shows = not _SHOWING.isdisjoint(code.co_names)
        self.names: set[str] = set()
        self.stored: set[str] = set()
        self.attributes: set[str] = set()
        self.bound: set[str] = set()
        steps = steps_of(code)
        packed = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + packed]
        around = around.seen_in(code)
        cells = frozenset(code.co_cellvars).difference(given)

        def made(kinds: frozenset[str], places: frozenset[int] = frozenset()) -> dict[str, int]:
            found = only(steps, kinds, places, cells)
            others = {name for each in inner for name in otherwise(steps_of(each), kinds, each)}
            return {name: place for name, place in found.items() if name not in others}

        inner = list(_codes_in(code)) if cells else []
        own = made(MADE, makes_containers(steps)).keys() - given
        tensors = made(_OF_TENSORS, makes_tensors(steps)).keys() - own - set(given)
        results = made(MADE | CALLS)
        all_tensors = tensors | around.tensors
        if not _BY_NAME.isdisjoint(code.co_names):
            texts = [const for const in code.co_consts if type(const) is str]
            self.changes = not CHANGING.isdisjoint(texts)
            self.writes = self.writes or any(text[-1:] == "_" and text[:2] != "__" for text in texts)
        if "globals" in code.co_names:
            self.names |= {const for const in code.co_consts if type(const) is str and const in variables}
        memory = not _MEMORY.isdisjoint(code.co_names)
        to_array = any(type(const) is tuple and "out" in const for const in code.co_consts)
        self.writes = self.writes or to_array  # as the argument of that name, perhaps
        to_array = to_array or not TO_ARRAYS.isdisjoint(code.co_names)
        to_file = any(type(const) is tuple and "file" in const for const in code.co_consts)
        for place, step in enumerate(steps):
            kind, name = step.opname, step.argval
            before = steps[place - 1] if place else None
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.changes = self.changes or name in CHANGING or (name == "print" and to_file)
                if name not in variables and hasattr(builtins, name):
                    continue
                if not of_no_account(variables.get(name)):
                    self.names.add(name)
            elif kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.stored.add(name)
                self.changes = True
            elif kind in ("STORE_DEREF", "DELETE_DEREF"):
                self.changes = self.changes or name in code.co_freevars
            elif kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                self.attributes.add(name)
                if name[-1] == "_" and name[:2] != "__":
                    self.changes = self.changes or name in _REPLACING or not writes_to(steps, place, tensors)
                    self.writes = self.writes or name in _REPLACING or not writes_to(steps, place, all_tensors)
                if name in CHANGING or name == "set" or name.startswith("register_"):
                    self.changes = self.changes or not loads(before, own)
            elif kind in ("STORE_ATTR", "DELETE_ATTR"):
                self.bound.add(name)
                # (The context of a custom Function is new in each call.)
                self.changes = self.changes or not loads(before, _CONTEXT)
            elif kind in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
                inside = assigns_to(steps, place, own) or writes_to(steps, place, tensors)
                self.changes = self.changes or not inside
                inside = inside or assigns_to(steps, place, around.containers) or writes_to(steps, place, all_tensors)
                self.writes = self.writes or not inside
            elif kind == "BINARY_OP" and step.argrepr in _IN_PLACE:
                to_array = True
                after = steps[place + 1] if place + 1 < len(steps) else None
                # (Of what a function has returned, tensors are written to like that, hardly ever lists of others.)
                name = after.argval if stores(after) else ""  # type: ignore[union-attr]
                inside = results.get(name, place) < place or writes_to(steps, place, tensors)
                self.changes = self.changes or not inside
                inside = inside or name in around.results or writes_to(steps, place, all_tensors)
                self.writes = self.writes or not inside
        self.shows = self.shows or (memory and (to_array or self.changes))
        # What functions inside do to these is a change, which may be unseen (unseen.py), but writes to nothing else.
        around = Own(around.containers | own, around.tensors | tensors, around.results.union(results))
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                below = Effects(const, variables, around) if const.co_freevars else effects_of(const, variables)
                self.changes = self.changes or below.changes
                self.writes = self.writes or below.writes
                self.by_name = self.by_name or below.by_name
                self.shows = self.shows or below.shows
                self.names |= below.names
                self.stored |= below.stored
                self.attributes |= below.attributes
                self.bound |= below.bound


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from _codes_in(const)


# Instructions besides jumps that go on elsewhere, or at which another frame does.
_BRANCHES = frozenset("FOR_ITER SEND YIELD_VALUE RETURN_VALUE RAISE_VARARGS".split())


class _Step(NamedTuple):
    """An instruction.

    Attributes:
        effect: How many more values are on the stack then.
        jumps: Whether it may go on elsewhere.
        target: Whether others go on there.
    """

    opname: str
    argval: Any
    argrepr: str
    effect: int
    jumps: bool
    target: bool


def steps_of(code: types.CodeType) -> list[_Step]:
    """The instructions of code, each doing one thing, by the names of Python 3.12."""
    found = []
    for step in dis.get_instructions(code):
        kind = step.opname.replace("_BORROW", "")
        if kind in ("STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST", "LOAD_FAST_LOAD_FAST"):
            kinds = kind[:-5].split("_FAST_")
            for each, name in zip(kinds, step.argval):
                target = step.is_jump_target and each == kinds[0]
                found.append(_Step(f"{each}_FAST", name, name, 1 if each == "LOAD" else -1, False, target))
        elif kind not in ("CACHE", "EXTENDED_ARG"):
            effect = dis.stack_effect(step.opcode, step.arg, jump=False)
            stack = effect, "JUMP" in kind or kind in _BRANCHES, step.is_jump_target
            old = kind.startswith(("BINARY_", "INPLACE_")) and kind not in (
                "BINARY_OP",
                "BINARY_SUBSCR",
                "BINARY_SLICE",
            )
            if old:  # before Python 3.11
                found.append(_Step("BINARY_OP", None, "+=" if kind.startswith("INPLACE_") else "+", *stack))
            else:
                kind = "BINARY_SUBSCR" if kind == "BINARY_OP" and step.argrepr == "[]" else kind
                found.append(_Step(kind, step.argval, step.argrepr, *stack))
    return found


# What `functools.lru_cache` makes of a function.
CACHED = type(functools.lru_cache(abs))


def is_bound(value: Any) -> bool:
    """Whether it is a method of an object that a builtin function stands for, such as `[].append`."""
    if type(value) is not types.BuiltinFunctionType:
        return False
    owner = value.__self__
    return owner is not None and not isinstance(owner, (types.ModuleType, type))


def of_no_account(value: Any) -> bool:
    """Whether a global is part of a library."""
    kind = type(value)
    if kind is types.FunctionType:
        # (A wrapper of a library's, such as that of `contextmanager`, may be of a function that is none.)
        return is_library(value) and not hasattr(value, "__wrapped__")
    if issubclass(kind, types.ModuleType):
        return of_library(value.__name__)
    if issubclass(kind, type):
        return of_library(value.__module__)
    return kind is types.BuiltinFunctionType and not is_bound(value)


# By code: what it does. (What it names may have become something else since, but for functions of libraries.)
known: dict[types.CodeType, Effects] = {}


def effects_of(code: types.CodeType, variables: dict) -> Effects:
    """What code does, with the globals that it is run with."""
    found = known.get(code)
    if found is None:
        found = known[code] = Effects(code, variables)
    return found
