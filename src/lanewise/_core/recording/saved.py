"""Saved-tensor hooks on planes, and which `detach` is whose.

Autograd detaches a tensor that it hands to a hook, or takes out of a graph, and ties what comes back to its plane's
history again; the planes below must keep theirs. A user's own detach cuts them all.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import live_levels, note_autograd, on_plane, pin_grad_mode, standing
from lanewise._core.plane import Plane, argument, at_home, tensors_of, written_arguments
from lanewise._core.recording.standpoint import Standpoint
from lanewise._torch_classes import CloneBeforeMutation, MutationHandle, SwapWithCloned, mutation_context
from lanewise._torch_compat import (
    ADINPLACE_OR_VIEW_KEY,
    current_graph_task_id,
    is_grad_enabled,
    saved_tensor_hooks,
    tls_is_excluded,
)


class _Packing(threading.local):
    """Whether a saved-tensor hook is packing: autograd ties what it returns to its plane's history again."""

    now = False


packing = _Packing()


def saving() -> bool:
    """Whether a tensor is on its way into a saved-tensor hook: autograd detaches it with grad mode off."""
    return packing.now or (not is_grad_enabled() and saved_tensor_hooks() is not None)


def cuts_all_planes() -> bool:
    """Whether `aten.detach` was asked for by the user's `torch.detach`, and not by autograd for a tensor it saves.

    The user's comes by way of autograd's kernels, which switch view tracking off, and not in a backward pass.
    """
    return current_graph_task_id() == -1 and tls_is_excluded(ADINPLACE_OR_VIEW_KEY) and not saving()


def _hooks_on_plane(stand: Standpoint, pack: Any, unpack: Any) -> tuple[Any, Any]:
    """Saved-tensor hooks that work on the plane where they were set.

    `unpack` may run the function again (checkpoint), maybe long after its level has ended: it stands on that plane,
    and what it gives back is of the levels that the saved tensor was of.
    """
    note_autograd()

    def pack_on_plane(tensor: Tensor) -> Any:
        before, packing.now = packing.now, True
        try:
            if not isinstance(tensor, Plane):
                with on_plane(None):
                    return pack(tensor), ()
            # Autograd packs with grad mode off; the planes below are recording. What is packed has the lanes of the
            # tensor, and is of its plane, wherever the code that runs stands.
            with pin_grad_mode(True), on_plane(tensor.level), at_home(tensor):
                return pack(tensor), _seats_of(tensor)
        finally:
            packing.now = before

    def unpack_on_plane(packed: tuple) -> Tensor:
        held, seats = packed
        before, packing.now = packing.now, False
        try:
            with stand.again():
                if not isinstance(held, Plane):
                    return _reseated(unpack(held), seats)
                with on_plane(held.level), at_home(held):
                    return _reseated(unpack(held), seats)
        finally:
            packing.now = before

    return pack_on_plane, unpack_on_plane


def _seats_of(tensor: Any) -> tuple:
    """The levels that a tensor is of, each with the lanes it was made for there."""
    seats = []
    while isinstance(tensor, Plane):
        seats.append((tensor.level, getattr(tensor, "home", None)))
        tensor = tensor.value
    return tuple(seats)


def _reseated(tensor: Any, seats: tuple) -> Any:
    """The tensor on these levels, for these lanes, where a function that was run again made it for new ones."""
    if not isinstance(tensor, Plane) or _seats_of(tensor) == seats:
        return tensor
    if not seats:
        # What the hook computed from a tensor from outside.
        return _reseated(tensor.value, ())
    (level, home), *rest = seats
    value = _reseated(tensor.value, tuple(rest))
    tangent = getattr(tensor, "tangent", None)
    if tangent is not None:
        return level.wrap(value, _reseated(tangent, tuple(rest)))
    out = level.wrap(value) if getattr(tensor, "mapped", False) else level.adopt(value)
    if home is not None:
        out.home = home
    return out


def _kept_as_copies(pack: Any, unpack: Any) -> tuple[Any, Any]:
    """The hooks of `allow_mutation_on_saved_tensors`, which copy what is saved once its memory is written to.

    Nobody sees that of values on planes: they are copied at once.
    """
    context = mutation_context(pack)

    def pack_copy(tensor: Tensor) -> Any:
        if not isinstance(tensor, Plane) and not live_levels():
            return pack(tensor)
        handle = MutationHandle()
        context.cloned[handle] = tensor.clone()
        return handle

    return pack_copy, unpack


def _clone_before_write(self: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """The mode of `allow_mutation_on_saved_tensors`: before a write to memory of which something is saved."""
    written = [argument(args, kwargs or {}, place, name) for place, name in written_arguments(func)]
    planes = [tensor for tensor in tensors_of(tuple(written), {}) if isinstance(tensor, Plane)]
    if not planes:
        return _clone_before_write_of_torch(self, func, types, args, kwargs)
    context = self.ctx
    for tensor in planes:
        plain: Any = tensor
        while isinstance(plain, Plane):
            plain = plain.value
        for saved in context.sid_to_tid.get((plain.data_ptr(), plain._version), ()):
            handle = context.tid_to_weakhandle.get(saved)
            if handle is not None and handle in context.original:
                with on_plane(None):
                    context.cloned[handle] = context.original.pop(handle).clone()
    return func(*args, **(kwargs or {}))


_clone_before_write_of_torch = CloneBeforeMutation.__torch_dispatch__
CloneBeforeMutation.__torch_dispatch__ = _clone_before_write
_saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
_saved_tensors_hooks_init = _saved_tensors_hooks.__init__
_saved_tensors_hooks_enter = _saved_tensors_hooks.__enter__
_saved_tensors_hooks_exit = _saved_tensors_hooks.__exit__


def _init(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    if type(self) is SwapWithCloned:
        pack_hook, unpack_hook = _kept_as_copies(pack_hook, unpack_hook)
    self.stand = Standpoint()
    _saved_tensors_hooks_init(self, *_hooks_on_plane(self.stand, pack_hook, unpack_hook))


def _enter(self: Any) -> None:
    _saved_tensors_hooks_enter(self)
    standing.replaced.append(self.stand.replaced)


def _exit(self: Any, *args: Any) -> None:
    standing.replaced.pop()
    _saved_tensors_hooks_exit(self, *args)


_saved_tensors_hooks.__init__ = _init  # type: ignore[method-assign]
_saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]
_saved_tensors_hooks.__exit__ = _exit  # type: ignore[method-assign]
