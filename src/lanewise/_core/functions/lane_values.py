"""A formula run once per lane: the values of one lane, and the results of all as one value."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import narrow
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import OperationFailed, child, machine
from lanewise._core.plane import Plane, recorded, tracked
from lanewise._torch_compat import is_grad_enabled
from lanewise.errors import LaneValueError, at_user_line


def at_lane(level: BatchLevel, values: Any, lane: int) -> tuple:
    """The values of one lane, on the plane below."""

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = level.here(value)
        return level.below(_row, value.value, lane) if level.mapped(value) else level.physical(value)

    return tuple([take(value) for value in values])


@contextmanager
def lane_alone(level: BatchLevel, lane: int) -> Iterator[None]:
    """Where lanes part, the lane alone runs: what its code finds elsewhere than among its operands is its own."""
    if not isinstance(level, LaneLevel):
        yield
        return
    running = level.lanes
    with on_plane(None):
        place = torch.tensor([lane])
    level.lanes = child(running, place)
    try:
        yield
    finally:
        level.lanes = running


def each_lane(level: BatchLevel, run: Callable[[int], Any]) -> list:
    """What code of the user's gives for each lane. An error is that of one lane, which goes on with it."""
    rows = []
    for lane in range(level.size):
        try:
            rows.append(run(lane))
        except Exception:
            if level.restartable:
                machine.raised.append((OperationFailed, level, True))
            elif isinstance(level, LaneLevel) and level.lanes.size > 1:
                with on_plane(None):
                    place = torch.tensor([lane])
                narrow(level, place)
            raise
    return rows


def needing_gradients(values: list, rows: tuple) -> list:
    """Rows that say, where the values do, that they need a gradient: a formula may ask, and record on its own."""
    if is_grad_enabled():
        return list(rows)
    return [
        row.requires_grad_() if isinstance(value, Plane) and recorded(value) and not tracked(row) else row
        for value, row in zip(values, rows, strict=True)
    ]


def _row(value: Tensor, lane: int) -> Tensor:
    row = value.select(0, lane)
    # It may be the state of a generator, which torch reads from the start of the memory.
    return row.clone() if row.dtype is torch.uint8 else row


def stack_derivatives(level: BatchLevel, rows: list) -> Any:
    """As `stack_lanes`, of derivatives: None is zero where other lanes have one."""
    like = next((row for row in rows if isinstance(row, Tensor)), None)
    if like is None:
        return rows[0]
    return stack_lanes(level, [level.below(torch.zeros_like, like) if row is None else row for row in rows])


def stack_lanes(level: BatchLevel, rows: list, what: str = "its results have") -> Any:
    """One value per lane, on the plane of `level`; what is no tensor must be the same in all."""
    tensors = [row for row in rows if isinstance(row, Tensor)]
    if not tensors:
        return rows[0]
    shape = tensors[0].shape
    if len(tensors) < len(rows) or any(tensor.shape != shape for tensor in tensors):
        raise LaneValueError(
            at_user_line(
                f"vmap: a custom Function ran once per lane, and {what} different shapes: "
                f"{[list(tensor.shape) for tensor in tensors]}",
                "keep one shape for all lanes",
            )
        )
    return level.wrap(level.below(torch.stack, tensors))
