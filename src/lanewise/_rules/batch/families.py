"""The properties that batching rules state, one function each; the files beside this one only register operations.

A rule sees logical operands: wrappers of its level, mapped or not, and tensors of the planes below. It returns values
of the plane below with the lanes in dim 0.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.journal import keep
from lanewise._core.batch import BATCH_RULES, BatchLevel, BatchTensor
from lanewise._core.missing import functional_twin, lane_loop
from lanewise._core.overlaps import check_overlap, shares_memory
from lanewise._core.parting.rows import SUMS
from lanewise._core.plane import map_tensors, replace_tensors, sync, tensors_of
from lanewise._core.rules import Rule, overloads
from lanewise._core.short.hot import at_rank, inert, plainest_pointwise, pointwise_path, route
from lanewise._core.short.paths import (
    choice_path,
    copied_path,
    operands_path,
    plainest_single,
    single_path,
    write_path,
)
from lanewise._rules.batch.operands import aligner, logical_dtype, split_lanes
from lanewise._torch_compat import OpOverload, decomposition_table, fast_binding
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

_DIM_NAMES = ("dim", "dims", "dim0", "dim1", "dim2", "axis", "axis0", "axis1")
# Of a tensor without dims they take none. (Others count it as one of a single element.)
_TAKE_PARTS = frozenset(
    "diagonal select slice split split_with_sizes unbind unsafe_split unsafe_split_with_sizes".split()
)
_SIZE_NAMES = ("size", "shape", "repeats", "input_sizes", "sizes", "self_size", "input_size")
_NAMES_OF_EITHER = frozenset(_DIM_NAMES + _SIZE_NAMES)


def _register(ops: Any, family: str, make: Callable[[OpOverload], Any], **flags: bool) -> None:
    for op in overloads(*ops):
        rule = Rule(op, make(op), family, **flags)
        BATCH_RULES.add(op, rule)
        if family == "pointwise" and _takes_one_or_two(op):
            short = (
                write_path(op._op)
                if rule.mutates
                else pointwise_path(fast_binding(op), op in SUMS, op is aten.add.Tensor)
            )
            path, twin = _wide_path(op, short), functional_twin(op)
            plainest = None if rule.mutates else plainest_pointwise(fast_binding(op))
            route(op, path if twin is None else copied_path(twin, path), plainest)
        elif op is aten.where.self:
            route(op, choice_path(torch.where))
        elif rule.single:
            route(op, single_path(rule), plainest_single(rule))
        elif rule.plain:
            route(op, operands_path(rule))


def _takes_one_or_two(op: OpOverload) -> bool:
    """Whether a pointwise operation has a path for one or two operands and one result."""
    schema = op._schema
    return str(schema.arguments[0].type) == "Tensor" and len(schema.returns) == 1 and op is not aten.where.self


# --- pointwise -------------------------------------------------------------------------------------------------------


def _wide_path(op: OpOverload, short: Callable) -> Callable:
    """`short` for one or two operands; else, and with options, if they are of one dtype and none has a higher rank.

    A mask may be among them, and tensors without lanes.
    """
    call = op._op
    mutates = op._schema.is_mutable

    def run(args: Any, kwargs: dict) -> Any:
        if len(args) <= 2 and not kwargs:
            return short(args, kwargs)
        x = args[0]
        if type(x) is not BatchTensor or not x.mapped or x.home is not x.level.lanes:
            return NotImplemented
        level = x.level
        dtype, rank = x.value.dtype, x.value.dim()
        direct = level.parent is None and not mutates
        values: list[Any] = []
        for arg in args:
            if type(arg) is BatchTensor:
                if arg.level is not level or arg.home is not x.home:
                    return NotImplemented
                if not arg.mapped and arg.origin is not None:
                    sync(arg)
                if mutates and arg.value is not x.value and shares_memory(arg.value, x.value):
                    check_overlap(x, arg)
                mapped, arg = arg.mapped, arg.value
                missing = rank - arg.dim()
                if missing < (not mapped) or (arg.dtype is not dtype and arg.dtype is not torch.bool):
                    return NotImplemented
                plain = inert(arg)
                if missing and mapped:
                    arg = at_rank(level, arg, rank, level.parent is None and plain)
                direct = direct and plain
            elif type(arg) is Tensor:
                if arg.dim() >= rank or (arg.dtype is not dtype and arg.dtype is not torch.bool):
                    return NotImplemented
                if arg.layout is not torch.strided:
                    return NotImplemented
                direct = direct and inert(arg)
            elif isinstance(arg, Tensor):
                return NotImplemented
            values.append(arg)
        for option in kwargs.values():
            if isinstance(option, Tensor):
                return NotImplemented
        if mutates and level.journal is not None:
            keep(level, x.value, x.home)
        compute = level.below if mutates else level.computed
        out = call(*values, **kwargs) if direct else compute(partial(call, **kwargs) if kwargs else call, *values)
        return x if mutates else level.wrap(out)

    return run


def pointwise(*ops: OpOverload) -> None:
    """Each element of the result depends on one element of each (broadcast) operand."""
    _register(ops, "pointwise", _pointwise)


def _pointwise(op: OpOverload) -> Any:
    mutates = op._schema.is_mutable

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        operands = tensors_of(args, kwargs)
        if _aligned(level, operands):
            args, kwargs = replace_tensors(level.physical, args, kwargs)
            return op(*args, **kwargs)
        if mutates and any(operand.dim() > operands[0].dim() for operand in operands):
            broadcast = list(torch.broadcast_shapes(*[operand.shape for operand in operands]))
            raise TransformError(
                at_user_line(
                    f"vmap: {op}: output with shape {list(operands[0].shape)} doesn't match the broadcast shape "
                    f"{broadcast}",
                    "x = x + y  # in place of x += y",
                )
            )
        dtype = logical_dtype(operands)
        finer = op in _FINER and keeps_digits(operands, dtype)
        cast_to = computed_in if finer else _of_floats if op in _OF_FLOATS else None
        if op is aten.lerp_.Tensor and not operands[0].dim():
            # Of another dtype than what is written to, torch takes weights without dims alone, which have some below.
            align = aligner(level, operands)
            return level.physical(operands[0]).copy_(aten.lerp.Tensor(*map(align, operands)))
        align = aligner(level, operands, cast_to, written=operands[0] if mutates else None)
        args, kwargs = replace_tensors(align, args, kwargs)
        out = op(*args, **kwargs)
        if mutates:
            return out
        return out.to(dtype) if finer and isinstance(out, Tensor) and out.dtype is torch.float32 else out

    return run


HALF = (torch.float16, torch.bfloat16)
# What does not round a second operand of no dims to half.
_FINER = frozenset(
    {
        *(aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.ldexp.Tensor),
        *(aten.mul_.Tensor, aten.div_.Tensor, aten.div_.Tensor_mode, aten.floor_divide_.Tensor),
    }
)


def keeps_digits(operands: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether these, for a result of `dtype`, have a second operand that they do not round to it."""
    return dtype in HALF and operands[0].dim() > 0 and operands[-1].dtype is not dtype


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype that these compute in for a result of `dtype`."""
    return torch.float32 if dtype in HALF else dtype


# What gives floats for whole numbers, and does not round a second operand of no dims to the whole numbers of the first.
_OF_FLOATS = frozenset(
    {
        *(aten.atan2.default, aten.copysign.Tensor, aten.div.Tensor, aten.ldexp.Tensor, aten.xlogy.Tensor),
        *(aten.special_xlog1py.default, aten.special_zeta.default),
        *(aten.special_chebyshev_polynomial_t.default, aten.special_chebyshev_polynomial_u.default),
        *(aten.special_chebyshev_polynomial_v.default, aten.special_chebyshev_polynomial_w.default),
        *(aten.special_hermite_polynomial_h.default, aten.special_hermite_polynomial_he.default),
        *(aten.special_laguerre_polynomial_l.default, aten.special_legendre_polynomial_p.default),
        *(aten.special_shifted_chebyshev_polynomial_t.default, aten.special_shifted_chebyshev_polynomial_u.default),
        *(aten.special_shifted_chebyshev_polynomial_v.default, aten.special_shifted_chebyshev_polynomial_w.default),
    }
)


def _of_floats(dtype: torch.dtype) -> torch.dtype:
    """The dtype that these compute in for operands of `dtype`."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _aligned(level: BatchLevel, operands: list[Tensor]) -> bool:
    """Whether the values below broadcast and promote as they are: one dtype, and one rank among those with lanes."""
    rank = dtype = None
    for operand in operands:
        if dtype is None:
            dtype = operand.dtype
        elif operand.dtype is not dtype:
            return False
        if type(operand) is BatchTensor and operand.level is level:
            if rank is None:
                rank = operand.dim()
            elif operand.dim() != rank:
                return False
    return rank is not None and all(operand.dim() <= rank for operand in operands)


