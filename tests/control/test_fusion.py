"""Expressions of converted code that are computed as a whole: found in the syntax, and equal to the loop."""

import ast
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise._control.rewriting.arithmetic import arithmetic
from lanewise._control.runtime import fusion

pytestmark = pytest.mark.usefixtures("parting")

XS = torch.tensor([0.5, -1.5, 2.5, 3.5, -0.25, 1.0], dtype=torch.float64)
WIDE = torch.stack([XS, XS + 0.3, 2 * XS], 1)
SCALE = torch.tensor(1.5, dtype=torch.float64)


@pytest.mark.parametrize(
    "text",
    ["a * b + 1", "-(a.b - c) / 2", "abs_(a) * b", "torch.sin(x) * x", "x.abs() > y * 2", "torch.where(a, b, c * 2)"],
)
def test_arithmetic_is_found(text: str) -> None:
    found = arithmetic(ast.parse(text, mode="eval").body)
    assert (found is None) == text.startswith("abs_")


@pytest.mark.parametrize(
    "text",
    ["a + b", "a", "1 + 2", "f(a) + b * c", "a @ b + c", "x.sum() * 2 + y", "a[0] * b * c", "torch.where(x * 2 > 0)"]
    + ["a < b * 2 < c", "x.add_(1) * 2 + x", "(a and b) * c * d", "x.clamp(min=0) * 2 + y", '"%s" % a % b'],
)
def test_what_may_have_an_effect_or_another_shape_is_not(text: str) -> None:
    assert arithmetic(ast.parse(text, mode="eval").body) is None


def newton(a: Tensor) -> Tensor:
    x = a
    while (x * x - a.abs()).abs() > 1e-9 * a.abs():
        x = 0.5 * (x + a.abs() / x)
        if x * x * 1.0 > a * a * 0.25 + 1.5:
            break
    return x


def captured(x: Tensor) -> Tensor:
    y = SCALE * x.abs() + 1
    while y * SCALE - 2 < 10:
        y = y * SCALE + torch.exp(-x * x) * 2
    return torch.sin(y) / y + SCALE * 2 * x


def uniform_inside(x: Tensor) -> Tensor:
    total = torch.zeros(())
    one = torch.ones((), dtype=torch.float32)
    k = 0
    while total * 2 + 0.5 < x * x:
        total = total + one * 0.25 + k * 2
        k = k + 1
    return total * one * 2 + x * 0 + k


def promotes(x: Tensor) -> Tensor:
    n = (x * 4).to(torch.int32)
    y = x
    while n * 2 - 1 > 0:
        n = n - 1 + 0 * n
        y = y + n / 2 * 3 + (n > 2) * 1 + (n % 3) * 2.5
    return y * 2 + n // 2


def choices(x: Tensor) -> Tensor:
    y = x
    while torch.where(y > 0, y * 2, -y) < 9:
        y = torch.where(y * 1 > 0, y * 2 + 1, y.abs() + 0.5).clamp(-20, 20) * 1.25
    return torch.maximum(y * 2, y + 3) - x


def leaf_changes(x: Tensor) -> Tensor:
    y = x.clone()
    while y * 2 + 1 < 8:
        z = y * 2 + 1
        y += z.abs() * 0.5 + 0.25
        x = x * 1.5 + y * 0.1
    return x * y + y * 2


def through_a_name(x: Tensor) -> Tensor:
    torch_like = SCALE
    while x * torch_like - 1 < 5:
        x = x.abs() * torch_like + 1
    return x * torch_like * 1


PROGRAMS = [newton, captured, uniform_inside, promotes, choices, leaf_changes, through_a_name]


