"""Rows picked by numbers that differ from lane to lane, out of all lanes' rows as one table.

torch's kernels for indices in brackets step through single elements; from a table, a row is copied as a whole. The
place of a lane's row in the table is its number plus an offset, so numbers are looked at first: none may reach a
neighbouring lane.
"""

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._rules.batch.operands import at_hand
from lanewise._rules.batch.tracking import is_tracked
from lanewise._torch_compat import current_autograd_node

ENOUGH = 16384  # elements of the result

# Backward formulas that write once, into zeros which they have made for that.
_INTO_ZEROS = frozenset(
    f"{name}Backward{overload}"
    for name, overload in (
        ("Cummax", 0),
        ("Cummin", 0),
        ("Gather", 0),
        ("Index", 0),
        ("IndexSelect", 0),
        ("Kthvalue", 0),
        ("Max", 0),
        ("Median", 1),
        ("Min", 0),
        ("Mode", 0),
        ("Nanmedian", 1),
        ("Sort", 0),
        ("Sort", 1),
        ("Topk", 0),
    )
)


def rows_at(x: Tensor, indices: list[Tensor], lanes: bool, wraps: bool = True) -> Tensor | None:
    """x [B, *N, *S] or [*N, *S], one index [B, *I] for each dim of N -> [B, *I, *S]

    None where indices are out of range, where they or x cannot be looked at, and where it would not be faster.
    """
    rest = x.shape[lanes + len(indices) :]
    if indices[0].numel() * rest.numel() < ENOUGH:
        return None
    if not x.is_contiguous() or not at_hand(x, *indices) or is_tracked(x):
        return None
    places = places_in_table(x, indices, lanes, wraps)
    return None if places is None else x.view(-1, *rest).index_select(0, places.flatten()).view(*places.shape, *rest)


def places_in_table(x: Tensor, indices: list[Tensor], lanes: bool, wraps: bool = True) -> Tensor | None:
    """The places [B, *I] of picked rows among those of all lanes; None where an index is out of range.

    Negative ones count from the end if it `wraps`.
    """
    places: Tensor | None = None
    rows = 1
    for extent, index in zip(x.shape[lanes:], indices):
        low, high = (int(extreme) for extreme in torch.aminmax(index))
        if low < (-extent if wraps else 0) or high >= extent:
            return None
        if low < 0:
            index = torch.where(index < 0, index + extent, index)
        places = index if places is None else places * extent + index
        rows *= extent
    if places is None or not lanes:
        return places
    return places + torch.arange(0, x.shape[0] * rows, rows).view(-1, *[1] * (places.dim() - 1))


def zeros_to_fill(level: BatchLevel, x: Tensor, *operands: Tensor) -> Tensor | None:
    """x [B, *S] below, if it is zeros that the formula of a running backward has made to write into: no copy is due."""
    node = current_autograd_node()
    if node is None or node.name() not in _INTO_ZEROS or not level.mapped(x) or type(x.value) is not Tensor:
        return None
    if 0 in x.value.stride():  # Zeros that are the same in all lanes of a transform above, such as a zero tangent.
        return None
    return None if is_tracked(x.value, *map(level.physical, operands)) else x.value
