"""What stands in for Python's own functions where lanes may part: `int(x)`, `range(n)`, `max(a, b)`, `math.exp(a)`.

Each does what the original does where no argument has lanes.
"""

import collections
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.rewriting.expressions import NUMBERS
from lanewise._control.runtime.callees import fn, replaced, replaced_methods
from lanewise._control.runtime.changes import changes, kept_entry, keyed
from lanewise._control.runtime.iterators import refuse_iterators
from lanewise._control.runtime.merging import join
from lanewise._control.runtime.number_classes import Several
from lanewise._control.runtime.numbers import (
    DTYPES,
    LaneNumber,
    expressed,
    for_each_lane,
    kind_of,
    nested_numbers,
    number_of,
    one_number,
)
from lanewise._control.runtime.tensor_calls import call_with_numbers, real_part
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import decide, given_to_running
from lanewise._core.parting.lanes import Restart, child, machine
from lanewise._core.plane import Plane
from lanewise._core.python.subscripts import get_item
from lanewise._core.python.surface import Surface
from lanewise._core.recording.leaf_gradients import gradient_before
from lanewise._core.short.hot import PLAIN
from lanewise.errors import uncounted


def stands_for(*functions: Any) -> Callable:
    """Register what stands in for functions."""

    def register(stand_in: Callable) -> Callable:
        for function in functions:
            replaced[function] = stand_in
        return uncounted(stand_in)

    return register


def with_lanes(value: Any) -> bool:
    """Whether a value may differ from lane to lane."""
    return isinstance(value, (LaneNumber, Plane))


def as_number(value: Any) -> Any:
    """A tensor with one element as a number; numbers as they are."""
    return number_of(value) if isinstance(value, Tensor) else value


def _is_several(args: tuple) -> bool:
    return len(args) == 1 and isinstance(args[0], Several)


# --- conversions -----------------------------------------------------------------------------------------------------


def _converted(value: Any, kind: type, dtype: torch.dtype) -> Any:
    number = as_number(value if kind is complex else real_part(value, kind))
    if not isinstance(number, LaneNumber):
        return kind(number)
    if number.kind is kind:
        return number
    if kind is not complex and number.kind is complex:
        raise TypeError(f"{kind.__name__}() argument must be a string or a real number, not 'complex'")
    return expressed(LaneNumber(kind, number.value.to(dtype)), kind, number)


@stands_for(int)
def int_(*args: Any) -> Any:
    """`int(x)`"""
    if len(args) != 1 or not with_lanes(args[0]):
        return Several.each_kind(int_, *args) if _is_several(args) else int(*args)
    number = as_number(real_part(args[0], int))
    return number.__trunc__() if isinstance(number, LaneNumber) else int(number)


@stands_for(float)
def float_(*args: Any) -> Any:
    """`float(x)`"""
    if len(args) != 1 or not with_lanes(args[0]):
        return Several.each_kind(float_, *args) if _is_several(args) else float(*args)
    return _converted(args[0], float, torch.float64)


@stands_for(complex)
def complex_(*args: Any) -> Any:
    """`complex(x)`"""
    if len(args) != 1 or not with_lanes(args[0]):
        return Several.each_kind(complex_, *args) if _is_several(args) else complex(*args)
    return _converted(args[0], complex, torch.complex128)


@stands_for(bool)
def bool_(*args: Any) -> Any:
    """`bool(x)`"""
    if len(args) != 1 or not with_lanes(args[0]):
        return Several.each_kind(bool_, *args) if _is_several(args) else bool(*args)
    return as_number(args[0]) != 0


def _item(tensor: Any) -> Any:
    tensor._check_alive("item()")
    return number_of(tensor)


def _tolist(tensor: Any) -> Any:
    tensor._check_alive("tolist()")
    return nested_numbers(tensor)


replaced_methods[Surface.item] = _item
replaced_methods[Surface.tolist] = _tolist


# --- containers with keys --------------------------------------------------------------------------------------------


@stands_for(set)
def set_(*args: Any) -> set:
    """`set(entries)`"""
    return set(map(one_number, *args)) if args else set()


@stands_for(frozenset)
def frozenset_(*args: Any) -> frozenset:
    """`frozenset(entries)`"""
    return frozenset(map(one_number, *args)) if args else frozenset()


