"""Hooks of gradients that a backward pass calls below a batch plane: each lane's gradient, as the hook would see it.

The level that a hook was set on may have ended, and the pass may run below other levels than it did. So the lanes are
those of a level of its own, which the tensors of the old one, if the hook knows some, have too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import BackwardHook

from lanewise._core.again.journal import memory
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.dual import DualTensor
from lanewise._core.forms import give, take
from lanewise._core.level import ENDED, Level, on_plane
from lanewise._core.parting.joins import restricted
from lanewise._core.parting.lane_level import LaneLevel, home_of
from lanewise._core.parting.lanes import Lanes, child
from lanewise._core.parting.rows import gather_rows
from lanewise._core.plane import Plane, detached, recorded, replace_tensors


class HookLevel(LaneLevel):
    """For each lane of another level one: whatever has lanes there, or was given to another hook, has them here."""

    __slots__ = ()

    def _stand_in_for(self, outer: Level) -> None:
        """Lie where the hook is called, not where the other level lay."""

    def covers(self, level: Any) -> bool:
        """Whether `level` is this one, another for the same lanes, or one whose lanes these are."""
        return super().covers(level) or (isinstance(level, HookLevel) and level.outer is self.outer)

    def here(self, tensor: Tensor, lanes: Lanes | None = None) -> Any:
        """A tensor of this level or of the other one, for the lanes that run."""
        if isinstance(tensor, Tensor) and self.outer.owns(tensor) and recorded(tensor):  # type: ignore[union-attr]
            # What the other plane recorded of it plays no part in a pass below that plane.
            tensor = detached(tensor)
        return super().here(tensor, lanes)

    def adopt(self, value: Tensor, origin: tuple | None = None) -> BatchTensor:
        primal = self._primal(value)
        if primal is not value and isinstance(primal, BatchTensor) and self.covers(primal.level):
            return self.here(primal)
        return super().adopt(primal, origin)

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        if any(self._primal(operand) is not operand for operand in operands):
            args, kwargs = replace_tensors(self._primal, args, kwargs)
            operands = [self._primal(operand) for operand in operands]
        return super().interpret(func, args, kwargs, operands)

    def _primal(self, tensor: Any) -> Any:
        """Of what a `jvp` inside the other level gave a tangent, which plays no part in a pass below it."""
        while type(tensor) is DualTensor and tensor.level.order > self.outer.order:  # type: ignore[union-attr]
            tensor = tensor.value
        return tensor


class Handles:
    """Removes a hook from every plane."""

    __slots__ = ("handles",)

    def __init__(self, handles: list) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class _Runner:
    """What runs a hook whose lanes may part: `run(level, hook, args, unchanged)`.

    It gives `unchanged` for lanes in which the hook returns None, and None if it does so in all.
    """

    run: Callable[[HookLevel, Callable, tuple, Any], Any]


runner = _Runner()


@contextmanager
def hook_level(level: BatchLevel, lanes: Lanes) -> Iterator[HookLevel]:
    """Open a level for lanes of another, which may have ended."""
    if not isinstance(level, LaneLevel):
        here = HookLevel(1, level.randomness, outer=level)
    else:
        running, level.lanes = level.lanes, lanes
        try:
            here = HookLevel(1, level.randomness, outer=level)
        finally:
            level.lanes = running if level.alive else ENDED
    with here:
        yield here
    here.task = -1


def on_lanes(tensor: BatchTensor, hook: Callable[[Tensor], Any]) -> Callable:
    """A tensor's hook for the value below, whose gradients have the lanes as a dim."""
    level, lanes = tensor.level, home_of(tensor)
    places = _running(tensor)
    running = lanes if places is None else child(lanes, places)

    def below(grad: Tensor) -> Tensor | None:
        with hook_level(level, running) as here:
            given = here.wrap(grad if places is None else here.below(gather_rows, grad, places))
            out = take(here, runner.run(here, hook, (given,), given), "lanes")
        return out if out is None or places is None else grad.index_copy(0, places.to(grad.device), out)

    return below


def of_running(tensor: Any, hook: Callable[[Tensor], Any]) -> Callable:
    """A hook for the lanes that run, of a tensor that has more."""
    while isinstance(tensor, Plane):
        level = tensor.level
        if isinstance(level, LaneLevel) and level.aliases is not None:
            level.aliases.check(level, memory(tensor))
        if type(tensor) is BatchTensor and (places := _running(tensor)) is not None:
            hook = _of_some(level, tensor.home, places, hook)
        tensor = tensor.value
    return hook


def _running(tensor: BatchTensor) -> Tensor | None:
    """The places in a tensor of the lanes that run; None where these are all that it has."""
    level = tensor.level
    if not isinstance(level, LaneLevel) or not level.alive or tensor.home is level.lanes:
        return None
    places = level.lanes.places(tensor.home)
    if places is None:
        level.here(tensor)  # raises: no lane that runs has it
    return places


def _of_some(level: LaneLevel, home: Lanes, places: Tensor, hook: Callable[[Tensor], Any]) -> Callable:
    with on_plane(None):
        others = torch.ones(home.size, dtype=torch.bool, device=places.device).index_fill(0, places, False).nonzero()
    lanes, rest = child(home, places), child(home, others.squeeze(1))

    def hooked(grad: Tensor) -> Tensor | None:
        given = restricted(level, grad, lanes)
        out = None if given is None else hook(given)
        if out is None:
            return None
        changed: Any = restricted(level, out, lanes)
        unchanged = restricted(level, grad, rest)
        return changed if unchanged is None else changed + unchanged

    return hooked


def on_lanes_of_node(level: BatchLevel, lanes: Lanes, forms: tuple[list, list], hook: Any) -> Callable:
    """A node's hook for the node of the plane below: of its inputs' gradients and its outputs', or of these alone."""
    cells = getattr(hook, "__closure__", None) or ()
    owner = next((part for part in map(_content, cells) if isinstance(part, BackwardHook)), None)

    def below(*grads: tuple) -> Any:
        kinds = forms[-len(grads) :]
        with hook_level(level, lanes) as here:
            given = tuple(
                [
                    tuple([give(here, grad, form) for grad, form in zip(group, group_forms, strict=True)])
                    for group, group_forms in zip(grads, kinds, strict=True)
                ]
            )
            if owner is None:
                result = runner.run(here, hook, given, given[0])
            else:
                result = _of_module(here, owner, hook, given)
            if result is None:
                return None
            changed = result if isinstance(result, tuple) else (result,)
            return tuple([take(here, grad, form) for grad, form in zip(changed, kinds[0], strict=True)])

    return below


class _Below(tuple):
    """Gradients of a module's outputs as the plane below that of its hook has them."""


def _of_module(level: HookLevel, owner: Any, hook: Callable, given: tuple) -> Any:
    """A module's hook, which leaves the outputs' gradients on its owner: for lanes that run again as it found them."""
    found = owner.grad_outputs
    if type(found) is _Below:
        found = _Below([give(level, grad, "lanes") for grad in found])

    def run(*groups: tuple) -> tuple:
        owner.grad_outputs = found
        out, left = hook(*groups), owner.grad_outputs
        return groups[0] if out is None else out, None if left is None else tuple(left)

    out, left = runner.run(level, run, given, None)
    owner.grad_outputs = None if left is None else _Below([take(level, grad, "lanes") for grad in left])
    return out


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
