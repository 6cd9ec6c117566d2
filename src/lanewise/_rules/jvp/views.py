"""Forward rules of views, casts and copies: linear, and the tangent must alias as the primal does."""

import torch
from torch import Tensor

from lanewise._core.dual import DualLevel, lay_out
from lanewise._core.plane import recorded
from lanewise._core.recording.saved import cuts_all_planes
from lanewise._core.refits import begins_at, refit, refit_in_place, regrow
from lanewise._rules.jvp.families import constant, jvp_rule, linear, rule_on_plane
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

linear(
    aten._conj.default,
    aten._neg_view.default,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.diagonal.default,
    aten.expand.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unfold.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view_as_complex.default,
)

constant(aten.view.dtype)


@rule_on_plane(aten.view_as_real.default)
def view_as_real(level: DualLevel, x):
    """x [*S] complex -> [*S, 2]; a lazy conjugate is taken first"""
    if x.tangent is None:
        origin = (x, aten.view_as_real.default, (), {}, None)
        return level.adopt(level.below(_as_real, x.value), origin)
    level.below(lay_out, x)
    return level.wrap(level.below(_as_real, x.value), level.below(_as_real, x.tangent))


def _as_real(value):
    return torch.view_as_real(value.resolve_conj())


@jvp_rule(aten.as_strided.default)
def as_strided(level, x, size, stride, storage_offset=None):
    """The same elements of the tangent, whose memory may begin elsewhere"""
    if storage_offset is not None and recorded(x) and begins_at(x):
        raise TransformError(
            at_user_line(
                f"jvp: as_strided from storage offset {storage_offset} of a tensor that begins at {begins_at(x)} has "
                "no derivative",
                "x.as_strided(size, stride)  # from where x begins",
            )
        )
    if type(x.value) is not Tensor or x.tangent.stride() != x.value.stride():
        lay_out(x)
    shift = x.tangent.storage_offset() - x.value.storage_offset()
    offset = None if storage_offset is None else storage_offset + shift
    return x.value.as_strided(size, stride, storage_offset), x.tangent.as_strided(size, stride, offset)


@jvp_rule(aten.clone.default)
def clone(level, x, *, memory_format=None):
    """A copy of each, which lane values may be written into"""
    return x.value.clone(memory_format=memory_format), x.tangent.clone(memory_format=memory_format)


@jvp_rule(aten._to_copy.default)
def to_copy(level, x, **options):
    """A cast to a dtype without derivatives drops the tangent"""
    out = aten._to_copy.default(x.value, **options)
    if not (out.is_floating_point() or out.is_complex()):
        return out, None
    return out, aten._to_copy.default(x.tangent, **options)


@rule_on_plane(aten.detach.default)
def detach(level: DualLevel, x):
    """Autograd takes saved tensors out through it, and then the tangent stays; the user's own `detach` drops it."""
    if cuts_all_planes():
        return level.adopt(level.below(torch.detach, x.value))
    return level.alias(x)


@jvp_rule(aten._make_dual.default, aten._fw_primal.default)
def native_primal(level, x, *rest):
    """Native forward mode, one operation's worth of it on this plane, takes an alias"""
    return x.value.view(x.value.shape), x.tangent.view(x.tangent.shape)


# --- in place: the wrapper itself takes another shape ----------------------------------------------------------------


def _refits(op, twin):
    def rule(level: DualLevel, *args, **kwargs):
        return refit_in_place(level, op, args, kwargs, twin)

    rule_on_plane(op)(rule)


_refits(aten.as_strided_.default, aten.as_strided.default)
_refits(aten.squeeze_.default, aten.squeeze.default)
_refits(aten.squeeze_.dim, aten.squeeze.dim)
_refits(aten.squeeze_.dims, aten.squeeze.dims)
_refits(aten.t_.default, aten.t.default)
_refits(aten.transpose_.default, aten.transpose.int)
_refits(aten.unsqueeze_.default, aten.unsqueeze.default)


@rule_on_plane(aten.detach_.default)
def detach_(level: DualLevel, x):
    """Drops the tangent of this tensor"""
    x.tangent = None
    x.origin = None
    return x


@rule_on_plane(aten.resize_.default)
def resize_(level: DualLevel, x, size, *, memory_format=None):
    """x [*S] -> [*size]: the first elements are kept, those beyond are uninitialised, and so are their tangents"""
    if x.shape == torch.Size(size):
        return x
    count = torch.Size(size).numel()

    def resized(value):
        flat = value.reshape(-1)
        if count > flat.numel():
            flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
        return flat[:count].reshape(size)

    value = level.below(resized, x.value)
    like = level.adopt(value) if x.tangent is None else level.wrap(value, level.below(resized, x.tangent))
    if count <= x.numel():
        return refit(x, like, aten.as_strided_.default, (x, size, like.stride()), {})
    return regrow(x, like)


@rule_on_plane(aten.resize_as_.default)
def resize_as_(level: DualLevel, x, other, *, memory_format=None):
    """x [*S] -> the shape of `other`"""
    return x.resize_(other.shape)