@stands_for(dict)
def dict_(*args: Any, **kwargs: Any) -> dict:
    """`dict(pairs)`"""
    if args and not hasattr(args[0], "keys"):
        return dict([(one_number(key), value) for key, value in args[0]], **kwargs)
    return dict(*args, **kwargs)


# --- types -----------------------------------------------------------------------------------------------------------


@stands_for(isinstance)
def isinstance_(thing: Any, kinds: Any) -> bool:
    """`isinstance(thing, kinds)`"""
    if type(thing) is LaneNumber:
        return isinstance(thing.kind(0), kinds)
    return thing.isinstance(kinds) if issubclass(type(thing), Several) else isinstance(thing, kinds)


@stands_for(type)
def type_(*args: Any, **kwargs: Any) -> Any:
    """`type(thing)`"""
    if len(args) == 1:
        thing = args[0].resolve() if _is_several(args) else args[0]
        return thing.kind if type(thing) is LaneNumber else type(thing)
    return type(*args, **kwargs)


@stands_for(next)
def next_(iterator: Any, *default: Any) -> Any:
    """`next(iterator)`, which changes the iterator for all lanes."""
    return next(changes(iterator), *default)


# --- functions of functions ------------------------------------------------------------------------------------------


def _calling(function: Callable) -> Callable:
    """A function whose first argument is called, or its `key`."""

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]):
            args = (fn(args[0]), *args[1:])
        if kwargs.get("key") is not None:
            kwargs["key"] = fn(kwargs["key"])
        return function(*args, **kwargs)

    return uncounted(stand_in)


for _function in (map, filter, functools.reduce):
    replaced[_function] = _calling(_function)


@stands_for(sorted)
def sorted_(entries: Any, *, key: Any = None, reverse: bool = False) -> list:
    """`sorted(entries)`: of numbers, for all lanes at once."""
    entries = list(entries)
    if machine.level is None or with_lanes(reverse):
        return sorted(entries, key=key, reverse=reverse)
    if key is None:
        return _ordered(entries, entries, bool(reverse)) or sorted(entries, reverse=reverse)
    keys = list(map(fn(key), entries))
    ordered = _ordered(entries, keys, bool(reverse))
    if ordered is not None:
        return ordered
    return [entries[place] for place in sorted(range(len(entries)), key=keys.__getitem__, reverse=reverse)]


def _ordered(numbers: list, keys: list, reverse: bool) -> list | None:
    """Numbers of one kind in the order of their keys in each lane; None where they have none."""
    if not any(type(key) is LaneNumber for key in keys):
        return None
    rows = _rows_of(keys)
    if rows is None or (rows.is_floating_point() and decide(machine.level, rows.isnan().any()) is not False):
        return None
    ordered, order = rows.sort(dim=0, stable=True, descending=reverse)
    kind: Any = kind_of(numbers[0])
    if numbers is not keys:
        rows = _rows_of(numbers)
        if rows is None:
            return None
        ordered = rows.gather(0, order)
    return [LaneNumber(kind, row) for row in ordered.unbind()]


def _rows_of(numbers: list) -> Tensor | None:
    """Numbers of one kind that has an order, as a tensor `[n]`; None for anything else."""
    kinds = {kind_of(number) for number in numbers}
    if len(kinds) != 1 or not kinds <= {bool, int, float}:
        return None
    if any(type(number) is int and abs(number) >= 2**63 for number in numbers):
        return None
    (kind,) = kinds
    with on_plane(None):
        parts = [n.value if type(n) is LaneNumber else torch.tensor(n, dtype=DTYPES[kind]) for n in numbers]
    return torch.stack(parts)


# --- choices ---------------------------------------------------------------------------------------------------------


