"""The `.grad` of a leaf that all lanes share, while a backward pass inside has given each lane one of its own."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import live_levels, on_plane
from lanewise._core.parting.absent import left
from lanewise._core.parting.joins import component, merge_tensors
from lanewise._core.parting.lane_level import LaneLevel, home_of
from lanewise._core.parting.lanes import (
    Lanes,
    OperationFailed,
    child,
    common_ancestor,
    intersection,
    machine,
    merge_target,
    parting,
    true_places,
)
from lanewise._core.plane import Plane, at_home, tracked
from lanewise._core.recording.graphs import order


class _Shown:
    """The `.grad` that a leaf of a plane below shows while a level is open: one for each lane.

    Attributes:
        leaf: The tensor that all lanes share.
        base: Its gradient before.
        added: The lanes' gradients, without the base.
        grad: What it shows, and the version of that.
    """

    __slots__ = ("leaf", "base", "added", "grad", "version")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.base = leaf.grad
        self.added: Tensor | None = None
        self.grad: Tensor | None = None
        self.version = 0


# For each level with such leaves: the leaves by id.
_shown: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@contextmanager
def showing(level: BatchLevel, nodes: list[Any]) -> Iterator[None]:
    """A backward pass adds to shared leaves, by these nodes: each lane sees its own gradient until the level ends."""
    entries = _shown.get(level)
    if entries is None:
        entries = _shown[level] = {}
        level.closing = [*(level.closing or ()), lambda: _settle(level)]
    handles = []
    for node in nodes:
        leaf = node.variable
        entry = entries.get(id(leaf))
        if entry is None or leaf.grad is not entry.grad:
            entry = entries[id(leaf)] = _Shown(leaf)
            if entry.base is not None and not level.owns(entry.base):
                leaf.grad = level.adopt(level.below(torch.clone, entry.base))
        elif isinstance(level, LaneLevel) and entry.base is not None and leaf.grad is not None:
            leaf.grad = _for_all_that_run(level, leaf.grad, entry.base)
        handles.append(node.register_prehook(_noting(level, entry)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for entry in entries.values():
            if entry.added is None:
                entry.leaf.grad = entry.base
            else:
                entry.grad = entry.leaf.grad
                entry.version = 0 if entry.grad is None else entry.grad._version
        for key in [key for key, entry in entries.items() if entry.added is None]:
            del entries[key]


def _for_all_that_run(level: LaneLevel, shown: Tensor, base: Tensor) -> Tensor:
    """What a leaf shows, with what it was before for those of the running lanes that have not added to it."""
    part = component(level, shown)
    if part is None or not part.mapped or level.lanes.places(home_of(part)) is not None:
        return shown
    lanes, home = level.lanes, home_of(part)
    ancestor = common_ancestor(lanes, home)
    with on_plane(None):
        others = child(lanes, true_places(home.inverse(ancestor).index_select(0, lanes.positions(ancestor)) < 0))
    return merge_tensors(level, merge_target(ancestor, [home, others]), [home, others], [shown, level.adopt(base)])


def gradient_before(leaf: Tensor) -> Tensor | None:
    """The gradient that a leaf from outside had before lanes of the innermost level that shows theirs added to it."""
    for level in reversed(live_levels()):
        entry = _shown.get(level, {}).get(id(leaf))
        if entry is not None:
            return entry.base
    return None


def is_shared_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf from outside, with one `.grad` for all lanes but for what a backward pass shows."""
    return not isinstance(tensor, Plane) and tensor.requires_grad and tensor.is_leaf


def set_otherwise(level: BatchLevel, leaf: Tensor, before: Tensor | None) -> bool:
    """Whether code has set the `.grad` of a leaf, in another way than by a backward pass, since it was `before`."""
    now = leaf.grad
    if now is before:
        return False
    entry = _shown.get(level, {}).get(id(leaf))
    return entry is None or now is None or now is not entry.grad


def _noting(level: BatchLevel, entry: _Shown) -> Any:
    def prehook(grads: tuple) -> tuple:
        shown = []
        for grad in grads:
            if grad is not None:
                grad = grad if isinstance(grad, Plane) and grad.level is level else level.adopt(grad)
                if isinstance(level, LaneLevel):
                    grad = _of_lanes(level, grad)
                entry.added = grad if entry.added is None else entry.added + grad
            shown.append(grad)
        return tuple(shown)

    return prehook


def _of_lanes(level: LaneLevel, cotangent: Any) -> Any:
    """A cotangent with lanes: of those that run, if it is the same in all of them."""
    if not level.mapped(cotangent):
        cotangent = cotangent + level.wrap(level.below(_no_change, cotangent, level.size))
    cotangent.cotangent = True
    return cotangent


def _no_change(like: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=like.dtype, device=like.device)


