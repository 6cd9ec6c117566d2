"""`x[mask].sum()` and its like, where each lane keeps a number of its own: nothing is picked, the rest is left out.

Only where the selection is used for nothing else. Lanes need not part for the number they keep then.
"""

from typing import Any

import torch
from torch import Tensor

from lanewise._control.callees import fn
from lanewise._control.numbers import number_of
from lanewise._control.replacements import item
from lanewise._core.joins import component
from lanewise._core.lanes import machine
from lanewise._core.plane import Plane

# Dtypes whose sums are rounded to few digits, and whose means torch computes with more.
_SHORT = frozenset({torch.float16, torch.bfloat16})


def picked(thing: Any, index: Any) -> Any:
    """`thing[index]`, of which one of the methods of `Selection` is called."""
    level = machine.level
    if level is None or not isinstance(index, Plane) or index.dtype is not torch.bool or not isinstance(thing, Tensor):
        return item(thing, index)
    part = component(level, index)
    if part is None or not part.mapped or not index.dim() or thing.shape[: index.dim()] != index.shape:
        return item(thing, index)
    return Selection(thing, index)


class Selection:
    """`x[mask]`, with x [*M, *S] and mask [*M].

    What is left out takes part as a neutral number. `torch.where` keeps it out of values and derivatives, whatever it
    is: it has the derivative zero in the loop, too.
    """

    __slots__ = ("x", "mask")

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.x = x
        self.mask = mask

    def taken(self) -> Any:
        """The selection itself: lanes part by how many they keep."""
        return item(self.x, self.mask)

    def filled(self, neutral: Any) -> Tensor:
        """`[*M, *S]` with a number in place of what is left out."""
        mask = self.mask
        if extra := self.x.dim() - mask.dim():
            mask = mask.reshape(*mask.shape, *[1] * extra)
        return torch.where(mask, self.x, neutral)

    def whole(self, args: tuple, kwargs: dict) -> bool:
        """Whether a reduction is one to a number."""
        if kwargs or len(args) > 1:
            return False
        return not args or (self.x.dim() == self.mask.dim() and type(args[0]) is int and args[0] in (0, -1))

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].sum()`"""
        return self.filled(0).sum() if self.whole(args, kwargs) else fn(self.taken().sum)(*args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].mean()`"""
        known = (self.x.is_floating_point() or self.x.is_complex()) and self.x.dtype not in _SHORT
        if not known or not self.whole(args, kwargs):
            return fn(self.taken().mean)(*args, **kwargs)
        return self.filled(0).sum() / self.count()

    def prod(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].prod()`"""
        return self.filled(1).prod() if self.whole(args, kwargs) else fn(self.taken().prod)(*args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].any()`"""
        return self.filled(0).any() if self.whole(args, kwargs) else fn(self.taken().any)(*args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].all()`"""
        return self.filled(1).all() if self.whole(args, kwargs) else fn(self.taken().all)(*args, **kwargs)

    def numel(self) -> Any:
        """`x[mask].numel()`"""
        return number_of(self.count())

    def count(self) -> Tensor:
        """How many elements are kept []."""
        return self.mask.sum() * self.x.shape[self.mask.dim() :].numel()