def _wide(program: Callable) -> Callable:
    """The program for each of three numbers, in values of two dims with one lane's number broadcast."""

    def f(row: Tensor) -> Tensor:
        if row.sum() > 1:
            return (row * row.mean() + 1).abs() * row - program(row[0]) * 2 + 1
        return row * 2 - 1 + program(row[1])

    return f


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_as_the_loop(program: Callable, wide: bool) -> None:
    f, xs = (_wide(program), WIDE) if wide else (program, XS)
    want = torch.stack([f(x) for x in xs])
    for _ in range(2):
        out = vmap(f)(xs)
        assert out.dtype is want.dtype
        torch.testing.assert_close(out, want)
    nested = vmap(vmap(f))(torch.stack([xs, xs + 0.125]))
    torch.testing.assert_close(nested, torch.stack([want, torch.stack([f(x) for x in xs + 0.125])]))

    def slope(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf, allow_unused=True, materialize_grads=True)[0]

    slopes = torch.stack([slope(x) for x in xs])
    total = lambda x: f(x).sum()
    torch.testing.assert_close(vmap(grad(total))(xs), slopes)
    torch.testing.assert_close(grad(lambda xs: vmap(total)(xs).sum())(xs), slopes)
    torch.testing.assert_close(
        vmap(lambda x: jvp(total, (x,), (torch.ones_like(x),))[1])(xs), slopes.reshape(len(xs), -1).sum(1)
    )
    torch.testing.assert_close(vmap(jacrev(total))(xs), slopes)
    torch.testing.assert_close(vmap(jacfwd(total))(xs), slopes)
    torch.testing.assert_close(grad(lambda xs: vmap(grad(total))(xs).square().sum())(xs), _curved(f, xs))
    torch.testing.assert_close(
        vmap(hessian(total))(xs), torch.stack([torch.autograd.functional.hessian(total, x) for x in xs])
    )


def _curved(f: Callable, xs: Tensor) -> Tensor:
    out = []
    for x in xs:
        leaf = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(
            f(leaf).sum(), leaf, create_graph=True, allow_unused=True, materialize_grads=True
        )
        value = first.square().sum()
        second = (
            torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0]
            if value.requires_grad
            else None
        )
        out.append(torch.zeros_like(x) if second is None else second)
    return torch.stack(out)


def test_twice_through_one_graph() -> None:
    def f(x: Tensor) -> Tensor:
        leaf = x.requires_grad_()
        y = leaf
        while y * 2 + 1 < 20:
            y = y * y * 0.5 + leaf.abs() + 1
        first = torch.autograd.grad(y, leaf, retain_graph=True)[0]
        return first + torch.autograd.grad(y, leaf)[0]

    want = torch.stack([f(x.clone()) for x in XS])
    torch.testing.assert_close(vmap(f)(XS.clone()), want)


def test_an_operand_whose_value_is_not_needed_may_be_written_to() -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        z = y + x + y
        if x * 2 + 1 > 0:
            z = z + y - 2 * x
            y.mul_(3)
        else:
            z = z - y + x
            y.add_(1)
        return z * 2 + y

    want = torch.stack([_slope_of(f, x) for x in XS])
    torch.testing.assert_close(vmap(grad(f))(XS), want)


def _slope_of(f: Callable, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)[0]


def test_a_branch_not_taken_gives_no_nan() -> None:
    def f(x: Tensor) -> Tensor:
        root = (x * 1 + 0).sqrt() * 2
        if x * 2 > 0:
            return root * x * 2
        return x * x * 3

    slopes = vmap(grad(f))(XS.abs() * (XS > 0))
    assert not slopes.isnan().any()


def test_an_error_names_the_line_of_the_user() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2 + y  # the line
        return x[:2] * 3 + 1

    with pytest.raises(RuntimeError, match="must match") as caught:
        vmap(f)(WIDE, torch.ones(6, 2, dtype=torch.float64))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "f" and str(frames[-1].line).endswith("# the line")
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_integers_divided_by_zero_in_some_lanes() -> None:
    def f(n: Tensor) -> Tensor:
        if n > 5:
            return n * 2 + 1
        try:
            return 12 // n * 2 + 1
        except (RuntimeError, ZeroDivisionError):
            return -n - 1

    ns = torch.tensor([0, 1, 2, 7])
    assert vmap(f)(ns).tolist() == [f(n).item() for n in ns]


def test_a_flag_that_is_written_to_in_a_branch() -> None:
    def f(flag: Tensor, x: Tensor) -> Tensor:
        if flag:
            flag.logical_not_()
            y = x * 2 + 1
        else:
            flag.fill_(True)
            y = x * 3 - 1
        return y + flag * 100

    flags = torch.tensor([True, False, True, False])
    xs = XS[:4]
    want = torch.stack([f(flag.clone(), x) for flag, x in zip(flags, xs)])
    torch.testing.assert_close(vmap(f)(flags.clone(), xs), want)


