"""Random nestings of transforms over smooth functions, against loops and plain torch.autograd, and against differences.

A program is a base function R^3 -> R^3 and a list of steps, innermost first. Each step makes a function of one tensor
from another, and may let the inner function see the step's own argument, so that levels mix. Two interpreters run a
program: one with the transforms under test, one with loops and `torch.autograd.grad(create_graph=True)` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lanewise
from tests.oracles import assert_same, difference, directions, inner, weights

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
FULL = os.environ.get("LANEWISE_FULL") == "1"
SETTINGS = settings(
    max_examples=3000 if FULL else 200,
    derandomize=not FULL,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Function = Callable[[torch.Tensor], torch.Tensor]


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[..., 0] = x[..., 1] * x[..., 2]
    y.mul_(0.7).add_(x.sin())
    return y


def _view_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.1
    y.unsqueeze(0)[0].narrow(-1, 0, 2).tanh_()
    return y.flip(-1)


def _filled(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3, dtype=torch.float64)
    for i in range(3):
        y[i] = x[i - 1].sin() * x[i]
    return y


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] ** 2


MATRIX = torch.tensor([[0.3, -0.5, 0.8], [0.2, 0.9, -0.4], [-0.7, 0.1, 0.6]], dtype=torch.float64)
BASES: dict[str, Function] = {
    "sin": lambda x: (x * 1.3).sin(),
    "square": lambda x: x * x * 0.5 + x,
    "tanh": torch.tanh,
    "exp": lambda x: (-x * x).exp(),
    "ratio": lambda x: x / (1 + x * x),
    "softmax": lambda x: x.softmax(0) * 2,
    "matmul": lambda x: MATRIX @ x.sin(),
    "outer": lambda x: torch.outer(x, x.cos()) @ x,
    "cumsum": lambda x: x.cumsum(0).sigmoid(),
    "prod": lambda x: x.sin() * (x + 2).prod(),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "views": lambda x: x.reshape(3, 1).t().expand(2, 3)[1].flip(0).sin(),
    "where": lambda x: torch.where(x > 0, x * x, x.sin()),
    "index": lambda x: x[[2, 0, 1]] * x.roll(1),
    "norm": lambda x: x / (x.norm() + 1),
    "in_place": _in_place,
    "view_in_place": _view_in_place,
    "filled": _filled,
    "stack": lambda x: torch.stack([x, x.sin()]).sum(0),
    "function": _Cube.apply,
}
KINDS = ("vmap", "grad", "vjp", "jvp", "jacrev", "jacfwd", "value", "autograd")


@dataclass(frozen=True)
class Step:
    """One transform: its kind, whether the inner function sees the argument, where vmap's dims lie, and a variation."""

    kind: str
    mix: bool
    in_dim: int
    out_dim: int
    lanes: int


@dataclass(frozen=True)
class Program:
    """A base function and the steps around it."""

    base: str
    steps: tuple[Step, ...]

    def shape(self) -> tuple[int, ...]:
        """The argument's shape."""
        shape = [3]
        for step in self.steps:
            if step.kind == "vmap":
                shape.insert(step.in_dim % (len(shape) + 1), step.lanes)
        return tuple(shape)

    @property
    def derivatives(self) -> int:
        return sum(step.kind not in ("vmap",) for step in self.steps)


def scalar(y: torch.Tensor) -> torch.Tensor:
    """Fixed weights, so that no symmetry hides an error."""
    return inner(weights(y), y)


def _mixed(f: Function, x: torch.Tensor, mix: bool) -> Function:
    return (lambda y: f(y) * (1 + 0.3 * x.sum().sin())) if mix else f


def _tangent(x: torch.Tensor, mix: bool) -> torch.Tensor:
    return (x * 0.9).cos() if mix else weights(x)


