"""Sorting many rows at once, and the greatest few of each.

torch sorts one row after the other by comparing elements. Here all rows are one: an element becomes an integer, its
row above its order above its place, and integers have a radix sort, or a maximum that finds value and place together.
For a thousand rows of a hundred numbers both take a third of the time.

Among equal elements torch keeps the order only where it is asked for a stable sort, and which one comes first otherwise
depends on its algorithm. Rows with equal elements are left to it, so that a lane has the order that it has alone.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lanewise._core.level import note_autograd
from lanewise._rules.batch.operands import at_hand
from lanewise._rules.batch.tracking import is_tracked

RADIX = 32768  # elements from which torch takes its radix sort
PART = 3 * RADIX  # elements that are ranked at a time, or up to twice as many, so that they stay in a cache
INFINITY = 0x7F800000  # as bits
LOW = 0xFFFFFFFF
Ranked = tuple[Tensor, Tensor]


def sort_rows(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Ranked | None:
    """x [B, *S] -> values and places sorted along the last dim; None where torch's own way is to be taken"""
    if not _suits(x, dim) or x.numel() < RADIX or not 32 <= x.shape[-1] <= 2048 or not _has_radix_sort():
        return None

    def alone(rows: Tensor) -> Ranked:
        return torch.sort(rows, dim=1, stable=bool(stable), descending=descending)

    def at_once(rows: Tensor) -> Ranked | None:
        if rows.numel() < RADIX or not (stable or _all_differ(alone(rows[:1])[0])):
            return None
        parts = _sorted(rows, descending)
        return parts if parts is None or stable else _with_ties(alone, rows, *parts, parts[0])

    return _by_parts(x, at_once, alone)


def _sorted(rows: Tensor, descending: bool) -> Ranked | None:
    """[R, n] -> values and places, by one sort of all elements"""
    count, length = rows.shape
    order, low, high = _order(rows, descending)
    if order is None:
        return None
    span = high - low + 1
    keys = order.long().add_(torch.arange(0, count * span, span).sub_(low).unsqueeze(1))
    flat = keys.view(-1).sort(stable=True).indices
    values = rows.view(-1).index_select(0, flat).view(count, length)
    return values, flat.view(count, length).sub_(torch.arange(0, count * length, length).unsqueeze(1))


def argsort_rows(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Tensor | None:
    """x [B, *S] -> the places of `sort_rows`"""
    parts = sort_rows(x, dim, descending, stable=stable)
    return None if parts is None else parts[1]


def greatest_of_rows(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Ranked | None:
    """x [B, *S] -> values and places of the k greatest or least along the last dim, as `sort_rows`"""
    # For less than a 64th of a row torch's algorithm is another, and fast.
    if not sorted or not 1 < k <= 16 or not _suits(x, dim) or x.numel() < 8192 or not k < x.shape[-1] < 64 * k:
        return None

    def alone(rows: Tensor) -> Ranked:
        return rows.topk(k, 1, largest)

    def at_once(rows: Tensor) -> Ranked | None:
        if not _all_differ(rows[:1].topk(k + 1, 1, largest).values):
            return None
        found = _greatest(rows, k + 1, largest)
        if found is None:
            return None
        places = found[:, :k] & LOW
        return _with_ties(alone, rows, rows.gather(1, places), places, found >> 32)

    return _by_parts(x, at_once, alone)


def _greatest(rows: Tensor, k: int, largest: bool) -> Tensor | None:
    """[R, n] -> the k greatest keys of each row, the order of an element above its place"""
    order, *_ = _order(rows, not largest)
    if order is None:
        return None
    keys = order.long().mul_(LOW + 1).add_(torch.arange(rows.shape[1]))
    found = []
    for _ in range(k):
        greatest = keys.amax(1, keepdim=True)  # amin takes five times as long
        found.append(greatest)
        keys.scatter_(1, greatest & LOW, torch.iinfo(torch.int64).min)
    return torch.cat(found, 1)


def _suits(x: Tensor, dim: int) -> bool:
    """Whether these are many rows of float32, whose numbers can be looked at."""
    suits = x.dtype is torch.float32 and dim in (-1, x.dim() - 1) and x.dim() > 1 and at_hand(x) and x.is_contiguous()
    if suits:
        note_autograd()  # recorded below, they are torch's to sort, which takes longer
    return suits and not is_tracked(x)


def _by_parts(x: Tensor, at_once: Callable[[Tensor], Ranked | None], alone: Callable[[Tensor], Ranked]) -> Ranked:
    """The rows of x some at a time; `alone` for those that `at_once` answers None to."""
    rows = x.view(-1, x.shape[-1])
    parts = [at_once(part) or alone(part) for part in rows.chunk(max(1, x.numel() // PART))]
    values, places = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    shape = (*x.shape[:-1], values.shape[1])
    return values.view(shape), places.view(shape)


def _with_ties(
    alone: Callable[[Tensor], Ranked], rows: Tensor, values: Tensor, places: Tensor, ranked: Tensor
) -> Ranked:
    """The rows with equal neighbours in `ranked` [R, n] once more, each alone."""
    tied = (ranked[:, 1:] == ranked[:, :-1]).any(1)
    if tied.any():
        values[tied], places[tied] = alone(rows[tied])
    return values, places


def _all_differ(ranked: Tensor) -> bool:
    return not (ranked[:, 1:] == ranked[:, :-1]).any()


def _order(rows: Tensor, descending: bool) -> tuple[Tensor | None, int, int]:
    """int32 in the order of the numbers, 0.0 like -0.0, with its extremes; None where one is not a number"""
    bits = (rows + 0.0).view(torch.int32)
    order = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    low, high = (int(extreme) for extreme in torch.aminmax(order))
    if high > INFINITY or low < ~INFINITY:
        return None, low, high
    return (order.bitwise_not_(), ~high, ~low) if descending else (order, low, high)


@cache
def _has_radix_sort() -> bool:
    """Whether torch is built with it; without, a sort of all rows as one compares more than a sort of each."""
    return torch.backends.openmp.is_available() and "USE_FBGEMM" in torch.__config__.show()