# --- along dims ------------------------------------------------------------------------------------------------------


def along_dims(*ops: OpOverload, rather: Callable[..., Any] | None = None) -> None:
    """The operation works along dims that its arguments name; they are one further right below.

    There `rather` is asked first, with the operation's arguments; the operation is for what it answers None to.
    """
    _register(ops, "along dims", lambda op: _along_dims(op, rather))


def _along_dims(op: OpOverload, rather: Callable[..., Any] | None) -> Any:
    schema = op._schema
    name = schema.name
    adds_dim = "unsqueeze" in name or name.endswith("stack")
    takes_parts = name.removeprefix("aten::") in _TAKE_PARTS
    names = [arg.name for arg in schema.arguments]
    keep_at = names.index("keepdim") if "keepdim" in names else None
    positions = [i for i, arg in enumerate(schema.arguments) if arg.name in _DIM_NAMES]
    any_call = op if rather is None else _first(rather, op)
    call = fast_binding(op) if rather is None else any_call
    needed = positions[-1] if positions else 0
    kinds = [str(arg.type) for arg in schema.arguments]
    tensors = [i for i, kind in enumerate(kinds) if kind == "Tensor"]
    plain = bool(positions) and all(kind == "Tensor" or "Tensor" not in kind for kind in kinds)
    plain = plain and not any(arg.kwarg_only for arg in schema.arguments[: needed + 1])
    defaults = [arg.default_value for arg in schema.arguments]

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        if kwargs or not plain:
            return general(level, args, kwargs)
        given = [*args, *defaults[len(args) : needed + 1]]
        rank = 0
        for place in tensors:
            x = args[place]
            if not level.mapped(x) or x.value.dim() < 2 or rank not in (0, x.value.dim()):
                return general(level, args, kwargs)
            given[place] = x.value
            rank = x.value.dim()
        for position in positions:
            given[position] = shift_dims(given[position], rank if adds_dim else rank - 1)
        return call(*given)

    def general(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        bound, kwargs = bind(op, args, kwargs)
        first = bound[0][0] if isinstance(bound[0], (list, tuple)) else bound[0]
        rank = first.dim()
        scalar = rank == 0 and not adds_dim
        if scalar and takes_parts:
            raise too_few_dims(op, first, 1)
        span = rank + 1 if adds_dim else max(rank, 1)
        for position in positions:
            if position < len(bound):
                bound[position] = shift_dims(bound[position], span)
            elif schema.arguments[position].name in kwargs:
                kwargs[names[position]] = shift_dims(kwargs[names[position]], span)

        def enter(tensor: Tensor) -> Tensor:
            value = level.expanded(tensor)
            return value.unsqueeze(1) if scalar and value.dim() == 1 else value

        out = any_call(
            *[map_tensors(enter, arg) for arg in bound], **{k: map_tensors(enter, v) for k, v in kwargs.items()}
        )
        if scalar:
            kept = keep_at is None or (bound[keep_at] if keep_at < len(bound) else kwargs.get("keepdim", False))
            out = map_tensors(lambda t: t.squeeze(1) if kept and t.dim() == 2 and t.shape[1] == 1 else t, out)
        return out

    return run


def _first(rather: Callable[..., Any], op: OpOverload) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        out = rather(*args, **kwargs)
        return op(*args, **kwargs) if out is None else out

    return call


def bind(op: OpOverload, args: tuple, kwargs: dict) -> tuple[list, dict]:
    """Positional arguments with keywords and defaults put in their places, and the keyword-only rest."""
    bound = list(args)
    rest = dict(kwargs)
    for name, default in _positional(op)[len(bound) :]:
        if name in rest:
            bound.append(rest.pop(name))
        elif default is not _MISSING:
            bound.append(list(default) if type(default) is list else default)
        else:
            break
    return bound, rest


_MISSING = object()


@cache
def _positional(op: OpOverload) -> list[tuple[str, Any]]:
    """Names and defaults of the arguments that may be given by position. (Asking the schema takes 0.3 us for each.)"""
    return [
        (arg.name, arg.default_value if arg.has_default_value() else _MISSING)
        for arg in op._schema.arguments
        if not arg.kwarg_only
    ]


def shift_dims(dims: Any, span: int) -> Any:
    """Logical dims of a tensor with `span` dims -> dims below, lanes in front. None and [] mean all of them."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(1, span + 1))
    if isinstance(dims, (list, tuple)):
        return [shift_dim(dim, span) for dim in dims]
    return shift_dim(dims, span)


def shift_dim(dim: int, span: int) -> int:
    """One logical dim -> the dim below; IndexError as torch raises it."""
    if not -span <= dim < span:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-span}, {span - 1}], but got {dim})")
    return dim % span + 1


# --- leading, full reductions, sizes, fold ----------------------------------------------------------------------------


def leading(*ops: OpOverload, least: int = 0) -> None:
    """The operation takes any number of leading dims; all operands get the lanes in front.

    The first must have `least` dims without its lanes, which would otherwise be taken for one of them.
    """
    _register(ops, "leading", lambda op: _leading(op, least))


def _leading(op: OpOverload, least: int) -> Any:
    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        if least and args[0].dim() < least:
            raise too_few_dims(op, args[0], least)
        args, kwargs = replace_tensors(level.expanded, args, kwargs)
        return op(*args, **kwargs)

    return run


def too_few_dims(op: OpOverload, x: Tensor, least: int) -> TransformError:
    """The error for an operand with fewer dims in one lane than the operation needs."""
    return TransformError(
        at_user_line(
            f"vmap: {op}: the input tensor must have at least {least} dimension{'s' if least > 1 else ''}, but in one "
            f"lane it has {x.dim()}: {list(x.shape)}",
            "x[None]  # or map over another dim",
        )
    )


def full_reduction(op: OpOverload, along: OpOverload) -> None:
    """A reduction over everything; `along` is the overload that reduces over dims or one dim."""
    _register([op], "full reduction", lambda op: _full_reduction(along))


def _full_reduction(along: OpOverload) -> Any:
    reduction = fast_binding(along)
    takes_list = str(along._schema.arguments[1].type) not in ("int", "Optional[int]")

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        if takes_list and args[0].dim():
            return reduction(args[0].value, list(range(1, args[0].value.dim())), *args[1:], **kwargs)
        flat = level.expanded(args[0]).flatten(1) if args[0].dim() != 0 else level.expanded(args[0]).unsqueeze(1)
        out = along(flat, [1] if takes_list else 1, *args[1:], **kwargs)
        return out[0] if isinstance(out, (list, tuple)) else out

    return run


def sized(*ops: OpOverload) -> None:
    """A size argument gives the result's shape; the lanes are prepended to it."""
    _register(ops, "sized", _sized)


def _sized(op: OpOverload) -> Any:
    schema = op._schema
    call = fast_binding(op)
    repeats = "repeat" in schema.name
    pads = repeats or "expand" in schema.name
    places = [(i, arg.name in _SIZE_NAMES) for i, arg in enumerate(schema.arguments) if arg.name in _NAMES_OF_EITHER]
    tensors = [i for i, arg in enumerate(schema.arguments) if i and "Tensor" in str(arg.type)]
    positional = sum(not arg.kwarg_only for arg in schema.arguments)

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        bound = list(args)
        if len(bound) < positional:
            bound, kwargs = bind(op, args, kwargs)
        value = level.expanded(bound[0])
        span = 1
        for position, is_size in places:
            if position >= len(bound):
                break
            given = bound[position]
            if is_size and isinstance(given, (list, tuple)):
                span = max(len(given), 1)
                bound[position] = [1 if repeats else level.size, *given]
                if pads and value.dim() - 1 < len(given):
                    fill = [1] * (len(given) - value.dim() + 1)
                    value = value.reshape(level.size, *fill, *value.shape[1:])
            elif not is_size and isinstance(given, int):
                bound[position] = shift_dim(given, span)
        for position in tensors:
            if position < len(bound):
                bound[position] = map_tensors(level.expanded, bound[position])
        bound[0] = value
        return call(*bound, **kwargs)

    return run


def folded(*ops: OpOverload) -> None:
    """The operation has a batch dim of its own in front; the lanes are folded into it and taken out again."""
    _register(ops, "folded", _folded)


def _folded(op: OpOverload) -> Any:
    schema = op._schema

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        operands = tensors_of(args, kwargs)
        if any(operand.dim() < 2 for operand in operands):
            return lane_loop(level, op, args, kwargs)
        bound, kwargs = bind(op, args, kwargs)
        for position, arg in enumerate(schema.arguments[: len(bound)]):
            if arg.name in ("input_size", "self_size") and isinstance(bound[position], (list, tuple)):
                first, *rest = bound[position]
                bound[position] = [level.size * first, *rest]

        def fold(tensor: Tensor) -> Tensor:
            return level.expanded(tensor).flatten(0, 1)

        out = op(*[map_tensors(fold, arg) for arg in bound], **{k: map_tensors(fold, v) for k, v in kwargs.items()})
        rows = operands[0].shape[0]
        return map_tensors(lambda t: split_lanes(t, level.size, t.shape[0] // level.size if level.size else rows), out)

    return run


# --- decompositions, refusals, rules by hand --------------------------------------------------------------------------


def decompose(op: OpOverload, fn: Callable[..., Any] | None = None) -> None:
    """The operation is a composition of others, in logical terms, on the same plane (torch's own if `fn` is None)."""
    compose = decomposition_table[op] if fn is None else fn
    BATCH_RULES.add(op, Rule(op, lambda level, args, kwargs: compose(*args, **kwargs), "decomposed", same_plane=True))


def refuse(op: OpOverload, why: str, instead: str, error: type[Exception] = TransformError) -> None:
    """The operation has no meaning on lanes: raise, saying why and what to write instead."""

    def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
        raise error(at_user_line(why, instead))

    BATCH_RULES.add(op, Rule(op, run, "refused"))


def batch_rule(*ops: OpOverload, guarded: bool = True) -> Callable[[Callable], Callable]:
    """A rule by hand: `rule(lanes, *args, **kwargs)` with every tensor as `[B, *S]`, expanded where it has no lanes."""

    def register(fn: Callable) -> Callable:
        def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
            args, kwargs = replace_tensors(level.expanded, args, kwargs)
            return fn(level.size, *args, **kwargs)

        _register(ops, "by hand", lambda op: run, guarded=guarded)
        return fn

    return register


def lane_rule(*ops: OpOverload, guarded: bool = True, raw: bool = False, same_plane: bool = False) -> Callable:
    """A rule by hand that looks at which operands have lanes: `rule(level, *args, **kwargs)` with logical operands.

    `level.mapped(t)` tells, `level.physical(t)` gives `[B, *S]` or `[*S]`, `level.expanded(t)` always `[B, *S]`.
    """

    def register(fn: Callable) -> Callable:
        def run(level: BatchLevel, args: tuple, kwargs: dict) -> Any:
            return fn(level, *args, **kwargs)

        _register(ops, "by hand", lambda op: run, guarded=guarded, raw=raw, same_plane=same_plane)
        return fn

    return register
