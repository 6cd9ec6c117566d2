"""vmap(vmap(f)), and plain torch.autograd around it, against two loops."""

import pytest

from lanewise import vmap
from tests.cases import CASES, Case
from tests.oracles import Layout, assert_same, each_layout, gradients, grid, loop_vmap, loss, pack, tracked


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_backward(case: Case):
    lanes = case.draw()

    def check(inner: Layout) -> None:
        rows = grid(lanes, inner, 3)
        for outer in _outer_layouts(rows[0]):
            inputs = tracked(pack(rows, outer)) if case.order else pack(rows, outer)
            got = vmap(vmap(case.f, in_dims=inner.in_dims), in_dims=outer.in_dims)(*inputs)
            loop = loop_vmap(case.f, inner.in_dims, lane=lanes[0])
            want = loop_vmap(loop, outer.in_dims, lane=rows[0])(*inputs)
            assert_same(got, want, case.tol, grad=True)
            if case.order:
                assert_same(gradients(loss(got), inputs), gradients(loss(want), inputs), case.tol)

    each_layout(lanes, check)


def _outer_layouts(row):
    """In front, at the end, no lanes, and one tensor only (which an inner vmap may not map)."""
    yield Layout(tuple(0 for _ in row), 3)
    yield Layout(tuple(t.dim() for t in row), 2)
    yield Layout(tuple(0 for _ in row), 0)
    if len(row) > 1:
        yield Layout((0, *(None for _ in row[1:])), 2)
