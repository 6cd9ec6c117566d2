"""The dual plane: a primal and a tangent, and how an operation carries tangents forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.journal import memory
from lanewise._core.draws.chunk_draws import note_first
from lanewise._core.layouts import nested_with_tangent, of_plain_parts, sparse_with_tangent
from lanewise._core.level import Level, standing
from lanewise._core.missing import functional_twin, write_all, write_out
from lanewise._core.native import differentiable, double_reverse, native_jvp
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.leaks import note_zeros_of_all
from lanewise._core.plane import (
    Plane,
    argument,
    at_home,
    lift,
    map_tensors,
    new_wrapper,
    replace_tensors,
    returns_written,
    sync,
    taken_apart,
    tensors_of,
    tracked,
    wrap_unlifted,
    written_arguments,
    written_results,
)
from lanewise._core.rules import Rule, RuleTable
from lanewise._core.trees import flatten
from lanewise._torch_compat import (
    dispatch_mode_count,
    forbid_data_pointer,
    forward_ad,
    has_kernel_for_key,
    is_any_autocast_enabled,
    lead_inputs_of_functional,
)
from lanewise.errors import CapturedWriteError, FunctionError, LanewiseError, at_user_line

JVP_RULES = RuleTable()

# Compositions for operators that torch registers only when they are first used, by name.
NAMED_COMPOSITIONS: dict[str, Callable[..., Any]] = {}


class DualTensor(Plane):
    """A primal `value` and its `tangent`, both `[*S]` in the plane below; a tangent of None is zero."""

    __slots__ = ("tangent",)
    tangent: Tensor | None


class DualLevel(Level):
    """The level of one `jvp`.

    Attributes:
        preserve: Called with each primal that is about to be overwritten; None if nobody asks.
        alone: Whether plain primals stay plain: there is no plane below that results would belong to.
    """

    __slots__ = ("preserve", "alone")

    def __init__(self, preserve: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        self.preserve = preserve
        around = self.parent
        self.alone = around is None or (around.directions and around.parent is None)

    def __repr__(self) -> str:
        return f"jvp level {self.order}"

    def wrap(self, value: Tensor, tangent: Tensor) -> DualTensor:
        """A primal and its tangent -> one tensor of this plane."""
        out = new_wrapper(DualTensor, value, value.shape, value.stride())
        out.value = value
        out.tangent = tangent
        out.level = self
        return out

    def adopt(self, value: Tensor, origin: tuple | None = None) -> DualTensor:
        """A value without a tangent, which may get one when something is written into it; one without strides stays."""
        if value.layout is not torch.strided:
            return value  # type: ignore[return-value]
        out = new_wrapper(DualTensor, value, value.shape, value.stride())
        forbid_data_pointer(out)
        out.value = value
        out.tangent = None
        out.level = self
        out.origin = origin
        return out

    def alias(self, tensor: DualTensor) -> DualTensor:
        """The same value in a new wrapper, without history on this plane."""
        if tensor.tangent is None:
            return self.adopt(tensor.value, tensor.origin)
        return self.wrap(tensor.value, tensor.tangent)

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is of this level, with a tangent or not."""
        return type(tensor) is DualTensor and tensor.level is self

    def primal(self, tensor: Tensor) -> Tensor:
        """The value of the plane below."""
        if type(tensor) is DualTensor and tensor.level is self:
            return tensor.value
        return of_plain_parts(tensor) if type(tensor) is Tensor and tensor.layout is not torch.strided else tensor

    def tangent(self, tensor: Any) -> Tensor | None:
        """The tangent, or None where it is zero."""
        return tensor.tangent if type(tensor) is DualTensor and tensor.level is self else None

    def lifted(self, wrapper: DualTensor) -> bool:
        return wrapper.tangent is not None

    def lift(self, wrapper: DualTensor) -> None:
        """Give a tensor without a tangent one of zeros."""
        if machine.boundaries:
            note_zeros_of_all()  # some lanes are about to write to it, others may not
        wrapper.tangent = self.below(torch.zeros_like, wrapper.value)

    def copy_slots(self, wrapper: DualTensor, like: DualTensor) -> None:
        wrapper.value = like.value
        wrapper.tangent = like.tangent
        if like.tangent is None:
            wrapper.origin = like.origin

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """A tensor made inside the function: without a tangent until one is written into it."""
        if kwargs:
            _note_generator(kwargs)
        out = self.below(lambda: op(*args, **kwargs))
        return out if op._schema.is_mutable else map_tensors(self.adopt, out)

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        if kwargs:
            _note_generator(kwargs)
        rule = JVP_RULES.get(func)
        if rule is None:
            rule = find_jvp_rule(func)
        active = lanes = False
        direct = not rule.guarded and self.alone
        for operand in operands:
            if type(operand) is DualTensor and operand.level is self:
                tangent = operand.tangent
                if tangent is None:
                    sync(operand)
                    tangent = operand.tangent
                if tangent is not None:
                    active = True
                    if direct and not _is_plain(tangent):
                        direct = lanes = self._is_direction(tangent)
                operand = operand.value
            direct = direct and _is_plain(operand)
        if rule.raw:
            return rule.run(self, args, kwargs)
        if not active:
            return self._run_unlifted(func, args, kwargs)
        if rule.same_plane:
            return rule.run(self, args, kwargs)
        if rule.mutates:
            self._lift_written(func, args, kwargs)
            self.below(rule.run, self, args, kwargs)
            return written_results(func, args, kwargs)
        if direct and forward_ad._current_level < 0 and not is_any_autocast_enabled() and not dispatch_mode_count():
            if lanes:
                here = standing.here
                standing.here = self.parent
                try:
                    out, tangent = rule.run(self, args, kwargs)
                finally:
                    standing.here = here
            else:
                out, tangent = rule.run(self, args, kwargs)
        else:
            out, tangent = self.below(rule.run, self, args, kwargs)
        if isinstance(out, Tensor) and tangent is not None and out.layout is torch.strided:
            for operand in operands:
                # A tangent that passes unchanged to a new value must be a tensor of its own: either may be written to.
                if type(operand) is DualTensor and operand.tangent is tangent and operand.value is not out:
                    return self.wrap(out, self.below(torch.clone, tangent))
            return self.wrap(out, tangent)
        return self.pair(out, tangent)

    def _is_direction(self, tangent: Tensor) -> bool:
        """Whether it has the lanes of the plane below, and a rule may work on it as on plain values (`_is_plain`)."""
        return (
            isinstance(tangent, Plane)
            and tangent.level is self.parent
            and not (tangent.requires_grad or tangent.is_complex() or tangent.is_neg())
        )

    def failure(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> Exception:
        if isinstance(error, LanewiseError) or not any(t.is_nested for t in tensors_of(args, kwargs)):
            return error
        return nested_with_tangent()

    def pair(self, out: Any, tangent: Any) -> Any:
        """Wrap results with their tangents, a tree of the same shape in which None is zero."""
        if isinstance(out, Tensor):
            if out.layout is not torch.strided and differentiable(out):
                raise nested_with_tangent() if out.is_nested else sparse_with_tangent(out)
            return self.adopt(out) if tangent is None else self.wrap(out, tangent)
        if isinstance(out, (list, tuple)):
            tangents = [None] * len(out) if tangent is None else tangent
            parts = [self.pair(o, t) for o, t in zip(out, tangents, strict=True)]
            return type(out)(parts) if type(out) in (list, tuple) else type(out)(*parts)
        return out

    def _run_unlifted(self, func: Any, args: tuple, kwargs: dict) -> Any:
        below_args, below_kwargs = replace_tensors(self.primal, args, kwargs)
        if self.preserve is not None and func._schema.is_mutable:
            for position, name in written_arguments(func):
                map_tensors(self.preserve, argument(below_args, below_kwargs, position, name))
        out = self.below(lambda: func(*below_args, **below_kwargs))
        if returns_written(func):
            return written_results(func, args, kwargs)
        return wrap_unlifted(self, func, args, kwargs, out)

    def _lift_written(self, func: Any, args: tuple, kwargs: dict) -> None:
        for position, name in written_arguments(func):
            target = argument(args, kwargs, position, name)
            for tensor in target if isinstance(target, (list, tuple)) else [target]:
                if not isinstance(tensor, Tensor):
                    continue
                if not self.owns(tensor):
                    raise captured_tangent(func, name, tensor)
                if differentiable(tensor):
                    lift(tensor)  # type: ignore[arg-type]
                    self.below(lay_out, tensor)
                if self.preserve is not None:
                    self.preserve(self.primal(tensor))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a rule may work on it without the dispatch state of the plane below: nothing to record, no lazy bits.

    Complex numbers never: rules conjugate, and a lazy conjugate is seen only with that state. Sparse ones neither:
    their kernels make tensors by operations of torch.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_complex() or tensor.is_neg())
    )


