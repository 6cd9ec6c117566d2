"""Functions whose lanes take different ways: which they are, and who runs them."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lanewise._core.batch import BatchLevel
from lanewise._core.journal import Journal
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import Disagreement
from lanewise._core.level import current_level

# Code of the functions whose lanes were seen to part. They are run for that from the start.
parted: set[Any] = set()


class _Runner:
    """What runs a function whose lanes part: `run(call, leaves, dims, spec, out_dims, randomness, place)`."""

    run: Callable[..., Any]


runner = _Runner()


def code_of(func: Any) -> Any:
    """What stands for a function among those whose lanes parted: closures and methods by their code.

    For a transform of a function that function does: all transforms of one kind have the same code.
    """
    while hasattr(func, "__wrapped__"):
        func = func.__wrapped__
    if isinstance(func, functools.partial):
        return code_of(func.func)
    if isinstance(func, torch.nn.Module):
        return getattr(type(func), "forward", None) or type(func)  # a scripted module's class has none to give
    return getattr(func, "__code__", None) or id(func)


def parts(code: Any) -> bool:
    """Whether lanes may part from the start: they did before, or those of the `vmap` around do now."""
    return code in parted or type(current_level()) is LaneLevel


def start_again(level: BatchLevel, code: Any, disagreement: Disagreement) -> None:
    """Undo what the function did before its lanes disagreed, so that it can be run with lanes that part."""
    if disagreement.level is not level:
        raise disagreement
    if isinstance(level.journal, Journal):
        level.journal.undo(level)
    parted.add(code)
