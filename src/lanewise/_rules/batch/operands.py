"""What rules do with their operands: at least one dim, lane numbers, the shape and dtype that they broadcast to."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.plane import Plane, recorded
from lanewise._torch_compat import (
    dispatch_mode_count,
    forward_level,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
)


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
    if level.parent is None and type(like) is Tensor and not dispatch_mode_count() and not is_inference_mode_enabled():
        return kept_lane_numbers(level.size, like.device, rank)
    return _numbers(level.size, like.device, rank)


def _numbers(size: int, device: torch.device, rank: int) -> Tensor:
    return torch.arange(size, device=device).view(size, *[1] * (rank - 1))


# Each subscript needs them, and its derivative again: 2.4 us to make, 0.3 to find.
kept_lane_numbers = lru_cache(maxsize=32)(_numbers)


def split_lanes(x: Tensor, lanes: int, each: int) -> Tensor:
    """x [lanes * each, *S] -> [lanes, each, *S]. (`Tensor.unflatten` takes three times as long.)"""
    return x.view(lanes, each, *x.shape[1:])


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


def aligner(
    level: BatchLevel,
    operands: list[Tensor],
    cast_to: Callable[[torch.dtype], torch.dtype] | None = None,
    *,
    promote: bool = True,
    written: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:
    """How to broadcast operands on the plane below as they broadcast on this one, dtypes included.

    A mapped operand of lower rank gets dims of size 1 after its lanes. A logical 0-dim operand is weaker in type
    promotion than one with dims; on the plane below it has dims, so it is cast first. One that is written to is not.
    """
    rank = max(operand.dim() for operand in operands)
    dtypes = {operand.dtype for operand in operands}
    target = logical_dtype(operands) if promote and len(dtypes) > 1 else None

    def align(tensor: Tensor) -> Tensor:
        if not level.mapped(tensor):
            tensor = level.physical(tensor)
            if target is None or rank or tensor.dtype is torch.bool:
                return tensor
            # (What is written to keeps its dtype: beside that, an operand without dims would be rounded to it.)
            return tensor.to(target) if written is None else tensor.to(target).reshape(1)
        value = tensor.value
        missing_dims = rank - (value.dim() - 1)
        if (
            target is not None
            and tensor.dtype is not torch.bool
            and tensor.dtype is not target
            and tensor is not written
        ):
            if rank == 0:
                value = value.to(target)
            elif missing_dims == rank:
                value = value.to(target if cast_to is None else cast_to(target))
        if missing_dims:
            value = value.reshape(value.shape[0], *([1] * missing_dims), *value.shape[1:])
        return value

    return align


def logical_dtype(operands: list[Tensor]) -> torch.dtype:
    """The dtype that the logical operands promote to."""
    return _promoted(tuple((operand.dtype, operand.dim() == 0) for operand in operands))


@cache
def _promoted(kinds: tuple[tuple[torch.dtype, bool], ...]) -> torch.dtype:
    strong = [dtype for dtype, weak in kinds if not weak]
    weak = [dtype for dtype, weak in kinds if weak]
    if not strong or not weak:
        return reduce(torch.promote_types, strong or weak)
    with_dims = torch.empty(1, dtype=reduce(torch.promote_types, strong))
    return torch.result_type(with_dims, torch.empty((), dtype=reduce(torch.promote_types, weak)))
