"""Operators and methods of tensors with lanes that need no dispatcher: they call the plane below at once.

torch's dispatcher takes `x * y` to a tensor subclass in more time than a small kernel does its work. Where nothing else
is to see the operation (autograd, a mode, autocast), a method of the class answers at once. It takes the plainest
operands only, and hands all others to torch's own method, and so to the rules.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, strided

from lanewise._core.batch import HOT, BatchTensor
from lanewise._core.level import standing
from lanewise._core.one_lane import FAILURES
from lanewise._core.plane import sync, tracked
from lanewise._core.short.hot import PLAIN, inert, same_in_all
from lanewise._torch_compat import (
    OUTSIDE_KEY,
    OpOverload,
    current_graph_task_id,
    dispatch_mode_count,
    function_mode_count,
    include_key,
    is_any_autocast_enabled,
    is_inference_mode_enabled,
    make_wrapper,
    never_compile,
    tls_is_included,
)
from lanewise._torch_compat import forward_ad as _native

_recorded = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

# Those that take no numbers but as operands.
METHODS: set[Callable] = set()
# The others, and torch's own that they stand for: numbers of each lane are to be seen to before these.
TAKE_NUMBERS: dict[Callable, Callable] = {}


def unwatched(level: Any) -> bool:
    """Whether an operation is one of the user's on the plane of `level`, and nobody watches."""
    return (
        standing.here is level
        and tls_is_included(OUTSIDE_KEY)
        and not dispatch_mode_count()
        and not function_mode_count()
        and not is_any_autocast_enabled()
        and _native._current_level < 0
    )


def gathers(level: Any) -> bool:
    """Whether operands of other lanes are to be gathered for those that run, as they are but in a backward pass."""
    return level.alive and current_graph_task_id() == level.task


def _for_all_lanes(run: Callable, *operands: Any) -> Any:
    """What `run`, of hot.same_in_all, gives; None where that is not plain to see."""
    for y in operands:
        kind = type(y)
        if kind is BatchTensor:
            if _recorded(y):
                return None
        elif kind is not float and kind is not int and (kind is not Tensor or y.layout is not strided):
            return None
    include_key(OUTSIDE_KEY, False)
    try:
        out = run(operands, {})
    except FAILURES:
        return None
    finally:
        include_key(OUTSIDE_KEY, True)
    return None if out is NotImplemented else out


def _beside_lanes(call: Callable, x: Any, y: Any) -> Any:
    """`call` of x, the same in all lanes, and y with lanes; None where that is not plain to see."""
    level = x.level
    value, other = x.value, y.value
    if (
        x.origin is not None
        or y.level is not level
        or x.home is not level.lanes
        or y.home is not level.lanes
        or level.parent is not None
        or value.dtype is not other.dtype
        or value.dim() >= other.dim()
        or _recorded(y)
        or not (inert(value) and inert(other))
    ):
        return None
    include_key(OUTSIDE_KEY, False)
    try:
        out = call(value, other)
    except FAILURES:
        return None
    finally:
        include_key(OUTSIDE_KEY, True)
    return level.wrap(out)


def unary_method(name: str, call: Callable[[Any], Any]) -> None:
    """Let the method `name` of tensors with lanes be `call`, elementwise, on the plane below."""
    own = getattr(Tensor, name)
    for_all = same_in_all(call, apart=True)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        level = x.level
        if args or kwargs or not unwatched(level) or _recorded(x):
            return own(x, *args, **kwargs)
        if not x.mapped:
            out = _for_all_lanes(for_all, x)
            return own(x) if out is None else out
        if x.home is not level.lanes:
            if not gathers(level):
                return own(x)
            x = level.here(x)
        value = x.value
        try:
            if level.parent is not None or not inert(value):
                out = level.computed(call, value)
            else:
                include_key(OUTSIDE_KEY, False)
                try:
                    out = call(value)
                finally:
                    include_key(OUTSIDE_KEY, True)
        except FAILURES:
            out = None
        if out is None:
            return own(x)  # What fails may do so for some lanes only: the rules see to it.
        wrapper = make_wrapper(BatchTensor, x.shape, out.stride()[1:], None, None, out.dtype, strided, out.device)
        wrapper.value = out
        wrapper.level = level
        wrapper.mapped = True
        wrapper.home = x.home
        return wrapper

    _install(name, method, own)
    METHODS.add(method)


