"""Forward rules of reductions."""

import torch

from lanewise._rules.jvp.families import linear

aten = torch.ops.aten

linear(aten.cumsum.default, aten.mean.default, aten.mean.dim, aten.sum.default, aten.sum.dim_IntList)
