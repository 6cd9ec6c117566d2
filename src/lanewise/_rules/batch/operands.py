"""What rules by hand do with their operands: at least one dim, lane numbers, the shape that operands broadcast to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.plane import Plane, recorded
from lanewise._torch_compat import dispatch_mode_count, forward_level, is_any_autocast_enabled, is_grad_enabled


def at_least_1d(level: BatchLevel, x: Tensor) -> Tensor:
    """-> [B, *S], or [B, 1] for a 0-dim operand"""
    value = level.expanded(x)
    return value if x.dim() else value.unsqueeze(1)


def at_hand(*values: Tensor) -> bool:
    """Whether a rule may look at the numbers to choose its way: on the CPU, on no plane, and nobody watches."""
    return all(type(value) is Tensor and value.is_cpu for value in values) and not dispatch_mode_count()


def lane_of_zeros(level: BatchLevel, x: Tensor) -> Tensor:
    """[*S], what an operation that refuses empty batches gets where there are no lanes; autograd connects it to x"""
    if not level.mapped(x):
        return level.physical(x)
    return x.value.sum(0) if x.is_floating_point() or x.is_complex() else x.value.new_zeros(x.shape)


def no_lanes(one: Tensor) -> Tensor:
    """[*S], the result for a lane of zeros -> [0, *S]"""
    return one.unsqueeze(0)[:0]


def lane_numbers(level: BatchLevel, like: Tensor, rank: int) -> Tensor:
    """0 .. B-1 as [B, 1, ..., 1] with `rank` dims in all"""
    return torch.arange(level.size, device=like.device).view(level.size, *[1] * (rank - 1))


def common_shape(*operands: Tensor) -> torch.Size:
    """The shape that operands broadcast to. (torch.broadcast_shapes takes ten times as long.)"""
    shape = operands[0].shape
    if all(operand.shape == shape for operand in operands[1:]):
        return shape
    return torch.broadcast_shapes(*[operand.shape for operand in operands])


def unwatched(level: BatchLevel, operands: Sequence[Any]) -> bool:
    """Whether some operand has lanes and nobody differentiates, casts or watches operations on this plane.

    A function of torch that falls apart into many may then go below as a whole.
    """
    if forward_level() >= 0 or is_any_autocast_enabled() or dispatch_mode_count():
        return False
    mapped = False
    for operand in operands:
        if not isinstance(operand, Tensor) or (is_grad_enabled() and recorded(operand)):
            return False
        if level.mapped(operand):
            if operand.home is not level.lanes:
                return False
            mapped = True
        elif type(operand) is BatchTensor and operand.level is level:
            return False
        elif isinstance(operand, Plane) and operand.level.order > level.order:
            return False
    return mapped
