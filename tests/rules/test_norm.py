"""Normalisation layers against the loop."""

import copy

import pytest
import torch
from torch.nn import functional as F

import lanewise
from lanewise import vmap
from tests.oracles import assert_same
from tests.rules.lanes import check, normal


def positive(*shape):
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64) + 0.5


CASES = {
    "layer": (lambda x: F.layer_norm(x, (4,)), normal(2, 4)),
    "layer affine": (lambda x, w, b: F.layer_norm(x, (4,), w, b), normal(2, 4), normal(4), normal(4)),
    "layer two dims": (lambda x, w: F.layer_norm(x, (3, 4), w), normal(2, 3, 4), normal(3, 4)),
    "layer whole": (lambda x, w, b: F.layer_norm(x, (4,), w, b), normal(4), normal(4), normal(4)),
    "rms": (lambda x, w: F.rms_norm(x, (4,), w), normal(2, 4), normal(4)),
    "group": (lambda x: F.group_norm(x, 2), normal(2, 4, 3)),
    "group affine": (lambda x, w, b: F.group_norm(x, 2, w, b), normal(1, 4, 2, 3), normal(4), normal(4)),
    "group affine images": (lambda x, w, b: F.group_norm(x, 2, w, b), normal(3, 4, 2), normal(4), normal(4)),
    "group no dims": (lambda x, w: F.group_norm(x, 2, w), normal(3, 4), normal(4)),
    "instance": (lambda x: F.instance_norm(x), normal(2, 3, 4)),
    "instance affine": (lambda x, w, b: F.instance_norm(x, None, None, w, b), normal(2, 3, 4), normal(3), normal(3)),
    "batch": (lambda x: F.batch_norm(x, None, None, training=True), normal(4, 3)),
    "batch affine": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        normal(3, 2, 2, 3),
        normal(2),
        normal(2),
    ),
    "batch eval": (
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b),
        normal(2, 3, 2),
        normal(3),
        positive(3),
        normal(3),
        normal(3),
    ),
    "batch legit": (
        lambda x, w: torch.ops.aten._native_batch_norm_legit(x, w, None, True, 0.1, 1e-5)[0],
        normal(4, 3),
        normal(3),
    ),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), normal(3, 4), positive(3, 1)),
    "normalize": (lambda x: F.normalize(x, dim=-1), normal(2, 3)),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), normal(3, 4)),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, dim=-1), normal(2, 3), normal(3)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: F.layer_norm(x, (4,), w),
        lambda x, w: F.rms_norm(x, (4,), w),
        lambda x, w: F.group_norm(x, 2, w),
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
    ],
    ids=["layer", "rms", "group", "batch"],
)
def test_gradient_of_the_per_sample_gradient(norm):
    def slope(x, w):
        with torch.enable_grad():
            x, w = x.view_as(x).requires_grad_(), w.view_as(w).requires_grad_()
            return torch.autograd.grad(norm(x, w).pow(3).sum(), (x, w), create_graph=True)

    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    got = sum(part.square().sum() for part in vmap(slope, in_dims=(0, None))(x, w))
    want = sum(part.square().sum() for lane in x for part in slope(lane, w))
    assert_same(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)))


@pytest.mark.parametrize("contiguous", [True, False])
def test_running_statistics_of_each_lane_are_updated_in_place(contiguous):
    x = torch.randn(5, 4, 3, 2, dtype=torch.float64)
    mean, var = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    if not contiguous:
        mean, var = mean.t().contiguous().t(), var.t().contiguous().t()
    means, variances = mean.clone(), var.clone()
    got = vmap(lambda x, m, v: F.batch_norm(x, m, v, training=True, momentum=0.3))(x, mean, var)
    want = torch.stack(
        [F.batch_norm(*lane, training=True, momentum=0.3) for lane in zip(x, means, variances, strict=True)]
    )
    assert_same((got, mean, var), (want, means, variances))


def test_running_statistics_made_inside_are_updated():
    x = torch.randn(3, 4, 2)

    def f(x):
        mean, var = torch.zeros(2), torch.ones(2)
        return F.batch_norm(x, mean, var, training=True), mean, var

    assert_same(vmap(f)(x), tuple(torch.stack(part) for part in zip(*map(f, x), strict=True)))


