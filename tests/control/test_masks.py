"""Cheap functions run with masks in place of branches: equal to the loop, and only where that is sure."""

import functools
import linecache
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lanewise import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, value_and_grad, vmap
from lanewise._control.masking import masked_calls, masks
from lanewise._control.masking.masked_calls import form_of
from lanewise._control.masking.masked_lanes import run_masked
from lanewise._core.parting import rows
from lanewise._core.parting.lanes import machine
from lanewise._transforms.parting import runner
from tests.control.cheap_programs import program

D = torch.float64
XS = torch.tensor([0.5, -1.5, 2.5, 0.0, -0.25, 1.0, -1.0, 3.0], dtype=D)
YS = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, 1.5, 0.25], dtype=D)
WIDE = torch.stack([XS, YS, XS - YS], 1)
THRESHOLD = 1.0
HALF = torch.tensor(0.5, dtype=D)


def early_return(x: Tensor, y: Tensor) -> Tensor:
    """Cheap."""
    if x < 0:
        return torch.zeros_like(x)
    y = x.sqrt()
    return y.sin() * y


def pieces(x: Tensor, y: Tensor) -> Tensor:
    if x < 0:
        z = x * x
    elif x < THRESHOLD:
        z = torch.sin(x) * math.pi
    else:
        z = x.exp() - 1
    return z + y


def guard(x: Tensor, y: Tensor) -> Tensor:
    if y == 0:
        return 0.0  # type: ignore[return-value]
    return x / y


def sides(x: Tensor, y: Tensor) -> Tensor:
    sign = 1 if x > 0 else -1
    if not x > y or -1 < x < 0.75:
        x, y = y, x
    return sign * x - 2 * y


def early_break(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for i in range(5):
        if total > 1:
            y = y * 2
            break
        total = total + abs(x) / (i + 1)
    return total * y


def newton(x: Tensor, y: Tensor) -> Tensor:
    a = x.square() + 1
    x = a
    while (x * x - a).abs() > 1e-9:
        x = 0.5 * (x + a / x)
    return x * y


def counts(x: Tensor, y: Tensor) -> Tensor:
    steps = 0
    while y < 2:
        y = y + abs(x) + 0.5
        steps = steps + 1
    return steps * x if x > 0 else y


def collatz(x: Tensor, y: Tensor) -> Tensor:
    n = (abs(x) * 8).floor() + 1
    steps = torch.zeros(())
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps + y


def forever(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    k = 0
    while True:
        k += 1
        total += (x + k).abs().sqrt()
        if total > 5:
            break
        y = y * 0.5
    return total - y


def returns_in_a_loop(x: Tensor, y: Tensor) -> Tensor:
    if y == 0:
        return x - HALF
    z = x
    for i in range(4):
        z = z * 1.5 + i
        if z > 3:
            return z.sqrt() * y
        if not z > x * 2:
            return HALF
        z = z - HALF * y
    return x / z


def both_returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x > y and y > 0:
        return x, y
    return y * 2, x


def calls(x: Tensor, y: Tensor) -> Tensor:
    return early_return(x, y) - pieces(y, x)


NUMBERS = [early_return, pieces, guard, sides, early_break, newton, counts, calls]
NUMBERS += [collatz, forever, returns_in_a_loop]


def normalized(x: Tensor, y: Tensor) -> Tensor:
    n = x.norm()
    if n > y:
        return x / n
    return x * 0.5


def entries(x: Tensor, y: Tensor) -> Tensor:
    if x[0] > 0 or (x > -0.5).all():
        return x.sin() * y
    elif x[-1] < y:
        x = x * x.mean()
    return x.exp() - x.max()


def inner_product(x: Tensor, y: Tensor) -> Tensor:
    w = x * 2 - y
    d = w @ x
    if d > y:
        return x.dot(w) * y
    return d


VECTORS = [normalized, entries, inner_product]


@pytest.fixture(params=["where", "bits"])
def choices(request, monkeypatch) -> None:
    """Few lanes choose as many do."""
    if request.param == "bits":
        monkeypatch.setattr(rows, "_MANY", 1)
        monkeypatch.setattr(masks, "_MANY", 1)


def masked(f: Callable, *args: Tensor) -> Tensor:
    """The result with masks, which are to give one."""
    out = run_masked(f, args, (0,) * len(args))
    assert out is not None
    return out


def loop(f: Callable, *args: Tensor) -> Tensor:
    results = [f(*row) for row in zip(*args)]
    if isinstance(results[0], tuple):
        return torch.stack([torch.stack(result) for result in results])
    return torch.stack([torch.as_tensor(result, dtype=D) for result in results])


def by_autograd(f: Callable, *args: Tensor, weights: Tensor | None = None) -> list[Tensor]:
    """The derivatives of a loop, or of what f gives for all lanes, by plain torch."""
    leaves = [arg.clone().requires_grad_() for arg in args]
    out = f(*leaves)
    weights = torch.linspace(1.0, 2.0, out.numel(), dtype=D).reshape(out.shape) if weights is None else weights
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(arg) if each is None else each for each, arg in zip(grads, args)]


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize("f", [*NUMBERS, both_returned], ids=lambda f: f.__name__)
def test_numbers(f: Callable) -> None:
    want = loop(f, XS, YS)
    out = masked(f, XS, YS)
    torch.testing.assert_close(torch.stack(out, 1) if isinstance(out, tuple) else out, want)
    for _ in range(2):
        before = machine.partings
        out = vmap(f)(XS, YS)
        assert machine.partings == before
        torch.testing.assert_close(torch.stack(out, 1) if isinstance(out, tuple) else out, want)


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize("f", VECTORS, ids=lambda f: f.__name__)
def test_vectors(f: Callable) -> None:
    torch.testing.assert_close(masked(f, WIDE, YS), loop(f, WIDE, YS))
    grads = by_autograd(vmap(f), WIDE, YS)
    for got, want in zip(grads, by_autograd(lambda *args: loop(f, *args), WIDE, YS)):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.__name__)
