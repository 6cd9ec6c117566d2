"""Convolutions against the loop, and their forms against one another."""

import pytest
import torch
from torch.nn import functional as F

from lanewise import jvp, vmap
from lanewise._rules.batch import conv
from tests.oracles import assert_same
from tests.rules.lanes import check, normal

CASES = {
    "1d": (F.conv1d, normal(2, 3, 6), normal(4, 3, 3), normal(4)),
    "1d one image": (lambda x, w: F.conv1d(x, w, padding=1), normal(3, 6), normal(4, 3, 3)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), normal(1, 2, 5, 6), normal(3, 2, 3, 2), normal(3)),
    "2d groups": (lambda x, w: F.conv2d(x, w, groups=2, padding=1), normal(2, 4, 4, 4), normal(6, 2, 3, 3)),
    "2d depthwise": (
        lambda x, w: F.conv2d(x, w, groups=3, stride=2, padding=1),
        normal(2, 3, 5, 5),
        normal(3, 1, 3, 3),
    ),
    "2d dilation": (lambda x, w: F.conv2d(x, w, dilation=2, padding=(2, 1)), normal(1, 2, 6, 6), normal(2, 2, 3, 2)),
    "2d same": (lambda x, w: F.conv2d(x, w, padding="same"), normal(2, 4, 5), normal(2, 2, 1, 3)),
    "2d one tap": (F.conv2d, normal(2, 3, 3, 3), normal(2, 3, 1, 1)),
    "2d eight channels": (lambda x, w: F.conv2d(x, w, padding=1), normal(1, 8, 7, 7), normal(8, 8, 3, 3)),
    "3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), normal(1, 2, 3, 3, 4), normal(2, 2, 2, 3, 2), normal(2)),
    "transposed 1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), normal(2, 3, 4), normal(3, 2, 3)),
    "transposed 2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        normal(2, 2, 3, 3),
        normal(2, 3, 3, 3),
        normal(3),
    ),
    "transposed groups": (
        lambda x, w: F.conv_transpose2d(x, w, groups=2, dilation=2),
        normal(1, 4, 3, 3),
        normal(4, 3, 2, 2),
    ),
    "transposed 3d": (F.conv_transpose3d, normal(2, 2, 2, 2), normal(2, 2, 2, 1, 2)),
    "complex": (
        F.conv1d,
        normal(2, 3, 6, dtype=torch.complex128),
        normal(4, 3, 3, dtype=torch.complex128),
    ),
    "tbc": (torch.conv_tbc, normal(5, 2, 3), normal(3, 3, 4), normal(4)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)


