"""Where a wrapper lies in memory, and how its shape changes in place."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.plane import Plane
from lanewise._torch_compat import no_dispatch, set_grad_enabled, swap_tensor_impl


def refit(wrapper: Plane, like: Plane, func: Any, args: tuple, kwargs: dict) -> Plane:
    """Give `wrapper` the metadata and value of `like`, the result of the out-of-place twin of an in-place view."""
    check_refit(wrapper)
    grad_mode = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        with no_dispatch():
            func(*args, **kwargs)
    finally:
        set_grad_enabled(grad_mode)
    wrapper.level.copy_slots(wrapper, like)
    return wrapper


def regrow(wrapper: Plane, like: Plane) -> Plane:
    """The same where it grows: a wrapper's storage is as large as its first shape, so that no operation can do that."""
    check_refit(wrapper)
    Tensor.data.__set__(wrapper, like)  # type: ignore[attr-defined]
    wrapper.level.copy_slots(wrapper, like)
    return wrapper


def check_refit(wrapper: Plane) -> None:
    """Before the shape of a wrapper changes in place: its levels may have lanes that have parted."""
    part: Any = wrapper
    while isinstance(part, Plane):
        part.level.check_refit(part)
        part = part.value


def begins_at(wrapper: Any) -> int:
    """The storage offset of one lane's tensor, from where the memory of the lane begins."""
    value = wrapper.value
    start = int(value.storage_offset())
    if not getattr(wrapper, "mapped", False):
        return start
    step: int = value.stride(0)
    return start % step if step else start


def refit_in_place(level: Any, func: Any, args: tuple, kwargs: dict, twin: Any) -> Any:
    """An in-place view operation: the twin gives the new value, then the wrapper's own metadata follow."""
    wrapper = args[0]
    before = level.alias(wrapper)  # what the view is a view of; the wrapper itself would be its own parent
    like = twin(before, *args[1:], **kwargs)
    return refit(wrapper, like, func, args, kwargs)


def exchange(x: Any, y: Any) -> None:
    """Let each of two wrappers of a class be what the other is; attributes of the user's stay."""
    swap_tensor_impl(x, y)
    for kind in type(x).__mro__:
        for name in vars(kind).get("__slots__", ()):
            missing = object()
            mine, its = getattr(x, name, missing), getattr(y, name, missing)
            for wrapper, value in ((x, its), (y, mine)):
                if value is not missing:
                    setattr(wrapper, name, value)
                elif hasattr(wrapper, name):
                    delattr(wrapper, name)
