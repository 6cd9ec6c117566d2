"""Sets of lanes: which of them run, and where the lanes of a value are among those of another.

Where lanes part, code runs for some of them at a time. Each set of lanes is a node in a tree: a child holds positions
in its parent. The lanes of a nested `vmap` are a child, too, in which positions repeat: all pairs of an outer and an
inner lane.
"""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import on_plane
from lanewise._core.parting.causes import Cause
from lanewise.errors import Step

try:
    import numpy
except ImportError:  # torch does without it, and so do we
    numpy = None


class Parting:
    """Where lanes part in two.

    Attributes:
        mask: Which of them take the first side `[n]`, bool.
        count: How many.
    """

    __slots__ = ("mask", "count")

    def __init__(self, mask: Tensor, count: int) -> None:
        self.mask = mask
        self.count = count

    def sides(self) -> "tuple[Side, Side]":
        """The lanes that take the first side, and the others."""
        machine.parted()
        return Side(self, True, self.count), Side(self, False, self.mask.shape[0] - self.count)


class Side:
    """The lanes that take one side. Their positions are found when they are asked for: many branches need none."""

    __slots__ = ("parting", "first", "size")

    def __init__(self, parting: Parting, first: bool, size: int) -> None:
        self.parting = parting
        self.first = first
        self.size = size

    def positions(self) -> Tensor:
        """Positions among the lanes that part `[size]`."""
        with on_plane(None):
            return true_places(self.parting.mask if self.first else self.parting.mask.logical_not())


class Stretch:
    """Lanes that follow one another, from a position on."""

    __slots__ = ("start", "size")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size

    def positions(self) -> Tensor:
        """Positions among the lanes that they are part of `[size]`."""
        with on_plane(None):
            return torch.arange(self.start, self.start + self.size)


def true_places(mask: Tensor) -> Tensor:
    """Where a mask [n] is True."""
    if numpy is not None and mask.is_cpu:
        # torch's kernel branches on each element, which takes up to ten times as long where they are in no order.
        return torch.from_numpy(mask.numpy().nonzero()[0])
    return mask.nonzero().squeeze(1)


