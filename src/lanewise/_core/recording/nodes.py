"""`x.grad_fn` of a tensor whose plane below records it, too: hooks of the node are for passes on either plane.

Such a pass goes through nodes of its own plane only. To the gradient of its result a hook can be set below. What goes
on to the operands of the operation no node below need show, since a rule may have carried it out by several.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.dual import DualTensor
from lanewise._core.plane import Plane, own_node, tracked
from lanewise._core.recording.hooks import Handles
from lanewise._core.recording.tensor_hooks import set_hook_below
from lanewise._torch_classes import lead_edges
from lanewise.errors import TransformError, at_user_line


class PlaneNode:
    """A node of torch's, or what stands for one where a plane below alone records the tensor."""

    __slots__ = ("_own", "_tensor")

    def __init__(self, own: Any, tensor: Any) -> None:
        self._own = own
        self._tensor = tensor

    def register_prehook(self, hook: Callable[[tuple], Any]) -> Handles:
        """Call `hook` with the gradient of the tensor, as a tuple of one."""
        self._check_single()
        handles = [] if self._own is None else [self._own.register_prehook(hook)]

        def below(gradient: Tensor) -> Tensor | None:
            changed = hook((gradient,))
            return changed[0] if isinstance(changed, tuple) else changed

        handles.append(set_hook_below(self._tensor, below))
        return Handles(handles)

    def register_hook(self, hook: Callable[[tuple, tuple], Any]) -> Handles:
        """Call `hook` in passes on this plane; one below raises."""
        handles = [] if self._own is None else [self._own.register_hook(hook)]
        error = TransformError(
            at_user_line(
                f"{self._name()}.register_hook: the gradient passes below {self._tensor.level!r}, where the node "
                "stands for several, and no one knows the gradients of its operands",
                "y.register_hook(hook)             # of the gradient of the result, which a hook may change\n"
                "y.grad_fn.register_prehook(hook)  # likewise\n"
                "x.register_hook(hook)             # of the gradient of an operand",
            )
        )

        def below(gradient: Tensor) -> None:
            raise error

        handles.append(set_hook_below(self._tensor, below))
        return Handles(handles)

    def _check_single(self) -> None:
        node = self._own or _node_below(self._tensor)
        if len(node._input_metadata) != 1:
            raise TransformError(
                at_user_line(
                    f"{self._name()}.register_prehook: the node has several results, and each passes below "
                    f"{self._tensor.level!r} on its own",
                    "y.register_hook(hook)  # of the gradient of one result",
                )
            )

    def _name(self) -> str:
        return type(self._own or _node_below(self._tensor)).__name__

    def name(self) -> str:
        """The name that torch gives the node."""
        return (self._own or _node_below(self._tensor)).name()

    def _register_hook_dict(self, tensor: Tensor) -> None:
        """Called by `Tensor.register_hook`; that of a leaf of its plane keeps its hooks itself."""
        if self._own is not None:
            self._own._register_hook_dict(tensor)

    def __getattr__(self, name: str) -> Any:
        if self._own is None:
            self._tensor.requires_grad  # noqa: B018  (records it on this plane from here on)
            self._own = own_node(self._tensor)
        return getattr(self._own, name)

    def __eq__(self, other: object) -> bool:
        return type(other) is PlaneNode and (
            self._tensor is other._tensor if self._own is None else self._own is other._own
        )

    def __hash__(self) -> int:
        return hash(self._own or id(self._tensor))

    def __repr__(self) -> str:
        return f"<{self._name()} of {self._tensor.level!r}>"


def _node_below(tensor: Any) -> Any:
    part = tensor.value
    while isinstance(part, Plane) and own_node(part) is None:
        part = part.value
    return own_node(part)


def _grad_fn(self: Any) -> Any:
    """The node that the tensor comes of; None for a leaf, and for what nothing records."""
    own = own_node(self)
    if not isinstance(self, (BatchTensor, DualTensor)) or hasattr(own, "below") or not tracked(self.value):
        return own
    return PlaneNode(own, self)


def _torchs_own(node: Any) -> Any:
    return node._own if type(node) is PlaneNode else node


Plane.grad_fn = property(_grad_fn)  # type: ignore[method-assign]
lead_edges(_torchs_own)