def lay_out(x: DualTensor) -> None:
    """Lay the tangent out as the primal is, before a view is taken or it is written to. Called in the plane below.

    A view of the primal and of the tangent then cover the same elements, and no two elements share memory. (A tensor
    that is a view already is laid out as the tensor it was taken from.)
    """
    if isinstance(x.value, Plane) or isinstance(x.tangent, Plane):
        with at_home(x.value), at_home(x.tangent):
            _lay_out(x)
    else:
        _lay_out(x)


def _lay_out(x: DualTensor) -> None:
    value, tangent = x.value, x.tangent
    assert tangent is not None
    if isinstance(value, Plane) and not x._is_view() and not _levels(value) <= _levels(tangent):
        # Of a plane that only the primal is on, values may be written: the tangent has to be able to hold theirs.
        tangent = _in_place_of(x, tangent + torch.zeros_like(value))
    strides = value.stride()
    if all(n < 2 or s == t for n, s, t in zip(value.shape, strides, tangent.stride())):
        return
    if 0 in strides:
        _in_place_of(x, tangent.contiguous())  # any view of it can be taken; to an expanded tensor nobody writes
        return
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    back = sorted(range(value.dim()), key=order.__getitem__)
    if value.permute(order).is_contiguous():
        _in_place_of(x, tangent.permute(order).clone(memory_format=torch.contiguous_format).permute(back))
        return
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides))
    memory = torch.zeros(extent, dtype=tangent.dtype, device=tangent.device)
    _in_place_of(x, memory.as_strided(value.shape, strides).copy_(tangent))


