"""Rows picked out of one table, and zeros that backward formulas fill, against the loop and plain torch.autograd."""

import pytest
import torch

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise._rules.batch import picking

LANES = 64


def _numbers(seed, low, high, *shape):
    return torch.randint(low, high, (LANES, *shape), generator=torch.Generator().manual_seed(seed))


def _normal(*shape, dtype=torch.float64):
    return torch.randn(LANES, *shape, generator=torch.Generator().manual_seed(9), dtype=dtype)


def _slope(loss, x, *rest):
    return torch.autograd.functional.vjp(lambda x: loss(x, *rest), x)[1]


def _curvature(loss, x, *rest):
    return torch.autograd.functional.hessian(lambda x: loss(x, *rest), x)


@pytest.fixture
def taken(monkeypatch):
    """How often rows were picked out of a table."""
    found = []
    places = picking.places_in_table

    def counted(*args):
        out = places(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(picking, "places_in_table", counted)
    return found


PICKS = {
    "rows": (lambda x, i: x[i], _normal(10, 16), _numbers(0, -10, 10, 20)),
    "rows at several ranks": (lambda x, i: x[i], _normal(10, 2, 8), _numbers(0, 0, 10, 5, 4)),
    "elements": (lambda x, i, j: x[i, j], _normal(10, 7), _numbers(0, -10, 10, 300), _numbers(1, -7, 7, 300)),
    "two of three": (lambda x, i, j: x[i, j], _normal(10, 7, 4), _numbers(0, 0, 10, 70), _numbers(1, -7, 7, 1)),
    "two that broadcast": (lambda x, i, j: x[i, j], _normal(9, 7), _numbers(0, 0, 9, 300, 1), _numbers(1, -7, 7, 1, 4)),
    "index_select": (lambda x, i: x.index_select(0, i), _normal(10, 16), _numbers(0, 0, 10, 20)),
    "complex": (lambda x, i: x[i], _normal(10, 16, dtype=torch.complex128), _numbers(0, -10, 10, 20)),
}


@pytest.mark.parametrize("name", PICKS)
def test_picks(name, taken):
    f, *args = PICKS[name]
    for x in (args[0], args[0].to(torch.complex64 if args[0].is_complex() else torch.float32)):
        loop = torch.stack([f(*lane) for lane in zip(x, *args[1:])])
        got = vmap(f)(x, *args[1:])
        assert torch.equal(got, loop) and got.dtype is loop.dtype
        one = vmap(f, (None, *[0] * (len(args) - 1)))(x[3], *args[1:])
        assert torch.equal(one, torch.stack([f(x[3], *lane) for lane in zip(*args[1:])]))
    assert taken == [True] * len(taken) and len(taken) >= (2 if name == "index_select" else 4)


@pytest.mark.parametrize("name", PICKS)
def test_derivatives_of_picks(name, taken):
    f, *args = PICKS[name]
    loss = lambda x, *i: (f(x, *i).abs() ** 3).sum()
    alone = torch.stack([_slope(loss, *lane) for lane in zip(*args)])
    torch.testing.assert_close(vmap(grad(loss))(*args), alone)
    assert any(taken)
    torch.testing.assert_close(grad(lambda x: vmap(loss)(x, *args[1:]).sum())(args[0]), alone)
    if not args[0].is_complex():
        tangent = lambda x, *i: jvp(lambda x: loss(x, *i), (x,), (x.cos(),))[1]
        slopes = (alone * args[0].cos()).flatten(1).sum(1)
        torch.testing.assert_close(vmap(tangent)(*args), slopes)
        torch.testing.assert_close(jvp(lambda x: vmap(loss)(x, *args[1:]), (args[0],), (args[0].cos(),))[1], slopes)


@pytest.mark.parametrize("wrong", [10, -11])
@pytest.mark.parametrize("f", [lambda x, i: x[i], lambda x, i: x.index_select(0, i)], ids=["index", "index_select"])
def test_no_index_reaches_a_neighbouring_lane(f, wrong):
    x, i = _normal(10, 16), _numbers(0, 0, 10, 20)
    i[5, 3] = wrong
    for in_dims in ((0, 0), (None, 0)):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            vmap(f, in_dims)(x if in_dims[0] == 0 else x[0], i)


def test_index_select_takes_no_negative_numbers():
    i = _numbers(0, 0, 10, 20)
    i[5, 3] = -1
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        vmap(lambda x, i: x.index_select(0, i))(_normal(10, 16), i)


FORMULAS = {
    "gather": lambda x, i: x.gather(0, i),
    "index": lambda x, i: x[i[0], i[1]],
    "index_select": lambda x, i: x.index_select(1, i[0]),
    "sort": lambda x, i: x.sort(0)[0] * i[0, 0],
    "sort stable": lambda x, i: torch.sort(x, dim=0, stable=True)[0],
    "topk": lambda x, i: x.topk(2)[0],
    "max": lambda x, i: x.max(0)[0] * x.min(1)[0],
    "middle": lambda x, i: x.median(0)[0] * x.nanmedian(1)[0] * x.kthvalue(2)[0],
    "mode": lambda x, i: x.mode(0)[0],
    "cummax": lambda x, i: x.cummax(0)[0] * x.cummin(1)[0],
    "scatter_reduce": lambda x, i: torch.ones_like(x[0]).scatter_reduce(0, i[1], x[1] ** 2, "amax", include_self=False),
    "scatter_reduce mean": lambda x, i: x.scatter_reduce(0, i, 2 * x[2:], "mean"),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_zeros_that_a_formula_fills(name):
    xs, numbers = _normal(4, 4)[:3], _numbers(0, 0, 4, 2, 4)[:3]
    loss = lambda x, i: (FORMULAS[name](x, i) ** 3).sum()
    wanted = torch.stack([_slope(loss, *lane) for lane in zip(xs, numbers)])
    torch.testing.assert_close(vmap(grad(loss))(xs, numbers), wanted)
    torch.testing.assert_close(vmap(vmap(grad(loss)))(xs[None], numbers[None])[0], wanted)
    curved = torch.stack([_curvature(loss, *lane) for lane in zip(xs, numbers)])
    for second in (hessian, lambda f: jacfwd(jacrev(f)), lambda f: jacrev(jacfwd(f)), lambda f: jacfwd(jacfwd(f))):
        # In forward mode the zeros of a tangent may be the same in all lanes of an inner transform: one cell for all.
        torch.testing.assert_close(vmap(second(loss))(xs, numbers), curved)
    torch.testing.assert_close(jacfwd(jacfwd(lambda x: vmap(loss)(x, numbers).sum()))(xs)[0, :, :, 0], curved[0])
    over = grad(lambda x: vmap(grad(loss))(x, numbers).square().sum())(xs)
    torch.testing.assert_close(over, 2 * torch.einsum("bij,bijkl->bkl", wanted, curved))


def test_a_gradient_taken_twice_through_one_graph():
    def f(x, i):
        x = x.detach().requires_grad_()
        out = x.gather(0, i)
        first = torch.autograd.grad(out[0].sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(out[1].sum(), x)[0]
        return first, second

    xs, numbers = _normal(4, 4), _numbers(0, 0, 4, 2, 4)
    for got, wanted in zip(vmap(f)(xs, numbers), map(torch.stack, zip(*[f(*lane) for lane in zip(xs, numbers)]))):
        assert torch.equal(got, wanted)


def test_zeros_of_the_users_stay_as_they_are():
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, i):
            ctx.save_for_backward(i)
            return x.gather(0, i)

        @staticmethod
        def backward(ctx, slopes):
            (i,) = ctx.saved_tensors
            zeros = slopes.new_zeros(4, 4)
            once = zeros.scatter_add(0, i, slopes)
            return once + zeros.scatter_add(0, i, slopes), None

    xs, numbers = _normal(4, 4), _numbers(0, 0, 4, 2, 4)
    got = vmap(grad(lambda x, i: Gather.apply(x, i).sin().sum()))(xs, numbers)
    torch.testing.assert_close(got, 2 * vmap(grad(lambda x, i: x.gather(0, i).sin().sum()))(xs, numbers))
