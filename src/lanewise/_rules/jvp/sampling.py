"""Forward formulas of the Functions by which distributions draw, where torch has a backward only."""

from typing import Any

import torch
from torch import Tensor

from lanewise._torch_classes import DirichletSample

aten = torch.ops.aten


def dirichlet(ctx: Any, tangent: Tensor) -> Tensor:
    """x = dirichlet(c) [*S, n], c' -> x' = u - x sum(u), where u is what each gamma variate gains, as a share."""
    x, concentration = ctx.saved_tensors
    total = concentration.sum(-1, True).expand_as(concentration)
    gained = aten._dirichlet_grad.default(x, concentration, total) * tangent
    return gained - x * gained.sum(-1, True)


DirichletSample.jvp = staticmethod(dirichlet)
