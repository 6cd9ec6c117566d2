"""jacrev and jacfwd, alone and mapped, against central differences along random directions."""

import pytest
import torch

from lanewise import jacfwd, jacrev, vmap
from tests.cases import FIRST_DIFFERENCE, SECOND_DIFFERENCE, Case
from tests.oracles import (
    FIRST,
    SECOND,
    Layout,
    along,
    assert_same,
    difference,
    differentiable,
    directions,
    gradients,
    loop_vmap,
    loss,
    of_floats,
    pack,
    second_difference,
    tracked,
)


def _real(case: Case) -> bool:
    args = case.draw(1)[0]
    return not any(t.is_complex() for t in (*args, *of_floats(case.f, args)[0](*of_floats(case.f, args)[1])))


REAL = [case for case in FIRST_DIFFERENCE if _real(case)]
TWICE = [case for case in SECOND_DIFFERENCE if _real(case)]


def _times(jacobian, direction):
    """Each output's Jacobian blocks times the direction, summed over the arguments."""
    return tuple(
        sum(torch.tensordot(block, d, dims=d.dim()) for block, d in zip(row, direction, strict=True))
        for row in jacobian
    )


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
@pytest.mark.parametrize("case", REAL, ids=str)
def test_jacobian(case: Case, transform):
    args = case.draw(1, seed=14)[0]
    f, primals = of_floats(case.f, args)
    jacobian = transform(f, argnums=tuple(range(len(primals))))(*primals)
    for out, row in zip(f(*primals), jacobian, strict=True):
        assert [tuple(block.shape) for block in row] == [(*out.shape, *p.shape) for p in primals]
    direction = directions(args)
    assert_same(_times(jacobian, direction), difference(case.f, args, direction), FIRST)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
@pytest.mark.parametrize("case", REAL, ids=str)
def test_vmap_jacobian(case: Case, transform):
    lanes = case.draw(2, seed=15)
    places, direction = differentiable(lanes[0]), directions(lanes[0])

    def product(*xs):
        f, primals = of_floats(case.f, xs)
        return _times(transform(f, argnums=tuple(range(len(places))))(*primals), direction)

    packed = pack(lanes, Layout(tuple(0 for _ in lanes[0]), 2))
    assert_same(vmap(product)(*packed), loop_vmap(lambda *xs: difference(case.f, xs, direction))(*packed), FIRST)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
@pytest.mark.parametrize("case", TWICE, ids=str)
def test_backward_outside(case: Case, transform):
    args = tracked(case.draw(1, seed=16)[0])
    first, second = directions(args, 1), directions(args, 2)
    f, primals = of_floats(case.f, args)
    value = loss(_times(transform(f, argnums=tuple(range(len(primals))))(*primals), first))
    plain = tuple(t.detach() for t in args)
    want = second_difference(lambda *xs: loss(case.f(*xs)), plain, first, second)[0]
    assert_same(along(gradients(value, args), second), want, SECOND)
