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
    "a product": lambda x: x[:2].addcmul_(x[1:3], x[4:6]),
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


def in_a_branch(write):
    def f(x):
        y = x * 1
        if x[0] > 0:
            write(y)
        return y

    return f


XS = torch.rand(4, 10, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]


@pytest.fixture
def no_loop():
    """Lanes that part run together also where a loop over them may be the quickest."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_the_lanes_of_a_branch(name):
    f = in_a_branch(REFUSED[name])
    for run in (lambda: vmap(f)(XS), lambda: vmap(vmap(f))(XS.unflatten(0, (2, 2)))):
        with pytest.raises(RuntimeError, match=SHARED) as refused:
            run()
        assert refused.value.lanes in ([0, 2], [(0, 0), (1, 0)])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_in_the_lanes_of_a_branch(name):
    f = in_a_branch(ALLOWED[name])
    want = torch.stack([f(x) for x in XS])
    assert_same(vmap(f)(XS), want)
    assert_same(vmap(vmap(f))(XS.unflatten(0, (2, 2))).flatten(0, 1), want)


# Writes to elements that all lie in one place: torch fills them, and refuses the rest.
FILLING = {
    "fill_": lambda y: y.fill_(2),
    "zero_": lambda y: y.zero_(),
    "an element": lambda y: y.__setitem__(0, 2.0),
}
ADDING = {"add_": lambda y: y.add_(1), "copy_": lambda y: y.copy_(torch.ones(3)), "sin_": lambda y: y.sin_()}


def expanded(write):
    def f(x):
        y = (x[:1] * 1).expand(3)
        if x[0] > 0:
            write(y)
        return y * 2

    return f


@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize("name", FILLING)
def test_expanded_memory_is_filled_in_the_lanes_of_a_branch(name):
    f = expanded(FILLING[name])
    want = torch.stack([f(x) for x in XS])
    assert_same(vmap(f)(XS), want)
    assert_same(vmap(vmap(f))(XS.unflatten(0, (2, 2))).flatten(0, 1), want)


@pytest.mark.usefixtures("no_loop")
@pytest.mark.parametrize("name", ADDING)
def test_expanded_memory_is_not_written_to_otherwise(name):
    f = expanded(ADDING[name])
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        f(XS[0])
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        vmap(f)(XS)
