"""The properties that forward rules state, one function each; the files beside this one only register operations.

A rule runs in the plane below and returns the result and its tangent there; a tangent of None is zero. A tangent is
the operand's own tensor or a new one, never a view of the operand's that the result is not a view of too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.dual import JVP_RULES, DualLevel, lay_out
from lanewise._core.native import differentiable, double_reverse, native_jvp, torch_formula
from lanewise._core.plane import Plane, recorded, replace_tensors
from lanewise._core.rules import Rule, overloads
from lanewise._torch_compat import OpOverload, fast_binding


def _register(ops: Any, family: str, make: Callable[[OpOverload], Any], **flags: bool) -> None:
    for op in overloads(*ops):
        JVP_RULES.add(op, Rule(op, make(op), family, **flags))


# --- linear ----------------------------------------------------------------------------------------------------------


def linear(*ops: OpOverload) -> None:
    """Linear in its first operand, and no other operand carries a tangent: the tangent goes the same way."""
    _register(ops, "linear", _linear)


def _linear(op: OpOverload) -> Any:
    if op.is_view:
        return _view(op)
    if sum("Tensor" in str(arg.type) for arg in op._schema.arguments) > 1:

        def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
            x = args[0]
            (_, *rest), kwargs = replace_tensors(level.primal, args, kwargs)
            tangent = level.tangent(x)
            return op(level.primal(x), *rest, **kwargs), None if tangent is None else op(tangent, *rest, **kwargs)

        return run

    call = fast_binding(op)

    def run_alone(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        x, *rest = args
        return call(x.value, *rest, **kwargs), call(x.tangent, *rest, **kwargs)

    return run_alone


def _view(op: OpOverload) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        x, *rest = args
        if type(x.value) is not Tensor or x.tangent.stride() != x.value.stride():
            lay_out(x)
        return op(x.value, *rest, **kwargs), op(x.tangent, *rest, **kwargs)

    return run


def jointly_linear(*ops: OpOverload) -> None:
    """Linear in all floating operands together (`cat`): the tangents go the same way, zeros where there are none."""
    _register(ops, "jointly linear", _jointly_linear, guarded=True)


def _jointly_linear(op: OpOverload) -> Any:
    # Other operands than such a list may be indices, which stay what they are.
    joins = str(op._schema.arguments[0].type).startswith("List")

    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        def tangent(x: Tensor) -> Tensor:
            t = level.tangent(x)
            if t is not None:
                return t
            x = level.primal(x)
            return torch.zeros_like(x) if joins or differentiable(x) else x

        below_args, below_kwargs = replace_tensors(level.primal, args, kwargs)
        tangent_args, tangent_kwargs = replace_tensors(tangent, args, kwargs)
        return op(*below_args, **below_kwargs), op(*tangent_args, **tangent_kwargs)

    return run


def multilinear(*ops: OpOverload, operands: int = 2) -> None:
    """Linear in each of its first operands, which may be None; whatever else it takes carries no tangent."""
    _register(ops, "multilinear", lambda op: _multilinear(op, operands))


def _multilinear(op: OpOverload, operands: int) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        primals, kwargs = replace_tensors(level.primal, args, kwargs)
        total = None
        for position in range(operands):
            tangent = level.tangent(args[position])
            if tangent is not None:
                part = op(*primals[:position], tangent, *primals[position + 1 :], **kwargs)
                total = part if total is None else total + part
        return op(*primals, **kwargs), total

    return run


# --- pointwise -------------------------------------------------------------------------------------------------------


def elementwise(op: OpOverload, *derivatives: Callable[..., Any] | None, guarded: bool = False) -> None:
    """Pointwise, with the derivative for each operand in turn: `(t, y, *args, **kwargs) -> tangent`.

    `t` is the operand's tangent, `y` the result, then come the operation's own arguments. The tangents add up. None
    stands for an operand that carries no tangent.
    """
    make = _unary if len(derivatives) == 1 and _single_tensor(op) else _pointwise
    _register([op], "elementwise", lambda op: make(op, *derivatives), guarded=guarded)


def _single_tensor(op: OpOverload) -> bool:
    return sum("Tensor" in str(arg.type) for arg in op._schema.arguments) == 1


def _unary(op: OpOverload, derivative: Any) -> Any:
    call = fast_binding(op)

    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        x, *rest = args
        y = call(x.value, *rest, **kwargs)
        return y, derivative(x.tangent, y, x.value, *rest, **kwargs)

    return run


def _pointwise(op: OpOverload, *derivatives: Any) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        primals = tuple([level.primal(arg) if isinstance(arg, Tensor) else arg for arg in args])
        if kwargs:
            _, kwargs = replace_tensors(level.primal, (), kwargs)
        y = op(*primals, **kwargs)
        total = None
        for operand, derivative in zip(args, derivatives):
            t = level.tangent(operand)
            if t is not None and derivative is not None:
                part = derivative(t, y, *primals, **kwargs)
                if part is not None:
                    total = fitted(part, y, operand, t) if total is None else total + fitted(part, y, operand, t)
        return y, total

    return run


def fitted(part: Tensor, y: Tensor, operand: Tensor, t: Tensor) -> Tensor:
    """A tangent in the shape of the result, and in its dtype unless the tangent came with a dtype of its own."""
    if part.dtype is not y.dtype and t.dtype is operand.dtype:
        part = part.to(y.dtype)
    if part.shape != y.shape:
        # A copy: the elements of the result are to be written to one by one, without the operand's tangent.
        return part.expand(y.shape).contiguous() if part.numel() != y.numel() else part.reshape(y.shape).mul(1)
    return part


def is_constant(x: Tensor) -> bool:
    """Whether no plane from that of x down differentiates it, so that what torch holds for constant may be used."""
    while isinstance(x, Plane):
        if getattr(x, "tangent", None) is not None or recorded(x):
            return False
        x = x.value
    return not x.requires_grad


def constant(*ops: OpOverload) -> None:
    """Piecewise constant: the result carries no tangent."""
    _register(ops, "constant", _constant)


def _constant(op: OpOverload) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        below_args, below_kwargs = replace_tensors(level.primal, args, kwargs)
        return op(*below_args, **below_kwargs), None

    return run


# --- decompositions, torch's own formulas, rules by hand -------------------------------------------------------------


def decompose(op: OpOverload, fn: Callable[..., Any]) -> None:
    """A composition of others on the same plane, where torch's own formula is slow, wrong or missing."""
    JVP_RULES.add(op, Rule(op, lambda level, args, kwargs: fn(*args, **kwargs), "decomposed", same_plane=True))


