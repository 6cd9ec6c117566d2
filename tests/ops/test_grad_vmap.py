"""grad(loss of vmap(f)), and plain torch.autograd around it, against autograd over the loop."""

import pytest

from lanewise import grad, vmap
from tests.cases import FIRST_ORDER, Case
from tests.oracles import (
    Layout,
    assert_same,
    autograd_grad,
    differentiable,
    each_layout,
    gradients,
    loop_vmap,
    loss,
    pack,
    tracked,
)


@pytest.mark.parametrize("case", FIRST_ORDER, ids=str)
def test_grad_vmap(case: Case):
    lanes = case.draw(seed=3)

    def check(layout: Layout) -> None:
        inputs = tracked(pack(lanes, layout))
        mapped = vmap(case.f, in_dims=layout.in_dims)
        got = grad(lambda *xs: loss(mapped(*xs)), argnums=differentiable(inputs))(*inputs)
        loop = loop_vmap(case.f, layout.in_dims, lane=lanes[0])
        want = autograd_grad(loop, create_graph=case.order > 1)(*inputs)
        assert_same(got, want, case.tol)
        if case.order > 1:
            assert_same(gradients(loss(got), inputs), gradients(loss(want), inputs), case.tol)

    each_layout(lanes, check, empty=case.empty)
