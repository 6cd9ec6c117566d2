"""Fourier transforms along dims that their arguments name."""

import torch

from lanewise._rules.batch.families import lane_rule, shift_dim
from lanewise._rules.batch.operands import lane_of_zeros, no_lanes

aten = torch.ops.aten


def _transform(op):
    @lane_rule(op)
    def transform(level, x, dim, *args):
        """x [B, *S] -> [B, *S], half of the last dim in `dim` where the signal is real; no dims leave x as it is"""
        if level.size == 0:
            return no_lanes(op(lane_of_zeros(level, x), dim, *args))
        return op(x.value, [shift_dim(axis, x.dim()) for axis in dim], *args)


_transform(aten._fft_c2c.default)
_transform(aten._fft_c2r.default)
_transform(aten._fft_r2c.default)
