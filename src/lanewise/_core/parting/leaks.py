"""Derivatives that lanes get where they come together, and that they would not have in a loop.

There a value has a derivative as a whole, or none. Where some lanes have one and others have none (they hold what does
not depend on the input), those get one of zeros, and zero times an infinite derivative is no number. So does a second
reverse pass for what the first has put together from some lanes and others.

The formulas are linear in these zeros: a derivative that is a number in every lane has none that spoiled it. Where one
is not a number, the lanes run again, parted to the end: those that run together go one way, and have all or nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import Restart, machine
from lanewise._core.plane import Plane, numbers_of, tangents_of


def note_zeros(level: Any) -> None:
    """Lanes of a level have come together with zeros for what some of them do not have."""
    while level is not None:
        if level.zeros is False:
            level.zeros = True
        level = getattr(level, "outer", None)


def note_filled(level: Any, rows: list[Tensor]) -> None:
    """Rows of lanes come together on the plane below, where some may have tangents and others none."""
    if any(isinstance(row, Plane) for row in rows) and len({len(tangents_of(row)) for row in rows}) > 1:
        note_zeros(level)


def note_zeros_of_all() -> None:
    """Lanes that run have been given zeros, and others as well."""
    for call in machine.boundaries:
        note_zeros(call.level)


def check_derivatives(derivatives: Iterable[Any]) -> None:
    """What a transform has found inside of functions whose lanes part.

    Raises:
        Restart: One is no number, which may be the fault of such zeros.
    """
    for call in reversed(machine.boundaries):
        level = call.level
        if level.zeros and level.journal is not None:
            with on_plane(None):
                if any(isinstance(each, Tensor) and _has_nan(each) for each in derivatives):
                    raise Restart(level, once=True)
            return


def check_results(level: Any, results: Iterable[Any]) -> None:
    """The tangents of what a function returns, for transforms around it."""
    if level.zeros:
        with on_plane(None):
            if any(_has_nan(tangent) for each in results for tangent in tangents_of(each)):
                raise Restart(level, once=True)


def _has_nan(value: Tensor) -> bool:
    numbers = numbers_of(value)
    if not (numbers.is_floating_point() or numbers.is_complex()) or numbers.layout is not torch.strided:
        return False
    return not numbers.is_nested and bool(numbers.isnan().any())
