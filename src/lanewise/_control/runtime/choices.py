"""Expressions of which lanes take different sides, or whose variables hold different kinds of things in some of them.

A variable that is None in some lanes and a tensor in others is a Mixed (merging.py). What asks for its kind, such as
`best is None`, has an answer for each lane. Any other expression is computed for each of its values, for the lanes that
have it, as the sides of an `if` are; where one value can hold what comes out, all lanes go on together.
"""

import enum
import operator
import sys
from collections import namedtuple
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lanewise._control.rewriting.expressions import CARRIED, KINDS, NUMBERS, RETURNED, WHOLE
from lanewise._control.runtime import replacements
from lanewise._control.runtime.changes import changes
from lanewise._control.runtime.iterators import refuse_iterators
from lanewise._control.runtime.merging import BY_VALUE, UNBOUND, Mixed, number_kind
from lanewise._control.runtime.merging import join as join_values
from lanewise._control.runtime.numbers import LaneNumber, number_of
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import decide
from lanewise._core.parting.lanes import Parting, child, machine
from lanewise.errors import uncounted

# An expression is computed for so many values of a variable. With more of them, lanes with one go on.
_MOST = 8
_NAMED = (str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_CONTAINERS = (tuple, list, dict)


# --- variables -------------------------------------------------------------------------------------------------------


def load(value: Any, name: str) -> Any:
    """A variable that may hold different things in different lanes: one of them, or numbers and tensors."""
    if type(value) is Mixed:
        value = value.carried(machine.level)
    if value is UNBOUND:
        raise UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value")
    return value


def whole(value: Any) -> Any:
    """What a function has returned, of which a tensor stands for numbers, too."""
    level = machine.level
    if type(value) is Mixed and level is not None and level.covers(value.level):
        out = value.whole(level)
        return value if out is None else out
    return value


def one_kind(value: Any, name: str) -> Any:
    """A variable whose kind is asked for: what it holds in lanes that go on with it."""
    return load(value.resolve() if type(value) is Mixed else value, name)


def kept(value: Any, name: str) -> Any:
    """A variable that may hold different things in different lanes: a Mixed where it does in those that run."""
    level = machine.level
    if type(value) is Mixed and level is not None and level.covers(value.level):
        shares = value.shares(level.lanes)
        if len(shares) == 1:
            value = value.value(level, shares[0][0])
        elif any(value.values[number] is UNBOUND for number, _ in shares):
            return load(value, name)
    return load(value, name) if value is UNBOUND else value


# --- conditions ------------------------------------------------------------------------------------------------------


def truth(value: Any) -> Any:
    """What a condition says: True, False, or the positions of the lanes for which it holds, and of the others."""
    if value is True or value is False:
        return value
    level = machine.level
    if level is None:
        return bool(value)
    if type(value) is LaneNumber:
        value = value.value
    elif type(value) is Mixed:
        return _truth_of_each(level, value) if level.covers(value.level) else truth(value.resolve())
    elif not isinstance(value, Tensor):
        return bool(value)
    return decide(level, value)


def _truth_of_each(level: Any, value: Mixed) -> Any:
    mask = _truths(level, value)
    if mask is None:
        return truth(value.narrowed(level))  # whatever its `__bool__` does, it does for lanes with one object
    count = int(mask.sum())
    return bool(count) if count in (0, mask.shape[0]) else Parting(mask, count).sides()


def _truths(level: Any, value: Mixed) -> Tensor | None:
    """What each lane that runs says `[n]`; None where that is for a method of an object to say."""
    base = level.lanes
    shares = value.shares(base)
    simple = (*BY_VALUE, Tensor, LaneNumber, *_CONTAINERS)
    if not all(isinstance(value.values[number], simple) for number, _ in shares):
        return None
    with on_plane(None):
        mask = torch.zeros(base.size, dtype=torch.bool)
    for number, here in shares:
        level.lanes = value.part(base, (number, here))
        verdict = truth(value.value(level, number))
        if verdict is not False:
            with on_plane(None):
                mask[here if verdict is True else here[verdict[0].positions()]] = True
    level.lanes = base
    return mask


def _number(level: Any, mask: Tensor) -> Any:
    """Truth values `[n]` as a bool with lanes."""
    count = int(mask.sum())
    return bool(count) if count in (0, mask.shape[0]) else LaneNumber(bool, level.wrap(mask))


def answered(value: Mixed, ask: Callable[[Any], bool]) -> Any:
    """What each lane says to a question about its value, which no tensor has to be looked into for: a bool."""
    level = machine.level
    if not level.covers(value.level):
        return ask(value.resolve())
    with on_plane(None):
        mask = torch.zeros(level.lanes.size, dtype=torch.bool)
        for number, here in value.shares(level.lanes):
            if ask(value.values[number]):
                mask[here] = True
    return _number(level, mask)


@replacements.stands_for(operator.is_)
def is_(a: Any, b: Any) -> Any:
    """`a is b`"""
    return _is(a, b) if type(a) is Mixed or type(b) is Mixed else replacements.same(a, b)


@replacements.stands_for(operator.is_not)
def is_not(a: Any, b: Any) -> Any:
    """`a is not b`"""
    return _opposite(_is(a, b) if type(a) is Mixed or type(b) is Mixed else replacements.same(a, b))


def _is(a: Any, b: Any) -> Any:
    if type(a) is not Mixed:
        a, b = b, a
    if isinstance(b, (bool, Mixed, Tensor, LaneNumber, *_CONTAINERS)):
        return for_each_value(replacements.same, False, (a, b), 3)
    return answered(a, lambda own: own is b)


def equal(a: Any, b: Any) -> Any:
    """`a == b`"""
    if type(a) is not Mixed and type(b) is not Mixed:
        return a == b
    found = _equals_name(a, b)
    return for_each_value(operator.eq, False, (a, b), 2) if found is None else found


def unequal(a: Any, b: Any) -> Any:
    """`a != b`"""
    if type(a) is not Mixed and type(b) is not Mixed:
        return a != b
    found = _equals_name(a, b)
    return for_each_value(operator.ne, False, (a, b), 2) if found is None else _opposite(found)


def _equals_name(a: Any, b: Any) -> Any:
    """`a == b` where that is a question for a text or the like, None where it is another."""
    known, asked = (a, b) if type(a) is Mixed else (b, a)
    if _named(asked) and all(map(_comparable, known.values)):
        return answered(known, lambda own: _named(own) and bool(own == asked))
    return None


def _named(value: Any) -> bool:
    """Whether something has no equality but that of its value, and is no number."""
    return isinstance(value, _NAMED) and not isinstance(value, (int, float, complex))


def _comparable(value: Any) -> bool:
    """Whether something equals a text or None only where it is one."""
    return _named(value) or number_kind(value) is not None or isinstance(value, (Tensor, *_CONTAINERS))


def contains(entry: Any, thing: Any) -> Any:
    """`entry in thing`"""
    mixed = type(entry) is Mixed or type(thing) is Mixed
    return _contains(entry, thing) if mixed else replacements.contains(entry, thing)


def lacks(entry: Any, thing: Any) -> Any:
    """`entry not in thing`"""
    mixed = type(entry) is Mixed or type(thing) is Mixed
    return _opposite(_contains(entry, thing) if mixed else replacements.contains(entry, thing))


def _contains(entry: Any, thing: Any) -> Any:
    if type(entry) is Mixed and isinstance(thing, (tuple, list, set, frozenset, dict)):
        if all(map(_named, (*thing, *entry.values))):
            return answered(entry, lambda own: own in thing)
    return for_each_value(replacements.contains, False, (entry, thing), 3)


def _opposite(found: Any) -> Any:
    """`not` what a comparison has found."""
    return found == 0 if isinstance(found, LaneNumber) else not found


def negation(value: Any) -> Any:
    """`not value`"""
    level = machine.level
    if level is not None:
        if isinstance(value, (LaneNumber, Tensor)):
            return (value if isinstance(value, LaneNumber) else number_of(value)) == 0
        if type(value) is Mixed and type(value := value.within(level)) is not Mixed:
            return negation(value)
        if type(value) is Mixed:
            mask = _truths(level, value)
            return not value.narrowed(level) if mask is None else _number(level, ~mask)
    return not value


# --- sides -----------------------------------------------------------------------------------------------------------


def _by_sides(verdict: tuple, sides: tuple[Callable, Callable], keep: int) -> Any:
    """What sides give for the lanes that take them."""
    level: Any = machine.level
    refuse_iterators(level, 2)
    if keep == RETURNED:
        keep = NUMBERS if shown_to(3) is not TRANSFORM else KINDS
    base = level.lanes
    pieces, values = [], []
    for positions, side in zip(verdict, sides):
        level.lanes = child(base, positions)
        values.append(side())
        pieces.append(level.lanes)
    return join_values(level, base, pieces, values, keep)


def _one(value: Any, keep: int) -> Any:
    if type(value) is not Mixed or keep not in (CARRIED, WHOLE):
        return value
    return value.carried(machine.level) if keep == CARRIED else value.settled(machine.level)


def choose(condition: Any, yes: Callable, no: Callable, keep: int = CARRIED) -> Any:
    """`yes() if condition else no()`"""
    verdict = truth(condition)
    if verdict is True:
        return yes()
    if verdict is False:
        return no()
    return _by_sides(verdict, (yes, no), keep)


def both(first: Any, rest: Callable, keep: int = CARRIED) -> Any:
    """`first and rest()`"""
    verdict = truth(first)
    if verdict is True:
        return rest()
    if verdict is False:
        return _one(first, keep)
    return _by_sides(verdict, (rest, lambda: first), keep)


def either(first: Any, rest: Callable, keep: int = CARRIED) -> Any:
    """`first or rest()`"""
    verdict = truth(first)
    if verdict is True:
        return _one(first, keep)
    if verdict is False:
        return rest()
    return _by_sides(verdict, (lambda: first, rest), keep)


# --- values of several kinds -----------------------------------------------------------------------------------------


def each(run: Callable, keep: int, *operands: Any) -> Any:
    """`run(*operands)`, for each of the values that the operands have in different lanes."""
    for operand in operands:
        if type(operand) is Mixed:
            return for_each_value(run, keep, operands, 2)
    return run(*operands)


@uncounted
def for_each_value(run: Callable, keep: int, operands: tuple, depth: int) -> Any:
    """`each`, called by a function so far up; zero for what takes nothing from iterators."""
    level: Any = machine.level
    place = next((place for place, operand in enumerate(operands) if type(operand) is Mixed), None)
    if place is None:
        return run(*operands)
    operand, base = operands[place].within(level), level.lanes
    if type(operand) is not Mixed:
        return for_each_value(run, keep, (*operands[:place], operand, *operands[place + 1 :]), depth and depth + 1)
    shares = operand.shares(base)
    if len(shares) > _MOST:
        only = operand.narrowed(level)
        return for_each_value(run, keep, (*operands[:place], only, *operands[place + 1 :]), depth and depth + 1)
    if len(shares) > 1:
        if depth:
            refuse_iterators(level, depth)
        machine.parted(len(shares) - 1)
    pieces, values = [], []
    for share in shares:
        level.lanes = operand.part(base, share)
        own = operand.value(level, share[0])
        rest = (*operands[:place], own, *operands[place + 1 :])
        values.append(for_each_value(run, NUMBERS, rest, depth and depth + 1))
        pieces.append(level.lanes)
    return join_values(level, base, pieces, values, keep)


# Operators by the names of their nodes in the syntax tree.
_IN_PLACE = {
    **{f"i{name}": getattr(operator, f"i{name}") for name in ("add", "sub", "mod", "pow")},
    "imult": operator.imul,
    "idiv": operator.itruediv,
    "ifloordiv": operator.ifloordiv,
    "imatmult": operator.imatmul,
    "ilshift": operator.ilshift,
    "irshift": operator.irshift,
    "ibitor": operator.ior,
    "ibitxor": operator.ixor,
    "ibitand": operator.iand,
}


def augmented(name: str, held: Any, value: Any) -> Any:
    """`held += value` and its like, of a variable that may be a number in some lanes and a tensor in others."""
    return for_each_value(lambda own, other: _IN_PLACE[name](changes(own), other), NUMBERS, (held, value), 2)


@uncounted
def keeping(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """`func(*args, **kwargs)`, which may return a Mixed."""
    if func is replacements.greatest or func is replacements.least:
        func = replacements.greatest_kept if func is replacements.greatest else replacements.least_kept
    elif func is namedtuple:
        kwargs.setdefault("module", sys._getframe(1).f_globals["__name__"])  # it looks for that of its caller
    return func(*args, **kwargs)


# Who takes what a function returns: a transform, to which a tensor stands for numbers; any other code; code that takes
# what may be of several kinds, None among them.
TRANSFORM, CODE, KEEPING = "transform", "code", "keeping"
# (What stands in for functions in converted code is in `_control.runtime`.)
_TRANSFORMS = (
    "lanewise._transforms.",
    "lanewise._control.runs.",
    "lanewise._control.runtime.hooks",
    "lanewise._control.functional.",
    "lanewise._core.",
    "torch.autograd.",
)


def shown_to(depth: int) -> str:
    """Who takes the result of a function so far up."""
    return taker_of(sys._getframe(depth))


def taker_of(frame: FrameType) -> str:
    """Who takes the result of a function whose frame that is."""
    caller = frame.f_back
    if caller is None:
        return CODE
    if caller.f_code is keeping.__code__:
        func = caller.f_locals["func"]  # or what that calls: `functools.reduce` leaves no frame
        own = getattr(getattr(func, "__func__", func), "__code__", None) is frame.f_code
        return KEEPING if own else CODE
    return TRANSFORM if str(caller.f_globals.get("__name__")).startswith(_TRANSFORMS) else CODE


def handed_over(level: Any, value: Mixed, taker: str) -> Any:
    """What of a Mixed a function returns."""
    if taker is KEEPING:
        return value
    return value.carried(level) if taker is CODE else value.settled(level)


def result(value: Any) -> Any:
    """What a function returns."""
    return handed_over(machine.level, value, shown_to(2)) if type(value) is Mixed else value