def decomposed(*ops: OpOverload) -> Callable[[Callable], Callable]:
    """`decompose` as a decorator."""

    def register(fn: Callable) -> Callable:
        for op in ops:
            decompose(op, fn)
        return fn

    return register


def jvp_rule(*ops: OpOverload, guarded: bool = True) -> Callable[[Callable], Callable]:
    """A rule by hand: `rule(level, *args, **kwargs) -> (result, tangent)`, operands of the dual plane.

    `level.primal(x)` and `level.tangent(x)` take them apart. Unless `guarded`, the rule may run with the dispatch state
    of this plane where all operands are plain: then it must not call factories.
    """

    def register(fn: Callable) -> Callable:
        _register(ops, "by hand", lambda op: lambda level, args, kwargs: fn(level, *args, **kwargs), guarded=guarded)
        return fn

    return register


def torch_jvp(level: DualLevel, op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """torch's own formula, for a rule by hand that covers some cases only."""
    return native_jvp(level, op, args, kwargs)


def two_reverses(*ops: OpOverload) -> None:
    """The derivative of torch's backward formula in the cotangent, where its forward formula is wrong."""
    _register(ops, "two reverse passes", _two_reverses, guarded=True)


def _two_reverses(op: OpOverload) -> Any:
    return lambda level, args, kwargs: double_reverse(op, args, kwargs, level.primal, level.tangent)


def torch_jvp_along(op: OpOverload, primals: tuple, tangents: dict[int, Tensor], **kwargs: Any) -> tuple[Any, Any]:
    """torch's own formula with the tangents of these positions."""
    by_id = {id(primals[position]): tangent for position, tangent in tangents.items()}
    return torch_formula(op, primals, kwargs, lambda x: x, lambda x: by_id.get(id(x)))


def rule_on_plane(*ops: OpOverload) -> Callable[[Callable], Callable]:
    """A rule by hand that runs on this plane, whether operands carry tangents or not, and returns its results."""

    def register(fn: Callable) -> Callable:
        _register(ops, "by hand", lambda op: lambda level, args, kwargs: fn(level, *args, **kwargs), raw=True)
        return fn

    return register
