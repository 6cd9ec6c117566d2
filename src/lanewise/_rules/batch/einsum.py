"""`torch.einsum`: the lanes are one more letter, so that one call serves all of them.

Otherwise it falls apart into a dozen views on lanes around one product.
"""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import current_level, route_name
from lanewise._core.plane import Plane, recorded
from lanewise._torch_compat import (
    dispatch_mode_count,
    forward_level,
    is_any_autocast_enabled,
    is_grad_enabled,
    never_compile,
)

_plain = torch.einsum


def _einsum(*args: Any) -> Tensor:
    """`torch.einsum` while a level is open."""
    level = current_level()
    if type(level) is BatchLevel and len(args) > 1 and type(args[0]) is str:
        operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        equation = _with_lanes(level, args[0], operands) if _servable(level, operands) else None
        if equation is not None:
            return level.wrap(level.below(_einsum, equation, *[level.physical(operand) for operand in operands]))
    return _plain(*args)


def _servable(level: BatchLevel, operands: Sequence[Any]) -> bool:
    """Whether some operand has lanes and nobody differentiates, casts or watches the operations on this plane."""
    if forward_level() >= 0 or is_any_autocast_enabled() or dispatch_mode_count():
        return False
    mapped = False
    for operand in operands:
        if not isinstance(operand, Tensor) or (is_grad_enabled() and recorded(operand)):
            return False
        if level.mapped(operand):
            if operand.home is not level.lanes:
                return False
            mapped = True
        elif type(operand) is BatchTensor and operand.level is level:
            return False
        elif isinstance(operand, Plane) and operand.level.order > level.order:
            return False
    return mapped


def _with_lanes(level: BatchLevel, equation: str, operands: Sequence[Any]) -> str | None:
    """The equation below; None where torch is to say what is wrong with this one."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letter = next((letter for letter in ascii_letters if letter not in equation), None)
    if letter is None or len(terms) != len(operands):
        return None
    letters = [c for c in left if c.isalpha()]
    if not arrow:
        once = sorted(c for c in letters if letters.count(c) == 1)
        right = "".join(["..." if "..." in left else "", *once])
    if any(c.isalpha() and c not in letters for c in right):
        return None
    below = []
    for term, operand in zip(terms, operands, strict=True):
        if "." not in term and len(term) != operand.dim():
            return None
        below.append(letter + term if level.mapped(operand) else term)
    return f"{','.join(below)}->{letter}{right}"


never_compile(_einsum)
route_name("einsum", _einsum)