def test_derivatives(f: Callable) -> None:
    ones = torch.ones(len(XS), dtype=D)
    wants = by_autograd(lambda *args: loop(f, *args), XS, YS, weights=ones)
    values = loop(f, XS, YS)
    for got, want in zip(by_autograd(vmap(f), XS, YS, weights=ones), wants):
        torch.testing.assert_close(got, want, equal_nan=True)
    got = grad(lambda *args: vmap(f)(*args).sum(), argnums=(0, 1))(XS, YS)
    torch.testing.assert_close(got, tuple(wants), equal_nan=True)
    if f is guard:
        return  # `grad` refuses a function that returns a number
    for place in (0, 1):
        torch.testing.assert_close(vmap(grad(f, place))(XS, YS), wants[place], equal_nan=True)
        torch.testing.assert_close(vmap(grad_and_value(f, place))(XS, YS), (wants[place], values), equal_nan=True)
        torch.testing.assert_close(vmap(value_and_grad(f, place))(XS, YS), (values, wants[place]), equal_nan=True)


@pytest.mark.parametrize("f", [early_return, pieces, sides, early_break, newton], ids=lambda f: f.__name__)
def test_further_derivatives(f: Callable) -> None:
    xs, ys = XS.abs() + 0.1, YS + 0.1
    v = vmap(f)
    v(xs, ys)

    def summed(xs: Tensor) -> Tensor:
        return loop(f, xs, ys).sum()

    second = torch.autograd.functional.hessian(summed, xs)
    first = torch.autograd.functional.jacobian(lambda xs: loop(f, xs, ys), xs)
    found = {
        "jacrev": (jacrev(v)(xs, ys), first),
        "jacfwd": (jacfwd(v)(xs, ys), first),
        "jvp": (jvp(lambda xs: v(xs, ys), (xs,), (ys,))[1], first @ ys),
        "hessian": (hessian(lambda xs: v(xs, ys).sum())(xs), second),
        "hessian of each": (vmap(hessian(f))(xs, ys), second.sum(0)),
        "twice": (vmap(grad(grad(f)))(xs, ys), second.sum(0)),
        "by autograd": (torch.autograd.functional.hessian(lambda xs: v(xs, ys).sum(), xs), second),
        "vmap": (vmap(v)(torch.stack([xs, ys]), torch.stack([ys, xs])), torch.stack([v(xs, ys), v(ys, xs)])),
    }
    for name, (got, want) in found.items():
        torch.testing.assert_close(got, want, msg=name)


