"""The properties that forward rules state, one function each; the files beside this one only register operations.

A rule runs in the plane below and returns the result and its tangent there; a tangent of None is zero.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from lanewise._core.dual import JVP_RULES, DualLevel
from lanewise._core.plane import map_tensors, replace_tensors
from lanewise._core.rules import Rule, overloads


def _register(ops: Any, family: str, make: Callable[[OpOverload], Any], **flags: bool) -> None:
    for op in overloads(*ops):
        JVP_RULES.add(op, Rule(op, make(op), family, **flags))


def linear(*ops: OpOverload) -> None:
    """Linear in its first operand, and no other operand carries a tangent: the tangent goes the same way."""
    _register(ops, "linear", _linear)


def _linear(op: OpOverload) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        x, *rest = args
        return op(level.primal(x), *rest, **kwargs), op(level.tangent(x), *rest, **kwargs)

    return run


def jointly_linear(*ops: OpOverload) -> None:
    """Linear in all tensor operands together (`cat`): the tangents go the same way, zeros where there are none."""
    _register(ops, "jointly linear", _jointly_linear)


def _jointly_linear(op: OpOverload) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        def tangent(x: Tensor) -> Tensor:
            t = level.tangent(x)
            return level.primal(x).new_zeros(x.shape) if t is None else t

        below_args, below_kwargs = replace_tensors(level.primal, args, kwargs)
        tangent_args, tangent_kwargs = replace_tensors(tangent, args, kwargs)
        return op(*below_args, **below_kwargs), op(*tangent_args, **tangent_kwargs)

    return run


def bilinear(*ops: OpOverload) -> None:
    """Linear in each of its first two operands."""
    _register(ops, "bilinear", _bilinear)


def _bilinear(op: OpOverload) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        x, y, *rest = args
        px, tx = level.primal(x), level.tangent(x)
        py, ty = level.primal(y), level.tangent(y)
        out = op(px, py, *rest, **kwargs)
        if ty is None:
            return out, op(tx, py, *rest, **kwargs)
        if tx is None:
            return out, op(px, ty, *rest, **kwargs)
        return out, op(tx, py, *rest, **kwargs) + op(px, ty, *rest, **kwargs)

    return run


def constant(*ops: OpOverload) -> None:
    """Piecewise constant: the result carries no tangent."""
    _register(ops, "constant", _constant)


def _constant(op: OpOverload) -> Any:
    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        below_args, below_kwargs = replace_tensors(level.primal, args, kwargs)
        return op(*below_args, **below_kwargs), None

    return run


def elementwise(op: OpOverload, *derivatives: Callable[..., Any] | None) -> None:
    """Pointwise, with the derivative for each tensor operand in turn: `(t, y, *args, **kwargs) -> tangent`.

    `t` is the operand's tangent, `y` the result, then come the operation's own arguments. The tangents add up.
    """

    def run(level: DualLevel, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        below_args, below_kwargs = replace_tensors(level.primal, args, kwargs)
        y = op(*below_args, **below_kwargs)
        total = None
        for operand, derivative in zip(args, derivatives, strict=False):
            t = level.tangent(operand)
            if t is not None and derivative is not None:
                part = derivative(t, y, *below_args, **below_kwargs)
                total = part if total is None else total + part
        if total is not None and (total.shape != y.shape or total.dtype is not y.dtype):
            total = total.to(y.dtype).expand(y.shape)
        return y, total

    _register([op], "elementwise", lambda op: run)


def jvp_rule(*ops: OpOverload) -> Callable[[Callable], Callable]:
    """A rule by hand: `rule(level, *args, **kwargs) -> (result, tangent)`, operands of the dual plane.

    `level.primal(x)` and `level.tangent(x)` take them apart.
    """

    def register(fn: Callable) -> Callable:
        _register(ops, "by hand", lambda op: lambda level, args, kwargs: fn(level, *args, **kwargs))
        return fn

    return register


def decompose(op: OpOverload, fn: Callable[..., Any]) -> None:
    """A composition of others on the same plane, where torch's own formula is slow or wrong."""
    JVP_RULES.add(op, Rule(op, lambda level, args, kwargs: fn(*args, **kwargs), "decomposed", same_plane=True))


def map_pairs(level: DualLevel, fn: Callable[[Tensor], Any], value: Any) -> Any:
    """`fn` over the primals of an argument."""
    return map_tensors(lambda x: fn(level.primal(x)), value)
