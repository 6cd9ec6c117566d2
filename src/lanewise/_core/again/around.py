"""What a function writes to tensors from around it that have no lanes of its own, undone where it starts again.

These it finds by itself (captured tensors, arguments without lanes), so each of its writes is asked for them, and the
level that starts again puts them back. Its arguments with lanes are the business of its journal (journal.py), and of
written.py (of control flow): a `vmap` inside, run for all pairs of lanes, writes to rows of what belongs to the level
around, where no operation of that level is seen. So that level is told once the `vmap` inside has ended, of all it has
written.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lanewise._core.again.journal import elements, memory
from lanewise._core.level import Level, current_level, standing
from lanewise._core.plane import (
    Plane,
    argument,
    detached,
    map_tensors,
    own_node,
    sync,
    versioned,
    written_arguments,
    written_statistics,
)
from lanewise._core.refits import exchange
from lanewise._torch_compat import forward_level, preserve_version


def note_writes_around(level: Any, op: Any, args: tuple, kwargs: dict) -> None:
    """Before an operation writes: keep what tensors from around the function of `level` hold, where it is the first."""
    for position, name in written_arguments(op):
        written = argument(args, kwargs, position, name)
        if not (level.owns(written) and (level.lifted(written) or not written.origin)):
            map_tensors(lambda tensor: _note(level, tensor), written)
    for statistic in written_statistics(op, args, kwargs):
        _note(level, statistic, True)


def note_data_set(tensor: Any) -> None:
    """Before a tensor is given other data."""
    here = current_level()
    if here is None:
        return
    if isinstance(tensor, Plane) and tensor.level.order < here.order:
        here.check_write_outside(tensor.level)
    for level in standing.levels:
        if level.order <= here.order and getattr(level, "journal", None) is not None:
            _note(level, tensor)


def undo_writes_around(level: Any) -> None:
    """Write back what these tensors held, the latest first: of those that overlap, the first holds what was before."""
    for kept in reversed((level.around or {}).values()):
        kept.put_back()


def _note(level: Any, tensor: Tensor, statistic: bool = False) -> None:
    target = _around(level, tensor)
    # (A tensor of another class, such as a DTensor, is not what it seems here.)
    if not isinstance(target, Plane) and type(target) not in (Tensor, Parameter):
        return
    if target.layout is not torch.strided or target.is_nested:
        return
    if level.around is None:
        level.around = {}
    place = elements(target)
    if place not in level.around:
        level.around[place] = _Kept(target, statistic)


def _around(level: Level, tensor: Any) -> Any:
    """What is written to from around a level: the tensor, or what it is an alias of; None if that is from inside."""
    if not isinstance(tensor, Plane) or tensor.level.order < level.order:
        return tensor
    part = tensor
    while level.owns(part) and not level.lifted(part) and part.origin:
        part = part.origin[0]
    if part is tensor or isinstance(part, Plane):
        return None
    sync(tensor)
    return None if level.lifted(tensor) else tensor.value


def level_above(tensor: Tensor) -> Level:
    """The lowest of the open levels that a tensor is from around of: below it, operations are of the tensor's plane."""
    order = tensor.level.order if isinstance(tensor, Plane) else 0
    return next(level for level in standing.levels if level.order > order)


def _has_history(tensor: Any) -> bool:
    """Whether a tensor, or its tangent, is a result on its plane or on one below."""
    while isinstance(tensor, Plane):
        tangent = getattr(tensor, "tangent", None)
        if own_node(tensor) is not None or (tangent is not None and _has_history(tangent)):
            return True
        tensor = tensor.value
    return tensor.grad_fn is not None


class _Kept:
    """What a tensor was at a time, also its history and its tangents.

    Attributes:
        tensor: The tensor.
        statistic: Whether it is a running statistic: writes to it, and this one, count no new version.
        recorded: Whether it has a history.
        above: The level right above its plane.
        alias: An alias, with its memory and shape.
        values: A copy.
        settings: What it was then that an alias does not tell.
        reshaped: Which other shapes it had been given in place.
    """

    __slots__ = ("tensor", "statistic", "recorded", "above", "alias", "values", "settings", "reshaped")

    def __init__(self, tensor: Any, statistic: bool) -> None:
        self.tensor = tensor
        self.statistic = statistic
        self.recorded = _has_history(tensor)
        self.above = level_above(tensor)
        self.settings = self._settings()
        self.reshaped = getattr(tensor, "reshaped", None)
        self.above.below(self._keep)

    def _keep(self) -> None:
        tensor = self.tensor
        if isinstance(tensor, Plane):
            self.alias = tensor.level.alias(tensor)
        else:
            self.alias = tensor.data
            if not tensor.requires_grad:
                self.values = tensor.clone()  # sooner than below
                return
        with torch.set_grad_enabled(self.recorded):
            self.values = self._written().clone()

    def put_back(self) -> None:
        """Make it that again."""
        self.above.below(self._put_back)

    def _put_back(self) -> None:
        tensor = self.tensor
        level = getattr(tensor, "level", None)
        if getattr(tensor, "reshaped", None) is not self.reshaped:
            exchange(tensor, tensor.reshaped[0 if self.reshaped is None else len(self.reshaped) - 1])
            tensor.reshaped = self.reshaped
        with torch.set_grad_enabled(self.recorded):
            if self.recorded and not tensor._is_view():
                tensor.detach_()  # its history is that of what is put back alone
            if self.settings != self._settings():
                Tensor.data.__set__(tensor, self.alias)  # type: ignore[attr-defined]
                if level is not None:
                    level.copy_slots(tensor, self.alias)
                    tensor.replaced = self.settings[-1]
            with preserve_version(*versioned(tensor) if self.statistic else ()):
                self._written().copy_(self.values)

    def _settings(self) -> tuple:
        tensor = self.tensor
        if not isinstance(tensor, Plane):
            return elements(tensor)
        place = memory(tensor) if tensor.level.lifted(tensor) else 0
        return tuple(tensor.shape), tensor.stride(), place, getattr(tensor, "replaced", ())

    def _written(self) -> Any:
        return self.tensor if self.recorded or forward_level() >= 0 else detached(self.tensor)