# --- derivatives that are not finite --------------------------------------------------------------------------------


def unused_root(x: Tensor) -> Tensor:
    root = x.sqrt()
    if x <= 0:
        return x * 2
    return root


def root_in_a_side(x: Tensor) -> Tensor:
    if x > 0:
        return x.sqrt() + x.log()
    return x / 3


def quotient_in_a_side(x: Tensor) -> Tensor:
    y = x * 2
    if x != 0:
        y = y / x + 1 / y
    return y


def infinite(x: Tensor) -> Tensor:
    return x.abs().sqrt() if x < 1 else x


ENDS = [unused_root, root_in_a_side, quotient_in_a_side, infinite]


@pytest.mark.parametrize("f", ENDS, ids=lambda f: f.__name__)
def test_an_infinite_derivative_reaches_no_lane_that_goes_elsewhere(f: Callable) -> None:
    want = by_autograd(lambda xs: loop(f, xs), XS, weights=torch.ones_like(XS))[0]
    assert f is infinite or bool(want.isfinite().all())
    for _ in range(5):
        torch.testing.assert_close(vmap(grad(f))(XS), want, equal_nan=True)
        torch.testing.assert_close(grad(lambda xs: vmap(f)(xs).sum())(XS), want, equal_nan=True)


def test_what_is_not_used_of_an_argument_is_nothing() -> None:
    """The derivative of a root outside is zero where the lanes do not use it, as it is in the loop."""

    def f(x: Tensor) -> Tensor:
        if x == 0:
            return torch.ones_like(x)
        return x

    xs = torch.tensor([0.0, 4.0], dtype=D)
    got = grad(lambda xs: vmap(lambda x: f(x.sqrt()))(xs).sum())(xs)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.25], dtype=D))
    torch.testing.assert_close(vmap(grad(lambda x: f(x.sqrt())))(xs), torch.tensor([0.0, 0.25], dtype=D))


# --- what masks do not serve -----------------------------------------------------------------------------------------


def divides(n: Tensor) -> Tensor:
    return 12 // n if n != 0 else n - 5


def wanders(x: Tensor) -> Tensor:
    while x > 0.001:
        x = x * 0.99999
    return x


def promotes(x: Tensor) -> Tensor:
    return x if x > 0 else (x > 1)


def test_an_operation_that_fails_for_lanes_that_do_not_come_there() -> None:
    ns = torch.tensor([0, 1, 5, 0, -3])
    assert run_masked(divides, (ns,), (0,)) is None
    for _ in range(2):
        assert torch.equal(vmap(divides)(ns), loop(divides, ns).long())


def test_a_loop_that_few_lanes_go_on_with(monkeypatch) -> None:
    monkeypatch.setattr(masks, "_ROUNDS", 2)
    xs = torch.tensor([0.0, 0.0, 0.00101], dtype=D)
    assert run_masked(wanders, (xs,), (0,)) is None
    form = form_of(wanders)
    assert form is not None and form.below == 3
    torch.testing.assert_close(vmap(wanders)(xs), loop(wanders, xs))


SCALES = torch.tensor([1.0, 2.0], dtype=D)


def takes_a_tensor(x: Tensor) -> Tensor:
    return x if x > 0 else x * SCALES[0]


def writes(x: Tensor) -> Tensor:
    y = x
    if x > 0:
        y += 1
    return x + y


def asks(x: Tensor) -> Tensor:
    return x if x.item() > 0 else -x


def unbound(x: Tensor) -> Tensor:
    if x > 0:
        y = x
    return y if x > 0 else x


@functools.wraps(early_return)
def wrapped(x: Tensor) -> Tensor:
    return early_return(x, x) * 2


@pytest.mark.parametrize("f", [takes_a_tensor, writes, asks, unbound, promotes, wrapped], ids=lambda f: f.__name__)
def test_other_functions(f: Callable) -> None:
    served = run_masked(f, (XS,), (0,)) is not None
    assert served == (f in (wrapped, takes_a_tensor))
    if f is promotes:
        return  # lanes return different dtypes
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(XS.clone()), loop(f, XS.clone()))


