"""One of all elements: the largest, the smallest, the middle one. Those that equal it share its gradient.

In torch, the others have none, and so they get zero where that gradient is infinite, or NaN. (For torch's formulas, see
pointwise.py.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._rules.batch.families import lane_rule
from lanewise._rules.batch.tracking import constant, is_tracked

aten = torch.ops.aten


def by_equals(flat: Tensor, found: Tensor) -> Tensor:
    """flat [B, n], what was found in it [B] -> the same, as a function of the elements that equal it"""
    fixed, values = constant(found), constant(flat)
    equal = (values == fixed.unsqueeze(1)) | (values.isnan() & fixed.isnan().unsqueeze(1))
    finite = fixed.isfinite()
    of_finite = torch.where(equal & finite.unsqueeze(1), flat, -torch.inf).amax(1)  # a mean might be rounded
    of_others = torch.where(equal, flat, 0).sum(1) / equal.sum(1)
    return torch.where(finite, of_finite, of_others)


def _choice(op: Any, choose: Callable[[Tensor], Tensor]) -> None:
    @lane_rule(op)
    def chosen(level, x):
        """x [B, *S] -> [B]"""
        flat = x.value.flatten(1) if x.dim() else x.value.unsqueeze(1)
        found = choose(flat)
        return by_equals(flat, found) if is_tracked(flat) and flat.is_floating_point() and flat.shape[1] else found


def _of_some(median: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """flat [B, n] -> [B]; of nothing, what an example without elements has"""

    def choose(flat: Tensor) -> Tensor:
        if flat.shape[1]:
            return median(flat, 1)[0]
        return median(flat.new_empty(0)).expand(flat.shape[0]).clone()

    return choose


_choice(aten.max.default, lambda flat: flat.amax(1))
_choice(aten.median.default, _of_some(torch.median))
_choice(aten.min.default, lambda flat: flat.amin(1))
_choice(aten.nanmedian.default, _of_some(torch.nanmedian))
