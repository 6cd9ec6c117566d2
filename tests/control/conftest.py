"""Lanes that part, also in functions that would run with masks in place of branches."""

import pytest

from lanewise._transforms.parting import runner

# What these test is how lanes part, by programs that are cheap.
PARTING = frozenset("backward_passes fusion leaves_of_some_lanes parting programs pulling_back pushing_forward".split())


@pytest.fixture(autouse=True)
def parting(request, monkeypatch):
    if request.module.__name__.rpartition("test_")[2] in PARTING:
        monkeypatch.setattr(runner, "masked", lambda *_: None)
