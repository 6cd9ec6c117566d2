"""Python numbers that torch takes of a tensor: what is computed with them knows nothing of its derivative."""

import torch

from lanewise._core.dual import taken_as_number
from lanewise._rules.jvp.families import rule_on_plane

aten = torch.ops.aten


@rule_on_plane(aten._local_scalar_dense.default)
def local_scalar_dense(level, x):
    """The number of a tensor without a tangent"""
    taken_as_number(x)
    return level.primal(x).item()