def test_a_name_that_stands_for_something_else(monkeypatch) -> None:
    ones = torch.ones(len(XS), dtype=D)
    monkeypatch.setitem(globals(), "abs", lambda x: ones)
    assert run_masked(early_break, (XS, YS), (0, 0)) is None
    for tensor in (torch.ones(len(XS), 2, dtype=D), torch.tensor(1.0), torch.tensor(1.0, dtype=D, requires_grad=True)):
        monkeypatch.setitem(globals(), "THRESHOLD", tensor)
        assert run_masked(pieces, (XS, YS), (0, 0)) is None
    monkeypatch.setitem(globals(), "THRESHOLD", 2)
    torch.testing.assert_close(masked(pieces, XS, YS), loop(pieces, XS, YS))


def test_somebody_looks_on() -> None:
    def none(f: Callable, *args: Tensor) -> bool:
        return run_masked(f, args, (0,) * len(args)) is None

    with torch.autocast("cpu"):
        assert none(pieces, XS, YS)
    with torch.inference_mode():
        assert none(pieces, XS, YS)
    with torch.autograd.forward_ad.dual_level():
        assert none(pieces, XS, YS)
    leaf = XS.clone().requires_grad_()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
        assert none(pieces, leaf, YS)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert none(pieces, leaf, YS)
    assert none(pieces, torch.nn.Parameter(XS), YS)
    assert none(pieces, XS.to(torch.complex128), YS)
    assert none(pieces, WIDE[:, None], YS)
    assert none(pieces, WIDE, YS.float())
    assert vmap(lambda x: run_masked(pieces, (XS, YS), (0, 0)) is None, out_dims=None)(XS)
    assert not none(pieces, leaf, YS)


def test_one_number_for_all_lanes() -> None:
    v = vmap(pieces, in_dims=(0, None))
    want = torch.stack([pieces(x, 2.5) for x in XS])  # type: ignore[arg-type]
    for _ in range(2):
        torch.testing.assert_close(v(XS, 2.5), want)
    before = machine.partings
    v(XS, 2.5)
    assert machine.partings == before
    got = torch.autograd.grad(v(leaf := XS.clone().requires_grad_(), 2.5).sum(), leaf)[0]
    torch.testing.assert_close(
        got, by_autograd(lambda xs: loop(lambda x: pieces(x, 2.5), xs), XS, weights=XS * 0 + 1)[0]
    )  # type: ignore[arg-type]


def regression(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    error = x @ w + b - y
    if abs(error) < 1:
        return error * error / 2
    if w[0] > x[1]:
        return abs(error) - 0.5
    return (x - w).norm()


def test_arguments_that_all_lanes_share() -> None:
    w, b = torch.tensor([0.5, -1.0, 2.0], dtype=D), torch.tensor(0.25, dtype=D)
    dims = (None, None, 0, 0)
    want = torch.stack([regression(w, b, x, y) for x, y in zip(WIDE, YS)])
    v = vmap(regression, dims)
    for _ in range(2):
        before = machine.partings
        torch.testing.assert_close(v(w, b, WIDE, YS), want)
    assert machine.partings == before
    leaves = [each.clone().requires_grad_() for each in (w, b, WIDE, YS)]
    total = torch.stack([regression(*leaves[:2], x, y) for x, y in zip(*leaves[2:])]).sum()
    wants = torch.autograd.grad(total, leaves)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(v(*leaves).sum(), leaves), wants)
    for place, given in enumerate((w, b)):
        alone = given.expand(len(YS), *given.shape).clone().requires_grad_()
        pairs = [(row, b) if place == 0 else (w, row) for row in alone]
        total = sum([regression(*pair, x, y) for pair, x, y in zip(pairs, WIDE, YS)])
        (each,) = torch.autograd.grad(total, alone)
        for _ in range(2):
            before = machine.partings
            torch.testing.assert_close(vmap(grad(regression, place), dims)(w, b, WIDE, YS), each)
        assert machine.partings == before


