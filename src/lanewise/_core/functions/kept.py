"""What the forward of a custom Function keeps on `ctx`: tensors by their places, and what is no tensor as it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lanewise._core.functions.numbers import Number, as_number
from lanewise._core.trees import flatten, unflatten

# Stands for an attribute that forward did not set in a lane.
ABSENT = object()
# The index of a slot with the number of each lane.
NUMBERS = -2


class Slot:
    """One tensor that the user's forward kept: an input, an output, or a value of its own.

    Attributes:
        kind: "input", "output" or "value".
        index: Position among the inputs or outputs; -1 or NUMBERS for "value".
        value: The tensor itself, for "value".
        kept: Set as a plain attribute of `ctx`, so it is kept as it is, without a check for later writes.
    """

    __slots__ = ("kind", "index", "value", "kept")

    def __init__(self, kind: str, index: int, value: Any, kept: bool) -> None:
        self.kind = kind
        self.index = index
        self.value = value
        self.kept = kept

    def find(self, args: tuple, outs: tuple) -> Any:
        """The tensor on the plane of these inputs and outputs."""
        return self.value if self.kind == "value" else (args if self.kind == "input" else outs)[self.index]


class _Ref(NamedTuple):
    """Stands in an attribute of `ctx` for the tensor in a slot."""

    slot: int


class _NumberRef(NamedTuple):
    """Stands in an attribute of `ctx` for a number of each lane, whose values are in a slot."""

    slot: int
    number: Number


class _Tree:
    """An attribute of `ctx` that holds tensors, or numbers of each lane."""

    __slots__ = ("leaves", "spec")

    def __init__(self, leaves: list, spec: Any) -> None:
        self.leaves = leaves
        self.spec = spec


class PerLane(NamedTuple):
    """An attribute of `ctx` that differs from lane to lane in more than the values of tensors.

    `slot` holds a tensor with the number of each lane: a formula that runs for one lane finds its own there, whatever
    planes it has come through.
    """

    values: list
    slot: int


def place_of(tensor: Tensor, args: tuple, outs: tuple) -> tuple[str, int]:
    """Kind and index of the slot of a tensor."""
    for kind, tensors in (("input", args), ("output", outs)):
        for index, other in enumerate(tensors):
            if other is tensor:
                return kind, index
    return "value", -1


def refer(value: Any, slot: Callable[[Tensor, bool], int]) -> Any:
    """An attribute of `ctx` with references in place of its tensors; untouched where it holds none."""
    leaves, spec = flatten(value)
    found = [_reference(leaf, slot) for leaf in leaves]
    return value if all(ref is leaf for ref, leaf in zip(found, leaves)) else _Tree(found, spec)


def _reference(leaf: Any, slot: Callable[[Tensor, bool], int]) -> Any:
    if isinstance(leaf, Tensor):
        return _Ref(slot(leaf, True))
    number = as_number(leaf)
    return leaf if number is None else _NumberRef(slot(leaf.value, True), number)


def as_many(lanes: list[list[Slot]]) -> list[list[Slot]]:
    """The slots of each lane, as many for all where only those with numbers of lanes make the difference.

    A lane has one where its forward ran once for each of the lanes around. Others get what they do not read.
    """
    longest = max(lanes, key=len)
    rest = [longest[len(slots) :] for slots in lanes]
    return [slots + more if all(slot.index == NUMBERS for slot in more) else slots for slots, more in zip(lanes, rest)]


def look_up(value: Any, kept: list) -> Any:
    """An attribute of `ctx`, given the tensors in the slots.

    Raises:
        LaneValueError: It differs from lane to lane, and several of them run.
    """
    if isinstance(value, PerLane):
        return look_up(value.values[int(kept[value.slot])], kept)
    if not isinstance(value, _Tree):
        return value
    return unflatten([_found(leaf, kept) for leaf in value.leaves], value.spec)


def _found(leaf: Any, kept: list) -> Any:
    if isinstance(leaf, _Ref):
        return kept[leaf.slot]
    return leaf.number.of(kept[leaf.slot]) if isinstance(leaf, _NumberRef) else leaf


def attributes_of_lanes(lanes: list[dict[str, Any]], slot: int) -> dict[str, Any]:
    """The attributes of `ctx` from those of each lane; `slot` will hold the lanes' numbers."""
    found: dict[str, Any] = {}
    for name in {name: None for lane in lanes for name in lane}:
        values = [lane.get(name, ABSENT) for lane in lanes]
        same = all(_same_apart(values[0], value) for value in values)
        found[name] = values[0] if same else PerLane(values, slot)
    return found


def _same_apart(a: Any, b: Any) -> bool:
    """Whether attributes of `ctx` are the same, the tensors in them apart."""
    if isinstance(a, _Tree) and isinstance(b, _Tree):
        return a.spec == b.spec and all(map(_same_apart, a.leaves, b.leaves))
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
