"""What holds for every test: a fixed seed, one thread, no level left open, and lanes that part run together."""

import random

import numpy
import pytest
import torch

from lanewise._control.runs import pacing
from lanewise._core.level import live_levels

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_loops(monkeypatch, request):
    """Functions whose lanes part run together at once, not first in a loop, but for tests that are marked `loops`."""
    if "loops" not in request.keywords:
        monkeypatch.setattr(pacing, "FREE", 0.0)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """After the test: no level is open on this thread, and grad mode, default dtype and threads are as before."""
    before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    yield
    after = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    levels = live_levels()
    # The next test starts clean, whatever this one did.
    torch.set_grad_enabled(before[0])
    torch.set_default_dtype(before[2])
    assert not levels, f"levels left open: {levels}"
    assert after == before, "grad mode, inference mode or default dtype left changed"