def test_tensors_of_the_scope_around() -> None:
    def make(w: Tensor) -> Callable:
        return lambda x: x * w if x @ w > 0 else w - x

    w = torch.tensor([0.5, -1.0, 2.0], dtype=D)
    f = make(w)
    torch.testing.assert_close(masked(f, WIDE), loop(f, WIDE))
    torch.testing.assert_close(vmap(f)(WIDE), loop(f, WIDE))
    for other in (w.float(), w.clone().requires_grad_(), w[:1], w[:, None], torch.ones(len(XS), 3, dtype=D)):
        assert run_masked(make(other), (WIDE,), (0,)) is None
    # One number of each lane, and a vector: no number comes out.
    assert run_masked(make(w), (XS,), (0,)) is None


class Threshold(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if abs(x) < self.at:
            return x * x
        return self.at * abs(x)

    def twice(self, x: Tensor) -> Tensor:
        return x * self.at if x > 0 else x / 2

    @property
    def asked(self) -> float:
        raise AssertionError("no lane asks")

    def asks(self, x: Tensor) -> Tensor:
        return x if x < 10 else x * self.asked


def test_methods_and_modules() -> None:
    module = Threshold()
    for f in (module, module.twice):
        for _ in range(2):
            torch.testing.assert_close(vmap(f)(XS), loop(f, XS))
            module.at = 0.75
        torch.testing.assert_close(masked(f, XS), loop(f, XS))
        want = by_autograd(lambda xs: loop(f, xs), XS, weights=torch.ones_like(XS))[0]  # noqa: B023
        torch.testing.assert_close(masked(grad(f), XS), want)
    assert run_masked(module.asks, (XS,), (0,)) is None
    module.at = torch.tensor(2.0, dtype=D)
    torch.testing.assert_close(masked(module, XS), loop(module, XS))
    module.at = torch.tensor(2.0)
    assert run_masked(module, (XS,), (0,)) is None
    module.at = 1.0
    module.register_forward_hook(lambda module, args, out: out + 1)
    assert run_masked(module, (XS,), (0,)) is None
    torch.testing.assert_close(vmap(module)(XS), loop(module, XS))


def test_shapes_that_lanes_would_not_share() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x if y > 0 else y

    def g(x: Tensor, y: Tensor) -> Tensor:
        if y > 0:
            x = x.sum()
        return x * y

    for h in (f, g):
        assert run_masked(h, (WIDE, YS), (0, 0)) is None
        with pytest.raises(RuntimeError, match="shape"):
            vmap(h)(WIDE, YS)


def test_a_result_is_no_argument() -> None:
    def f(x: Tensor) -> Tensor:
        return x if x > 0 else x

    xs = XS.clone()
    out = masked(f, xs)
    assert out is not xs
    out.resize_(0)
    assert len(xs) == len(XS)


def test_what_is_recorded() -> None:
    def f(x: Tensor) -> tuple:
        if x > 0:
            return x * 2, torch.ones_like(x), x > 1
        return torch.zeros_like(x), torch.zeros_like(x), x > 2

    vmap(f)(XS)
    for xs in (XS, -XS.abs() - 1, XS.abs() + 1):
        leaf = xs.clone().requires_grad_()
        want = [torch.stack(parts) for parts in zip(*[f(x) for x in leaf])]
        got = run_masked(f, (leaf,), (0,))
        assert [each.requires_grad for each in got] == [each.requires_grad for each in want]
        torch.testing.assert_close(list(got), want)
        if want[0].requires_grad:
            found = [torch.autograd.grad(each[0].sum(), leaf)[0] for each in (got, want)]
            torch.testing.assert_close(*found)


def test_numbers_that_are_returned(monkeypatch) -> None:
    """Where lanes differ, and where all return one number, the result is what it is where they part."""

    def f(x: Tensor) -> float:
        return 0.0 if x < 0 else 1.5

    def g(x: Tensor) -> float:
        if x < 0:
            return 2
        return -1

    def h(x: Tensor) -> tuple:
        if x < 0:
            return x, 1.0
        return x * 2, x

    batches = [XS, XS.abs() + 1, -XS.abs() - 1, XS]
    for each in (f, g, h):
        results = [vmap(each)(xs) for xs in batches]
        assert form_of(each).below == math.inf  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            for name in ("masked", "masked_plainly"):
                patch.setattr(runner, name, lambda *_: None)
            wants = [vmap(each)(xs) for xs in batches]
        for result, want in zip(results, wants):
            torch.testing.assert_close(result, want, rtol=0, atol=0)
            assert type(result) is type(want)


def test_a_result_that_is_not_used() -> None:
    def f(x: Tensor) -> tuple:
        root = x.sqrt()
        if x > 1:
            return x * 2, root
        return x * 3, root * 2

    leaf = XS.abs().requires_grad_()
    for _ in range(2):
        (got,) = torch.autograd.grad(vmap(f)(leaf)[0].sum(), leaf)
        torch.testing.assert_close(got, torch.where(XS.abs() > 1, 2.0, 3.0).to(D))


def test_a_side_without_a_derivative() -> None:
    """Only lanes that come there are to fail."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return x // 2 * y if x > 5 else x * y

    torch.testing.assert_close(vmap(f)(XS * 3, YS), loop(f, XS * 3, YS))
    for _ in range(5):
        leaf = XS.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(vmap(f)(leaf, YS).sum(), leaf)[0], YS)
        torch.testing.assert_close(vmap(grad(f))(XS, YS), YS)
    leaf = (XS + 3).requires_grad_()
    with pytest.raises(RuntimeError, match="derivative for aten::floor_divide"):
        torch.autograd.grad(vmap(f)(leaf, YS).sum(), leaf)


def test_several_cotangents_at_once() -> None:
    """Torch's own batches of cotangents, whose numbers nobody can ask for."""
    for f in (pieces, unused_root, quotient_in_a_side):
        args = (XS, YS) if f is pieces else (XS,)
        for _ in range(3):
            leaf = XS.clone().requires_grad_()
            out = vmap(f)(leaf, *args[1:])
            weights = torch.eye(len(XS), dtype=D)
            (got,) = torch.autograd.grad(out, leaf, weights, is_grads_batched=True)
            (want,) = by_autograd(lambda xs: loop(f, xs, *args[1:]), XS, weights=torch.ones_like(XS))  # noqa: B023
            torch.testing.assert_close(got, want.diag())


def test_an_argument_written_to_later() -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x > 0 else -x

    leaf = XS.clone().requires_grad_()
    out = vmap(f)(leaf)
    out = vmap(f)(leaf)
    with torch.no_grad():
        leaf.add_(1)
    out.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.where(XS > 0, 2.0, -1.0).to(D))