def test_operations_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    own = fusion._below

    def counted(level, run, values, direct):
        calls.append(len(values))
        return own(level, run, values, direct)

    monkeypatch.setattr(fusion, "_below", counted)
    vmap(newton)(XS.abs())
    assert len(calls) > 4
    passes: list[None] = []
    by_parts = fusion._by_parts
    monkeypatch.setattr(fusion, "_by_parts", lambda *args: passes.append(None) or by_parts(*args))
    vmap(grad(newton))(XS.abs())
    assert len(passes) > 2
    before = len(calls)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        vmap(grad(newton))(XS.abs())
    assert len(calls) > before  # comparisons


def test_numbers_in_where_make_plain_results() -> None:
    def f(x: Tensor) -> Tensor:
        if x > 0:
            x = x * 2
        return torch.where(x > 1, x, 1.5)

    def g(x: Tensor) -> Tensor:
        a = torch.where(x > 0, x, 1.5)
        if a < 1:
            a += 1
            c = a + x
        else:
            c = a
        return a + c

    for program in (f, g):
        out = vmap(program)(XS)
        assert type(out) is Tensor
        torch.testing.assert_close(out, torch.stack([program(x) for x in XS]))
        out = vmap(vmap(program))(WIDE)
        assert type(out) is Tensor
        torch.testing.assert_close(out, torch.stack([torch.stack([program(x) for x in row]) for row in WIDE]))


def test_an_expression_without_a_derivative_is_not_recorded() -> None:
    def f(x: Tensor) -> Tensor:
        sign = torch.where(x > 0, 1.0, -1.0)
        assert not sign.requires_grad
        scaled = (0.5 > x) * SCALE
        assert not scaled.requires_grad
        return (x * sign if x > -1 else x) + scaled

    torch.testing.assert_close(vmap(grad(f))(XS), torch.stack([_slope_of(f, x) for x in XS]))


def test_a_write_to_an_operand_before_a_second_derivative() -> None:
    def f(b: Tensor) -> Tensor:
        if b > 0:
            b = b * 2
        b = b * 1.5
        c = (b + 1.0) * 2.0
        b.mul_(3.0)
        return c * c

    want = torch.stack([torch.autograd.functional.hessian(f, x) for x in XS])
    torch.testing.assert_close(vmap(grad(grad(f)))(XS), want)


def test_saved_tensor_hooks_that_compute() -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks

    def f(x: Tensor) -> Tensor:
        with hooks(lambda t: t * 2, lambda t: t / 2):
            if x > 0:
                x = x * x
            return x.sin() * x

    def g(x: Tensor) -> Tensor:
        y = x * 2
        if x > 0:
            y = y * x
        return y.sin()

    torch.testing.assert_close(vmap(grad(f))(XS), torch.stack([_slope_of(f, x) for x in XS]))
    with hooks(lambda t: t.clone(), lambda t: t):
        slopes = vmap(grad(g))(XS)
    torch.testing.assert_close(slopes, torch.stack([_slope_of(g, x) for x in XS]))

    def packed(x: Tensor) -> Tensor:
        with hooks(lambda t: t.float(), lambda t: t.double()):
            return x.sin()

    total = vmap(grad(lambda row: vmap(packed)(row).sum()))(WIDE)
    torch.testing.assert_close(total, WIDE.cos(), atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
def test_sides_without_a_tangent_and_operands_of_one_level_each() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return y * 2 if x > 0 else x * x * y

    want = torch.stack([torch.stack([_slope_of(lambda x, y=y: f(x, y) + 0 * x, x) for x in XS]) for y in XS[:2]])
    for transform in (grad, jacrev, jacfwd):
        torch.testing.assert_close(vmap(vmap(transform(f), (0, None)), (None, 0))(XS, XS[:2]), want)
        torch.testing.assert_close(vmap(transform(f))(XS, XS[:1].expand(6)), want[0])
    ones = vmap(jacfwd(lambda x: torch.ones_like(x) if x > 0 else x * x))(XS)
    torch.testing.assert_close(ones, torch.where(XS > 0, 0, 2 * XS))
