"""Operations whose result is a Python value, or has a shape that depends on values.

Where every lane gives the same (the same Python value, the same shape) the result is what a loop over the lanes gives;
where lanes differ there is no such tensor, and the error says so.
"""

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.dual import taken_as_number
from lanewise._core.parting.joins import part_by
from lanewise._core.parting.unasked import answer, note_question
from lanewise._core.python.factories import route
from lanewise._rules.batch.families import lane_rule, refuse
from lanewise._rules.batch.operands import aligner, at_least_1d, common_shape
from lanewise.errors import LaneValueError, TransformError, at_user_line

aten = torch.ops.aten


# --- Python values ---------------------------------------------------------------------------------------------------


@lane_rule(aten._local_scalar_dense.default, raw=True)
def local_scalar_dense(level, x):
    """The one number of all lanes, or an error; zero or one where there are no lanes."""
    taken_as_number(x)
    if not level.mapped(x):
        return level.physical(x).item()
    note_question(level)
    if not level.size:
        return torch.full((), answer(level), dtype=x.dtype).item()
    numbers = x.value.flatten()
    first = numbers.select(0, 0)
    if bool(((numbers == first) | ((numbers != numbers) & (first != first))).all()):
        return first.item()
    part_by(level, numbers)
    raise LaneValueError(
        at_user_line(
            "vmap: It looks like you're calling .item on a Tensor, or attempting to use a Tensor in some "
            f"data-dependent control flow. The value differs from lane to lane, of which there are {level.size}: there "
            "is no one Python value",
            "torch.where(condition, a, b)      # instead of `if condition`\n"
            "keep the value in a tensor        # instead of .item(), float() or int()",
        )
    )


def agreed(level: BatchLevel, verdicts: Tensor, name: str) -> bool:
    """verdicts [B] -> the one verdict of all lanes, or an error; either where there are no lanes."""
    note_question(level)
    if not level.size:
        return answer(level)
    if torch.equal(verdicts, torch.ones_like(verdicts)):
        return True
    if torch.equal(verdicts, torch.zeros_like(verdicts)):
        return False
    part_by(level, verdicts)
    raise LaneValueError(
        at_user_line(
            f"vmap: {name} is attempting to use a Tensor in some data-dependent control flow: it is true in some lanes "
            f"and false in others (vmap over torch.{name} isn't supported yet in that case)",
            "(a == b).all()                    # a value of each lane, for torch.where",
        )
    )


@lane_rule(aten.equal.default, raw=True)
def equal(level, a, b):
    """a, b [B, *S] -> whether they are equal, if all lanes agree."""
    if a.shape != b.shape:
        return False
    if not level.mapped(a) and not level.mapped(b):
        return torch.equal(level.physical(a), level.physical(b))
    same = at_least_1d(level, a) == at_least_1d(level, b)
    return agreed(level, same.flatten(1).all(1), "equal")


