"""The results of lanes that took different ways, put together leaf by leaf."""

from typing import Any

import torch
from torch import Tensor

from lanewise._control.numbers import LaneNumber
from lanewise._core.joins import merge_tensors
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import Lanes, Target, Unmergeable
from lanewise._core.level import on_plane
from lanewise._core.trees import flatten, leaf_names, unflatten
from lanewise.errors import LaneValueError, TransformError, at_user_line

_NUMBERS = (bool, int, float, complex, LaneNumber)


def put_together(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Any]) -> Any:
    """One result from that of each piece.

    Numbers that differ become a tensor with lanes, as stacking them would make it.

    Raises:
        TransformError: Structures or shapes differ.
        LaneValueError: Values that are neither tensors nor numbers differ.
    """
    leaves, spec = flatten(values[0])
    columns = [leaves]
    for value, piece in zip(values[1:], pieces[1:]):
        others, other_spec = flatten(value)
        if other_spec != spec:
            raise TransformError(
                at_user_line(
                    f"vmap: lanes return results of different structure: {lane_text(pieces[0])} {spec}, "
                    f"{lane_text(piece)} {other_spec}",
                    "return the same containers, with the same keys, from every branch",
                )
            )
        columns.append(others)
    names: list[str] | None = None
    merged = []
    for position, parts in enumerate(zip(*columns)):
        try:
            merged.append(_leaf(level, target, pieces, list(parts)))
        except Unmergeable as reason:
            names = leaf_names(values[0], "output") if names is None else names
            raise _differing(pieces, list(parts), names[position], str(reason)) from None
    return unflatten(merged, spec)


def _leaf(level: LaneLevel, target: Target, pieces: list[Lanes], parts: list[Any]) -> Any:
    first = parts[0]
    if any(isinstance(part, Tensor) for part in parts):
        if not all(isinstance(part, (Tensor, *_NUMBERS)) for part in parts):
            raise Unmergeable("types " + " and ".join(sorted({type(part).__name__ for part in parts})))
        return merge_tensors(level, target, pieces, same_dtype([as_tensor(part) for part in parts]))
    if all(part is first for part in parts):
        return first
    if all(isinstance(part, _NUMBERS) for part in parts):
        if all(type(part) is type(first) and part == first for part in parts):
            return first
        return merge_tensors(level, target, pieces, same_dtype([as_tensor(part) for part in parts]))
    try:
        if all(type(part) is type(first) and bool(part == first) for part in parts):
            return first
    except (TypeError, ValueError, RuntimeError):
        pass
    raise Unmergeable("values")


def as_tensor(value: Any) -> Tensor:
    """A number as stacking would make it a tensor; a tensor as it is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, LaneNumber):
        return value.value.to(torch.get_default_dtype()) if value.kind is float else value.value
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


def lane_text(lanes: Lanes) -> str:
    """The first lane of a set, for messages."""
    places = lanes.positions(lanes.root())
    return f"lane {int(places[0])} gives" if places.shape[0] else "no lane gives"


def _differing(pieces: list[Lanes], parts: list[Any], name: str, reason: str) -> Exception:
    first = parts[0]
    for part, piece in zip(parts[1:], pieces[1:]):
        if isinstance(part, Tensor) and isinstance(first, Tensor) and part.shape == first.shape:
            continue
        if isinstance(part, Tensor) and isinstance(first, Tensor):
            return TransformError(
                at_user_line(
                    f"vmap: {name}: lanes return tensors of different shapes, which cannot be stacked: "
                    f"{lane_text(pieces[0])} {list(first.shape)}, {lane_text(piece)} {list(part.shape)}",
                    'vmap(f, out_dims="list")(xs)     # a list, one result for each lane\n'
                    'vmap(f, out_dims="jagged")(xs)   # one nested tensor',
                )
            )
        if type(part) is not type(first) or part is not first:
            return LaneValueError(
                at_user_line(
                    f"vmap: {name}: lanes return different {reason}, which no tensor can hold: "
                    f"{lane_text(pieces[0])} {first!r}, {lane_text(piece)} {part!r}",
                    "return a tensor or a number, or the same value from every branch",
                )
            )
    return TransformError(at_user_line(f"vmap: {name}: lanes return different {reason}"))
