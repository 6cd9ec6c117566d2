"""Gradients of lanes that are recorded on the plane below, from the second call on, and what they are not to change."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lanewise import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, value_and_grad, vjp, vmap
from lanewise._core.batch import BatchTensor
from lanewise._core.level import standing
from lanewise._core.plane import recorded
from lanewise._core.short.shared import _below, _without, _without_gradients, with_wrappers
from tests.counts import python_calls


@pytest.fixture(autouse=True)
def _unknown() -> None:
    for known in (with_wrappers, _without_gradients, *_without.values(), *_below.values()):
        known.clear()


X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1], [2.0, 0.1, 0.2], [-0.4, 1.3, 0.9]], dtype=torch.float64)
Y = torch.tensor([[0.2, 1.0], [-0.5, 0.4], [1.5, -0.3], [0.8, 0.6]], dtype=torch.float64)
W = torch.tensor([[0.5, -1.5, 2.0], [0.1, 0.2, -0.7]], dtype=torch.float64)


def energy(x: Tensor) -> Tensor:
    d = x[:, None] - x[None]
    return ((d * d).exp() * 0.1).sum() + torch.tanh(W @ x).sum() + x.prod()


def is_below(x: Any) -> bool:
    """Whether what is differentiated with respect to `x` is recorded below."""
    return type(x) is BatchTensor and not recorded(x) and x.value.requires_grad


def below_in_calls(call: Callable, f: Callable, *args: Any) -> list[bool]:
    """For three calls of `vmap(call(f))`, whether the gradient was recorded below."""
    found = []

    def look(x: Any, *rest: Any) -> Any:
        found[-1] = found[-1] or is_below(x)
        return f(x, *rest)

    mapped = vmap(call(look))
    for _ in range(3):
        found.append(False)
        mapped(*args)
    return found


def by_loop(f: Callable, *args: Tensor) -> Any:
    results = [f(*row) for row in zip(*args)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(list(column)) for column in zip(*results))


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(
        (got,) if isinstance(got, Tensor) else got, (expected,) if isinstance(expected, Tensor) else expected
    ):
        assert ours.requires_grad == theirs.requires_grad


# --- where it is so --------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable] = {
    "grad": grad,
    "grad_and_value": grad_and_value,
    "value_and_grad": value_and_grad,
    "of one of two": lambda f: lambda x, *rest: grad(f)(x * 2, *rest) + x,
}


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


# --- where it is not -------------------------------------------------------------------------------------------------

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
