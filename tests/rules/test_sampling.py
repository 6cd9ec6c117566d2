"""Resizing and sampling of images against the loop."""

import pytest
import torch
from torch.nn import functional as F

from tests.rules.lanes import check, normal


def resize(mode, **options):
    return lambda x: F.interpolate(x, mode=mode, **options)


def sample(**options):
    return lambda x, grid: F.grid_sample(x, grid, **{"align_corners": False, **options})


CASES = {
    "nearest 1d": (resize("nearest", size=5), normal(2, 1, 3)),
    "nearest 2d": (resize("nearest", scale_factor=1.7), normal(2, 1, 3, 2)),
    "nearest 3d": (resize("nearest", size=(2, 3, 1)), normal(1, 2, 2, 2, 2)),
    "nearest-exact 1d": (resize("nearest-exact", size=5), normal(2, 1, 3)),
    "nearest-exact 2d": (resize("nearest-exact", scale_factor=1.7), normal(2, 1, 3, 2)),
    "nearest-exact 3d": (resize("nearest-exact", size=(2, 3, 1)), normal(1, 2, 2, 2, 2)),
    "linear": (resize("linear", size=5), normal(2, 1, 3)),
    "bilinear": (resize("bilinear", size=(5, 2), align_corners=True), normal(2, 1, 3, 4)),
    "bilinear antialias": (resize("bilinear", size=(2, 2), antialias=True), normal(2, 1, 5, 4)),
    "bicubic": (resize("bicubic", scale_factor=2), normal(1, 2, 3, 3)),
    "bicubic antialias": (resize("bicubic", size=(2, 3), antialias=True), normal(1, 2, 5, 4)),
    "trilinear": (resize("trilinear", size=(3, 2, 3)), normal(1, 1, 2, 3, 2)),
    "area": (resize("area", size=(2, 2)), normal(1, 2, 5, 4)),
    "affine_grid": (lambda t: F.affine_grid(t, [2, 1, 3, 4], align_corners=False), normal(2, 2, 3)),
    "affine_grid 3d": (lambda t: F.affine_grid(t, [1, 1, 2, 3, 2], align_corners=True), normal(1, 3, 4)),
    "grid_sample": (sample(), normal(2, 2, 4, 3), normal(2, 2, 3, 2)),
    "grid_sample nearest": (sample(mode="nearest"), normal(1, 2, 4, 3), normal(1, 2, 3, 2)),
    "grid_sample bicubic": (sample(mode="bicubic", padding_mode="border"), normal(1, 2, 4, 3), normal(1, 3, 2, 2)),
    "grid_sample reflection": (
        sample(padding_mode="reflection", align_corners=True),
        normal(1, 1, 3, 3),
        normal(1, 2, 2, 2),
    ),
    "grid_sample 3d": (sample(), normal(1, 2, 2, 3, 3), normal(1, 2, 1, 2, 3)),
    "grid_sample fixed grid": (
        lambda x: F.grid_sample(x, torch.linspace(-1, 1, 8, dtype=x.dtype).reshape(1, 2, 2, 2), align_corners=False),
        normal(1, 2, 3, 3),
    ),
    "grid_sample fixed image": (
        lambda g: F.grid_sample(torch.linspace(-1, 1, 18, dtype=g.dtype).reshape(1, 2, 3, 3), g, align_corners=False),
        normal(1, 2, 2, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)
