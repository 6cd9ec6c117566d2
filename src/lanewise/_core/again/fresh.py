"""Variables of a function that hold nothing but what it has just made, and what it does to these."""

import types
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

# Names of functions of torch and of methods of tensors whose result is a tensor with memory of its own.
_TENSORS = frozenset(
    "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor "
    "tensor arange linspace eye clone stack cat".split()
)
# Names of builtins and of classes in `collections` that make a container.
_CONTAINERS = frozenset("list dict set bytearray sorted".split())
_COLLECTIONS = frozenset("deque defaultdict Counter OrderedDict".split())
CALLS = frozenset("CALL CALL_FUNCTION CALL_METHOD CALL_FUNCTION_EX CALL_FUNCTION_KW CALL_KW".split())
_CALLEES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
# How many keys instructions take that read an item, assign to one, or delete one.
_KEYS = {"BINARY_SUBSCR": 1, "BINARY_SLICE": 2, "STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}
# In `x[i] += y`, `x` and `i` are copied on the stack, and the result is put behind them.
_COPIES = frozenset(("COPY", "DUP_TOP_TWO"))
_SWAPS = frozenset(("SWAP", "ROT_THREE", "ROT_FOUR"))


# Instructions that only move what is on the stack, and those among them that put several values in order for as many
# variables.
_SHUFFLING = frozenset("STORE_FAST STORE_DEREF SWAP COPY ROT_TWO ROT_THREE DUP_TOP BUILD_TUPLE UNPACK_SEQUENCE".split())
_ORDERS = {"ROT_TWO": 2, "ROT_THREE": 3}


class Own(NamedTuple):
    """Variables of functions around, which are new in each call of these, and which functions inside read or bind, too.

    Attributes:
        containers, tensors: Those that hold nothing but new containers or numbers, or new tensors.
        results: Those that hold nothing but these, or what functions have returned.
    """

    containers: frozenset[str]
    tensors: frozenset[str]
    results: frozenset[str]

    def seen_in(self, code: types.CodeType) -> "Own":
        """Those that code of a function inside sees."""
        free = frozenset(code.co_freevars)
        return Own(*[each & free for each in self])


NOTHING = Own(*[frozenset()] * 3)


def only(
    steps: Sequence[Any],
    kinds: frozenset[str],
    places: frozenset[int] = frozenset(),
    cells: frozenset[str] = frozenset(),
) -> dict[str, int]:
    """Variables that are bound to nothing but what instructions of some kinds make, or those at some places.

    `cells`: those among variables that functions inside see, too, that count.

    Returns:
        Where they are bound first, by their names.
    """
    found: dict[str, int] = {}
    others: set[str] = set()
    for place, step in enumerate(steps):
        if stores(step) and (step.opname == "STORE_FAST" or step.argval in cells):
            found.setdefault(step.argval, place)
            maker, part = _maker(steps, place)
            if maker is None or not (steps[maker].opname in kinds or (maker in places and not part)):
                others.add(step.argval)
    return {name: place for name, place in found.items() if name not in others}


def otherwise(steps: Sequence[Any], kinds: frozenset[str], code: types.CodeType) -> set[str]:
    """Variables of functions around that code binds, too, to something else than instructions of some kinds make."""
    free = frozenset(code.co_freevars)
    bound = {step.argval for step in steps if step.opname in ("STORE_DEREF", "DELETE_DEREF")} & free
    return bound.difference(only(steps, kinds, frozenset(), free))


def _maker(steps: Sequence[Any], place: int) -> tuple[int | None, bool]:
    """Which instruction makes what is bound at a place, or what that is a part of; and whether it is one."""
    first = place
    while first and steps[first - 1].opname in _SHUFFLING:
        first -= 1
    moved = steps[first:place]
    if steps[first].target or not first:
        return None, False
    last = first - 1
    head = steps[first]
    if any(step.opname == "UNPACK_SEQUENCE" for step in moved):
        if head.opname == "BUILD_TUPLE" and moved[1].opname == "UNPACK_SEQUENCE":
            count = head.argval
        else:  # a part of a constant is one; results of a function are what it returns
            known = steps[last].opname == "LOAD_CONST" or steps[last].opname in CALLS
            return last if known else None, True
    elif head.opname in ("SWAP", "ROT_TWO", "ROT_THREE"):
        count = _ORDERS.get(head.opname) or head.argval
    elif stores(head):  # the last value first
        count = 1 + 2 * sum(map(stores, moved))
    else:
        return last, False
    for _ in range(count - 1 - sum(map(stores, moved))):
        start = begin(steps, last)
        if not start:
            return None, False
        last = start - 1
    return last, False


def loads(step: Any, names: Set[str]) -> bool:
    """Whether an instruction loads one of some variables."""
    if step is None or step.argval not in names:
        return False
    return step.opname.startswith("LOAD_FAST") or step.opname == "LOAD_DEREF"


def stores(step: Any) -> bool:
    """Whether an instruction binds a variable of a function."""
    return step is not None and step.opname in ("STORE_FAST", "STORE_DEREF")


def makes_tensors(steps: Sequence[Any]) -> frozenset[int]:
    """Which instructions are calls whose result is a new tensor, by the name of what is called."""
    return _calls_of(steps, _TENSORS)


def makes_containers(steps: Sequence[Any]) -> frozenset[int]:
    """Which instructions are calls whose result is a new list, dict or set, by the name of what is called."""
    return _calls_of(steps, _CONTAINERS | _COLLECTIONS)


def _calls_of(steps: Sequence[Any], names: frozenset[str]) -> frozenset[int]:
    return frozenset(
        place for place, step in enumerate(steps) if step.opname in CALLS and _callee(steps, place) in names
    )


def _callee(steps: Sequence[Any], place: int) -> str | None:
    """The name of the method, or of the builtin or the part of a module, that a call is of, if it is plain."""
    start = begin(steps, place)
    if start is None:
        return None
    first = steps[start]
    alone = 2 if first.effect == 2 or first.opname == "PUSH_NULL" else 1  # a function follows a null, methods do not
    depth, callee = 0, None
    for step in steps[start:place]:
        if step.opname in _CALLEES and depth == alone:  # nothing but what has the attribute
            callee = None if step.argval in _CONTAINERS else step.argval
        elif step.opname == "LOAD_GLOBAL" and depth < alone:
            callee = step.argval if step.argval in _CONTAINERS | _COLLECTIONS else None
        depth += step.effect
    return callee


def begin(steps: Sequence[Any], place: int) -> int | None:
    """Where the expression begins that an instruction ends; None where that is not plain, as it is with branches."""
    depth = 0
    for at in range(place, -1, -1):
        step = steps[at]
        if step.jumps or step.opname.startswith("UNPACK_"):
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
    return container >= 0 and loads(steps[container], own)


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
    return loads(step, own)


def _is_copied_part(steps: Sequence[Any], place: int, own: Set[str]) -> bool:
    """Whether an item is taken there of such a variable, which stays on the stack with the key, to assign to it."""
    if place < 0 or steps[place].opname not in _KEYS:
        return False
    at = place - 1
    while at > 0 and steps[at].opname in _COPIES:
        at -= 1
    return at < place - 1 and _is_part(steps, _before_keys(steps, at, _KEYS[steps[place].opname]), own)
