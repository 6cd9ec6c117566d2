"""Hooks of a tensor's gradient, which are set on the plane below, too.

There, the value must be the tensor's own, so that each use of it is one of the tensor's. That of an argument is not,
which is in use outside, and neither is that of what is the same in all lanes, whose gradient is the sum over them. A
hook that is set on such a tensor before it is used gives it a value of its own. One that is set later starts the
`vmap` again, in which all tensors have one from the start.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.dual import DualTensor
from lanewise._core.level import note_autograd
from lanewise._core.parting.joins import can_settle
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Disagreement, Restart
from lanewise._core.plane import Plane, lift, own_node, recorded, tracked
from lanewise._core.recording.hooks import Handles, of_running, on_lanes
from lanewise._torch_classes import awaited_nodes
from lanewise._torch_compat import next_node_number, node_number

# Code of functions that set hooks on tensors which they have used.
sets_late_hooks: set[Any] = set()


class HookedLevel(LaneLevel):
    """A level on which what is recorded below has lanes, and a value of its own, from the start."""

    __slots__ = ()
    hooked = True

    def adopt(self, value: Tensor, origin: tuple | None = None) -> BatchTensor:
        out = super().adopt(value, origin)
        if origin is None and type(out) is BatchTensor and not out.mapped and tracked(value):
            lift(out)
        return out


def set_hook(tensor: Any, hook: Callable[[Tensor], Any]) -> Handles:
    """Call `hook` with each gradient of a tensor of a plane, on whichever plane it is computed."""
    note_autograd()
    handles = []
    below = tracked(tensor.value)
    if below:
        _give_own_value(tensor)
    on_this = of_running(tensor, hook)
    if recorded(tensor) or not below:
        handles.append(Tensor.register_hook(tensor, on_this))
    if below:
        handles.append(_hook_value(tensor, hook))
        awaited = awaited_nodes(hook)
        if awaited is not None:
            awaited.extend([node for node in _nodes_below(tensor) if node not in awaited])
    return Handles(handles)


def set_hook_below(tensor: Any, hook: Callable[[Tensor], Any]) -> Handles:
    """Call `hook` with each gradient of a tensor of a plane that a pass below that plane computes."""
    note_autograd()
    _give_own_value(tensor)
    return _hook_value(tensor, hook)


def _give_own_value(tensor: Any) -> None:
    if isinstance(tensor, BatchTensor):
        if _used(tensor):
            _begin_again(tensor.level)
        lift(tensor, writes=False)  # a gradient for each lane, not their sum
    if not _is_own(tensor):
        tensor.value = own_value(tensor.level, tensor.value)


def _hook_value(tensor: Any, hook: Callable[[Tensor], Any]) -> Any:
    on_value = on_lanes(tensor, hook) if isinstance(tensor, BatchTensor) else _on_primal(tensor.level, hook)
    return tensor.value.register_hook(on_value)


def _on_primal(level: Any, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A hook for the value below: what it computes with tensors of the level has no tangent there."""

    def below(gradient: Tensor) -> Any:
        changed = hook(gradient)
        return changed.value if level.owns(changed) else changed

    return below


def _nodes_below(tensor: Any) -> list:
    """The nodes that a tensor's value has on each plane below. A pass goes through that of one plane."""
    nodes = []
    while isinstance(tensor, Plane):
        tensor = tensor.value
        if recorded(tensor):
            nodes.append(own_node(tensor))
    return nodes


def own_value(level: Any, value: Tensor) -> Tensor:
    """A value of the plane below with a node of its own."""
    return level.below(_alias, value)


def with_own_nodes(values: list) -> list:
    """Values of this plane; what is recorded has a node of its own, for hooks of the tensors of a plane above."""
    return [_alias(value) if tracked(value) else value for value in values]


def _alias(value: Tensor) -> Tensor:
    with torch.enable_grad():
        return value.view_as(value)


def _used(tensor: BatchTensor) -> bool:
    """Whether a value that is not the tensor's own may have been used on its level."""
    node = _node(tensor.value)
    if node is None or node_number(node) < tensor.level.begun:
        return next_node_number() != tensor.level.begun
    return not (tensor.mapped and _is_own(tensor)) and node_number(node) != next_node_number() - 1


def _begin_again(level: BatchLevel) -> None:
    """Start the `vmap` again where that can be, and has not been done for this yet."""
    if not level.hooked and level.journal is not None and can_settle(level):
        level.hooked = True
        raise Restart(level, structured=True) if isinstance(level, LaneLevel) else Disagreement(level)


def _is_own(wrapper: Any) -> bool:
    """Whether a value was computed inside, for this wrapper alone: all its uses are uses of the wrapper."""
    if isinstance(wrapper, DualTensor):
        if wrapper.tangent is None:
            return False
    elif getattr(wrapper, "origin", None) is not None:
        return False
    node = _node(wrapper.value)
    return node is not None and node_number(node) >= wrapper.level.begun


def _node(value: Tensor) -> Any:
    """The node that a value has on the highest plane that records it."""
    while isinstance(value, Plane) and not recorded(value):
        value = value.value
    return own_node(value)
