"""Dispatch modes around a transform: they see the operations that are carried out, each once, and no wrappers.

While a level is open, each mode that was active before stands behind a proxy. An operation on wrappers passes the proxy
and goes to its plane; what the plane does below, on tensors that the mode may have made itself, is the mode's again.
A mode entered inside the function sees the operations that the function asks for, on wrappers.
"""

from typing import Any

from lanewise._torch_compat import (
    TorchDispatchMode,
    dispatch_mode_at,
    dispatch_mode_count,
    pop_dispatch_mode,
    push_dispatch_mode,
)


class Behind(TorchDispatchMode):
    """Stands for a mode; wrappers pass."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in types:
            if getattr(kind, "is_plane", False):
                return NotImplemented
        return self.mode.__torch_dispatch__(func, types, args, kwargs or {})


def set_modes_aside() -> list[Any]:
    """Put every active mode behind a proxy; returns the modes as they were, for `bring_modes_back`.

    torch's own (fake tensors, tracing) have places of their own on the stack, and let unknown tensors pass.
    """
    modes = [dispatch_mode_at(i) for i in range(dispatch_mode_count())]
    modes = [mode for mode in modes if getattr(mode, "_mode_key", None) is None]
    if all(isinstance(mode, Behind) for mode in modes):
        return []
    _exchange(modes, [mode if isinstance(mode, Behind) else Behind(mode) for mode in modes])
    return modes


def bring_modes_back(modes: list[Any]) -> None:
    """Undo `set_modes_aside`."""
    _exchange(modes, modes)


def _exchange(old: list[Any], new: list[Any]) -> None:
    for _ in old:
        pop_dispatch_mode()
    for mode in new:
        push_dispatch_mode(mode)
