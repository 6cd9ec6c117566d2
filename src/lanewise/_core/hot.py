"""The hot paths: the plainest operations on lanes, without what `interpret` does to be ready for all of them.

Per operation they save about half of the time. Each takes `(args, kwargs)` and declines with NotImplemented what it
cannot be sure of; the general path then does the same thing more slowly.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, strided
from torch.library import Library, register_torch_dispatch
from torch.nn import Parameter

from lanewise._core.batch import HOT, BatchTensor, begin_again, is_here
from lanewise._core.journal import keep
from lanewise._core.lanes import BeginAgain, union
from lanewise._core.level import makes_tensors, standing
from lanewise._core.plane import interpret, map_tensors, sync
from lanewise._core.random import is_random
from lanewise._core.rules import Rule
from lanewise._torch_compat import (
    OUTSIDE_KEY,
    OpOverload,
    current_graph_task_id,
    include_key,
    is_any_autocast_enabled,
    look_up_rules,
    make_wrapper,
    never_compile,
    tls_is_included,
)
from lanewise._torch_compat import forward_ad as _native

# What kernels raise for operands that they do not take. (Others come from hooks of the user's that a kernel calls.)
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError)


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
                return NotImplemented
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
        if len(args) == 1:
            out = call(value) if direct else level.below(call, value)
        else:
            if kind is BatchTensor:
                if y.level is not level:
                    return NotImplemented
                lower = not y.mapped
                if lower and y.origin is not None:
                    return NotImplemented
                y = y.value
                if y.dtype is not value.dtype or (lower and y.dim() >= value.dim()):
                    return NotImplemented
                direct = direct and inert(y)
                if not lower and y.dim() != value.dim():
                    if not direct:
                        return NotImplemented
                    value, y = _of_one_rank(value, y)
            elif kind in PLAIN:
                if y.dtype is not value.dtype or y.dim() >= value.dim() or y.layout is not strided:
                    return NotImplemented
                direct = direct and inert(y)
            elif isinstance(y, Tensor):
                return NotImplemented
            out = call(value, y) if direct else level.below(call, value, y)
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


def _of_one_rank(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x `[B, *S]` and y `[B, *T]`, the one of fewer dims with dims of size 1 after its lanes."""
    missing = [1] * abs(x.dim() - y.dim())
    if x.dim() < y.dim():
        return x.view(x.shape[0], *missing, *x.shape[1:]), y
    return x, y.view(y.shape[0], *missing, *y.shape[1:])


def _uniform_first(call: Callable, args: Any) -> Any:
    """The first operand is the same in all lanes."""
    if len(args) != 2:
        return NotImplemented
    x, y = args
    level = x.level
    if type(y) is not BatchTensor or not y.mapped or y.level is not level or y.home is not level.lanes:
        return NotImplemented
    value, other = x.value, y.value
    if x.origin is not None or value.dtype is not other.dtype or value.dim() >= other.dim():
        return NotImplemented
    if level.parent is None and inert(value) and inert(other):
        return level.wrap(call(value, other))
    return level.wrap(level.below(call, value, other))


def _captured_first(call: Callable, args: Any) -> Any:
    if len(args) != 2:
        return NotImplemented
    x, y = args
    if type(x) not in PLAIN or type(y) is not BatchTensor or not y.mapped or y.home is not y.level.lanes:
        return NotImplemented
    value = y.value
    if x.dtype is not value.dtype or x.dim() >= value.dim() or x.layout is not strided:
        return NotImplemented
    if y.level.parent is None and inert(x) and inert(value):
        return y.level.wrap(call(x, value))
    return y.level.wrap(y.level.below(call, x, value))


def choice_path(call: Callable) -> Callable:
    """`where(condition, x, y)`"""

    def run(args: Any, kwargs: dict) -> Any:
        level: Any = None
        for arg in args:
            if type(arg) is BatchTensor and arg.mapped:
                level = arg.level
                break
        if level is None or kwargs:
            return NotImplemented
        lanes = level.lanes
        direct = level.parent is None
        rank = narrow = 0
        values: list[Tensor] = []
        for arg in args:
            if type(arg) is BatchTensor:
                if arg.level is not level or arg.home is not lanes:
                    return NotImplemented
                value = arg.value
                if arg.mapped:
                    if rank and value.dim() != rank:
                        return NotImplemented
                    rank = value.dim()
                elif arg.origin is None:
                    narrow = max(narrow, value.dim() + 1)
                else:
                    return NotImplemented
            elif type(arg) in PLAIN and arg.layout is strided:
                value = arg
                narrow = max(narrow, value.dim() + 1)
            else:
                return NotImplemented
            direct = direct and inert(value)
            values.append(value)
        if narrow > rank or values[1].dtype is not values[2].dtype:
            return NotImplemented
        return level.wrap(call(*values) if direct else level.below(call, *values))

    return run


def paired_path(call: Callable, rank: int, otherwise: Callable) -> Callable:
    """`call(x, y)` for two operands with lanes, of `rank` dims in each lane, one dtype and one shape, else `otherwise`.

    Of floating point: sums of others have a dtype of their own.
    """
    rank += 1

    def run(args: Any, kwargs: dict) -> Any:
        x, y = args
        if type(x) is BatchTensor and x.mapped and type(y) is BatchTensor and y.mapped and x.level is y.level:
            level = x.level
            value, other = x.value, y.value
            if (
                x.home is level.lanes
                and y.home is x.home
                and value.dtype is other.dtype
                and value.dim() == rank
                and value.shape == other.shape
                and value.is_floating_point()
            ):
                if level.parent is None and inert(value) and inert(other):
                    return level.wrap(call(value, other))
                return level.wrap(level.below(call, value, other))
        return otherwise(args, kwargs)

    return run


