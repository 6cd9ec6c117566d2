"""Tensors made from others, and tensors made from nothing inside a mapped function."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BATCH_RULES, BatchLevel
from lanewise._core.level import on_plane
from lanewise._core.parting.interleaved import copied
from lanewise._core.plane import Plane
from lanewise._core.python.factories import (
    adopt_results_of,
    adopt_results_of_name,
    join_lists_in,
    route,
    route_past,
)
from lanewise._core.short import hot
from lanewise._core.short.paths import single_path
from lanewise._rules.batch.families import decompose, lane_rule
from lanewise.errors import TransformError, at_user_line, check_not_linearized

aten = torch.ops.aten

adopt_results_of(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.bartlett_window.default,
    aten.bartlett_window.periodic,
    aten.blackman_window.default,
    aten.blackman_window.periodic,
    aten.eye.default,
    aten.eye.m,
    aten.full.default,
    aten.full_like.default,
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
    aten.hann_window.default,
    aten.hann_window.periodic,
    aten.kaiser_window.beta,
    aten.kaiser_window.default,
    aten.kaiser_window.periodic,
    aten.lift_fresh.default,
    aten.linspace.default,
    aten.logspace.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.zeros.default,
    aten.zeros_like.default,
)
# A lazy zero is made real by a kernel that calls `zeros` and works on its memory; here it is real from the start.


def _zero_tangent(size: Any, **options: Any) -> Tensor:
    """What torch's formulas of forward mode take for a tangent that is missing.

    That of a Python number is marked as one, and torch reads the memory of what is: it stays a plain tensor.
    """
    if size:
        return aten.zeros.default(size, **options)
    with on_plane(None):
        return aten.zeros.default(size, **options)


route(aten._efficientzerotensor.default, _zero_tangent)
# The operation behind `x.data = new`, by name: the attribute knows what a plain tensor cannot hold.
route(aten.set_data.default, lambda x, new: setattr(x, "data", new))
for _name in ("empty", "empty_like", "empty_strided"):
    adopt_results_of_name(_name)
for _name in ("as_tensor", "asarray", "tensor"):
    join_lists_in(_name)


def _vander(x, N=None, increasing=False):
    """torch's own writes the powers into a tensor that its C++ code makes."""
    if x.dim() != 1:
        raise TransformError(at_user_line(f"vander: x must be a one-dimensional tensor, got {list(x.shape)}"))
    x = x.to(torch.promote_types(x.dtype, torch.int64))
    count = x.shape[0] if N is None else N
    ones = torch.ones_like(x).unsqueeze(1)
    powers = [ones, x.unsqueeze(1).expand(-1, count - 1).cumprod(1)] if count > 1 else [ones[:, :count]]
    columns = torch.cat(powers, 1)
    return columns if increasing else columns.flip(1)


route(aten.vander.default, _vander)

_CHANNELS = (torch.channels_last, torch.channels_last_3d)


def _copies(op):
    @lane_rule(op)
    def copies(level, x, *args, memory_format=None, **options):
        """x [B, *S] -> another of that shape; a channels_last format is that of each lane"""
        if memory_format in _CHANNELS:
            rows = x.value.movedim(2, -1)
            return op(rows, *args, memory_format=torch.contiguous_format, **options).movedim(-1, 2)
        if memory_format is not None:
            options["memory_format"] = memory_format
        return op(x.value, *args, **options)


# Not pointwise rules, whose short cut makes plain tensors: on the plane below these are factories too.
for _op in (
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
):
    _copies(_op)


def _noted(enter):
    """Copies in a memory format, where they stand for views."""

    def clone(cls, func, types, args, kwargs):
        out = enter(cls, func, types, args, kwargs)
        memory_format = kwargs.get("memory_format") if kwargs else None
        if memory_format is not None and memory_format is not torch.preserve_format:
            copied(args[0], out, memory_format)
        return out

    return hot.plainest_pointwise(torch.clone)(clone)


hot.route(aten.clone.default, single_path(BATCH_RULES[aten.clone.default]), _noted)


