"""`x[i]` with a number of each lane: what torch gives is a view, what lanes give is a copy.

A write to the copy would be missing in `x`. Where it is an assignment to a part of it, as in `table[i][j] = v`, it is
made in `x`, too. A write to `x` would be missing in the copy. Where it is an assignment, the copies in use are taken
anew. Any other write starts the `vmap` again, in which lanes then part by their numbers: there, `x[i]` is a view.
"""

import weakref
from typing import Any

from torch import Tensor

from lanewise._core.again.journal import memory
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.level import live_levels
from lanewise._core.parting.joins import innermost
from lanewise._core.plane import Plane, sync

# Code of functions whose lanes part by the numbers that they index with.
by_number: set[Any] = set()


class Picked:
    """A copy that stands for a view.

    Attributes:
        copy: The copy, as long as it is in use.
        source, entries: What was indexed, and the numbers.
        written: Whether something was written to it that the source lacks.
    """

    __slots__ = ("copy", "source", "entries", "written")

    def __init__(self, copy: weakref.ref, source: Tensor, entries: tuple) -> None:
        self.copy = copy
        self.source = source
        self.entries = entries
        self.written = False

    def shows(self, place: int) -> bool:
        """Whether a write to the memory at an address is to show in the copy."""
        if self.copy() is None or self.written:
            return False
        if isinstance(self.source, Plane):
            sync(self.source)
        return memory(self.source) == place


def note(copy: Tensor, source: Tensor, entries: tuple) -> None:
    """Remember that `copy` is `source[entries]`."""
    place = memory(copy)
    if not place:
        return  # without elements, all such tensors have one place, and no write is lost
    for level in _levels_of(entries):
        picked = level.picked
        if picked is None:
            picked = level.picked = {}

        def forget(_: Any, picked: dict = picked) -> None:
            if not picked[place].written:
                del picked[place]

        picked[place] = Picked(weakref.ref(copy, forget), source, entries)


def note_anew(picked: list[Picked], before: int) -> None:
    """Remember copies by their memory that had other memory `before`: they have got lanes by what was written."""
    for each in picked:
        for level in _levels_of(each.entries):
            if level.picked is not None:
                level.picked.pop(before, None)
        copy = each.copy()
        if copy is not None:
            note(copy, each.source, each.entries)


def parts_by_number(entries: tuple) -> bool:
    """Whether the lanes of an index are to part by it."""
    return any(level.by_number for level in _levels_of(entries))


def picked_as(tensor: Any) -> list[Picked]:
    """What a copy was picked from, as each level with one of the numbers knows it; none for another tensor."""
    found = [None if level.picked is None else level.picked.get(memory(tensor)) for level in _levels(tensor)]
    return [each for each in found if each is not None and each.copy() is tensor]


def lost(level: BatchLevel) -> bool:
    """Whether a copy was written to that has not gone into its source."""
    return level.picked is not None and any(each.written for each in level.picked.values())


def shown_in(tensor: Tensor, but: Any) -> list[Picked]:
    """The copies in use, but one, that stand for views of the memory of a tensor that was written to."""
    found = []
    for level in live_levels():
        picked = getattr(level, "picked", None)
        if picked:
            place = memory(tensor)
            found += [each for each in list(picked.values()) if each.shows(place) and each.copy() is not but]
    return found


def _levels_of(entries: tuple) -> set[BatchLevel]:
    """The levels whose lanes the numbers of an index have, and those that run for all pairs with these."""
    found = {level for entry in entries if isinstance(entry, Plane) for level in _levels(entry)}
    return found | {innermost(level) for level in found}


def _levels(tensor: Any) -> list[BatchLevel]:
    """The levels whose lanes a tensor has, where they can begin again."""
    found = []
    while isinstance(tensor, Plane):
        if type(tensor) is BatchTensor and tensor.mapped and tensor.level.journal is not None:
            found.append(tensor.level)
        tensor = tensor.value
    return found
