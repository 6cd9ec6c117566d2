"""grad(loss of grad(loss of f)), alone and mapped, against differences of differences."""

import pytest

from lanewise import grad, vmap
from tests.cases import SECOND_DIFFERENCE, Case
from tests.oracles import (
    SECOND,
    Layout,
    along,
    assert_same,
    autograd_grad,
    differentiable,
    directions,
    loop_vmap,
    loss,
    pack,
    second_difference,
    weights,
)


def _twice(case: Case, argnums: tuple[int, ...]):
    once = grad(lambda *xs: loss(case.f(*xs)), argnums=argnums)
    return grad(lambda *xs: loss(once(*xs)), argnums=argnums)


@pytest.mark.parametrize("case", SECOND_DIFFERENCE, ids=str)
def test_grad_grad(case: Case):
    args = case.draw(1, seed=5)[0]
    places, direction = differentiable(args), directions(args)
    got = along(_twice(case, places)(*args), direction)
    first = tuple(weights(args[n]) for n in places)
    want = second_difference(lambda *xs: loss(case.f(*xs)), args, first, direction)[0]
    assert_same(got, want, SECOND)


@pytest.mark.parametrize("case", SECOND_DIFFERENCE, ids=str)
def test_vmap_grad_grad(case: Case):
    lanes = case.draw(2, seed=6)
    layout = Layout(tuple(0 for _ in lanes[0]), 2)
    got = vmap(_twice(case, differentiable(lanes[0])))(*pack(lanes, layout))
    oracle = autograd_grad(autograd_grad(case.f, create_graph=True))
    assert_same(got, loop_vmap(oracle)(*pack(lanes, layout)), case.tol)
