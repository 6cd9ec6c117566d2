"""`x[i]` and `x[i] = v` where i is a whole number that differs from lane to lane.

torch asks a 0-dim index for its Python value; here it stays a tensor, and the index is one of a gather.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.journal import memory
from lanewise._core.batch import BatchTensor
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.picked import Picked, note, note_anew, parts_by_number, picked_as, shown_in
from lanewise._core.plane import Plane, sync
from lanewise._torch_compat import fast_binding

# (Called by its overload, for which a 0-dim index is an index like others.)
_index = fast_binding(torch.ops.aten.index.Tensor)
_get = Tensor.__getitem__
_set = Tensor.__setitem__

# What indexes a view.
_PLACES = frozenset({int, slice, type(None), type(Ellipsis)})


def get_item(x: Tensor, index: Any) -> Tensor:
    """`x[index]`."""
    entries = index if type(index) is tuple else (index,)
    count = 0
    for entry in entries:
        if isinstance(entry, Plane) and _is_lane_number(entry):
            count += 1
    if not count:
        return _get(x, index)
    if parts_by_number(entries):
        return _get(x, tuple([int(entry) if _is_lane_number(entry) else entry for entry in entries]))
    out = _picked(x, entries)
    if all(
        entry is None or isinstance(entry, (slice, int)) or entry is Ellipsis or not entry.dim() for entry in entries
    ):
        note(out, x, entries)
    return out


def _picked(x: Tensor, entries: tuple) -> Tensor:
    """`x[entries]`, some of which are numbers of each lane."""
    if len(entries) <= x.dim() and all(isinstance(entry, Plane) and _is_lane_number(entry) for entry in entries):
        return _index(x, [_wide(entry) for entry in entries])
    places, rest, _ = _split(x, entries)
    used = [dim for dim, place in enumerate(places) if place is not None]
    front = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    picked = _get(x, tuple([slice(None) if place is None else place.unsqueeze(0) for place in places]))
    return _get(picked.squeeze(front), rest)


def set_item(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    # Asked first: a copy that gets lanes when it is written to is another one.
    picked = picked_as(x)
    before = memory(x) if picked else 0
    machine.assigning += 1
    try:
        _set_item(x, index, value)
        _take_anew(x, value)
    finally:
        machine.assigning -= 1
    if isinstance(value, Plane):
        entries = index if type(index) is tuple else (index,)
        known = picked_as(value)
        if known and known[0].source is x and len(known[0].entries) == len(entries):
            if all(map(operator.is_, known[0].entries, entries)):
                _assigned(known)  # `x[i] += v` writes to the copy, and assigns it
    if picked:
        if memory(x) != before:
            note_anew(picked, before)
        set_item(picked[0].source, picked[0].entries, x)
        _assigned(picked)


def _take_anew(x: Tensor, but: Any) -> None:
    """Copies that stand for views of what was written to, but for what was assigned."""
    for each in shown_in(x, but):
        copy: Any = each.copy()
        copy.copy_(_picked(each.source, each.entries))
        each.written = False
        _take_anew(copy, but)


def _assigned(picked: list[Picked]) -> None:
    """What was written to a copy is in its source now."""
    for each in picked:
        each.written = False


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    entries = index if type(index) is tuple else (index,)
    if not any(isinstance(entry, Plane) and _is_lane_number(entry) for entry in entries) or any(
        isinstance(entry, (Tensor, list, tuple)) and not _is_lane_number(entry) for entry in entries
    ):
        if type(value) in (float, int) and x.is_floating_point() and _PLACES.issuperset(map(type, entries)):
            # torch makes a tensor of the number, here one of the plane, and copies that.
            _get(x, index).fill_(value)
        else:
            _set(x, index, value)
        return
    if isinstance(value, Tensor) and parts_by_number(entries):
        value = value.clone()  # it may be a view of x, in `x[i] = x[i]`
    _, _, window = _split(x, entries)
    view = _get(x, window)
    # The window's dims, without those that numbers drop: a slice(None) stands for each number of a lane.
    places: list[Tensor | None] = []
    for entry in entries:
        if entry is Ellipsis:
            places.extend([None] * (x.dim() - _taken(entries)))
        elif entry is None or isinstance(entry, slice):
            places.append(None)
        elif isinstance(entry, Tensor):
            places.append(_wide(entry))
    if isinstance(value, Tensor):
        value = value.to(view.dtype)
    else:
        value = torch.full((), value, dtype=view.dtype, device=view.device)
    while places[-1] is None:
        places.pop()
    torch.ops.aten.index_put_.default(view, places, value)


def _is_lane_number(entry: Any) -> bool:
    """Whether an index is a 0-dim whole number with lanes, of any plane."""
    if not isinstance(entry, Plane) or entry.dim() or entry.dtype in (torch.bool, torch.uint8):
        return False
    if entry.is_floating_point() or entry.is_complex():
        return False
    below: Any = entry
    while isinstance(below, Plane):
        sync(below)
        if isinstance(below, BatchTensor) and below.mapped:
            return True
        below = below.value
    return False


def _wide(number: Tensor) -> Tensor:
    """A number as an index: kernels take no short ones, of which torch asks the Python value."""
    return number if number.dtype is torch.int64 else number.to(torch.int64)


def _width(entry: Any) -> int:
    """How many dims of the tensor an entry of an index takes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 1


def _taken(entries: tuple) -> int:
    return sum(_width(entry) for entry in entries)


def _split(x: Tensor, entries: tuple) -> tuple[list, tuple, tuple]:
    """The lanes' numbers by dim of x; the other entries; and the entries with slice(None) in place of the numbers."""
    places: list[Tensor | None] = [None] * x.dim()
    rest: list = []
    window: list = []
    dim = 0
    for entry in entries:
        if _is_lane_number(entry):
            if dim >= x.dim():
                raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
            places[dim] = _wide(entry)
            window.append(slice(None))
        else:
            rest.append(entry)
            window.append(entry)
        dim += x.dim() - _taken(entries) if entry is Ellipsis else _width(entry)
    return places, tuple(rest), tuple(window)
