"""Values of any kind where lanes come together: kept where all share them, merged where one value can hold all."""

import enum
import functools
import math
import operator
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lanewise._control.rewriting.expressions import CARRIED, KINDS, NUMBERS, WHOLE
from lanewise._control.runtime.number_classes import Several
from lanewise._control.runtime.numbers import DTYPES, LaneNumber, kind_of, largest
from lanewise._core.level import on_plane
from lanewise._core.parting.aliases import aliases_of
from lanewise._core.parting.joins import innermost, merge_tensors, narrow, on_home
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, Target, Unmergeable, child, common_ancestor, merge_target, true_places
from lanewise._core.plane import escaped, tracked
from lanewise._torch_compat import is_grad_enabled, set_grad_enabled


class _Unbound:
    def __repr__(self) -> str:
        return "<unbound>"


# What a variable holds in lanes where it was never assigned.
UNBOUND: Any = _Unbound()

# Types whose equal values cannot be told apart.
BY_VALUE = (str, bytes, type(None), bool, int, float, complex, torch.dtype, torch.device, range, slice, enum.Enum)


class Mixed(Several):
    """What no one value can hold: a tensor in some lanes and a Python number in others, say, or a tensor and None.

    An expression that it is part of is computed for each of the values (choices.py). One of numbers and tensors goes
    wherever a value does, to attributes and into containers: it does there what each lane's own would (several.py).
    Of any other, lanes with one of the values go on where it is not a variable's.

    Attributes:
        level: Whose lanes.
        pieces, values: Sets of lanes, and what each has.
    """

    __slots__ = ("level", "pieces", "values", "_known", "_tensor", "_numeric")

    def __init__(self, level: LaneLevel, pieces: list[Lanes], values: list[Any]) -> None:
        self.level = level
        self.pieces = pieces
        self.values = values
        self._known: tuple[Lanes, list[tuple[int, Tensor]]] | None = None
        self._tensor: tuple[Lanes, int, Tensor | None] | None = None
        self._numeric: bool | None = None

    @property
    def numeric(self) -> bool:
        """Whether it is of numbers and tensors without dims."""
        if self._numeric is None:
            tensors = [value for value in self.values if isinstance(value, Tensor)]
            numbers = [value for value in self.values if number_kind(value) is not None]
            whole = len(tensors) + len(numbers) == len(self.values)
            self._numeric = whole and bool(tensors and numbers) and not any(tensor.dim() for tensor in tensors)
        return self._numeric

    def shares(self, lanes: Lanes) -> list[tuple[int, Tensor]]:
        """Which of the values some lanes have: their numbers, and the positions among the lanes of those that do."""
        if self._known is None or self._known[0] is not lanes:
            found = []
            left = lanes.size
            for number, piece in enumerate(self.pieces):
                here = piece.positions(lanes) if piece.within(lanes) else _shared(lanes, piece)[0]
                if here.shape[0]:
                    found.append((number, here))
                    left -= here.shape[0]
                    if not left:
                        break
            self._known = lanes, found
        return self._known[1]

    def part(self, lanes: Lanes, share: tuple[int, Tensor]) -> Lanes:
        """Those of some lanes that have one of the values."""
        piece, size = self.pieces[share[0]], share[1].shape[0]
        if size == lanes.size:
            return lanes
        return piece if piece.size == size and piece.within(lanes) else child(lanes, share[1])

    def value(self, level: LaneLevel, number: int) -> Any:
        """One of the values, for the lanes that run, all of which have it."""
        lanes, piece, value = level.lanes, self.pieces[number], self.values[number]
        if not isinstance(value, _WITH_LANES) or lanes.within(piece):
            return value
        with on_plane(None):
            order = torch.arange(lanes.size)
        return merge(level, Target(lanes, order), [child(piece, _shared(lanes, piece)[1])], [value])

    def carried(self, level: LaneLevel) -> Any:
        """What goes on where it is not looked for: itself, or the value of the largest group of lanes, alone."""
        if level is None or not level.covers(self.level):
            return self
        shares = self.shares(level.lanes)
        if len(shares) == 1:
            return self.value(level, shares[0][0])
        return self if self.numeric else self.narrowed(level)

    def settled(self, level: LaneLevel) -> Any:
        """A tensor that stands for numbers, too, or the value of the largest group of lanes, which go on alone."""
        if not level.covers(self.level):
            return self.resolve()
        out = self.whole(level)
        return self.narrowed(level) if out is None else out

    def within(self, level: LaneLevel) -> Any:
        """The value as one of the level's lanes: that of lanes that go on, if it is of others around."""
        return self if level is not None and level.covers(self.level) else self.resolve()

    def whole(self, level: LaneLevel) -> Tensor | None:
        """A tensor for the lanes that run, which stands for numbers, too; None where none can."""
        lanes, kept = level.lanes, self._tensor
        if kept is None or kept[1] != level.writes or not lanes.within(kept[0]):
            shares = self.shares(lanes)
            held = [self.values[number] for number, _ in shares]
            tensors = [isinstance(value, Tensor) for value in held]
            out = None
            if any(tensors) and all(map(operator.or_, tensors, [number_kind(value) is not None for value in held])):
                with suppress(Unmergeable):
                    out = self._as_tensor(level, shares)
            kept = self._tensor = lanes, level.writes, out
        return kept[2]

    def _as_tensor(self, level: LaneLevel, shares: list[tuple[int, Tensor]]) -> Tensor:
        lanes = level.lanes
        pieces = [self.part(lanes, share) for share in shares]
        values = []
        try:
            for level.lanes, (number, _) in zip(pieces, shares):
                values.append(self.value(level, number))
        finally:
            level.lanes = lanes
        return merge(level, merge_target(lanes, pieces), pieces, values, WHOLE)

    def narrowed(self, level: LaneLevel) -> Any:
        """The value of the largest group of the lanes that run, which go on alone."""
        number, here = max(self.shares(level.lanes), key=lambda share: share[1].shape[0])
        if here.shape[0] < level.lanes.size:
            narrow(level, here)
        return self.value(level, number)

    def resolve(self) -> Any:
        """The value of the lanes that go on, wherever that is asked."""
        level = self.level
        if not level.alive:
            raise escaped(level, "an operation")
        return self.narrowed(innermost(level))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.shown_class(sys._getframe(1))  # type: ignore[attr-defined]


