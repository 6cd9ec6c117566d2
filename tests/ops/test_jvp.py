"""jvp(f), and plain torch.autograd around it, against central differences."""

import pytest

from lanewise import jvp
from tests.cases import FIRST_DIFFERENCE, SECOND_DIFFERENCE, Case
from tests.oracles import (
    FIRST,
    SECOND,
    along,
    assert_same,
    difference,
    directions,
    gradients,
    loss,
    of_floats,
    second_difference,
    tracked,
)


@pytest.mark.parametrize("case", FIRST_DIFFERENCE, ids=str)
def test_jvp(case: Case):
    args = case.draw(1, seed=7)[0]
    tangents = directions(args)
    f, primals = of_floats(case.f, args)
    value, tangent = jvp(f, primals, tangents)
    assert_same(value, f(*primals), case.tol, grad=True)
    assert_same(tangent, difference(case.f, args, tangents), FIRST, grad=True)


@pytest.mark.parametrize("case", SECOND_DIFFERENCE, ids=str)
def test_backward_outside(case: Case):
    args = tracked(case.draw(1, seed=8)[0])
    tangents, direction = directions(args), directions(args, 8)
    f, primals = of_floats(case.f, args)
    value, tangent = jvp(f, primals, tangents)
    assert_same(gradients(loss(value), args), gradients(loss(case.f(*args)), args), case.tol)
    got = along(gradients(loss(tangent), args), direction)
    plain = tuple(t.detach() for t in args)
    want = second_difference(lambda *xs: loss(case.f(*xs)), plain, tangents, direction)[0]
    assert_same(got, want, SECOND)


@pytest.mark.parametrize("case", FIRST_DIFFERENCE, ids=str)
def test_backward_into_the_tangents(case: Case):
    args = case.draw(1, seed=9)[0]
    tangents = tuple(t.requires_grad_() for t in directions(args))
    f, primals = of_floats(case.f, args)
    got = gradients(loss(jvp(f, primals, tangents)[1]), tangents)
    inputs = tracked(args)
    assert_same(got, gradients(loss(case.f(*inputs)), inputs), case.tol)
