"""What happens to an operation that has no rule: a twin, torch's own decomposition, or one call per lane."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.chunk_draws import OwnDraws
from lanewise._core.draws.random import Generators, check_random, drawn_without_leave, is_random, same_with_lanes
from lanewise._core.layouts import layout_of
from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import parting
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import (
    Plane,
    argument,
    map_tensors,
    replace_tensors,
    taken_apart,
    tensors_of,
    tracked,
    written_arguments,
    written_results,
)
from lanewise._core.rules import Rule, RuleTable
from lanewise._core.user_rules import by_user_rule
from lanewise._torch_compat import OpOverload, is_grad_enabled
from lanewise.errors import LanewiseError, SlowPathWarning, TransformError, at_user_line, warn_at_user_line

aten = torch.ops.aten

# How often each operation ran lane by lane; tests count on it.
lane_loops: dict[str, int] = {}
_warned: set[OpOverload] = set()


def find_rule(table: RuleTable, func: OpOverload) -> Rule:
    """The rule for an operation that nobody registered; kept in the table from then on."""
    rule = _from_user(func) or _composed(func) or _from_twin(func)
    if rule is None:
        rule = Rule(func, lambda level, args, kwargs: lane_loop(level, func, args, kwargs), "lane loop", guarded=True)
    table[func] = rule
    return rule


def _from_user(func: OpOverload) -> Rule | None:
    """A custom operator: the user's rule as it is at the time of the call, else one call per lane."""
    if func.namespace in ("aten", "prims") or func._can_decompose():
        return None

    def run(level: Any, args: tuple, kwargs: dict) -> Any:
        try:
            out = by_user_rule(level, func, args, kwargs)
        except Exception as error:
            if level.size or isinstance(error, LanewiseError):
                raise
            # torch's vmap takes no empty batch: the rule may have nothing to stack.
            return map_tensors(level.wrap, _no_lanes(level, func, args, kwargs))
        if out is not NotImplemented:
            return out
        if not any(level.mapped(operand) for operand in tensors_of(args, kwargs)):
            args, kwargs = replace_tensors(level.physical, args, kwargs)
            return map_tensors(level.adopt, func(*args, **kwargs))
        return map_tensors(level.wrap, lane_loop(level, func, args, kwargs))

    return None if func._schema.is_mutable else Rule(func, run, "custom operator", guarded=True, raw=True)


def _composed(func: OpOverload) -> Rule | None:
    if not func._can_decompose():
        return None
    return Rule(func, lambda level, args, kwargs: taken_apart(func, *args, **kwargs), "composite", same_plane=True)


def functional_twin(func: OpOverload) -> OpOverload | None:
    """The overload that computes what an in-place or `out=` overload writes, or None."""
    schema = func._schema
    written = written_arguments(func)
    if not written:
        return None
    packet_name = schema.name.split("::")[1]
    namespace = getattr(torch.ops, schema.name.split("::")[0])
    # Names do not tell: `max.dim_max` and `sort.values` write their results, too.
    out_names = {name for position, name in written if schema.arguments[position].kwarg_only}
    if not out_names:
        if not packet_name.endswith("_") or packet_name.startswith("__"):
            return None
        packet_name = packet_name[:-1]
    packet = getattr(namespace, packet_name, None)
    if packet is None:
        return None
    wanted = [str(arg.type) for arg in schema.arguments if arg.name not in out_names]
    # A factory takes options where its `out=` overload has the target, which it makes like that.
    passed_over = _TARGET_OPTIONS.difference(arg.name for arg in schema.arguments) if out_names else ()
    for name in packet.overloads():
        twin = getattr(packet, name)
        taken = [str(arg.type) for arg in twin._schema.arguments if arg.name not in passed_over]
        if not twin._schema.is_mutable and taken == wanted:
            return twin
    return None


_TARGET_OPTIONS = frozenset(["dtype", "layout", "device", "pin_memory"])


def _from_twin(func: OpOverload) -> Rule | None:
    twin = functional_twin(func)
    if twin is None:
        return None
    written = written_arguments(func)
    resizes = written[0][0] != 0 or func._schema.arguments[0].name == "out" or func._schema.arguments[-1].kwarg_only
    is_out = resizes and not func._schema.name.endswith("_")

    def write(level: Any, args: tuple, kwargs: dict) -> Any:
        if is_out:
            return write_out(func, twin, args, kwargs)
        targets = [argument(args, kwargs, position, name) for position, name in written]
        write_all(targets, twin(*args, **kwargs), False)
        return targets[0] if len(func._schema.returns) == 1 else (tuple(targets) if func._schema.returns else None)

    return Rule(func, write, "written twin", same_plane=True)