# --- what numbers promote, and which of them a tensor holds ---------------------------------------------------------

NS = torch.tensor([3, -1, 0, 7, 2, -5, 4, 1])
THREE = torch.tensor(3)


def asks_a_number(x: Tensor) -> Tensor:
    sign = 1 if x > 0 else -1
    return (sign == 1) * x - (sign != 1) * 2


def doubles(x: Tensor) -> Tensor:
    n = 1 if x > 0 else -1
    for _ in range(63):
        n = n + n
    return n * x


def captured(x: Tensor, y: Tensor) -> Tensor:
    return HALF * y if x > 0 else y - HALF


def captured_integer(n: Tensor, m: Tensor) -> Tensor:
    return THREE * m if n > 0 else m - THREE


def made_inside(x: Tensor) -> Tensor:
    z = torch.tensor(0.25) + 1
    return z * HALF if x > 0 else HALF - z


def truths(x: Tensor, y: Tensor) -> Tensor:
    weight = (x > 0) * 1.0
    return weight * y if y > 0 else y - weight


def selection(x: Tensor, y: Tensor) -> Tensor:
    weight = torch.where(x > 0, 1.0, 0.5)
    return weight * y if y > 0 else y - weight


def sum_of_integers(x: Tensor) -> Tensor:
    return x * x.sum() if x[0] > 0 else x - x.sum()


def product_of_truths(x: Tensor) -> Tensor:
    return x @ x if x[0] > 0 else (x > 0) @ x


def small(n: Tensor) -> Tensor:
    z = n if n > 0 else 300
    return z + n


def large(x: Tensor) -> Tensor:
    z = x if x > 0 else 16777217
    return (z - 16777216) * x


def tiny(x: Tensor) -> Tensor:
    z = x if x > 0 else 1e-9
    return x * z * 1e9 + x


