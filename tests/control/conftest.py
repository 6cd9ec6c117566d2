"""What tests of how lanes part ask for."""

from collections.abc import Iterator
from typing import Any

import pytest

from lanewise._core.batch import BatchLevel
from lanewise._transforms.parting import runner
from tests.control.planes import Planes


@pytest.fixture
def parting(monkeypatch):
    """Lanes part, also in functions so cheap that they would run with masks in place of branches."""
    for name in ("masked", "masked_plainly"):
        monkeypatch.setattr(runner, name, lambda *_: None)


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planes]:
    """How many planes of lanes open in the test."""
    found = Planes()
    begin = BatchLevel.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        found.count += 1
        begin(self, *args, **kwargs)

    monkeypatch.setattr(BatchLevel, "__init__", counted)
    yield found