@lane_rule(aten.allclose.default, raw=True)
def allclose(level, a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    """a, b [B, *S] -> whether they are close, if all lanes agree."""
    if not level.mapped(a) and not level.mapped(b):
        return torch.allclose(level.physical(a), level.physical(b), rtol, atol, equal_nan)
    align = aligner(level, [a, b], promote=False)
    close = torch.isclose(align(a), align(b), rtol, atol, equal_nan)
    shape = common_shape(a, b)
    return agreed(level, close.expand(level.size, *shape).reshape(level.size, shape.numel()).all(1), "allclose")


# --- shapes ----------------------------------------------------------------------------------------------------------


def differing_shapes(what: str, counts: str, instead: str) -> LaneValueError:
    """The error for results whose shape differs from lane to lane."""
    return LaneValueError(
        at_user_line(
            f"vmap: {what}: batching operators that can output dynamic shape is not possible where lanes differ in "
            f"shape: {counts}",
            instead,
        )
    )


def common_count(level: BatchLevel, counts: Tensor, total: int, what: str) -> int:
    """counts [B] with their sum -> the one count of all lanes, or an error."""
    note_question(level)
    count = total // max(level.size, 1)
    if count * level.size != total or not torch.equal(counts, torch.full_like(counts, count)):
        part_by(level, counts)
        raise differing_shapes(
            what,
            f"{total} elements in {level.size} lanes, not as many in each",
            "torch.where(mask, x, 0)           # one shape for all lanes\n"
            "x[mask] = 0                       # a scalar value is fine",
        )
    return count


def lane_positions(level: BatchLevel, mask: Tensor) -> list[tuple[Tensor, int, bool]]:
    """A bool mask as indices, one for each of its dims: the tensor below, logical rank 1, and whether it has lanes."""
    if not level.mapped(mask):
        return [(index, 1, False) for index in mask.nonzero().unbind(1)]
    found = mask.value.nonzero()
    count = common_count(
        level,
        at_least_1d(level, mask).bool().flatten(1).sum(1),
        found.shape[0],
        "indexing can support dynamic shape only if lanes agree. Attempting to batch over indexing with a boolean mask",
    )
    return [(index.view(level.size, count), 1, True) for index in found[:, 1:].unbind(1)]


@lane_rule(aten.nonzero.default)
def nonzero(level, x):
    """x [B, *S] -> [B, n, rank], the same n in all lanes"""
    found = x.value.nonzero()
    counts = (at_least_1d(level, x) != 0).flatten(1).sum(1)
    count = common_count(level, counts, found.shape[0], "torch.nonzero (also torch.where with one argument)")
    return found[:, 1:].reshape(level.size, count, x.dim())


@lane_rule(aten.masked_select.default)
def masked_select(level, x, mask):
    """x [B, *S], mask [*M] or, picking as many in each lane, [B, *M] -> [B, n]"""
    shape = common_shape(x, mask)
    align = aligner(level, [x, mask], promote=False)
    below = align(x).expand(level.size, *shape).reshape(level.size, shape.numel())
    if not level.mapped(mask):
        return below[:, mask.expand(shape).reshape(-1)]
    where = align(mask).expand(level.size, *shape).reshape(level.size, shape.numel())
    picked = torch.masked_select(below, where)
    count = common_count(level, where.sum(1), picked.shape[0], "vmap over `mask` in torch.masked_select")
    return picked.view(level.size, count)


def common_number(level: BatchLevel, numbers: Tensor, what: str) -> int:
    """numbers [B] -> the one number of all lanes, or an error."""
    note_question(level)
    if not level.size:
        return 0
    first = numbers.select(0, 0)
    if not torch.equal(numbers, first.expand(level.size)):
        part_by(level, numbers)
        raise differing_shapes(what, "the size of the result differs", "give the size: minlength= or output_size=")
    return int(first)


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@lane_rule(aten.bincount.default)
def bincount(level, x, weights=None, minlength=0):
    """x [B, n], weights [B, n] -> how often each whole number occurs [B, m], the same m in all lanes"""
    if x.dim() != 1 or x.dtype not in _WHOLE or (weights is not None and weights.shape != x.shape):
        raise RuntimeError(f"bincount only supports 1-d non-negative integral inputs, got {list(x.shape)} {x.dtype}")
    note_question(level)  # without lanes or numbers, too, where nothing has to be agreed on
    values = level.expanded(x).long()
    floor = minlength
    if x.numel() and level.size:
        if not torch.equal(values, values.clamp_min(0)):
            raise TransformError(at_user_line("bincount only supports 1-d non-negative integral inputs"))
        floor = common_number(level, (values.amax(1) + 1).clamp_min(minlength), "torch.bincount")
    if weights is None:
        amounts = torch.ones_like(values)
    else:
        amounts = level.expanded(weights)
        amounts = amounts if amounts.dtype == torch.float32 else amounts.double()
    out = torch.zeros((level.size, floor), dtype=amounts.dtype, device=x.device)
    return out.scatter_add(1, values, amounts)


@lane_rule(aten.repeat_interleave.Tensor)
def repeat_interleave(level, repeats, *, output_size=None):
    """repeats [B, n] -> the place that each repetition comes from [B, m], the same m in all lanes"""
    if repeats.dim() != 1:
        raise TransformError(at_user_line("repeat_interleave only accept 1D vector as repeat"))
    if not torch.equal(repeats.value, repeats.value.clamp_min(0)):
        raise TransformError(at_user_line("repeats can not be negative"))
    ends = repeats.value.cumsum(1)
    if output_size is None:
        note_question(level)
        output_size = common_number(level, ends[:, -1], "torch.repeat_interleave") if repeats.numel() else 0
    places = torch.arange(output_size, device=repeats.device).expand(level.size, output_size)
    return torch.searchsorted(ends, places.contiguous(), right=True).to(repeats.dtype)


@lane_rule(aten.nonzero_static.default)
def nonzero_static(level, x, *, size, fill_value=-1):
    """x [B, *S] -> [B, size, rank], filled up or cut off"""
    if size < 0:
        raise TransformError(at_user_line(f"nonzero_static: 'size' must be an non-negative integer, got {size}"))
    flat = (at_least_1d(level, x) != 0).flatten(1)
    order = torch.where(flat, (flat.cumsum(1) - 1).clamp_max(size), size)
    places = torch.arange(flat.shape[1], device=x.device).expand(flat.shape)
    where = torch.full((level.size, size + 1), -1, dtype=torch.int64, device=x.device).scatter(1, order, places)[
        :, :size
    ]
    columns = []
    for extent in reversed(x.shape):
        columns.insert(0, torch.where(where < 0, fill_value, where.remainder(max(extent, 1))))
        where = torch.where(where < 0, where, where.div(max(extent, 1), rounding_mode="floor"))
    return torch.stack(columns, 2) if columns else where.new_empty((level.size, size, 0))


# --- what has no meaning on lanes ------------------------------------------------------------------------------------

for _op in (
    aten.set_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.source_Tensor_storage_offset,
):
    refuse(
        _op,
        "vmap: set_ exchanges the memory of a tensor, and the lanes of a mapped tensor share one memory",
        "x.copy_(source)                   # or x = source",
    )


def _tensor_split(x: Tensor, indices: Tensor, dim: int = 0) -> list[Tensor]:
    """torch's own reads the memory of the indices."""
    places = [int(index) for index in indices.unbind()] if indices.dim() else int(indices)
    return aten.tensor_split(x, places, dim)


route(aten.tensor_split.tensor_indices_or_sections, _tensor_split)

for _op in (
    aten._nnz.default,
    aten._sparse_mask_projection.default,
    aten._sparse_mm_reduce_impl.default,
    aten._sparse_mm_reduce_impl_backward.default,
    aten._to_sparse.default,
    aten._to_sparse.sparse_dim,
    aten._to_sparse_bsc.default,
    aten._to_sparse_bsr.default,
    aten._to_sparse_csc.default,
    aten._to_sparse_csr.default,
    aten.is_coalesced.default,
    aten.sparse_mask.default,
    aten.sparse_sampled_addmm.default,
):
    refuse(
        _op,
        f"vmap: {_op}: sparse tensors cannot have lanes",
        "torch.where(mask, x, 0)           # dense inside the mapped function, .to_sparse() outside",
    )
