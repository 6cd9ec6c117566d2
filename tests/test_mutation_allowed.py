"""`allow_mutation_on_saved_tensors` inside transforms and around them."""

import pytest
import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors as allowed

from lanewise import grad, jacrev, jvp, linearize, vjp, vmap
from tests.oracles import assert_same

D = torch.float64
XS = torch.tensor([[0.5, 1.0], [2.0, 3.0], [0.1, -1.0]], dtype=D)


def writes(x):
    """What is saved for its backward is written to."""
    y = x * 1
    z = y.sin()
    y.mul_(2)
    w = y.exp()
    y.add_(w)
    u = y[:1].cos()
    y.zero_()
    return (z * w).sum() + u.sum()


def written_out(x):
    w = (2 * x).exp()
    return (x.sin() * w).sum() + (2 * x + w)[0].cos()


def slope(f):
    def run(x):
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return run


def differentiates(x):
    with allowed():
        x = x.clone().requires_grad_()
        return torch.autograd.grad(writes(x), x)[0]


def differentiates_twice(x):
    with allowed():
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(writes(x), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]


def parts(x):
    with allowed():
        x = x.clone().requires_grad_()
        y = writes(x) * 2 if x[0] > 1 else writes(x * 3)
        return torch.autograd.grad(y, x)[0]


def parts_written_out(x):
    return written_out(x) * 2 if x[0] > 1 else written_out(x * 3)


SLOPES = torch.stack([slope(written_out)(x) for x in XS])
BENT = torch.stack([torch.autograd.functional.hessian(written_out, x) @ x for x in XS])
CURVES = torch.stack([torch.autograd.functional.hessian(written_out, x).sum(0) for x in XS])
INSIDE = {
    "vmap": (lambda: vmap(differentiates)(XS), SLOPES),
    "vmap in chunks": (lambda: vmap(differentiates, chunk_size=2)(XS), SLOPES),
    "vmap(vmap)": (lambda: vmap(vmap(differentiates))(XS[None])[0], SLOPES),
    "jvp": (lambda: jvp(vmap(differentiates), (XS,), (XS,)), (SLOPES, BENT)),
    "vmap(jvp)": (lambda: vmap(lambda x: jvp(differentiates, (x,), (x,)))(XS), (SLOPES, BENT)),
    "linearize": (lambda: linearize(vmap(differentiates), XS)[1](XS), BENT),
    "twice": (lambda: vmap(differentiates_twice)(XS), CURVES),
    "where lanes part": (lambda: vmap(parts)(XS), torch.stack([slope(parts_written_out)(x) for x in XS])),
}
AROUND = {
    "vmap(grad)": (lambda: vmap(grad(writes))(XS), SLOPES),
    "grad(vmap)": (lambda: grad(lambda xs: vmap(writes)(xs).sum())(XS), SLOPES),
    "backward": (lambda: slope(lambda xs: vmap(writes)(xs).sum())(XS), SLOPES),
    "vmap(jacrev)": (lambda: vmap(jacrev(writes))(XS), SLOPES),
    "vjp(vmap)": (lambda: vjp(vmap(writes), XS)[1](torch.ones(3, dtype=D))[0], SLOPES),
    "grad(vmap(vmap))": (lambda: grad(lambda xs: vmap(vmap(writes))(xs[None]).sum())(XS), SLOPES),
    "vmap(grad(vmap))": (lambda: vmap(grad(lambda xs: vmap(writes)(xs).sum()))(XS[None])[0], SLOPES),
    "vmap(grad(grad))": (lambda: vmap(grad(lambda x: grad(writes)(x).sum()))(XS), CURVES),
    "jvp(vmap(grad))": (lambda: jvp(vmap(grad(writes)), (XS,), (XS,)), (SLOPES, BENT)),
    "vmap(grad(jvp))": (lambda: vmap(grad(lambda x: jvp(writes, (x,), (torch.ones_like(x),))[1]))(XS), CURVES),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name):
    run, want = INSIDE[name]
    assert_same(run(), want)


@pytest.mark.parametrize("name", AROUND)
def test_around(name):
    run, want = AROUND[name]
    with allowed():
        got = run()
    assert_same(got, want)


@pytest.mark.parametrize("dim", [0, 1])
def test_lanes_write_to_what_is_saved_outside(dim):
    x = XS.clone().requires_grad_()
    with allowed():
        y = x * 1
        out = y.sin().sum()
        vmap(lambda lane: lane.mul_(2), in_dims=dim)(y)
        (got,) = torch.autograd.grad(out + y.sum(), x)
    assert_same(got, XS.cos() + 2)


def test_backward_has_to_be_in_the_context_too():
    x = XS.clone().requires_grad_()
    with allowed():
        out = vmap(writes)(x)
    with pytest.raises(AssertionError, match="outside of the 'allow_mutation_on_saved_tensors' context"):
        out.sum().backward()