def test_other_names_of_batch_norm():
    aten = torch.ops.aten
    x, w = torch.randn(3, 4, 2), torch.randn(2)

    def cudnn(x):
        out, mean, invstd, reserve = aten.cudnn_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
        return out, *aten.cudnn_batch_norm_backward(x, out, w, None, None, mean, invstd, 1e-5, reserve)

    def native(x):
        out, mean, invstd = aten.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
        mask = [True, True, True]
        return out, *aten.native_batch_norm_backward(out, x, w, None, None, mean, invstd, True, 1e-5, mask)

    assert_same(vmap(cudnn)(x), vmap(native)(x))

    def fused(x):
        mean, var = x.new_zeros(2), x.new_ones(2)
        out, saved, invstd, reserve = aten._batch_norm_with_update(x, w, w, mean, var, 0.1, 1e-5)
        mask = [True, True, True]
        return out, *aten.batch_norm_backward(out, x, w, mean, var, saved, invstd, True, 1e-5, mask, reserve)

    assert_same(vmap(fused)(x), tuple(torch.stack(part) for part in zip(*map(fused, x), strict=True)))


def test_second_derivative_of_weight_norm():
    v = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    g = torch.rand(3, 3, 1, dtype=torch.float64) + 0.5

    def slope(v, g):
        return lanewise.grad(lambda v: torch._weight_norm(v, g, 0).pow(3).sum())(v)

    def total(v):
        return vmap(slope)(v, g).square().sum()

    direction = torch.randn_like(v)
    step = 1e-6 * direction
    want = (total(v + step) - total(v - step)) / 2e-6
    got = (torch.autograd.grad(total(v), v)[0] * direction).sum()
    assert_same(got, want.detach(), (1e-7, 1e-7))


def test_rms_norm_goes_below_as_a_whole_and_refuses_what_one_lane_does_not_fit():
    x, w = torch.randn(3, 2, 4), torch.randn(4)
    for args in (((4,),), ((2, 4),), ((4,), w), ((4,), w, 0.1)):
        got = vmap(lambda x, args=args: torch.rms_norm(x, *args))(x)
        assert torch.equal(got, torch.stack([torch.rms_norm(lane, *args) for lane in x]))
    assert torch.equal(vmap(lambda x: torch.rms_norm(input=x, normalized_shape=[4]))(x), torch.rms_norm(x, [4]))
    own = vmap(lambda x: torch.rms_norm(x, [4], torch.full((4,), 2.0)))(x)
    assert torch.equal(own, torch.rms_norm(x, [4], torch.full((4,), 2.0)))
    with pytest.raises((RuntimeError, ValueError), match="shape|dimensions"):
        vmap(lambda x: torch.rms_norm(x, [2, 4]))(x[0])
    with pytest.raises((RuntimeError, ValueError), match="shape|dimensions"):
        vmap(lambda x: torch.rms_norm(x, [3, 2, 4]))(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("lanes", "images"), [(1, 1), (3, 1), (1, 2)])
def test_batch_norm_of_channels_that_lie_last(training, lanes, images):
    """torch's backward pass takes a single image's strides for others; so in a loop, which is no oracle here."""
    numbers = lambda *shape: normal(*shape)(torch.Generator().manual_seed(0))
    layers = [torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4, track_running_stats=False), torch.nn.Flatten()]
    front = torch.nn.Sequential(*layers).double()
    if not training:
        layers[1].running_mean, layers[1].running_var = numbers(4), numbers(4).abs() + 0.5
        front.eval()
    last = copy.deepcopy(front).to(memory_format=torch.channels_last)
    xs = numbers(lanes, images, 4, 7, 7)
    xs_last = xs.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(xs.shape)
    expected = [torch.autograd.grad(front(x).sin().sum(), list(front.parameters())) for x in xs]
    expected = [torch.stack(column) for column in zip(*expected)]
    params = {name: p.detach() for name, p in last.named_parameters()}
    of_lanes = vmap(lanewise.grad(lambda p, x: lanewise.functional_call(last, p, (x,)).sin().sum()), (None, 0))
    for given in (xs, xs_last):
        for _ in range(3):
            for got, wanted in zip(of_lanes(params, given).values(), expected):
                torch.testing.assert_close(got.contiguous(), wanted)
            out = vmap(lambda x: last(x))(given)
            for got, wanted in zip(torch.autograd.grad(out.sin().sum(), list(last.parameters())), expected):
                torch.testing.assert_close(got.contiguous(), wanted.sum(0))
