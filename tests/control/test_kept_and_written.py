"""`y += ...` to what autograd has kept for the backward pass raises there, as in a loop, however the function runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lanewise import grad, vmap

CALLS = 4
X = torch.linspace(0.2, 0.9, 4, dtype=torch.float64)


def of_its_result(x: Tensor) -> Tensor:
    y = x.exp()
    y += 1
    return y


def of_an_operand(x: Tensor) -> Tensor:
    y = x * 2
    z = y.sin()
    y -= x
    return z + y


def by_itself(x: Tensor) -> Tensor:
    y = x * 1
    y *= y
    return y


def of_the_number_added(x: Tensor) -> Tensor:
    y = x * 2
    y += y * y
    return y


def in_a_branch(x: Tensor) -> Tensor:
    y = x.exp()
    if x > 0.5:
        y += 1
    return y


def in_a_loop(x: Tensor) -> Tensor:
    y = x * 1
    while y < 3:
        y += y.sin() + 1
    return y


def after_a_branch(x: Tensor) -> Tensor:
    y = x.sigmoid()
    if x > 0.5:
        return y
    y -= x
    return y


def in_a_branch_of_no_lane(x: Tensor) -> Tensor:
    y = x.exp()
    if x > 0.5:
        y = y * 2
        if x < 0:
            y += 1
    return y


def of_the_operand_written(x: Tensor) -> Tensor:
    y = x * 2
    y *= x
    y /= 3
    return y


def of_what_was_returned(x: Tensor) -> Tensor:
    total = x * 0
    while x < 2:
        x = x * 2
        total += x.sin()
    return total


REFUSED = [of_its_result, of_an_operand, by_itself, of_the_number_added, in_a_branch, in_a_loop, after_a_branch]
TAKEN = [in_a_branch_of_no_lane, of_the_operand_written, of_what_was_returned]


def outside(run: Callable, f: Callable) -> Tensor:
    x = X.clone().requires_grad_()
    run(f, x).sum().backward()
    assert x.grad is not None
    return x.grad


def slope(f: Callable) -> Callable:
    def one(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return one


def loop(f: Callable, xs: Tensor) -> Tensor:
    return torch.stack([f(x) for x in xs])


@pytest.mark.parametrize("f", REFUSED)
def test_what_a_loop_refuses_is_refused_in_each_call(f: Callable) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside(loop, f)
    for _ in range(CALLS):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outside(lambda f, x: vmap(f)(x), f)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            vmap(grad(f))(X)
        torch.testing.assert_close(vmap(f)(X), loop(f, X))


@pytest.mark.parametrize("f", TAKEN)
def test_what_a_loop_takes_is_taken(f: Callable) -> None:
    for _ in range(CALLS):
        torch.testing.assert_close(outside(lambda f, x: vmap(f)(x), f), outside(loop, f))
        torch.testing.assert_close(vmap(grad(f))(X), loop(slope(f), X))
