"""What a function has written to tensors that were there before it ran, so that it can be run again."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import Disagreement, Lanes, Restart, machine
from lanewise._core.plane import Plane, detached, tracked, versioned
from lanewise._torch_compat import is_grad_enabled, preserve_version
from lanewise.errors import TransformError, at_user_line


def keep(level: Any, value: Tensor, home: Lanes | None = None, statistic: bool = False) -> None:
    """Before a write to `value` `[n, *S]`, a tensor of the plane below `level`, which keeps a journal.

    A write to a running statistic counts no new version of it, neither does undoing that.
    A list in its place stands for a journal not begun: the tensors that were there before.
    """
    if level.picked is not None or level.copies is not None:
        note_write(level, value)
    if home is not None:
        level.writes += 1
        if level.aliases is not None:
            level.aliases.check(level, memory(value))
    journal = _begun(level)
    journal.keep(level, value, home, statistic)
    if statistic:
        journal.statistics.add(memory(value))


def _begun(level: Any) -> "Journal":
    if type(level.journal) is list:
        level.journal = Journal([given for given in level.journal if isinstance(given, Tensor)])
    return level.journal


def note_before(level: Any, value: Tensor, home: Lanes | None, before: Tensor) -> None:
    """Note what `value` `[n, *S]` held that has been written to by no operation of the level."""
    level.forget_gathered()
    journal = _begun(level)
    if journal.is_outside(value, home):
        journal.copies.setdefault(elements(value), (value, home, before))
        journal.held.append(in_memory(value))


def note_write(level: Any, value: Tensor) -> None:
    """Before a write to `value`, or to a copy of it for more lanes: it may be a copy that stands for a view.

    Or such a copy may be in use that stands for a view of it. Where no assignment writes, which takes that anew, the
    `vmap` starts again.
    """
    if level.copies is not None:
        level.copies.check(level, memory(value))
    if not level.picked:
        return
    place = memory(value)
    if (picked := level.picked.get(place)) is not None:
        picked.written = True
    if not machine.assigning and not machine.together and level.journal is not None:
        if any(each.shows(place) for each in list(level.picked.values())):
            level.shows = True
            raise Restart(level) if hasattr(level, "root") else Disagreement(level)


class Journal:
    """Copies of tensors from before they were first written to.

    Attributes:
        given: Tensors `[B, *S]` of the plane below that were there before, with all lanes. None: every tensor counts
            that has the lanes of `base` or more.
        copies: A tensor, its lanes (None: all) and what it held, by the place of its elements, oldest first.
        held: What is in the memory that these places name: a tensor may be given lanes, and other memory with them, and
            the old one is not to be that of another.
        own: The places of records of the library's own among them, with a row for each lane.
        statistics: The memory of running statistics.
        again: What is to be done besides, oldest first, where all lanes begin again.
        refits: Whether a tensor was given another shape in place, which is not undone.
    """

    __slots__ = ("given", "base", "copies", "held", "again", "own", "statistics", "refits", "_views")

    def __init__(self, given: list[Tensor] | None, base: Lanes | None = None) -> None:
        self.given = given
        self.base = base
        self.copies: dict[tuple, tuple[Tensor, Lanes | None, Tensor]] = {}
        self.held: list[Tensor] = []
        self.again: dict[Any, Callable[[], None]] = {}
        self.own: set[tuple] = set()
        self.statistics: set[int] = set()
        self.refits = False
        self._views: dict[int, list[Tensor]] | None = None

    def is_outside(self, value: Tensor, home: Lanes | None) -> bool:
        """Whether a tensor was there before."""
        if self.given is None:
            return home is None or self.base is None or self.base.within(home)
        place = memory(value)
        return any(memory(given) == place for given in self.given)

    def keep(self, level: Any, value: Tensor, home: Lanes | None, statistic: bool) -> None:
        """Keep what `value`, or the tensors given that share memory with it, hold now."""
        if self.given is None:
            if self.is_outside(value, home):
                self._copy(level, value, home)
            return
        if self._views is None:
            self._views = {}
            for tensor in self.given:
                self._views.setdefault(memory(tensor), []).append(tensor)
        # All of them, for several may be views of one memory; none again.
        given = self._views.pop(memory(value), ())
        if given and not statistic and is_grad_enabled() and (value.is_floating_point() or value.is_complex()):
            level.note_autograd()  # it is to have a history on this plane alone, and none outside
        for tensor in given:
            self._copy(level, tensor, self.base)

    def _copy(self, level: Any, value: Tensor, home: Lanes | None) -> None:
        place = elements(value)
        if place not in self.copies:
            self.copies[place] = (value, home, level.below(_copy, value))
            self.held.append(in_memory(value))

    def keep_own(self, level: Any, value: Tensor, home: Lanes) -> None:
        """Keep what `value` holds, a record of the library's own with a row for each lane of `home`."""
        self.own.add(elements(value))
        self._copy(level, value, home)

    def written(self) -> set[int]:
        """The memory that was written to."""
        return {place[0] for place in self.copies}

    def pass_on(self, other: "Journal") -> None:
        """Tell the journal of the call around this one what was written."""
        given = None if other.given is None else {memory(tensor) for tensor in other.given}
        for key, undo in self.again.items():
            other.again.setdefault(key, undo)
        other.held += self.held
        other.own |= self.own
        other.statistics |= self.statistics
        other.refits |= self.refits
        for place, (value, home, copy) in self.copies.items():
            if given is not None and place[0] not in given and place not in self.own:
                continue
            if given is None and home is not None and other.base is not None and not other.base.within(home):
                continue
            other.copies.setdefault(place, (value, home, copy))

    @property
    def untouched(self) -> bool:
        """Whether nothing was written that was there before."""
        return not (self.copies or self.again or self.own or self.refits)

    def undo_updates(self) -> None:
        """Put back running statistics without lanes, and the records of what each lane has done to them."""
        for undo in reversed(self.again.values()):
            undo()

    def outlives(self) -> bool:
        """Whether what was written to has a history outside, which undoing the writes would not undo."""
        return any(tracked(value) for value, _, _ in self.copies.values())

    def undo(self, level: Any, rows: Tensor | None = None) -> None:
        """Write the copies back, for all lanes or for the rows of `base` given.

        The newest first: where views overlap, a later copy holds what was written through an earlier one.
        """
        if rows is None:
            self.undo_updates()
        for value, home, copy in reversed(self.copies.values()):
            if tracked(value):
                raise TransformError(
                    at_user_line(
                        f"vmap: lanes take different branches after a write in place to a tensor {list(value.shape)} "
                        "whose history autograd records outside: the function cannot be run again for some lanes",
                        "x = x.clone()  # first thing in the function",
                    )
                )
            with preserve_version(*versioned(value)) if memory(value) in self.statistics else nullcontext():
                if rows is None or home is None or self.base is None:
                    level.below(_restore, value, copy)
                elif home is self.base:
                    level.below(_restore_rows, value, copy, rows)
                else:
                    with on_plane(None):
                        places = self.base.positions(home).index_select(0, rows)
                    level.below(_restore_rows, value, copy, places)


def in_memory(value: Tensor) -> Tensor:
    """The plain tensor that a tensor of any plane is of now."""
    while isinstance(value, Plane):
        value = value.value
    return value


def memory(value: Tensor) -> int:
    """Which memory a tensor of any plane lives in. (Each write asks: one call, where `in_memory` would make it two.)"""
    while isinstance(value, Plane):
        value = value.value
    return value.untyped_storage().data_ptr()


def elements(value: Tensor) -> tuple:
    """Which elements of which memory a tensor of any plane holds; tensors of the same have the same."""
    value = in_memory(value)
    return (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride())


def _copy(value: Tensor) -> Tensor:
    return detached(value).clone()


def _restore(value: Tensor, copy: Tensor) -> None:
    with torch.no_grad():
        detached(value).copy_(copy)


def _restore_rows(value: Tensor, copy: Tensor, rows: Tensor) -> None:
    with torch.no_grad():
        rows = rows.to(value.device)
        detached(value).index_copy_(0, rows, copy.index_select(0, rows))
