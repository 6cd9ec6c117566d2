"""`x.data = y`: the tensor has other values, and the history that it had; views taken before are of what it held."""

import pytest
import torch
import torch.autograd.forward_ad as fwd

from lanewise import grad, jacrev, jvp, vmap

XS = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0]], dtype=torch.float64)


def with_a_view(x):
    y = x * 2
    view = y[:1]
    y.data = x * 5
    return y.sum() + view.sum() * 10


def view_written_to(x):
    y = x * 2
    view = y.view(2)
    y.data = x * 5
    view.add_(1)
    return (y * y).sum() + view.sum() * 10


def written_to(x):
    y = x * 2
    y.data = x * 5
    y.mul_(3)
    return (y * y).sum()


def of_a_view(x):
    y = x * 2
    view = y[:1]
    view.data = x[1:] * 5
    return (y * y).sum() + view.sum() * 10


def by_a_condition(x):
    y = x * 1
    view = y[:1]
    y.data = y.data * 2 if x[0] > 0 else y.data * 3
    return (y * y).sum() + view.sum() * 10


def in_a_branch(x):
    y = x * 3
    if x[0] > 0:
        y.data = x * 5
    return (y * y).sum()


def the_same_in_all_lanes(x):
    y = x * 3
    y.data = torch.tensor([5.0, 7.0], dtype=torch.float64)
    return (y * y).sum()


def made_inside(x):
    y = torch.zeros(2, dtype=torch.float64)
    view = y[:1]
    y.data = x.clone()
    y = y * 2
    return y.sum() + view.sum() * 10 + x.sum()


def views_of_both(x):
    y = torch.zeros(2, dtype=torch.float64)
    before = y[:1]
    y.data = torch.ones(2, dtype=torch.float64)
    after = y[:1]
    after.data.add_(x[0])
    before.data.sub_(x[1])
    return y.sum() + before.sum() * 10 + after.sum() * 100 + x.sum()


def without_grad(x):
    y = x * 2
    with torch.no_grad():
        y.data = x * 5
    return (y * y).sum()


PROGRAMS = [
    with_a_view,
    view_written_to,
    written_to,
    of_a_view,
    by_a_condition,
    in_a_branch,
    the_same_in_all_lanes,
    made_inside,
    views_of_both,
    without_grad,
]


def gradient(run):
    """The gradient as torch's own autograd finds it."""
    xs = XS.clone().requires_grad_()
    return torch.autograd.grad(run(xs).sum(), xs)[0]


def looped(f):
    return lambda xs: torch.stack([f(x) for x in xs])


def tangents(f):
    """The derivatives along ones, as torch's own forward mode finds them."""
    with fwd.dual_level():
        outs = [fwd.unpack_dual(f(fwd.make_dual(x.clone(), torch.ones_like(x)))).tangent for x in XS]
    return torch.stack(outs)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_values(f):
    torch.testing.assert_close(vmap(f)(XS), looped(f)(XS))
    torch.testing.assert_close(vmap(f, chunk_size=2)(XS), looped(f)(XS))
    torch.testing.assert_close(vmap(vmap(f))(XS[None])[0], looped(f)(XS))


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients(f):
    want = gradient(looped(f))
    torch.testing.assert_close(gradient(vmap(f)), want)
    torch.testing.assert_close(vmap(grad(f))(XS), want)
    torch.testing.assert_close(vmap(jacrev(f))(XS), want)
    torch.testing.assert_close(grad(lambda xs: vmap(f)(xs).sum())(XS), want)
    torch.testing.assert_close(grad(lambda xs: vmap(vmap(f))(xs).sum())(XS[None])[0], want)


@pytest.mark.parametrize("f", [f for f in PROGRAMS if f is not view_written_to], ids=lambda f: f.__name__)
def test_tangents(f):
    want = tangents(f)
    torch.testing.assert_close(vmap(lambda x: jvp(f, (x,), (torch.ones_like(x),))[1])(XS), want)
    torch.testing.assert_close(jvp(vmap(f), (XS,), (torch.ones_like(XS),))[1], want)


def kept_before(x):
    """Autograd has kept the leaf: in its backward pass, that holds the new data."""
    y = (x.exp() * x).sum()
    x.data = x.data * 2
    return y + (x * 3).sum()


def kept_by_a_leaf_twice(x):
    y = (x.sin() * x).sum()
    x.data = x.data + 1
    y = y + (x.exp() * x).sum()
    x.data = x.data * x.data
    return y + x.sum()


@pytest.mark.parametrize("f", [kept_before, kept_by_a_leaf_twice])
def test_a_leaf_that_was_used_is_given_data(f):
    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    want = torch.stack([slope(x) for x in XS])
    for _ in range(3):
        torch.testing.assert_close(vmap(grad(f))(XS), want)
        torch.testing.assert_close(vmap(vmap(grad(f)))(XS[None])[0], want)
        torch.testing.assert_close(vmap(lambda x, k: grad(f)(x) * k, (None, 0))(XS[0], torch.ones(2))[1], want[0])
