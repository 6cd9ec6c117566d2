"""Transforms of functions with masks, inside a `vmap`: against plain autograd for one example after the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lanewise import grad, grad_and_value, hessian, jacfwd, jacrev, value_and_grad, vmap
from lanewise._control.masking import masks
from lanewise._core.parting import rows
from lanewise._core.parting.lanes import machine
from tests.control.cheap_programs import Wider, program

D = torch.float64
XS = torch.tensor([0.5, -1.5, 2.5, 0.1, -0.25, 1.0, -1.0, 3.0], dtype=D)
YS = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.75, -0.5, 1.5, 0.25], dtype=D)
WIDE = torch.stack([XS, YS, XS - YS], 1)


@pytest.fixture(autouse=True, params=["where", "bits"])
def choices(request, monkeypatch) -> None:
    """Few lanes choose as many do."""
    if request.param == "bits":
        monkeypatch.setattr(rows, "_MANY", 1)
        monkeypatch.setattr(masks, "_MANY", 1)


def quietly(mapped: Callable, *args: Any) -> Any:
    """The result of a call in which no lanes part, after one in which they may."""
    mapped(*args)
    before = machine.partings
    out = mapped(*args)
    assert machine.partings == before
    return out


def first(f: Callable, place: int, *args: Tensor, create_graph: bool = False) -> Tensor:
    """The derivative `[*y, *x]` of a function in one of its arguments."""
    out, x = f(*args), args[place]
    rows = [
        torch.autograd.grad(each, x, create_graph=create_graph, retain_graph=True, materialize_grads=True)[0]
        if each.requires_grad
        else torch.zeros_like(x)
        for each in out.reshape(-1)
    ]
    return torch.stack(rows).reshape((*out.shape, *x.shape))


def each_first(f: Callable, place: int, *args: Tensor) -> Tensor:
    found = []
    for row in zip(*args):
        leaves = [each.clone().requires_grad_(number == place) for number, each in enumerate(row)]
        found.append(first(f, place, *leaves))
    return torch.stack(found)


def each_second(f: Callable, *args: Tensor) -> Tensor:
    """The second derivative in the first argument."""
    found = []
    for x, *rest in zip(*args):
        leaf = x.clone().requires_grad_()
        found.append(first(lambda x: first(f, 0, x, *rest, create_graph=True), 0, leaf))  # noqa: B023
    return torch.stack(found)


def smooth(x: Tensor, y: Tensor) -> Tensor:
    if abs(x) < 1:
        return x * x * x + y * x
    return x.sin() * y * y


def newton(x: Tensor, y: Tensor) -> Tensor:
    a = x * x + 1
    z = a
    while (z * z - a).abs() > 1e-9:
        z = 0.5 * (z + a / z)
    return z * y


def roots(x: Tensor, y: Tensor) -> Tensor:
    """The side that a lane does not take is not defined for it."""
    if x > 0:
        return x.sqrt() * y + x.log()
    return x * x * y


NUMBERS = [smooth, newton, roots]


def huber(v: Tensor, y: Tensor) -> Tensor:
    n = v.norm()
    if n < 2:
        return n * n * 0.5 * y
    return n - v[0] * y


def bent(v: Tensor, y: Tensor) -> Tensor:
    if v[0] > y:
        return v.sin() * v[1] * y
    return v * v.sum()


@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.__name__)
def test_numbers(f: Callable) -> None:
    in_x, in_y = each_first(f, 0, XS, YS), each_first(f, 1, XS, YS)
    values = torch.stack([f(*row) for row in zip(XS, YS)])
    second = each_second(f, XS, YS)
    close = torch.testing.assert_close
    close(quietly(vmap(grad(f, (1, 0))), XS, YS), (in_y, in_x))
    close(quietly(vmap(grad(f, (0,))), XS, YS), (in_x,))
    close(quietly(vmap(value_and_grad(f, (0, 1))), XS, YS), (values, (in_x, in_y)))
    close(quietly(vmap(jacrev(f)), XS, YS), in_x)
    close(quietly(vmap(jacrev(f, None)), XS, YS), (in_x, in_y))
    close(quietly(vmap(jacfwd(f, (0, 1))), XS, YS), (in_x, in_y))
    close(quietly(vmap(jacfwd(f, 1)), XS, YS), in_y)
    close(quietly(vmap(hessian(f)), XS, YS), second)
    close(quietly(vmap(grad(grad(f))), XS, YS), second)
    close(quietly(vmap(jacfwd(jacfwd(f))), XS, YS), second)
    close(quietly(vmap(grad_and_value(grad(f))), XS, YS), (second, in_x))
    mixed = quietly(vmap(grad(grad(f, 1), 0)), XS, YS)
    close(mixed, quietly(vmap(grad(grad(f, 0), 1)), XS, YS))
    close(quietly(vmap(vmap(hessian(f))), XS.view(2, 4), YS.view(2, 4)), second.view(2, 4))
    close(quietly(vmap(jacrev(f), (0, None)), XS, YS[0]), each_first(f, 0, XS, YS[:1].expand(8)))
    close(quietly(vmap(jacrev(f, 1), (0, None)), XS, YS[0]), each_first(f, 1, XS, YS[:1].expand(8)))
    close(quietly(vmap(hessian(f, 1), (None, 0), chunk_size=3), XS[0], YS), torch.zeros_like(YS) + each_last(f))


def each_last(f: Callable) -> Tensor:
    """The second derivative of f(XS[0], y) in y."""
    return each_second(lambda y: f(XS[0], y), YS)


def test_vectors() -> None:
    close = torch.testing.assert_close
    wide = WIDE + 0.25
    for f in (huber, bent):
        in_x, in_y = each_first(f, 0, wide, YS), each_first(f, 1, wide, YS)
        close(quietly(vmap(jacrev(f, (0, 1))), wide, YS), (in_x, in_y))
        close(quietly(vmap(jacfwd(f, (1, 0))), wide, YS), (in_y, in_x))
        close(quietly(vmap(hessian(f)), wide, YS), each_second(f, wide, YS))
    close(quietly(vmap(jacrev(grad(huber))), wide, YS), each_second(huber, wide, YS))
    close(quietly(vmap(jacrev(bent), out_dims=-1), wide, YS), each_first(bent, 0, wide, YS).movedim(0, -1))


def test_what_comes_with_the_value() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y, x + 1) if x > 0 else (x * x, y)

    values = [f(*row) for row in zip(XS, YS)]
    value, aux = (torch.stack(each) for each in zip(*values))
    derivative = each_first(lambda *args: f(*args)[0], 0, XS, YS)
    close = torch.testing.assert_close
    close(quietly(vmap(grad(f, has_aux=True)), XS, YS), (derivative, aux))
    close(quietly(vmap(grad_and_value(f, has_aux=True)), XS, YS), (derivative, (value, aux)))
    close(quietly(vmap(value_and_grad(f, has_aux=True)), XS, YS), ((value, aux), derivative))
    close(quietly(vmap(jacrev(f, has_aux=True)), XS, YS), (derivative, aux))
    close(quietly(vmap(jacfwd(f, has_aux=True)), XS, YS), (derivative, aux))
    second = each_second(lambda *args: f(*args)[0], XS, YS)
    close(quietly(vmap(hessian(f, has_aux=True)), XS, YS), (second, aux))


def test_results_have_no_history() -> None:
    for made in (grad(smooth), jacrev(smooth), jacfwd(smooth), hessian(smooth), value_and_grad(grad(smooth))):
        out = quietly(vmap(made), XS, YS)
        assert not any(each.requires_grad for each in (out if isinstance(out, tuple) else (out,)))
        with torch.no_grad():
            torch.testing.assert_close(quietly(vmap(made), XS, YS), out, rtol=0, atol=0)


def test_derivatives_outside() -> None:
    """What autograd records is differentiated further, and lanes part."""
    leaf = XS.clone().requires_grad_()
    for made in (grad(smooth), jacrev(smooth), jacfwd(smooth)):
        for _ in range(2):
            (got,) = torch.autograd.grad(vmap(made)(leaf, YS).sum(), leaf)
            torch.testing.assert_close(got, each_second(smooth, XS, YS))


def kinked(x: Tensor) -> Tensor:
    y = x.sqrt()
    return y * y * y * y if x > 0 else x * x


def test_an_infinite_derivative_reaches_no_lane_that_goes_elsewhere() -> None:
    xs = torch.tensor([0.0, 4.0, 0.0, 0.5], dtype=D)
    want, second = each_first(kinked, 0, xs), each_second(kinked, xs)
    for _ in range(6):
        for made in (grad(kinked), jacrev(kinked), jacfwd(kinked)):
            torch.testing.assert_close(vmap(made)(xs), want)
        for made in (grad(grad(kinked)), hessian(kinked)):
            torch.testing.assert_close(vmap(made)(xs), second)


def test_what_masks_do_not_serve() -> None:
    """Both modes in one, functions of several values, and errors."""
    close = torch.testing.assert_close
    second = each_second(smooth, XS, YS)
    for _ in range(2):
        close(vmap(jacfwd(jacrev(smooth)))(XS, YS), second)
        close(vmap(jacrev(jacfwd(smooth)))(XS, YS), second)
        close(vmap(grad(smooth, -1))(XS, YS), each_first(smooth, 1, XS, YS))
        close(vmap(jacrev(smooth, chunk_size=1))(XS, YS), each_first(smooth, 0, XS, YS))
        with pytest.raises(RuntimeError, match="scalar"):
            vmap(grad(bent))(WIDE, YS)
        with pytest.raises(RuntimeError, match="argnum"):
            vmap(grad(smooth, 2))(XS, YS)
        with pytest.raises((RuntimeError, ValueError), match="floating"):
            vmap(jacfwd(smooth))(XS.long(), YS)


@pytest.mark.parametrize("wide", [False, True], ids=["numbers", "vectors"])
def test_random_programs(wide: bool) -> None:
    served = 0
    xs, ys = (WIDE if wide else XS) + 0.3, YS * 1.5
    for seed in range(40):
        f, text = program(seed, wide, Wider)
        try:
            results = [f(*row) for row in zip(xs, ys)]
        except Exception:
            continue
        if not all(isinstance(result, Tensor) for result in results):
            continue
        wants = [each_first(f, place, xs, ys) for place in range(2)]
        if not all(bool(want.abs().max() < 1e6) for want in wants):
            continue
        both = vmap(jacrev(f, (0, 1)))
        both(xs, ys)
        before = machine.partings
        got = both(xs, ys)
        served += machine.partings == before
        torch.testing.assert_close(list(got), wants, msg=text)
        second = each_second(f, xs, ys)
        if bool(second.abs().max() < 1e6):
            torch.testing.assert_close(vmap(hessian(f))(xs, ys), second, msg=text)
    assert served > 15
