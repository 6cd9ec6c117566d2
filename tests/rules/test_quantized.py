"""Fake quantization of lanes, by scales that all lanes share or that are each lane's own, against the loop."""

import pytest
import torch

from lanewise import grad, jvp, vmap

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
SCALES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.5], [0.3, 0.1, 0.1, 0.2]])
OFFSETS = (SCALES * 10).round()
WHOLE = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
LIMITS = -8, 7

# By name: a function of x [4, 5] and of scales and offsets [4].
FUNCTIONS = {
    "by a number": lambda x, s, o: torch.fake_quantize_per_tensor_affine(x, 0.1, 1, *LIMITS),
    "by a tensor": lambda x, s, o: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.1), torch.tensor(1, dtype=torch.int32), *LIMITS
    ),
    "by channels": lambda x, s, o: torch.fake_quantize_per_channel_affine(x, SCALES[0], WHOLE, 0, *LIMITS),
    "by channels of a later dim": lambda x, s, o: torch.fake_quantize_per_channel_affine(
        x.mT, SCALES[0], WHOLE, 1, *LIMITS
    ),
    "by channels of each lane": lambda x, s, o: torch.fake_quantize_per_channel_affine(
        x.mT, s.detach(), WHOLE, 1, *LIMITS
    ),
    "learned": lambda x, s, o: torch._fake_quantize_learnable_per_tensor_affine(
        x, SCALES[0, :1], OFFSETS[0, :1], *LIMITS, 0.5
    ),
    "learned in each lane": lambda x, s, o: torch._fake_quantize_learnable_per_tensor_affine(
        x, s[:1], o[1:2], *LIMITS, 0.5
    ),
    "learned by channels": lambda x, s, o: torch._fake_quantize_learnable_per_channel_affine(
        x.mT, s, o, 1, *LIMITS, 0.5
    ),
}
ROWS = X, SCALES, OFFSETS


def square(f):
    return lambda *row: f(*row).pow(2).sum()


def gradients(f):
    def run(*row):
        row = [part.clone().requires_grad_() for part in row]
        return torch.autograd.grad(square(f)(*row), row, allow_unused=True, materialize_grads=True)

    return [torch.stack(parts) for parts in zip(*[run(*row) for row in zip(*ROWS)])]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_the_loop(name):
    f = FUNCTIONS[name]
    want = torch.stack([f(*row) for row in zip(*ROWS)])
    torch.testing.assert_close(vmap(f)(*ROWS), want)
    torch.testing.assert_close(vmap(vmap(f))(*[torch.stack([rows, rows]) for rows in ROWS])[1], want)
    expected = gradients(f)
    nested = vmap(vmap(grad(square(f), (0, 1, 2))))(*[torch.stack([rows, rows]) for rows in ROWS])
    around = grad(lambda *rows: vmap(square(f))(*rows).sum(), (0, 1, 2))(*ROWS)
    found = vmap(grad(square(f), (0, 1, 2)))(*ROWS), [part[1] for part in nested], around
    for each in found:
        torch.testing.assert_close(list(each), expected, rtol=1e-4, atol=1e-4)
    if "learned" in name:  # torch has no derivative of its gradients
        return
    tangent = jvp(lambda x: vmap(square(f))(x, *ROWS[1:]), (X,), (X.cos(),))[1]
    torch.testing.assert_close(tangent, (expected[0] * X.cos()).sum((1, 2)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_no_lanes(f):
    rows = [part[:0] for part in ROWS]
    assert vmap(f)(*rows).shape == (0, *f(*[part[0] for part in ROWS]).shape)
    assert vmap(grad(square(f)))(*rows).shape == (0, 4, 5)


def test_gradients_of_a_scale_that_lanes_share():
    f = lambda scale, x: square(torch._fake_quantize_learnable_per_tensor_affine)(x, scale, OFFSETS[0, :1], *LIMITS)
    scale = torch.tensor([0.1])
    want = torch.stack([torch.autograd.functional.jacobian(lambda s, x=x: f(s, x), scale) for x in X])
    torch.testing.assert_close(vmap(grad(f), (None, 0))(scale, X), want)
