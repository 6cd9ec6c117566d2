"""The derivative of per-sample gradients, taken outside by plain autograd and in forward mode.

On the mapped plane the backward pass runs with grad mode off, where torch's formulas may take values that have no
history of their own; the plane below is recording all the while.
"""

import pytest
import torch

import lanewise
from tests.oracles import assert_same
from tests.rules.lanes import draw
from tests.rules.test_cotangents import CASES as ALL
from tests.rules.test_cotangents import is_float

# torch's second derivative of weight_norm takes the saved norms for constants; test_norm.py has it by differences.
CASES = {name: case for name, case in ALL.items() if name != "norm: weight_norm"}


def loss(out):
    """A weighted sum of all float outputs and of their squares."""
    total = torch.zeros((), dtype=torch.float64)
    for t in out if isinstance(out, tuple) else (out,):
        if is_float(t) and t.requires_grad:
            weight = torch.linspace(0.3, 1.7, t.numel(), dtype=torch.float64).reshape(t.shape)
            total = total + ((t * t.conj()).real * weight).sum() + (t.real * weight.cos()).sum()
    return total


def slopes(f, args):
    """Plain autograd on one lane, differentiable."""
    leaves = [t.view_as(t) if t.requires_grad else t for t in args]
    wanted = [t for t in leaves if is_float(t)]
    return torch.autograd.grad(loss(f(*leaves)), wanted, create_graph=True, allow_unused=True, materialize_grads=True)


def weighted(parts):
    return sum((t.real * torch.linspace(-1, 2, t.numel()).reshape(t.shape)).sum() for t in parts)


@pytest.mark.parametrize("name", CASES)
def test_outside(name):
    f, *makers = CASES[name]
    lanes = draw(tuple(makers), 3)
    args = [torch.stack(column) for column in zip(*lanes, strict=True)]
    args = [t.requires_grad_() if is_float(t) else t for t in args]
    floats = tuple(n for n, t in enumerate(args) if is_float(t))
    wanted = [args[n] for n in floats]
    try:
        rows = [slopes(f, [t[i] for t in args]) for i in range(3)]
        want_slopes = [torch.stack(column) for column in zip(*rows, strict=True)]
        want = torch.autograd.grad(weighted(want_slopes), wanted, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        pytest.skip(f"plain torch: {error}")
    got_slopes = lanewise.vmap(lanewise.grad(lambda *xs: loss(f(*xs)), argnums=floats))(*args)
    assert_same([t.detach() for t in got_slopes], [t.detach() for t in want_slopes])
    got = torch.autograd.grad(weighted(got_slopes), wanted, allow_unused=True, materialize_grads=True)
    assert_same(got, want, (1e-8, 1e-9))
