"""Programs whose control flow depends on lane values, under each transform."""

import pytest
import torch

from tests.control.compositions import COMPOSITIONS, SECOND, examples
from tests.control.programs import PROGRAMS


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program, composition):
    got, want = composition(program, *examples())
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
