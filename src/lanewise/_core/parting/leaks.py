"""Derivatives that lanes get where they come together, and that they would not have in a loop.

There a value has a derivative as a whole, or none. Where some lanes have one and others have none (they hold what does
not depend on the input), those get one of zeros, and zero times an infinite derivative is no number. So does a second
reverse pass for what the first has put together from some lanes and others.

The formulas are linear in these zeros: a derivative that is a number in every lane has none that spoiled it. Where one
is not a number, the lanes run again, parted to the end: those that run together go one way, and have all or nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import on_plane, standing
from lanewise._core.parting.lanes import Restart, machine, with_around
from lanewise._core.parting.steep import steep
from lanewise._core.plane import Plane, numbers_of, recorded, tangents_of
from lanewise._torch_compat import forward_ad, forward_level


def note_zeros(level: Any) -> None:
    """Lanes of a level have come together with zeros for what some of them do not have."""
    for each in with_around(level):
        if each.zeros is False:
            each.zeros = True


def note_filled(level: Any, rows: list[Tensor]) -> None:
    """Rows of lanes come together on the plane below, where some may have tangents and others none."""
    if forward_level() >= 0 or any(isinstance(row, Plane) for row in rows):
        if len({len(level.below(_all_tangents, row)) for row in rows}) > 1:
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


def note_steep_tangents(level: Any, out: Tensor, begun: int) -> None:
    """Say so if a derivative is infinite of a result `out` below, whose value or tangents are recorded further below.

    (absent.py takes care of what is recorded itself. `begun`: the number of the first node.)
    """
    with on_plane(None):
        if any(recorded(part) and steep(part, begun) for part in _parts_below(out)):
            expect_notes(level)


def expect_notes(level: Any) -> None:
    """From now on, nodes bear notes of what is absent in some lanes."""
    for each in with_around(level):
        each.has_absent = each.has_absent is not None


def check_results(level: Any, results: Sequence[Any], parted: bool) -> None:
    """What a function returns, on the plane below; `parted`: whether lanes have.

    Raises:
        Restart: A tangent is no number. Or a transform around would go back through infinite derivatives twice: that
            ends in zero times infinity where rows of some lanes were computed together with those of others.
    """
    if level.zeros is None:
        return
    with on_plane(None):
        again = level.zeros and any(_has_nan(tangent) for each in results for tangent in _all_tangents(each))
        if again or (level.has_absent and parted and any(map(_goes_back_twice, results))):
            raise Restart(level, once=True)


def _goes_back_twice(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    if recorded(value):
        return standing.orders > 1 or bool(tangents_of(value))
    return bool(tangents_of(value)) and any(map(recorded, _parts_below(value)))


def _all_tangents(value: Any) -> list[Tensor]:
    """The tangents of all planes, and that of torch's own forward mode."""
    found = tangents_of(value)
    if forward_level() >= 0:
        while isinstance(value, Plane):
            value = value.value
        native = forward_ad.unpack_dual(value, level=0).tangent if isinstance(value, Tensor) else None
        return found if native is None else [*found, native]
    return found


def _parts_below(value: Tensor) -> list[Tensor]:
    """The values and tangents that a tensor is made of, on the planes below its own."""
    found: list[Tensor] = []
    while isinstance(value, Plane):
        tangent = getattr(value, "tangent", None)
        if tangent is not None:
            found += [tangent, *_parts_below(tangent)]
        value = value.value
        found.append(value)
    return found


def _has_nan(value: Tensor) -> bool:
    numbers = numbers_of(value)
    if not (numbers.is_floating_point() or numbers.is_complex()) or numbers.layout is not torch.strided:
        return False
    return not numbers.is_nested and bool(numbers.isnan().any())
