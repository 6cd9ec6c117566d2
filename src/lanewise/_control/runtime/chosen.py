"""`sum(v for v in values if v > 0)`, `len([v for v in values if v > 0])` and their like.

Each lane keeps entries of its own there. Lanes need not part for them where a function makes one number of all.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lanewise._control.runtime.callees import replaced
from lanewise._control.runtime.choices import answered
from lanewise._control.runtime.lists import OF_LISTS, by_kind, results
from lanewise._control.runtime.merging import Mixed, join
from lanewise._control.runtime.numbers import kind_of
from lanewise._core.parting.lanes import child, machine


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


# What stands for an entry in lanes that leave it out.
ABSENT: Any = _Absent()


def of_chosen(func: Any, listed: bool, entries: Iterator, /, *args: Any, **kwargs: Any) -> Any:
    """`func(entries, *args)`, some of which are left out in some lanes.

    `listed`: it is called with a list of them, else with a generator.
    """
    whole = None if machine.level is None else _WHOLE.get(func)
    if whole is not None:
        found = list(entries)
        if any(type(entry) is Mixed for entry in found):
            out = whole(found, *args, **kwargs)
            if out is not None:
                return out
        entries = iter(found)
    taken = _taken(entries)
    return func(list(taken) if listed else taken, *args, **kwargs)


def for_any(func: Any, entries: Iterator) -> Iterator:
    """The entries that `any` or `all` is to be called with: one that is left out decides nothing."""
    if machine.level is None or (func is not any and func is not all):
        return _taken(entries)
    neutral = func is all
    return (_with(entry, neutral) if type(entry) is Mixed else entry for entry in entries if entry is not ABSENT)


def _taken(entries: Iterator) -> Iterator:
    """The entries of the lanes that go on."""
    for entry in entries:
        if type(entry) is Mixed:
            entry = entry.carried(machine.level)
        if entry is not ABSENT:
            yield entry


def _with(entry: Any, neutral: Any) -> Any:
    """An entry with a number in place of what is left out."""
    if type(entry) is not Mixed:
        return entry
    level = machine.level
    base = level.lanes
    kinds = _kinds([entry])
    if len(kinds) == 1 and None not in kinds:
        (kind,) = kinds
        neutral = kind(neutral)
    pieces, values = [], []
    for number, here in entry.shares(base):
        level.lanes = child(base, here)
        value = entry.value(level, number)
        pieces.append(level.lanes)
        values.append(neutral if value is ABSENT else value)
    return join(level, base, pieces, values)


def _is_taken(entry: Any) -> Any:
    return answered(entry, lambda own: own is not ABSENT) if type(entry) is Mixed else True


def _kinds(entries: list) -> set:
    """The kinds of number that entries have; None for anything else."""
    values = [value for entry in entries for value in (entry.values if type(entry) is Mixed else [entry])]
    return {None if isinstance(value, Tensor) else kind_of(value) for value in values if value is not ABSENT}


def _length(entries: list) -> Any:
    return sum([_is_taken(entry) for entry in entries if entry is not ABSENT])


def _sum(entries: list, start: Any = 0) -> Any:
    kinds = _kinds([*entries, start])
    if kinds <= {bool, int} or (None in kinds and all(map(_is_scalar, entries))):
        return sum([_with(entry, 0) for entry in entries if entry is not ABSENT], start)
    return _for_each_lane(sum)(entries, start)


def _is_scalar(entry: Any) -> bool:
    """Whether an entry is a floating-point tensor without dims, or absent, to which a zero adds nothing."""
    values = entry.values if type(entry) is Mixed else [entry]
    return all(
        value is ABSENT or (isinstance(value, Tensor) and not value.dim() and value.is_floating_point())
        for value in values
    )


def _for_each_lane(function: Callable) -> Callable:
    """A function of a list of numbers, called with those that a lane has taken; None where they are no numbers."""

    def whole(entries: list, /, *args: Any, **kwargs: Any) -> Any:
        kinds = _kinds(entries)
        if len(kinds) != 1 or None in kinds:
            return None
        entries = [entry for entry in entries if entry is not ABSENT]
        flags = [_is_taken(entry) for entry in entries]
        values = [_with(entry, 0) for entry in entries]

        def call(flags: list, values: list, /, *args: Any, **kwargs: Any) -> Any:
            return function([value for taken, value in zip(flags, values) if taken], *args, **kwargs)

        found = results(call, [flags, values, *args], kwargs)
        return None if found is None else by_kind(*found)

    return whole


# Functions that make one number of a list: what does so where some entries are left out in some lanes.
_WHOLE: dict[Any, Callable] = {len: _length, replaced[sum]: _sum}
for _function in (max, min, math.prod, *OF_LISTS):
    _WHOLE[replaced[_function]] = _for_each_lane(_function)
