"""Views, copies and casts: linear, and the tangent must alias as the primal does."""

import torch

from lanewise._rules.jvp.families import jvp_rule, linear

aten = torch.ops.aten

linear(
    aten._conj.default,
    aten._neg_view.default,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.diagonal.default,
    aten.expand.default,
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
    aten.unsqueeze.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
)


@jvp_rule(aten.view.default)
def view(level, x, size):
    """The tangent is laid out as the primal first where it is not."""
    if x.tangent.stride() != x.value.stride():
        tangent = torch.empty_strided(x.value.shape, x.value.stride(), dtype=x.value.dtype, device=x.value.device)
        x.tangent = tangent.copy_(x.tangent)
    return x.value.view(size), x.tangent.view(size)


@jvp_rule(aten._to_copy.default)
def to_copy(level, x, **options):
    """A cast to a dtype without derivatives drops the tangent."""
    out = aten._to_copy.default(x.value, **options)
    if not (out.is_floating_point() or out.is_complex()):
        return out, None
    return out, aten._to_copy.default(x.tangent, **options)


@jvp_rule(aten.detach.default)
def detach(level, x):
    """Cuts this plane's autograd only: the tangent stays."""
    return x.value, x.tangent


@jvp_rule(aten._make_dual.default, aten._fw_primal.default)
def native_primal(level, x, *rest):
    """Native forward mode, one operation's worth of it on this plane, takes an alias."""
    return x.value.view(x.value.shape), x.tangent.view(x.tangent.shape)