@pytest.mark.parametrize("groups, channels, filters", [(1, 3, 4), (2, 4, 2), (3, 3, 3)])
@pytest.mark.parametrize("stride, padding, dilation", [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("images", [1, 2])
def test_forms_of_the_weight_gradient_agree(monkeypatch, groups, channels, filters, stride, padding, dilation, images):
    x = torch.randn(5, images, channels, 7, 6, dtype=torch.float64)
    w = torch.randn(filters, channels // groups, 3, 2, dtype=torch.float64)

    def gradient(x):
        weight = w.clone().requires_grad_()
        out = F.conv2d(x, weight, None, stride, padding, dilation, groups)
        return torch.autograd.grad(out.square().sum(), weight)[0]

    want = torch.stack([gradient(lane) for lane in x])
    forms = ["grouped", "windows", "alone"] + (["correlate"] if channels == filters == groups else [])
    for form in forms:
        monkeypatch.setattr(conv, "per_lane_form", lambda *numbers, form=form: form)
        assert_same(vmap(gradient)(x), want)
    monkeypatch.setattr(conv, "CACHE", 1)
    monkeypatch.setattr(conv, "per_lane_form", lambda *numbers: "windows")
    assert_same(vmap(gradient)(x), want)


def test_form_follows_the_measured_table():
    assert conv.per_lane_form(64, 16, 1, 9, 784) == "windows"
    assert conv.per_lane_form(64, 32, 16, 25, 196) == "grouped"
    assert conv.per_lane_form(64, 64, 3, 49, 1024) == "alone"
    assert conv.per_lane_form(64, 128, 128, 9, 16) == "windows"
    assert conv.per_lane_form(64, 64, 64, 1, 256) == "windows"
    assert conv.per_lane_form(64, 32, 16, 9, 16) == "grouped"  # filters that fit the cache, though few positions
    assert conv.per_lane_form(128, 32, 16, 9, 16) == "windows"
    assert conv.per_lane_form(64, 1, 1, 25, 256) == "correlate"
    assert conv.per_lane_form(64, 1, 1, 9, 1024) == "correlate"
    assert conv.per_lane_form(64, 1, 1, 9, 256) == "grouped"


@pytest.mark.parametrize("groups, channels, filters", [(1, 3, 4), (2, 4, 2), (3, 3, 6)])
@pytest.mark.parametrize("stride, padding, dilation", [(1, 0, 1), ((2, 1), (0, 1), (1, 3)), (1, 2, 2)])
@pytest.mark.parametrize("images", [1, 2])
def test_forms_with_weights_for_each_lane_agree(
    monkeypatch, groups, channels, filters, stride, padding, dilation, images
):
    args = (
        torch.randn(5, images, channels, 7, 6, dtype=torch.float64),
        torch.randn(5, filters, channels // groups, 3, 2, dtype=torch.float64),
        torch.randn(5, filters, dtype=torch.float64),
    )
    f = lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups)
    want = torch.stack([f(*lane) for lane in zip(*args, strict=True)])
    positions = want[0, :, 0].numel()
    for form in ["grouped", "windows", "alone"]:
        given = []
        monkeypatch.setattr(conv, "forward_form", lambda *numbers, form=form, to=given: to.append(numbers) or form)
        out = vmap(f)(*args)
        assert_same(out, want)
        assert given == [(filters // groups, channels // groups, 6, positions)]
    monkeypatch.setattr(conv, "CACHE", 1)
    monkeypatch.setattr(conv, "forward_form", lambda *numbers: "windows")
    assert_same(vmap(f)(*args), want)
    line = lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0], dilation=2, groups=groups)
    assert_same(vmap(line)(*args[:2]), torch.stack([line(*lane) for lane in zip(*args[:2], strict=True)]))


def test_form_with_weights_for_each_lane_follows_the_measured_table():
    assert conv.forward_form(16, 3, 9, 1024) == "windows"
    assert conv.forward_form(2, 1, 9, 256) == "windows"
    assert conv.forward_form(1, 1, 9, 256) == "grouped"
    assert conv.forward_form(64, 3, 9, 1024) == "grouped"
    assert conv.forward_form(16, 3, 25, 1024) == "alone"
    assert conv.forward_form(16, 4, 25, 9000) == "grouped"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("conv_nd", [F.conv2d, F.conv_transpose2d])
def test_gradient_of_the_per_sample_gradient(conv_nd, groups):
    def slope(x, w):
        with torch.enable_grad():
            x, w = x.view_as(x).requires_grad_(), w.view_as(w).requires_grad_()
            out = conv_nd(x, w, padding=1, groups=groups).pow(3).sum()
            return torch.autograd.grad(out, (x, w), create_graph=True)

    x = torch.randn(3, 1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4 // groups, 3, 3, dtype=torch.float64, requires_grad=True)
    got = sum(part.square().sum() for part in vmap(slope, in_dims=(0, None))(x, w))
    want = sum(part.square().sum() for lane in x for part in slope(lane, w))
    assert_same(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_tangents_of_expanded_weights(size, groups):
    """The tangents' strides are not those of the weights."""
    inputs = 3 // groups
    weights = torch.randn(1, 1, 1, 1, dtype=torch.float64).expand(5, 6, inputs, size, size)
    tangents = torch.randn(6, inputs, size, size, dtype=torch.float64).expand(5, 6, inputs, size, size)
    image, change = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def f(x, w):
        return F.conv2d(x, w, groups=groups)

    want = torch.stack([f(image, t) + f(change, w) for w, t in zip(weights, tangents)])
    got = jvp(vmap(f, (None, 0)), (image, weights), (change, tangents))[1]
    torch.testing.assert_close(got, want)
