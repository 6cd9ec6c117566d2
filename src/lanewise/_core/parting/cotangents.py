"""Inside a backward pass, the cotangents say which lanes run."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.parting.lanes import Lanes, intersection, union
from lanewise._core.parting.rows import PRODUCTS, SUMS
from lanewise._torch_compat import OpOverload

aten = torch.ops.aten


def cotangent_lanes(level: Any, func: OpOverload | None, operands: list[Tensor]) -> Lanes:
    """Inside a backward pass: the lanes that an operation runs on, those that all of its operands have.

    A sum runs on those that any of them has, and so does what puts cotangents side by side: a cotangent is zero in
    lanes that it does not have, and one that is the same in all lanes has all that run. Where no set of lanes is known
    to be a part of another, a product runs on those that both have, for what lacks a lane may be a divisor, and so does
    what reads indices or a mask, which are no cotangents; anything else may put cotangents side by side.
    """
    running = level.lanes
    found: Lanes | None = None
    sums = func in SUMS
    if func is aten.where.self:
        # A choice is linear in the cotangents: of a lane without one it gives none. (The condition is no cotangent.)
        operands = [x for x in operands[1:] if type(x) is BatchTensor and x.level is level and x.mapped] or operands
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
            both = not sums and (func in PRODUCTS or not (operand.dtype.is_floating_point or operand.dtype.is_complex))
            found = intersection(found, home) if both else union(found, home)
    # What was saved may have lanes that no longer ran when the pass began: no cotangent has them.
    return running if found is None or (not sums and running.within(found)) else found
