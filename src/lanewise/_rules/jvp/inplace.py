"""Writes in place: the tangent is written where the primal is."""

import torch

from lanewise._core.dual import undisturbed
from lanewise._rules.jvp.families import decomposed, jvp_rule
from lanewise._rules.lists import entry_by_entry, operations_on_lists

aten = torch.ops.aten


@jvp_rule(aten.copy_.default)
def copy_(level, x, source, non_blocking=False):
    """x <- source, and its tangent likewise"""
    x.value.copy_(level.primal(source), non_blocking)
    _write(x, level.tangent(source))


def _write(x, tangent):
    if x.tangent is None:
        return
    if tangent is None:
        x.tangent.zero_()
    else:
        x.tangent.copy_(tangent)


@jvp_rule(aten.zero_.default)
def zero_(level, x):
    """x <- 0"""
    x.value.zero_()
    _write(x, None)


@jvp_rule(aten.fill_.Scalar)
def fill_(level, x, value):
    """x <- value"""
    x.value.fill_(value)
    _write(x, None)


@jvp_rule(aten.fill_.Tensor)
def fill_with(level, x, value):
    """x <- value, which is 0-dim"""
    x.value.fill_(level.primal(value))
    _write(x, level.tangent(value))


@jvp_rule(aten.add_.Tensor)
def add_(level, x, y, *, alpha=1):
    """x <- x + alpha y"""
    x.value.add_(level.primal(y), alpha=alpha)
    t = level.tangent(y)
    if t is not None and x.tangent is not None:
        x.tangent.add_(t, alpha=alpha)


@jvp_rule(aten.sub_.Tensor)
def sub_(level, x, y, *, alpha=1):
    """x <- x - alpha y"""
    x.value.sub_(level.primal(y), alpha=alpha)
    t = level.tangent(y)
    if t is not None and x.tangent is not None:
        x.tangent.sub_(t, alpha=alpha)


@jvp_rule(aten.mul_.Tensor)
def mul_(level, x, y):
    """x <- x y"""
    (old, y), _ = undisturbed(level, x, (x, y), {})
    factor, t = level.primal(y), level.tangent(y)
    if x.tangent is not None:
        tangent = old.tangent * factor if t is None else old.tangent * factor + old.value * t
        x.tangent.copy_(tangent)
    x.value.mul_(factor)


for _op in operations_on_lists():
    decomposed(_op)(entry_by_entry(_op))