def _extreme(function: Callable, better: Callable, keep: int = 0) -> Callable:
    def pick(best: Any, entry: Any, key: Any, keep: int) -> Any:
        verdict = better(key(entry), key(best)) if key is not None else better(entry, best)
        level = machine.level
        if isinstance(verdict, Several):
            verdict = verdict.settled(level)
        parted: Any = bool(verdict) if not with_lanes(verdict) else None
        if parted is None:
            parted = decide(level, verdict.value if isinstance(verdict, LaneNumber) else verdict)
        if parted is True:
            return entry
        if parted is False:
            return best
        base = level.lanes
        pieces = [child(base, positions) for positions in parted]
        return join(level, base, pieces, [entry, best], keep)

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        key = kwargs.get("key")
        entries = list(args[0]) if len(args) == 1 else list(args)
        if not entries or not (key is not None or any(with_lanes(e) or isinstance(e, Several) for e in entries)):
            return function(entries, **kwargs) if len(args) == 1 else function(*args, **kwargs)
        key = None if key is None else fn(key)
        best = entries[0]
        for entry in entries[1:]:
            best = pick(best, entry, key, keep if len(entries) == 2 else 0)
        if key is None and type(best) is LaneNumber:
            return expressed(LaneNumber(best.kind, best.value, best.bound), function, *entries)
        return best

    return stand_in


replaced[max] = greatest = _extreme(max, operator.gt)
replaced[min] = least = _extreme(min, operator.lt)
# Of a number and a tensor: each in its own lanes.
greatest_kept, least_kept = _extreme(max, operator.gt, NUMBERS), _extreme(min, operator.lt, NUMBERS)


def _quantifier(function: Callable, ends: bool) -> Callable:
    @functools.wraps(function)
    def stand_in(entries: Any) -> Any:
        level = machine.level
        base = level.lanes
        pieces: list = []
        for entry in entries:
            verdict = decide(level, entry.value if isinstance(entry, LaneNumber) else entry)
            if verdict is ends:
                break
            if isinstance(verdict, tuple):
                refuse_iterators(level, 1)
                lanes = level.lanes
                pieces.append(child(lanes, verdict[not ends]))
                level.lanes = child(lanes, verdict[ends])
        else:
            pieces.append(level.lanes)
            return join(level, base, pieces, [ends] * (len(pieces) - 1) + [not ends])
        pieces.append(level.lanes)
        return join(level, base, pieces, [ends] * len(pieces))

    return stand_in


replaced[any] = _quantifier(any, True)
replaced[all] = _quantifier(all, False)


# --- places ----------------------------------------------------------------------------------------------------------

_PLAIN_INDEX = frozenset({int, str, type(None), type(Ellipsis), bool})


def entry_at(thing: Any, index: Any) -> Any:
    """`thing[index]`"""
    if isinstance(thing, collections.defaultdict) and not isinstance(index, LaneNumber):
        return kept_entry(thing, index)
    if type(index) in _PLAIN_INDEX or machine.level is None:
        return thing[index]
    if isinstance(thing, Tensor):
        return call_with_numbers(get_item, thing, index)
    if isinstance(index, Plane) and isinstance(thing, (list, tuple, range, str)):
        index = number_of(index)
    if isinstance(index, Several):
        return Several.each_kind(entry_at, thing, index)
    if not isinstance(index, LaneNumber) or not isinstance(thing, (list, tuple, range, dict)):
        return thing[index]
    level = machine.level
    base = level.lanes
    pieces, values = [], []
    while True:
        lanes = level.lanes
        value = index.resolve()
        values.append(kept_entry(thing, value) if isinstance(thing, collections.defaultdict) else thing[value])
        pieces.append(level.lanes)
        if level.lanes is lanes:
            return join(level, base, pieces, values)
        verdict = decide(level, _elsewhere(level, lanes, index, value))
        level.lanes = child(lanes, verdict[0])


def _elsewhere(level: Any, lanes: Any, index: LaneNumber, value: Any) -> Tensor:
    level.lanes = lanes
    return (index != value).value


def gradient(thing: Any) -> Any:
    """`thing.grad`: of a leaf from outside, what it was before in lanes that have called no backward pass."""
    found = thing.grad
    if found is None or type(thing) not in PLAIN or machine.level is None or given_to_running(found):
        return found
    return gradient_before(thing)


def set_item(value: Any, thing: Any, index: Any) -> None:
    """`thing[index] = value`"""
    if isinstance(thing, Several):
        thing = thing.resolve()
    if isinstance(thing, Tensor):
        call_with_numbers(Tensor.__setitem__, thing, index, value)
        return
    if isinstance(index, (LaneNumber, Plane)) and machine.level is not None:
        index = index.resolve() if isinstance(index, LaneNumber) else operator.index(index)
        keyed(thing)[index] = value
        return
    changes(thing)[index] = value


