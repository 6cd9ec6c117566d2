"""Indexing with tensors: gather, index, take, and the writes that correspond to them.

Where lanes differ in their indices, the lane number is one more index, and an offset added to the user's only where
all were seen to be in range (picking.py): one that is not must not reach a neighbouring lane.
"""

import torch
from torch import Tensor

from lanewise._core.batch import BATCH_RULES, BatchLevel, BatchTensor
from lanewise._core.missing import lane_loop
from lanewise._core.short.hot import route
from lanewise._rules.batch.datadependent import lane_positions
from lanewise._rules.batch.families import decompose, lane_rule, shift_dim
from lanewise._rules.batch.masked import (
    check_mask,
    cotangent_of_fill,
    fill_by_mask,
    is_mask_without_lanes,
    lanes_that_pick,
    one_to_fill,
)
from lanewise._rules.batch.operands import aligner, at_least_1d, common_shape, lane_numbers
from lanewise._rules.batch.picking import rows_at, zeros_to_fill
from lanewise._torch_compat import fast_binding
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


# --- one index per element: gather and scatter -----------------------------------------------------------------------


@lane_rule(aten.gather.default)
def gather(level, x, dim, index, *, sparse_grad=False):
    """x [B, *S] or [*S], index [B, *I] or [*I] -> [B, *I]"""
    dim = shift_dim(dim, max(x.dim(), 1))
    if level.mapped(x):
        out = torch.gather(at_least_1d(level, x), dim, at_least_1d(level, index))
    else:
        # Lanes beside the gathered dim: x stays one tensor, and so does its gradient.
        indices = at_least_1d(level, index).movedim(0, dim - 1)
        sides = indices.shape[dim - 1 : dim + 1]
        out = torch.gather(x, dim - 1, indices.flatten(dim - 1, dim)).unflatten(dim - 1, sides).movedim(dim - 1, 0)
    return out if index.dim() else out.squeeze(1)


_INTO = {aten.scatter.src: aten.scatter_.src, aten.scatter_add.default: aten.scatter_add_.default}


def _scatter(op):
    into = _INTO.get(op)

    @lane_rule(op)
    def scatter(level, x, dim, index, source, *rest, **options):
        """x [B, *S], index [B, *I], source [B, *T] or a number -> [B, *S]"""
        write = op if into is None or zeros_to_fill(level, x, source) is None else into
        source = at_least_1d(level, source) if isinstance(source, Tensor) else source
        dim = shift_dim(dim, max(x.dim(), 1))
        out = write(at_least_1d(level, x), dim, at_least_1d(level, index), source, *rest, **options)
        return out if x.dim() else out.squeeze(1)


for _op in (
    aten.scatter.reduce,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.value_reduce,
    aten.scatter_.reduce,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_.value_reduce,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
):
    _scatter(_op)


# --- one index per slice: index_select and its writes ----------------------------------------------------------------


