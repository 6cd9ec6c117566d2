"""Control flow under each transform, against plain torch on one example at a time."""

import torch
from torch.autograd import forward_ad

from lanewise import grad, jvp, vmap

D = torch.float64


def examples(seed=0, lanes=7):
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(lanes, 3, dtype=D, generator=generator) * 1.5
    ks = torch.randint(0, 5, (lanes,), generator=generator)
    return xs, ks


def loop(f, xs, ks):
    return torch.stack([f(x, k) for x, k in zip(xs, ks)])


def scalar(y):
    """A number that feels each entry of a result differently."""
    y = y.reshape(-1)
    return (y * torch.linspace(1.0, 2.0, y.numel(), dtype=y.dtype)).sum()


def with_tangent(f, x, k, t):
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), k))
        return out.primal.clone(), torch.zeros_like(out.primal) if out.tangent is None else out.tangent.clone()


def gradients(f, xs, ks):
    xs = xs.clone().requires_grad_()
    return torch.autograd.grad(sum(scalar(f(x, k)) for x, k in zip(xs, ks)), xs)[0]


def tangents(f, xs, ks, ts):
    return torch.stack([with_tangent(f, x.clone(), k, t)[1] for x, k, t in zip(xs, ks, ts)])


def by_vmap(f, xs, ks):
    return vmap(f)(xs, ks), loop(f, xs, ks)


def by_vmap_grad(f, xs, ks):
    return vmap(grad(lambda x, k: scalar(f(x, k))))(xs, ks), gradients(f, xs, ks)


def by_grad_vmap(f, xs, ks):
    got = grad(lambda xs: sum(scalar(y) for y in vmap(f)(xs, ks)))(xs)
    return got, gradients(f, xs, ks)


def by_autograd(f, xs, ks):
    leaf = xs.clone().requires_grad_()
    got = torch.autograd.grad(sum(scalar(y) for y in vmap(f)(leaf, ks)), leaf)[0]
    return got, gradients(f, xs, ks)


def by_jvp_vmap(f, xs, ks):
    ts = torch.linspace(-1.0, 1.0, xs.numel(), dtype=D).reshape(xs.shape)
    return jvp(lambda xs: vmap(f)(xs, ks), (xs,), (ts,))[1], tangents(f, xs, ks, ts)


def by_vmap_jvp(f, xs, ks):
    ts = torch.linspace(-1.0, 1.0, xs.numel(), dtype=D).reshape(xs.shape)
    return vmap(lambda x, k, t: jvp(lambda x: f(x, k), (x,), (t,))[1])(xs, ks, ts), tangents(f, xs, ks, ts)


def by_vmap_vmap(f, xs, ks):
    got = vmap(vmap(f, in_dims=(None, 0)), in_dims=(0, None))(xs, ks[:4])
    return got, torch.stack([torch.stack([f(x, k) for k in ks[:4]]) for x in xs])


def by_vmap_grad_vmap(f, xs, ks):
    """Gradients inside a vmap, of a vmap whose lanes are parted by values of both."""
    got = vmap(lambda k: grad(lambda xs: sum(scalar(y) for y in vmap(f, in_dims=(0, None))(xs, k)))(xs))(ks[:4])
    return got, torch.stack([gradients(f, xs, k.expand(len(xs))) for k in ks[:4]])


def by_vmap_second(f, xs, ks):
    """Second derivatives in one direction, forward over reverse."""
    ts = torch.linspace(-1.0, 1.0, xs.numel(), dtype=D).reshape(xs.shape)

    def g(x, k):
        return scalar(f(x, k))

    def second(x, k, t):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), t)
            y = g(dual, k)
            if not y.requires_grad:
                return torch.zeros_like(x)
            (first,) = torch.autograd.grad(y, dual, allow_unused=True, materialize_grads=True)
            tangent = forward_ad.unpack_dual(first).tangent
            return torch.zeros_like(x) if tangent is None else tangent.detach().clone()

    got = vmap(lambda x, k, t: jvp(lambda x: grad(g)(x, k), (x,), (t,))[1])(xs, ks, ts)
    return got, torch.stack([second(x, k, t) for x, k, t in zip(xs, ks, ts)])


def by_native_dual(f, xs, ks):
    """Tangents of torch's own around the `vmap`; a parameter that autograd records makes merges recorded, too."""
    one = torch.ones((), dtype=D, requires_grad=True)
    ts = torch.linspace(-1.0, 1.0, xs.numel(), dtype=D).reshape(xs.shape)
    got = with_tangent(lambda xs, ks: vmap(lambda x, k: f(x * one, k) * one)(xs, ks), xs.clone(), ks, ts)[1]
    return got.detach(), tangents(f, xs, ks, ts)


COMPOSITIONS = [
    by_vmap,
    by_vmap_grad,
    by_grad_vmap,
    by_autograd,
    by_jvp_vmap,
    by_vmap_jvp,
    by_vmap_vmap,
    by_native_dual,
]
SECOND = [by_vmap_grad_vmap, by_vmap_second]


def check_as_the_loop(program, composition):
    """Values and dtypes under a composition are those of the loop."""
    got, want = composition(program, *examples())
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
