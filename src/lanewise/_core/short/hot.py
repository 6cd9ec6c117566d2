"""The hot paths: the plainest operations on lanes, without what `interpret` does to be ready for all of them.

Per operation they save about half of the time. Each takes `(args, kwargs)` and declines with NotImplemented what it
cannot be sure of; the general path then does the same thing more slowly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, strided
from torch.library import Library, register_torch_dispatch
from torch.nn import Parameter

from lanewise._core.batch import HOT, BatchTensor, begin_again, is_here
from lanewise._core.draws.random import is_random
from lanewise._core.dual import DualTensor
from lanewise._core.level import standing
from lanewise._core.one_lane import FAILURES
from lanewise._core.operations import makes_tensors
from lanewise._core.parting.lanes import BeginAgain, for_lanes, union
from lanewise._core.plane import interpret, map_tensors, sync
from lanewise._torch_compat import (
    OUTSIDE_KEY,
    OpOverload,
    current_graph_task_id,
    dispatch_mode_count,
    fast_binding,
    has_kernel_for_key,
    include_key,
    is_any_autocast_enabled,
    is_inference_mode_enabled,
    look_up_rules,
    make_wrapper,
    never_compile,
    tls_is_included,
)
from lanewise._torch_compat import forward_ad as _native

# Classes of tensors that are of no plane, and that no code of a class looks at.
PLAIN = frozenset([Tensor, Parameter])


def inert(value: Tensor) -> bool:
    """Whether nothing looks at `value`: where there is no plane below, an operation on it needs no dispatch state."""
    return (
        type(value) is Tensor
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and _native._current_level < 0
    )


def pointwise_path(call: Callable, sums: bool = False, adds: bool = False) -> Callable:
    """A pointwise operation of one or two operands that broadcast and promote below as they do here.

    `sums`: Whether it adds them up, so that in a backward pass one that lacks a lane counts as zero there; `adds`:
    whether that is all it does.
    """

    def run(args: Any, kwargs: dict) -> Any:
        if kwargs or len(args) > 2:
            return NotImplemented
        x = args[0]
        if type(x) is not BatchTensor:
            return _captured_first(call, args)
        level = x.level
        if not x.mapped:
            return _uniform_first(call, args)
        home = x.home
        y = args[-1]
        kind = type(y)
        if home is not level.lanes or (kind is BatchTensor and y.home is not home):
            if kind is BatchTensor and y.level is not level:
                return _lower_first(call, x, y)
            aligned = _aligned(level, x, y, sums)
            if aligned is None:
                return _summed(level, x, y) if adds and kind is BatchTensor else NotImplemented
            x, y, home = aligned
        value = x.value
        direct = (
            level.parent is None
            and type(value) is Tensor
            and not (value.requires_grad or value.is_conj() or value.is_neg())
            and _native._current_level < 0
        )
        compute = level.computed if home is level.lanes else partial(for_lanes, level, home, level.computed)
        if len(args) == 1:
            out = call(value) if direct else compute(call, value)
        else:
            if kind is BatchTensor and y.level is not level:
                # Of a plane below: without lanes, unless the lanes here are pairs with its own.
                if level.lanes is not None or y.level.order > level.order or y.dtype is not value.dtype:
                    return _lower_first(call, x, y)
                direct = False
                if y.dim() >= value.dim():
                    value = at_rank(level, value, y.dim() + 1, direct)
            elif kind is BatchTensor:
                if not y.mapped and y.origin is not None:
                    sync(y)
                lower = not y.mapped
                y = y.value
                if y.dtype is not value.dtype:
                    return NotImplemented
                direct = direct and inert(y)
                if lower:
                    if y.dim() >= value.dim():
                        value = at_rank(level, value, y.dim() + 1, direct)
                elif y.dim() < value.dim():
                    y = at_rank(level, y, value.dim(), direct)
                elif y.dim() > value.dim():
                    value = at_rank(level, value, y.dim(), direct)
            elif kind in PLAIN:
                if y.dtype is not value.dtype or y.layout is not strided:
                    return NotImplemented
                direct = direct and inert(y)
                if y.dim() >= value.dim():
                    value = at_rank(level, value, y.dim() + 1, direct)
            elif isinstance(y, Tensor):
                return NotImplemented
            out = call(value, y) if direct else compute(call, value, y)
        # `level.wrap`, written out for the commonest operations of all.
        wrapper = make_wrapper(BatchTensor, out.shape[1:], out.stride()[1:], None, None, out.dtype, strided, out.device)
        wrapper.value = out
        wrapper.level = level
        wrapper.mapped = True
        wrapper.home = home
        return wrapper

    return run


def _aligned(level: Any, x: BatchTensor, y: Any, sums: bool) -> tuple[BatchTensor, Any, Any] | None:
    """Operands for the lanes that an operation runs on, and these; None where that is not plain to see.

    Those that run now; in a backward pass those that all operands have, for a cotangent says which lanes run.
    """
    if not level.alive:
        return None
    lanes = level.lanes
    if current_graph_task_id() == level.task:
        return level.here(x), level.here(y), lanes
    home = x.home
    if type(y) is BatchTensor and y.mapped:
        if y.home is not home:
            if sums:
                return None
            if y.home.within(home):
                home = y.home
            elif not home.within(y.home):
                return None
    elif sums and y is not x and isinstance(y, Tensor):
        return None
    if home is not lanes and lanes.within(home):
        return None
    return level.here(x, home), level.here(y, home), home


def _summed(level: Any, x: BatchTensor, y: BatchTensor) -> Any:
    """The sum of two cotangents: one that lacks a lane counts as zero there."""
    first, second = x.value, y.value
    if (
        not y.mapped
        or first.shape[1:] != second.shape[1:]
        or first.dtype is not second.dtype
        or level.parent is not None
    ):
        return NotImplemented
    if current_graph_task_id() == level.task or not level.alive or not inert(first) or not inert(second):
        return NotImplemented
    lanes = union(x.home, y.home)
    if x.home is lanes:
        out = first.index_add(0, y.home.positions(lanes), second)
    elif y.home is lanes:
        out = second.index_add(0, x.home.positions(lanes), first)
    else:
        places, others = x.home.places(lanes), y.home.places(lanes)
        if places is None or others is None:
            return NotImplemented
        out = first.new_zeros((lanes.size, *first.shape[1:]))
        out.index_add_(0, places, first).index_add_(0, others, second)
    wrapper = level.wrap(out)
    wrapper.home = lanes
    return wrapper


def _of_rank(x: Tensor, rank: int) -> Tensor:
    """x `[B, *S]` with so many dims, those that are missing of size 1 after its lanes."""
    return x.view(x.shape[0], *[1] * (rank - x.dim()), *x.shape[1:])


def at_rank(level: Any, x: Tensor, rank: int, direct: bool) -> Tensor:
    """The same on the plane below, whose operations may be seen there."""
    return _of_rank(x, rank) if direct else level.below(_of_rank, x, rank)


def _lower_first(call: Callable, x: BatchTensor, y: BatchTensor) -> Any:
    """The first operand is of a plane below that of the second: without lanes, as what is captured."""
    level = y.level
    if x.level.order > level.order or level.lanes is not None or not y.mapped or y.home is not None:
        return NotImplemented
    return _one_without_lanes(level, call, x, y.value)


def _uniform_first(call: Callable, args: Any) -> Any:
    """The first operand is the same in all lanes."""
    if len(args) != 2:
        return NotImplemented
    x, y = args
    level = x.level
    if type(y) is not BatchTensor or not y.mapped:
        return NotImplemented
    if y.level is not level:
        return _lower_first(call, x, y)
    if y.home is not level.lanes:
        return NotImplemented
    if x.origin is not None:
        sync(x)
        if x.mapped:
            return NotImplemented
    return _one_without_lanes(level, call, x.value, y.value)


def _one_without_lanes(level: Any, call: Callable, x: Tensor, y: Tensor) -> Any:
    """`call` of x `[*S]` and y `[B, *T]`."""
    if x.dtype is not y.dtype:
        return NotImplemented
    direct = level.parent is None and inert(x) and inert(y)
    if x.dim() >= y.dim():
        y = at_rank(level, y, x.dim() + 1, direct)
    return level.wrap(call(x, y) if direct else level.computed(call, x, y))


def _captured_first(call: Callable, args: Any) -> Any:
    if len(args) != 2:
        return NotImplemented
    x, y = args
    if type(x) not in PLAIN or type(y) is not BatchTensor or not y.mapped or y.home is not y.level.lanes:
        return NotImplemented
    return NotImplemented if x.layout is not strided else _one_without_lanes(y.level, call, x, y.value)


def same_in_all(call: Callable, apart: bool) -> Callable:
    """An operation whose operands are all the same in all lanes: once, on the plane below.

    `apart`: it has a kernel of autograd's own, so that for plain values no dispatch state need be restored.
    """

    def run(args: Any, kwargs: dict) -> Any:
        level: Any = None
        values = []
        direct = apart
        for arg in args:
            kind = type(arg)
            if kind is BatchTensor:
                if arg.mapped:
                    return NotImplemented
                level = arg.level if level is None else level
                if arg.origin is not None:
                    sync(arg)
                    if arg.mapped:
                        return NotImplemented
                if arg.level is not level or arg.home is not level.lanes:
                    return NotImplemented
                arg = arg.value
                direct = direct and inert(arg)
            elif isinstance(arg, Tensor):
                if kind is not Tensor:
                    return NotImplemented
                direct = direct and inert(arg)
            elif kind is list and any(isinstance(item, Tensor) for item in arg):
                return NotImplemented
            values.append(arg)
        if level is None or any(isinstance(arg, Tensor) for arg in kwargs.values()):
            return NotImplemented
        # A mode may have been entered inside: where DTensor asks a fake tensor of the plane for a shape, it is one.
        if direct and level.parent is None and not (kwargs or is_any_autocast_enabled() or dispatch_mode_count()):
            out = call(*values)
        else:
            run = level.computed_once
            out = run(call, *values) if not kwargs else run(lambda: call(*values, **kwargs))
        return level.adopt(out) if isinstance(out, Tensor) else map_tensors(level.adopt, out)

    return run


def _gathered(args: tuple) -> list | None:
    """Operands for the lanes that run, where some have others. (What a path cannot be sure of, it declines again.)"""
    here: list | None = None
    for place, arg in enumerate(args):
        if type(arg) is BatchTensor and arg.mapped:
            level = arg.level
            if arg.home is not level.lanes and level.alive:
                if here is None:
                    if current_graph_task_id() != level.task:
                        return None
                    here = list(args)
                here[place] = level.here(arg)
    return here


# The rules of each namespace stay registered for as long as its library object lives.
_libraries: dict[str, Library] = {}

_entries: dict[int, Callable] = {}
# (No operation on tangents has an entry of its own.)
look_up_rules({BatchTensor: _entries, DualTensor: {}})


def plainest_pointwise(call: Callable) -> Callable:
    """For `route`: a pointwise operation on plain values of one dtype and rank with the lanes that run, or a number."""

    def ahead(enter: Callable) -> Callable:
        def plainest(cls: type, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
            x = args[0]
            if kwargs or type(x) is not BatchTensor or not x.mapped:
                return enter(cls, func, types, args, kwargs)
            level = x.level
            home = level.lanes
            value = x.value
            if standing.here is not level or x.home is not home or level.parent is not None or not inert(value):
                return enter(cls, func, types, args, kwargs)
            operands = [value]
            for y in args[1:]:
                kind = type(y)
                if kind is BatchTensor and y.mapped and y.level is level and y.home is home:
                    y = y.value
                    if y.dtype is not value.dtype or y.dim() != value.dim() or not inert(y):
                        return enter(cls, func, types, args, kwargs)
                elif kind is not float and kind is not int:
                    return enter(cls, func, types, args, kwargs)
                operands.append(y)
            outside = tls_is_included(OUTSIDE_KEY)
            if outside:
                include_key(OUTSIDE_KEY, False)
            try:
                out = call(*operands)
            except FAILURES:
                out = None
            finally:
                if outside:
                    include_key(OUTSIDE_KEY, True)
            if out is None:
                return enter(cls, func, types, args, kwargs)
            wrapper = make_wrapper(
                BatchTensor, out.shape[1:], out.stride()[1:], None, None, out.dtype, strided, out.device
            )
            wrapper.value = out
            wrapper.level = level
            wrapper.mapped = True
            wrapper.home = home
            return wrapper

        return plainest

    return ahead


def route(op: OpOverload, path: Callable, ahead: Callable[[Callable], Callable] | None = None) -> None:
    """Let the operation take `path` first when it meets a tensor with lanes.

    torch looks for a rule of the operation before it calls `__torch_dispatch__`: the path is found without a second
    look, 0.3 us sooner. Routed again, the operation takes the later path. `ahead` gets what torch would call then, and
    gives what it is to call instead: the plainest case of all, without what the path does to be ready for others.
    """
    HOT[op] = path
    gathers = not (op.is_view or op._schema.is_mutable or is_random(op))
    uniform = None
    if gathers and makes_tensors(op) and not str(op._schema.arguments[0].type).startswith("List"):
        uniform = same_in_all(fast_binding(op), has_kernel_for_key(op.name(), "Autograd"))
    views = op.is_view

    def enter(cls: type, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        try:
            if views and is_inference_mode_enabled():
                out = NotImplemented
            elif not tls_is_included(OUTSIDE_KEY):
                out = path(args, kwargs)
            elif (type(x := args[0]) is BatchTensor and x.level is standing.here) or is_here(args):
                # Off for what the path calls without going below.
                include_key(OUTSIDE_KEY, False)
                try:
                    out = NotImplemented
                    if uniform is not None and not (type(x) is BatchTensor and x.mapped):
                        out = uniform(args, kwargs)
                    if out is NotImplemented:
                        out = path(args, kwargs)
                    if out is NotImplemented and gathers and (here := _gathered(args)) is not None:
                        out = path(here, kwargs)
                except FAILURES:
                    out = NotImplemented  # What fails may do so for some lanes only: the general path sees to it.
                finally:
                    include_key(OUTSIDE_KEY, True)
            else:
                out = NotImplemented
            return interpret(func, args, kwargs) if out is NotImplemented else out
        except BeginAgain as again:
            return begin_again(again, func, args, kwargs)

    never_compile(enter)
    if ahead is not None:
        enter = ahead(enter)
        never_compile(enter)
    namespace = op.namespace
    again = id(op) in _entries
    _entries[id(op)] = enter
    if again:
        return  # torch registers a rule once; where it looks in its own table, the one before does
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = Library(namespace, "FRAGMENT")
    register_torch_dispatch(op.name(), BatchTensor, enter, lib=library)
