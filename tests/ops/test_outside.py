"""Cases on tensors from outside alone: inside a mapped function their results take lane values, and are the loop's."""

import pytest
import torch

from lanewise import vmap
from tests.cases import CASES, FIRST_ORDER
from tests.oracles import as_tuple, assert_same, floats, loss

DELTAS = torch.tensor([0.5, -2.0, 1.25], dtype=torch.float64)


def written(out, args, delta):
    """The float results with something of the lane written into them; copies of views, and of the arguments."""
    found = [t.clone() if t._is_view() or any(t is x for x in args) else t for t in floats(out)]
    for t in found:
        t.add_(delta.to(t.dtype))
    return tuple(found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_take_lane_values(case):
    args = case.draw(1)[0]
    want = case.f(*args)
    got = vmap(lambda delta: written(case.f(*args), args, delta))(DELTAS)
    for a, b in zip(got, floats(want), strict=True):
        assert_same(a, torch.stack([b + d.to(b.dtype) for d in DELTAS]), case.tol)


@pytest.mark.parametrize("case", FIRST_ORDER, ids=str)
def test_backward_from_outside(case):
    args = case.draw(1)[0]
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in args]
    wanted = [t for t in leaves if t.requires_grad]
    out = as_tuple(vmap(lambda delta: tuple(t * delta.to(t.dtype) for t in floats(case.f(*leaves))))(DELTAS))
    if not any(t.requires_grad for t in out):
        pytest.skip("nothing to differentiate")
    got = torch.autograd.grad(loss(out), wanted, allow_unused=True, materialize_grads=True)
    rows = [tuple(t * delta.to(t.dtype) for t in floats(case.f(*leaves))) for delta in DELTAS]
    looped = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    assert_same(got, torch.autograd.grad(loss(looped), wanted, allow_unused=True, materialize_grads=True), case.tol)
