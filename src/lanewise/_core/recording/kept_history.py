"""Results that hang on leaves of a plane alone, `nn.Parameter(...)` made in the function: they leave with a history."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.plane import own_node, recorded, tracked
from lanewise._core.recording.graphs import needs_graph


def with_history(level: Any, result: Any, value: Tensor) -> Tensor:
    """The value below of a result: it requires grad as the result does, and a pass through it reaches nothing outside.

    The leaf ends with its level, as the one of an example does that goes out of scope. Leaves of transforms inside are
    nobody's.
    """
    if not (level.owns(result) and recorded(result)) or tracked(value) or value.is_inference():
        return value
    return level.below(_with_leaf, value) if own_node(result) is None or needs_graph([result], []) else value


def _with_leaf(value: Tensor) -> Tensor:
    with torch.enable_grad():
        # (To subtract zero changes no number, not even a negative zero.)
        return value - torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
