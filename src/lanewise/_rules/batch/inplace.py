"""Copies and fills, also by index, in place, and operations on lists of tensors."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import route_name
from lanewise._core.missing import lane_loop
from lanewise._core.plane import Plane
from lanewise._core.python.factories import route
from lanewise._core.short import hot
from lanewise._core.short.paths import write_path
from lanewise._rules.batch.families import computed_in, decompose, keeps_digits, lane_rule, shift_dim
from lanewise._rules.batch.operands import aligner, at_least_1d, lane_numbers, logical_dtype
from lanewise._rules.lists import entry_by_entry, name_of, operations_on_lists, takes_numbers_of_tensor
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


@lane_rule(aten.copy_.default)
def copy_(level, x, source, non_blocking=False):
    """x [B, *S] <- source [B, *T] or [*T], broadcast"""
    align = aligner(level, [x, source], promote=False)
    return x.value.copy_(align(source), non_blocking)


hot.route(aten.copy_.default, write_path(aten.copy_.default._op))


def _check_filling(value):
    if value.dim():
        raise TransformError(
            at_user_line(
                f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dimensions",
                "x.copy_(value)",
            )
        )


@lane_rule(aten.fill_.Tensor)
def fill_(level, x, value):
    """x [B, *S] <- value [B] or []"""
    _check_filling(value)
    align = aligner(level, [x, value], promote=False)
    return x.value.copy_(align(value).clone())  # it may be an element of x


@lane_rule(aten.fill.Tensor)
def fill(level, x, value):
    """x [B, *S], value [B] or [] -> value everywhere [B, *S]"""
    _check_filling(value)
    align = aligner(level, [x, value], promote=False)
    return align(value).to(x.dtype).expand(level.size, *x.shape).clone(memory_format=torch.contiguous_format)


@lane_rule(aten.copy.default)
def copy(level, x, source, non_blocking=False):
    """x [B, *S], source [B, *T] or [*T] -> source, broadcast to x [B, *S]"""
    align = aligner(level, [x, source], promote=False)
    return aten.copy(level.expanded(x), align(source), non_blocking)


@lane_rule(aten.fill_diagonal_.default)
def fill_diagonal_(level, x, fill_value, wrap=False):
    """x [B, *S] <- fill_value where all coordinates are equal"""
    if x.dim() < 2:
        raise TransformError(at_user_line(f"fill_diagonal_: dimensions must larger than 1, got {list(x.shape)}"))
    if x.dim() > 2 and len(set(x.shape)) > 1:
        raise TransformError(at_user_line("fill_diagonal_: all dimensions of input must be of equal length"))
    mask = torch.zeros(x.shape, dtype=torch.bool, device=x.device).fill_diagonal_(True, wrap)
    return x.value.masked_fill_(mask, fill_value)


# --- fills by index -------------------------------------------------------------------------------------------------


@lane_rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(level, x, dim, index, value):
    """x [B, *S], index [B, n] or [n], value [B], [] or a number -> [B, *S]"""
    dim = shift_dim(dim, max(x.dim(), 1))
    values = at_least_1d(level, x)
    if not level.mapped(index) and not level.mapped(value):
        out = torch.index_fill(values, dim, index, value)
    else:
        # A mask, so that places named twice count once in the gradient of the value.
        indices = at_least_1d(level, index)
        mask = torch.zeros((level.size, values.shape[dim]), dtype=torch.bool, device=x.device)
        yes = torch.ones((), dtype=torch.bool, device=x.device)
        mask = aten.index_put(mask, [lane_numbers(level, indices, 2), indices], yes)
        mask = mask.view(level.size, *[1] * (dim - 1), values.shape[dim], *[1] * (values.dim() - dim - 1))
        if level.mapped(value):
            value = value.value.to(x.dtype).view(level.size, *[1] * (values.dim() - 1))
        out = torch.where(mask, value, values).to(x.dtype)
    return out if x.dim() else out.squeeze(1)


def _mask_of(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """index_fill by a mask: torch's own gradient of the value needs the unique indices, as many as a lane has."""
    if isinstance(value, Tensor) and value.dim():
        why = f"index_fill_ only supports a 0-dimensional value tensor, but got {list(value.shape)}"
        raise TransformError(at_user_line(why, "value.squeeze()"))
    rank = max(x.dim(), 1)
    dim = shift_dim(dim, rank) - 1
    mask = torch.zeros(x.shape[dim] if x.dim() else 1, dtype=torch.bool, device=x.device).index_fill(0, index, True)
    return mask.view([-1 if k == dim else 1 for k in range(rank)]) if x.dim() else mask.squeeze(0)


