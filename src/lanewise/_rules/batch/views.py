"""Views: the result shares storage with the operand on the plane below just as on this one."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BATCH_RULES, BatchLevel
from lanewise._core.level import route_name, standing
from lanewise._core.parting.interleaved import begin_in_front_of, reshaped
from lanewise._core.plane import Plane, is_lazy_conjugate
from lanewise._core.python.factories import route_past
from lanewise._core.recording.saved import cuts_all_planes
from lanewise._core.refits import refit_in_place
from lanewise._core.short.direct import view_method
from lanewise._core.short.hot import route
from lanewise._core.short.paths import plainest_view, single_path, view_path
from lanewise._rules.batch.families import along_dims, lane_rule, shift_dim, shift_dims, too_few_dims
from lanewise._torch_compat import fast_binding
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

along_dims(
    aten.diagonal.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
)


@lane_rule(aten.expand.default)
def expand(level, x, size, *, implicit=False):
    """x [B, *S] -> [B, *size]"""
    value = x.value
    new_dims = len(size) - x.dim()
    if -1 in size[: max(new_dims, 0)]:
        raise TransformError(
            at_user_line(
                f"expand({list(size)}): The expanded size of the tensor (-1) isn't allowed in a leading, non-existing "
                f"dimension {list(size).index(-1)}: in one lane the tensor is {list(x.shape)}",
                "x.expand(1, *x.shape)",
            )
        )
    if new_dims:
        value = value.reshape(level.size, *([1] * new_dims), *x.shape)
    return value.expand(level.size, *size)


@lane_rule(aten.view.default)
def view(level, x, size):
    """x [B, *S] -> [B, *size]"""
    if level.size == 0:
        return x.value.view(0, *_known_sizes(x, size))
    return _viewed(x, lambda value: value.view(level.size, *size))


def _viewed(x, view):
    """A view that lanes may lie in the way of."""
    try:
        return view(x.value)
    except RuntimeError:
        begin_in_front_of(x)
        raise


@lane_rule(aten._unsafe_view.default)
def unsafe_view(level, x, size):
    """x [B, *S] -> [B, *size]; copied where a kernel's result is contiguous for one lane and not for all"""
    if level.pending is not None:
        reshaped(x, size)
    return x.value.reshape(level.size, *(_known_sizes(x, size) if level.size == 0 else size))


@lane_rule(aten._reshape_alias.default)
def reshape_alias(level, x, size, stride):
    """x [B, *S] -> [B, *size]"""
    return x.value.view(level.size, *size)


