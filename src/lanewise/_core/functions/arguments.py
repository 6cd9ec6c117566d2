"""Tensors that arguments of a custom Function hold, in a list or a dict: operands of which backward knows nothing."""

from typing import Any

from lanewise._core.batch import BatchLevel
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
            given[place] = unflatten(
                [next(held) if leaf is _HELD else None if blank else leaf for leaf in leaves], spec
            )
        return tuple(given)


# Stands in an argument for a tensor among the operands.
_HELD = object()


def with_held_tensors(args: tuple, always: bool) -> tuple[tuple, Arguments | None]:
    """The operands of an application, and how the user's arguments come of them; None where they are the operands.

    Where all planes are of lanes, forward runs on the plane on which it was called, and finds there what it is given:
    they stay as they are, unless `always`.
    """
    if not always and all(isinstance(level, BatchLevel) for level in live_levels()):
        return args, None
    given = Arguments(len(args))
    operands: list[Any] = list(args)
    for place, arg in enumerate(args):
        if type(arg) not in CONTAINERS:
            continue
        leaves, spec = flatten(arg)
        found = [leaf for leaf in leaves if isinstance(leaf, Plane)]
        if found:
            operands[place] = None  # no operand itself
            operands += found
            given.places.append((place, [_HELD if isinstance(leaf, Plane) else leaf for leaf in leaves]))
            given.specs.append(spec)
    return (tuple(operands), given) if given.places else (args, None)