def write_out(func: OpOverload, twin: OpOverload, args: tuple, kwargs: dict) -> Any:
    """What an `out=` overload does, by its twin. Targets of another shape are resized."""
    written = written_arguments(func)
    targets = [argument(args, kwargs, position, name) for position, name in written]
    names = {name for _, name in written}
    passed = {key: value for key, value in kwargs.items() if key not in names}
    options = {arg.name for arg in twin._schema.arguments} - {arg.name for arg in func._schema.arguments}
    if func._schema.name in _IN_DTYPE_OF_OUT or "dtype" in options:
        if passed.get("dtype") is None:
            passed["dtype"] = targets[0].dtype
        if "device" in options:
            passed["device"] = targets[0].device
    results = twin(*args, **passed)
    if is_grad_enabled() and any(map(tracked, tensors_of((targets, results), {}))):
        raise TransformError(
            at_user_line(
                f"{func._schema.name.removeprefix('aten::')}(): functions with out=... arguments don't support "
                "automatic differentiation, but one of the arguments requires grad."
            )
        )
    each = results if isinstance(results, (list, tuple)) else (results,)
    if any(target.dtype is not result.dtype for target, result in zip(targets, each, strict=False)):
        _ask_torch(func, args, kwargs, targets, each)
    write_all(targets, results, True)
    return written_results(func, args, kwargs)


def _ask_torch(func: OpOverload, args: tuple, kwargs: dict, targets: list, results: Any) -> None:
    """Raise what the operation itself raises for targets of their dtypes and not for such of the results' dtypes.

    It is asked for one lane, as its values may matter.
    """
    if is_random(func):
        return
    names = {name for _, name in written_arguments(func)}
    with on_plane(None), torch.no_grad():
        args, kwargs = replace_tensors(_first_lane, args, {k: v for k, v in kwargs.items() if k not in names})

        def run(like: Any) -> Exception | None:
            made = [torch.empty(r.shape, dtype=t.dtype, device=t.device) for r, t in zip(results, like, strict=False)]
            out = {name: tensor for (_, name), tensor in zip(written_arguments(func), made, strict=False)}
            try:
                func(*args, **kwargs, **out)
            except Exception as error:
                return error

        refusal = run(targets)
        if refusal is not None and run(results) is None:
            raise refusal


def _first_lane(x: Any) -> Tensor:
    """The values of a tensor of any plane in the first of its lanes, plain; zeros where there is none."""
    shape, dtype = x.shape, x.dtype
    while isinstance(x, Plane):
        x = x.value
    if not x.numel() and shape.numel():
        return torch.zeros(shape, dtype=dtype, device=x.device)
    return x[(0,) * (x.dim() - len(shape))]


# What computes in the dtype of `out`. Others cast their result to it.
_IN_DTYPE_OF_OUT = frozenset(f"aten::{name}" for name in "sum nansum mean nanmean prod cumsum cumprod".split())


def write_all(targets: list, results: Any, resizes: bool) -> None:
    """What an operation that writes does with the results of its twin."""
    # The results of an operation on lists (`torch._foreach_add_`) are one list.
    lists = len(targets) == 1 and isinstance(targets[0], (list, tuple))
    each: Any = results if isinstance(results, (list, tuple)) and not lists else (results,)
    for target, result in zip(targets, each, strict=False):
        if isinstance(target, (list, tuple)):
            for one, value in zip(target, result, strict=True):
                _write(one, value)
        elif resizes and target.shape != result.shape:
            _write(target.resize_(result.shape), result)
        else:
            _write(target, result)


def _write(target: Tensor, result: Tensor) -> None:
    # all and any of uint8 give that, but write to bools, too.
    of_uint8 = result.dtype is torch.uint8 and target.dtype is torch.bool
    if not of_uint8 and not torch.can_cast(result.dtype, target.dtype):
        raise TransformError(
            at_user_line(f"result type {result.dtype} can't be cast to the desired output type {target.dtype}")
        )
    target.copy_(result)