# Values that may hold tensors with lanes.
_WITH_LANES = (Tensor, LaneNumber, tuple, list, dict)


def mixed(level: LaneLevel, base: Lanes, pieces: list[Lanes], values: list[Any]) -> Any:
    """What the lanes that run hold, the `pieces` of `base`, where no one value can; those of one kind are merged."""
    flat: list[Lanes] = []
    held: list[Any] = []
    for piece, value in zip(pieces, values, strict=True):
        value = value.within(level) if type(value) is Mixed else value
        if type(value) is not Mixed:
            flat.append(piece)
            held.append(value)
            continue
        for number, here in value.shares(piece):  # other lanes of the value may have something else by now
            flat.append(piece if here.shape[0] == piece.size else child(piece, here))
            held.append(value.values[number])
    groups: dict[Any, list[int]] = {}
    for number, value in enumerate(held):
        groups.setdefault(_kind(value), []).append(number)
    out = Mixed(level, [], [])
    for numbers in groups.values():
        for lanes, value in _merged_group(level, base, [flat[n] for n in numbers], [held[n] for n in numbers]):
            out.pieces.append(lanes)
            out.values.append(value)
    return out if len(out.pieces) > 1 else out.values[0]


def _merged_group(level: LaneLevel, base: Lanes, pieces: list[Lanes], values: list[Any]) -> list[tuple[Lanes, Any]]:
    """Sets of lanes and what each has: one set, if one value can hold all."""
    if len(pieces) == 1:
        return [(pieces[0], values[0])]
    target = merge_target(base, pieces)
    running = level.lanes
    if target.lanes.size == running.size:
        target = Target(running, target.order)
    level.lanes = target.lanes
    try:
        return [(target.lanes, merge(level, target, pieces, values))]
    except Unmergeable:
        return list(zip(pieces, values))
    finally:
        level.lanes = running


