"""Indexing with a mask: what it picks, fills, and gives back in a backward pass."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import child
from lanewise._core.plane import Plane, on_plane
from lanewise._rules.batch.operands import aligner, at_least_1d
from lanewise._torch_compat import current_autograd_node, operand_shape


def only_mask(indices):
    used = [k for k, index in enumerate(indices) if index is not None]
    mask = indices[used[0]]
    masks = mask.dtype in (torch.bool, torch.uint8) and isinstance(mask, Plane) and len(used) == 1
    return used, mask if masks else None


def check_mask(x: Tensor, first: int, mask: Tensor) -> None:
    for k, extent in enumerate(mask.shape):
        if first + k >= x.dim() or x.shape[first + k] != extent:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {k} does not match the shape of the indexed "
                f"tensor {list(x.shape)} at index {first + k}"
            )


def is_mask_without_lanes(level: BatchLevel, x: Tensor, indices: list[Tensor | None]) -> bool:
    """Whether the last index is the only one, a mask: below, it stays one.

    It may have lanes there, and what it indexes a part of them alone, in which it picks as many elements in each.
    """
    mask = indices[-1]
    if mask is None or mask.dtype is not torch.bool or level.mapped(mask):
        return False
    if any(index is not None for index in indices[:-1]):
        return False
    check_mask(x, len(indices) - 1, mask)
    return True


def _mask_over(level, x, first, mask):
    rest = x.dim() - first - mask.dim()
    lead = level.size if level.mapped(mask) else 1
    return level.physical(mask).bool().view(lead, *[1] * first, *mask.shape, *[1] * rest)


def cotangent_of_fill(level, x, indices):
    """What the backward formula of `x[mask] = value` reads, to sum it over all elements that the mask picks.

    So does that of an embedding with `sparse=True` and a `padding_idx`, of the indices that are not padding. Lanes pick
    different numbers of elements; zeros in place of the others leave the sum as it is.
    """
    node = current_autograd_node()
    if node is None:
        return None
    of_write = node.name().startswith("IndexPut")
    if not of_write and not node.name().startswith("EmbeddingB"):
        return None
    used, mask = only_mask(indices)
    if mask is None:
        return None
    first = used[0]
    values = operand_shape(node, 1) if of_write else None
    rest = x.dim() - first - mask.dim()
    if values is not None and len(values) > rest and values[-rest - 1] not in (1, mask.numel()):
        return None
    where = _mask_over(level, x, first, mask)
    shape = (*x.shape[:first], mask.numel(), *x.shape[first + mask.dim() :])
    return torch.where(where, level.expanded(x), 0).reshape(level.size, *shape)


def lanes_that_pick(level: Any, x: Tensor, indices: list, values: Tensor | None = None) -> tuple | None:
    """The operands of `x[mask]` and of `x[mask] = values` in a backward pass, for lanes that may have called it.

    A cotangent that is the same in all lanes does not say which of them it is of, and the mask has more, where lanes
    went apart by how many elements it picks. Those of the pass pick as many as there are values.
    """
    if not isinstance(level, LaneLevel):
        return None
    node = current_autograd_node()
    if node is None or not node.name().startswith("IndexPut" if values is None else ("Index", "UnsafeIndex")):
        return None
    used, mask = only_mask(indices)
    if mask is None or not level.mapped(mask):
        return None
    shape = operand_shape(node, 1) if values is None else values.shape
    rest = x.dim() - used[0] - mask.dim()
    if len(shape) <= rest:
        return None
    with on_plane(None):
        kept = (at_least_1d(level, mask).flatten(1).sum(1) == shape[-rest - 1]).nonzero().squeeze(1)
    if kept.shape[0] in (0, level.size):
        return None
    level.lanes = child(level.lanes, kept)
    here = [index if index is None else level.here(index) for index in indices]
    return level.here(x), here, None if values is None else level.here(values)


def fill_by_mask(level, op, x, indices, values, accumulate):
    """`x[mask] = values`, where the mask has lanes and the values do not depend on how many elements it picks.

    The mask and the values, both to broadcast to x [B, *S]; None where they do.
    """
    used, mask = only_mask(indices)
    if mask is None:
        return None
    first, count = used[0], mask.dim()
    rest = x.dim() - first - count
    if values.dim() > rest:
        if values.shape[-rest - 1] == 1:
            extents = (1,) * count
        elif values.shape[-rest - 1] == mask.numel() and _comes_back_to_index():
            extents = mask.shape  # of `cotangent_of_fill`, with zeros where the mask picks nothing
        else:
            return None
        shape = values.shape
        shape = (*shape[: len(shape) - rest - 1], *extents, *shape[len(shape) - rest :])
        values = (
            values.reshape(shape) if not level.mapped(values) else level.wrap(values.value.reshape(level.size, *shape))
        )
    if values.dtype != x.dtype:
        raise IndexError(
            f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
            f"{values.dtype} for the source."
        )
    check_mask(x, first, mask)
    where = _mask_over(level, x, first, mask)
    return where, aligner(level, [x, values], promote=False)(values)


def one_to_fill(level, x, indices, value):
    """A value of another dtype than x: by a mask alone, one value is filled in, of whatever dtype."""
    used = [index for index in indices if index is not None]
    if value.numel() != 1 or len(used) != 1 or used[0].dtype not in (torch.bool, torch.uint8):
        return value
    if value.is_complex() > x.is_complex():
        return value
    below = level.physical(value).to(x.dtype)
    return level.wrap(below) if level.mapped(value) else below


def _comes_back_to_index():
    node = current_autograd_node()
    return node is not None and node.name().startswith(("IndexBackward", "UnsafeIndexBackward"))
