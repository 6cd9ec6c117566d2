"""Errors of lanes: whose, and where; the library's own frames are left out between the user's."""

import traceback

import pytest
import torch

from lanewise import vmap


def too_large(y):
    if y > 2:
        raise ValueError("too large")
    return y * 2


def counted(x):
    while x < 1:
        x = x + 0.5
    return too_large(x)


def frames(error):
    return [(frame.name, frame.line) for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_of_the_user():
    with pytest.raises(ValueError, match="too large") as caught:
        vmap(counted)(torch.tensor([0.1, 0.5, 3.0]))
    assert frames(caught.value)[-2:] == [
        ("counted", "return too_large(x)"),
        ("too_large", 'raise ValueError("too large")'),
    ]
    assert len(frames(caught.value)) <= 6
    assert caught.value.lanes == [2]


def test_all_frames(monkeypatch):
    monkeypatch.setenv("LANEWISE_FULL_TRACEBACKS", "1")
    with pytest.raises(ValueError, match="too large") as caught:
        vmap(counted)(torch.tensor([0.1, 0.5, 3.0]))
    assert "boundary" in [name for name, _ in frames(caught.value)]


def test_a_mistake_of_the_library_keeps_its_frames(monkeypatch):
    monkeypatch.setattr("lanewise._control.split.leave", int)
    with pytest.raises(TypeError) as caught:
        vmap(lambda x: x if x.item() > 1 else -x)(torch.tensor([0.1, 3.0]))
    assert frames(caught.value)[-1][0] == "run_apart"
