"""hessian of the loss of f, alone and mapped, against differences of differences along random directions."""

import pytest
import torch

from lanewise import hessian, vmap
from tests.cases import SECOND_DIFFERENCE, Case
from tests.oracles import (
    SECOND,
    Layout,
    assert_same,
    differentiable,
    directions,
    loop_vmap,
    loss,
    pack,
    second_difference,
)

REAL = [case for case in SECOND_DIFFERENCE if not any(t.is_complex() for t in case.draw(1)[0])]


def _form(hess, u, v):
    """u' H v over all blocks."""
    total = torch.zeros((), dtype=torch.float64)
    for row, a in zip(hess, u, strict=True):
        for block, b in zip(row, v, strict=True):
            total = total + (torch.tensordot(block, b, dims=b.dim()) * a).sum()
    return total


@pytest.mark.parametrize("case", REAL, ids=str)
def test_hessian(case: Case):
    args = case.draw(1, seed=17)[0]
    places, u, v = differentiable(args), directions(args, 1), directions(args, 2)
    f = lambda *xs: loss(case.f(*xs))
    hess = hessian(f, argnums=places)(*args)
    for n, row in zip(places, hess, strict=True):
        assert [tuple(block.shape) for block in row] == [(*args[n].shape, *args[m].shape) for m in places]
    assert_same(_form(hess, u, v), second_difference(f, args, u, v)[0], SECOND)
    assert_same(_form(hess, u, v), _form(hess, v, u), SECOND)


@pytest.mark.parametrize("case", REAL, ids=str)
def test_vmap_hessian(case: Case):
    lanes = case.draw(2, seed=18)
    places, u, v = differentiable(lanes[0]), directions(lanes[0], 1), directions(lanes[0], 2)
    f = lambda *xs: loss(case.f(*xs))
    packed = pack(lanes, Layout(tuple(0 for _ in lanes[0]), 2))
    want = loop_vmap(lambda *xs: second_difference(f, xs, u, v)[0])(*packed)
    assert_same(vmap(lambda *xs: _form(hessian(f, argnums=places)(*xs), u, v))(*packed), want, SECOND)
