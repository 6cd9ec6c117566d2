"""Dispatch modes around a transform: they see the operations that are carried out, each once, and no wrappers.

While a level is open, each mode that was active before stands behind a proxy. An operation on wrappers passes the proxy
and goes to its plane; what the plane does below, on tensors that the mode may have made itself, is the mode's again.
A mode entered inside the function sees the operations that the function asks for, on wrappers. Those of a selective
checkpoint keep nothing of them: it would be without the history that the planes below give it.
"""

import functools
from typing import Any

from lanewise._torch_compat import (
    FACTORY_KEY,
    SELECTIVE_CHECKPOINT_MODES,
    TorchDispatchMode,
    dispatch_mode_at,
    dispatch_mode_count,
    pop_dispatch_mode,
    push_dispatch_mode,
    tls_is_included,
)


class Behind(TorchDispatchMode):
    """Stands for a mode; wrappers pass."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _of_plane(types):
            return NotImplemented
        return self.mode.__torch_dispatch__(func, types, args, kwargs or {})


def _of_plane(types: Any) -> bool:
    """Whether a wrapper is among the operands, of these types."""
    return any(getattr(kind, "is_plane", False) for kind in types)


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


def _keep_nothing_inside(mode: Any) -> None:
    own = mode.__torch_dispatch__

    @functools.wraps(own)
    def dispatch(self: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _of_plane(types) or tls_is_included(FACTORY_KEY):
            return func(*args, **(kwargs or {}))
        return own(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = dispatch


for _mode in SELECTIVE_CHECKPOINT_MODES:
    _keep_nothing_inside(_mode)
