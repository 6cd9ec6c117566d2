"""`out_dims="list"` and `"jagged"`: results of lanes that need not have one shape."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import on_plane
from lanewise._core.parting.absent import left
from lanewise._core.plane import Plane, sync
from lanewise._core.recording.kept_history import with_history
from lanewise._core.trees import children_of, flatten, unflatten
from lanewise.errors import TransformError, at_user_line

LIST, JAGGED = "list", "jagged"


class Apart:
    """One result for each lane.

    Attributes:
        items: The results, in the order of the lanes, on the plane below.
    """

    __slots__ = ("items",)

    def __init__(self, items: list) -> None:
        self.items = items


class Ragged:
    """One tensor `[n_i, *S]` for each lane.

    Attributes:
        values: All of them, one after the other `[sum of n_i, *S]`, on the plane below.
        lengths: The `n_i`.
    """

    __slots__ = ("values", "lengths")

    def __init__(self, values: Tensor, lengths: list[int]) -> None:
        self.values = values
        self.lengths = lengths

    def text(self) -> str:
        """The shape in the first lane, for messages."""
        return str([*self.lengths[:1], *self.values.shape[1:]])


def is_ragged(out_dims: Any) -> bool:
    """Whether any entry is "list" or "jagged"."""
    if type(out_dims) is int or out_dims is None:
        return False
    children = children_of(out_dims)
    if children is None:
        return out_dims in (LIST, JAGGED)
    return any(is_ragged(entry) for _, entry in children)


def taken_apart(level: BatchLevel, leaf: Any, dim: Any, where: str) -> Any:
    """What a result is for the entry "list" or "jagged" of `out_dims`, for the lanes that run; others as they are."""
    if dim == LIST and type(leaf) is not Apart:
        return Apart(_each_lane(level, leaf))
    if dim == JAGGED and isinstance(leaf, Tensor):
        return _one_by_one(level, leaf, where)
    return leaf


def _each_lane(level: BatchLevel, tree: Any) -> list:
    """One tree for each lane that runs."""
    leaves, spec = flatten(tree)
    columns = [_rows(level, leaf) for leaf in leaves]
    return [unflatten([column[lane] for column in columns], spec) for lane in range(level.size)]


def _rows(level: BatchLevel, leaf: Any) -> list:
    if type(leaf) is Apart:
        return leaf.items
    if not isinstance(leaf, Tensor):
        return [leaf] * level.size
    value, lanes = below(level, leaf)
    if not lanes:
        if value.is_inference() and not torch.is_inference_mode_enabled():
            value = level.below(torch.clone, value)
        return [value] * level.size
    return level.below(_copies, value)


def _copies(value: Tensor) -> list[Tensor]:
    # Copies: a row of its own can be written to, and does not keep the memory of all.
    return [row.clone() for row in value.unbind()]


def below(level: BatchLevel, tensor: Tensor) -> tuple[Tensor, bool]:
    """A result for the lanes that run, on the plane below, and whether it has lanes: `[n, *S]` or `[*S]`."""
    if level.owns(tensor) and not tensor.mapped:
        sync(tensor)
    value = level.here(tensor)
    below, lanes = (left(level, value.value), True) if level.mapped(value) else (level.physical(value), False)
    return with_history(level, value, below), lanes


def _one_by_one(level: BatchLevel, tensor: Tensor, where: str) -> Ragged:
    if not tensor.dim():
        raise TransformError(
            at_user_line(
                f'vmap: {where} has no dims in a lane, so lanes cannot differ in the first: out_dims="jagged" does not '
                "fit it",
                "vmap(f, out_dims=0)(xs)",
            )
        )
    value, lanes = below(level, tensor)
    if not lanes:
        value = level.below(value.expand, level.size, *value.shape)
    return Ragged(level.below(value.flatten, 0, 1), [tensor.shape[0]] * level.size)


def put_in_order(level: BatchLevel, parts: list, order: Tensor) -> Any:
    """One `Apart` or `Ragged` from that of each piece. `order` as in lanes.Target."""
    if type(parts[0]) is Apart:
        items = [item for part in parts for item in part.items]
        return Apart([items[place] for place in order.tolist()])
    known = [length for part in parts for length in part.lengths]
    with on_plane(None):
        lengths = torch.tensor(known, dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths
        order = order.cpu()
        chosen = lengths[order]
        steps = torch.arange(int(chosen.sum())) - (chosen.cumsum(0) - chosen).repeat_interleave(chosen)
        rows = starts[order].repeat_interleave(chosen) + steps
    return Ragged(level.below(_gathered, [part.values for part in parts], rows), chosen.tolist())


def _gathered(values: list[Tensor], rows: Tensor) -> Tensor:
    return torch.cat(values).index_select(0, rows.to(values[0].device))


def result(leaf: Any, where: str, given: Sequence = ()) -> Any:
    """An `Apart` or `Ragged` as the caller gets it. A nested tensor has the offsets of one `given` if they fit."""
    if type(leaf) is Apart:
        return leaf.items
    if isinstance(leaf.values, Plane):
        raise TransformError(
            at_user_line(
                f'vmap: {where}: a nested tensor cannot be made inside another transform, as out_dims="jagged" asks '
                "for here",
                'vmap(f, out_dims="list")(xs)  # a list, one result for each lane',
            )
        )
    return _nested(leaf.values, leaf.lengths, given)


def _nested(values: Tensor, lengths: list[int], given: Sequence) -> Tensor:
    with on_plane(None):
        places = [0, *accumulate(lengths)]
        offsets = next((o for o in map(_offsets, given) if o is not None and o.tolist() == places), None)
        if offsets is None:
            offsets = torch.tensor(places, device=values.device)
        least, most = (min(lengths), max(lengths)) if lengths else (0, 0)
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=least, max_seqlen=most)


def _offsets(leaf: Any) -> Tensor | None:
    return leaf.offsets() if is_jagged(leaf) and leaf.lengths() is None else None


def joined(leaves: list, dim: str, given: Sequence) -> Any:
    """The results of all chunks, one after the other."""
    if dim == LIST:
        return [item for leaf in leaves for item in leaf]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves[0]
    lengths = [length for leaf in leaves for length in leaf.offsets().diff().tolist()]
    return _nested(torch.cat([leaf.values() for leaf in leaves]), lengths, given)


def is_jagged(leaf: Any) -> bool:
    """Whether `leaf` is a nested tensor of jagged layout."""
    return isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout is torch.jagged


def by_component(leaf: Any, dim: int) -> bool:
    """Whether the lanes of `leaf` are components of a nested tensor, or sparse parts along `dim`."""
    if not isinstance(leaf, Tensor):
        return False
    if leaf.is_nested:
        return dim in (0, -leaf.dim())
    return leaf.layout in _SPARSE and -leaf.dim() <= dim < leaf.dim()


# Layouts of which `select` gives parts.
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class Components:
    """Parts of a nested or a sparse tensor as lanes. Those that run together have one shape, or are one sparse part.

    Attributes:
        lanes: The parts, one for each lane.
        sparse: Whether they are sparse.
        none: What no lanes are: `[0, 0, *S]`, or a sparse part without entries.
    """

    __slots__ = ("lanes", "sparse", "none")

    def __init__(self, tensor: Tensor, dim: int, start: int, length: int) -> None:
        self.sparse = not tensor.is_nested
        if self.sparse:
            self.lanes = [tensor.select(dim, lane) for lane in range(start, start + length)]
            rest = [size for place, size in enumerate(tensor.shape) if place != dim % tensor.dim()]
            self.none = torch.zeros(rest, dtype=tensor.dtype, device=tensor.device).to_sparse()
            return
        self.lanes = tensor.unbind()[start : start + length]
        like = tensor.values()[:0] if tensor.layout is torch.jagged else next(iter(self.lanes), torch.empty(0))[:0]  # type: ignore[operator]
        self.none = like.reshape(0, 0, *like.shape[1:])

    def kind(self, place: int) -> Any:
        """What is the same for lanes that may run together."""
        return place if self.sparse else self.lanes[place].shape

    def stacked(self, places: list[int]) -> Tensor:
        """Those at `places` `[n, *S]`, or the one sparse part."""
        if not places:
            return self.none
        if self.sparse:
            return self.lanes[places[0]].clone()  # a part is a copy: what is written to it is gone when it runs again
        return torch.stack([self.lanes[place] for place in places])