def apply(step: Step, f: Function) -> Function:
    """The step with the transforms under test."""
    mix = step.mix

    def g(x: torch.Tensor) -> torch.Tensor:
        h = _mixed(f, x, mix)
        if step.kind == "vmap":
            in_dim = step.in_dim % x.dim()
            return lanewise.vmap(h, in_dims=in_dim, out_dims=0 if step.out_dim == 0 else -1)(x)
        if step.kind == "grad":
            return lanewise.grad(lambda y: scalar(h(y)))(x)
        if step.kind == "value":
            gradient, value = lanewise.grad_and_value(lambda y: scalar(h(y)))(x)
            return gradient * value
        if step.kind == "vjp":
            out, pull = lanewise.vjp(h, x)
            return pull(_tangent(out, mix))[0]
        if step.kind == "jvp":
            out, tangent = lanewise.jvp(h, (x,), (_tangent(x, mix),))
            return out + tangent
        if step.kind == "autograd":
            return plain_grad(lambda y: scalar(h(y)), x)
        jacobian = (lanewise.jacrev if step.kind == "jacrev" else lanewise.jacfwd)(h)(x)
        return torch.tensordot(jacobian, weights(x), dims=x.dim())

    return g


def plain_grad(f: Function, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a scalar function, differentiable, by autograd alone."""
    y = x.clone() if x.requires_grad else x.clone().requires_grad_()
    return _grad(f(y), y, None)


def plain_jvp(f: Function, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """The tangent as the derivative of the vjp in its cotangent, differentiable."""
    y = x.clone() if x.requires_grad else x.clone().requires_grad_()
    out = f(y)
    dummy = torch.zeros_like(out, requires_grad=True)
    return _grad(_grad(out, y, dummy), dummy, tangent)


def _grad(out: torch.Tensor, y: torch.Tensor, cotangent: torch.Tensor | None) -> torch.Tensor:
    if not out.requires_grad:
        return torch.zeros_like(y)
    return torch.autograd.grad(out, y, cotangent, create_graph=True, allow_unused=True, materialize_grads=True)[0]


def plain(step: Step, f: Function) -> Function:
    """The step with loops and plain autograd."""
    mix = step.mix

    def g(x: torch.Tensor) -> torch.Tensor:
        h = _mixed(f, x, mix)
        if step.kind == "vmap":
            rows = [h(row) for row in x.unbind(step.in_dim % x.dim())]
            return torch.stack(rows, 0 if step.out_dim == 0 else -1)
        if step.kind in ("grad", "autograd"):
            return plain_grad(lambda y: scalar(h(y)), x)
        if step.kind == "value":
            return plain_grad(lambda y: scalar(h(y)), x) * scalar(h(x))
        if step.kind == "vjp":
            cotangent = _tangent(h(x), mix)
            return plain_grad(lambda y: (h(y) * cotangent).sum(), x)
        tangent = _tangent(x, mix) if step.kind == "jvp" else weights(x)
        pushed = plain_jvp(h, x, tangent)
        return h(x) + pushed if step.kind == "jvp" else pushed

    return g


def differences(step: Step, f: Function) -> Function:
    """The step with loops and central differences."""
    mix = step.mix

    def g(x: torch.Tensor) -> torch.Tensor:
        h = _mixed(f, x, mix)
        if step.kind == "vmap":
            return plain(step, f)(x)
        if step.kind in ("jvp", "jacrev", "jacfwd"):
            tangent = _tangent(x, mix) if step.kind == "jvp" else weights(x)
            pushed = difference(h, (x,), (tangent,))[0]
            return h(x) + pushed if step.kind == "jvp" else pushed
        factor = 1.0
        cotangent = weights(h(x))
        if step.kind == "vjp":
            cotangent = _tangent(h(x), mix)
        if step.kind == "value":
            factor = scalar(h(x))
        basis = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
        columns = [difference(lambda y: (h(y) * cotangent).sum(), (x,), (e,))[0] for e in basis]
        return torch.stack(columns).reshape(x.shape) * factor

    return g


def build(program: Program, interpret: Callable[[Step, Function], Function], f: Function) -> Function:
    """The whole program as a function of one tensor."""
    for step in program.steps:
        f = interpret(step, f)
    return f


def _steps(most: int) -> st.SearchStrategy:
    step = st.builds(
        Step,
        st.sampled_from(KINDS),
        st.booleans(),
        st.integers(0, 2),
        st.sampled_from((0, -1)),
        st.sampled_from((2, 1, 3)),
    )
    return st.lists(step, min_size=1, max_size=most).map(tuple)


def programs(most: int = 4) -> st.SearchStrategy:
    """Programs of up to `most` steps, with at most four derivatives."""
    return st.builds(Program, st.sampled_from(sorted(BASES)), _steps(most))


def _argument(program: Program) -> torch.Tensor:
    count = torch.Size(program.shape()).numel()
    return (torch.arange(count, dtype=torch.float64) * 1.7 + 0.4).sin().reshape(program.shape())


def _program(base: str, *kinds: str, mix: bool = False) -> Program:
    return Program(base, tuple(Step(kind, mix, 0, 0, 2) for kind in kinds))


# Each of these was wrong or refused once.
HARD = [
    # A rule below asks whether a view is recorded.
    Program(
        "logsumexp",
        (
            Step("vmap", False, 0, -1, 2),
            Step("grad", True, 0, 0, 2),
            Step("jacfwd", False, 0, 0, 2),
            Step("grad", False, 0, 0, 2),
        ),
    ),
    _program("norm", "grad", "jvp"),  # torch's formula writes to a quotient that the tangent rule had kept
    _program("norm", "value", "jacfwd", mix=True),
    _program("view_in_place", "jacrev", "jacfwd"),  # CopySlices copies into memory of a plane further down
    _program("view_in_place", "jacfwd", "vmap"),  # lanes that the primal has and the tangent has not
    _program("in_place", "jacfwd", "jvp"),  # and through a view
    _program("function", "jacrev", "jacfwd", "jacrev"),  # a custom backward under a plane that does not record
    _program("function", "vmap", "vmap"),
    # Lanes that get memory of their own, laid out as CopySlices expects.
    Program("view_in_place", tuple(Step(kind, True, 1, -1, 2) for kind in ("vmap", "autograd", "jacfwd"))),
]


@pytest.mark.parametrize("program", HARD, ids=lambda p: "-".join([p.base, *(step.kind for step in p.steps)]))
def test_hard_programs(program: Program):
    _compare(program)
    _compare_backward(program)


@SETTINGS
@given(programs())
def test_against_plain_autograd(program: Program):
    _compare(program)


def _compare(program: Program) -> None:
    base = BASES[program.base]
    x = _argument(program)
    assert_same(build(program, apply, base)(x), build(program, plain, base)(x).detach(), (1e-7, 1e-8))


@SETTINGS
@given(programs(3))
def test_backward_outside(program: Program):
    _compare_backward(program)


def _compare_backward(program: Program) -> None:
    results = []
    for interpret in (apply, plain):
        x = _argument(program).requires_grad_()
        scale = torch.tensor([0.8, 1.1, -0.6], dtype=torch.float64, requires_grad=True)
        out = build(program, interpret, _scaled(BASES[program.base], scale))(x)
        results.append((out, _grad(scalar(out), x, None), _grad(scalar(out), scale, None)))
    assert_same(results[0], results[1], (1e-7, 1e-8))


def _scaled(base: Function, scale: torch.Tensor) -> Function:
    """The base with a captured tensor."""
    return lambda y: base(y * scale) + y * scale.sum()


@SETTINGS
@given(programs(3).filter(lambda program: program.derivatives <= 2 and program.base != "where"))
def test_against_differences(program: Program):
    x = _argument(program)
    base = BASES[program.base]
    assert_same(build(program, apply, base)(x), build(program, differences, base)(x), (1e-4, 1e-5))


@pytest.mark.parametrize("base", sorted(BASES))
def test_the_oracles_agree(base: str):
    program = Program(base, (Step("jvp", True, 0, 0, 2), Step("grad", True, 0, 0, 2)))
    x = _argument(program)
    assert_same(
        build(program, plain, BASES[base])(x).detach(), build(program, differences, BASES[base])(x), (1e-4, 1e-5)
    )
    (direction,) = directions((x,))
    assert direction.shape == x.shape
