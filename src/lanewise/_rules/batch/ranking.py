"""Sorting many rows at once, and the greatest few of each.

torch sorts one row after the other by comparing elements. Here all rows are one: an element becomes an integer, its
row above its order above its place, and integers have a radix sort, or a maximum that finds value and place together.
For a thousand rows of a hundred numbers both take a third of the time.

Among equal elements torch keeps the order only where it is asked for a stable sort, and which one comes first otherwise
depends on its algorithm. Rows with equal elements are left to it, so that a lane has the order that it has alone.
"""

from functools import cache

import torch
from torch import Tensor

from lanewise._rules.batch.operands import at_hand
from lanewise._rules.batch.tracking import is_tracked

RADIX = 32768  # elements from which torch takes its radix sort
INFINITY = 0x7F800000  # as bits
LOW = 0xFFFFFFFF


def sort_rows(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None):
    """x [B, *S] -> values and places sorted along the last dim; None where torch's own way is to be taken"""
    if not _suits(x, dim) or x.numel() < RADIX or not 32 <= x.shape[-1] <= 2048 or not _has_radix_sort():
        return None
    rows = x.view(-1, x.shape[-1])
    count, length = rows.shape
    if not stable and _ties(rows[0].sort().values):
        return None
    order, low, high = _order(rows, descending)
    if order is None:
        return None
    span = high - low + 1
    firsts = torch.arange(0, count * span, span).sub_(low)
    flat = order.long().add_(firsts.unsqueeze(1)).view(-1).sort(stable=True).indices
    values = rows.view(-1).index_select(0, flat).view(count, length)
    places = flat.view(count, length).sub_(torch.arange(0, count * length, length).unsqueeze(1))
    if not stable:
        tied = _ties_of_each(values)
        if tied.any():
            values[tied], places[tied] = rows[tied].sort(1, descending)
    return values.view(x.shape), places.view(x.shape)


def argsort_rows(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None):
    """x [B, *S] -> the places of `sort_rows`"""
    parts = sort_rows(x, dim, descending, stable=stable)
    return None if parts is None else parts[1]


def greatest_of_rows(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
    """x [B, *S] -> values and places of the k greatest or least along the last dim, as `sort_rows`"""
    # For less than a 64th of a row torch's algorithm is another, and fast.
    if not sorted or not 1 < k <= 16 or not _suits(x, dim) or x.numel() < 8192 or not k < x.shape[-1] < 64 * k:
        return None
    rows = x.view(-1, x.shape[-1])
    if _ties(rows[0].topk(k + 1, largest=largest).values):
        return None
    order, *_ = _order(rows, not largest)
    if order is None:
        return None
    keys = order.long().mul_(LOW + 1).add_(torch.arange(rows.shape[1]))
    found = []
    for _ in range(k + 1):
        greatest = keys.amax(1, keepdim=True)  # amin takes five times as long
        found.append(greatest)
        keys.scatter_(1, greatest & LOW, torch.iinfo(torch.int64).min)
    found = torch.cat(found, 1)
    places = found[:, :k] & LOW
    values = rows.gather(1, places)
    tied = _ties_of_each(found >> 32)
    if tied.any():
        values[tied], places[tied] = rows[tied].topk(k, 1, largest)
    shape = (*x.shape[:-1], k)
    return values.view(shape), places.view(shape)


def _suits(x: Tensor, dim: int) -> bool:
    """Whether these are many rows of float32, whose numbers can be looked at."""
    return (
        x.dtype is torch.float32
        and dim in (-1, x.dim() - 1)
        and x.dim() > 1
        and at_hand(x)
        and not is_tracked(x)
        and x.is_contiguous()
    )


def _ties(ranked: Tensor) -> bool:
    return bool(_ties_of_each(ranked))


def _ties_of_each(ranked: Tensor) -> Tensor:
    """Sorted rows [*, n] -> whether neighbours are equal [*]"""
    return (ranked[..., 1:] == ranked[..., :-1]).any(-1)


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
