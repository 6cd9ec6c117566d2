"""Gradients of lanes that are not recorded on the plane below, or that start again, and what is not to change."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from lanewise._core.level import standing
from tests.counts import python_calls
from tests.gradients_below import KINDS, X, Y, by_loop, energy, forget, is_below, same


@pytest.fixture(autouse=True)
def _unknown() -> None:
    forget()


LINEAR = nn.Linear(3, 2).double().requires_grad_(False)
SEEN: list = []


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda g: g * x.detach())
    return (y * y).sum()


def _node_hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 2 for g in inputs))
    return (y * y).sum()


def _inner_pass(x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return (g * g).sum()


def _inner_leaf(x: Tensor) -> Tensor:
    w = torch.ones(3, dtype=x.dtype, requires_grad=True)
    (w * x.detach()).square().sum().backward()
    assert w.grad is not None
    return (w.grad * x).sum()


def _kept(x: Tensor) -> Tensor:
    with save_on_cpu():
        y = (x * x).sin()
    return y.sum()


def _asked(x: Tensor) -> Tensor:
    assert x.requires_grad and (x * 2).requires_grad and x.is_leaf
    return x.square().sum() if (x * 2).grad_fn is not None else x.sum()


def _fixed(x: Tensor) -> Tensor:
    try:
        (x * 2).requires_grad_(False)
    except RuntimeError:
        return x.square().sum()
    return x.sum()


def _unrecorded(x: Tensor) -> Tensor:
    x.requires_grad = False
    return x.square().sum()


def _another_shape(x: Tensor) -> Tensor:
    try:
        x.unsqueeze_(0)
    except RuntimeError:
        return x.square().sum()
    return x.sum()


def _another_size(x: Tensor) -> Tensor:
    try:
        (x * 2).resize_(2)
    except RuntimeError:
        return x.square().sum()
    return x.sum()


def _into_another(x: Tensor) -> Tensor:
    try:
        torch.mul(x, x, out=torch.empty(3, dtype=x.dtype))
    except RuntimeError as error:
        assert "don't support automatic differentiation" in str(error)
        return x.square().sum()
    return x.sum()


UNFIT: dict[str, Callable] = {
    "whether it is a leaf": lambda x: x.square().sum() * (1 + (x * 2).is_leaf + 2 * x.is_leaf + 4 * x.detach().is_leaf),
    "no leaf is not to require grad": _fixed,
    "a leaf does not require grad": _unrecorded,
    "a leaf of another shape": _another_shape,
    "another size": _another_size,
    "out=": _into_another,
    "vjp inside": lambda x: vjp(torch.sin, x)[1](x)[0].sum(),
    "jacrev inside": lambda x: jacrev(torch.sin)(x).square().sum(),
    "jacfwd inside": lambda x: jacfwd(torch.sin)(x).square().sum(),
    "hessian inside": lambda x: hessian(lambda x: (x**3).sum())(x).square().sum(),
    "jvp inside": lambda x: jvp(torch.sin, (x,), (x,))[1].sum(),
    "vmap inside": lambda x: vmap(lambda e: e**3)(x).sum(),
    "torch.autograd inside": _inner_pass,
    "backward inside": _inner_leaf,
    "a hook": _hooked,
    "a hook of a node": _node_hooked,
    "a custom Function": lambda x: Cube.apply(x).sum(),
    "checkpoint": lambda x: checkpoint(lambda x: x.sin() * x, x, use_reentrant=False).sum(),
    "reentrant checkpoint": lambda x: checkpoint(lambda x: x.sin() * x, x, use_reentrant=True).sum(),
    "saved tensors": _kept,
    "a module": lambda x: LINEAR(x).square().sum(),
    "weight norm": lambda x: torch._weight_norm(x[:, None], x[:1, None], 0).sum(),
    "a branch": lambda x: x.sin().sum() if x.sum() > 0 else x.cos().sum(),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_plane_of_the_lanes_knows_is_as_in_a_loop(name: str, kind: str) -> None:
    f = KINDS[kind](UNFIT[name])
    mapped = vmap(f)
    for _ in range(3):
        same(mapped(X), by_loop(f, X))
    assert standing.orders == 0


@pytest.mark.parametrize("name", [*UNFIT, "asked"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_call_that_does_another_thing_starts_again(name: str, kind: str) -> None:
    other = UNFIT.get(name, _asked)
    calls = [0]

    def f(x: Tensor) -> Tensor:
        return other(x) if calls[0] >= 2 else energy(x)

    transformed = KINDS[kind](f)
    mapped = vmap(transformed)
    for calls[0] in range(5):
        same(mapped(X), by_loop(transformed, X))
    assert standing.orders == 0
    assert not standing.levels


def test_what_does_not_do_is_not_tried_again() -> None:
    calls, found = [0], [False] * 6

    def f(x: Tensor) -> Tensor:
        found[calls[0]] = is_below(x)
        return vjp(torch.sin, x)[1](x)[0].sum() if calls[0] == 2 else energy(x)

    mapped = vmap(grad(f))
    for calls[0] in range(6):
        mapped(X)
    assert found == [False, True, False, False, False, False]


def test_what_is_kept_of_the_function_has_no_history() -> None:
    """Its leaf has ended with the transform. (In a loop, what is kept still hangs on it.)"""
    kept = []

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        kept[:] = [y]
        return y.sum()

    def g(x: Tensor) -> tuple[Tensor, Tensor]:
        found = grad(f)(x)
        return found, kept[0] * 2

    mapped = vmap(g)
    for _ in range(3):
        got = mapped(X)
        torch.testing.assert_close(got, (X.cos(), X.sin() * 2))
        assert not got[0].requires_grad
        assert not got[1].requires_grad


def test_errors_are_those_of_the_first_call() -> None:
    bad = [False]

    def f(x: Tensor) -> Tensor:
        if bad[0]:
            raise ValueError("bad")
        return x.square().sum()

    def shaped(x: Tensor) -> Tensor:
        return x if bad[0] else x.sum()

    for function, kind, text in [(f, ValueError, "bad"), (shaped, RuntimeError, "scalar")]:
        mapped = vmap(grad(function))
        bad[0] = False
        mapped(X)
        mapped(X)
        bad[0] = True
        with pytest.raises(kind, match=text) as again:
            mapped(X)
        with pytest.raises(kind) as anew:
            vmap(grad(copy.copy(function)))(X)
        lines = re.compile(r"py:\d+: .*")
        assert lines.sub("", str(again.value)) == lines.sub("", str(anew.value))
        bad[0] = False
        same(mapped(X), by_loop(grad(function), X))
    assert standing.orders == 0
    assert torch.is_grad_enabled()


def test_writes_and_objects_are_put_back_where_it_starts_again() -> None:
    calls, count, total = [0], [0], torch.zeros(())

    def f(x: Tensor, y: Tensor) -> Tensor:
        count[0] += 1
        y.add_(1)
        total.add_(1)
        return vjp(torch.sin, x)[1](x)[0].sum() if calls[0] == 2 else (x * x).sum()

    mapped = vmap(grad(f))
    written = Y.clone()
    for calls[0] in range(4):
        mapped(X, written)
        assert count[0] == calls[0] + 1
    torch.testing.assert_close(written, Y + 4)
    assert total == 4


def test_an_argument_that_is_written_to_has_no_history() -> None:
    state = torch.zeros(4, 3, dtype=X.dtype)

    def f(x: Tensor, y: Tensor) -> Tensor:
        y.copy_(x * 3)
        return (x * y).sum()

    mapped = vmap(grad(f))
    for _ in range(3):
        torch.testing.assert_close(mapped(X, state), 6 * X)
        torch.testing.assert_close(state, 3 * X)
        assert not state.requires_grad


def test_transforms_around_record_as_ever() -> None:
    f = grad(energy)
    expected = torch.autograd.functional.hessian(lambda xs: sum(energy(x) for x in xs), X)
    mapped = vmap(f)
    for _ in range(3):
        torch.testing.assert_close(jacrev(mapped)(X), expected)
        torch.testing.assert_close(jacfwd(mapped)(X), expected)
        leaf = X.clone().requires_grad_()
        (seconds,) = torch.autograd.grad(mapped(leaf).sum(), leaf)
        torch.testing.assert_close(seconds, expected.sum((0, 1)))
        same(mapped(X), by_loop(f, X))
    torch.testing.assert_close(vmap(mapped)(X[None]), by_loop(f, X)[None])


def test_later_calls_pass_a_fraction_of_the_package() -> None:
    mapped = vmap(grad(energy))
    first, second = python_calls(lambda: mapped(X)), python_calls(lambda: mapped(X))
    assert second < 0.6 * first
