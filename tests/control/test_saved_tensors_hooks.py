"""Saved-tensor hooks where lanes part: they see what is saved in a loop, not which lanes took which way."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lanewise import grad, vmap

XS = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [2.0, -5.0], [0.5, 0.6]], dtype=torch.float64)

pytestmark = pytest.mark.usefixtures("parting")


def branches(x):
    y = x.sin()
    y = y * x if x.sum() > 0 else y.exp()
    return (y * y).sum()


def loops(x):
    s = x[0]
    while s.abs() < 5:
        s = s * 1.7 + x[1].sin()
    return s * s


def writes(x):
    y = x.sin()
    if x[0] > 0:
        y[1] = y[0].exp()
    else:
        y[0] *= x[1]
    return (y * y).sum()


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def half(f):
    def packed(x):
        with saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
            return f(x)

    return packed


@pytest.mark.parametrize("f", [branches, loops, writes], ids=lambda f: f.__name__)
def test_what_is_packed_has_values_of_the_function_alone(f):
    """In half precision no index would be left."""
    want = torch.stack([gradient(half(f), x) for x in XS])
    ways = [
        lambda: vmap(grad(half(f)))(XS),
        lambda: grad(lambda xs: vmap(half(f))(xs).sum())(XS),
        lambda: gradient(vmap(half(f)), XS),
        lambda: gradient(half(vmap(f)), XS),
        lambda: grad(lambda xs: vmap(vmap(half(f)))(xs).sum())(XS.unflatten(0, (2, 2))).flatten(0, 1),
        lambda: vmap(grad(lambda xs: vmap(half(f))(xs).sum()))(XS.unflatten(0, (2, 2))).flatten(0, 1),
    ]
    for way in ways * 2:
        torch.testing.assert_close(way(), want)


def test_the_hooks_see_numbers_with_a_gradient():
    seen = []

    def f(x):
        with saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, lambda t: t):
            return branches(x)

    grad(lambda xs: vmap(f)(xs).sum())(XS)
    assert set(seen) == {torch.float64}
