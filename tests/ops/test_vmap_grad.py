"""vmap(grad(loss of f)), and plain torch.autograd around it, against autograd per lane."""

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
def test_vmap_grad(case: Case):
    lanes = case.draw(seed=4)

    def check(layout: Layout) -> None:
        inputs = tracked(pack(lanes, layout))
        per_example = grad(lambda *xs: loss(case.f(*xs)), argnums=differentiable(inputs))
        got = vmap(per_example, in_dims=layout.in_dims)(*inputs)
        oracle = autograd_grad(case.f, create_graph=case.order > 1)
        want = loop_vmap(oracle, layout.in_dims, lane=lanes[0])(*inputs)
        assert_same(got, want, case.tol)
        if case.order > 1:
            assert_same(gradients(loss(got), inputs), gradients(loss(want), inputs), case.tol)

    each_layout(lanes, check, empty=case.empty)