class Lanes:
    """A set of lanes.

    Attributes:
        parent: The set that it is part of, None for a root.
        side: The side that it is where the lanes of the parent parted in two, or None.
        stretch: What it is where its lanes follow one another in the parent, or None.
        size: How many.
        depth: Number of ancestors.
    """

    __slots__ = ("parent", "side", "stretch", "size", "depth", "_index", "_positions", "_inverse")

    def __init__(self, parent: "Lanes | None", index: "Tensor | Side | Stretch | None", size: int) -> None:
        self.parent = parent
        self.side = index if type(index) is Side else None
        self.stretch = index if type(index) is Stretch else None
        self._index: Any = None if self.side or self.stretch else index
        self.size = size
        self.depth = 0 if parent is None else parent.depth + 1
        self._positions: dict[Lanes, Tensor] = {}
        self._inverse: dict[Lanes, Tensor] = {}

    def __repr__(self) -> str:
        return f"Lanes(size={self.size}, depth={self.depth})"

    @property
    def index(self) -> Any:
        """Positions in the parent `[size]`, int64; None for a root."""
        if self._index is None:
            lazy = self.side or self.stretch
            self._index = None if lazy is None else lazy.positions()
        return self._index

    def start_in(self, ancestor: "Lanes") -> int | None:
        """Where the lanes begin in an ancestor in which they follow one another; None where they do not."""
        start = 0
        node = self
        while node is not ancestor:
            if node.stretch is None:
                return None
            start += node.stretch.start
            assert node.parent is not None, "not an ancestor"
            node = node.parent
        return start

    def within(self, other: "Lanes") -> bool:
        """Whether the set is `other` or a part of it."""
        node: Lanes | None = self
        while node is not None and node.depth > other.depth:
            node = node.parent
        return node is other

    def positions(self, ancestor: "Lanes") -> Tensor:
        """Where the lanes are in an ancestor `[size]`."""
        if self.parent is ancestor:
            return self.index
        found = self._positions.get(ancestor)
        if found is None:
            with on_plane(None):
                found = self._find(ancestor)
        return found

    def _find(self, ancestor: "Lanes") -> Tensor:
        chain: list[Lanes] = []
        node = self
        while node is not ancestor and ancestor not in node._positions:
            chain.append(node)
            assert node.parent is not None, "not an ancestor"
            node = node.parent
        found = node._positions.get(ancestor)
        for node in reversed(chain):
            if found is None:
                found = node.index
            elif node.stretch is not None:
                found = found.narrow(0, node.stretch.start, node.size)
            else:
                found = found.index_select(0, node.index)
            node._positions[ancestor] = found
        return torch.arange(self.size) if found is None else found

    def inverse(self, ancestor: "Lanes") -> Tensor:
        """Where the lanes of an ancestor are here `[ancestor.size]`, -1 for those that are not."""
        found = self._inverse.get(ancestor)
        if found is None:
            places = self.positions(ancestor)
            with on_plane(None):
                found = torch.full((ancestor.size,), -1, device=places.device)
                found[places] = torch.arange(self.size, device=places.device)
            self._inverse[ancestor] = found
        return found

    def places(self, other: "Lanes") -> Tensor | None:
        """Where the lanes are in a set that has them all `[size]`, also one on another branch of the tree; or None."""
        if self.within(other):
            return self.positions(other)
        if self.root() is not other.root():
            return None
        base = common_ancestor(self, other)
        with on_plane(None):
            inverse = other.inverse(base)
            found = inverse.index_select(0, self.positions(base))
            repeats = int((inverse >= 0).sum()) < other.size
            return None if repeats or bool((found < 0).any()) else found

    def root(self) -> "Lanes":
        """The set that all others of the tree are part of."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


# No lanes: all have returned, or left the loop.
EMPTY = Lanes(None, None, 0)


def child(lanes: Lanes, positions: Tensor | Side | Stretch) -> Lanes:
    """The lanes at `positions` [n] of `lanes`."""
    return Lanes(lanes, positions, positions.shape[0] if isinstance(positions, Tensor) else positions.size)


def common_ancestor(a: Lanes, b: Lanes) -> Lanes:
    """The smallest set that both are part of."""
    while not b.within(a):
        assert a.parent is not None, "lanes of different trees"
        a = a.parent
    return a


def union(a: Lanes, b: Lanes) -> Lanes:
    """The lanes that either set has."""
    if a.within(b) or b.within(a):
        return b if a.within(b) else a
    base = common_ancestor(a, b)
    with on_plane(None):
        mask = torch.zeros(base.size, dtype=torch.bool, device=a.positions(base).device)
        mask[a.positions(base)] = True
        mask[b.positions(base)] = True
        kept = true_places(mask)
    return base if kept.shape[0] == base.size else child(base, kept)


def intersection(a: Lanes, b: Lanes) -> Lanes:
    """The lanes that both sets have."""
    if a.within(b) or b.within(a):
        return a if a.within(b) else b
    base = common_ancestor(a, b)
    with on_plane(None):
        kept = true_places(b.inverse(base).index_select(0, a.positions(base)) >= 0)
    if kept.shape[0] == a.size:
        return a
    return b if kept.shape[0] == b.size else child(a, kept)


class Target:
    """Where lanes come together again.

    Attributes:
        lanes: The set they make: the one they parted from, or a part of it where some have gone elsewhere.
        mask: Where they are the two sides of one parting: which of them are of the first piece `[lanes.size]`, or None.
        whole: Whether the pieces are known to be parts of `lanes`, and to make them.
    """

    __slots__ = ("lanes", "mask", "whole", "_order")

    def __init__(self, lanes: Lanes, order: Tensor | None, mask: Tensor | None = None, whole: bool = False) -> None:
        self.lanes = lanes
        self.mask = mask
        self.whole = whole
        self._order = order

    @property
    def order(self) -> Tensor:
        """Positions in the values of all pieces, one after the other, `[lanes.size]`."""
        if self._order is None:
            assert self.mask is not None
            with on_plane(None):
                places = torch.cat([true_places(self.mask), true_places(self.mask.logical_not())])
                self._order = _inverted(places)
        return self._order


def _inverted(places: Tensor) -> Tensor:
    """The inverse of a permutation [n]."""
    return torch.empty_like(places).scatter_(0, places, torch.arange(places.shape[0], device=places.device))


def merge_target(base: Lanes, pieces: list[Lanes]) -> Target:
    """The set that disjoint `pieces` of `base` make together."""
    if len(pieces) == 2:
        a, b = pieces[0].side, pieces[1].side
        if a and b and a.parting is b.parting and a is not b and pieces[0].parent is base is pieces[1].parent:
            with on_plane(None):
                return Target(base, None, a.parting.mask if a.first else b.parting.mask.logical_not(), True)
    with on_plane(None):
        places = torch.cat([piece.positions(base) for piece in pieces])
        if places.shape[0] == base.size:
            return Target(base, _inverted(places), whole=True)
        numbers = torch.arange(places.shape[0], device=places.device)
        inverse = torch.full((base.size,), -1, device=places.device).scatter_(0, places, numbers)
        kept = true_places(inverse >= 0)
        return Target(child(base, kept), inverse[kept])


class _GoingApart:
    """How lanes go apart, which joins.py knows: `by(level, numbers)`.

    `is_shown(level, tensor)`, which leaf_gradients.py knows: whether a tensor is the `.grad` of a leaf from outside.
    """

    by: Callable[[Any, Tensor], None]
    is_shown: Callable[[Any, Tensor], bool]


parting = _GoingApart()


class Unmergeable(Exception):
    """Values of different lanes that no one tensor can hold: the message says why."""


def with_around(level: Any) -> Iterator[Any]:
    """A level, and those of the `vmap`s around whose lanes are part of its pairs."""
    while level is not None:
        yield level
        level = getattr(level, "outer", None)


def for_lanes(level: Any, lanes: Any, run: Callable, *args: Any) -> Any:
    """Run something for other lanes than those that run."""
    running = level.lanes
    level.lanes = lanes
    try:
        return run(*args)
    finally:
        level.lanes = running


class Disagreement(BaseException):
    """Lanes of `level` want different Python values, where all run together; its `vmap` starts again, ready for that.

    Not an Exception, so that code of the user does not catch it; a bare `except` does, so it is also written down.
    """

    def __init__(self, level: Any) -> None:
        super().__init__()
        self.level = level
        machine.raised.append((Disagreement, level))


class BeginAgain(BaseException):
    """An operation begins again: fewer lanes run than before, or it is to run on `level`, for pairs of lanes."""

    def __init__(self, level: Any = None) -> None:
        super().__init__()
        self.level = level


class Restart(BaseException):
    """The `vmap` of `level` starts again.

    Attributes:
        structured: Whether converted code may still run. Without: the function runs as it was written.
        flat: Whether its lanes may still be all pairs with those of the `vmap` around it.
        cause: Why converted code will not do, for a warning.
        slow: Whether its lanes have parted for as long as a loop over them takes.
        once: Whether that holds for this call alone, and later ones begin with converted code.
    """

    def __init__(
        self,
        level: Any,
        structured: bool = False,
        flat: bool = True,
        cause: Cause | None = None,
        slow: bool = False,
        once: bool = False,
    ) -> None:
        super().__init__()
        self.level = level
        self.structured = structured
        self.flat = flat
        self.cause = cause
        self.slow = slow
        self.once = once
        machine.raised.append((Restart, level, structured, flat, cause, slow, once))


def running_lanes() -> Lanes | None:
    """The lanes of the innermost level that runs converted, None if there is none."""
    return None if machine.level is None else machine.level.lanes


def refuse_parted(level: Any, begun: Lanes | None) -> None:
    """Before a write that a plane notes for all lanes: those of a level below must not have parted since it began."""
    below = machine.level
    if below is not None and below.order < level.order and below.lanes is not begun:
        raise Restart(below)


class OperationFailed:
    """Stands among what was raised for an operation that failed where all lanes of a level run together.

    Behind the level, True where it has failed in some of them only, and which error comes first is to be found out.
    """


def arrived(level: Any, error: BaseException | None, kind: type[BaseException]) -> Any:
    """The Disagreement or Restart of a level that has come to its `vmap`, or that code on the way has caught; or None.

    `error`: what came in its place. Where nothing did, code of the function has caught that an operation failed, which
    may be the fault of some lanes only. Where an error did, lanes may differ in theirs.
    """
    found = error if isinstance(error, kind) and error.level is level else None  # type: ignore[attr-defined]
    if machine.raised:
        failed = isinstance(error, Exception)
        for raised, owner, *options in machine.raised:
            if found is None and owner is level:
                if raised is kind:
                    found = kind(level, *options)
                elif raised is OperationFailed and kind is Disagreement and (error is None or (failed and options)):
                    found = kind(level)
        machine.raised[:] = [entry for entry in machine.raised if entry[1] is not level]
    return found


def raise_caught(level: Any, kind: type[BaseException]) -> None:
    """Raise again what code of the function has caught, by a bare `except` for example."""
    found = arrived(level, None, kind)
    if found is not None:
        raise found


class Boundary:
    """A call whose lanes may part: those that were left behind are run again, and its results put together.

    Attributes:
        level: Whose lanes.
        base: The lanes at the call.
        made: Objects that some of the lanes have made, and may change: by id, with these lanes.
        room: So many of them before those out of use are dropped.
        draws: What its lanes have drawn (same_draws.py).
        drew, parted: Whether converted code has drawn random numbers, and whether it has left lanes behind.
        narrowings: How often it has left lanes behind.
        calls: Those that ran where that made many ways, innermost first; None before.
    """

    __slots__ = ("level", "base", "made", "room", "draws", "drew", "parted", "narrowings", "calls", "_groups", "_count")

    def __init__(self, level: Any, base: Lanes, draws: Any) -> None:
        self.level = level
        self.base = base
        self.draws = draws
        self.made: dict[int, tuple[Any, Lanes]] = {}
        self.room = 64
        self.drew = self.parted = False
        self.narrowings = 0
        self.calls: list[Step] | None = None
        # The group of each lane [base.size], and how many there are: lanes of two groups were seen to differ.
        self._groups: Tensor | None = None
        self._count = 1

    def differ(self, lanes: Lanes, group: Tensor, count: int) -> None:
        """Lanes of the call were seen to differ: `group` [lanes.size], of `count`, says which of them are alike."""
        places = lanes.positions(self.base)
        with on_plane(None):
            if self._groups is None:
                self._groups = torch.zeros(self.base.size, dtype=torch.int64, device=places.device)
            self._groups[places] = group + self._count
        self._count += count

    def alike(self, places: Tensor) -> Tensor:
        """The largest group among the lanes at `places` [n] of the base."""
        if self._groups is None:
            return places
        with on_plane(None):
            groups = self._groups[places]
            return places[groups == groups.bincount().argmax()]


class Machine(threading.local):
    """What runs lanes apart in this thread.

    Attributes:
        level: The innermost level whose function runs converted, None if there is none.
        boundaries: The open boundaries, innermost last.
        raised: The Disagreements and Restarts that have not come to their `vmap` yet.
        assigning: Above zero while an assignment to `x[i]` writes.
        alone: Called where a `vmap` inside of lanes that run one by one returns a Python number, or None.
        together: Above zero while lanes that disagree are an error to be handled, not a reason to part.
        partings: How often lanes have parted.
        limit, tell: At so many partings, this is called once.
    """

    def __init__(self) -> None:
        self.level: Any = None
        self.boundaries: list[Boundary] = []
        self.alone: Callable[[], None] | None = None
        self.together = self.assigning = 0
        self.partings = 0
        self.limit: float = math.inf
        self.tell: Any = None
        self.raised: list[tuple] = []

    def parted(self, times: int = 1) -> None:
        """Lanes have parted."""
        self.partings += times
        if self.partings > self.limit:
            self.limit = math.inf
            self.tell()


machine = Machine()


class lanes_together:
    """Lanes that disagree raise an error inside, which the code around handles in a way of its own."""

    __slots__ = ()

    def __enter__(self) -> None:
        machine.together += 1

    def __exit__(self, *exc: object) -> None:
        machine.together -= 1