PROMOTIONS = [
    (asks_a_number, XS),
    (doubles, XS),
    (captured, XS, XS.float()),
    (captured, XS.float(), XS),
    (captured_integer, NS, NS.int()),
    (made_inside, XS),
    (truths, WIDE, YS),
    (selection, WIDE, YS),
    (sum_of_integers, NS.int().view(4, 2)),
    (product_of_truths, WIDE),
    (small, NS.to(torch.int8)),
    (small, NS.abs().to(torch.uint8)),
    (large, XS.float()),
    (large, XS),
    (tiny, XS.half()),
]


@pytest.mark.parametrize("f, args", [(f, args) for f, *args in PROMOTIONS])
def test_numbers_promote_as_in_a_lane(f: Callable, args: list[Tensor]) -> None:
    def in_a_loop() -> Tensor:
        return torch.stack([f(*row) for row in zip(*args)])

    try:
        want = in_a_loop()
    except RuntimeError:
        with pytest.raises(RuntimeError):
            vmap(f)(*args)
        return
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(*args), want)


def test_a_number_that_all_lanes_share_promotes_them() -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return y * z if x > 0 else y - z

    ys = YS.float()
    want = torch.stack([f(x, y, HALF) for x, y in zip(XS, ys)])
    for _ in range(2):
        torch.testing.assert_close(vmap(f, (0, 0, None))(XS, ys, HALF), want)
    assert want.dtype is D
    assert run_masked(f, (XS, ys, HALF), (0, 0, None)) is not None


# --- random programs -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize("wide", [False, True], ids=["numbers", "vectors"])
def test_random_programs(wide: bool) -> None:
    served = differentiated = 0
    xs, ys = (WIDE if wide else XS), YS
    for seed in range(150):
        f, text = program(seed, wide)
        try:
            want = loop(f, xs, ys)
        except (TypeError, AttributeError):
            continue  # it asks a Python number for a method of tensors
        out = run_masked(f, (xs, ys), (0, 0))
        if out is None:
            continue
        served += 1
        torch.testing.assert_close(out.to(D), want, equal_nan=True, msg=text)
        weights = torch.linspace(1.0, 2.0, want.numel(), dtype=D).reshape(want.shape)
        for place in range(2):
            leaves = [xs, ys]
            leaves[place] = leaves[place].clone().requires_grad_()
            expected = loop(f, *leaves)
            out = run_masked(f, tuple(leaves), (0, 0))
            if not expected.requires_grad or out is None:
                continue
            (want,) = torch.autograd.grad((expected * weights).sum(), leaves[place])
            if want.abs().max() < 1e6:
                differentiated += 1
                (got,) = torch.autograd.grad((out * weights).sum(), leaves[place])
                torch.testing.assert_close(got, want, msg=text)
    assert served > 100 and differentiated > 60


def test_a_form_is_made_once() -> None:
    assert form_of(pieces) is form_of(pieces)
    text = "def f(x):\n    return x if x > 0 else -x\n"
    linecache.cache["<once>"] = (len(text), None, text.splitlines(True), "<once>")
    space: dict = {"__name__": "once"}
    exec(compile(text, "<once>", "exec"), space)
    before = len(masked_calls._forms)
    for _ in range(3):
        masked(space["f"], XS)
    assert len(masked_calls._forms) == before + 1


# --- assignments to more than variables ------------------------------------------------------------------------------


def entry(x: Tensor) -> Tensor:
    y = x * 3
    if x[0] > 0:
        y[0] = 5.0
    return (y * y).sum()


def several_entries(x: Tensor) -> Tensor:
    y = x * 3
    if x[0] > 0:
        y[:2] = x[1:]
    return (y * y).sum()


def data(x: Tensor) -> Tensor:
    y = x * 3
    if x[0] > 0:
        y.data = x.exp()
    return (y * y).sum()


def entry_of_a_dict(x: Tensor) -> Tensor:
    found = {"y": x}
    if x[0] > 0:
        found["y"] = x * 2
    return found["y"].sum()


@pytest.mark.parametrize("f", [entry, several_entries, data, entry_of_a_dict])
def test_assignments_to_more_than_variables(f: Callable) -> None:
    want = torch.stack([f(x) for x in WIDE])
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(WIDE), want)
