"""`x[mask].sum()`, `x[:n].mean(0)` and their like, where each lane keeps a number of its own of the entries.

Nothing is picked, the rest is left out. Only where the selection is used for nothing else. Lanes need not part for the
number they keep then.
"""

from typing import Any

import torch
from torch import Tensor

from lanewise._control.runtime.callees import fn
from lanewise._control.runtime.numbers import LaneNumber, number_of
from lanewise._control.runtime.replacements import as_number, entry_at
from lanewise._core.parting.joins import component
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import Plane

# Dtypes whose sums are rounded to few digits, and whose means torch computes with more.
_SHORT = frozenset({torch.float16, torch.bfloat16})


def picked(thing: Any, index: Any) -> Any:
    """`thing[index]`, of which one of the methods of `Selection` is called."""
    level = machine.level
    if level is None or not isinstance(thing, Tensor):
        return entry_at(thing, index)
    if type(index) is slice:
        mask = _between(thing, index)
        return entry_at(thing, index) if mask is None else Selection(thing, mask)
    if not isinstance(index, Plane) or index.dtype is not torch.bool:
        return entry_at(thing, index)
    part = component(level, index)
    if part is None or not part.mapped or not index.dim() or thing.shape[: index.dim()] != index.shape:
        return entry_at(thing, index)
    note_question(part.level)
    return Selection(thing, index)


def _between(x: Tensor, part: slice) -> Tensor | None:
    """Which entries `[n]` of the first dim a slice with numbers of each lane keeps; None for other slices."""
    bounds = [as_number(bound) if isinstance(bound, Plane) else bound for bound in (part.start, part.stop)]
    if not x.dim() or part.step not in (None, 1) or not any(type(bound) is LaneNumber for bound in bounds):
        return None
    if not all(bound is None or isinstance(bound, int) for bound in bounds):
        return None
    size = x.shape[0]
    places = torch.arange(size, device=x.device)
    mask: Any = None
    for bound, compare in zip(bounds, (torch.ge, torch.lt)):
        if bound is not None:
            place = bound.value.to(x.device) if type(bound) is LaneNumber else torch.tensor(bound, device=x.device)
            kept = compare(places, torch.where(place < 0, place + size, place))
            mask = kept if mask is None else mask & kept
    return mask


class Selection:
    """`x[mask]`, with x [*M, *S] and mask [*M]; of a slice, a mask of the first dim.

    What is left out takes part as a neutral number. `torch.where` keeps it out of values and derivatives, whatever it
    is: it has the derivative zero in the loop, too.
    """

    __slots__ = ("x", "mask")

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.x = x
        self.mask = mask

    def taken(self) -> Any:
        """The selection itself: lanes part by how many they keep."""
        return entry_at(self.x, self.mask)

    def filled(self, neutral: Any) -> Tensor:
        """`[*M, *S]` with a number in place of what is left out."""
        mask = self.mask
        if extra := self.x.dim() - mask.dim():
            mask = mask.reshape(*mask.shape, *[1] * extra)
        return torch.where(mask, self.x, neutral)

    def dims(self, args: tuple, kwargs: dict) -> tuple[int, ...] | None:
        """The dims that a reduction is over, () for all; None where its result has the entries one by one."""
        if len(args) + len(kwargs) == 0:
            return ()
        if len(args) + len(kwargs) > 1 or not kwargs.keys() <= {"dim"} or self.mask.dim() > 1:
            return None
        dim = args[0] if args else kwargs["dim"]
        # (The dims of a mask are one dim of what is picked.)
        return (0,) if type(dim) is int and dim in (0, -self.x.dim()) else None

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].sum()`"""
        dims = self.dims(args, kwargs)
        return fn(self.taken().sum)(*args, **kwargs) if dims is None else self.filled(0).sum(*dims)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].mean()`"""
        dims = self.dims(args, kwargs)
        known = (self.x.is_floating_point() or self.x.is_complex()) and self.x.dtype not in _SHORT
        if not known or dims is None:
            return fn(self.taken().mean)(*args, **kwargs)
        return self.filled(0).sum(*dims) / (self.mask.sum() if dims else self.count())

    def prod(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].prod()`"""
        dims = self.dims(args, kwargs)
        return fn(self.taken().prod)(*args, **kwargs) if dims is None else self.filled(1).prod(*dims)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].any()`"""
        dims = self.dims(args, kwargs)
        return fn(self.taken().any)(*args, **kwargs) if dims is None else self.filled(0).any(*dims)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        """`x[mask].all()`"""
        dims = self.dims(args, kwargs)
        return fn(self.taken().all)(*args, **kwargs) if dims is None else self.filled(1).all(*dims)

    def numel(self) -> Any:
        """`x[mask].numel()`"""
        return number_of(self.count())

    def count(self) -> Tensor:
        """How many elements are kept []."""
        return self.mask.sum() * self.x.shape[self.mask.dim() :].numel()
