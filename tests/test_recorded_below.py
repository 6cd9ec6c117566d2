"""Gradients of lanes that are recorded on the plane below, from the second call on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import grad, grad_and_value, jacrev, value_and_grad, vjp, vmap
from lanewise._core.batch import BatchTensor
from lanewise._core.level import standing
from lanewise._core.plane import recorded
from tests.gradients_below import KINDS, W, X, Y, below_in_calls, by_loop, energy, forget, same


@pytest.fixture(autouse=True)
def _unknown() -> None:
    forget()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_recorded_below_from_the_second_call_on(kind: str) -> None:
    assert below_in_calls(KINDS[kind], energy, X) == [False, True, True]
    mapped = vmap(KINDS[kind](energy))
    for _ in range(3):
        same(mapped(X), by_loop(KINDS[kind](energy), X))


PARAMETER = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64, requires_grad=True)
LEARNED = ["a captured parameter", "a captured parameter, twice", "a module that learns"]
LEARNS = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

FUNCTIONS: dict[str, tuple] = {
    "views": (lambda x: (x.flip(0)[1:] * x.unfold(0, 2, 1).sum(1)).sum(), X),
    "a captured matrix": (lambda x: (W @ x).square().sum(), X),
    "what is made inside": (lambda x: (torch.arange(3.0, dtype=x.dtype) * x).sin().sum(), X),
    "written inside": (
        lambda x: torch.zeros(4, dtype=x.dtype).index_copy_(0, torch.tensor([0, 2, 3]), x).exp().sum(),
        X,
    ),
    "in place": (lambda x: (x * 1).mul_(x).add_(1).square().sum(), X),
    "into what was made inside": (lambda x: _filled(x).prod(), X),
    "a leaf is the result": (lambda x: x, X[:, 0]),
    "not used": (lambda x, y: (y * y).sum(), X, Y),
    "in part": (lambda x: x[0] * 3 + x.detach().sum(), X),
    "no_grad inside": (lambda x: _scaled(x).sum(), X),
    "another argument": (lambda x, y: (x[:2] * y).sum() ** 2, X, Y),
    "ties": (lambda x: x.clamp(-1, 1).max() + x.abs().min(), torch.ones(4, 3, dtype=torch.float64)),
    "zero norm": (lambda x: x.norm() + x.sum(), torch.zeros(4, 3, dtype=torch.float64)),
    "float32": (lambda x: F.gelu(x).sum(), X.float()),
    "half": (lambda x: (x * x).sum(), X.bfloat16()),
    "linalg": (lambda x: torch.linalg.solve(torch.outer(x, x) + torch.eye(3, dtype=x.dtype), x).sum(), X),
    "one lane": (energy, X[:1]),
    "grad inside": (lambda x: grad(lambda x: (x**3).sum())(x).square().sum(), X),
    "grad inside, of another argument": (lambda x, y: grad(lambda y: (x[:2] * y**3).sum())(y).square().sum(), X, Y),
    "grad inside, of what is made inside": (lambda x: grad(lambda y: (x * y**2).sum())(torch.ones_like(x)).sum(), X),
    "grad inside, of no slope": (lambda x: (grad(lambda x: x.abs().sum())(x) * x.detach()).sum(), X),
    "grad inside, without a history": (lambda x: (x * _slope(x)).sum(), X),
    "third derivatives": (lambda x: grad(lambda x: grad(lambda x: (x**4).sum())(x).square().sum())(x).sum(), X),
    "values and gradients inside": (lambda x: (lambda g, v: (g * v).sum())(*grad_and_value(energy)(x)), X),
    "layer_norm, twice": (lambda x: grad(lambda x: F.layer_norm(x, (3,)).pow(3).sum())(x).square().sum(), X),
    "powers, twice": (lambda x: grad(lambda x: (x.abs() ** x.detach().abs()).sum())(x).square().sum(), X),
    "a zero to the power of zero, twice": (lambda x: grad(lambda x: (x ** x.abs()).sum())(x).sum(), X.relu() * 0 + 1),
    "zeros without memory": (lambda x: torch.sgn(x).sum(), X),
    "zeros without memory, twice": (lambda x: grad(lambda x: torch.sgn(x).sum())(x).exp().sum() + x.sum(), X),
    "sinc, twice": (lambda x: grad(lambda x: torch.sinc(x).sum())(x).sum(), X * 0),
    "a captured parameter": (lambda x: (PARAMETER * x).square().sum(), X),
    "a captured parameter, twice": (lambda x: grad(lambda x: (PARAMETER * x).pow(3).sum())(x).square().sum(), X),
    "beside a captured parameter": (lambda x: x.square().sum() + x.relu().max() + PARAMETER.sum(), X),
    "a module that learns": (lambda x: LEARNS(x).square().sum(), X),
}


def _filled(x: Tensor) -> Tensor:
    out = torch.ones(3, dtype=x.dtype)
    for i in range(3):
        out[i] = x[i] * (i + 1)
    return out


def _slope(x: Tensor) -> Tensor:
    with torch.no_grad():
        return grad(energy)(x)


def _scaled(x: Tensor) -> Tensor:
    with torch.no_grad():
        size = x.norm()
    return x / size


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_gradients_are_those_of_a_loop_in_each_call(name: str, mode: str) -> None:
    f, *args = FUNCTIONS[name]
    mapped = vmap(grad(f))
    with torch.set_grad_enabled(mode == "grad"):
        for _ in range(3):
            got, expected = mapped(*args), by_loop(grad(f), *args)
            same(got, expected)
            assert got.requires_grad == (mode == "grad" and name in LEARNED)
            if got.requires_grad and "captured" in name:
                (ours,) = torch.autograd.grad(got.sin().sum(), PARAMETER)
                torch.testing.assert_close(ours, torch.autograd.grad(expected.sin().sum(), PARAMETER)[0])
        assert below_in_calls(grad, f, *args)[1:] == [True, True]


def test_zeros_without_memory_become_zeros() -> None:
    def f(x: Tensor) -> Tensor:
        return (grad(lambda x: (grad(lambda x: x.abs().sum())(x) * W[0]).sum())(x) * W[1]).sum()

    mapped = vmap(f)
    for _ in range(3):
        got = mapped(X)
        assert type(got) is Tensor
        same(got, by_loop(f, X))


@pytest.mark.parametrize("transform", [grad, jacrev, lambda f: lambda x: vjp(f, x)[1](W.new_ones(()))[0]])
def test_gradients_outside_a_vmap_have_memory(transform: Callable) -> None:
    def f(x: Tensor) -> Tensor:
        return (grad(lambda x: x.abs().sum())(x) * W[0]).sum()

    got = transform(f)(X[0])
    assert not got._is_zerotensor()
    same(got.add_(1), torch.ones(3, dtype=X.dtype))  # torch writes to no tensor without memory


def test_several_arguments_and_structures() -> None:
    def loss(p: Any, x: Tensor) -> Any:
        out = torch.tanh(p["w"] * x + p["b"])
        return out.square().sum(), {"out": out, "x": x, "name": "loss"}

    def f(w: Tensor, b: Tensor, x: Tensor) -> Any:
        grads, (value, aux) = grad_and_value(loss, argnums=(0, 1), has_aux=True)({"w": w, "b": b}, x)
        assert aux["name"] == "loss"
        return grads[0]["w"], grads[0]["b"], grads[1], value, aux["out"], aux["x"]

    mapped = vmap(f)
    for _ in range(3):
        same(mapped(X, X * 2, X + 1), by_loop(f, X, X * 2, X + 1))


@pytest.mark.parametrize("in_dims", [(0, 1), (1, 0), (1, 1), (-1, None)])
def test_other_dims(in_dims: tuple) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() @ y.cos()) ** 2

    args = [X if dim in (0, None) else X.T.contiguous() for dim in in_dims]
    args = [arg[0] if dim is None else arg for arg, dim in zip(args, in_dims)]
    lanes = [arg.expand(4, 3) if dim is None else arg.movedim(dim, 0) for arg, dim in zip(args, in_dims)]
    mapped = vmap(grad(f), in_dims)
    for _ in range(3):
        same(mapped(*args), by_loop(grad(f), *lanes))


# --- a vmap inside another -------------------------------------------------------------------------------------------

XX = torch.stack([X, X * 0.5 + 0.1])


def pair(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-((x - y) ** 2).sum()) + (x * y).sum() ** 2


NESTED: dict[str, Callable] = {
    "both": lambda vmap, xs: vmap(vmap(grad(energy)))(xs),
    "other dims": lambda vmap, xs: vmap(vmap(grad(energy), 1), 1)(xs.permute(2, 0, 1)),
    "all pairs, in the first": lambda vmap, xs: vmap(lambda x: vmap(lambda y: grad(pair)(x, y))(xs[0]))(xs[1]),
    "all pairs, in the second": lambda vmap, xs: vmap(lambda x: vmap(lambda y: grad(pair, 1)(x, y))(xs[0]))(xs[1]),
    "all pairs, with lanes of both": lambda vmap, xs: vmap(lambda x: vmap(lambda y: grad(pair)(x * y, y))(xs[0]))(
        xs[1]
    ),
    "twice": lambda vmap, xs: vmap(vmap(grad(lambda x: grad(energy)(x).square().sum())))(xs),
    "value and gradient": lambda vmap, xs: vmap(vmap(lambda x: value_and_grad(energy)(x)[1] * 2))(xs),
    "three": lambda vmap, xs: vmap(vmap(vmap(grad(lambda x: x.sin() * x))))(xs),
    "a gradient outside, too": lambda vmap, xs: vmap(lambda x: grad(energy)(x.sum(0)) + vmap(grad(energy))(x).sum(0))(
        xs
    ),
    "a gradient of a sum of gradients": lambda vmap, xs: vmap(grad(lambda x: vmap(grad(energy))(x).sum()))(xs),
    "of a parameter": lambda vmap, xs: vmap(vmap(grad(lambda x: (PARAMETER * x).square().sum())))(xs),
}


def vmap_by_loop(f: Callable, in_dim: int = 0) -> Callable:
    return lambda xs: torch.stack([f(x) for x in xs.unbind(in_dim)])


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_gradients_of_lanes_within_lanes(name: str, mode: str) -> None:
    with torch.set_grad_enabled(mode == "grad"):
        expected = NESTED[name](vmap_by_loop, XX)
        for _ in range(4):
            got = NESTED[name](vmap, XX)
            same(got, expected)
    if got.requires_grad:
        (ours,) = torch.autograd.grad(got.sin().sum(), PARAMETER)
        torch.testing.assert_close(ours, torch.autograd.grad(expected.sin().sum(), PARAMETER)[0])
    assert not standing.levels
    assert standing.orders == 0


def test_they_are_recorded_below_all_levels() -> None:
    found = []

    def look(x: Any) -> Tensor:
        found.append(type(x.value) is BatchTensor and not recorded(x.value) and x.value.value.requires_grad)
        return energy(x)

    mapped = vmap(vmap(grad(look)))
    for _ in range(3):
        mapped(XX)
    assert found == [False, True, True]


def _made_from_the_lane(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _made_alone(x: Tensor) -> Tensor:
    return torch.ones(3, dtype=x.dtype, requires_grad=True)


def _made_parameter(x: Tensor) -> Tensor:
    return nn.Parameter(torch.ones(3, dtype=x.dtype))


@pytest.mark.parametrize("transform", [grad, jacrev])
@pytest.mark.parametrize("made", [_made_from_the_lane, _made_alone, _made_parameter])
def test_a_gradient_that_hangs_on_a_leaf_made_inside_requires_grad(made: Callable, transform: Callable) -> None:
    def f(x: Tensor) -> Tensor:
        weight = made(x)
        return transform(lambda x: (weight * x).sin().sum())(x)

    def inside(x: Tensor) -> Tensor:
        return transform(lambda x: (made(x) * x).sin().sum())(x)

    for g in (f, inside):
        want = torch.stack([g(x) for x in X])
        assert want.requires_grad
        for _ in range(4):
            got = vmap(g)(X)
            assert got.requires_grad
            torch.testing.assert_close(got, want)