def _not_linearized(x: Any, size: Any, **options: Any) -> Any:
    """How torch.func's `linearize` begins; everything else goes on as it would."""
    if not size and isinstance(x, Plane):
        check_not_linearized()
    return NotImplemented


route_past(aten.new_empty.default, _not_linearized)


@lane_rule(aten.new_empty.default)
def new_empty(level, x, size, **options):
    """-> [B, *size], uninitialised"""
    return level.physical(x).new_empty((level.size, *size), **options)


@lane_rule(aten.new_zeros.default)
def new_zeros(level, x, size, **options):
    """-> [B, *size] of zeros"""
    return level.physical(x).new_zeros((level.size, *size), **options)


@lane_rule(aten.new_ones.default)
def new_ones(level, x, size, **options):
    """-> [B, *size] of ones"""
    return level.physical(x).new_ones((level.size, *size), **options)


@lane_rule(aten.new_full.default)
def new_full(level, x, size, fill_value, **options):
    """-> [B, *size] of fill_value"""
    return level.physical(x).new_full((level.size, *size), fill_value, **options)


@lane_rule(aten.new_empty_strided.default)
def new_empty_strided(level, x, size, stride, **options):
    """-> [B, *size] with the given strides in each lane, uninitialised"""
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    return level.physical(x).new_empty_strided((level.size, *size), (max(extent, 1), *stride), **options)


@lane_rule(aten.is_same_size.default, raw=True)
def is_same_size(level: BatchLevel, a, b):
    """Whether the shapes of one lane are the same."""
    return a.shape == b.shape


@lane_rule(aten._has_same_storage_numel.default, raw=True)
def has_same_storage_numel(level: BatchLevel, a, b):
    """Asked by forward mode before it sets a tangent: whether the two could share a layout."""
    return a.numel() == b.numel()


@lane_rule(aten._new_zeros_with_same_feature_meta.default)
def new_zeros_with_same_feature_meta(level, x, other, *, self_num_batch_dims=0):
    """-> [B, *S of other] of zeros, for the tangent that forward mode makes"""
    return torch.zeros((level.size, *other.shape), dtype=other.dtype, device=other.device)


# --- ranges between tensors ------------------------------------------------------------------------------------------


def _steps(start, end, steps, dtype):
    """`steps` numbers from start to end in the dtype that torch computes them in, each counted from its nearer end.

    They have no history: torch has no derivative of them.
    """
    for bound in (start, end):
        if isinstance(bound, Tensor) and bound.dim():
            raise TransformError(
                at_user_line(f"linspace only supports 0-dimensional start and end tensors, got {list(bound.shape)}")
            )
    exact = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    first, last = (
        bound.detach().to(dtype).to(exact)
        if isinstance(bound, Tensor)
        else torch.full((), bound, dtype=dtype).to(exact)
        for bound in (start, end)
    )
    if steps < 2:
        return first.reshape(1)[:steps]
    step = (last - first) / (steps - 1)
    places = torch.arange(steps, dtype=exact if not exact.is_complex else torch.float64, device=first.device)
    return torch.where(places < steps // 2, first + step * places, last - step * (steps - 1 - places)).to(exact)


def _range_dtype(dtype, *bounds):
    if dtype is not None:
        return dtype
    default = torch.get_default_dtype()
    complex_bound = any(
        bound.is_complex() if isinstance(bound, Tensor) else isinstance(bound, complex) for bound in bounds
    )
    return torch.promote_types(default, torch.complex32) if complex_bound else default


def _linspace(start, end, steps, *, dtype=None, layout=None, device=None, pin_memory=None):
    dtype = _range_dtype(dtype, start, end)
    return _steps(start, end, steps, dtype).to(dtype=dtype, device=device)


def _logspace(start, end, steps, base=10.0, *, dtype=None, layout=None, device=None, pin_memory=None):
    dtype = _range_dtype(dtype, start, end)
    return torch.pow(base, _steps(start, end, steps, dtype)).to(dtype=dtype, device=device)


for _op in (aten.linspace.Scalar_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Tensor_Tensor):
    decompose(_op, _linspace)
for _op in (aten.logspace.Scalar_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Tensor_Tensor):
    decompose(_op, _logspace)