def along(index: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """index [B, n] -> one index per element, expanded to `shape` [B, *S] with S[dim - 1] = n"""
    sides = [1] * len(shape)
    sides[0], sides[dim] = index.shape
    return index.reshape(sides).expand(shape)


@lane_rule(aten.index_select.default)
def index_select(level, x, dim, index):
    """x [B, *S] or [*S], index [B, n] or [n] -> [B, *S with n at dim]"""
    dim = shift_dim(dim, max(x.dim(), 1))
    if not level.mapped(index):
        out = torch.index_select(at_least_1d(level, x), dim, index)
    elif level.mapped(x):
        values, indices = at_least_1d(level, x), at_least_1d(level, index)
        out = rows_at(values, [indices], True, wraps=False) if dim == 1 and indices.dtype is torch.int64 else None
        if out is None:
            shape = (*values.shape[:dim], indices.shape[1], *values.shape[dim + 1 :])
            out = torch.gather(values, dim, along(indices, dim, shape))
    else:
        indices = at_least_1d(level, index)
        out = torch.index_select(x if x.dim() else x.unsqueeze(0), dim - 1, indices.flatten())
        out = out.unflatten(dim - 1, indices.shape).movedim(dim - 1, 0)
    return out if x.dim() else out.squeeze(1)


def _add(scatter_add):
    def add(x, dim, index, source, alpha=1):
        return scatter_add(x, dim, index, source if alpha == 1 else source * alpha)

    return add


def _slices(op, per_element):
    """A write of slices: the op itself where all lanes write to the same places, else its twin for single elements."""
    into = _add(aten.scatter_add_.default) if op is aten.index_add.default else None

    @lane_rule(op)
    def write(level, x, dim, index, source, *rest, **options):
        """x [B, *S], index [B, n] or [n], source [B, *S with n at dim] -> [B, *S]"""
        dim = shift_dim(dim, max(x.dim(), 1))
        values, sources = at_least_1d(level, x), at_least_1d(level, source)
        if not level.mapped(index):
            out = op(values, dim, index, sources, *rest, **options)
        else:
            indices = at_least_1d(level, index)
            if sources.shape != (*values.shape[:dim], indices.shape[1], *values.shape[dim + 1 :]):
                raise TransformError(
                    at_user_line(
                        f"vmap: {op}: source {list(source.shape)} does not fit self {list(x.shape)} with "
                        f"{indices.shape[1]} indices along dim {dim - 1}"
                    )
                )
            write = per_element if into is None or zeros_to_fill(level, x, source) is None else into
            out = write(values, dim, along(indices, dim, sources.shape), sources, *rest, **options)
        return out if x.dim() else out.squeeze(1)


_slices(aten.index_add.default, _add(aten.scatter_add.default))
_slices(aten.index_add_.default, _add(aten.scatter_add_.default))
_slices(aten.index_copy.default, aten.scatter.src)
_slices(aten.index_copy_.default, aten.scatter_.src)
_slices(aten.index_reduce.default, aten.scatter_reduce.two)
_slices(aten.index_reduce_.default, aten.scatter_reduce_.two)


# --- indices in brackets: index and index_put ------------------------------------------------------------------------


class Bracket:
    """What `x[indices]` is below.

    Attributes:
        indices: The indices below.
        order: `physical.permute(order)` is `[B, *logical result]`; None where it is that already.
        rank: Number of dims of the logical result.
    """

    def __init__(self, level: BatchLevel, x: Tensor, indices: list, x_mapped: bool) -> None:
        self.order: list[int] | None = None
        self.indices: list = []
        numbers = _own_numbers(level, x, indices) if x_mapped else None
        if numbers is not None:
            self.rank = numbers[0].dim() - 1 + x.dim() - len(numbers)
            self.indices = [lane_numbers(level, x, numbers[0].dim()), *numbers]
            return
        positions: list = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                check_mask(x, len(positions), index)
                positions.extend(lane_positions(level, index))
            else:
                positions.append(None if index is None else (level.physical(index), index.dim(), level.mapped(index)))
        used = [k for k, position in enumerate(positions) if position is not None]
        if len(positions) > x.dim():
            raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
        first, count = used[0], len(used)
        adjacent = used[-1] - first + 1 == count
        wide = max(positions[k][1] for k in used)
        index_mapped = any(positions[k][2] for k in used)
        rest = x.dim() - first - count if adjacent else 0
        self.rank = wide + x.dim() - count
        for position in positions:
            if position is None:
                self.indices.append(None)
                continue
            value, rank, mapped = position
            if mapped and rank < wide:
                value = value.reshape(level.size, *[1] * (wide - rank), *value.shape[1:])
            self.indices.append(value)
        if not index_mapped:
            self.indices.insert(0, None)
            if not adjacent:
                self.order = [wide, *range(wide), *range(wide + 1, self.rank + 1)]
        elif x_mapped:
            self.indices.insert(0, lane_numbers(level, x, wide + 1))
            if adjacent and first:
                self.order = [0, *range(wide + 1, wide + 1 + first), *range(1, wide + 1)]
                self.order += range(wide + 1 + first, wide + 1 + first + rest)
        elif adjacent and first:
            self.order = [first, *range(first), *range(first + 1, self.rank + 1)]

    def enter(self, level: BatchLevel, values: Tensor) -> Tensor:
        """Values of the logical result's shape, or broadcast to it -> values for the physical result."""
        mapped = level.mapped(values)
        below = level.physical(values)
        lead = below.shape[:1] if mapped else ()
        shape = values.shape
        while len(shape) > self.rank and shape[0] == 1:
            shape = shape[1:]
        if mapped or self.order is not None:
            shape = (*lead, *[1] * (self.rank - len(shape)), *shape)
        if shape != below.shape:
            below = below.reshape(shape)
        if self.order is None:
            return below
        if not mapped:
            below = below.unsqueeze(0)
        inverse = [0] * len(self.order)
        for k, dim in enumerate(self.order):
            inverse[dim] = k
        return below.permute(inverse)


def _own_numbers(level: BatchLevel, x: Tensor, indices: list) -> list[Tensor] | None:
    """The indices [B, *I] below, if they are numbers of one rank for the first dims; the commonest case."""
    if len(indices) > x.dim():
        return None
    numbers: list[Tensor] = []
    for index in indices:
        if type(index) is not BatchTensor or index.level is not level or not index.mapped:
            return None
        value = index.value
        if value.dtype is not torch.int64 or (numbers and value.dim() != numbers[0].dim()):
            return None
        numbers.append(value)
    return numbers


def _is_one_without_lanes(x: Tensor, indices: list[Tensor | None]) -> bool:
    """Whether the last index is the only one, of plain numbers: what it picks stays in its place."""
    last = indices[-1]
    if type(last) is not Tensor or last.dtype is not torch.int64 or len(indices) > x.dim():
        return False
    return all(index is None for index in indices[:-1])


def _bracket_path(op):
    """The short way (hot.py) for operands of which each has lanes or none, and some have."""
    rule = BATCH_RULES[op]

    def run(args, kwargs):
        level = None
        for operand in (args[0], *args[1], *args[2:3]):
            kind = type(operand)
            if kind is BatchTensor:
                level = operand.level if level is None else level
                if not operand.mapped or operand.level is not level or operand.home is not level.lanes:
                    return NotImplemented
            elif operand is not None and (kind is not Tensor or operand.layout is not torch.strided):
                return NotImplemented
        return NotImplemented if level is None else level.wrap(level.below(rule.run, level, args, kwargs))

    return run


def _index(op):
    call = fast_binding(op)

    @lane_rule(op)
    def index(level, x, indices):
        """x [B, *S] or [*S], each index [B, *I], [*I] or None -> [B, *result]"""
        if level.mapped(x) and _is_one_without_lanes(x, indices):
            return call(x.value, [None, *indices])
        numbers = _own_numbers(level, x, indices)
        if numbers is not None:
            value, lanes = level.physical(x), level.mapped(x)
            out = rows_at(value, numbers, lanes)
            if out is None:
                out = call(value, [lane_numbers(level, value, numbers[0].dim()), *numbers] if lanes else numbers)
            return out
        padded = cotangent_of_fill(level, x, indices)
        if padded is not None:
            return padded
        if level.mapped(x) and is_mask_without_lanes(level, x, indices):
            return op(x.value, [None, *indices])
        fewer = lanes_that_pick(level, x, indices)
        if fewer is not None:
            x, indices, _ = fewer
        bracket = Bracket(level, x, indices, level.mapped(x))
        out = op(level.physical(x), bracket.indices)
        return out if bracket.order is None else out.permute(bracket.order)


_index(aten.index.Tensor)
_index(aten._unsafe_index.Tensor)
route(aten.index.Tensor, _bracket_path(aten.index.Tensor))


def _index_put(op):
    call, mutates = fast_binding(op), op._schema.is_mutable
    into = call if mutates else fast_binding(aten.index_put_.default)

    @lane_rule(op)
    def index_put(level, x, indices, values, accumulate=False, *rest):
        """x [B, *S] or [*S], each index [B, *I], [*I] or None, values broadcast to the result -> [B, *S]"""
        if values.dtype is not x.dtype and not accumulate:
            values = one_to_fill(level, x, indices, values)
        if level.mapped(x) and level.mapped(values) and _is_one_without_lanes(x, indices):
            if values.dim() == x.dim() - 1 + indices[-1].dim():
                return call(x.value, [None, *indices], values.value, accumulate, *rest)
        numbers = _own_numbers(level, x, indices) if level.mapped(x) else None
        if numbers is not None and level.mapped(values) and values.dim() == x.dim() - len(numbers) + indices[0].dim():
            where = [lane_numbers(level, x.value, numbers[0].dim()), *numbers]
            write = into if accumulate and zeros_to_fill(level, x, values) is not None else call
            return write(x.value, where, values.value, accumulate, *rest)
        found = fill_by_mask(level, op, x, indices, values, accumulate)
        if found is not None:
            where, fill = found
            if mutates and 0 in x.value.stride():
                # Elements that share memory: those alone are written that the mask picks, one after the other.
                where = where.expand_as(x.value)
                return call(x.value, [where], fill.expand_as(x.value)[where], accumulate)
            below = level.expanded(x)
            filled = torch.where(where, below + fill if accumulate else fill, below)
            return x.value.copy_(filled) if mutates else filled
        if level.mapped(x) and is_mask_without_lanes(level, x, indices):
            if values.dim() == x.dim() - indices[-1].dim() + 1:
                return call(x.value, [None, *indices], level.physical(values), accumulate, *rest)
        fewer = None if mutates else lanes_that_pick(level, x, indices, values)
        if fewer is not None:
            x, indices, values = fewer
        bracket = Bracket(level, x, indices, True)
        below, values = level.expanded(x), bracket.enter(level, values)
        write = into if accumulate and zeros_to_fill(level, x, values) is not None else call
        return write(below, bracket.indices, values, accumulate, *rest)


_index_put(aten._index_put_impl_.default)
_index_put(aten._unsafe_index_put.default)
_index_put(aten.index_put.default)
_index_put(aten.index_put_.default)
route(aten.index_put.default, _bracket_path(aten.index_put.default))

decompose(aten._unsafe_masked_index.default)
decompose(aten._unsafe_masked_index_put_accumulate.default)


# --- flat indices: take, put -----------------------------------------------------------------------------------------


@lane_rule(aten.take.default)
def take(level, x, index):
    """x [B, *S] or [*S], index [B, *I] or [*I] -> [B, *I]"""
    if not level.mapped(x):
        return torch.take(x, index.value)
    flat = at_least_1d(level, x).flatten(1)
    if not level.mapped(index):
        return aten.index(flat, [None, index])
    return aten.index(flat, [lane_numbers(level, index, index.dim() + 1), index.value])


@lane_rule(aten.put.default)
def put(level, x, index, source, accumulate=False):
    """x [B, *S], index [B, *I], source [B, *T] of as many elements -> [B, *S]"""
    if index.numel() != source.numel():
        raise TransformError(
            at_user_line(
                f"put_(): Expected source and index to have the same number of elements, but got source.numel() = "
                f"{source.numel()}, index.numel() = {index.numel()}"
            )
        )
    values = at_least_1d(level, x)
    flat, indices = values.flatten(1), at_least_1d(level, index).flatten(1)
    where = [lane_numbers(level, indices, 2), indices]
    return aten.index_put(flat, where, at_least_1d(level, source).flatten(1), accumulate).view(level.expanded(x).shape)


# --- masks -----------------------------------------------------------------------------------------------------------


@lane_rule(aten.masked_fill.Tensor, guarded=False)
def masked_fill(level, x, mask, value):
    """x [B, *S], mask [B, *M], value [B] or [] -> [B, *broadcast]"""
    align = aligner(level, [x, mask], promote=False)
    below, where = align(x), align(mask)
    if not level.mapped(value):
        return torch.masked_fill(below, where, value)
    fill = value.value.to(x.dtype)
    return torch.where(where, fill.view(level.size, *[1] * max(x.dim(), mask.dim())), below)


@lane_rule(aten.masked_fill_.Tensor)
def masked_fill_(level, x, mask, value):
    """x [B, *S] <- value [B] or [] where mask [B, *M]"""
    where = aligner(level, [x, mask], promote=False)(mask)
    if not level.mapped(value):
        return x.value.masked_fill_(where, value)
    fill = value.value.to(x.dtype)
    return x.value.copy_(torch.where(where, fill.view(level.size, *[1] * x.dim()), x.value))


@lane_rule(aten.masked_scatter.default)
def masked_scatter(level, x, mask, source):
    """x [B, *S], mask [B, *M], source [B, *T] read in order -> [B, *broadcast]"""
    if not source.numel():
        return lane_loop(level, aten.masked_scatter.default, (x, mask, source), {})
    shape = torch.Size((level.size, *common_shape(x, mask)))
    align = aligner(level, [x, mask], promote=False)
    below, where = align(x).expand(shape), align(mask).expand(shape)
    flat = where.reshape(level.size, shape[1:].numel())
    order = (flat.cumsum(1) - 1).clamp_min(0)
    sources = torch.gather(at_least_1d(level, source).flatten(1), 1, order).view(shape)
    return torch.where(where, sources, below).contiguous()


@lane_rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(level, grad, mask, sizes):
    """grad [B, *S], mask [B, *S] -> the picked elements in order, then zeros [B, *sizes]"""
    count = torch.Size(sizes).numel()
    flat = at_least_1d(level, mask.expand(grad.shape)).flatten(1)
    order = torch.where(flat, (flat.cumsum(1) - 1).clamp_max(count), count)
    out = torch.zeros((level.size, count + 1), dtype=grad.dtype, device=grad.device)
    return out.scatter(1, order, at_least_1d(level, grad).flatten(1))[:, :count].reshape(level.size, *sizes)