def contains(entry: Any, thing: Any) -> Any:
    """`entry in thing`"""
    if machine.level is None or not isinstance(thing, (list, tuple, set, frozenset, dict)):
        return entry in thing
    if not with_lanes(entry) and LaneNumber not in map(type, thing):
        return entry in thing
    found: Any = False
    for other in thing:
        equal = True if entry is other else entry == other
        if isinstance(equal, Tensor):
            equal = number_of(equal)
        found = equal if found is False else found | equal
    return found


def same(a: Any, b: Any) -> Any:
    """`a is b`. Python has one object for each truth value, and one for each small integer."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if machine.level is not None and (isinstance(a, Plane) or isinstance(b, Plane)):
            # What lanes that came together hold is a new tensor, in place of one or the other.
            raise Restart(machine.level)
        return False
    if type(a) is not LaneNumber and type(b) is not LaneNumber:
        return False
    kind = kind_of(a)
    return a == b if kind is kind_of(b) and (kind is bool or kind is int) else False


class _Singleton:
    """What `True` and `False` are as patterns of a `match`, which compares by `is`."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: bool) -> None:
        self.value = value

    def __eq__(self, other: object) -> Any:
        return same(other, self.value)


singleton_true, singleton_false = _Singleton(True), _Singleton(False)


# --- arithmetic ------------------------------------------------------------------------------------------------------

# Functions of math that torch computes for all lanes at once, where every lane is within bounds.
_TORCH: dict[Any, tuple[Callable, Callable]] = {
    math.sqrt: (torch.sqrt, lambda x: x >= 0),
    math.exp: (torch.exp, lambda x: x < 700),
    math.log: (torch.log, lambda x: x > 0),
    math.log2: (torch.log2, lambda x: x > 0),
    math.log10: (torch.log10, lambda x: x > 0),
    math.sin: (torch.sin, torch.isfinite),
    math.cos: (torch.cos, torch.isfinite),
    math.tan: (torch.tan, torch.isfinite),
    math.tanh: (torch.tanh, torch.isfinite),
    math.atan: (torch.atan, torch.isfinite),
    math.fabs: (torch.abs, torch.isfinite),
}


def call_arithmetic(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A function of the math module."""
    if kwargs:
        return _with_names(function, args, kwargs)
    if not any(with_lanes(arg) for arg in args) or (function is math.trunc and isinstance(args[0], Tensor)):
        if not any(isinstance(arg, Several) for arg in args):
            return function(*args)
    if any(isinstance(arg, Several) for arg in args):
        return Several.each_kind(functools.partial(call_arithmetic, function), *args)
    numbers = [as_number(arg) for arg in args]
    if len(numbers) == 1 and isinstance(numbers[0], LaneNumber):
        if function in _ROUNDINGS:
            return _ROUNDINGS[function](numbers[0])
        known = _TORCH.get(function)
        if known is not None and numbers[0].kind is not complex:
            value = numbers[0].value.to(torch.float64)
            if decide(machine.level, known[1](value)) is True:
                return LaneNumber(float, known[0](value))
    return for_each_lane(function, *numbers)


def _with_names(function: Callable, args: tuple, kwargs: dict) -> Any:
    if not any(map(with_lanes, (*args, *kwargs.values()))):
        return function(*args, **kwargs)

    def call(*numbers: Any) -> Any:
        return function(*numbers[: len(args)], **dict(zip(kwargs, numbers[len(args) :])))

    return for_each_lane(call, *map(as_number, (*args, *kwargs.values())))


@stands_for(pow)
def pow_(base: Any, exp: Any, mod: Any = None) -> Any:
    """`pow(base, exp, mod)`; Python asks its first argument alone for a power with a modulus."""
    if mod is None or not any(map(with_lanes, (base, exp, mod))) or isinstance(base, Tensor):
        return pow(base, exp, mod)
    return for_each_lane(pow, *map(as_number, (base, exp, mod)))


_ROUNDINGS = {
    math.floor: operator.methodcaller("__floor__"),
    math.ceil: operator.methodcaller("__ceil__"),
    math.trunc: operator.methodcaller("__trunc__"),
}

for _function in vars(math).values():
    if callable(_function):
        replaced[_function] = functools.partial(call_arithmetic, _function)
