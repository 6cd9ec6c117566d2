"""Second derivatives in every nesting of forward and reverse, by differences of differences.

The operations are those whose formula in torch is wrong, or missing, at the second order.
"""

import pytest
import torch
import torch.nn.functional as F

from lanewise import grad, hessian, jvp, vmap
from tests.oracles import SECOND, assert_same, difference

D = torch.float64
L = torch.linalg
random = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, dtype=D, generator=random)


SQUARE, TALL, ROW, OTHER = normal(3, 3), normal(4, 3), normal(4), normal(4, 3)
WITH_ZERO = torch.tensor([0.7, 0.0, -1.2, 0.4], dtype=D)
PLACES = torch.tensor([0, 1, 0, 2])


def definite(x):
    return x @ x.mT + 3 * torch.eye(3, dtype=D)


def rotated(x):
    return torch.complex(x, x.flip(0))


CASES = {
    "householder_product": (lambda x: L.householder_product(x, x[0].sigmoid()), SQUARE),
    "householder_product, fewer": (lambda x: L.householder_product(x, x[0, :2].sigmoid()), TALL),
    "householder_product, complex": (lambda x: L.householder_product(rotated(x), rotated(x[:2])[0]).abs(), TALL),
    "det": (L.det, SQUARE),
    "det, complex": (lambda x: L.det(rotated(x)).abs(), SQUARE),
    "slogdet": (lambda x: L.slogdet(x)[1], SQUARE),
    "slogdet, complex": (lambda x: L.slogdet(rotated(x))[1], SQUARE),
    "logdet": (lambda x: torch.logdet(definite(x)), SQUARE),
    "solve": (lambda x: L.solve(x, x[:, 0] * 2), SQUARE),
    "solve from the right": (lambda x: L.solve(x, x.mT, left=False), SQUARE),
    "inv": (L.inv, SQUARE),
    "cholesky": (lambda x: L.cholesky(definite(x)), SQUARE),
    "cholesky_solve": (lambda x: torch.cholesky_solve(x, L.cholesky(definite(x))), SQUARE),
    "cholesky_inverse": (lambda x: torch.cholesky_inverse(L.cholesky(definite(x))), SQUARE),
    "lu": (lambda x: torch.cat(L.lu(x)[1:]), SQUARE),
    "lu_solve": (lambda x: L.lu_solve(*L.lu_factor(x), x), SQUARE),
    "triangular_solve": (lambda x: torch.triangular_solve(x, x.triu() + 3 * torch.eye(3, dtype=D))[0], SQUARE),
    "qr": (lambda x: torch.cat(L.qr(x)), SQUARE),
    "eigvalsh": (lambda x: L.eigvalsh(x + x.mT), SQUARE),
    "pinv": (L.pinv, TALL),
    "lstsq": (lambda x: L.lstsq(x, x[:, :1])[0], TALL),
    "cumprod": (lambda x: x.cumprod(0), ROW),
    "cumprod at zero": (lambda x: x.cumprod(0), WITH_ZERO),
    "prod at zero": (lambda x: x.prod(), WITH_ZERO),
    "cdist": (lambda x: torch.cdist(x, OTHER), SQUARE),
    "cdist, p=1": (lambda x: torch.cdist(x, OTHER, p=1.0) * x.sum(), SQUARE),
    "cdist, p=3": (lambda x: torch.cdist(x, x.flip(0) * 2 + 1, p=3.0), SQUARE),
    "pdist": (torch.pdist, SQUARE),
    "scatter_reduce prod": (lambda x: x[:3].scatter_reduce(0, PLACES, x, "prod"), ROW),
    "scatter_reduce prod alone": (lambda x: x[:3].scatter_reduce(0, PLACES, x, "prod", include_self=False), ROW),
    "scatter_reduce mean": (lambda x: (x[:3] ** 2).scatter_reduce(0, PLACES, x**2, "mean"), ROW),
    "index_reduce prod": (lambda x: x[:3].index_reduce(0, PLACES, x, "prod"), ROW),
    "weight_norm": (lambda x: torch._weight_norm(x, x[:, :1] + 3), SQUARE),
    "weight_norm of columns": (lambda x: torch._weight_norm(x, x[:1] + 3, 1), SQUARE),
    "layer_norm": (lambda x: F.layer_norm(x, [3], x[0], x[1]), SQUARE),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), TALL),
    "group_norm": (lambda x: F.group_norm(x[None].expand(2, 3, 3).reshape(1, 6, 3), 2), SQUARE),
}


def along(f, direction):
    """The tangent of f along a direction, as a function."""
    return lambda x: jvp(f, (x,), (direction,))[1]


@pytest.mark.filterwarnings("ignore:.*is in beta")
@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name):
    f, x = CASES[name]
    draw = torch.Generator().manual_seed(1)
    u, v = (torch.randn(x.shape, dtype=D, generator=draw) * 0.3 for _ in range(2))
    weight = torch.randn(f(x).shape, dtype=D, generator=draw)
    want = difference(lambda x: difference(f, (x,), (v,))[0], (x,), (u,))[0]
    number = (want * weight).sum()

    def loss(x):
        return (f(x) * weight).sum()

    def slope(x):
        return (grad(loss)(x) * v).sum()

    def twice(x):
        return x.expand(2, *x.shape)

    assert_same(along(along(f, v), u)(x), want, SECOND)
    assert_same(vmap(along(along(f, v), u))(twice(x))[1], want, SECOND)
    assert_same(along(lambda x: vmap(along(f, v))(twice(x))[1], u)(x), want, SECOND)
    for first in (along(loss, v), slope):
        assert_same(along(first, u)(x), number, SECOND)
        assert_same((grad(first)(x) * u).sum(), number, SECOND)
        assert_same(vmap(along(first, u))(twice(x))[1], number, SECOND)
        assert_same((vmap(grad(first))(twice(x))[1] * u).sum(), number, SECOND)
        assert_same(along(lambda x, first=first: vmap(first)(twice(x))[1], u)(x), number, SECOND)
        assert_same((grad(lambda x, first=first: vmap(first)(twice(x))[1])(x) * u).sum(), number, SECOND)
    assert_same(torch.tensordot(torch.tensordot(hessian(loss)(x), u, u.dim()), v, v.dim()), number, SECOND)
