"""jvp(vmap(f)), and plain torch.autograd around it, against central differences of the loop."""

import pytest

from lanewise import jvp, vmap
from tests.cases import FIRST_DIFFERENCE, Case
from tests.oracles import (
    FIRST,
    Layout,
    assert_same,
    difference,
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
def test_jvp_vmap(case: Case):
    lanes = case.draw(seed=13)

    def check(layout: Layout) -> None:
        inputs = tracked(pack(lanes, layout))
        tangents = tuple(t.requires_grad_() for t in directions(inputs))
        f, primals = of_floats(vmap(case.f, in_dims=layout.in_dims), inputs)
        value, tangent = jvp(f, primals, tangents)
        loop = loop_vmap(case.f, layout.in_dims, lane=lanes[0])
        plain = tuple(t.detach() for t in inputs)
        assert_same(value, of_floats(loop, plain)[0](*(p.detach() for p in primals)), case.tol)
        assert_same(tangent, difference(loop, plain, tuple(t.detach() for t in tangents)), FIRST)
        want = gradients(loss(loop(*inputs)), inputs)
        assert_same(gradients(loss(tangent), tangents), want, case.tol)
        assert_same(gradients(loss(value), inputs), want, case.tol)

    each_layout(lanes, check)
