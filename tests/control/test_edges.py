"""Programs at the edges of what a branch can do, against the loop."""

import pytest
import torch

from lanewise import vmap
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
