"""`linearize` in a `vmap` whose lanes part, with custom Functions whose formulas branch, and `vmap` over its push."""

import pytest
import torch

from lanewise import grad, jvp, linearize, vmap

D = torch.float64
XS = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [0.5, -4.0], [-2.0, -1.0]], dtype=D)
TS = torch.tensor([[0.3, 0.2], [-1.0, 0.3], [0.5, -0.4], [-0.2, -1.0]], dtype=D)
EYE = torch.eye(2, dtype=D)

pytestmark = [
    pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning"),
    pytest.mark.usefixtures("parting"),
]


class Branches(torch.autograd.Function):
    """Forward and backward branch on what they are given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x if x.sum() > 0 else x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x if x.sum() > 0 else g * x.cos()


class BranchesForward(Branches):
    """With a formula for tangents."""

    @staticmethod
    def forward(x):
        return x * x if x.sum() > 0 else x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * 2 * x if x.sum() > 0 else t * x.cos()


def by_sign(x):
    y = x.sin()
    return y * x if x.sum() > 0 else y.exp()


def by_error(x):
    try:
        if x.sum() > 0:
            raise ValueError
        y = x.sin()
    except ValueError:
        y = x.exp()
    return y * x


def by_text(x):
    text = f"{x[0].item():.0f}"
    return x * x if text.startswith("-") else x.sin() * x


def by_match(x):
    match int(x[0].sign()):
        case 1:
            return x.exp()
        case _:
            return x * x


def by_place(x):
    place = int(x.argmax())
    return x[place] * x.sin()


def by_key(x):
    table = {1: torch.sin, -1: torch.exp}
    return table[int(x[1].sign())](x) * x


def custom(x):
    return Branches.apply(x) * x


def custom_forward(x):
    return BranchesForward.apply(x) * x


def custom_twice(x):
    return BranchesForward.apply(Branches.apply(x)) * x


def custom_in_a_branch(x):
    return Branches.apply(x) * x if x[0] > 0 else BranchesForward.apply(x) * 2


def custom_in_vmap(x):
    return vmap(lambda v: Branches.apply(v[None])[0])(x) * x


def custom_in_loop(x):
    return torch.stack([Branches.apply(v[None])[0] for v in x]) * x


FUNCTIONS = [by_sign, by_error, by_text, by_match, by_place, by_key]
FUNCTIONS += [custom, custom_forward, custom_twice, custom_in_a_branch, custom_in_vmap]


def plainly(f):
    return custom_in_loop if f is custom_in_vmap else f


def jacobian(f, x):
    x = x.clone().requires_grad_()
    y = plainly(f)(x)
    return torch.stack([torch.autograd.grad(one, x, retain_graph=True)[0] for one in y])


def slope(f, x, t):
    """The gradient, in x, of the sum of J t."""
    x = x.clone().requires_grad_()
    y = plainly(f)(x)
    probe = torch.zeros_like(y, requires_grad=True)
    (back,) = torch.autograd.grad(y, x, probe, create_graph=True)
    (pushed,) = torch.autograd.grad(back, probe, t, create_graph=True)
    return torch.autograd.grad(pushed.sum(), x)[0]


def push(f, x):
    return linearize(f, x)[1]


@pytest.mark.parametrize("f", FUNCTIONS)
def test_once_and_many_times(f):
    rows = torch.stack([jacobian(f, x) for x in XS])
    want = torch.einsum("bij,bj->bi", rows, TS)

    def same(got, want):
        torch.testing.assert_close(got, want)

    same(vmap(lambda x, t: push(f, x)(t))(XS, TS), want)
    same(linearize(vmap(f), XS)[1](TS), want)
    same(vmap(lambda x: vmap(push(f, x))(EYE))(XS), rows.mT)
    same(vmap(vmap(lambda x: vmap(push(f, x))(EYE)))(XS[None])[0], rows.mT)
    same(vmap(lambda x, t: jvp(push(f, x), (t,), (t,))[1])(XS, TS), want)
    same(vmap(lambda x, t: grad(lambda t: push(f, x)(t).sum())(t))(XS, TS), rows.sum(1))

    def some(x):
        pushed = push(f, x)
        return vmap(lambda e: pushed(e) if e[0] > 0 else 2 * pushed(e))(EYE)

    same(vmap(some)(XS), rows.mT * torch.tensor([[1.0], [2.0]], dtype=D))

    def in_a_branch(x, t):
        pushed = push(f, x)
        if x[1] > 0:
            return pushed(t)
        return 2 * pushed(t)

    same(vmap(in_a_branch)(XS, TS), want * torch.where(XS[:, 1:] > 0, 1, 2))


@pytest.mark.parametrize("f", FUNCTIONS)
def test_differentiated_again(f):
    want = torch.stack([slope(f, x, t) for x, t in zip(XS, TS)])

    def total(x, t):
        return push(f, x)(t).sum()

    torch.testing.assert_close(vmap(grad(total))(XS, TS), want)
    torch.testing.assert_close(grad(lambda xs: vmap(total)(xs, TS).sum())(XS), want)
    along = vmap(lambda x, t: linearize(lambda x: total(x, t), x)[1](t))(XS, TS)
    torch.testing.assert_close(along, (want * TS).sum(1))


def rows_of_a_vector(v, x):
    a, b, _ = v
    s = v @ v
    if x > 0:
        return a * b * s
    return b * s


def test_parts_taken_before_a_product_that_asks_for_a_history():
    """Whether an operand is recorded is asked without beginning a history, which would count as a write to it."""
    vs, xs = torch.randn(4, 3, dtype=D), torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=D)

    def gradient(mapped):
        return grad(lambda vs: jvp(lambda vs: mapped(vs, xs), (vs,), (torch.ones_like(vs),))[1].sum())(vs)

    want = gradient(lambda vs, xs: torch.stack([rows_of_a_vector(v, x) for v, x in zip(vs, xs)]))
    torch.testing.assert_close(gradient(vmap(rows_of_a_vector)), want)
