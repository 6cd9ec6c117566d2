"""What planes below do with a value: backward formulas must not give them numbers in place of values with history."""

import torch
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.plane import Plane
from lanewise._torch_compat import forward_ad, forward_level


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether somebody below may differentiate through these values, in reverse or forward mode."""
    if forward_level() >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and (isinstance(t, Plane) or t.requires_grad) for t in tensors)


def constant(value: Tensor) -> Tensor:
    """The same numbers without history or tangent, on any plane."""
    if isinstance(value, Plane):
        below = value.level.below(constant, value.value)
        if not isinstance(value, BatchTensor):
            return value.level.adopt(below)
        out = value.level.wrap(below) if value.mapped else value.level.adopt(below)
        out.home = value.home
        return out
    return (forward_ad.unpack_dual(value).primal if forward_level() >= 0 else value).detach()
