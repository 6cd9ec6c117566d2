"""The results of lanes that took different ways, put together leaf by leaf."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs.naming import lane_names
from lanewise._control.runtime.numbers import DTYPES, RANK, LaneNumber
from lanewise._control.runtime.numbers import as_tensor as as_made
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import component, merge_tensors, on_home, rows_of
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, Target, Unmergeable
from lanewise._core.trees import PrefixMismatch, Spec, flatten, flatten_with_prefix, spec_names, unflatten
from lanewise._transforms.numbers import NUMBERS, fits, same_number, too_large
from lanewise._transforms.ragged import LIST, Apart, Ragged, is_ragged, put_in_order, taken_apart
from lanewise.errors import LaneValueError, TransformError, at_user_line

_NUMBERS = (*NUMBERS, LaneNumber)


def put_together(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Any]) -> Any:
    """One result from that of each piece. Numbers that differ become a tensor with lanes, as stacking would make it.

    Raises: as `with_numbers`.
    """
    return without_numbers(with_numbers(level, target, pieces, values))


def with_numbers(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Any], out_dims: Any = 0) -> Any:
    """One result from that of each piece, in which numbers that differ are numbers with lanes.

    What `out_dims` calls "list" or "jagged" is an `Apart` or `Ragged` in the result.

    Raises:
        PrefixMismatch: `out_dims` does not fit.
        TransformError: Structures or shapes differ.
        LaneValueError: Values that are neither tensors nor numbers differ.
    """
    leaves, spec = _parts(level, pieces[0], values[0], out_dims)
    columns = [leaves]
    for value, piece in zip(values[1:], pieces[1:]):
        others, other_spec = _parts(level, piece, value, out_dims)
        if other_spec != spec:
            raise TransformError(
                at_user_line(
                    f"vmap: lanes return results of different structure: {lane_text(level, pieces[0])} {spec}, "
                    f"{lane_text(level, piece)} {other_spec}",
                    "return the same containers, with the same keys, from every branch\n"
                    'vmap(f, out_dims="list")(xs)  # or a list, one result for each lane',
                )
            )
        columns.append(others)
    merged = []
    for position, parts in enumerate(zip(*columns)):
        try:
            merged.append(_leaf(level, target, pieces, list(parts)))
        except _TooLarge as large:
            raise too_large(spec_names(spec, "output")[position], large.number) from None
        except Unmergeable as reason:
            raise _differing(level, pieces, list(parts), spec_names(spec, "output")[position], str(reason)) from None
    return unflatten(merged, spec)


def _parts(level: LaneLevel, piece: Lanes, value: Any, out_dims: Any) -> tuple[list, Spec]:
    """The leaves of the result of one piece, and the structure."""
    if not is_ragged(out_dims):
        return flatten(value)
    leaves, dims, spec = flatten_with_prefix(out_dims, value)
    running = level.lanes
    level.lanes = piece
    try:
        return [_taken_apart(level, leaf, dim) for leaf, dim in zip(leaves, dims)], spec
    finally:
        level.lanes = running


def _taken_apart(level: LaneLevel, leaf: Any, dim: Any) -> Any:
    if dim == LIST:
        inner, spec = flatten(leaf)
        leaf = unflatten([Apart(_numbers(level, x)) if isinstance(x, LaneNumber) else x for x in inner], spec)
    return taken_apart(level, leaf, dim, "output")


def _numbers(level: LaneLevel, number: LaneNumber) -> list:
    """The Python number of each lane that runs."""
    rows = rows_of(level, component(level, number.value)) if component(level, number.value) is not None else None
    return [number.resolve()] * level.size if rows is None else [number.kind(value) for value in rows.tolist()]


def apart(level: LaneLevel, value: Any, out_dims: Any) -> Any:
    """A result with an `Apart` or `Ragged` where `out_dims` says "list" or "jagged".

    Numbers of lanes are tensors; where it says None, or nothing was asked of these lanes but of those around, and they
    are all the same, they are one number.
    """
    if type(out_dims) is int and level.asked:
        return without_numbers(value)
    leaves, spec = _parts(level, level.lanes, value, out_dims)
    if any(isinstance(leaf, LaneNumber) for leaf in leaves):
        try:
            _, dims, _ = flatten_with_prefix(out_dims, unflatten(leaves, spec))
        except PrefixMismatch:  # as `leave` will say
            dims = [0] * len(leaves)
        for place, dim in enumerate(dims):
            if isinstance(leaves[place], LaneNumber):
                several = level.asked and dim is not None
                leaves[place] = as_tensor(leaves[place]) if several else _one_of_all(level, leaves[place])
    return unflatten(leaves, spec)


def _one_of_all(level: LaneLevel, number: LaneNumber) -> Any:
    """The number that all lanes have, also one of each lane around; a tensor where they have not the same."""
    part = component(level, number.value)
    if part is None or part.level is not level:
        return number  # of the lanes around
    numbers, each, outer = _numbers(level, number), level.own_size, level.outer
    if not each:
        return number.kind(0)
    firsts = numbers[::each]
    if not all(same_number(entry, firsts[place // each]) for place, entry in enumerate(numbers)):
        return as_tensor(number)
    if outer is None or all(same_number(first, firsts[0]) for first in firsts):
        return firsts[0] if firsts else number.kind(0)
    with on_plane(None):
        plain = torch.tensor(firsts, dtype=DTYPES[number.kind])
    return LaneNumber(number.kind, outer.wrap(plain))


def _leaf(level: LaneLevel, target: Target, pieces: list[Lanes], parts: list[Any]) -> Any:
    first = parts[0]
    if type(first) is Apart:
        return put_in_order(level, parts, target.order)
    if any(type(part) is Ragged for part in parts):
        if not all(type(part) is Ragged for part in parts):
            raise Unmergeable("types")
        if any(part.values.shape[1:] != first.values.shape[1:] for part in parts):
            raise Unmergeable("shapes")
        for part, values in zip(parts, level.below(same_dtype, [part.values for part in parts])):
            part.values = values
        return put_in_order(level, parts, target.order)
    if isinstance(first, Tensor) and all(part is first for part in parts) and on_home(level, first):
        return first
    if any(isinstance(part, Tensor) for part in parts):
        if not all(isinstance(part, (Tensor, *_NUMBERS)) for part in parts):
            raise Unmergeable("types " + " and ".join(sorted({_kind(part) for part in parts})))
        return merge_tensors(level, target, pieces, _tensors(level, pieces, parts))
    if all(part is first for part in parts):
        return first
    if all(isinstance(part, _NUMBERS) for part in parts):
        if type(first) is not LaneNumber and all(same_number(part, first) for part in parts):
            return first
        kinds = {part.kind if type(part) is LaneNumber else type(part) for part in parts}
        if not kinds <= set(RANK):
            return merge_tensors(level, target, pieces, _tensors(level, pieces, parts))
        kind = max(kinds, key=RANK.__getitem__)
        wide = _for_each(level, pieces, parts, lambda part: _widest(part, kind))
        return LaneNumber(kind, merge_tensors(level, target, pieces, wide))
    try:
        if all(type(part) is type(first) and bool(part == first) for part in parts):
            return first
    except (TypeError, ValueError, RuntimeError):
        pass
    raise Unmergeable("values")


def _tensors(level: LaneLevel, pieces: list[Lanes], parts: list[Any]) -> list[Tensor]:
    """Tensors and numbers as tensors of one dtype, as stacking would make them."""
    tensors = _for_each(level, pieces, parts, as_tensor)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return _for_each(level, pieces, tensors, lambda tensor: tensor if tensor.dtype is dtype else tensor.to(dtype))


def _for_each(level: LaneLevel, pieces: list[Lanes], parts: list[Any], run: Callable[[Any], Any]) -> list[Any]:
    """`run(part)` on the lanes of each piece."""
    running = level.lanes
    out = []
    try:
        for piece, part in zip(pieces, parts, strict=True):
            level.lanes = piece
            out.append(run(part))
    finally:
        level.lanes = running
    return out


class _TooLarge(Exception):
    """An int that int64 does not hold."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _widest(number: Any, kind: type) -> Tensor:
    """A number as a tensor of the widest dtype of a kind."""
    if type(number) is LaneNumber:
        return number.value.to(DTYPES[kind])
    if type(number) is int and kind is int and not fits(number):
        raise _TooLarge(number)
    with on_plane(None):
        return torch.tensor(kind(number), dtype=DTYPES[kind])


