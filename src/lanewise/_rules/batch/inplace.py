"""Copies and fills in place."""

import torch

from lanewise._rules.batch.families import aligner, lane_rule

aten = torch.ops.aten


@lane_rule(aten.copy_.default)
def copy_(level, x, source, non_blocking=False):
    """x [B, *S] <- source [B, *T] or [*T], broadcast"""
    align = aligner(level, [x, source], promote=False)
    return x.value.copy_(align(source), non_blocking)


@lane_rule(aten.fill_.Tensor)
def fill_(level, x, value):
    """x [B, *S] <- value [B] or []"""
    align = aligner(level, [x, value], promote=False)
    return x.value.copy_(align(value))
