"""Higher derivatives of operations whose formulas in torch are wrong, against the same thing written out."""

import pytest
import torch
import torch.nn.functional as F

import lanewise as lw
from lanewise._core.level import standing
from lanewise._torch_compat import ORDER_KEY, tls_is_included

D = torch.float64
A, B, C, V = (torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(i)) for i in range(4))
G, W, S = V[:, :1] + 2, V[0] + 2, V[1]


def written_out(x, dims, weight=None, bias=None):
    out = (x - x.mean(dims, keepdim=True)) / (x.var(dims, unbiased=False, keepdim=True) + 1e-5).sqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


PAIRS = {
    "layer_norm": (lambda x: F.layer_norm(x, [3]), lambda x: written_out(x, 1)),
    "layer_norm, affine": (lambda x: F.layer_norm(x, [3], W, S), lambda x: written_out(x, 1, W, S)),
    "layer_norm, two dims": (lambda x: F.layer_norm(x, [4, 3]), lambda x: written_out(x, (0, 1))),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, W, S, True), lambda x: written_out(x, 0, W, S)),
    "batch_norm, 3 dims": (
        lambda x: F.batch_norm(x.reshape(2, 2, 3), None, None, training=True).reshape(4, 3),
        lambda x: written_out(x.reshape(2, 2, 3), (0, 2)).reshape(4, 3),
    ),
    "instance_norm": (lambda x: F.instance_norm(x[None])[0], lambda x: written_out(x, 1)),
    "group_norm": (lambda x: F.group_norm(x, 1), lambda x: written_out(x, 1)),
    "rms_norm": (
        lambda x: F.rms_norm(x, [3], eps=1e-5),
        lambda x: x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt(),
    ),
    "weight_norm": (lambda x: torch._weight_norm(x, G, 0), lambda x: x * G / x.norm(dim=1, keepdim=True)),
    "weight_norm of all": (lambda x: torch._weight_norm(x, G[0], -1), lambda x: x * G[0] / x.norm()),
    "weight_norm of columns": (
        lambda x: torch._weight_norm(x, G[:3].T, 1),
        lambda x: x * G[:3].T / x.norm(dim=0, keepdim=True),
    ),
}


def along(g):
    """A function of one number."""
    return lambda s: (g(A + s * B + s * s * C) * C).sum()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_nested_gradients(name, order):
    ours, f = (along(g) for g in PAIRS[name])
    s = torch.tensor(0.3, dtype=D)
    t = s.clone().requires_grad_()
    want = f(t)
    for _ in range(order):
        (want,) = torch.autograd.grad(want, t, create_graph=True)
        ours = lw.grad(ours)
    torch.testing.assert_close(ours(s), want.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", PAIRS)
def test_under_vmap_and_in_hessians(name):
    g, f = PAIRS[name]
    x = torch.stack([A, B])
    loss = lambda g: lambda x: (g(x) * C).sum()
    torch.testing.assert_close(lw.vmap(lw.hessian(loss(g)))(x), torch.stack([lw.hessian(loss(f))(a) for a in x]))
    torch.testing.assert_close(lw.jacrev(lw.hessian(loss(g)))(A), lw.jacrev(lw.hessian(loss(f)))(A))
    torch.testing.assert_close(lw.vmap(lw.jacfwd(lw.jacfwd(loss(g))))(x), lw.vmap(lw.hessian(loss(f)))(x))


SERIES = {  # each with its derivatives at 0
    "sinc": (torch.sinc, [1, 0, -(torch.pi**2) / 3, 0, torch.pi**4 / 5]),
    "i0": (torch.i0, [1, 0, 1 / 2, 0, 3 / 8]),
    "i1": (torch.special.i1, [0, 1 / 2, 0, 3 / 8, 0]),
}


@pytest.mark.parametrize("name", SERIES)
def test_derivatives_of_quotients_at_zero(name):
    f, derivatives = SERIES[name]
    xs = torch.tensor([0.0, 1e-4, 0.2499, 0.2501, -0.9999, 1.0001, -3.0], dtype=D)
    for transforms in ([lw.grad] * 4, [lw.jacfwd] * 4, [lw.jacrev, lw.jacfwd] * 2, [lw.jacfwd, lw.grad] * 2):
        g = f
        for order, derivative in enumerate(derivatives):
            if order:
                before, g = g, transforms[order - 1](g)
                slope = (lw.vmap(before)(xs[1:] + 1e-5) - lw.vmap(before)(xs[1:] - 1e-5)) / 2e-5
                torch.testing.assert_close(lw.vmap(g)(xs)[1:], slope, rtol=1e-6, atol=1e-6)
            value = lw.vmap(g)(xs)[0]
            torch.testing.assert_close(value, torch.tensor(derivative, dtype=D), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(g(xs[0]), value)
    torch.testing.assert_close(lw.vmap(f)(xs), f(xs))
    torch.testing.assert_close(lw.jvp(f, (xs,), (xs.cos(),))[0], f(xs))


def test_a_gradient_penalty_through_weight_norm():
    def penalty(g, v):
        return lw.grad(lambda x: torch.tanh(g(v) @ x).sum())(B[0]).square().sum()

    v = A.clone().requires_grad_()
    got, want = (torch.autograd.grad(penalty(g, v), v)[0] for g in PAIRS["weight_norm"])
    torch.testing.assert_close(got, want)


def test_running_statistics_are_written_once():
    mean, var = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    want_mean, want_var = mean.clone(), var.clone()
    F.batch_norm(A, want_mean, want_var, training=True)
    lw.grad(lw.grad(lambda s: F.batch_norm(A * s, mean, var, training=True).pow(3).sum()))(torch.tensor(1.0, dtype=D))
    torch.testing.assert_close(mean, want_mean)
    torch.testing.assert_close(var, want_var)


def test_half_precision_is_computed_in_single():
    x = A.bfloat16()
    f = lambda x: F.layer_norm(x, [3], W.bfloat16(), S.bfloat16())
    got = lw.grad(lambda x: lw.grad_and_value(lambda y: f(y).float().sum())(x)[1])
    assert got(x).dtype is torch.bfloat16
    seen = []
    lw.grad(lw.grad(lambda s: seen.append(f(x * s)) or seen[-1].float().sum()))(torch.tensor(1.0))
    torch.testing.assert_close(seen[0].detach(), f(x))


def test_the_key_is_off_outside(monkeypatch):
    calls = []
    monkeypatch.setattr(standing, "orders", 0)
    with pytest.raises(ZeroDivisionError):
        lw.grad(lw.grad(lambda s: calls.append(standing.orders) or 1 / 0))(torch.tensor(1.0))
    assert calls == [2] and standing.orders == 0
    assert not tls_is_included(ORDER_KEY)
