"""Variables of a function that hold nothing but what it has just made, and what it does to these."""

from collections.abc import Sequence, Set
from typing import Any

# Names of functions of torch and of methods of tensors whose result is a tensor with memory of its own.
_TENSORS = frozenset(
    "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor "
    "tensor arange linspace eye clone stack cat".split()
)
_CALLS = frozenset("CALL CALL_FUNCTION CALL_METHOD CALL_FUNCTION_EX CALL_FUNCTION_KW CALL_KW".split())
_CALLEES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
# How many keys instructions take that read an item, assign to one, or delete one.
_KEYS = {"BINARY_SUBSCR": 1, "BINARY_SLICE": 2, "STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}
# In `x[i] += y`, `x` and `i` are copied on the stack, and the result is put behind them.
_COPIES = frozenset(("COPY", "DUP_TOP_TWO"))
_SWAPS = frozenset(("SWAP", "ROT_THREE", "ROT_FOUR"))


def makes_tensors(steps: Sequence[Any]) -> frozenset[int]:
    """Which instructions are calls whose result is a new tensor, by the name of what is called."""
    return frozenset(place for place, step in enumerate(steps) if step.opname in _CALLS and _is_factory(steps, place))


def _is_factory(steps: Sequence[Any], place: int) -> bool:
    start = begin(steps, place)
    if start is None:
        return False
    first = steps[start]
    alone = 2 if first.effect == 2 or first.opname == "PUSH_NULL" else 1  # a function follows a null, methods do not
    depth, callee = 0, None
    for step in steps[start:place]:
        if step.opname in _CALLEES and depth == alone:  # nothing but what has the attribute
            callee = step.argval
        depth += step.effect
    return callee in _TENSORS


def begin(steps: Sequence[Any], place: int) -> int | None:
    """Where the expression begins that an instruction ends; None where that is not plain, as it is with branches."""
    depth = 0
    for at in range(place, -1, -1):
        step = steps[at]
        if step.jumps:
            return None
        depth += step.effect
        if depth == 1:
            return at
        if step.target:
            return None
    return None


def assigns_to(steps: Sequence[Any], place: int, own: Set[str]) -> bool:
    """Whether what is assigned or deleted at a place is an item of a variable of these."""
    container = _before_keys(steps, place - 1, _KEYS[steps[place].opname])
    return container >= 0 and _is_one(steps[container], own)


def writes_to(steps: Sequence[Any], place: int, own: Set[str]) -> bool:
    """Whether what the instruction at a place writes to is a variable of these, or a part of it.

    It is an assignment to an item, an operation in place on one, or takes a method that writes.
    """
    kind = steps[place].opname
    if kind in _CALLEES:
        return _is_part(steps, place - 1, own)
    if kind == "BINARY_OP":
        value = begin(steps, place - 1)
        return value is not None and _is_copied_part(steps, value - 1, own)
    at = place - 1
    while at > 0 and steps[at].opname in _SWAPS:
        at -= 1
    if at < place - 1:  # `x[i] += y`
        return steps[at].opname == "BINARY_OP" and writes_to(steps, at, own)
    return _is_part(steps, _before_keys(steps, at, _KEYS[kind]), own)


def _before_keys(steps: Sequence[Any], place: int, count: int) -> int:
    """Where an expression ends that is followed by so many that end at a place; -1 where that is not plain."""
    for _ in range(count):
        key = begin(steps, place) if place >= 0 else None
        place = -1 if key is None else key - 1
    return place


def _is_part(steps: Sequence[Any], place: int, own: Set[str]) -> bool:
    """Whether an expression that ends at a place is such a variable, or an item of it."""
    if place < 0:
        return False
    step = steps[place]
    if step.opname in _KEYS:
        return _is_part(steps, _before_keys(steps, place - 1, _KEYS[step.opname]), own)
    return _is_one(step, own)


def _is_one(step: Any, own: Set[str]) -> bool:
    return step.opname.startswith("LOAD_FAST") and step.argval in own


def _is_copied_part(steps: Sequence[Any], place: int, own: Set[str]) -> bool:
    """Whether an item is taken there of such a variable, which stays on the stack with the key, to assign to it."""
    if place < 0 or steps[place].opname not in _KEYS:
        return False
    at = place - 1
    while at > 0 and steps[at].opname in _COPIES:
        at -= 1
    return at < place - 1 and _is_part(steps, _before_keys(steps, at, _KEYS[steps[place].opname]), own)