def write_path(call: Callable) -> Callable:
    """A pointwise operation in place, of one or two operands; version counters need the state of the plane below."""

    def run(args: Any, kwargs: dict) -> Any:
        if kwargs or len(args) > 2:
            return NotImplemented
        x = args[0]
        if type(x) is not BatchTensor or not x.mapped or x.home is not x.level.lanes:
            return NotImplemented
        level = x.level
        value = x.value
        if level.journal is not None:
            keep(level, value, x.home)
        if len(args) == 1:
            level.below(call, value)
            return x
        y = args[1]
        if type(y) is BatchTensor:
            if y.level is not level or not y.mapped or y.home is not x.home or y.value.dim() != value.dim():
                return NotImplemented
            level.below(call, value, y.value)
            return x
        if isinstance(y, Tensor):
            if type(y) is not Tensor or y.dim() >= value.dim():
                return NotImplemented
        level.below(call, value, y)
        return x

    return run


def single_path(rule: Rule) -> Callable:
    """An operation whose first argument is its only tensor operand."""

    def run(args: Any, kwargs: dict) -> Any:
        x = args[0]
        if type(x) is not BatchTensor or not x.mapped or x.home is not x.level.lanes:
            return NotImplemented
        level = x.level
        value = x.value
        if rule.guarded or level.parent or not value.is_cpu or not inert(value) or is_any_autocast_enabled():
            out = level.below(rule.run, level, args, kwargs)
        else:
            out = rule.run(level, args, kwargs)
        return level.wrap(out) if isinstance(out, Tensor) else map_tensors(level.wrap, out)

    return run


def operands_path(rule: Rule) -> Callable:
    """An operation on a few tensors, none of them in a list; some may be the same in all lanes."""

    def run(args: Any, kwargs: dict) -> Any:
        if kwargs:
            return NotImplemented
        level: Any = None
        for arg in args:
            if type(arg) is BatchTensor and arg.level is not level:
                if level is None or arg.level.order > level.order:
                    level = arg.level
        if level is None:
            return NotImplemented
        lanes = level.lanes
        direct = not rule.guarded and level.parent is None
        mapped = uniform = False
        for arg in args:
            kind = type(arg)
            if kind is BatchTensor:
                if arg.level is not level:
                    # Of a plane below: a tensor without lanes, unless the lanes here are pairs with its own.
                    if lanes is not None:
                        return NotImplemented
                    continue
                if arg.home is not lanes:
                    return NotImplemented
                if not arg.mapped and arg.origin is not None:
                    sync(arg)
                if arg.mapped:
                    mapped = True
                else:
                    uniform = True
                value = arg.value
            elif kind in PLAIN:
                if arg.layout is not strided:
                    return NotImplemented
                value = arg
            elif isinstance(arg, Tensor):
                return NotImplemented
            else:
                continue
            if direct and not (inert(value) and value.is_cpu):
                direct = False
        if not mapped:
            return NotImplemented
        if uniform:
            args = [
                arg.value if type(arg) is BatchTensor and arg.level is level and not arg.mapped else arg for arg in args
            ]
        if direct and not is_any_autocast_enabled():
            out = rule.run(level, args, kwargs)
        else:
            out = level.below(rule.run, level, args, kwargs)
        return level.wrap(out) if isinstance(out, Tensor) else map_tensors(level.wrap, out)

    return run


def _same_in_all(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation whose operands are all the same in all lanes: once, on the plane below."""
    level = None
    values = []
    for arg in args:
        kind = type(arg)
        if kind is BatchTensor:
            level = arg.level if level is None else level
            if arg.mapped or arg.origin is not None or arg.level is not level or arg.home is not level.lanes:
                return NotImplemented
            arg = arg.value
        elif isinstance(arg, Tensor) and kind is not Tensor:
            return NotImplemented
        elif kind is list and any(isinstance(item, Tensor) for item in arg):
            return NotImplemented
        values.append(arg)
    if level is None or any(isinstance(arg, Tensor) for arg in kwargs.values()):
        return NotImplemented
    out = level.below(func, *values) if not kwargs else level.below(lambda: func(*values, **kwargs))
    return level.adopt(out) if isinstance(out, Tensor) else map_tensors(level.adopt, out)


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
look_up_rules(BatchTensor, _entries)


def route(op: OpOverload, path: Callable) -> None:
    """Let the operation take `path` first when it meets a tensor with lanes.

    torch looks for a rule of the operation before it calls `__torch_dispatch__`: the path is found without a second
    look, 0.3 us sooner.
    """
    HOT[op] = path
    gathers = not (op.is_view or op._schema.is_mutable or is_random(op))
    computes = gathers and makes_tensors(op)

    def enter(cls: type, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        try:
            if not tls_is_included(OUTSIDE_KEY):
                out = path(args, kwargs)
            elif (type(x := args[0]) is BatchTensor and x.level is standing.here) or is_here(args):
                # Off for what the path calls without going below.
                include_key(OUTSIDE_KEY, False)
                try:
                    out = path(args, kwargs)
                    if out is NotImplemented and computes:
                        out = _same_in_all(func, args, kwargs)
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
    namespace = op.namespace
    _entries[id(op)] = enter
    library = _libraries.get(namespace)
    if library is None:
        library = _libraries[namespace] = Library(namespace, "FRAGMENT")
    register_torch_dispatch(op.name(), BatchTensor, enter, lib=library)