def warn_lane_loop(level: Any, func: OpOverload, why: str = "") -> None:
    """Count an operation that runs once per lane, and warn of it the first time; `why`, if not for want of a rule."""
    name = str(func)
    lane_loops[name] = lane_loops.get(name, 0) + 1
    if func in _warned:
        return
    _warned.add(func)
    why = why or f"we have not yet implemented the batching rule for {name}"
    warn_at_user_line(
        SlowPathWarning(
            f"vmap: There is a performance drop because {why}: it runs once per lane ({level.size} calls, about 4 us "
            "each more than one batched call)"
        )
    )


def lane_loop(level: Any, func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """One call per lane; results stacked. Right, slow, and said once per operation."""
    if is_random(func):
        check_random(level, func, args, kwargs)
        if level.randomness == "same":
            raise same_with_lanes(func)
    warn_lane_loop(level, func)
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        note_question(level)
    if level.size == 0:
        return _no_lanes(level, func, args, kwargs)
    outs = []
    foreign = func.namespace not in ("aten", "prims")
    # What the code of a custom operator draws is seen by the state that it leaves behind.
    before = Generators() if foreign and level.randomness != "different" else None
    own = OwnDraws(level, func.name()) if foreign and before is None else None
    for lane in range(level.size):
        if before is not None and lane:
            before.reseat()

        def take(tensor: Any, lane: int = lane) -> Tensor:
            return tensor.value.select(0, lane) if level.mapped(tensor) else level.physical(tensor)

        lane_args, lane_kwargs = replace_tensors(take, args, kwargs)
        with nullcontext() if own is None else own.of_lane(lane):
            outs.append(func(*lane_args, **lane_kwargs))
        if before is not None and level.randomness == "error":
            if not before.equals(Generators()):
                raise drawn_without_leave(func._schema.name)
            before = None
    if own is not None:
        own.end()
    if func._schema.is_mutable:
        return None
    kinds = [_kind(out) for out in outs]
    if any(kind != kinds[0] for kind in kinds):
        with on_plane(None):
            parting.by(level, torch.tensor([kinds.index(kind) for kind in kinds]))
    return stack_results(func, outs)


def _kind(out: Any) -> Any:
    """What the results of lanes must have in common to be stacked."""
    if isinstance(out, Tensor):
        return out.shape
    return [_kind(item) for item in out] if isinstance(out, (list, tuple)) else out


def no_strides(func: OpOverload, layout: Any) -> tuple[str, str]:
    """What is wrong with a result that is sparse in each lane, and what to write instead."""
    why = f"vmap: {func} makes a tensor of layout {layout} in each lane, which has no strides to put lanes into"
    return why, "torch.zeros(shape).index_put_(indices, values)  # a strided tensor"


def stack_results(func: OpOverload, outs: list) -> Any:
    """Stack the results of the lanes, leaf by leaf."""
    first = outs[0]
    if isinstance(first, Tensor):
        if first.layout is not torch.strided:
            raise TransformError(at_user_line(*no_strides(func, layout_of(first))))
        if any(out.shape != first.shape for out in outs):
            shapes = [list(out.shape) for out in outs]
            other = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            raise TransformError(
                at_user_line(
                    f"vmap: {func}: batching operators that can output dynamic shape: lane 0 gives shape {shapes[0]}, "
                    f"lane {other} gives {shapes[other]}",
                    "torch.where(mask, x, 0)  # keep one shape for all lanes",
                )
            )
        return torch.stack(outs)
    if isinstance(first, (list, tuple)):
        parts = [stack_results(func, [out[i] for out in outs]) for i in range(len(first))]
        return type(first)(parts) if type(first) in (list, tuple) else type(first)(*parts)
    if any(out != first for out in outs):
        raise TransformError(at_user_line(f"vmap: {func} returns a Python value that differs from lane to lane"))
    return first


def _no_lanes(level: Any, func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Shapes and dtypes of an empty batch, from one call on a lane of zeros that autograd connects to the operands."""

    def blank(tensor: Any) -> Tensor:
        if not level.mapped(tensor):
            return level.physical(tensor)
        value = tensor.value
        return value.sum(0) if value.is_floating_point() or value.is_complex() else value.new_zeros(tensor.shape)

    blank_args, blank_kwargs = replace_tensors(blank, args, kwargs)
    if func._schema.is_mutable:
        return None
    out = func(*blank_args, **blank_kwargs)
    return map_tensors(lambda tensor: tensor.unsqueeze(0)[:0], out)
