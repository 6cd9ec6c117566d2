"""Resizing and sampling of images `[N, C, *sp]`."""

import torch

from lanewise._rules.batch.families import lane_rule
from lanewise._rules.batch.operands import split_lanes
from lanewise._rules.batch.pooling import check_rank, spatial

aten = torch.ops.aten

spatial(
    1,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten.upsample_linear1d.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest1d_backward.default,
    single=False,
)
spatial(
    2,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bicubic2d_aa_backward.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d_backward.default,
    single=False,
)
spatial(
    3,
    aten._upsample_nearest_exact3d.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_nearest3d.default,
    aten.upsample_nearest3d_backward.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_trilinear3d_backward.default,
    single=False,
)


@lane_rule(aten.affine_grid_generator.default)
def affine_grid(level, theta, size, align_corners):
    """theta [B, N, r, r + 1] -> [B, N, *sp, r]"""
    images, *rest = size
    out = aten.affine_grid_generator(theta.value.flatten(0, 1), [level.size * images, *rest], align_corners)
    return split_lanes(out, level.size, images)


def _grid_sampler(rank, forward, backward):
    @lane_rule(forward)
    def sample(level, x, grid, *options):
        """x [B, N, C, *sp], grid [B, N, *out, r] -> [B, N, C, *out]; lanes of one alone go into C or out"""
        check_rank(forward, x, rank, single=False)
        check_rank(forward, grid, rank, single=False)
        lanes, images = level.size, x.shape[0]
        if not level.mapped(grid):
            out = forward(x.value.transpose(0, 1).flatten(1, 2), grid, *options)
            return out.unflatten(1, (lanes, x.shape[1])).transpose(0, 1)
        if not level.mapped(x):
            out = forward(x, grid.value.transpose(0, 1).flatten(1, 2), *options)
            return out.unflatten(2, (lanes, grid.shape[1])).movedim(2, 0)
        return forward(x.value.flatten(0, 1), grid.value.flatten(0, 1), *options).unflatten(0, (lanes, images))

    @lane_rule(backward)
    def sample_backward(level, grad, x, grid, *options):
        """grad [B, N, C, *out], x [B, N, C, *sp], grid [B, N, *out, r] -> gradients in x and grid"""
        wants_x, wants_grid = options[-1]
        lanes, images = level.size, x.shape[0]
        if not level.mapped(grid) and not wants_grid:
            slopes = level.expanded(grad).transpose(0, 1).flatten(1, 2)
            shaped = x.value.transpose(0, 1).flatten(1, 2) if level.mapped(x) else x.repeat(1, lanes, *_ones(x))
            part, _ = backward(slopes, shaped, grid, *options)
            return part.unflatten(1, (lanes, x.shape[1])).transpose(0, 1), None
        if not level.mapped(x) and not wants_x:
            slopes = level.expanded(grad).movedim(0, 2).flatten(2, 3)
            _, part = backward(slopes, x, level.expanded(grid).transpose(0, 1).flatten(1, 2), *options)
            return None, part.unflatten(1, (lanes, grid.shape[1])).transpose(0, 1)
        parts = backward(*[level.expanded(t).flatten(0, 1).contiguous() for t in (grad, x, grid)], *options)
        return tuple(
            split_lanes(part, lanes, images) if wanted else None
            for part, wanted in zip(parts, options[-1], strict=True)
        )


def _ones(x):
    return [1] * (x.dim() - 2)


_grid_sampler(2, aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default)
_grid_sampler(3, aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default)
