"""Operations that fail for some lanes only: the others go on, as in a loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.random import is_random
from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import child
from lanewise._core.plane import Plane, replace_tensors
from lanewise._torch_compat import current_graph_task_id

# Raises what a factorization has noted in its result `info`, where that is not zero.
_REPORT = torch.ops.aten._linalg_check_errors.default


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
    fine: list[int] | None = _without_report(level, args[0]) if func is _REPORT else None
    ranges = [(0, running.size)] if fine is None else []
    fine = [] if fine is None else fine
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


def _without_report(level: Any, info: Any) -> list[int] | None:
    """The places of the lanes that run for which `info` [*batch] notes no failure; None where it is not at hand."""
    here = level.here(info)
    if not level.owns(here) or not here.mapped or isinstance(here.value, Plane):
        return None
    with on_plane(None):
        return (here.value.reshape(level.lanes.size, -1) == 0).all(1).nonzero().squeeze(1).tolist()
