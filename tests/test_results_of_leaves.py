"""Results that hang on leaves made inside alone: they require grad as those of a loop do, and end nowhere outside."""

import pytest
import torch
from torch import nn

from lanewise import functionalize, grad, jacfwd, jacrev, jvp, linearize, vmap
from tests.oracles import assert_same

XS = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def leaf():
    return nn.Parameter(torch.full((), 3.0, dtype=torch.float64))


def a_product(x):
    return leaf() * x


def the_leaf(x):
    return leaf()


def lanes_as_a_leaf(x):
    return x.detach().clone().requires_grad_()


def some(x):
    p = leaf()
    return p * x, x * 2, (p * x).detach(), p.detach() * x, {"p": p + x}


def in_a_branch(x):
    return leaf() * x if x > 0 else x * 2


def in_all_branches(x):
    p = leaf()
    return p * x if x > 0 else p - x


def a_gradient(x):
    p = leaf()
    return torch.autograd.grad(p**3 * x, p, create_graph=True)[0]


def a_module(x):
    torch.manual_seed(0)
    return nn.Linear(2, 3, dtype=torch.float64)(x.expand(2))


def without_grad(x):
    with torch.no_grad():
        return leaf() * x


def negative_zero(x):
    return leaf() * x * -0.0


FUNCTIONS = [
    a_product,
    the_leaf,
    lanes_as_a_leaf,
    some,
    in_a_branch,
    in_all_branches,
    a_gradient,
    a_module,
    without_grad,
    negative_zero,
]


def flat(out):
    if isinstance(out, torch.Tensor):
        return [out]
    return [leaf for part in (out.values() if isinstance(out, dict) else out) for leaf in flat(part)]


def each(f, *lists):
    rows = [flat(f(*row)) for row in zip(*lists, strict=True)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def check(got, want):
    assert_same(flat(got), want, grad=True)
    for one in flat(got):
        assert (one.grad_fn is not None) == one.requires_grad
        if one.requires_grad:
            one.sum().backward()
            out = torch.autograd.grad(one.sum(), XS.clone().requires_grad_(), allow_unused=True)
            assert out == (None,)
            if all(one.stride()):
                one += 1


@pytest.mark.parametrize("f", FUNCTIONS)
def test_as_a_loop(f):
    for _ in range(2):
        check(vmap(f, randomness="same")(XS), each(f, XS))
        check(vmap(f, chunk_size=2, randomness="same")(XS), each(f, XS))
        want = [torch.stack([each(f, XS)[k]] * 2) for k in range(len(each(f, XS)))]
        check(vmap(vmap(f, randomness="same"), randomness="same")(torch.stack([XS, XS])), want)
        got = vmap(f, out_dims="list", randomness="same")(XS)
        for out, x in zip(got, XS, strict=True):
            for one, other in zip(flat(out), flat(f(x)), strict=True):
                assert f is in_a_branch or one.requires_grad == other.requires_grad


@pytest.mark.parametrize("f", [a_product, in_all_branches])
def test_what_has_a_history_keeps_it(f):
    xs = XS.clone().requires_grad_()
    out = vmap(f)(xs)
    assert type(out.grad_fn).__name__ != "SubBackward0" or f is in_all_branches
    (got,) = torch.autograd.grad(out.sum(), xs)
    assert_same(got, torch.where(XS > 0, 3.0, 3.0 if f is a_product else -1.0).to(XS))


def test_of_other_transforms():
    x = XS[0]
    for out in (
        jvp(a_product, (x,), (x,)),
        jvp(lambda x: (a_product(x), a_product(x)), (x,), (x,), has_aux=True),
        linearize(a_product, x)[:1],
        [functionalize(a_product)(x)],
        [grad(a_product)(x), jacrev(a_product)(x), jacfwd(a_product)(x)],
        [vmap(grad(a_product))(XS), vmap(jacfwd(a_product))(XS)],
        vmap(lambda x: jvp(a_product, (x,), (x,)))(XS),
        jvp(vmap(a_product), (XS,), (XS,)),
    ):
        for one in out:
            assert one.requires_grad
            one.sum().backward()
    for out in jvp(torch.sin, (x,), (x,)):
        assert not out.requires_grad
