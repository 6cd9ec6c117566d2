"""Statements that masks serve beyond branches: those that raise, flags, counters, entries of vectors, calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lanewise import functional_call, grad, vmap
from lanewise._control.masking.masked_calls import form_of
from lanewise._control.masking.masked_lanes import run_masked
from tests.control.cheap_programs import Wider, program

D = torch.float64
XS = torch.tensor([0.5, -1.5, 2.5, 0.0, -0.25, 1.0, -1.0, 3.0], dtype=D)
YS = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.75, -0.5, 1.5, 0.25], dtype=D)
WIDE = torch.stack([XS, YS, XS - YS], 1)


def asserts(x: Tensor, y: Tensor) -> Tensor:
    assert x > -5, f"{x} is low"
    if y > 0:
        assert y * x < 5
        return x * y
    return x - y


def raises(x: Tensor, y: Tensor) -> Tensor:
    if x < -5:
        message = f"{x} is low"
        raise ValueError(message)
    elif x > y:
        z = x * y
    elif y < 5:
        z = x - y
    else:
        raise ValueError("high")
    return z * 2


def skips(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for i in range(6):
        if i % 2 == 0:
            continue
        y = y + 0.25 * i
        if x > y:
            total = total + x
            continue
        elif y > 2:
            total = total - y
        else:
            continue
        total = total * 0.5
    return total


def counts(x: Tensor, y: Tensor) -> Tensor:
    n = 0
    while x.abs() > 0.3 and n < 3:
        x = x * 0.5
        n += 1
    if n >= 2:
        return x * n
    return y / (n + 1) if n != 0 else y


def flags(x: Tensor, y: Tensor) -> Tensor:
    done, last = False, True
    for i in range(5):
        if not done:
            x = x + y * 0.5
        if x > 1 or i == 3:
            done = True
        if last:
            y = y * 0.9
        last = False
    return x if done else y


def newton(a: Tensor, start: float = 1.5, tol: float = 1e-9, *, most: int = 50) -> Tensor:
    x = a * 0 + start
    for _ in range(most):
        if (x * x - a).abs() < tol:
            break
        x = 0.5 * (x + a / x)
    return x


def small(a: Tensor, tol: float = 1e-9) -> Tensor:
    while abs(a) > tol:
        a = a / 4
        if a > 0.5:
            return a
    return a * tol


def calls(x: Tensor, y: Tensor) -> Tensor:
    if x > 0:
        return small(x, tol=1e-3) + small(y, 0.1)
    return small(x) * y


def power(x: Tensor, n: Tensor) -> Tensor:
    if n == 0:
        return torch.ones_like(x)
    rest = power(x * x, n // 2)
    return rest if n % 2 == 0 else x * rest


def powers(x: Tensor, y: Tensor) -> Tensor:
    return power(x, (y * 4).abs().floor())


def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x < y:
        return x, y
    return y, x * 2


def unpacks(x: Tensor, y: Tensor) -> Tensor:
    x, y = pair(x, y)
    for _ in range(2):
        x, y = pair(y, x * 0.75)
    return x - 3 * y


NUMBERS = [asserts, raises, skips, counts, flags, calls, powers, unpacks]


def largest(x: Tensor, y: Tensor) -> Tensor:
    best = x[0]
    for i in range(1, len(x)):
        if x[i] > best:
            best = x[i]
        elif i > 1:
            best = best + y * x[i - 1]
    return best


def adds(x: Tensor, y: Tensor) -> Tensor:
    total = y
    for v in x:
        if v < 0:
            continue
        total = total + v * v
        if total > 4:
            break
    return x * total


def counted(x: Tensor, y: Tensor) -> Tensor:
    for i, v in enumerate(x):
        if v > y:
            y = y + i * v
    return y


def neighbours(x: Tensor, y: Tensor) -> Tensor:
    total = y
    for i in range(len(x)):
        if i > 0:
            total = total + (x[i] - x[i - 1]).abs()
        total = total * x[i + 1] if i + 1 < len(x) else total - y
        if total > 3:
            return total
    return total * x[-1]


VECTORS = [largest, adds, counted, neighbours]


def loop(f: Callable, *args: Tensor) -> Tensor:
    return torch.stack([f(*row) for row in zip(*args)])


@pytest.mark.parametrize("f", [*NUMBERS, *VECTORS], ids=lambda f: f.__name__)
def test_statements(f: Callable) -> None:
    args = (WIDE if f in VECTORS else XS, YS)
    for _ in range(2):
        out = run_masked(f, args, (0, 0))
        assert out is not None
        torch.testing.assert_close(out, loop(f, *args))
        leaves = [arg.clone().requires_grad_() for arg in args]
        want = torch.autograd.grad(loop(f, *leaves).sum(), leaves, allow_unused=True, materialize_grads=True)
        leaves = [arg.clone().requires_grad_() for arg in args]
        got = torch.autograd.grad(vmap(f)(*leaves).sum(), leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(got, want)
        if f is not adds:
            torch.testing.assert_close(vmap(grad(f))(*args), want[0])


@pytest.mark.parametrize("f", [asserts, raises], ids=lambda f: f.__name__)
def test_lanes_that_raise(f: Callable) -> None:
    low = XS.clone()
    low[2:4] = -6
    for _ in range(2):
        with pytest.raises((AssertionError, ValueError), match="is low") as failure:
            vmap(f)(low, YS)
        assert failure.value.lanes == [2, 3]  # type: ignore[attr-defined]
        out = run_masked(f, (XS, YS), (0, 0))
        assert out is not None
        torch.testing.assert_close(out, loop(f, XS, YS))
    with pytest.raises((AssertionError, ValueError)):
        vmap(grad(f))(low, YS)


def test_an_error_that_no_lane_comes_to() -> None:
    def f(x: Tensor) -> Tensor:
        if x < 0:
            assert x < 0
            return -x
        if x > 100:
            raise ValueError
        return x

    out = run_masked(f, (XS,), (0,))
    assert out is not None
    torch.testing.assert_close(out, XS.abs())


def test_what_is_not_served() -> None:
    """Counters that a tensor is computed from otherwise than in a lane, and answers that Python adds up."""

    def sums_answers(x: Tensor) -> Tensor:
        n = 0
        while x > n:
            n += 1
        return ((n > 1) + (n > 2)) * x

    def picks(x: Tensor) -> Tensor:
        n = 0
        while n < 2 and x[n] < 0:
            n += 1
        return x[n]

    def without_end(x: Tensor) -> Tensor:
        return without_end(x * 2) if x * x < 1e60 else x

    for f, xs in ((sums_answers, XS), (picks, WIDE)):
        for _ in range(2):
            torch.testing.assert_close(vmap(f)(xs), loop(f, xs))
        assert run_masked(f, (xs,), (0,)) is None
    xs = XS[XS != 0]
    torch.testing.assert_close(vmap(without_end)(xs), loop(without_end, xs))
    form = form_of(without_end)
    assert form is not None and form.below == 0


def test_a_comparison_of_a_number_with_a_tensor() -> None:
    """The number has the dtype of the tensor, then."""

    def f(x: Tensor) -> Tensor:
        limit = 0.1 if x > 0 else 0.7
        return x * 2 if limit == x.abs() else x

    xs = torch.tensor([0.1, -0.7, 0.3, -0.2])
    out = run_masked(f, (xs,), (0,))
    assert out is not None
    assert torch.equal(out, loop(f, xs))
    assert out[0] == 2 * xs[0]


# --- tensors around ---------------------------------------------------------------------------------------------------

COEFFICIENTS = torch.tensor([0.5, -1.0, 2.0], dtype=D)
SCALE = torch.tensor(1.5, dtype=D)


def polynomial(x: Tensor, y: Tensor) -> Tensor:
    total = y * 0
    for c in COEFFICIENTS:
        total = total * x + c
    return total if total > y else total * COEFFICIENTS[0] + SCALE


def projected(v: Tensor, y: Tensor) -> Tensor:
    s = v @ COEFFICIENTS
    return v * s if s > y else COEFFICIENTS - v


class Layer(torch.nn.Module):
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(COEFFICIENTS.clone())
        self.register_buffer("bias", torch.tensor(0.25, dtype=D))
        self.slope = 0.1

    def forward(self, v: Tensor, y: Tensor) -> Tensor:
        s = v @ self.weight + self.bias
        if self.training and s > y:
            return s * y
        return s * self.slope


@pytest.mark.parametrize("f", [polynomial, projected], ids=lambda f: f.__name__)
def test_tensors_around(f: Callable, monkeypatch) -> None:
    args = (XS if f is polynomial else WIDE, YS)
    for values in (COEFFICIENTS, COEFFICIENTS * 2, COEFFICIENTS[:2].repeat(2)[:3]):
        monkeypatch.setitem(globals(), "COEFFICIENTS", values)
        out = run_masked(f, args, (0, 0))
        assert out is not None
        torch.testing.assert_close(out, loop(f, *args))
        leaves = [arg.clone().requires_grad_() for arg in args]
        want = torch.autograd.grad(loop(f, *leaves).sum(), leaves, materialize_grads=True)
        got = torch.autograd.grad(vmap(f)(*leaves).sum(), leaves, materialize_grads=True)
        torch.testing.assert_close(got, want)
    weights = COEFFICIENTS.clone().requires_grad_()
    monkeypatch.setitem(globals(), "COEFFICIENTS", weights)
    assert run_masked(f, args, (0, 0)) is None
    (want,) = torch.autograd.grad(loop(f, *args).sum(), weights)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(vmap(f)(*args).sum(), weights)[0], want)
    with torch.no_grad():
        out = run_masked(f, args, (0, 0))
        assert out is not None and not out.requires_grad
        torch.testing.assert_close(out, loop(f, *args))


def test_parameters_and_buffers() -> None:
    layer = Layer()
    want = loop(layer, WIDE, YS)
    assert run_masked(layer, (WIDE, YS), (0, 0)) is None  # its parameters are recorded
    for _ in range(2):
        got = torch.autograd.grad(vmap(layer)(WIDE, YS).sum(), layer.weight)
        torch.testing.assert_close(got, torch.autograd.grad(loop(layer, WIDE, YS).sum(), layer.weight))
    for training in (True, False):
        layer.train(training)
        with torch.no_grad():
            want = loop(layer, WIDE, YS)
            for _ in range(2):
                out = run_masked(layer, (WIDE, YS), (0, 0))
                assert out is not None and not out.requires_grad
                torch.testing.assert_close(out, want)
                torch.testing.assert_close(vmap(layer)(WIDE, YS), want)
                layer.weight.mul_(2)
                want = loop(layer, WIDE, YS)
            tensors = {"weight": COEFFICIENTS * 3, "bias": SCALE}
            want = torch.stack([functional_call(layer, tensors, row) for row in zip(WIDE, YS)])
            got = functional_call(Mapped(layer), {f"layer.{name}": each for name, each in tensors.items()}, (WIDE, YS))
            torch.testing.assert_close(got, want)


class Mapped(torch.nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, v: Tensor, y: Tensor) -> Tensor:
        return vmap(self.layer)(v, y)


# --- random programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["numbers", "vectors"])
def test_random_programs(wide: bool) -> None:
    served = 0
    xs, ys = (WIDE if wide else XS), YS
    for seed in range(80):
        f, text = program(seed, wide, Wider)
        try:
            leaves = [xs.clone().requires_grad_(), ys.clone().requires_grad_()]
            results = [f(*row) for row in zip(*leaves)]
        except (AssertionError, ValueError) as error:
            with pytest.raises(type(error)):
                vmap(f)(xs, ys)
            continue
        except (TypeError, AttributeError, ArithmeticError):
            continue  # it asks a Python number for a method of tensors
        if not any(isinstance(result, Tensor) for result in results):
            continue
        want = torch.stack([torch.as_tensor(result, dtype=D) for result in results])
        out = run_masked(f, (xs, ys), (0, 0))
        if out is None:
            continue
        served += 1
        torch.testing.assert_close(out.to(D), want.detach(), equal_nan=True, msg=text)
        if not want.requires_grad:
            continue
        weights = torch.linspace(1.0, 2.0, want.numel(), dtype=D).reshape(want.shape)
        wants = torch.autograd.grad((want * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        if not all(bool(each.abs().max() < 1e6) for each in wants):
            continue
        total = (vmap(f)(*leaves) * weights).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(grads, wants, msg=text)
    assert served > 60
