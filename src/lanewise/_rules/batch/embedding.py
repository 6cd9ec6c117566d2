"""Embedding tables and bags. A table with lanes is read as one table of `B * V` rows, with indices shifted by lane."""

import torch
from torch import Tensor

from lanewise._core.batch import BATCH_RULES, BatchTensor
from lanewise._core.missing import no_strides
from lanewise._core.one_lane import FAILURES
from lanewise._core.plane import Plane, lift
from lanewise._core.python.factories import route, unrouted
from lanewise._core.short.direct import unwatched
from lanewise._rules.batch.families import lane_rule
from lanewise._rules.batch.operands import split_lanes
from lanewise._rules.batch.spread import Embedding, apply, is_spread, shifted, unseen
from lanewise._torch_compat import current_autograd_node, fast_binding
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten


def _shifted(indices: Tensor, rows: int, last: int = 0) -> Tensor:
    """indices [B, *I] into a table of each lane -> into all tables, one below the other; `last` more may be named"""
    _check_range(indices, rows + last)
    return shifted(indices, rows)


def _check_range(indices: Tensor, rows: int) -> None:
    """Raise for an index that would reach the table of another lane."""
    while isinstance(indices, Plane):
        indices = indices.value
    if type(indices) is Tensor and indices.is_cpu and indices.numel():
        low, high = torch.aminmax(indices)
        if low < 0 or high >= rows:
            raise IndexError("index out of range in self")


