"""Hooks of gradients that are set on a tensor after it has been used see the gradient of all its uses, as in a loop."""

import pytest
import torch
from torch.autograd import forward_ad

from lanewise import grad, jacfwd, jvp, linearize, vmap

XS = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).view(4, 3)
W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def argument(x, w):
    y = x.sin()
    x.register_hook(lambda g: g * g + 1)
    return y + x * x * w


def argument_first(x, w):
    x.register_hook(lambda g: g * g + 1)
    return x.sin() + x * x * w


def of_captured(x, w):
    z = w.exp()
    y = z * x
    z.register_hook(lambda g: g * g)
    return y + z * x * x


def view_of_captured(x, w):
    z = w.exp()[:2]
    y = z * x[:2]
    z.register_hook(lambda g: g * g)
    return y.sum() + x * w


def through_a_view(x, w):
    y = x[:2].sin()
    x.register_hook(lambda g: g * g)
    return y.sum() + x * x * w


def in_a_branch(x, w):
    y = x.sin() * w
    if x.sum() > 1:
        y = y * x
        x.register_hook(lambda g: g * g + 1)
    return y + x * w


def before_a_branch(x, w):
    y = x.sin() * w
    x.register_hook(lambda g: g * g + 1)
    return [y * x, y + x * w][int(x.sum() > 1)]


def removed(x, w):
    y = x.sin()
    x.register_hook(lambda g: g * 10).remove()
    return y + x * x * w


def several(x, w):
    z = w * 2
    u = z * x
    x.register_hook(lambda g: g * 10)
    z.register_hook(lambda g: g.sum() * g)
    return u + z + x


FUNCTIONS = [
    argument,
    argument_first,
    of_captured,
    view_of_captured,
    through_a_view,
    in_a_branch,
    before_a_branch,
    removed,
    several,
]


def looped(f):
    return lambda xs, w: torch.stack([f(x, w) for x in xs])


MAPPED = {
    "vmap": lambda f: vmap(f, (0, None)),
    "chunks": lambda f: vmap(f, (0, None), chunk_size=3),
    "last dim": lambda f: lambda xs, w: vmap(f, (1, None))(xs.T, w),
    "two vmaps": lambda f: lambda xs, w: vmap(vmap(f, (0, None)), (0, None))(xs.unflatten(0, (2, 2)), w).flatten(0, 1),
}


def gradients(run):
    """Of what is used outside, too: no hook sees that."""
    xs, w = XS.clone().requires_grad_(), W.clone().requires_grad_()
    a, b = xs * 1, w * 1
    out = run(a, b)
    return out.detach(), *torch.autograd.grad(out.sin().sum() + (a * a).sum() + (b * b).sum(), (xs, w))


@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_of_all_uses(f, mapped):
    for _ in range(2):  # a function that was seen to do so is ready for it
        for got, want in zip(gradients(mapped(f)), gradients(looped(f)), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_grad_of_vmap(f):
    got = grad(lambda xs, w: vmap(f, (0, None))(xs, w).sin().sum(), (0, 1))(XS, W)
    xs, w = XS.clone().requires_grad_(), W.clone().requires_grad_()
    want = torch.autograd.grad(looped(f)(xs, w).sin().sum(), (xs, w))
    for g, each in zip(got, want, strict=True):
        torch.testing.assert_close(g, each)


def computed(x):
    y = x.sin()
    z = y * 2
    y.register_hook(lambda g: g * 10)
    return z + y * y


@pytest.mark.parametrize("f", [computed, lambda x: argument(x, W)], ids=["computed", "argument"])
def test_in_grad_of_forward_mode(f):
    x, t = XS[0], XS[1]
    leaf = x.clone().requires_grad_()
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(leaf, t)))
        wants = [torch.autograd.grad(part.sum(), leaf, retain_graph=True)[0] for part in (out, tangent)]
    for place, want in enumerate(wants):
        torch.testing.assert_close(grad(lambda x, place=place: jvp(f, (x,), (t,))[place].sum())(x), want)
    torch.testing.assert_close(grad(lambda x: linearize(f, x)[0].sum())(x), wants[0])
    torch.testing.assert_close(grad(lambda x: linearize(f, x)[1](t).sum())(x), wants[1])
    torch.testing.assert_close(grad(lambda x: (jacfwd(f)(x) @ t).sum())(x), wants[1])
