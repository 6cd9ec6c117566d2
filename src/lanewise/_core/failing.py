"""Operations that fail for some lanes only: the others go on, as in a loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.lanes import child
from lanewise._core.level import on_plane
from lanewise._core.plane import replace_tensors
from lanewise._core.random import is_random
from lanewise._torch_compat import current_graph_task_id


def part_by_failure(
    level: Any, run: Callable[..., Any], func: Any, args: tuple, kwargs: dict, operands: list[Tensor]
) -> bool:
    """After an operation failed: go on with the lanes in which it does not. False if there are none, or no others.

    In those that run again for it, it fails in all, as it would alone. `run(func, args, kwargs, operands)` carries it
    out for the lanes that run.
    """
    running = level.lanes
    if running.size < 2 or current_graph_task_id() != -1 or func._schema.is_mutable or is_random(func):
        return False
    fine: list[int] = []
    ranges = [(0, running.size)]
    try:
        while ranges:
            start, stop = ranges.pop()
            with on_plane(None):
                level.lanes = child(running, torch.arange(start, stop))
            try:
                if stop - start < running.size:
                    run(func, *replace_tensors(level.here, args, kwargs), [level.here(each) for each in operands])
                    fine.extend(range(start, stop))
                    continue
            except Exception:
                if stop - start == 1:
                    continue
            middle = (start + stop) // 2
            ranges += [(middle, stop), (start, middle)]
    finally:
        level.lanes = running
    if not fine or len(fine) == running.size:
        return False
    with on_plane(None):
        level.lanes = child(running, torch.tensor(fine))
    return True
