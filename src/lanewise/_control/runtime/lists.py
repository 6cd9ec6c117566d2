"""Python's functions of lists of numbers that differ from lane to lane: `sum(x.tolist())`, `values.index(v)`.

Where operations on all lanes do not give the digits that Python gives, a function is called with the numbers of each
lane. That takes a few microseconds for each, but nothing of the mapped function runs again.
"""

import bisect
import functools
import heapq
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from lanewise._control.runtime.callees import list_methods, replaced
from lanewise._control.runtime.changes import changes
from lanewise._control.runtime.merging import join
from lanewise._control.runtime.numbers import (
    LaneNumber,
    kind_of,
    lane_number,
    one_number,
    results_for_each,
)
from lanewise._control.runtime.replacements import as_number, entry_at, sorted_, stands_for, with_lanes
from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import child, machine
from lanewise._core.plane import Plane

# From Python 3.12 on, `sum` of floats keeps what the rounding of each addition loses.
_COMPENSATED = sys.version_info >= (3, 12)
_LISTS = (list, tuple)


def in_each_lane(function: Callable, /, *given: Any, **named: Any) -> Any:
    """A function of numbers and of lists of numbers, called for each lane.

    Where it takes anything else, or gives anything else, some lanes go on with one.
    """
    args, kwargs = [*map(_listed, given)], {name: _listed(arg) for name, arg in named.items()}
    found = results(function, args, kwargs)
    out = None if found is None else by_kind(*found)
    if out is not None:
        return out
    return function(*map(one_number, args), **{name: one_number(arg) for name, arg in kwargs.items()})


def _listed(arg: Any) -> Any:
    """An argument with its entries in a list, if it has any, and tensors with one element as numbers."""
    if isinstance(arg, Plane):
        return [as_number(entry) for entry in arg.unbind()] if arg.dim() else as_number(arg)
    if hasattr(arg, "__next__"):
        arg = list(arg)
    if type(arg) in _LISTS and any(isinstance(entry, Plane) for entry in arg):
        return [as_number(entry) if isinstance(entry, Plane) and not entry.dim() else entry for entry in arg]
    return arg


def results(function: Callable, args: list, kwargs: dict) -> tuple[Any, int, list] | None:
    """What a function gives for each lane; None where its arguments are no numbers and lists of such."""
    leaves: list = []
    places: list = []
    for arg in (*args, *kwargs.values()):
        if type(arg) in _LISTS:
            places.append(slice(len(leaves), len(leaves) + len(arg)))
            leaves += arg
        else:
            places.append(len(leaves))
            leaves.append(arg)
    if not any(type(leaf) is LaneNumber for leaf in leaves) or not all(map(_is_plain, leaves)):
        return None
    names, first = [*kwargs], len(args)

    def call(*numbers: Any) -> Any:
        given = [list(numbers[place]) if type(place) is slice else numbers[place] for place in places]
        return function(*given[:first], **dict(zip(names, given[first:])))

    return results_for_each(call, leaves)


def by_kind(level: Any, count: int, results: list) -> Any:
    """The results of the lanes as one: some may have an int, such as the sum of nothing, where others have a float.

    None where they are no numbers.
    """
    places: dict[type, list[int]] = {}
    for place, result in enumerate(results):
        places.setdefault(type(result), []).append(place)
    if list in places and len(places) == len(set(map(len, results))) == 1:
        columns = [lane_number(level, count, list(column)) for column in zip(*results)]
        return None if any(column is None for column in columns) else columns
    if len(places) == 1 or level is not machine.level:
        return lane_number(level, count, results)
    base = level.lanes
    pieces, values = [], []
    for own in places.values():
        with on_plane(None):
            level.lanes = child(base, torch.tensor(own))
        pieces.append(level.lanes)
        values.append(lane_number(level, len(own), [results[place] for place in own]))
    if any(value is None for value in values):
        level.lanes = base
        return None
    return join(level, base, pieces, values)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or kind_of(leaf) is not None


def _for_each(function: Callable) -> Callable:
    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return in_each_lane(function, *args, **kwargs) if machine.level is not None else function(*args, **kwargs)

    return stand_in


# Functions of lists of numbers that give one number.
OF_LISTS = [math.fsum, math.dist, *([math.sumprod] if hasattr(math, "sumprod") else [])]  # type: ignore[attr-defined]
OF_LISTS += [
    function
    for name in statistics.__all__
    if callable(function := getattr(statistics, name)) and not isinstance(function, type)
]
for _function in OF_LISTS:
    replaced[_function] = _for_each(_function)