def binary_method(name: str, call: Callable[[Any, Any], Any], forward: str = "") -> None:
    """Let the operator `name` of tensors with lanes be `call`, elementwise, on the plane below.

    `forward` names the operator that a reflected one is of the other operand, where that is a tensor.
    """
    own = getattr(Tensor, name)
    reflects = getattr(Tensor, forward or name)
    for_all = same_in_all(call, apart=True)

    def apart(x: Any, y: Any) -> Any:
        return reflects(y, x) if forward and isinstance(y, Tensor) else own(x, y)

    def method(x: Any, y: Any) -> Any:
        level = x.level
        # `unwatched`, written out as all that follows: these are the commonest operations of all.
        if (
            standing.here is not level
            or not tls_is_included(OUTSIDE_KEY)
            or dispatch_mode_count()
            or function_mode_count()
            or is_any_autocast_enabled()
            or _native._current_level >= 0
            or _recorded(x)
        ):
            return apart(x, y)
        kind = type(y)
        if not x.mapped:
            if kind is BatchTensor and y.mapped:
                out = _beside_lanes(call, x, y)
            else:
                out = _for_all_lanes(for_all, x, y)
            return apart(x, y) if out is None else out
        home = level.lanes
        if x.home is not home or (kind is BatchTensor and y.home is not home):
            if not gathers(level) or (kind is BatchTensor and (y.level is not level or _recorded(y))):
                return apart(x, y)
            x, y = level.here(x), level.here(y)
        value = x.value
        direct = (
            level.parent is None
            and type(value) is Tensor
            and not (value.requires_grad or value.is_conj() or value.is_neg())
        )
        if kind is float or kind is int:
            other = y
            shape = x.shape
        elif kind is BatchTensor and y.level is level and not _recorded(y):
            other = y.value
            if other.dtype is not value.dtype or (
                other.dim() != value.dim() if y.mapped else other.dim() >= value.dim() or y.origin is not None
            ):
                return apart(x, y)
            direct = direct and type(other) is Tensor and not (other.requires_grad or other.is_conj() or other.is_neg())
            shape = None
        elif kind is Tensor and y.dtype is value.dtype and y.dim() < value.dim() and y.layout is strided and inert(y):
            other = y
            shape = None
        elif (
            level.unrecorded
            and kind in PLAIN
            and y.dtype is value.dtype
            and y.dim() < value.dim()
            and y.layout is strided
            and not (y.is_conj() or y.is_neg())
        ):
            other = y
            shape = None
            direct = False
        else:
            return apart(x, y)
        try:
            if direct:
                include_key(OUTSIDE_KEY, False)
                try:
                    out = call(value, other)
                finally:
                    include_key(OUTSIDE_KEY, True)
            else:
                out = level.computed(call, value, other)
        except FAILURES:
            out = None
        if out is None:
            return apart(x, y)
        if shape is None:
            shape = out.shape[1:]
        wrapper = make_wrapper(BatchTensor, shape, out.stride()[1:], None, None, out.dtype, strided, out.device)
        wrapper.value = out
        wrapper.level = level
        wrapper.mapped = True
        wrapper.home = home
        return wrapper

    _install(name, method, own)
    METHODS.add(method)


def reducing_method(name: str, call: Callable) -> None:
    """Let the method `name` of tensors with lanes be `call`, which reduces dims, on the plane below.

    `call` gives None for what is not plain to see.
    """
    own = getattr(Tensor, name)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        level = x.level
        if not x.mapped or level.lanes is not None or not unwatched(level) or _recorded(x):
            return own(x, *args, **kwargs)
        try:
            out = level.below(partial(call, **kwargs) if kwargs else call, x.value, *args)
        except FAILURES:
            out = None
        return own(x, *args, **kwargs) if out is None else level.wrap(out)

    _install(name, method, own)
    TAKE_NUMBERS[method] = own


