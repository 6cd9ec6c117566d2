"""Looking at lane values while a function runs."""

import builtins
import itertools
from typing import Any

from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.joins import innermost
from lanewise._core.lane_level import LaneLevel
from lanewise._core.level import on_plane
from lanewise._core.plane import Plane, sync
from lanewise._core.trees import flatten, unflatten


def print(text: str, *args: Any, **kwargs: Any) -> None:
    """Print one line for each lane that runs, in the order of a loop over the lanes.

    Where lanes part, parts of a function may run again for some of them, and print again.

    Args:
        text: A format string, as for `str.format`.
        args: What it names by place: tensors as one lane sees them, structures of them, anything else.
        kwargs: What it names by name.

    Example:
        >>> import torch
        >>> import lanewise
        >>> def f(x):
        ...     lanewise.debug.print("x = {} and {y:.1f}", x, y=x * 2)
        ...     return x
        >>> _ = lanewise.vmap(f)(torch.tensor([1.0, 2.0]))
        x = 1.0 and 2.0
        x = 2.0 and 4.0
    """
    leaves, spec = flatten((args, kwargs))
    parts = [_plain(leaf) if isinstance(leaf, Tensor) else (leaf, []) for leaf in leaves]
    levels = sorted({level for _, found in parts for level in found}, key=lambda level: level.order)
    for place in itertools.product(*[range(level.size) for level in levels]):
        at = dict(zip(levels, place))
        row = [value[tuple([at[level] for level in found])] if found else value for value, found in parts]
        lane_args, lane_kwargs = unflatten(row, spec)
        with on_plane(None):
            builtins.print(text.format(*map(_shown, lane_args), **{k: _shown(v) for k, v in lane_kwargs.items()}))


def _plain(tensor: Tensor) -> tuple[Tensor, list[Any]]:
    """The plain tensor `[B1, B2, ..., *S]` of a value, and the levels whose lanes it has, outermost first."""
    levels: list[Any] = []
    value: Any = tensor
    while isinstance(value, Plane):
        if isinstance(value, BatchTensor):
            sync(value)
            level = innermost(value.level)
            if value.mapped:
                if isinstance(level, LaneLevel):
                    value = level.here(value)
                levels.insert(0, level)
        value = value.value
    with on_plane(None):
        return value.detach(), levels


def _shown(value: Any) -> Any:
    """A number in place of a tensor without dims, so that format specifications fit."""
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
