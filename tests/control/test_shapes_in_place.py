"""`x.t_()` and its like where lanes part: a tensor has one shape for all its lanes, and runs again as it was."""

import pytest
import torch

from lanewise import grad, vmap

F64 = torch.float64


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)


def argument(x):
    if x.sum() > 0:
        x.t_()
    return x * 1


def made_inside(x):
    y = x * 2
    if x.sum() > 0:
        y.transpose_(0, 1)
    return y


def before_the_branch(x):
    x.t_()
    return x[0] * 2 if x.sum() > 0 else x[0]


def another_rank(x):
    x.unsqueeze_(0)
    if x.sum() > 0:
        x = x * 2
    return x


def back_in_one_branch(x):
    y = x * 1
    y.unsqueeze_(0)
    if x.sum() > 0:
        y.squeeze_(0)
        return y * 2
    return y[0]


def a_view(x):
    row = x[:1]
    if x.sum() > 0:
        row.t_()
    return row.reshape(2) + row.sum(0).sum()


def same_in_all(x):
    y = torch.arange(4, dtype=F64).view(2, 2)
    if x.sum() > 0:
        y.t_()
    return x @ y


def used_before(x):
    if x.sum() > 0:
        y = x + 1
        x.t_()
        return x * y
    return x


def returned(x):
    x.t_()
    if x.sum() > 0:
        x.t_()
    return x


def in_what_is_called(x):
    def scaled(y):
        y.t_()
        return float(y.sum()) * y

    return scaled(x) + scaled(x * 1)


FUNCTIONS = [
    argument,
    made_inside,
    before_the_branch,
    another_rank,
    back_in_one_branch,
    a_view,
    same_in_all,
    used_before,
    returned,
    in_what_is_called,
]


@pytest.fixture
def xs():
    return torch.randn(5, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("f", FUNCTIONS)
def test_values(f, xs):
    out = vmap(f)(xs.clone())
    torch.testing.assert_close(out, torch.stack([f(x.clone()) for x in xs]), rtol=0, atol=0)


@pytest.mark.parametrize("f", [f for f in FUNCTIONS if f is not in_what_is_called])
def test_derivatives(f, xs):
    def loss(x):
        return (f(x * 1) ** 3).sum()

    want = []
    for x in xs:
        leaf = x.clone().requires_grad_()
        want.append(torch.autograd.grad(loss(leaf), leaf)[0])
    torch.testing.assert_close(vmap(grad(loss))(xs), torch.stack(want))
    torch.testing.assert_close(grad(lambda xs: vmap(loss)(xs).sum())(xs), torch.stack(want))
