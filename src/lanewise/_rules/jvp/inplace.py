"""Copies and fills in place: the tangent is written where the primal is."""

import torch

from lanewise._rules.jvp.families import jvp_rule

aten = torch.ops.aten


@jvp_rule(aten.copy_.default)
def copy_(level, x, source, non_blocking=False):
    """x <- source, and its tangent likewise"""
    x.value.copy_(level.primal(source), non_blocking)
    if x.tangent is None:
        return
    tangent = level.tangent(source)
    if tangent is None:
        x.tangent.zero_()
    else:
        x.tangent.copy_(tangent)


@jvp_rule(aten.zero_.default)
def zero_(level, x):
    """x <- 0"""
    x.value.zero_()
    x.tangent.zero_()


@jvp_rule(aten.fill_.Scalar)
def fill_(level, x, value):
    """x <- value"""
    x.value.fill_(value)
    x.tangent.zero_()
