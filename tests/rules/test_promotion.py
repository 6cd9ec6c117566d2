"""Dtypes and precision of operands without dims, and shapes without lanes, against the loop."""

import pytest
import torch

from lanewise import vmap


def _loop(f, in_dims, *inputs):
    lanes = next(x.shape[0] for x, dim in zip(inputs, in_dims) if dim == 0)
    return torch.stack([f(*[x[i] if dim == 0 else x for x, dim in zip(inputs, in_dims)]) for i in range(lanes)])


small = torch.full((2, 2), 1e-3)
factors = torch.tensor([1e5, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("f", [torch.mul, torch.div, torch.maximum, lambda a, b: b * a])
def test_a_double_of_no_dims_is_not_rounded_to_half(f, half):
    inputs = small.to(half), factors
    got, want = vmap(f)(*inputs), _loop(f, (0, 0), *inputs)
    assert got.dtype == want.dtype == half
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("f", "in_dims", "inputs"),
    [
        (lambda a, b: torch.where(b > 0, a, b), (0, 0), (torch.tensor([5, 6]), torch.ones(2, 2, dtype=torch.int8))),
        (lambda a, b: torch.where(b > 0, a, b), (0, 0), (factors, torch.ones(2, 2, dtype=torch.int32))),
        (lambda a, b: a.clamp(min=b), (None, 0), (torch.tensor(1.0, dtype=torch.float64), small.half())),
        (lambda a, b: a.clamp(min=b), (0, 0), (factors, small)),
    ],
)
def test_dtypes_of_three_operands(f, in_dims, inputs):
    got, want = vmap(f, in_dims=in_dims)(*inputs), _loop(f, in_dims, *inputs)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("layer", "one"),
    [
        (torch.nn.Conv2d(1, 2, 2), (1, 3, 4)),
        (torch.nn.Conv1d(1, 2, 2), (3, 1, 4)),
        (torch.nn.ConvTranspose2d(1, 2, 2), (1, 3, 4)),
        (torch.nn.AdaptiveAvgPool2d(2), (1, 4, 4)),
        (torch.nn.MaxPool2d(2), (5, 1, 4, 4)),
    ],
    ids=str,
)
def test_images_without_lanes(layer, one):
    want = layer(torch.zeros(one))
    images = torch.zeros(0, *one, requires_grad=True)
    got = vmap(layer)(images)
    assert got.shape == (0, *want.shape) and got.requires_grad
