"""What is chosen passes its gradient on, others get zero: none of theirs, where it is infinite or NaN, is NaN."""

import pytest
import torch
from torch.nn import functional as F

from lanewise import hessian, jvp, vjp, vmap

D = torch.float64
INF, NAN = float("inf"), float("nan")
MASK = torch.tensor([[True, False, True], [False, False, True]])
PLACES = torch.tensor([[0, 2, 1], [1, 0, 2]])

XS = torch.randn(4, 2, 3, dtype=D, generator=torch.Generator().manual_seed(3))
TIES = torch.tensor([[1, 1, 0, 0, 1, -1], [0, 0, 0, 0, 0, 0], [-1, 2, 2, 2, -1, 0.5], [0.5, 0.5, -0.5, -0.5, 0.5, 0.5]])
TIES = TIES.to(D).view(4, 2, 3)
INFINITE = XS.masked_fill(torch.arange(24).view(4, 2, 3) % 7 == 0, INF).masked_fill(XS < -1.5, -INF)
MISSING = XS.masked_fill(torch.arange(24).view(4, 2, 3) % 11 == 1, NAN)

OF_ALL = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
}
OTHERS = {
    "max dim": lambda x: x.max(1)[0],
    "min dim": lambda x: x.min(0)[0],
    "median dim": lambda x: x.median(1)[0],
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "kthvalue": lambda x: x.kthvalue(2, 1)[0],
    "mode": lambda x: x.mode(1)[0],
    "cummax": lambda x: x.cummax(1)[0],
    "where": lambda x: torch.where(x > 0, x.sin(), x.cos()),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "masked_scatter": lambda x: x.masked_scatter(MASK, torch.ones(6, dtype=D)),
    "x[mask]": lambda x: x[MASK],
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "relu": lambda x: x.relu(),
    "threshold": lambda x: F.threshold(x, 0.1, 20),
    "max_pool": lambda x: F.max_pool1d(x, 2, 1),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x, 2),
    "gather": lambda x: x.gather(1, PLACES),
    "scatter": lambda x: x.scatter(1, PLACES[:, :1], 5.0),
    "index_put": lambda x: x.index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(3.0, dtype=D)),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([1]), 0.0),
    "maximum": lambda x: torch.maximum(x, torch.zeros(2, 3, dtype=D)),
    "embedding": lambda x: F.embedding(torch.tensor([1, 0, 1]), x, padding_idx=1),
    "nll_loss": lambda x: F.nll_loss(x, torch.tensor([1, 2]), reduction="none"),
    "tril": lambda x: x.tril(),
    "select_scatter": lambda x: x.select_scatter(torch.ones(2, dtype=D), 1, 1),
}


def plain(f, x, cotangent):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, cotangent, materialize_grads=True)[0]


def cotangents(f, xs, value):
    """One for each lane: with the value at one place, in the last lane at all."""
    found = []
    for lane, x in enumerate(xs):
        out = f(x)
        cotangent = 1 + torch.arange(out.numel(), dtype=D).view(out.shape) / 10
        if lane == len(xs) - 1:
            cotangent = torch.full_like(cotangent, value)
        else:
            cotangent.view(-1)[2 * lane % out.numel()] = value
        found.append(cotangent)
    return torch.stack(found)


def check(f, xs, value):
    given = cotangents(f, xs, value)
    want = torch.stack([plain(f, x, c) for x, c in zip(xs, given)])
    for got in (
        vmap(lambda x, c: vjp(f, x)[1](c)[0])(xs, given),
        vjp(vmap(f), xs)[1](given)[0],
        vmap(vmap(lambda x, c: vjp(f, x)[1](c)[0]))(xs[None], given[None])[0],
        vjp(vmap(vmap(f)), xs[None])[1](given[None])[0][0],
    ):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-12, atol=0)
    torch.testing.assert_close(vjp(vmap(f), xs)[0], torch.stack([f(x) for x in xs]), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("value", [INF, NAN, 1.0])
@pytest.mark.parametrize("xs", [XS, TIES, INFINITE, MISSING], ids=["apart", "ties", "infinite", "missing"])
@pytest.mark.parametrize("name", OF_ALL)
def test_of_all(name, xs, value):
    check(OF_ALL[name], xs, value)


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("xs", [XS, TIES], ids=["apart", "ties"])
@pytest.mark.parametrize("name", OTHERS)
def test_others(name, xs, value):
    check(OTHERS[name], xs, value)


@pytest.mark.parametrize("name", OF_ALL)
def test_infinite_tangents_of_others(name):
    """torch's own forward mode multiplies them by zero."""
    f = OF_ALL[name]
    ts = torch.where(XS == torch.stack([f(x) for x in XS])[:, None, None], 3.0, INF).to(D)
    want = torch.full((4,), 3.0, dtype=D)
    torch.testing.assert_close(jvp(vmap(f), (XS,), (ts,))[1], want)
    torch.testing.assert_close(vmap(lambda x, t: jvp(f, (x,), (t,))[1])(XS, ts), want)


@pytest.mark.parametrize("name", OF_ALL)
def test_rows_of_a_jacobian(name):
    f = OF_ALL[name]

    def g(x):
        return f(x.sin()) * x

    want = torch.stack([torch.autograd.functional.hessian(lambda x: g(x).sum(), x) for x in XS])
    torch.testing.assert_close(vmap(hessian(lambda x: g(x).sum()))(XS), want)