def view_method(name: str, call: Callable) -> None:
    """Let the method `name` of tensors with lanes be `call` on the plane below, which gives a view or views.

    That is where nothing is recorded on their plane: elsewhere its autograd has to know what is a view of what.
    `call` gives None for what is not plain to see.
    """
    own = getattr(Tensor, name)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        level = x.level
        if (
            kwargs
            or not level.unrecorded
            or not x.mapped
            or level.lanes is not None
            or not unwatched(level)
            or _recorded(x)
            or is_inference_mode_enabled()
        ):
            return own(x, *args, **kwargs)
        try:
            out = level.below(call, x.value, *args)
        except FAILURES:
            out = None
        if out is None:
            return own(x, *args)
        return level.wrap(out) if isinstance(out, Tensor) else tuple([level.wrap(part) for part in out])

    _install(name, method, own)
    TAKE_NUMBERS[method] = own


def operands_method(name: str, op: OpOverload) -> None:
    """Let the method `name` of tensors with lanes be `op` by its short path, where all its tensors have these lanes."""
    own = getattr(Tensor, name)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        level = x.level
        if kwargs or not x.mapped or level.lanes is not None or not unwatched(level) or _recorded(x):
            return own(x, *args, **kwargs)
        for arg in args:
            if isinstance(arg, Tensor) and not (
                type(arg) is BatchTensor and arg.mapped and arg.level is level and not _recorded(arg)
            ):
                return own(x, *args)
        include_key(OUTSIDE_KEY, False)
        try:
            out = HOT[op]((x, *args), {})
        except FAILURES:
            out = NotImplemented
        finally:
            include_key(OUTSIDE_KEY, True)
        return own(x, *args) if out is NotImplemented else out

    _install(name, method, own)
    TAKE_NUMBERS[method] = own


def product_method(name: str, forms: dict[tuple, Callable], turned: bool = False) -> None:
    """Let the operator `name` of tensors with lanes be a product of floating-point numbers, on the plane below.

    `forms` gives the product of values by whether each operand has lanes and how many dims it has in a lane; for others
    than these the rules do. `turned`: it is the reflected operator, whose first operand is the right one.
    """
    own = getattr(Tensor, name)

    def apart(x: Any, y: Any) -> Any:
        return torch.matmul(y, x) if turned and isinstance(y, Tensor) else own(x, y)

    def method(x: Any, y: Any) -> Any:
        level = x.level
        kind = type(y)
        if not issubclass(kind, Tensor) or not unwatched(level) or _recorded(x):
            return apart(x, y)
        if kind is BatchTensor:
            if y.level is not level or y.home is not x.home or _recorded(y):
                return apart(x, y)
            if not y.mapped and y.origin is not None:
                sync(y)
            other, lanes = y.value, y.mapped
        elif kind is Tensor and y.layout is strided and inert(y):
            other, lanes = y, False
        else:
            return apart(x, y)
        if not x.mapped and x.origin is not None:
            sync(x)
        value = x.value
        if x.home is not level.lanes or value.dtype is not other.dtype:
            return apart(x, y)
        left, right = ((y, other, lanes), (x, value, x.mapped))[:: 1 if turned else -1]
        form = forms.get((left[2], left[0].dim(), right[2], right[0].dim()))
        if form is None or not value.is_floating_point():
            return apart(x, y)
        try:
            if level.parent is None and inert(value) and inert(other):
                include_key(OUTSIDE_KEY, False)
                try:
                    out = form(left[1], right[1])
                finally:
                    include_key(OUTSIDE_KEY, True)
            else:
                if level.lanes is not None and (tracked(value) or tracked(other)):
                    return apart(x, y)
                out = level.below(form, left[1], right[1])
        except FAILURES:
            return apart(x, y)
        return level.wrap(out) if x.mapped or lanes else level.adopt(out)

    _install(name, method, own)
    METHODS.add(method)


def _install(name: str, method: Callable, own: Callable) -> None:
    method.__name__ = method.__qualname__ = name
    method.__doc__ = own.__doc__
    never_compile(method)
    setattr(BatchTensor, name, method)
