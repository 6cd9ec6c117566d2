"""Operators and methods of tensors with lanes that need no dispatcher: they call the plane below at once.

torch's dispatcher takes `x * y` to a tensor subclass in more time than a small kernel does its work. Where nothing else
is to see the operation (autograd, a mode, autocast), a method of the class answers at once. It takes the plainest
operands only, and hands all others to torch's own method, and so to the rules.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, strided

from lanewise._core.batch import BatchTensor
from lanewise._core.hot import inert
from lanewise._core.level import standing
from lanewise._torch_compat import (
    OUTSIDE_KEY,
    current_graph_task_id,
    dispatch_mode_count,
    function_mode_count,
    include_key,
    is_any_autocast_enabled,
    make_wrapper,
    never_compile,
    tls_is_included,
)

_recorded = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_NUMBERS = frozenset([int, float])

# All such methods.
METHODS: set[Callable] = set()


def unwatched(level: Any) -> bool:
    """Whether an operation is one of the user's on the plane of `level`, and nobody watches."""
    return (
        standing.here is level
        and tls_is_included(OUTSIDE_KEY)
        and not dispatch_mode_count()
        and not function_mode_count()
        and not is_any_autocast_enabled()
    )


def gathers(level: Any) -> bool:
    """Whether operands of other lanes are to be gathered for those that run, as they are but in a backward pass."""
    return level.alive and current_graph_task_id() == -1


def unary_method(name: str, call: Callable[[Any], Any]) -> None:
    """Let the method `name` of tensors with lanes be `call`, elementwise, on the plane below."""
    own = getattr(Tensor, name)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        level = x.level
        if args or kwargs or not x.mapped or not unwatched(level) or _recorded(x):
            return own(x, *args, **kwargs)
        if x.home is not level.lanes:
            if not gathers(level):
                return own(x)
            x = level.here(x)
        value = x.value
        if level.parent is not None or not inert(value):
            return _like(x, level.below(call, value))
        include_key(OUTSIDE_KEY, False)
        try:
            out = call(value)
        finally:
            include_key(OUTSIDE_KEY, True)
        return _like(x, out)

    _install(name, method, own)


def binary_method(name: str, call: Callable[[Any, Any], Any], forward: str = "") -> None:
    """Let the operator `name` of tensors with lanes be `call`, elementwise, on the plane below.

    `forward` names the operator that a reflected one is of the other operand, where that is a tensor.
    """
    own = getattr(Tensor, name)
    reflects = getattr(Tensor, forward or name)

    def method(x: Any, y: Any) -> Any:
        level = x.level
        if not x.mapped or not unwatched(level) or _recorded(x):
            return reflects(y, x) if forward and isinstance(y, Tensor) else own(x, y)
        kind = type(y)
        home = level.lanes
        if x.home is not home or (kind is BatchTensor and y.home is not home):
            if not gathers(level) or (kind is BatchTensor and (y.level is not level or _recorded(y))):
                return reflects(y, x) if forward and isinstance(y, Tensor) else own(x, y)
            x, y = level.here(x), level.here(y)
        value = x.value
        number = kind in _NUMBERS
        direct = level.parent is None and inert(value)
        if number:
            other = y
        elif kind is BatchTensor and y.level is level and y.mapped and y.home is home and not _recorded(y):
            other = y.value
            if other.dtype is not value.dtype or other.dim() != value.dim():
                return reflects(y, x) if forward else own(x, y)
            direct = direct and inert(other)
        elif kind is Tensor and y.dtype is value.dtype and y.dim() < value.dim() and y.layout is strided and inert(y):
            other = y
        else:
            return reflects(y, x) if forward and isinstance(y, Tensor) else own(x, y)
        if direct:
            include_key(OUTSIDE_KEY, False)
            try:
                out = call(value, other)
            finally:
                include_key(OUTSIDE_KEY, True)
        else:
            out = level.below(call, value, other)
        if number:
            return _like(x, out)
        # `level.wrap`, written out.
        wrapper = make_wrapper(BatchTensor, out.shape[1:], out.stride()[1:], None, None, out.dtype, strided, out.device)
        wrapper.value = out
        wrapper.level = level
        wrapper.mapped = True
        wrapper.home = home
        return wrapper

    _install(name, method, own)


def _like(x: BatchTensor, out: Tensor) -> BatchTensor:
    """`out`, of the shape of the value below `x`, on the plane of `x`."""
    wrapper = make_wrapper(BatchTensor, x.shape, out.stride()[1:], None, None, out.dtype, strided, out.device)
    wrapper.value = out
    wrapper.level = x.level
    wrapper.mapped = True
    wrapper.home = x.home
    return wrapper


def _install(name: str, method: Callable, own: Callable) -> None:
    method.__name__ = method.__qualname__ = name
    method.__doc__ = own.__doc__
    never_compile(method)
    setattr(BatchTensor, name, method)
    METHODS.add(method)
