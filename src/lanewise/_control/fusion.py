"""Expressions of elementwise operations, computed on the plane below as a whole (arithmetic.py finds them)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.direct import unwatched
from lanewise._core.hot import inert
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import machine
from lanewise._core.plane import recorded
from lanewise._torch_compat import OUTSIDE_KEY, include_key

_NUMBERS = frozenset([int, float])


def fused(run: Callable, apart: Callable | None, *operands: Any) -> Any:
    """The value of an expression of elementwise operations.

    Args:
        run: The expression as a function of its operands.
        apart: The same for operands of any kind, None where `run` will do.
        operands: What its names hold.
    """
    level = machine.level
    if level is not None and unwatched(level):
        out = _below(level, run, operands)
        if out is not None:
            return level.wrap(out)
    return (apart or run)(*operands)


def _below(level: LaneLevel, run: Callable, operands: tuple) -> Tensor | None:
    """The value `[n, *S]` on the plane below, for the lanes that run; None where the operations go one by one.

    Where all operands with lanes have one rank, operations on the values below broadcast and promote as they do here.
    One without lanes has fewer dims there, which makes it weaker in promotion: it must have the dtype of all others.
    """
    lanes = level.lanes
    values = []
    rank = narrow = 0
    dtype: Any = None
    one = True
    direct = level.parent is None
    for operand in operands:
        kind = type(operand)
        if kind is BatchTensor:
            if operand.level is not level or recorded(operand):
                return None
            if operand.mapped:
                value = (operand if operand.home is lanes else level.here(operand)).value
                if rank and value.dim() != rank:
                    return None
                rank = value.dim()
            else:
                value = operand.value
                if operand.origin is not None:
                    return None
                narrow = max(narrow, value.dim() + 1)
        elif kind is Tensor:
            value = operand
            if value.requires_grad or value.layout is not torch.strided:
                return None
            narrow = max(narrow, value.dim() + 1)
        elif kind in _NUMBERS or operand is torch:
            values.append(operand)
            continue
        else:
            return None
        one = one and (dtype is None or value.dtype is dtype)
        dtype = value.dtype
        direct = direct and inert(value)
        values.append(value)
    if not rank or narrow > rank or (narrow and not one):
        return None
    known = len(machine.raised)
    try:
        if not direct:
            out = level.below(run, *values)
        else:
            include_key(OUTSIDE_KEY, False)
            try:
                out = run(*values)
            finally:
                include_key(OUTSIDE_KEY, True)
    except Exception:
        # The operation that fails is to say so itself, about the lanes.
        del machine.raised[known:]
        return None
    return out if isinstance(out, Tensor) and out.dim() == rank else None
