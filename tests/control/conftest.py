"""What tests of how lanes part ask for."""

import pytest

from lanewise._transforms.parting import runner


@pytest.fixture
def parting(monkeypatch):
    """Lanes part, also in functions so cheap that they would run with masks in place of branches."""
    for name in ("masked", "masked_plainly"):
        monkeypatch.setattr(runner, name, lambda *_: None)
