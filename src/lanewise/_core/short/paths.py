"""Short ways (hot.py) for other operations than pointwise ones: choices, products, views, what is joined or written."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, strided

from lanewise._core.again.journal import keep
from lanewise._core.batch import BatchTensor
from lanewise._core.level import standing
from lanewise._core.one_lane import FAILURES
from lanewise._core.overlaps import check_overlap
from lanewise._core.parting.steep import STEEP, gentle
from lanewise._core.plane import map_tensors, replace_tensors, sync, tensors_of, tracked, wrap_unlifted
from lanewise._core.rules import Rule
from lanewise._core.short.hot import PLAIN, inert
from lanewise._torch_compat import (
    ADINPLACE_OR_VIEW_KEY,
    OUTSIDE_KEY,
    OpOverload,
    dispatch_mode_count,
    exclude_key,
    fast_binding,
    include_key,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    tls_is_excluded,
    tls_is_included,
)


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
                if not arg.mapped and arg.origin is not None:
                    sync(arg)
                value = arg.value
                if arg.mapped:
                    if rank and value.dim() != rank:
                        return NotImplemented
                    rank = value.dim()
                else:
                    narrow = max(narrow, value.dim() + 1)
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


def paired_path(call: Callable, rank: int, dtypes: frozenset[Any], otherwise: Callable) -> Callable:
    """`call(x, y)` for two operands with lanes, of `rank` dims in each lane, one shape and one of `dtypes`.

    Else `otherwise`.
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
                and value.dtype in dtypes
            ):
                if level.parent is None and inert(value) and inert(other):
                    return level.wrap(call(value, other))
                return level.wrap(level.computed(call, value, other))
        return otherwise(args, kwargs)

    return run


def _fits_one(value: Tensor, y: Tensor) -> bool:
    """Whether lanes `[B, *S]` that are written to take an operand without lanes as one lane does.

    Two numbers without dims are computed with in the wider of their dtypes.
    """
    rank = value.dim()
    return y.dim() < rank and (rank > 1 or y.dtype is value.dtype)


def write_path(call: Callable) -> Callable:
    """A pointwise operation in place, of one or two operands."""

    def run(args: Any, kwargs: dict) -> Any:
        if kwargs or len(args) > 2:
            return NotImplemented
        x = args[0]
        if type(x) is not BatchTensor or not x.mapped or x.home is not x.level.lanes:
            return NotImplemented
        level = x.level
        value = x.value
        direct = level.parent is None and inert(value)
        if len(args) == 2:
            y = args[1]
            if type(y) is BatchTensor:
                if y.level is not level or y.home is not x.home:
                    return NotImplemented
                if not y.mapped and y.origin is not None:
                    sync(y)
                other = y.value
                if other.dim() != value.dim() if y.mapped else not _fits_one(value, other):
                    return NotImplemented
                if other is not value and (
                    type(value) is not Tensor or value.untyped_storage()._cdata == other.untyped_storage()._cdata
                ):
                    check_overlap(x, y)
                y = other
                direct = direct and inert(y)
            elif isinstance(y, Tensor):
                if type(y) is not Tensor or not _fits_one(value, y):
                    return NotImplemented
                direct = direct and inert(y)
            args = (value, y)
        else:
            args = (value,)
        if level.journal is not None:
            keep(level, value, x.home)
        if direct and not is_inference_mode_enabled():
            # With the key, the write counts as a version, as it does on the plane below.
            excluded = tls_is_excluded(ADINPLACE_OR_VIEW_KEY)
            exclude_key(ADINPLACE_OR_VIEW_KEY, False)
            try:
                call(*args)
            finally:
                exclude_key(ADINPLACE_OR_VIEW_KEY, excluded)
        else:
            level.below(call, *args)
        return x

    return run


def copied_path(twin: OpOverload, path: Callable) -> Callable:
    """`path` of an operation in place; what its twin gives, copied, where lanes have parted, with a history below.

    That is recorded for the lanes alone that have a cotangent (absent.py), for which the operands must be there still.
    """
    name = twin._schema.name.removeprefix("aten::")
    if name not in STEEP:
        return path

    def run(args: Any, kwargs: dict) -> Any:
        x = args[0]
        if type(x) is not BatchTensor or x.level.lanes is None or x.home is not x.level.lanes or not is_grad_enabled():
            return path(args, kwargs)
        operands = tensors_of(args, kwargs)
        if not any(map(tracked, operands)) or gentle(name, operands):
            return path(args, kwargs)
        before = x.clone()
        args, kwargs = replace_tensors(lambda tensor: before if tensor is x else tensor, args, kwargs)
        return x.copy_(twin(*args, **kwargs))

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
            out = level.computed(rule.run, level, args, kwargs)
        else:
            out = rule.run(level, args, kwargs)
        return level.wrap(out) if isinstance(out, Tensor) else map_tensors(level.wrap, out)

    return run


