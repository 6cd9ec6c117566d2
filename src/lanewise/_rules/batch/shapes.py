"""Operations that rearrange elements: joining, splitting, flipping, padding, copies of views, raw strides."""

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.parting.interleaved import begin_in_front_of
from lanewise._core.plane import tracked
from lanewise._core.python.factories import route_past
from lanewise._core.refits import begins_at, regrow
from lanewise._core.short.hot import route
from lanewise._core.short.paths import joined_path
from lanewise._rules.batch.families import (
    along_dims,
    batch_rule,
    decompose,
    lane_rule,
    shift_dim,
    shift_dims,
    sized,
)
from lanewise._rules.batch.operands import at_least_1d, logical_dtype
from lanewise._torch_compat import decomposition_table
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

along_dims(
    aten.diagonal_scatter.default,
    aten.rot90.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.stack.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
sized(
    aten.diagonal_backward.default,
    aten.repeat.default,
    aten.select_backward.default,
    aten.slice_backward.default,
)


# --- joining ---------------------------------------------------------------------------------------------------------


@lane_rule(aten.cat.default)
def cat(level, tensors, dim=0):
    """tensors [B, *S] -> [B, *S joined at dim]; as in torch, an empty 1-dim tensor joins anything"""
    for position, tensor in enumerate(tensors):
        if not tensor.dim():
            raise TransformError(
                at_user_line(f"zero-dimensional tensor (at position {position}) cannot be concatenated")
            )
    rank = max(tensor.dim() for tensor in tensors)
    joined = [t for t in tensors if t.dim() == rank or t.shape != (0,)]
    out = torch.cat([level.expanded(t) for t in joined], shift_dim(dim, rank))
    if len(joined) == len(tensors):
        return out
    for tensor in tensors:
        if tensor.dtype != out.dtype:
            out = out.to(torch.promote_types(out.dtype, tensor.dtype))
    return out


route(aten.cat.default, joined_path(torch.cat, new_dim=False))
route(aten.stack.default, joined_path(torch.stack, new_dim=True))


decompose(aten._chunk_cat.default)


def _block_diag(tensors):
    # torch pads them to matrices, but promotes them as they are.
    dtype = logical_dtype(tensors)
    return decomposition_table[aten.block_diag.default]([tensor.to(dtype) for tensor in tensors])


decompose(aten.block_diag.default, _block_diag)


# --- moving elements -------------------------------------------------------------------------------------------------


@lane_rule(aten.flip.default)
def flip(level, x, dims):
    """x [B, *S] -> the same, reversed along dims; none for an empty list"""
    dims = [shift_dim(dim, max(x.dim(), 1)) for dim in dims]
    return torch.flip(x.value, dims if x.dim() else [])


@lane_rule(aten.roll.default)
def roll(level, x, shifts, dims=()):
    """x [B, *S] -> the same, rolled along dims, or flat where dims are left out"""
    if x.dim() and not dims:
        return torch.roll(x.value.flatten(1), shifts, 1).view(x.value.shape)
    if not x.dim():
        return x.value.clone()
    return torch.roll(x.value, shifts, shift_dims(dims, x.dim()))


@batch_rule(aten.unfold_backward.default)
def unfold_backward(lanes, grad, input_sizes, dim, size, step):
    """grad [B, *windows, size] -> [B, *input_sizes]"""
    if not input_sizes:
        return aten.unfold_backward(grad.unsqueeze(1), [lanes, 1], 1, size, step).squeeze(1)
    return aten.unfold_backward(grad, [lanes, *input_sizes], shift_dim(dim, len(input_sizes)), size, step)


# --- matrices in the last two dims -----------------------------------------------------------------------------------


def _matrices(op):
    @lane_rule(op)
    def matrices(level, x, *args, **kwargs):
        """x [B, *, m, n] -> [B, *, m, n]"""
        require_matrix(op, x)
        return op(x.value, *args, **kwargs)


def require_matrix(op, x):
    """A lane with fewer than two dims would take the lanes for one of them."""
    if x.dim() < 2:
        name = op._schema.name.removeprefix("aten::")
        raise TransformError(at_user_line(f"{name}: input tensor must have at least 2 dimensions, got {list(x.shape)}"))


for _op in (aten.tril.default, aten.tril_.default, aten.triu.default, aten.triu_.default):
    _matrices(_op)


@lane_rule(aten.trace.default)
def trace(level, x):
    """x [B, m, n] -> [B]"""
    if x.dim() != 2:
        raise TransformError(at_user_line(f"trace: expected a matrix, but got tensor with dim {x.dim()}"))
    return x.value.diagonal(0, 1, 2).sum(1)


@lane_rule(aten.diag_embed.default)
def diag_embed(level, x, offset=0, dim1=-2, dim2=-1):
    """x [B, *S, n] -> [B, *S, n, n]"""
    span = x.dim() + 1
    return torch.diag_embed(x.value, offset, shift_dim(dim1, span), shift_dim(dim2, span))


@lane_rule(aten.constant_pad_nd.default)
def constant_pad_nd(level, x, pad, value=0):
    """x [B, *S] -> [B, *padded]"""
    if len(pad) > 2 * x.dim():
        raise TransformError(
            at_user_line(
                f"Length of pad should be no more than twice the number of dimensions of the input. Pad length is "
                f"{len(pad)} while the input has {x.dim()} dimensions."
            )
        )
    return aten.constant_pad_nd(x.value, pad, value)


# --- copies of views -------------------------------------------------------------------------------------------------


def _copy_of(copy, view):
    def fresh(*args, memory_format=torch.contiguous_format, **kwargs):
        out = view(*args, **kwargs)
        if isinstance(out, Tensor):
            return out.clone(memory_format=torch.contiguous_format)
        return [part.clone(memory_format=torch.contiguous_format) for part in out]

    decompose(copy, fresh)


for _copy, _view in (
    (aten._conj_copy.default, aten._conj.default),
    (aten._neg_view_copy.default, aten._neg_view.default),
    (aten._reshape_alias_copy.default, aten._reshape_alias.default),
    (aten.detach_copy.default, aten.detach.default),
    (aten.diagonal_copy.default, aten.diagonal.default),
    (aten.expand_copy.default, aten.expand.default),
    (aten.narrow_copy.default, aten.narrow.default),
    (aten.permute_copy.default, aten.permute.default),
    (aten.select_copy.int, aten.select.int),
    (aten.slice_copy.Tensor, aten.slice.Tensor),
    (aten.split_copy.Tensor, aten.split.Tensor),
    (aten.split_with_sizes_copy.default, aten.split_with_sizes.default),
    (aten.squeeze_copy.default, aten.squeeze.default),
    (aten.squeeze_copy.dim, aten.squeeze.dim),
    (aten.squeeze_copy.dims, aten.squeeze.dims),
    (aten.t_copy.default, aten.t.default),
    (aten.transpose_copy.int, aten.transpose.int),
    (aten.unbind_copy.int, aten.unbind.int),
    (aten.unfold_copy.default, aten.unfold.default),
    (aten.unsqueeze_copy.default, aten.unsqueeze.default),
    (aten.view_as_complex_copy.default, aten.view_as_complex.default),
    (aten.view_as_real_copy.default, aten.view_as_real.default),
    (aten.view_copy.default, aten.view.default),
    (aten.view_copy.dtype, aten.view.dtype),
):
    _copy_of(_copy, _view)


# --- raw strides -----------------------------------------------------------------------------------------------------


def _positions(size, stride) -> Tensor:
    """The memory position of every element, in order, relative to the first."""
    places = torch.zeros((), dtype=torch.int64)
    for extent, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(extent) * step
    return places.reshape(-1)


def _within_lane(x: BatchTensor, size, stride, storage_offset) -> bool:
    """Whether `as_strided` reads elements of its own lane only."""
    value = x.value
    own = value.stride()[1:]
    if storage_offset is not None and begins_at(x):
        return False
    if any(step < 0 for step in stride) or len(size) != len(stride):
        return True  # torch's own error follows
    if not all(size):
        return True
    if not x.numel():
        return False
    first = storage_offset or 0
    last = first + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    reach = sum((extent - 1) * step for extent, step in zip(x.shape, own, strict=True))
    dense = reach + 1 == x.numel() and 0 not in own
    if dense or last > reach:
        return last <= reach
    return bool(torch.isin(_positions(size, stride) + first, _positions(x.shape, own)).all())


def _require_within_lane(x, size, stride, storage_offset) -> None:
    begin_in_front_of(x)
    if not _within_lane(x, size, stride, storage_offset):
        raise TransformError(
            at_user_line(
                f"vmap: as_strided(size={list(size)}, stride={list(stride)}, storage_offset={storage_offset}) on a "
                f"lane of shape {list(x.shape)} with strides {list(x.stride())} reads memory that is not its own: "
                "lanes lie interleaved, or the tensor is a slice of another",
                "x.as_strided(size, stride)                                       # from where x begins\n"
                "x.clone(memory_format=torch.contiguous_format).as_strided(...)   # strides of a tensor of its own\n"
                "x.unfold(dim, size, step)                                        # for windows",
            )
        )


@lane_rule(aten.as_strided.default)
def as_strided(level, x, size, stride, storage_offset=None):
    """x [B, *S] -> [B, *size], each lane over its own memory; a storage offset counts from the lane's first element"""
    _require_within_lane(x, size, stride, storage_offset)
    value = x.value
    offset = value.storage_offset() + (storage_offset or 0)
    return value.as_strided((level.size, *size), (value.stride(0), *stride), offset)


def _elements(x, size, stride, storage_offset) -> Tensor:
    """Which elements of `x`, counted in order, `as_strided` reads."""
    _require_within_lane(x, size, stride, storage_offset)
    own = _positions(x.shape, x.value.stride()[1:])
    table = torch.zeros(int(own.max()) + 1 if own.numel() else 1, dtype=torch.int64)
    table[own] = torch.arange(own.numel())
    return table[_positions(size, stride) + (storage_offset or 0)].to(x.device)


@lane_rule(aten.as_strided_copy.default)
def as_strided_copy(level, x, size, stride, storage_offset=None):
    """x [B, *S] -> [B, *size]"""
    elements = _elements(x, size, stride, storage_offset)
    return at_least_1d(level, x).flatten(1).index_select(1, elements).reshape(level.size, *size)


@lane_rule(aten.as_strided_scatter.default)
def as_strided_scatter(level, x, src, size, stride, storage_offset=None):
    """x [B, *S], src [B, *size] -> x with src at the elements that as_strided reads"""
    if not level.mapped(x):
        x = level.wrap(level.expanded(x).contiguous())
    elements = _elements(x, size, stride, storage_offset)
    sources = at_least_1d(level, src).flatten(1)
    return at_least_1d(level, x).flatten(1).index_copy(1, elements, sources).view(x.value.shape)


@lane_rule(aten.resize_.default, raw=True, same_plane=True)
def resize_(level: BatchLevel, x, size, *, memory_format=None):
    """x [B, *S] -> [B, *size]: the first elements are kept, those beyond are uninitialised"""
    if tracked(x):
        raise TransformError(at_user_line("cannot resize variables that require grad"))
    if x.shape == torch.Size(size):
        return x
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise TransformError(at_user_line(f"vmap: resize_ to {memory_format} is not possible on lanes"))
    count = torch.Size(size).numel()

    def resized(value: Tensor) -> Tensor:
        if not x.mapped:
            value = value.expand(level.size, *x.shape).clone(memory_format=torch.contiguous_format)
        flat = value.reshape(level.size, x.numel())
        if count > x.numel():
            flat = torch.cat([flat, flat.new_empty((level.size, count - x.numel()))], 1)
        return flat[:, :count].reshape(level.size, *size)

    if not level.owns(x):
        raise TransformError(at_user_line("vmap: resize_ of a tensor of another plane is not possible"))
    return regrow(x, level.wrap(level.below(resized, x.value)))


decompose(aten.resize_as_.default, lambda x, other, *, memory_format=None: x.resize_(other.shape))


# --- circular padding ------------------------------------------------------------------------------------------------


def _pad_circular(x, pad):
    """x [*S] with lanes -> its ends joined to it: torch copies part after part into memory that it makes"""
    extents = x.shape[x.dim() - len(pad) // 2 :][::-1]
    sides = list(zip(pad[::2], pad[1::2], strict=False))
    if type(x) is not BatchTensor or 2 * x.dim() - len(pad) not in (2, 4):
        return NotImplemented
    if any(not 0 <= side <= extent for extent, both in zip(extents, sides, strict=False) for side in both):
        return NotImplemented
    for k, ((before, after), extent) in enumerate(zip(sides, extents, strict=True)):
        dim = -1 - k
        parts = [
            *([x.narrow(dim, extent - before, before)] if before else ()),
            x,
            *([x.narrow(dim, 0, after)] if after else ()),
        ]
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x if any(pad) else NotImplemented


route_past(aten._pad_circular.default, _pad_circular)
