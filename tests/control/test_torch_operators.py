"""torch's own control-flow functions under every transform, the outermost too: what the plain Python code gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan

import lanewise as lw

# torch's compiler, which an outermost `torch.cond` goes through, looks at the `.grad` of what it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")

captured = torch.tensor([0.5, 1.5], dtype=torch.float64)


def by_cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t**3 * captured, lambda t: t.sin() * x, (x,))


def by_if(x: Tensor) -> Tensor:
    return x**3 * captured if x.sum() > 0 else x.sin() * x


def by_while_loop(x: Tensor) -> Tensor:
    start = torch.tensor(0), x
    return torch.while_loop(lambda i, u: i < 3, lambda i, u: (i + 1, u * x + captured), start)[1]  # type: ignore[attr-defined]


def by_while(x: Tensor) -> Tensor:
    u = x
    for _ in range(3):
        u = u * x + captured
    return u


def by_map(x: Tensor) -> Tensor:
    return torch_map(lambda row: row.exp() * row, x)


def by_rows(x: Tensor) -> Tensor:
    return torch.stack([row.exp() * row for row in x])


def by_scan(x: Tensor) -> Tensor:
    return torch_scan(lambda carry, row: (carry * row + 1, carry * row), x.new_zeros(()), x)[1]


def by_steps(x: Tensor) -> Tensor:
    return torch.stack([x[0] * 0, x[1]])


PAIRS = [(by_cond, by_if), (by_while_loop, by_while), (by_map, by_rows), (by_scan, by_steps)]

TRANSFORMS: list[Callable] = [
    lambda f, x: f(x[0]),
    lambda f, x: lw.grad(lambda a: f(a).prod())(x[0]),
    lambda f, x: lw.vjp(f, x[0])[1](x[1])[0],
    lambda f, x: lw.jvp(f, (x[0],), (x[1],))[1],
    lambda f, x: lw.jacrev(f)(x[1]),
    lambda f, x: lw.jacfwd(f)(x[1]),
    lambda f, x: lw.hessian(f)(x[0]),
    lambda f, x: lw.jacrev(lw.jacrev(f))(x[1]),
    lambda f, x: lw.grad(lambda a: lw.grad(lambda b: f(b).prod())(a).prod())(x[1]),
    lambda f, x: lw.vmap(f)(x),
    lambda f, x: lw.vmap(lw.jacrev(f))(x),
    lambda f, x: lw.grad(lambda a: lw.vmap(f)(a).prod())(x),
    lambda f, x: lw.vmap(lw.hessian(f))(x),
]


@pytest.mark.parametrize("transform", range(len(TRANSFORMS)))
@pytest.mark.parametrize("theirs, plain", PAIRS, ids=lambda f: f.__name__)
def test_as_plain_code(theirs: Callable, plain: Callable, transform: int) -> None:
    x = torch.tensor([[1.0, -2.0], [0.3, 0.8], [2.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(TRANSFORMS[transform](theirs, x), TRANSFORMS[transform](plain, x))


def test_backward_from_outside() -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    gradient = lw.grad(lambda a: by_cond(a).sum())(x)
    plain = lw.grad(lambda a: by_if(a).sum())(x)
    for got, want in zip(torch.autograd.grad(gradient.prod(), x), torch.autograd.grad(plain.prod(), x)):
        torch.testing.assert_close(got, want)
