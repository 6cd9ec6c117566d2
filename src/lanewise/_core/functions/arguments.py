"""Tensors that arguments of a custom Function hold, in a list or a dict: operands of which backward knows nothing.

So are the values of a number of each lane.
"""

from collections.abc import Iterator
from typing import Any

from lanewise._core.batch import BatchLevel
from lanewise._core.functions.numbers import Number, as_number, mixed_classes, number_classes
from lanewise._core.level import live_levels
from lanewise._core.plane import Plane
from lanewise._core.trees import flatten, unflatten

CONTAINERS = frozenset((list, tuple, dict))


class Arguments:
    """How the arguments that the user gave come of operands: so many as they are, and the tensors held in them.

    Attributes:
        count: Number of arguments that the user gave.
    """

    __slots__ = ("count", "places", "specs")

    def __init__(self, count: int) -> None:
        self.count = count
        self.places: list[tuple[int, list]] = []
        self.specs: list[Any] = []

    def filled(self, operands: tuple, blank: bool = False) -> tuple:
        """The user's arguments, of operands on any plane, or of what stands for them; `blank`: with None elsewhere."""
        given, held = list(operands[: self.count]), iter(operands[self.count :])
        for (place, leaves), spec in zip(self.places, self.specs, strict=True):
            given[place] = unflatten([_filled(leaf, held, blank) for leaf in leaves], spec)
        return tuple(given)


# Stands in an argument for a tensor among the operands.
_HELD = object()


def _filled(leaf: Any, held: Iterator, blank: bool) -> Any:
    if isinstance(leaf, Number) and not blank:
        return leaf.of(next(held))
    return next(held) if leaf is _HELD or isinstance(leaf, Number) else None if blank else leaf


def holds(arg: Any) -> bool:
    """Whether an argument may hold operands, or is of more than one kind."""
    return type(arg) in CONTAINERS or type(arg) in number_classes or type(arg) in mixed_classes


def of_one_kind(args: tuple) -> tuple:
    """The arguments, of which each is of one kind in all lanes that go on."""
    return tuple([arg.resolve() if type(arg) in mixed_classes else arg for arg in args])


def with_held_tensors(args: tuple, always: bool) -> tuple[tuple, Arguments | None]:
    """The operands of an application, and how the user's arguments come of them; None where they are the operands.

    Where all planes are of lanes, forward runs on the plane on which it was called, and finds there what it is given:
    lists and dicts stay as they are, unless `always`.
    """
    as_given = not always and all(isinstance(level, BatchLevel) for level in live_levels())
    given = Arguments(len(args))
    operands: list[Any] = list(args)
    for place, arg in enumerate(args):
        if not holds(arg) or (as_given and type(arg) in CONTAINERS):
            continue
        leaves, spec = flatten(arg)
        places = [_HELD if isinstance(leaf, Plane) else as_number(leaf) or leaf for leaf in leaves]
        found = [
            leaf.value if isinstance(stands, Number) else leaf
            for leaf, stands in zip(leaves, places, strict=True)
            if stands is not leaf
        ]
        if found:
            operands[place] = None  # no operand itself
            operands += found
            given.places.append((place, places))
            given.specs.append(spec)
    return (tuple(operands), given) if given.places else (args, None)
