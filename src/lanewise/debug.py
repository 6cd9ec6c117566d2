"""Looking at lane values while a function runs."""

import builtins
import itertools
from typing import Any

from torch import Tensor

from lanewise._control.runtime.numbers import LaneNumber
from lanewise._core.again.lines import Column, Line, columns, hold
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import current_level, live_levels, on_plane
from lanewise._core.parting.joins import innermost
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.plane import Plane, sync
from lanewise._core.trees import flatten, unflatten
from lanewise.errors import at_user_line

__all__ = ["print"]


def print(text: str, /, *args: Any, **kwargs: Any) -> None:
    """Print one line for each lane, as often as a loop over the lanes would, and for each call in their order.

    The lines come out when the outermost `vmap` ends, or an error leaves it; with `chunk_size`, after each chunk.

    Args:
        text: A format string, as for `str.format`.
        args: What it names by place: tensors as one lane sees them, structures of them, anything else.
        kwargs: What it names by name.

    Raises:
        TypeError: `text` is no text.

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
    if not isinstance(text, str):
        kind = Tensor if isinstance(text, Tensor) else type(text)  # not the class of a plane
        why = f"debug.print: the first argument is a format string, as for str.format, got {kind}"
        raise TypeError(at_user_line(why, 'debug.print("x = {}", x)'))
    leaves, spec = flatten((args, kwargs))
    numbers = [type(leaf) is LaneNumber for leaf in leaves]
    leaves = [leaf.value if number else leaf for leaf, number in zip(leaves, numbers)]
    parts = [_plain(leaf) if isinstance(leaf, Tensor) else (leaf, []) for leaf in leaves]
    mapped, alone = _open_levels()
    levels = sorted({*mapped, *(level for _, found in parts for level in found)}, key=lambda level: level.order)
    lanes = [columns(level, None) for level in levels]
    open_levels = [column.level for column in (*alone, *itertools.chain(*lanes)) if column.level.alive]
    for place in itertools.product(*[range(level.size) for level in levels]):
        at = dict(zip(levels, place))
        row = [value[tuple([at[level] for level in found])] if found else value for value, found in parts]
        row = [_shown(value) if number else value for value, number in zip(row, numbers)]
        lane_args, lane_kwargs = unflatten(row, spec)
        with on_plane(None):
            line = text.format(*map(_shown, lane_args), **{k: _shown(v) for k, v in lane_kwargs.items()})
        if not open_levels:
            builtins.print(line)
            continue
        own = [(column, 0) for column in alone]
        own += [(column, at[level]) for level, found in zip(levels, lanes) for column in found]
        places = {column.level: column.places[i] for column, i in own}
        hold(open_levels, Line(line, places, tuple([column.numbers[i] for column, i in own])))


def _open_levels() -> tuple[list[Any], list[Column]]:
    """The levels of every `vmap` that the code runs in, and what lanes run of those whose lanes run one by one."""
    mapped: list[Any] = []
    level = current_level()
    while level is not None:
        if isinstance(level, LaneLevel) or (isinstance(level, BatchLevel) and level.restartable):
            mapped.append(level)
        level = level.parent
    covered = {id(column.level) for level in mapped for column in columns(level, None)}
    alone = [
        column
        for level in live_levels()
        if isinstance(level, LaneLevel) and id(level) not in covered and level.lanes.size == 1
        for column in columns(level, None)
    ]
    return mapped, alone


def _plain(tensor: Tensor) -> tuple[Tensor, list[Any]]:
    """The plain tensor `[B1, B2, ..., *S]` of a value, and the levels whose lanes it has, outermost first."""
    levels: list[Any] = []
    value: Any = tensor
    if isinstance(tensor, Plane):
        tensor._check_alive("debug.print")  # type: ignore[attr-defined]
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
