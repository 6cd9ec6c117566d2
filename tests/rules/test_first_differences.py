"""Derivatives in every nesting of forward and reverse, by differences, where torch's gradient itself is wrong.

It is for these arguments: none of torch.autograd's numbers is an oracle here.
"""

import itertools

import pytest
import torch

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from tests.oracles import FIRST, SECOND, assert_same, difference

D = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def rotated(x):
    return torch.complex(x, x.flip(0))


def written(write):
    """What one tensor that stands twice in a list is after a write to the list."""

    def f(x):
        y = x * 2
        write([y, y], [x, x**2])
        return y**2

    return f


X = normal(3, 2)
ROW = torch.zeros(2, dtype=D)
LIMIT = normal(2, seed=1)

VARIANCES = {
    "std": (lambda x: torch.std(x, ()), X),
    "std keepdim": (lambda x: torch.std(x, (), correction=0, keepdim=True), X),
    "var": (lambda x: torch.var(x, ()), X),
    "std method": (lambda x: x.std([]), X),
    "var unbiased": (lambda x: torch.var(x, (), False), X),
    "std_mean": (lambda x: torch.stack(torch.std_mean(x, ())), X),
    "var_mean": (lambda x: torch.stack(torch.var_mean(x, [], correction=0)), X),
    "std complex": (lambda x: torch.std(rotated(x), ()), X),
    "var_mean complex": (lambda x: torch.var_mean(rotated(x), ())[0], X),
}
LIMITS = {
    "clamp up to one limit": (lambda v: torch.clamp(ROW, v, v) ** 2, LIMIT + 5),
    "clamp down to one limit": (lambda v: torch.clamp(ROW, v, v) ** 2, LIMIT - 5),
    "clamp at one limit": (lambda v: torch.clamp(LIMIT, v, v) ** 2, LIMIT),
    "clamp between equal limits": (lambda x: torch.clamp(x, LIMIT, LIMIT) ** 2 + x, LIMIT),
    "clamp between equal numbers": (lambda x: torch.clamp(x, 2, 2.0) ** 2 + x, ROW + 2),
    "clamp between numbers that cross": (lambda x: torch.clamp(x, 3, 2) ** 2 + x, ROW + 2),
    "clip by rows": (lambda x: x.clip(x[:1], x[:1]) ** 2, X),
    "clamp_": (lambda x: (x * 1).clamp_(x[:1], x[:1]) ** 2, X),
    "clamp_ by numbers": (lambda x: (x * 1).clamp_(2, 2) ** 2 + x, ROW + 2),
}
LISTS = {
    "_foreach_add_": (written(torch._foreach_add_), X),
    "_foreach_mul_": (written(torch._foreach_mul_), X),
    "_foreach_mul_ by a number": (written(lambda a, b: torch._foreach_mul_(a, 1.5)), X),
    "_foreach_add_ of itself": (written(lambda a, b: torch._foreach_add_(a, a)), X),
    "_foreach_sin_": (written(lambda a, b: torch._foreach_sin_(a)), X),
    "_foreach_lerp_": (written(lambda a, b: torch._foreach_lerp_(a, b, 0.3)), X),
    "_foreach_addcmul_": (written(lambda a, b: torch._foreach_addcmul_(a, b, b, 0.3)), X),
    "_foreach_copy_": (written(torch._foreach_copy_), X),
    "_foreach_mul_ of rows": (written(lambda a, b: torch._foreach_mul_([a[0], a[1][0]], [b[1], b[0][1]])), X),
}
SCATTERED = {
    "as_strided_scatter": (lambda x: torch.as_strided_scatter(x, x[0] ** 2, (2,), (2,), 1) ** 2, X),
    "as_strided_scatter into columns": (lambda x: torch.as_strided_scatter(x.mT, x[0] * x[1], (2,), (1,)) ** 2, X),
    "as_strided_scatter into a slice": (lambda x: torch.as_strided_scatter(x[1:], x[:2].mT, (2, 2), (1, 2)) ** 3, X),
}
CASES = VARIANCES | LIMITS | LISTS | SCATTERED


@pytest.mark.parametrize("name", CASES)
def test_differences(name):
    f, x = CASES[name]
    directions = [normal(*x.shape, seed=10 + n) * 0.5 for n in range(2)]
    weight = normal(*f(x).shape, seed=20)

    def loss(x):
        return (f(x) * weight).sum()

    def along(g, v):
        return lambda x: difference(g, (x,), (v,))[0]

    ways = {
        "jvp": lambda g, v: lambda x: jvp(g, (x,), (v,))[1],
        "grad": lambda g, v: lambda x: (grad(g)(x) * v).sum(),
    }
    want = loss
    for order, tolerance in ((1, FIRST), (2, SECOND)):
        want = along(want, directions[order - 1])
        number = want(x)
        for nested in itertools.product(ways, repeat=order):
            got, mapped = loss, lambda xs: vmap(loss)(xs).sum()
            for way, v in zip(nested, directions, strict=False):
                got, mapped = ways[way](got, v), ways[way](mapped, v.expand(2, *v.shape))
            xs = x.expand(2, *x.shape)
            for value in (got(x), vmap(got)(xs)[1], mapped(xs) / 2):
                assert_same(value, number, tolerance)
    for way in (hessian, lambda f: jacfwd(jacrev(f)), lambda f: jacrev(jacfwd(f))):
        square = way(loss)(x).reshape(x.numel(), x.numel())
        assert_same(directions[0].reshape(-1) @ square @ directions[1].reshape(-1), number, SECOND)
