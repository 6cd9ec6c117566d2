"""A custom Function whose formulas branch on lane values runs once per lane: its derivatives of every order."""

import pytest
import torch

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap

XS = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [-0.5, -2.0]], dtype=torch.float64)
YS = torch.tensor([[0.3, 1.2], [0.7, -0.4], [1.1, 0.2]], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x**3 * y, x.sum() * y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        if x.sum() > 0:
            gx = 3 * g * x * x * y + (h * y).sum()
        else:
            gx = 3 * g * x**2 * y + (h * y).sum()
        return gx, g * x**3 + h * x.sum()


def custom(x, y):
    a, b = Branching.apply(x, y)
    return (a * b * x).sum()


def plain(x, y):
    return (x**3 * y * (x.sum() * y) * x).sum()


ORDERS = {
    "grad": grad,
    "jacrev-grad": lambda f: jacrev(grad(f)),
    "jvp-grad": lambda f: lambda x, y: jvp(lambda x: grad(f)(x, y), (x,), (torch.ones_like(x),))[1],
    "jacfwd-grad": lambda f: jacfwd(grad(f)),
    "hessian": hessian,
    "jacfwd-jacfwd": lambda f: jacfwd(jacfwd(f)),
    "jacrev-jacfwd": lambda f: jacrev(jacfwd(f)),
    "mixed": lambda f: jacrev(grad(f, argnums=1)),
    "third": lambda f: jacrev(jacrev(grad(f))),
    "third-forward": lambda f: jacfwd(jacrev(grad(f))),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ys", [YS, YS[0]], ids=["mapped", "shared"])
def test_every_order(order, ys):
    mapped = ys.dim() == 2
    want = torch.stack([ORDERS[order](plain)(x, ys[i] if mapped else ys) for i, x in enumerate(XS)])
    got = vmap(ORDERS[order](custom), in_dims=(0, 0 if mapped else None))(XS, ys)
    torch.testing.assert_close(got, want)
    assert not got.requires_grad


@pytest.mark.parametrize("order", ORDERS)
def test_the_derivative_of_a_captured_tensor(order):
    want = grad(lambda y: sum(ORDERS[order](plain)(x, y).sum() for x in XS))(YS[0])
    got = grad(lambda y: vmap(lambda x: ORDERS[order](custom)(x, y).sum())(XS).sum())(YS[0])
    torch.testing.assert_close(got, want)
    leaf = YS[0].clone().requires_grad_()
    vmap(lambda x: ORDERS[order](custom)(x, leaf).sum())(XS).sum().backward()
    torch.testing.assert_close(leaf.grad, want)
