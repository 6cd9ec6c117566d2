"""Programs whose control flow depends on lane values, under each transform."""

import pytest

from tests.control.compositions import COMPOSITIONS, SECOND, check_as_the_loop
from tests.control.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("parting")


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program, composition):
    check_as_the_loop(program, composition)
