"""Inside a backward pass, the cotangents say which lanes run."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.lanes import Lanes, child, common_ancestor, true_places
from lanewise._core.level import on_plane
from lanewise._core.rows import SUMS
from lanewise._torch_compat import OpOverload


def cotangent_lanes(level: Any, func: OpOverload | None, operands: list[Tensor]) -> Lanes:
    """Inside a backward pass: the lanes that an operation runs on, those that all of its operands have.

    A sum runs on those that any of them has, and so does what puts cotangents side by side: a cotangent is zero in
    lanes that it does not have, and one that is the same in all lanes has all that run.
    """
    running = level.lanes
    found: Lanes | None = None
    sums = func in SUMS
    for operand in operands:
        if type(operand) is not BatchTensor or operand.level is not level or not operand.mapped:
            if sums:
                found = running if found is None else union(found, running)
            continue
        home = operand.home
        if found is None or found is home:
            found = home
        elif home.within(found):
            found = found if sums else home
        elif found.within(home):
            found = home if sums else found
        else:
            found = union(found, home)
    # What was saved may have lanes that no longer ran when the pass began: no cotangent has them.
    return running if found is None or (not sums and running.within(found)) else found


def union(a: Lanes, b: Lanes) -> Lanes:
    """The lanes that either set has."""
    if a.within(b) or b.within(a):
        return b if a.within(b) else a
    base = common_ancestor(a, b)
    with on_plane(None):
        mask = torch.zeros(base.size, dtype=torch.bool, device=a.positions(base).device)
        mask[a.positions(base)] = True
        mask[b.positions(base)] = True
        kept = true_places(mask)
    return base if kept.shape[0] == base.size else child(base, kept)
