"""vmap(f), and plain torch.autograd around it, against the loop."""

import pytest

from lanewise import vmap
from tests.cases import CASES, FIRST_ORDER, SECOND_ORDER, Case
from tests.oracles import Layout, assert_same, autograd_grad, each_layout, gradients, loop_vmap, loss, pack, tracked


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: Case):
    lanes = case.draw()

    def check(layout: Layout) -> None:
        want = loop_vmap(case.f, layout.in_dims, lane=lanes[0])(*pack(lanes, layout))
        assert_same(vmap(case.f, in_dims=layout.in_dims)(*pack(lanes, layout)), want, case.tol, grad=True)

    each_layout(lanes, check)


@pytest.mark.parametrize("case", FIRST_ORDER, ids=str)
def test_backward_outside(case: Case):
    lanes = case.draw(seed=1)

    def check(layout: Layout) -> None:
        inputs = tracked(pack(lanes, layout))
        got = vmap(case.f, in_dims=layout.in_dims)(*inputs)
        want = loop_vmap(case.f, layout.in_dims, lane=lanes[0])(*inputs)
        assert_same(got, want, case.tol, grad=True)
        assert_same(gradients(loss(got), inputs), gradients(loss(want), inputs), case.tol)

    each_layout(lanes, check, empty=case.empty)


@pytest.mark.parametrize("case", SECOND_ORDER, ids=str)
def test_double_backward_outside(case: Case):
    lanes = case.draw(seed=2)

    def check(layout: Layout) -> None:
        inputs = tracked(pack(lanes, layout))
        got = autograd_grad(autograd_grad(vmap(case.f, in_dims=layout.in_dims), create_graph=True))(*inputs)
        loop = loop_vmap(case.f, layout.in_dims, lane=lanes[0])
        assert_same(got, autograd_grad(autograd_grad(loop, create_graph=True))(*inputs), case.tol)

    each_layout(lanes, check, most=4, empty=case.empty)
