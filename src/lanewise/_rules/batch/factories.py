"""Tensors made from others, and tensors made from nothing inside a mapped function."""

import torch

from lanewise._core.batch import BatchLevel
from lanewise._core.factories import adopt_results_of
from lanewise._rules.batch.families import lane_rule, pointwise

aten = torch.ops.aten

adopt_results_of(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.eye.m,
    aten.full.default,
    aten.full_like.default,
    aten.linspace.default,
    aten.logspace.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.zeros_like.default,
)
adopt_results_of(aten.lift_fresh.default, inside_binding=True)

pointwise(
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
)


@lane_rule(aten.new_empty.default)
def new_empty(level, x, size, **options):
    """-> [B, *size], uninitialised"""
    return level.physical(x).new_empty((level.size, *size), **options)


@lane_rule(aten.new_zeros.default)
def new_zeros(level, x, size, **options):
    """-> [B, *size] of zeros"""
    return level.physical(x).new_zeros((level.size, *size), **options)


@lane_rule(aten.new_ones.default)
def new_ones(level, x, size, **options):
    """-> [B, *size] of ones"""
    return level.physical(x).new_ones((level.size, *size), **options)


@lane_rule(aten.new_full.default)
def new_full(level, x, size, fill_value, **options):
    """-> [B, *size] of fill_value"""
    return level.physical(x).new_full((level.size, *size), fill_value, **options)


@lane_rule(aten.new_empty_strided.default)
def new_empty_strided(level, x, size, stride, **options):
    """-> [B, *size] with the given strides in each lane, uninitialised"""
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    return level.physical(x).new_empty_strided((level.size, *size), (max(extent, 1), *stride), **options)


@lane_rule(aten.is_same_size.default, raw=True)
def is_same_size(level: BatchLevel, a, b):
    """Whether the shapes of one lane are the same."""
    return a.shape == b.shape


@lane_rule(aten._has_same_storage_numel.default, raw=True)
def has_same_storage_numel(level: BatchLevel, a, b):
    """Asked by forward mode before it sets a tangent: whether the two could share a layout."""
    return a.numel() == b.numel()


@lane_rule(aten._new_zeros_with_same_feature_meta.default)
def new_zeros_with_same_feature_meta(level, x, other, *, self_num_batch_dims=0):
    """-> [B, *S of other] of zeros, for the tangent that forward mode makes"""
    return torch.zeros((level.size, *other.shape), dtype=other.dtype, device=other.device)
