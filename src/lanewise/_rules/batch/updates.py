"""What lanes do to a tensor without lanes, one lane after the other, as a loop over the lanes does it.

What a lane does is an `Update`, so is what it does in several calls, and so is what all lanes do. Each level keeps the
updates of its lanes while it is open, since a later one belongs in the middle: lane 0 makes all its calls before lane 1
makes any. Where lanes part, it keeps one for each lane; lanes that run again find theirs as it was.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lanewise._core.again.around import level_above
from lanewise._core.again.journal import Journal, elements, in_memory
from lanewise._core.batch import BatchLevel
from lanewise._core.level import Level, live_levels
from lanewise._core.parting.lane_level import LaneLevel, lanes_of
from lanewise._core.parting.lanes import Lanes
from lanewise._core.plane import Plane, detached, versioned
from lanewise._torch_compat import preserve_version


class Step(NamedTuple):
    """A level on the way from that of an update to that of its target.

    Attributes:
        level: The level.
        lanes: How many there are, 1 where none of them `varies`.
        varies: Whether what is done differs between them.
        running: Those that run, where lanes part.
        inside: Whether the values are on the plane below already: its lanes are part of the pairs of the step before.
    """

    level: Any
    lanes: int
    varies: bool
    running: Lanes | None = None
    inside: bool = False


class Update(NamedTuple):
    """What is done to a target `r`, by all lanes or by each, `weight` [B] and `new` [B, C].

    `r -> weight r + new` where it decays. Otherwise both add up: how many values are to be counted, and their sum.
    """

    weight: Any
    new: Any


class Entry:
    """What was done to one target at one level.

    Attributes:
        target: The target, held so that no other takes its id.
        before, after: Its value before the first update and after the last; kept by the outermost level, if needed.
        written, batches: The update that the target holds, and how many values a mean of all is of; kept there, too.
        sealed: The calls that are complete.
        source: Who made the last call: the level above, which may still change what the call does.
        last: The last call.
        rows: Where lanes part: what each lane has done.
        base: What lanes had done before the last call: their places, and their rows.
    """

    __slots__ = ("target", "before", "after", "written", "batches", "sealed", "source", "last", "rows", "base")

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.before: Tensor | None = None
        self.after: Any = None
        self.written = Update(0, 0)
        self.batches: Any = 0
        self.sealed: Update | None = None
        self.source: object = None
        self.last: Update | None = None
        self.rows: Update | None = None
        self.base: Any = None

    def undo(self) -> Callable[[], None]:
        """What puts back all that is known now."""
        names = [name for name in self.__slots__ if name != "rows"]
        known = [getattr(self, name) for name in names]
        rows = None if self.rows is None else Update(*[None if t is None else t.clone() for t in self.rows])

        def run() -> None:
            for name, value in zip(names, known, strict=True):
                setattr(self, name, value)
            self.rows = rows

        return run


_entries: weakref.WeakKeyDictionary[Level, dict[int, Entry]] = weakref.WeakKeyDictionary()


def entry_of(level: Level, target: Tensor) -> Entry:
    """What was done to a target at a level so far."""
    entries = _entries.setdefault(level, {})
    return entries.setdefault(id(target), Entry(target))


def steps_down(level: Level, target: Tensor, operands: list[Tensor]) -> list[Step]:
    """The levels that an update passes on its way to the plane of `target`, the innermost first."""
    steps: list[Step] = []
    at: Any = level
    while at is not None and not at.owns(target):
        varies = isinstance(at, BatchLevel) and any(at.mapped(operand) for operand in operands)
        steps.append(_step(at, varies, False))
        around = at
        while varies and isinstance(around, LaneLevel) and around.outer is not None:
            lanes, around = around.root.parent, around.outer
            steps.append(_step(around, True, True, lanes))
        operands = [t.value if isinstance(t, Plane) and t.level is at else t for t in operands]
        at = at.parent
    return steps


def _step(level: Any, varies: bool, inside: bool, running: Lanes | None = None) -> Step:
    if not isinstance(level, LaneLevel):
        return Step(level, level.size if varies else 1, varies, None, inside)
    return Step(level, level.root.size if varies else 1, varies, running or lanes_of(level), inside)


def count_runs(steps: list[Step]) -> int:
    """How often a loop over all lanes that run would update the target."""
    total = 1
    for step in steps:
        if not step.inside:
            total *= step.lanes if step.running is None else step.running.size if step.varies else 1
    return total


def prepare_to_run_again(steps: list[Step], target: Tensor, held: Callable[[], Tensor]) -> None:
    """Note what the target and all records hold, should the function of a level above the target begin again."""
    if not steps:
        return
    above = level_above(target)
    for level in live_levels():
        journal = _journal(level) if level.order >= above.order else None
        if journal is None:
            continue
        if elements(target) not in journal.again:
            journal.again[elements(target)] = _restoring(above, target, above.below(held))
        for step in steps:
            if step.varies and step.level.order < level.order:
                entry = entry_of(step.level, target)
                if id(entry) not in journal.again:
                    journal.again[id(entry)] = entry.undo()


def _journal(level: Any) -> Journal | None:
    if isinstance(level, LaneLevel):
        return level.journal
    if not isinstance(level, BatchLevel) or not level.restartable:
        return None
    if isinstance(level.journal, list):
        level.journal = Journal([given for given in level.journal if isinstance(given, Tensor)])
    return level.journal


def _restoring(above: Level, target: Tensor, copy: Tensor) -> Callable[[], None]:
    def put_back(_: Tensor) -> None:
        with torch.no_grad(), preserve_version(*versioned(target)):
            detached(target).copy_(copy)

    # The target is known by the place of what it is in, which is not to be that of another.
    return partial(above.below, put_back, in_memory(target))


def push(steps: list[Step], target: Tensor, update: Update, source: Any, decays: bool, write: Callable) -> None:
    """Join what `source` does in each lane of the first step with what was done before, and hand it down.

    `update` is on the plane of the first step's level. At last, `write(entry, update)` gets what all lanes do, and the
    entry of the outermost level whose lanes vary, None if there is none. With `again=True` it is called where lanes
    that ran again may not have done what they did.
    """
    if not steps:
        write(entry_of(source, target) if isinstance(source, Level) else None, update)
        return
    step, *rest = steps

    def below() -> None:
        whole = update if step.inside else Update(*[value_below(step.level, part) for part in update])
        if not step.varies:
            push(rest, target, whole, source, decays, write)
            return
        entry = entry_of(step.level, target)
        if step.running is None:
            every = _joined(entry, whole, source, decays)
        else:
            _close_with(step, entry, rest, decays, write)
            every = _joined_rows(step, entry, whole, source, decays)
        push(rest, target, _over_lanes(step, every, target, decays), step.level, decays, write)

    if step.inside:
        below()
    else:
        step.level.below(below)


def _close_with(step: Step, entry: Entry, rest: list[Step], decays: bool, write: Callable) -> None:
    """When the level ends, the target gets what its lanes have done at last: some may have begun again."""
    if entry.rows is not None:
        return

    def close() -> None:
        if entry.rows is not None:
            every = _over_lanes(step, entry.rows, entry.target, decays)
            push(rest, entry.target, every, step.level, decays, partial(write, again=True))

    step.level.closing = [*(step.level.closing or ()), close]


def value_below(level: Any, part: Any) -> Any:
    """The value below of a tensor of the level: [B, C] or [C]"""
    return part.value if level.owns(part) else part


def _joined(entry: Entry, update: Update, source: Any, decays: bool) -> Update:
    """What all calls so far do in each lane."""
    if entry.source is not source and entry.last is not None:
        entry.sealed = entry.last if entry.sealed is None else _then(entry.sealed, entry.last, decays)
    entry.source, entry.last = source, update
    return update if entry.sealed is None else _then(entry.sealed, update, decays)


def _joined_rows(step: Step, entry: Entry, update: Update, source: Any, decays: bool) -> Update:
    """The same where some of the lanes run: what every lane has done so far."""
    level, places = step.level, step.running.positions(step.level.root)  # type: ignore[union-attr]
    if entry.rows is None:
        entry.rows = _nothing_done(level.root.size, update, entry.target, decays)
    rows = entry.rows
    if entry.source is not source:
        entry.source = source
        entry.base = Update(*[None if part is None else part.index_select(0, _at(places, part)) for part in rows])
    new = None if update.new is None else update.new.detach()  # without tangents
    done = _then(entry.base, Update(update.weight, new), decays)
    for part, values in zip(rows, done, strict=True):
        if part is not None:
            if level.journal is not None:
                level.journal.keep_own(level, part, level.root)
            part.index_copy_(0, _at(places, part), values.to(part.dtype).expand(places.shape[0], *part.shape[1:]))
    return rows


def _at(places: Tensor, part: Tensor) -> Tensor:
    return places.to(part.device)


def _nothing_done(lanes: int, update: Update, target: Tensor, decays: bool) -> Update:
    if update.new is None:
        return Update(torch.zeros(lanes, dtype=torch.int64, device=target.device), None)
    dtype = torch.promote_types(update.new.dtype, torch.float32)
    weight = torch.full((lanes,), float(decays), dtype=dtype, device=target.device)
    return Update(weight, torch.zeros(lanes, *target.shape, dtype=dtype, device=target.device))


def _then(first: Update, second: Update, decays: bool) -> Update:
    """One update for two, the first before the second."""
    if not decays:
        new = None if first.new is None else first.new + second.new
        return Update(first.weight + second.weight, new)
    return Update(first.weight * second.weight, first.new * _column(second.weight) + second.new)


def _column(weight: Any) -> Any:
    return weight.unsqueeze(-1) if isinstance(weight, Tensor) and weight.dim() else weight


def _over_lanes(step: Step, update: Update, target: Tensor, decays: bool) -> Update:
    """What one lane does, [B, C] or the same in all, [C] -> what all lanes do, one after the other, [C]

    Pairs of lanes become the lanes of the level around, [n, C].
    """
    weight, new = update
    lanes = step.lanes
    each = isinstance(weight, Tensor) and weight.dim() == 1
    pairs = isinstance(step.level, LaneLevel) and step.level.outer is not None
    if not decays:
        if pairs:
            return Update(*[None if part is None else _apart(step, part).sum(1) for part in update])
        total = None if new is None else wide(new)
        if total is not None:
            total = total.sum(0) if total.dim() > target.dim() else total * lanes
        return Update(weight.sum() if each else weight * lanes, total)
    new = wide(new)
    if not each:
        powers = torch.arange(lanes - 1, -1, -1, dtype=new.dtype, device=new.device)
        weights = torch.pow(weight, powers)
        total = (new * weights.unsqueeze(1)).sum(0) if new.dim() > target.dim() else new * weights.sum()
        return Update(weight**lanes, total)
    new = new.expand(lanes, *target.shape)
    if pairs:
        weight, new = _apart(step, weight), _apart(step, new)
    dim = weight.dim() - 1
    # What a lane does is weighed by all lanes after it.
    after = weight.flip(dim).cumprod(dim).flip(dim)
    ones = torch.ones_like(after.narrow(dim, 0, 1))
    weights = torch.cat([after.narrow(dim, 1, after.shape[dim] - 1), ones], dim)
    return Update(after.select(dim, 0), (new * weights.unsqueeze(-1)).sum(dim))


def _apart(step: Step, part: Tensor) -> Tensor:
    return part.unflatten(0, (-1, step.level.own_size))


def wide(value: Tensor) -> Tensor:
    """In single precision at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))
