"""Expressions of elementwise operations, computed on the plane below as a whole (arithmetic.py finds them)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._control.runtime.choices import for_each_value
from lanewise._core.batch import BatchTensor
from lanewise._core.functions.formulas import pulled
from lanewise._core.level import on_plane
from lanewise._core.one_lane import FAILURES
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.rows import gather_rows, spread_rows
from lanewise._core.plane import recorded
from lanewise._core.recording.passes import run_backward
from lanewise._core.short.direct import unwatched
from lanewise._core.short.hot import inert
from lanewise._torch_compat import (
    ForceDispatchKeyGuard,
    apply_plainly,
    current_graph_task_id,
    is_grad_enabled,
    saved_tensor_hooks,
    set_grad_enabled,
)

_NUMBERS = frozenset([int, float])


def fused(run: Callable, apart: Callable | None, compares: bool, writes: bool, keep: int, *operands: Any) -> Any:
    """The value of an expression of elementwise operations.

    Args:
        run: The expression as a function of its operands.
        apart: The same for operands of any kind, None where `run` will do.
        compares: Whether it is a comparison, which has no derivative.
        writes: Whether the function may write to tensors in place: to an operand, though it was recorded with others
            whose values its derivatives need.
        keep: What may come out as a Mixed (merging.py).
        operands: What its names hold.
    """
    level = machine.level
    if level is not None and unwatched(level):
        found = _values(level, operands)
        if found is not None:
            values, rank, direct, tracked = found
            if not tracked or compares or not is_grad_enabled():
                out = _below(level, run, values, direct)
                if isinstance(out, Tensor) and out.dim() == rank:
                    return level.wrap(out)
            elif direct and not writes and current_graph_task_id() == level.task and saved_tensor_hooks() is None:
                known = len(machine.raised)
                try:
                    out, leaves = _recorded_below(level, run, values, operands)
                    if out.dim() == rank:
                        if out.requires_grad:
                            return apply_plainly(_Expression, level, apart or run, (out, leaves), *operands)
                        # Of a result that could be recorded, plain torch keeps nothing in inference mode.
                        if not (out.is_floating_point() or out.is_complex()):
                            return level.wrap(out)
                except FAILURES:
                    del machine.raised[known:]
    return for_each_value(apart or run, keep, operands, 2)


def _values(level: LaneLevel, operands: tuple) -> tuple[list, int, bool, bool] | None:
    """The values below for the lanes that run; None where the operations are to go one by one.

    Where all operands with lanes have one rank, operations on the values below broadcast and promote as they do here.
    One without lanes has fewer dims there, which makes it weaker in promotion: it must have the dtype of all others.

    Returns:
        The values, the rank of those `[n, *S]` with lanes, whether nothing looks at any of them on the plane below, and
        whether autograd records one on this plane.
    """
    lanes = level.lanes
    values = []
    rank = narrow = 0
    dtype: Any = None
    one = True
    direct = level.parent is None
    tracked = False
    for operand in operands:
        kind = type(operand)
        if kind is BatchTensor:
            if operand.level is not level:
                return None
            if operand.mapped:
                tracked = tracked or recorded(operand)
                value = (operand if operand.home is lanes else level.here(operand)).value
                if rank and value.dim() != rank:
                    return None
                rank = value.dim()
            else:
                value = operand.value
                if operand.origin is not None or recorded(operand):
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
    return values, rank, direct, tracked


def _below(level: LaneLevel, run: Callable, values: list, direct: bool) -> Tensor | None:
    """The expression on the plane below; None where it fails, for the operation that does is to say so itself."""
    known = len(machine.raised)
    try:
        if not direct:
            return level.computed(run, *values)
        with on_plane(None):
            return run(*values)
    except FAILURES:
        del machine.raised[known:]
        return None


def _recorded_below(level: LaneLevel, run: Callable, values: list, operands: tuple) -> tuple[Any, list]:
    """The expression as plain torch records it, and what it is recorded for."""
    recording = is_grad_enabled()
    with ForceDispatchKeyGuard(level.include, level.exclude):
        leaves = [
            value.detach().requires_grad_() if type(operand) is BatchTensor and recorded(operand) else value
            for operand, value in zip(operands, values)
        ]
        set_grad_enabled(True)
        try:
            return run(*leaves), leaves
        finally:
            set_grad_enabled(recording)


class _Expression(Function):
    """An expression on the plane of its operands, recorded there as one operation; plain torch records its parts."""

    @staticmethod
    def forward(ctx: Any, level: LaneLevel, apart: Callable, parts: tuple, *operands: Any) -> Any:  # type: ignore[override]
        ctx.level, ctx.lanes, ctx.apart = level, level.lanes, apart
        ctx.set_materialize_grads(False)  # no lane may have a cotangent
        # In a tuple, where autograd does not see that plain torch has recorded it.
        ctx.out, ctx.leaves = parts
        ctx.others = [None if isinstance(operand, Tensor) else operand for operand in operands]
        ctx.save_for_backward(*[operand for operand in operands if isinstance(operand, Tensor)])
        with on_plane(None):
            shown = ctx.out.detach()
        return level.wrap(shown)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple:  # type: ignore[override]
        if cotangent is None:
            return None, None, None, *[None] * len(ctx.others)
        level = ctx.level
        if (
            type(cotangent) is BatchTensor
            and cotangent.level is level
            and cotangent.mapped
            and cotangent.home.within(ctx.lanes)
            and not is_grad_enabled()
            and inert(cotangent.value)
        ):
            return None, None, None, *_by_parts(ctx, cotangent)
        tensors = ctx.saved_tensors

        def formula(*tensors: Tensor) -> tuple:
            given = iter(tensors)
            return (ctx.apart(*[next(given) if other is None else other for other in ctx.others]),)

        with level.lanes_of_all([cotangent]):
            parts = iter(pulled(formula, tensors, (cotangent,)))
        return None, None, None, *[next(parts) if other is None else None for other in ctx.others]


def _by_parts(ctx: Any, cotangent: BatchTensor) -> list[Any]:
    """The operands' cotangents from what plain torch has recorded, for the lanes that the cotangent has.

    Lanes do not touch each other in elementwise operations: those that lack a cotangent get zero, and are left out.
    """
    level, home = ctx.level, cotangent.home
    places = None if home is ctx.lanes else home.positions(ctx.lanes)
    wanted = [leaf for leaf in ctx.leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    with ForceDispatchKeyGuard(level.include, level.exclude):
        value = cotangent.value if places is None else spread_rows(cotangent.value, places, ctx.lanes.size)
        grads = run_backward(
            (ctx.out,), (value,), True, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
        )
        if places is not None:
            grads = [grad if grad is None else gather_rows(grad, places) for grad in grads]
    found = iter(grads)
    out: list[Any] = []
    for leaf in ctx.leaves:
        grad = next(found) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        if grad is not None:
            grad = level.wrap(grad)
            grad.home = home
        out.append(grad)
    return out
