"""`linearize` of functions on whose way lanes differ."""

import pytest
import torch

from lanewise import grad, linearize, vmap

XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [-0.1, -0.2, -0.3]], dtype=torch.float64)


def ternary(x):
    out, push = linearize(lambda v: v.sin() if v.sum() > 0 else v**3, x)
    return push(x) + out


def returns_and_loops(x):
    def f(v):
        y = v * 1
        if v[0] > 0:
            y[1:] = v[0]
        while y.norm() < 3:
            y = y * 1.7
        if v[1] > 0:
            return v.exp()
        return y * 2

    out, push = linearize(f, x)
    tangent = x * 0.5
    if x[0] > -0.2:
        tangent = push(tangent)
    return push(x) + out * push(tangent)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", [ternary, returns_and_loops], ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x) for x in XS])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS), want)
    slopes = torch.stack([grad(lambda x: program(x).sum())(x) for x in XS])
    torch.testing.assert_close(vmap(grad(lambda x: program(x).sum()))(XS), slopes)
    torch.testing.assert_close(grad(lambda xs: vmap(program)(xs).sum())(XS), slopes)