def as_tensor(value: Any) -> Tensor:
    """A number as stacking would make it a tensor; a tensor as it is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, LaneNumber):
        return as_made(value)
    with on_plane(None):
        return torch.tensor(value)


def without_numbers(result: Any) -> Any:
    """A result in which numbers of lanes are tensors."""
    leaves, spec = flatten(result)
    if not any(isinstance(leaf, LaneNumber) for leaf in leaves):
        return result
    return unflatten([as_tensor(leaf) if isinstance(leaf, LaneNumber) else leaf for leaf in leaves], spec)


def same_dtype(values: list[Tensor]) -> list[Tensor]:
    """Tensors of one dtype, as stacking would promote them."""
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    return [value if value.dtype is dtype else value.to(dtype) for value in values]


def lane_text(level: LaneLevel, lanes: Lanes) -> str:
    """The first lane of a set, for messages."""
    places = lane_names(level, lanes)
    return f"lane {places[0]} gives" if places else "no lane gives"


def _differing(level: LaneLevel, pieces: list[Lanes], parts: list[Any], name: str, reason: str) -> Exception:
    first = parts[0]
    for part, piece in zip(parts[1:], pieces[1:]):
        pair = lane_text(level, pieces[0]), lane_text(level, piece)
        if type(part) is Ragged and type(first) is Ragged:
            if part.values.shape[1:] != first.values.shape[1:]:
                return TransformError(
                    at_user_line(
                        f"vmap: {name}: lanes of a nested tensor may differ in their first dim only: "
                        f"{pair[0]} {first.text()}, {pair[1]} {part.text()}",
                        'vmap(f, out_dims="list")(xs)  # a list, one result for each lane',
                    )
                )
            continue
        if isinstance(part, Tensor) and isinstance(first, Tensor):
            if part.is_nested or first.is_nested or part.shape == first.shape:
                continue
            return TransformError(
                at_user_line(
                    f"vmap: {name}: lanes return tensors of different shapes, which cannot be stacked: "
                    f"{pair[0]} {list(first.shape)}, {pair[1]} {list(part.shape)}",
                    'vmap(f, out_dims="list")(xs)     # a list, one result for each lane\n'
                    'vmap(f, out_dims="jagged")(xs)   # one nested tensor',
                )
            )
        if type(part) is not type(first) or part is not first:
            return LaneValueError(
                at_user_line(
                    f"vmap: {name}: lanes return different {reason}, which no tensor can hold: "
                    f"{pair[0]} {_shown(first)}, {pair[1]} {_shown(part)}",
                    "return a tensor or a number, or the same value from every branch\n"
                    'vmap(f, out_dims="list")(xs)  # or a list, one result for each lane',
                )
            )
    return TransformError(
        at_user_line(
            f"vmap: {name}: lanes return tensors that cannot be stacked: {reason}",
            'vmap(f, out_dims="list")(xs)  # a list, one result for each lane',
        )
    )


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _kind(value: Any) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__