def _kind(value: Any) -> Any:
    """What values have in common that one value can hold, perhaps."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (tuple, list, dict)):
        return type(value), len(value)
    kind = number_kind(value)
    if kind is not None:
        return kind
    return (type(value), repr(value)) if isinstance(value, BY_VALUE) else ("object", id(value))


def number_kind(value: Any) -> type | None:
    """The type of a number that a tensor can hold, None for anything else."""
    return None if isinstance(value, enum.Enum) else kind_of(value)  # a member of an IntEnum is what it is by name


def _shared(a: Lanes, b: Lanes) -> tuple[Tensor, Tensor]:
    """The lanes that two sets share, as positions in each [n]."""
    with on_plane(None):
        if a.within(b):
            return torch.arange(a.size), a.positions(b)
        if b.within(a):
            return b.positions(a), torch.arange(b.size)
        base = common_ancestor(a, b)
        places = b.inverse(base).index_select(0, a.positions(base))
        here = true_places(places >= 0)
        return here, places[here]


def join(level: LaneLevel, base: Lanes, pieces: list[Lanes], values: list[Any], keep: int = CARRIED) -> Any:
    """One value for the lanes of `pieces` of `base`, which go on together.

    Where it takes several, that is a Mixed, if `keep` has one there, or not all lanes go on.
    """
    if len(pieces) == 1:
        level.lanes = pieces[0]
        out = values[0]
    else:
        target = merge_target(base, pieces)
        level.lanes = target.lanes
        try:
            return merge(level, target, pieces, values, keep)
        except Unmergeable:
            out = mixed(level, base, pieces, values)
    if type(out) is not Mixed or keep in (KINDS, NUMBERS):
        return out
    return out.settled(level) if keep == WHOLE else out.carried(level)


def merge(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Any], keep: int = CARRIED) -> Any:
    """The value that each lane of the target has in its piece. The lanes of the target run.

    Raises:
        Unmergeable: No one value holds all; or (`keep`: `CARRIED` or `NUMBERS`) a tensor would have to stand for a
            number.
    """
    first = values[0]
    if isinstance(first, Tensor) or any(isinstance(value, Tensor) for value in values):
        if all(value is first for value in values) and on_home(level, first):
            return first
        if keep in (CARRIED, NUMBERS) and not all(isinstance(value, Tensor) for value in values):
            raise Unmergeable("a tensor and what is none")
        return _merge_tensors(level, target, pieces, values)
    kind = number_kind(first)
    if kind is not None:
        return _merge_numbers(level, target, pieces, values, kind)
    if all(value is first for value in values) and (
        not isinstance(first, (tuple, list, dict)) or at_home(level, first)
    ):
        if type(first) is Mixed:
            raise Unmergeable("it differs in kind")
        return first
    if any(value is UNBOUND for value in values):
        raise Unmergeable("it is unbound in some lanes")
    kinds = {type(value) for value in values}
    if len(kinds) > 1 or Mixed in kinds:
        raise Unmergeable("types " + " and ".join(sorted(each.__name__ for each in kinds)))
    if isinstance(first, (tuple, list)):
        if any(len(value) != len(first) for value in values):
            raise Unmergeable("lengths " + " and ".join(sorted({str(len(value)) for value in values})))
        out = _rebuilt(first, [_merge_entries(level, target, pieces, list(column)) for column in zip(*values)])
        if isinstance(first, list):
            aliases_of(level).join_containers(out, values)
        return out
    if type(first) is dict:
        if any(type(key) is LaneNumber for value in values for key in value):
            raise Unmergeable("keys with lanes")
        if any(list(value) != list(first) for value in values):
            raise Unmergeable("keys")
        out = {key: _merge_entries(level, target, pieces, [value[key] for value in values]) for key in first}
        aliases_of(level).join_containers(out, values)
        return out
    if isinstance(first, BY_VALUE) and all(value == first for value in values):
        return first
    raise Unmergeable(f"values of type {type(first).__name__}")


def _merge_entries(level: LaneLevel, target: Target, pieces: list[Lanes], entries: list[Any]) -> Any:
    """What containers of one structure hold in one place: a Mixed where some have a number there, others a tensor."""
    try:
        return merge(level, target, pieces, entries)
    except Unmergeable:
        if not all(isinstance(e, Tensor) or number_kind(e) is not None or type(e) is Mixed for e in entries):
            raise
        out = mixed(level, functools.reduce(common_ancestor, pieces), pieces, entries)
        if type(out) is Mixed and not out.numeric:
            raise
        return out


def may_see(value: Any) -> bool:
    """Whether a value may be, or hold, a function that sees variables around it."""
    if isinstance(value, (tuple, list)):
        return any(map(may_see, value))
    if type(value) is dict:
        return any(map(may_see, value.values()))
    return not isinstance(value, (Tensor, LaneNumber, *BY_VALUE))


def _rebuilt(like: Any, entries: list[Any]) -> Any:
    if type(like) in (tuple, list):
        return type(like)(entries)
    if hasattr(like, "_fields"):
        return type(like)(*entries)
    if isinstance(like, tuple) and type(like).__module__ == "torch.return_types":
        return type(like)(entries)
    raise Unmergeable(f"values of type {type(like).__name__}")


def at_home(level: LaneLevel, value: Any) -> bool:
    """Whether the lanes that run may use a value as it is."""
    if isinstance(value, Tensor):
        return on_home(level, value)
    if isinstance(value, LaneNumber):
        return on_home(level, value.value)
    if isinstance(value, (tuple, list)):
        return all(at_home(level, entry) for entry in value)
    if isinstance(value, dict):
        return all(at_home(level, entry) for entry in value.values())
    return True


def _merge_tensors(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Any]) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0]
    if len(tensors) < len(values):
        running, own = level.lanes, values
        values = []
        try:
            for level.lanes, value in zip(pieces, own, strict=True):
                values.append(value if isinstance(value, Tensor) else _number_like(value, first))
        finally:
            level.lanes = running
    # What is recorded stays so, also where lanes come together within a `no_grad` block.
    switched = not is_grad_enabled() and any(tracked(tensor) for tensor in tensors)
    if switched:
        set_grad_enabled(True)
    try:
        out = merge_tensors(level, target, pieces, values)
    finally:
        if switched:
            set_grad_enabled(False)
    aliases_of(level).join(out, tensors)
    return out


def _number_like(value: Any, tensor: Tensor) -> Tensor:
    """A number where other lanes have a tensor without dims, which a number of that kind would not have promoted."""
    kind = number_kind(value)
    short = tensor.dtype.itemsize < 4 and not tensor.dtype.is_floating_point  # sums of its numbers soon wrap around
    if kind is None or tensor.dim() or (kind is bool) != (tensor.dtype is torch.bool) or (kind is int and short):
        raise Unmergeable(f"types {type(value).__name__} and Tensor {list(tensor.shape)}")
    with on_plane(None):
        # Asked of a tensor of its own: under inference mode, the question would reach the plane of `tensor`.
        if torch.result_type(torch.empty((), dtype=tensor.dtype), kind(0)) is not tensor.dtype:
            raise Unmergeable(f"types {kind.__name__} and Tensor of {tensor.dtype}")
    if not holds(tensor.dtype, value):
        raise Unmergeable(f"a number that {tensor.dtype} does not hold")
    if isinstance(value, LaneNumber):
        return value.value.to(tensor.dtype)
    with on_plane(None):
        return torch.tensor(value, dtype=tensor.dtype, device=tensor.device)


def holds(dtype: torch.dtype, number: Any) -> bool:
    """Whether a tensor holds a number of Python's: an int as it is, a float but for the rounding of float32."""
    if type(number) is LaneNumber:
        if number.kind is not int:
            return dtype.itemsize > 2 or not dtype.is_floating_point
        number = largest(number) if dtype.is_signed else -1
    if dtype is torch.bool or type(number) is complex:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        return limits.min <= number <= limits.max
    if number == 0 or number != number or abs(number) == math.inf:
        return True
    rounding = torch.finfo(dtype)
    if not rounding.smallest_normal <= abs(number) <= rounding.max:
        return False
    if type(number) is float and rounding.bits > 16:
        return True
    digits = math.frexp(number)[0] * 2 / rounding.eps
    return digits.is_integer() and float(number) == number


def _merge_numbers(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Any], kind: type) -> Any:
    first = values[0]
    if any(number_kind(value) is not kind for value in values):
        raise Unmergeable("types " + " and ".join(sorted({(number_kind(v) or type(v)).__name__ for v in values})))
    if type(first) is LaneNumber:
        if all(value is first for value in values) and on_home(level, first.value):
            return first
    elif all(type(value) is type(first) and (value is first or repr(value) == repr(first)) for value in values):
        return first
    if kind is int and any(type(value) is not LaneNumber and abs(value) >= 2**63 for value in values):
        raise Unmergeable("large numbers")
    bounds: list[Any] = []
    tensors = []
    with on_plane(None):
        for value in values:
            if type(value) is LaneNumber:
                tensors.append(value.value)
                bounds.append(value.bound)
            else:
                tensors.append(torch.tensor(value, dtype=DTYPES[kind]))
                bounds.append(abs(value) if kind is int else None)
    bound = None if None in bounds else max(bounds)
    return LaneNumber(kind, merge_tensors(level, target, pieces, tensors), bound)