def _filled_by_tensor(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    return torch.where(_mask_of(x, dim, index, value), value.to(x.dtype), x)


def _fill_in_place(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return x.masked_fill_(_mask_of(x, dim, index, value), value.to(x.dtype) if isinstance(value, Tensor) else value)


route(aten.index_fill.int_Tensor, _filled_by_tensor)
route(aten.index_fill_.int_Tensor, _fill_in_place)
decompose(aten.index_fill_.int_Scalar, _fill_in_place)


# --- lists of tensors ------------------------------------------------------------------------------------------------


def _listed(op):
    """One operation per tensor of the lists, as one call below."""
    lists = [
        k
        for k, arg in enumerate(op._schema.arguments)
        if "Tensor[]" in str(arg.type) or "List[Tensor]" in str(arg.type)
    ]
    mutates = op._schema.is_mutable
    products = name_of(op).rstrip("_") in ("mul", "div")

    @lane_rule(op)
    def run(level, *args, **options):
        """lists of [B, *S] or [*S] -> a list of [B, *S]"""
        numbers = [arg for arg in (*args, *options.values()) if isinstance(arg, Tensor)]
        if any(level.mapped(arg) for arg in numbers):
            return lane_loop(level, op, args, options)
        bound = [list(arg) if k in lists else arg for k, arg in enumerate(args)]
        given = [k for k in lists if k < len(args)]
        rounded: dict[int, torch.dtype] = {}
        for i in range(len(args[lists[0]])):
            operands = [args[k][i] for k in given]
            if not any(level.mapped(operand) for operand in operands):
                operands = [level.wrap(level.expanded(operand)) for operand in operands]
            dtype = logical_dtype(operands)
            finer = products and keeps_digits(operands, dtype)
            align = aligner(level, operands, computed_in if finer else None, written=operands[0] if mutates else None)
            for k, operand in zip(given, operands, strict=True):
                bound[k][i] = align(operand)
            if finer and not mutates:
                rounded[i] = dtype
        out = op(*bound, **options)
        return [value.to(rounded.get(i, value.dtype)) for i, value in enumerate(out)] if rounded else out


for _op in operations_on_lists():
    lone = any(str(arg.type) == "Tensor" for arg in _op._schema.arguments) and not takes_numbers_of_tensor(_op)
    if lone or name_of(_op) in ("clone", "max", "mm", "norm", "powsum"):
        decompose(_op, entry_by_entry(_op))
    else:
        _listed(_op)


def _by_tensor(name: str) -> None:
    """With a 0-dim tensor for all entries, torch may ask for its number, and its derivative would be lost.

    It does so for sums, and what comes of them has the dtype that it has with the number.
    """
    plain, by_tensor, by_list = getattr(torch, name), getattr(aten, name).Tensor, getattr(aten, name).List
    sums = "add" in name

    def run(*args: Any, **options: Any) -> Any:
        if len(args) != 2 or not isinstance(args[1], Plane):
            return plain(*args, **options)
        if not sums:
            return by_tensor(*args, **options)
        entries, number = args
        kind: Any = complex if number.is_complex() else float if number.is_floating_point() else int
        dtypes = [torch.result_type(x, True if number.dtype is torch.bool else kind(1)) for x in entries]
        if all(dtype is torch.result_type(x, number) for x, dtype in zip(entries, dtypes, strict=True)):
            return by_tensor(entries, number, **options)
        return by_list(entries, [number.to(dtype) for dtype in dtypes], **options)

    route_name(name, run)


for _bare in ("add", "mul", "div"):
    _by_tensor(f"_foreach_{_bare}")
    _by_tensor(f"_foreach_{_bare}_")