# --- sums ------------------------------------------------------------------------------------------------------------


@stands_for(sum)
def sum_(entries: Any, /, start: Any = 0) -> Any:
    """`sum(entries, start)`: one addition after the other, for all lanes at once where Python does no more."""
    if machine.level is None:
        return sum(entries, start)
    entries = list(entries)
    if not _COMPENSATED or not any(type(entry) is LaneNumber for entry in (start, *entries)):
        return sum(entries, start)
    kinds = set(map(kind_of, (start, *entries)))
    return sum(entries, start) if None in kinds or kinds <= {bool, int} else in_each_lane(sum, entries, start)


# --- what a list is asked --------------------------------------------------------------------------------------------


def _equal(entry: Any, value: Any) -> Any:
    return True if entry is value else as_number(entry == value)


def _plainly(entries: list, value: Any) -> bool:
    """Whether nothing in a list, nor what is looked for there, has lanes."""
    return not with_lanes(value) and not any(map(with_lanes, entries))


def _count(entries: Any, value: Any) -> Any:
    if _plainly(entries, value):
        return entries.count(value)
    return sum([_equal(entry, value) for entry in entries])


def _index(entries: Any, value: Any, *bounds: Any) -> Any:
    if bounds or _plainly(entries, value) or not all(map(_is_plain, entries)) or not _is_plain(value):
        return entries.index(one_number(value), *bounds)
    # (The same object is in its place even if it is NaN, which equals nothing.)
    own = [entry is value for entry in entries]
    return in_each_lane(functools.partial(_first, own), entries, value)


def _first(own: list, entries: list, value: Any) -> int:
    for place, entry in enumerate(entries):
        if own[place] or entry == value:
            return place
    return entries.index(value)  # which says that there is none


# --- lists that are changed, or that others are made of ---------------------------------------------------------------


def _changed(function: Callable, entries: Any, *args: Any) -> Any:
    """`function(entries, *args)`, which changes a list: of numbers, for each lane, where it comes out equally long."""
    found = None
    if type(entries) is list:
        found = results(functools.partial(_and_left, function), [entries, *map(as_number, args)], {})
    if found is not None and len(set(map(len, found[2]))) == 1:
        level, count, outcomes = found
        given, *left = zip(*outcomes)
        out = None if given[0] is None else lane_number(level, count, list(given))
        columns = [lane_number(level, count, list(column)) for column in left]
        if not any(column is None for column in columns) and (out is not None or set(given) == {None}):
            entries[:] = columns
            return out
    return function(entries, *args)


def _and_left(function: Callable, entries: list, *args: Any) -> tuple:
    """What a function gives, and what it leaves in the list."""
    out = function(entries, *args)
    return out, *entries


def _changing(function: Callable) -> Callable:
    @functools.wraps(function)
    def stand_in(entries: Any, /, *args: Any, **kwargs: Any) -> Any:
        changes(entries)
        if machine.level is None or kwargs:
            return function(entries, *args, **kwargs)
        return _changed(function, entries, *args)

    return stand_in


for _function in (heapq.heappush, heapq.heappop, heapq.heapify, heapq.heapreplace, heapq.heappushpop):
    replaced[_function] = _changing(_function)
for _function in (bisect.insort_left, bisect.insort_right):
    replaced[_function] = _changing(_function)
for _function in (bisect.bisect_left, bisect.bisect_right):
    replaced[_function] = _for_each(_function)


def _sort(entries: Any, /, **kwargs: Any) -> None:
    entries[:] = sorted_(entries, **kwargs)


def _remove(entries: Any, value: Any) -> None:
    _changed(list.remove, entries, value)


def _pop(entries: Any, *place: Any) -> Any:
    return _changed(list.pop, entries, *place) if any(map(with_lanes, place)) else entries.pop(*place)


list_methods.update(__getitem__=entry_at, count=_count, index=_index, sort=_sort, remove=_remove, pop=_pop)


def _several(largest: bool, function: Callable) -> Callable:
    @functools.wraps(function)
    def stand_in(n: Any, iterable: Any, key: Any = None) -> list:
        if machine.level is None:
            return function(n, iterable, key)
        return sorted_(iterable, key=key, reverse=largest)[: max(one_number(n), 0)]

    return stand_in


replaced[heapq.nlargest] = _several(True, heapq.nlargest)
replaced[heapq.nsmallest] = _several(False, heapq.nsmallest)
