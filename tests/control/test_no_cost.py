"""A function whose lanes agree pays nothing for lanes that could part: no conversion, and no more operations."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lanewise._control.runs.split
from lanewise import grad, vmap
from lanewise._control.rewriting import compiling


class Counted(TorchDispatchMode):
    """Counts the operations that reach plain torch."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def agreeing(x):
    if x.shape[0] > 1 and len(x) == 2:
        x = x * 2
    for i in range(2):
        x = x + i
    return x.sum() if x.dim() else x


MLP = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
FUNCTIONS = {"branches that agree": agreeing, "a gradient": grad(agreeing), "a module": MLP}


@pytest.fixture
def refusing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("lanes that agree were prepared to part")

    for name in ("run", "masked", "masked_plainly"):
        monkeypatch.setattr(lanewise._transforms.parting.runner, name, refuse)
    monkeypatch.setattr(compiling, "converted_code", refuse)
    monkeypatch.setattr(lanewise._control.runs.split, "converted", refuse)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_converted(name, refusing):
    vmap(FUNCTIONS[name])(torch.ones(3, 2))


def test_a_question_that_lanes_agree_on_converts_nothing(refusing):
    assert vmap(lambda x: x * 2 if x.sum() > 0 else -x)(torch.ones(3, 2)).shape == (3, 2)


def test_no_more_operations_than_the_batched_program():
    with Counted() as ours:
        vmap(agreeing)(torch.ones(3, 2))
    with Counted() as batched:
        ((torch.ones(3, 2) * 2 + 0) + 1).sum(1)
    made = {"aten.ones.default": 1}
    assert sum((ours.calls - Counter(made)).values()) == sum((batched.calls - Counter(made)).values())


def test_lanes_that_part_are_seen(refusing):
    with pytest.raises(AssertionError, match="prepared to part"):
        vmap(lambda x: x if x > 0 else -x)(torch.tensor([1.0, -1.0]))
