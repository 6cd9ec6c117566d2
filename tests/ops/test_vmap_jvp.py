"""vmap(jvp(f)), and plain torch.autograd around it, against central differences per lane."""

import pytest
import torch

from lanewise import jvp, vmap
from tests.cases import FIRST_DIFFERENCE, Case
from tests.oracles import (
    FIRST,
    Layout,
    assert_same,
    autograd_grad,
    difference,
    differentiable,
    directions,
    each_layout,
    gradients,
    loop_vmap,
    loss,
    of_floats,
    pack,
    tracked,
)


@pytest.mark.parametrize("case", FIRST_DIFFERENCE, ids=str)
def test_vmap_jvp(case: Case):
    lanes = case.draw(seed=12)
    places = differentiable(lanes[0])
    count = len(lanes[0])
    both = [(*lane, *directions(lane, seed)) for seed, lane in enumerate(lanes)]

    def tangent(*xs):
        f, primals = of_floats(case.f, xs[:count])
        return jvp(f, primals, xs[count:])[1]

    def check(layout: Layout) -> None:
        full = Layout((*layout.in_dims, *(layout.in_dims[n] for n in places)), layout.lanes)
        inputs = tracked(pack(both, full))
        got = vmap(tangent, in_dims=full.in_dims)(*inputs)
        oracle = loop_vmap(lambda *xs: difference(case.f, xs[:count], xs[count:]), full.in_dims, lane=both[0])
        assert_same(got, oracle(*(t.detach() for t in inputs)), FIRST)
        # In the tangents the result is linear, with the gradients of f as coefficients.
        coefficients = loop_vmap(autograd_grad(case.f), layout.in_dims, lane=lanes[0])(*inputs[:count])
        found = gradients(loss_per_lane(got, layout.lanes), inputs)[len(places) :]
        for n, a, b in zip(places, found, coefficients, strict=True):
            assert_same(a, b.sum(0) if layout.in_dims[n] is None else b.movedim(0, layout.in_dims[n]), case.tol)

    each_layout(lanes, check)


def loss_per_lane(out, lanes: int):
    """The same weighted sum in each lane, added up."""
    return sum((loss(tuple(t[i] for t in out)) for i in range(lanes)), torch.zeros((), dtype=torch.float64))
