"""Which ops may still run once per lane: the loop is right but slow, so every use of it is named here."""

import pytest
import torch

from lanewise import grad, vmap
from lanewise._core.missing import lane_loops
from tests.cases import CASES, FIRST_ORDER, Case
from tests.oracles import Layout, differentiable, loss, pack

MAY_LOOP = {"aten.histc.default": "the kernel counts into one histogram"}  # op -> why


def _loops(run, *args) -> list[str]:
    before = dict(lane_loops)
    run(*args)
    return sorted(op for op, count in lane_loops.items() if count != before.get(op))


def _packed(case: Case):
    lanes = case.draw(2)
    return pack(lanes, Layout(tuple(0 for _ in lanes[0]), 2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vmap(case: Case):
    assert not set(_loops(vmap(case.f), *_packed(case))) - set(MAY_LOOP)


@pytest.mark.parametrize("case", FIRST_ORDER, ids=str)
def test_vmap_grad(case: Case):
    packed = _packed(case)
    per_example = grad(lambda *xs: loss(case.f(*xs)), argnums=differentiable(packed))
    assert not set(_loops(vmap(per_example), *packed)) - set(MAY_LOOP)


def test_a_loop_is_counted():
    """The count works: an op without a rule shows up in it."""
    op = torch.library.custom_op(
        "lanewise_test::doubled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert _loops(vmap(op), torch.ones(2, 3)) == ["lanewise_test.doubled.default"]
