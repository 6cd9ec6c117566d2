"""Pooling, padding and moving pixels against the loop."""

import pytest
import torch
from torch.nn import functional as F

from tests.rules.lanes import check, ints, normal

UNPOOL = torch.tensor([[0, 3, 9, 14]]).reshape(1, 2, 2)
CASES = {
    "avg 1d": (lambda x: F.avg_pool1d(x, 2), normal(2, 6)),
    "avg 2d": (lambda x: F.avg_pool2d(x, 2, 1, 1, count_include_pad=False), normal(2, 1, 4, 4)),
    "avg 2d one image": (lambda x: F.avg_pool2d(x, (2, 1), ceil_mode=True), normal(2, 5, 4)),
    "avg 3d": (lambda x: F.avg_pool3d(x, 2, 1), normal(2, 1, 3, 3, 3)),
    "avg 3d one image": (lambda x: F.avg_pool3d(x, 2, divisor_override=3), normal(2, 2, 3, 2)),
    "adaptive avg 1d": (lambda x: F.adaptive_avg_pool1d(x, 3), normal(2, 7)),
    "adaptive avg 2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), normal(2, 2, 5, 4)),
    "adaptive avg 2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), normal(2, 5, 4)),
    "adaptive avg 3d": (lambda x: F.adaptive_avg_pool3d(x, 2), normal(2, 3, 4, 3)),
    "max 1d": (lambda x: F.max_pool1d(x, 2), normal(2, 2, 6)),
    "max 2d": (lambda x: F.max_pool2d(x, 3, 2, 1), normal(2, 2, 5, 5)),
    "max 2d indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), normal(2, 4, 5)),
    "max 3d": (lambda x: F.max_pool3d(x, 2, 1, return_indices=True), normal(2, 3, 3, 3)),
    "max 3d batch": (lambda x: F.max_pool3d(x, 2, dilation=2), normal(2, 1, 3, 4, 3)),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 2), normal(2, 5)),
    "adaptive max 2d": (lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), normal(2, 2, 5, 4)),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, 2), normal(2, 3, 3, 4)),
    "lp": (lambda x: F.lp_pool2d(x, 2, 2), normal(2, 2, 4, 4)),
    "unpool 1d": (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), normal(2, 6)),
    "unpool 2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), normal(2, 2, 4, 4)),
    "unpool 2d fixed": (lambda x: F.max_unpool2d(x, UNPOOL, 2), normal(1, 2, 2)),
    "unpool 3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), normal(1, 2, 4, 2)),
    "fractional 2d": (
        lambda x, s: F.fractional_max_pool2d(x, 2, (3, 2), _random_samples=s / x.new_tensor(8), return_indices=True),
        normal(2, 2, 6, 5),
        ints(0, 8, 2, 2, 2),
    ),
    "fractional 2d one image": (
        lambda x, s: F.fractional_max_pool2d(x, 2, 3, _random_samples=s / x.new_tensor(8)),
        normal(2, 6, 6),
        ints(0, 8, 1, 2, 2),
    ),
    "fractional 3d": (
        lambda x, s: F.fractional_max_pool3d(x, 2, 2, _random_samples=s / x.new_tensor(8)),
        normal(1, 2, 4, 5, 4),
        ints(0, 8, 1, 2, 3),
    ),
    "reflect 1d": (lambda x: F.pad(x, (1, 2), "reflect"), normal(2, 4)),
    "reflect 2d": (lambda x: F.pad(x, (1, 2, 0, 1), "reflect"), normal(1, 2, 3, 4)),
    "reflect 3d": (lambda x: F.pad(x, (1, 0, 1, 1, 0, 1), "reflect"), normal(2, 3, 2, 2)),
    "replicate 1d": (lambda x: F.pad(x, (1, 2), "replicate"), normal(1, 2, 3)),
    "replicate 2d": (lambda x: F.pad(x, (1, 2, 0, 1), "replicate"), normal(2, 3, 3)),
    "replicate 3d": (lambda x: F.pad(x, (1, 0, 1, 1, 0, 1), "replicate"), normal(1, 2, 2, 3, 2)),
    "circular": (lambda x: F.pad(x, (1, 2), "circular"), normal(2, 4)),
    "constant": (lambda x: F.pad(x, (1, -1, 0, 2), value=1.5), normal(3, 4)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), normal(4, 2, 3)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), normal(2, 1, 4, 2)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), normal(2, 4, 3)),
    "unfold": (lambda x: F.unfold(x, (2, 2), padding=1, stride=2), normal(2, 2, 4, 4)),
    "unfold one image": (lambda x: F.unfold(x, 2, dilation=2), normal(2, 4, 4)),
    "fold": (lambda x: F.fold(x, (4, 4), 2, stride=2), normal(2, 8, 4)),
    "fold one image": (lambda x: F.fold(x, (3, 3), 2), normal(4, 4)),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), normal(2, 4, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)
