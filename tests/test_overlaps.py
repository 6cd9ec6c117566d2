"""Writes to memory of which another operand reads a part: refused as outside, where the result hangs on the order."""

import pytest
import torch

from lanewise import grad, jvp, vmap
from tests.oracles import assert_same

SHARED = "Please clone\\(\\) the tensor before performing the operation"


def square(x):
    return x[:9].view(3, 3)


REFUSED = {
    "shift": lambda x: x[1:].copy_(x[:-1]),
    "shift in brackets": lambda x: x.__setitem__(slice(1, None), x[:-1]),
    "sum": lambda x: x[1:].add_(x[:-1]),
    "by an element": lambda x: x.div_(x[0]),
    "by the last element": lambda x: x.sub_(x[-1]),
    "by a row": lambda x: square(x).sub_(square(x)[0]),
    "transposed": lambda x: square(x).add_(square(x).t()),
    "in a list": lambda x: torch._foreach_mul_([x[1:]], [x[:-1]]),
    "at indices": lambda x: x.index_put_((torch.tensor([2]),), x[0]),
    "scattered": lambda x: x.scatter_(0, torch.tensor([2, 3]), x[1:]),
    "added at indices": lambda x: x.index_add_(0, torch.tensor([2, 3]), x[1:3]),
}
ALLOWED = {
    "itself": lambda x: x.mul_(x),
    "apart": lambda x: x[:5].copy_(x[5:]),
    "one row by another": lambda x: square(x)[1].sub_(square(x)[0]),
    "a copy": lambda x: x[1:].copy_(x[:-1].clone()),
    "what is reduced": lambda x: x.div_(x.max()),
    "filled": lambda x: x.fill_(x[0]),
    "filled in brackets": lambda x: x.__setitem__(slice(1, None), x[0]),
    "filled where": lambda x: x.masked_fill_(x > 0.5, x[0]),
}


def function(write):
    def f(x):
        y = x * 1
        write(y)
        return y

    return f


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_outside(name):
    f = function(REFUSED[name])
    xs = torch.rand(2, 10)
    with pytest.raises(RuntimeError, match=SHARED):
        f(xs[0])
    for run in (
        lambda: vmap(f)(xs),
        lambda: vmap(f, in_dims=1)(xs.t().contiguous()),
        lambda: vmap(vmap(f))(xs[None]),
        lambda: vmap(grad(lambda x: f(x).sum()))(xs),
        lambda: vmap(f)(xs.clone().requires_grad_()),
        lambda: vmap(lambda x: REFUSED[name](x))(xs.clone()),
    ):
        with pytest.raises(RuntimeError, match=SHARED):
            run()


@pytest.mark.parametrize("name", ["shift", "shift in brackets"])
def test_refused_below_a_jvp(name):
    f = function(REFUSED[name])
    xs = torch.rand(2, 10)
    for run in (lambda: jvp(vmap(f), (xs,), (xs,)), lambda: vmap(lambda x: jvp(f, (x,), (x,)))(xs)):
        with pytest.raises(RuntimeError, match=SHARED):
            run()


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_as_outside(name):
    f = function(ALLOWED[name])
    xs = torch.rand(2, 3, 10)
    want = torch.stack([torch.stack([f(x) for x in row]) for row in xs])
    assert_same(vmap(vmap(f))(xs), want)
    assert_same(vmap(f)(xs[0]), want[0])
    assert_same(vmap(f, in_dims=1)(xs[0].t().contiguous()), want[0])