def _known_sizes(x, size):
    """A size with its -1 worked out, which zero lanes leave ambiguous."""
    known = 1
    for extent in size:
        known *= extent if extent != -1 else 1
    return [x.numel() // max(known, 1) if extent == -1 else extent for extent in size]


@lane_rule(aten.permute.default)
def permute(level, x, dims):
    """x [B, *S] -> [B, *S permuted]"""
    return x.value.permute(0, *(shift_dims(dims, x.dim()) if dims else ()))


@lane_rule(aten.t.default)
def t(level, x):
    """x [B, m, n] -> [B, n, m]; x [B, n] or [B] stays"""
    if x.dim() > 2:
        raise TransformError(
            at_user_line(f"t() expects a tensor with <= 2 dimensions, but in one lane it is {x.dim()}D", "x.mT")
        )
    return x.value.transpose(1, 2) if x.dim() == 2 else x.value.view(x.value.shape)


@lane_rule(aten.squeeze.default)
def squeeze(level, x):
    """x [B, *S] -> [B, *S without 1s]"""
    dims = [dim + 1 for dim, extent in enumerate(x.shape) if extent == 1]
    return x.value.squeeze(dims) if dims else x.value.view(x.value.shape)


@lane_rule(aten.squeeze.dim)
def squeeze_dim(level, x, dim):
    """x [B, *S] -> [B, *S without dim]"""
    dims = shift_dims(dim, max(x.dim(), 1))
    return x.value.squeeze(dims) if x.dim() else x.value.view(x.value.shape)


@lane_rule(aten.squeeze.dims)
def squeeze_dims(level, x, dim):
    """x [B, *S] -> [B, *S without dims]"""
    dims = shift_dims(dim, max(x.dim(), 1)) if dim else []
    return x.value.squeeze(dims) if x.dim() and dims else x.value.view(x.value.shape)


@lane_rule(aten.alias.default)
def alias(level, x):
    """x [B, *S] -> the same"""
    return x.value.view(x.value.shape)


@lane_rule(aten.detach.default, raw=True, same_plane=True)
def detach(level, x):
    """Cuts this plane only where autograd itself asks, for tensors it saves; the user's `torch.detach` cuts all."""
    value = level.below(torch.detach, x.value) if cuts_all_planes() else x.value
    return level.wrap(value) if x.mapped else level.adopt(value, (x, aten.detach.default, (), {}, None))


def _detach_lanes(args, kwargs):
    """The same for lanes, which autograd asks for at every result that it saves."""
    x = args[0]
    if x.home is not x.level.lanes:
        return NotImplemented
    if not x.mapped:
        return detach(x.level, x)
    return x.level.wrap(x.level.below(torch.detach, x.value) if cuts_all_planes() else x.value)


def _saved(enter):
    """What autograd asks for, without what routed operations do first."""

    def detach_saved(cls, func, types, args, kwargs):
        x = args[0]
        level = x.level
        if standing.here is not level or not x.mapped or x.home is not level.lanes or cuts_all_planes():
            return enter(cls, func, types, args, kwargs)
        return level.wrap(x.value)

    return detach_saved


route(aten.detach.default, _detach_lanes, _saved)


@lane_rule(aten._make_dual.default, aten._fw_primal.default)
def native_primal(level, x, *rest):
    """Native forward mode on this plane takes an alias; the tangent hangs on the wrapper."""
    return x.value.view(x.value.shape)


@lane_rule(aten._conj.default)
def conj(level, x):
    """x [B, *S] -> its lazy conjugate"""
    return torch.conj(x.value)


@lane_rule(aten._neg_view.default)
def neg_view(level, x):
    """x [B, *S] -> its lazy negative"""
    return aten._neg_view.default(x.value)


@lane_rule(aten.view_as_complex.default)
def view_as_complex(level, x):
    """x [B, *S, 2] -> [B, *S] complex"""
    if not x.dim():
        raise too_few_dims(aten.view_as_complex.default, x, 1)
    # With no lanes strides do not matter, but torch checks them.
    if not level.size:
        return torch.view_as_complex(x.value.clone(memory_format=torch.contiguous_format))
    return _viewed(x, torch.view_as_complex)


@lane_rule(aten.view_as_real.default, raw=True)
def view_as_real(level, x):
    """x [B, *S] or [*S] complex -> [B, *S, 2] or [*S, 2]; a copy of a lazy conjugate, for kernels"""
    conjugated = x.value.is_conj()
    out = level.below(torch.view_as_real, x.value.resolve_conj() if conjugated else x.value)
    if x.mapped:
        return level.wrap(out)
    return level.adopt(out, None if conjugated else (x, aten.view_as_real.default, (), {}, None))


def _conjugated(x: Any) -> Any:
    """What a lazy conjugate, which its wrapper does not show, is the conjugate of; None for another tensor."""
    return x.conj() if isinstance(x, Plane) and is_lazy_conjugate(x) else None


def _real(x: Tensor) -> Any:
    """The real part of a lazy conjugate, a view."""
    plain = _conjugated(x)
    return NotImplemented if plain is None else torch.view_as_real(plain).select(-1, 0)


def _imag(x: Tensor) -> Any:
    """The imaginary part of a lazy conjugate, a view: the lazy negative of another."""
    plain = _conjugated(x)
    return NotImplemented if plain is None else aten._neg_view.default(torch.view_as_real(plain).select(-1, 1))


# (Each product asks for the operation, `aten.resolve_conj`, of its operands.)
route_name("resolve_conj", lambda input: input.resolve_conj())
route_past(aten.real.default, _real)
route_past(aten.imag.default, _imag)


@lane_rule(aten.view.dtype)
def view_dtype(level, x, dtype):
    """x [B, *S] -> its bits as another dtype"""
    if x.dim() == 0:
        return x.value.unsqueeze(1).view(dtype).squeeze(1)
    return _viewed(x, lambda value: value.view(dtype))


@lane_rule(aten.unfold.default)
def unfold(level, x, dimension, size, step):
    """x [B, *S] -> [B, *S windows, size]"""
    if x.dim() == 0:
        return x.value.unsqueeze(1).unfold(1, size, step).squeeze(1)
    return x.value.unfold(shift_dims(dimension, x.dim()), size, step)


# --- the short way ---------------------------------------------------------------------------------------------------

# The same in the plainest cases: of a value [B, *S], with the arguments for [*S]. None for all others.


def _below(value, dim, dims=0):
    """A dim of [*S], with so many dims more, as one of [B, *S]."""
    if dim >= 0:
        return dim + 1
    return dim if dim > -value.dim() - dims else shift_dim(dim, value.dim() - 1 + dims)


def _expand(value, size):
    missing = len(size) - value.dim() + 1
    if missing:
        if -1 in size[:missing]:
            return None
        value = value.view(value.shape[0], *[1] * missing, *value.shape[1:])
    return value.expand(value.shape[0], *size)


def _view(value, size):
    return value.view(value.shape[0], *size) if value.shape[0] else None


def _squeezed(value, dim):
    return value.squeeze(_below(value, dim)) if value.dim() > 1 else None


def _squeezed_all(value):
    return value.squeeze() if value.shape[0] != 1 else None


def _transposed(value):
    return value.transpose(1, 2) if value.dim() == 3 else None


_slice = fast_binding(aten.slice.Tensor)
for _op, _short in {
    aten.diagonal.default: lambda v, offset=0, a=0, b=1: v.diagonal(offset, _below(v, a), _below(v, b)),
    aten.expand.default: _expand,
    aten.permute.default: lambda v, dims: v.permute(0, *[_below(v, dim) for dim in dims]),
    aten.select.int: lambda v, dim, index: v.select(_below(v, dim), index),
    aten.slice.Tensor: lambda v, dim=0, *bounds: _slice(v, _below(v, dim), *bounds),
    aten.squeeze.dim: _squeezed,
    aten.squeeze.default: _squeezed_all,
    aten.split.Tensor: lambda v, size, dim=0: v.split(size, _below(v, dim)),
    aten.split_with_sizes.default: lambda v, sizes, dim=0: v.split_with_sizes(sizes, _below(v, dim)),
    aten.t.default: _transposed,
    aten.transpose.int: lambda v, a, b: v.transpose(_below(v, a), _below(v, b)) if v.dim() > 1 else None,
    aten.unbind.int: lambda v, dim=0: v.unbind(_below(v, dim)),
    aten.unsqueeze.default: lambda v, dim: v.unsqueeze(_below(v, dim, 1)),
    aten.view.default: _view,
}.items():
    route(_op, view_path(_op, _short, single_path(BATCH_RULES[_op])), plainest_view(_op, _short))


def _sizes(given):
    """The sizes or dims that a method is given, one after the other or in a sequence."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def _flattened(value, start=0, end=-1):
    # Where lanes do not follow one another, it is for the rules to see whether it is a view.
    if value.dim() == 1 or not value.is_contiguous():
        return None
    return value.flatten(_below(value, start), _below(value, end))


for _name, _short in {
    "flatten": _flattened,
    "permute": lambda v, *dims: v.permute(0, *[_below(v, dim) for dim in _sizes(dims)]),
    "reshape": lambda v, *size: _view(v, _sizes(size)) if v.is_contiguous() else None,
    "squeeze": lambda v, *dim: _squeezed(v, *dim) if dim else _squeezed_all(v),
    "transpose": lambda v, a, b: v.transpose(_below(v, a), _below(v, b)) if v.dim() > 1 else None,
    "unbind": lambda v, dim=0: v.unbind(_below(v, dim)),
    "unflatten": lambda v, dim, sizes: v.unflatten(_below(v, dim), sizes) if v.dim() > 1 else None,
    "unsqueeze": lambda v, dim: v.unsqueeze(_below(v, dim, 1)),
    "view": lambda v, *size: None if isinstance(size[0], torch.dtype) else _view(v, _sizes(size)),
}.items():
    view_method(_name, _short)

_TWINS = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
}


def _refit_with(func, twin):
    @lane_rule(func, raw=True, same_plane=True)
    def refit(level: BatchLevel, *args, **kwargs):
        return refit_in_place(level, func, args, kwargs, twin)


for _func, _twin in _TWINS.items():
    _refit_with(_func, _twin)
