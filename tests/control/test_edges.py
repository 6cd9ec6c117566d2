"""Programs at the edges of what a branch can do, against the loop."""

import pytest
import torch

from lanewise import grad, vmap
from lanewise._control.runs.split import _as_written as as_written
from lanewise._transforms.parting import code_of
from tests.control.edge_programs import PROGRAMS

XS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
KS = torch.tensor([0, 3, 2, 5, 1, 7])


def outcome(run):
    """The results, or the type of the error."""
    try:
        return torch.stack([torch.as_tensor(value) for value in run()])
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = outcome(lambda: [program(x.clone(), k) for x, k in zip(XS, KS)])
    for _ in range(2):  # the second time, lanes part from the start
        got = outcome(lambda: vmap(program)(XS.clone(), KS))
        if isinstance(want, type):
            assert got is want
        else:
            torch.testing.assert_close(got, want)


def test_what_a_branch_has_made_it_may_change():
    def helper(x):
        named = {}
        for i in range(3):
            named[i] = x[i] * 2
        values = [value for value in named.values()]  # noqa: C416
        values.append(x[0])
        values += [x[1]]
        return sum(values)

    class Total:
        def __init__(self):
            self.value = 0

        def add(self, value):
            self.value = self.value + value
            return self

    def f(x):
        if x[0] > 0:
            return helper(x)
        total = Total().add(x[0])
        total.value += x[1]
        return total.value

    torch.testing.assert_close(vmap(f)(XS), torch.stack([f(x) for x in XS]))
    assert code_of(f) not in as_written


def used_by_some(x):
    y = x.sqrt()
    if x > 0:
        return y
    return x * 3


def test_derivatives_of_what_a_lane_leaves_unused():
    xs = torch.tensor([0.0, 1.0, 4.0])
    assert vmap(grad(used_by_some))(xs).tolist() == [3.0, 0.5, 0.25]


def test_derivatives_around_lanes_of_what_a_lane_leaves_unused():
    xs = torch.tensor([0.0, 1.0, 4.0])
    assert grad(lambda xs: vmap(used_by_some)(xs).sum())(xs).tolist() == [3.0, 0.5, 0.25]
