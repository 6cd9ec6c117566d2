"""Methods that go by where a tensor lies in memory, of which wrappers have none.

Those that give another shape in place, as `x.t_()`, put a view in the place of what it is a view of: autograd writes
down for each view how to take it anew from its base, by which it finds the gradients of what is written to it, and
leaves out what such a method does, because of plain tensors it looks at the memory.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from lanewise._core.again.around import note_data_set
from lanewise._core.plane import Plane, recorded, without_history
from lanewise._core.refits import begins_at, check_refit, exchange
from lanewise._torch_compat import use_count
from lanewise.errors import TransformError, at_user_line


def _alone(own: Callable, x: Any, args: tuple, kwargs: dict) -> Any:
    """Give another shape to what nothing is a view of, and what is then no view of another either."""
    origin = getattr(x, "origin", None)
    own(x, *args, **kwargs)
    if not x.level.lifted(x):
        x.origin = origin
    for name in ("value", "tangent"):
        value = getattr(x, name, None)
        if type(value) is Tensor and not value.requires_grad:
            setattr(x, name, without_history(value))
    return x


def _reshaping_method(name: str) -> None:
    own = getattr(Tensor, name)
    twin = name.removesuffix("_")

    def method(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled() or is_inference_mode_enabled() or (recorded(x) and x.is_leaf):
            return own(x, *args, **kwargs)
        if not recorded(x) and x._base is None and use_count(x) == 1:
            return _alone(own, x, args, kwargs)
        check_refit(x)
        note_data_set(x)
        before = getattr(x, twin)(*args, **kwargs)
        try:
            exchange(x, before)
        except RuntimeError:  # where its gradient is retained, autograd refers to it
            if not x._is_view():
                return own(x, *args, **kwargs)
            advice = f"x = x.{twin}(...)  # under a name of its own"
            raise TransformError(at_user_line(f"{name} of a view whose gradient is retained", advice)) from None
        if getattr(x, "origin", None) is not None:
            x.origin = (before, *x.origin[1:])
        x.reshaped = (*(x.reshaped or ())[:-1], before, getattr(before, twin)(*args, **kwargs))
        return x

    method.__name__ = method.__qualname__ = name
    method.__doc__ = own.__doc__
    setattr(Plane, name, method)


for _name in ("as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"):
    _reshaping_method(_name)


_as_strided = Tensor.as_strided


def _by_strides(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    if storage_offset is not None:
        # From where it begins is what autograd of wrappers knows of.
        further = storage_offset - begins_at(x)
        if further == 0 or (0 < further < x.numel() and x.is_contiguous()):
            x, storage_offset = x.view(-1)[further:] if further else x, None
    return _as_strided(x, size, stride, storage_offset)


Plane.storage_offset = begins_at  # type: ignore[method-assign]
Plane.as_strided = _by_strides  # type: ignore[method-assign]