@lane_rule(aten.embedding.default)
def embedding(level, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """weight [B, V, D], indices [B, *I], either without B -> [B, *I, D]

    The last three arguments are about the gradient, which a plane below may take: frequencies are counted in each lane,
    and the row at `padding_idx` gets none.
    """
    rows, width = weight.shape
    if not level.mapped(weight) and not scale_grad_by_freq:
        return torch.embedding(weight, indices.value, padding_idx, scale_grad_by_freq, sparse)
    plain = level.parent is None and level.mapped(indices) and not (scale_grad_by_freq or sparse)
    if plain and is_spread(weight.value) and unseen():
        return apply(Embedding(padding_idx), indices.value, weight.value)
    table = level.expanded(weight)
    if not level.mapped(indices) and not scale_grad_by_freq:
        _check_range(indices, rows)
        out = table.index_select(1, indices.reshape(-1)).reshape(level.size, *indices.shape, width)
    else:
        places = _shifted(level.expanded(indices), rows)
        out = torch.embedding(table.reshape(level.size * rows, width), places, -1, scale_grad_by_freq, sparse)
    if padding_idx >= 0 and torch.is_grad_enabled() and (isinstance(out, Plane) or out.requires_grad):
        with torch.no_grad():
            fixed = out.clone()
        out = torch.where((level.expanded(indices) == padding_idx).unsqueeze(-1), fixed, out)
    return out


@lane_rule(aten.embedding_dense_backward.default)
def embedding_backward(level, grad, indices, rows, padding_idx, scale_grad_by_freq):
    """grad [B, *I, D], indices [B, *I] -> [B, rows, D]; lanes of grad alone go into its width"""
    lanes = level.size
    if not level.mapped(indices):
        folded = grad.value.movedim(0, -2).flatten(-2)
        out = aten.embedding_dense_backward(folded, indices, rows, padding_idx, scale_grad_by_freq)
        return out.unflatten(1, (lanes, grad.shape[-1])).transpose(0, 1)
    grad, indices = level.expanded(grad), indices.value
    if padding_idx >= 0:
        grad = grad.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
    places = _shifted(indices, rows)
    out = aten.embedding_dense_backward(grad, places, lanes * rows, -1, scale_grad_by_freq)
    return split_lanes(out, lanes, rows)


@lane_rule(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def sparse_gradient(level, sparse_dim, dense_dim, size, indices, values, **options):
    """indices [B, 1, N], values [B, N, D] -> [B, V, D], dense: the gradient of a table with `sparse=True`"""
    node = current_autograd_node()
    if node is None or not node.name().startswith("EmbeddingB"):
        op = aten._sparse_coo_tensor_with_dims_and_tensors.default
        raise TransformError(at_user_line(*no_strides(op, "sparse_coo")))
    rows = level.expanded(values)
    places = level.expanded(indices)[:, 0, :, None].expand_as(rows)
    return rows.new_zeros(level.size, *size).scatter_add(1, places, rows)


@lane_rule(aten.embedding_renorm_.default, raw=True)
def embedding_renorm_(level, weight, indices, max_norm, norm_type):
    """weight [B, V, D] or [V, D], indices [B, *I]: the rows named are shortened to max_norm, in place

    A captured weight, or a view of it, may be written to here: a row ends the same whichever lanes name it, and however
    often.
    """
    if level.owns(weight) and level.mapped(indices) and not _is_captured(level, weight):
        lift(weight)
    table = level.physical(weight)
    places = level.physical(indices)
    if type(table) is BatchTensor and table.level.mapped(places):
        lift(table)  # where its history is recorded
    if level.mapped(weight):
        places = _shifted(level.expanded(indices), weight.shape[0])
    flat = table.reshape(-1, weight.shape[1])
    with torch.no_grad():
        torch.embedding_renorm_(flat, places.reshape(-1), max_norm, norm_type)
        if not table.is_contiguous():
            table.copy_(flat.view(table.shape))
    return weight


def _is_captured(level, weight):
    """Whether an operand is a tensor from outside the function, or a view of one."""
    while level.owns(weight) and not level.lifted(weight) and weight.origin:
        weight = weight.origin[0]
    return not level.owns(weight) or weight.captured


# The handler would give a weight from outside lanes, or refuse it; the rule decides by itself where to write.
BATCH_RULES[aten.embedding_renorm_.default].mutates = False


# --- bags ------------------------------------------------------------------------------------------------------------

SUM, MEAN, MAX = range(3)


def _bag_of_each(offsets: Tensor, count: int) -> Tensor:
    """offsets [B, bags] -> [B, count], the bag that each position belongs to"""
    places = torch.arange(count, dtype=offsets.dtype, device=offsets.device).expand(offsets.shape[0], count)
    return torch.searchsorted(offsets.contiguous(), places.contiguous(), right=True) - 1


@lane_rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    level,
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    """weight [B, V, D], indices [B, n], offsets [B, bags] -> out [B, bags, D], the bag of each index [B, n], the
    bag sizes [B, bags], and for `max` the index that won [B, bags, D]

    The bags of all lanes lie behind one another. A last offset becomes a bag of its own, which is dropped.
    """
    lanes, (rows, width), count = level.size, weight.shape, indices.shape[0]
    table, places, starts = weight, level.expanded(indices), level.expanded(offsets)
    bags = _bag_of_each(starts, count)
    if level.mapped(weight) or scale_grad_by_freq:
        table = level.expanded(weight).reshape(lanes * rows, width)
        shifted = _shifted(places, rows)
        # A padding index is skipped, so all lanes may name one row for it.
        places = shifted if padding_idx < 0 else torch.where(places == padding_idx, padding_idx, shifted)
    weights = None if per_sample_weights is None else level.expanded(per_sample_weights).reshape(-1)
    # The twin for no_grad mode would refuse a weight that requires grad on the plane below.
    out, _, sizes, won = aten._embedding_bag(
        table,
        places.reshape(-1),
        _shifted(starts, count, last=1).reshape(-1),
        scale_grad_by_freq,
        mode,
        sparse,
        weights,
        False,
        padding_idx,
    )
    kept = starts.shape[1] - include_last_offset
    out, sizes = (t.reshape(lanes, starts.shape[1], *t.shape[1:])[:, :kept] for t in (out, sizes))
    won = won.reshape(lanes, starts.shape[1], width)[:, :kept] % max(rows, 1) if mode == MAX else sizes
    return out, bags, sizes, won


def _slopes_of_each(level, grad, indices, offsets, bags, padding_idx):
    """grad [B, bags, D] -> indices [B, n] and the slope that each of them gets [B, n, D], none for padding"""
    grad, indices = level.expanded(grad), level.expanded(indices)
    count = indices.shape[1]
    bags = level.expanded(bags) if bags.numel() == count else _bag_of_each(level.expanded(offsets), count)
    skipped = (bags >= grad.shape[1]) | (indices == padding_idx)
    where = bags.clamp(max=max(grad.shape[1] - 1, 0)).unsqueeze(2).expand(-1, -1, grad.shape[2])
    return indices, grad.gather(1, where).masked_fill(skipped.unsqueeze(2), 0)


@lane_rule(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    level,
    grad,
    indices,
    offsets,
    bags,
    sizes,
    won,
    rows,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    """grad [B, bags, D], indices [B, n] -> gradient in weight [B, rows, D], dense"""
    sizes = level.expanded(sizes).unsqueeze(2)
    if mode == MAX:
        slopes = level.expanded(grad).masked_fill(sizes == 0, 0)
        return slopes.new_zeros(level.size, rows, slopes.shape[2]).scatter_add(1, level.expanded(won), slopes)
    if mode == MEAN:
        grad = level.wrap(level.expanded(grad) / sizes.clamp(min=1))
    indices, slopes = _slopes_of_each(level, grad, indices, offsets, bags, padding_idx)
    if per_sample_weights is not None:
        slopes = slopes * level.expanded(per_sample_weights).unsqueeze(2)
    places = _shifted(indices, rows)
    out = aten.embedding_dense_backward(slopes, places, level.size * rows, -1, scale_grad_by_freq)
    return split_lanes(out, level.size, rows)


@lane_rule(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_weights_backward(level, grad, weight, indices, offsets, bags, mode, padding_idx=-1):
    """grad [B, bags, D], weight [B, V, D], indices [B, n] -> gradient in per_sample_weights [B, n]"""
    indices, slopes = _slopes_of_each(level, grad, indices, offsets, bags, padding_idx)
    if level.mapped(weight):
        rows = weight.value.gather(1, indices.unsqueeze(2).expand(-1, -1, weight.shape[1]))
    else:
        rows = weight[indices]
    return (slopes * rows).sum(2)


# --- one hot ---------------------------------------------------------------------------------------------------------


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """x [*S], int64 -> [*S, num_classes]. torch's own looks at the values of plain tensors only."""
    if not isinstance(x, Plane):
        return unrouted(aten.one_hot.default, x, num_classes)
    if x.dtype is not torch.int64:
        raise TransformError(
            at_user_line(
                f"one_hot is only applicable to index tensor of type LongTensor, got {x.dtype}", "one_hot(x.long(), n)"
            )
        )
    if num_classes == 0 or num_classes < -1 or (num_classes == -1 and not x.numel()):
        raise TransformError(
            at_user_line(
                "one_hot: Class values must be smaller than num_classes, or without it there must be some: got "
                f"num_classes={num_classes} and {x.numel()} class values",
                "one_hot(x, num_classes=10)",
            )
        )
    if type(x) is BatchTensor and x.mapped and num_classes > 0 and unwatched(x.level) and x.home is x.level.lanes:
        try:
            return x.level.wrap(x.level.below(_plain_one_hot, x.value, num_classes))
        except FAILURES:
            pass  # for some lanes only, perhaps
    if num_classes == -1:
        num_classes = int(x.max()) + 1
    aten._assert_async.msg((x >= 0).all(), "Class values must be non-negative.")
    aten._assert_async.msg((x < num_classes).all(), "Class values must be smaller than num_classes.")
    return (x.contiguous().unsqueeze(-1) == torch.arange(num_classes, device=x.device)).to(torch.int64)


_plain_one_hot = fast_binding(aten.one_hot.default)
route(aten.one_hot.default, _one_hot)