def shared_gradients(level: BatchLevel) -> list[tuple]:
    """What the shared leaves of a level show now: leaf, the lanes' gradients, `.grad`, whether others have set that."""
    found: list[tuple] = []
    if not _shown:
        return found
    for entry in _shown.get(level, {}).values():
        shown = entry.leaf.grad
        touched = shown is None or shown is not entry.grad or shown._version != entry.version
        with at_home(shown):
            found.append((entry.leaf, entry.added, None if shown is None else shown.clone(), touched))
    return found


def show_gradients(level: BatchLevel, state: list[tuple]) -> None:
    """Go back to what `shared_gradients` found, or on to what such were merged to."""
    entries = _shown.get(level)
    if entries is None:
        return
    for entry in entries.values():
        entry.leaf.grad = entry.base
    entries.clear()
    for leaf, added, shown, touched in state:
        entry = entries[id(leaf)] = _Shown(leaf)
        entry.added = added
        if shown is not None:
            with at_home(shown):
                leaf.grad = shown.clone()
        if not touched:
            entry.grad, entry.version = leaf.grad, leaf.grad._version  # type: ignore[union-attr]


def merge_gradients(level: LaneLevel, base: Lanes, pieces: list[Lanes], states: list[list[tuple]]) -> None:
    """Shared leaves show in each lane of `base` what they showed in its piece; lanes without a gradient have none."""
    leaves = {id(leaf): leaf for state in states for leaf, *_ in state}
    if not leaves:
        return
    merged = []
    for key, leaf in leaves.items():
        found = [(lanes, entry) for lanes, state in zip(pieces, states) for entry in state if id(entry[0]) == key]
        added, shown = [_together(level, base, [(lanes, entry[place]) for lanes, entry in found]) for place in (1, 2)]
        merged.append((leaf, added, shown, any(entry[3] for _, entry in found)))
    show_gradients(level, merged)


def _together(level: LaneLevel, base: Lanes, parts: list[tuple[Lanes, Any]]) -> Tensor | None:
    """Gradients of sets of lanes as one; each may be of fewer lanes, and of others, which did not come to the end."""
    pieces, values = [], []
    for lanes, value in parts:
        part = component(level, value)
        lanes = lanes if part is None or not part.mapped else intersection(lanes, home_of(part))
        if value is not None and lanes.size:
            pieces.append(lanes)
            values.append(value)
    return merge_tensors(level, merge_target(base, pieces), pieces, values) if values else None


def _is_shown(level: BatchLevel, tensor: Tensor) -> bool:
    return any(entry.leaf.grad is tensor for entry in _shown.get(level, {}).values())


parting.is_shown = _is_shown


def _settle(level: BatchLevel) -> None:
    """The level ends: what its shared leaves show becomes one gradient again, the sum over the lanes.

    Where its `vmap` is about to start again, or one around it, they show what they did before.
    """
    if any(raised is not OperationFailed and owner.order <= level.order for raised, owner, *_ in machine.raised):
        show_gradients(level, [])
    for entry in _shown.pop(level).values():
        leaf, shown = entry.leaf, entry.leaf.grad
        place = order(leaf)
        if shown is None or not level.owns(shown):
            continue
        untouched = shown is entry.grad and shown._version == entry.version
        if untouched and not (entry.base is not None and level.owns(entry.base)):
            leaf.grad, total = entry.base, _over_lanes(level, entry.added)
        elif entry.base is None or level.owns(entry.base):
            leaf.grad, total = None, _over_lanes(level, shown)
        else:
            lanes = shown.value.shape[0] if level.mapped(shown) else level.size
            leaf.grad, total = None, _over_lanes(level, shown) - entry.base * (lanes - 1)
        if order(total) > place:
            _show_on(total.level, leaf, total)
        elif leaf.grad is None:
            leaf.grad = total
        elif tracked(leaf.grad) or tracked(total):
            leaf.grad = leaf.grad + total
        else:
            leaf.grad.add_(total)


def _show_on(level: Any, leaf: Tensor, total: Any) -> None:
    """The sum over the lanes of an inner level, shown on the level around it."""
    entries = _shown.get(level)
    if entries is None:
        entries = _shown[level] = {}
        level.closing = [*(level.closing or ()), lambda: _settle(level)]
    entry = entries.get(id(leaf))
    if entry is None or leaf.grad is not entry.grad:
        entry = entries[id(leaf)] = _Shown(leaf)
    entry.added = total if entry.added is None else entry.added + total
    leaf.grad = entry.grad = total if leaf.grad is None else leaf.grad + total
    entry.version = entry.grad._version


def _over_lanes(level: BatchLevel, grad: Any) -> Any:
    if level.mapped(grad):
        return level.below(torch.sum, left(level, grad.value), 0)
    return level.below(torch.mul, grad.value, level.size)