def plainest_single(rule: Rule) -> Callable | None:
    """For `hot.route`: the same, of a plain value with the lanes that run."""
    if rule.guarded:
        return None
    compute = rule.run

    def ahead(enter: Callable) -> Callable:
        def plainest(cls: type, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
            x = args[0]
            if type(x) is not BatchTensor or not x.mapped:
                return enter(cls, func, types, args, kwargs)
            level = x.level
            value = x.value
            if (
                standing.here is not level
                or x.home is not level.lanes
                or level.parent is not None
                or not inert(value)
                or not value.is_cpu
                or is_any_autocast_enabled()
            ):
                return enter(cls, func, types, args, kwargs)
            outside = tls_is_included(OUTSIDE_KEY)
            if outside:
                include_key(OUTSIDE_KEY, False)
            try:
                out = compute(level, args, kwargs)
            except FAILURES:
                out = None
            finally:
                if outside:
                    include_key(OUTSIDE_KEY, True)
            if out is None:
                return enter(cls, func, types, args, kwargs)
            return level.wrap(out) if isinstance(out, Tensor) else map_tensors(level.wrap, out)

        return plainest

    return ahead


def view_path(op: OpOverload, call: Callable, otherwise: Callable) -> Callable:
    """A view of one tensor: `call(value, ...)` takes it of the values below, or answers None, for `otherwise` to do."""
    as_it_is = fast_binding(op)

    def run(args: Any, kwargs: dict) -> Any:
        x = args[0]
        if kwargs or type(x) is not BatchTensor or x.home is not x.level.lanes:
            return otherwise(args, kwargs)
        level = x.level
        if not x.mapped:
            sync(x)
        # Below also for plain values: views of them share their version counters.
        if not x.mapped:
            return wrap_unlifted(level, op, args, kwargs, level.below(as_it_is, x.value, *args[1:]))
        out = level.below(call, x.value, *args[1:])
        if out is None:
            return otherwise(args, kwargs)
        return level.wrap(out) if isinstance(out, Tensor) else [level.wrap(part) for part in out]

    return run


def plainest_view(op: OpOverload, call: Callable) -> Callable:
    """For `hot.route`: a view of a plain value, with the lanes that run or the same in all; `call` is for those.

    Below autograd, torch leaves out that a view shares its version with what it is a view of, but for this key.
    """
    as_it_is = fast_binding(op)

    def ahead(enter: Callable) -> Callable:
        def plainest(cls: type, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
            x = args[0]
            if kwargs or type(x) is not BatchTensor:
                return enter(cls, func, types, args, kwargs)
            if not x.mapped and x.origin is not None:
                sync(x)
            mapped = x.mapped
            level = x.level
            value = x.value
            if (
                standing.here is not level
                or x.home is not level.lanes
                or level.parent is not None
                or not inert(value)
                or not level.grad_mode
                or is_inference_mode_enabled()
            ):
                return enter(cls, func, types, args, kwargs)
            excluded = tls_is_excluded(ADINPLACE_OR_VIEW_KEY)
            exclude_key(ADINPLACE_OR_VIEW_KEY, False)
            try:
                out = call(value, *args[1:]) if mapped else as_it_is(value, *args[1:])
            except FAILURES:
                out = None
            finally:
                exclude_key(ADINPLACE_OR_VIEW_KEY, excluded)
            if out is None:
                return enter(cls, func, types, args, kwargs)
            if not mapped:
                return wrap_unlifted(level, op, args, kwargs, out)
            return level.wrap(out) if isinstance(out, Tensor) else [level.wrap(part) for part in out]

        return plainest

    return ahead


def joined_path(call: Callable, new_dim: bool) -> Callable:
    """`call(tensors, dim)` puts tensors side by side, along a dim of theirs or a new one.

    Some, or all, may be the same in all lanes.
    """

    def run(args: Any, kwargs: dict) -> Any:
        tensors = args[0]
        level: Any = None
        mapped = False
        for tensor in tensors:
            if type(tensor) is BatchTensor:
                if level is None:
                    level = tensor.level
                elif tensor.level is not level:
                    return NotImplemented
                if not tensor.mapped and tensor.origin is not None:
                    sync(tensor)
                mapped = mapped or tensor.mapped
        if level is None or kwargs:
            return NotImplemented
        home = level.lanes
        direct = level.parent is None
        rank, dtype = -1, None
        values: list[Tensor] = []
        for tensor in tensors:
            if type(tensor) is BatchTensor:
                value = tensor.value
                if tensor.home is not home:
                    return NotImplemented
                if mapped and not tensor.mapped:
                    value = value.expand(level.size, *value.shape) if inert(value) else None
            elif type(tensor) in PLAIN and tensor.layout is strided and inert(tensor):
                value = tensor.expand(level.size, *tensor.shape) if mapped else tensor
            else:
                return NotImplemented
            if value is None:
                return NotImplemented
            if rank < 0:
                rank, dtype = value.dim(), value.dtype
            elif value.dim() != rank or value.dtype is not dtype:
                return NotImplemented
            direct = direct and inert(value)
            values.append(value)
        dim = args[1] if len(args) > 1 else 0
        if mapped:
            if dim < (-rank if new_dim else 1 - rank) or (rank == 1 and not new_dim):
                return NotImplemented
            dim = dim + 1 if dim >= 0 else dim
        if not direct:
            out = level.below(call, values, dim)
        elif is_any_autocast_enabled() or dispatch_mode_count():
            return NotImplemented
        else:
            out = call(values, dim)
        return level.wrap(out) if mapped else level.adopt(out)

    return run


def operands_path(rule: Rule) -> Callable:
    """An operation on a few tensors, none of them in a list or an option; some may be the same in all lanes."""

    def run(args: Any, kwargs: dict) -> Any:
        for option in kwargs.values():
            if isinstance(option, Tensor):
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
            out = level.computed(rule.run, level, args, kwargs)
        return level.wrap(out) if isinstance(out, Tensor) else map_tensors(level.wrap, out)

    return run
