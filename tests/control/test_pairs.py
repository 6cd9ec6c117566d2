"""Lanes that part in a `vmap` inside another, where an argument has the lanes of one of the two only."""

import itertools

import pytest
import torch

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from tests.oracles import assert_same


def branch(w, t):
    return (w**3).sum() * t.sum() if t.sum() > 0.2 else (w.sin() * t).sum()


def other_branch(w, t):
    return (w**3).sum() + t.sum() if w.sum() > 0.2 else (w.sin() * t).sum()


def steps(w, t):
    out = w * t
    for _ in range(int(t[0].abs() * 3)):
        out = out * w + t
    return out.sum()


def until(w, t):
    n = 0
    while (w * t).norm() > 0.5 and n < 20:
        t, n = t * 0.7, n + 1
    return (w * w * t).sum()


def picked(w, t):
    return (w[t > 0] ** 3).sum() + (t[w > 0] * w.sum()).sum()


def item(w, t):
    return (w * w).sum() * t.sum().item()


PROGRAMS = [branch, other_branch, steps, until, picked, item]
TRANSFORMS = {
    "grad": lambda f: grad(f),
    "grad of the second": lambda f: grad(f, argnums=1),
    "vjp": lambda f: lambda w, t: vjp(lambda w: f(w, t), w)[1](torch.ones((), dtype=w.dtype))[0],
    "both": lambda f: lambda w, t: torch.cat(grad(f, argnums=(0, 1))(w, t)),
    "jacrev": lambda f: jacrev(f),
    "jacfwd": lambda f: jacfwd(f),
    "jvp": lambda f: lambda w, t: jvp(lambda w: f(w, t), (w,), (t.cos(),))[1],
    "hessian": lambda f: hessian(f),
    "forward over reverse": lambda f: jacfwd(grad(f)),
    "reverse over forward": lambda f: grad(lambda w, t: jvp(lambda w: f(w, t), (w,), (w.detach(),))[1]),
    "grad of grad": lambda f: grad(lambda w, t: grad(f)(w, t).square().sum()),
    "value": lambda f: f,
    "torch inside": lambda f: lambda w, t: torch.autograd.grad(f(w.requires_grad_(), t), w)[0],
}
# Where the lanes of w and t are: in the inner or the outer vmap, or in both.
INNER = [(None, 0), (0, None), (0, 0)]
OUTER = [(None, 0), (0, None), (0, 0)]


def _arguments(inner, outer):
    g = torch.Generator().manual_seed(1)
    out = []
    for k in range(2):
        shape = [4 for dims in (outer, inner) if dims[k] is not None]
        out.append(torch.randn(*shape, 3, generator=g, dtype=torch.float64))
    return out


def _each(f, inner, outer, w, t):
    """What f gives for all pairs of lanes."""

    def pick(x, dim, i):
        return x if dim is None else x[i]

    for i in range(4):
        for j in range(4):
            yield f(*[pick(pick(x, outer[k], i), inner[k], j) for k, x in enumerate((w, t))])


LAYOUTS = [pair for pair in itertools.product(INNER, OUTER) if pair != ((0, 0), (0, 0))]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_inside(name, f):
    g = TRANSFORMS[name](f)
    for inner, outer in LAYOUTS:
        w, t = _arguments(inner, outer)
        want = torch.stack([*_each(lambda w, t: g(w.clone(), t), inner, outer, w, t)]).detach()
        got = vmap(vmap(g, in_dims=inner), in_dims=outer)(w.clone(), t).detach()
        assert_same(got.flatten(0, 1), want)


def _around(f, inner, outer):
    return lambda w, t: vmap(vmap(f, in_dims=inner), in_dims=outer)(w, t).sum()


def _between(f, inner, outer):
    return vmap(lambda w, t: grad(lambda w: vmap(f, in_dims=inner)(w, t).sum())(w), in_dims=outer)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_derivatives_around(f):
    for inner, outer in LAYOUTS:
        w, t = _arguments(inner, outer)
        leaves = [w.clone().requires_grad_(), t.clone().requires_grad_()]
        total = sum(_each(f, inner, outer, *leaves))
        want = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        assert_same(grad(_around(f, inner, outer), argnums=(0, 1))(w, t), want)
        between = _between(f, inner, outer)(w, t)
        assert_same(between.sum(0) if outer[0] is None else between, want[0])