def _in_place_of(x: DualTensor, tangent: Tensor) -> Tensor:
    for replaced in standing.replaced:
        replaced.setdefault(x, x.tangent)
    x.tangent = tangent
    return tangent


def _levels(tensor: Tensor) -> set[Level]:
    """The levels whose planes a value lies on."""
    found = set()
    while isinstance(tensor, Plane):
        found.add(tensor.level)
        tensor = tensor.value
    return found


def captured_tangent(func: Any, name: str, tensor: Tensor) -> CapturedWriteError:
    """The error for a value with a tangent written into a tensor of the plane below."""
    return CapturedWriteError(
        at_user_line(
            f"jvp: attempted to call in-place operation ({func}) that would mutate a captured Tensor: a value with a "
            f"tangent would be written into argument `{name}` {list(tensor.shape)}, which was made outside the "
            "function, and its tangent would be lost",
            "t = t.clone()  # inside the function, and return it",
        )
    )


def _note_generator(kwargs: dict) -> None:
    """Before a draw: `jacfwd` in chunks of one direction draws the same for each."""
    generator = kwargs.get("generator")
    if generator is not None:
        note_first(generator)


def find_jvp_rule(func: Any) -> Rule:
    """The rule for an operation that nobody registered; kept in the table from then on."""
    if func._can_decompose():
        rule = Rule(func, lambda level, args, kwargs: taken_apart(func, *args, **kwargs), "composite", raw=True)
    elif func._schema.is_mutable:
        rule = _in_place(func)
    elif func.name() in NAMED_COMPOSITIONS:
        compose = NAMED_COMPOSITIONS[func.name()]
        rule = Rule(func, lambda level, args, kwargs: compose(*args, **kwargs), "decomposed", same_plane=True)
    elif func.namespace not in ("aten", "prims"):
        rule = Rule(func, lambda level, args, kwargs: _custom(level, func, args, kwargs), "custom", guarded=True)
    elif not any("Tensor" in str(result.type) for result in func._schema.returns):
        rule = Rule(func, lambda level, args, kwargs: level._run_unlifted(func, args, kwargs), "Python value", raw=True)
    elif torch.Tag.nondeterministic_seeded in func.tags and not has_kernel_for_key(func.name(), "Autograd"):
        rule = Rule(func, lambda level, args, kwargs: (_on_primals(level, func, args, kwargs), None), "random")
    else:
        rule = Rule(func, lambda level, args, kwargs: native_jvp(level, func, args, kwargs), "native", guarded=True)
    JVP_RULES[func] = rule
    return rule


