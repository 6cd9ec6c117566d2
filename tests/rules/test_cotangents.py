"""Backward formulas whose only operand with lanes is the incoming gradient, as in a reverse-mode Jacobian."""

import pytest
import torch

from lanewise import vmap
from tests.oracles import assert_same
from tests.rules import (
    test_attention,
    test_conv,
    test_embedding,
    test_fft,
    test_linalg,
    test_norm,
    test_pooling,
    test_sampling,
)
from tests.rules.lanes import draw

MODULES = (test_linalg, test_conv, test_pooling, test_sampling, test_norm, test_attention, test_embedding, test_fft)
CASES = {f"{module.__name__.split('_')[-1]}: {name}": case for module in MODULES for name, case in module.CASES.items()}


def is_float(t):
    return t.dtype.is_floating_point or t.dtype.is_complex


@pytest.mark.parametrize("lanes", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name, lanes):
    f, *makers = CASES[name]
    args = [t.requires_grad_() if is_float(t) else t for t in draw(tuple(makers), 1)[0]]
    out = f(*args)
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if is_float(t) and t.requires_grad]
    leaves = [t for t in args if is_float(t)]
    if not outs or not leaves:
        pytest.skip("nothing to differentiate")

    def pull(*slopes):
        return torch.autograd.grad(outs, leaves, slopes, retain_graph=True, allow_unused=True, materialize_grads=True)

    slopes = [torch.randn(lanes, *t.shape, dtype=t.dtype) for t in outs]
    got = vmap(pull)(*slopes)
    if lanes == 0:
        assert [t.shape for t in got] == [(0, *t.shape) for t in leaves]
    else:
        rows = [pull(*row) for row in zip(*slopes, strict=True)]
        assert_same(got, tuple(torch.stack(column) for column in zip(*rows, strict=True)))