def _custom(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> tuple[Any, Any]:
    """A custom operator has a backward formula at most, through which native forward mode would lose the tangents."""
    if has_kernel_for_key(func.name(), "Autograd"):
        return double_reverse(func, args, kwargs, level.primal, level.tangent)
    out = _on_primals(level, func, args, kwargs)
    if any(isinstance(leaf, Tensor) and differentiable(leaf) for leaf in flatten(out)[0]):
        raise _no_formula(
            func,
            "the operator has no derivative formula",
            "torch.library.register_autograd(...)  # it is derived from it",
        )
    return out, None


def _no_formula(func: Any, why: str, instead: str) -> FunctionError:
    return FunctionError(
        at_user_line(
            f"Trying to use forward AD with {func.name()} that does not support it because it has not been "
            f"implemented yet: {why}",
            instead,
        )
    )


def _custom_write(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> None:
    raise _no_formula(
        func,
        "the operator writes to its operands, and torch takes no derivative formula of those that do",
        "an operator that returns a new tensor, with torch.library.register_autograd(...)",
    )


def _on_primals(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    below_args, below_kwargs = replace_tensors(level.primal, args, kwargs)
    return func(*below_args, **below_kwargs)


def _in_place(func: Any) -> Rule:
    """An in-place operation: the twin's tangent is written where the primal is written."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Rule(func, lambda level, args, kwargs: _write_constant(level, func, args, kwargs), "random")
    twin = functional_twin(func)
    if twin is None and func.namespace not in ("aten", "prims"):
        return Rule(func, lambda level, args, kwargs: _custom_write(level, func, args, kwargs), "custom")
    if twin is None:
        return Rule(func, lambda level, args, kwargs: native_jvp(level, func, args, kwargs), "native")
    if func._schema.arguments[written_arguments(func)[0][0]].kwarg_only:
        return Rule(func, lambda level, args, kwargs: write_out(func, twin, args, kwargs), "out= twin", raw=True)
    rule = JVP_RULES.get(twin) or find_jvp_rule(twin)
    if (
        rule.raw
        or rule.same_plane
        or len(func._schema.returns) != 1
        or not isinstance(func._schema.returns[0].type, torch.TensorType)
    ):
        return Rule(
            func, lambda level, args, kwargs: _write_twin(level, func, twin, args, kwargs), "twin", same_plane=True
        )

    def write(level: DualLevel, args: tuple, kwargs: dict) -> None:
        target = args[0]
        if not differentiable(target):
            _on_primals(level, func, args, kwargs)
            return
        args, kwargs = undisturbed(level, target, args, kwargs)
        out, tangent = rule.run(level, args, kwargs)
        target.value.copy_(out)
        if tangent is None:
            target.tangent.zero_()
        else:
            target.tangent.copy_(tangent)

    return Rule(func, write, "written twin")


def undisturbed(level: DualLevel, target: DualTensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The operands with a copy of the tensor that is about to be overwritten, where a plane below may still need it.

    It may for the derivative of another operand alone.
    """
    operands = tensors_of(args, kwargs)
    if not any(tracked(part) for x in operands for part in (level.primal(x), level.tangent(x)) if part is not None):
        return args, kwargs
    copy = level.alias(target)
    copy.value = target.value.clone()
    if target.tangent is not None:
        copy.tangent = target.tangent.clone()
    return replace_tensors(lambda x: copy if x is target else x, args, kwargs)


def _write_constant(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> None:
    _on_primals(level, func, args, kwargs)
    for position, name in written_arguments(func):
        target = argument(args, kwargs, position, name)
        if level.owns(target) and target.tangent is not None:
            target.tangent.zero_()


def _write_twin(level: DualLevel, func: Any, twin: Any, args: tuple, kwargs: dict) -> Any:
    if isinstance(args[0], (list, tuple)) and share_memory(tensors_of(args, kwargs)):
        # What is written for one entry is read for another, or written again.
        count = len(args[0])
        for place in range(count):
            first, *rest = [_entry(arg, place, count) for arg in args]
            write_all(
                [first], twin(first, *rest, **{key: _entry(arg, place, count) for key, arg in kwargs.items()}), False
            )
        return written_results(func, args, kwargs)
    targets = [argument(args, kwargs, position, name) for position, name in written_arguments(func)]
    given, named = args, kwargs
    for target in targets:
        if level.owns(target):
            given, named = level.below(undisturbed, level, target, given, named)
    write_all(targets, twin(*given, **named), False)
    return written_results(func, args, kwargs)


def share_memory(tensors: list[Tensor]) -> bool:
    """Whether two of them lie in the same memory."""
    places = [memory(tensor) for tensor in tensors if tensor.layout is torch.strided]
    return len(set(places)) < len(places)


def _entry(arg: Any, place: int, count: int) -> Any:
    return [arg[place]] if isinstance(arg, (list, tuple)) and len(arg) == count else arg


def derived(x: Tensor) -> bool:
    """Whether a tensor has a derivative, on its plane or on one below."""
    return tracked(x) or _carries(x)


def taken_as_number(x: Tensor) -> None:
    """Before torch itself takes a tensor for a number, `alpha=t` say, as which it has no derivative.

    Outside, torch refuses it where it has a history. What the function asks for, by `float(t)` and the like, does not
    come here.
    """
    if derived(x):
        raise TypeError(
            at_user_line(
                "the argument must be Number, not Tensor: a tensor that has a derivative, which would be lost",
                "x + t * y         # in place of torch.add(x, y, alpha=t)\n"
                "alpha=t.detach()  # or float(t), where t is meant to be a constant",
            )
        )


def _with_its_tangent(x: Any) -> Tensor | None:
    """A leaf of a dual plane that keeps its tangent; None for what torch takes rightly as it is."""
    return x.view_as(x) if type(x) is not Tensor and not x.requires_grad and _carries(x) else None


def _carries(x: Any) -> bool:
    """Whether a tensor of a plane has a tangent, there or below."""
    while isinstance(x, Plane):
        if getattr(x, "tangent", None) is not None:
            return True
        x = x.value
    return False


lead_inputs_of_functional(_with_its_tangent)
