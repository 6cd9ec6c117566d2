"""What functions with masks in place of branches call (predication.py writes them)."""

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import increment_version

from lanewise._control.masking.vectors import Declined, Vectors
from lanewise._control.rewriting.arithmetic import FUNCTIONS
from lanewise._control.runtime.merging import holds
from lanewise._core.parting.rows import choose_rows, split_rows
from lanewise._torch_compat import apply_plainly, is_grad_enabled

# Among so many lanes, one that has left a loop costs next to nothing.
FEW = 1 << 14
# So often on average may a lane be taken round a loop that it has left: few lanes, and more.
_ROUNDS, _ROUNDS_OF_MANY = 256, 8
# From so many lanes on, a choice by bits pays where torch records it.
_MANY = 4096
# So deep may functions call each other.
_DEEP = 64
# Functions of torch that code may get to call by other names.
ELEMENTWISE_FUNCTIONS = frozenset([getattr(torch, name) for name in FUNCTIONS])
# Integers up to this are the same in all dtypes that hold Python's numbers.
_LARGEST = 2**53


class Failing(Declined):
    """Some lanes come to where they raise."""


class Lasting(Declined):
    """Few lanes are left in a loop: they had better go on alone."""


class Numbers:
    """Python numbers that a choice has made different in lanes: they do not promote a tensor.

    Attributes:
        values: `[B]`, float64 or int64.
        bound: The absolute value of an integer is at most that; 0 for floats.
    """

    __slots__ = ("values", "bound")

    def __init__(self, values: Tensor, bound: int) -> None:
        if bound > _LARGEST:
            raise Declined  # Python's integers have no end
        self.values = values
        self.bound = bound

    def _with(self, other: Any, run: Callable[[Any, Any], Any]) -> Any:
        """`run(self, other)`, as Python has it for the number of each lane."""
        if isinstance(other, Tensor):
            if other.dtype not in (torch.float32, torch.float64):
                raise Declined
            return run(self.values.to(other.dtype), other)
        if _kind(other) is not _kind(self):
            raise Declined
        return Numbers(run(self.values, other.values if type(other) is Numbers else other), self.bound + _bound(other))

    def _asked(self, other: Any, run: Callable[[Any, Any], Any]) -> Any:
        """A comparison, whose answer Python can add up, and a tensor can not."""
        if isinstance(other, Tensor):
            return self._with(other, run)
        if _kind(other) is None:
            raise Declined
        return Truths(run(self.values, other.values if type(other) is Numbers else other))

    def __eq__(self, other: object) -> Any:
        return self._asked(other, operator.eq)

    def __ne__(self, other: object) -> Any:
        return self._asked(other, operator.ne)

    def __lt__(self, other: Any) -> Any:
        return self._asked(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._asked(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._asked(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._asked(other, operator.ge)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __radd__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda own, other: other - own)

    def __mul__(self, other: Any) -> Any:
        return self._product(other)

    def __rmul__(self, other: Any) -> Any:
        return self._product(other)

    def _product(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            raise Declined  # it may be large
        return self._with(other, operator.mul)

    def __truediv__(self, other: Any) -> Any:
        return self._quotient(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Any:
        return self._quotient(other, lambda own, other: other / own)

    def _quotient(self, other: Any, run: Callable[[Any, Any], Any]) -> Any:
        if not isinstance(other, Tensor):
            raise Declined  # Python raises for zero
        return self._with(other, run)

    def __neg__(self) -> "Numbers":
        return Numbers(-self.values, self.bound)


class Truths:
    """Answers that Python has about numbers, different in lanes: only good to be asked."""

    __slots__ = ("mask",)

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    __eq__ = __ne__ = None  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Masks(Vectors):
    """What the code calls that predication.py writes.

    Attributes:
        device: Where the lanes are.
        lanes: Those that come to the code that runs, True for all.
        strict: Up to which of the sides that a lane does not take nothing comes back to it from them (`Masks.only`).
        recording: Whether torch records: 2 for what is differentiated more than once.
        straight: Whether all lanes are to go one way.
    """

    __slots__ = (
        "device",
        "recording",
        "straight",
        "strict",
        "lanes",
        "_called",
        "_idle",
        "_depth",
        "_most",
        "_kept",
        "_shown",
        "_weakened",
    )

    def __init__(
        self,
        size: int,
        device: torch.device,
        wide: bool,
        recording: int,
        strict: int,
        called: Callable,
        straight: bool = False,
    ) -> None:
        super().__init__(size, wide)
        self.device = device
        self.recording = recording
        self.strict = strict
        self.straight = straight
        self.lanes: Any = True
        self._called = called
        self._idle = self._depth = 0
        self._most = size * (_ROUNDS if size <= FEW else _ROUNDS_OF_MANY)
        self._kept: dict[tuple, tuple] = {}
        self._shown = 0
        self._weakened = False

    def note_numbers(self, shown: int, *asked: Any) -> None:
        """The code can tell a number from a tensor, 1 by its digits, 2 in other ways; of its arguments, `asked`."""
        self._shown = max(self._shown, shown)
        if self._weakened and (self._shown > 1 or self._depth and any(map(self._is_lane_number, asked))):
            raise Declined  # it may be given what a tensor stands for already

    def _is_lane_number(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self._is_number(value)

    def truth(self, value: Any) -> Any:
        """The truth of the number of each lane, or of all."""
        if type(value) in (bool, int, float):
            return bool(value)
        if self.straight:
            raise Declined
        if type(value) is Truths:
            return value.mask
        if not isinstance(value, Tensor) or not self._is_number(value):
            raise Declined
        return self._for_each(value if value.dtype is torch.bool else value != 0)

    def here(self, *masks: Any) -> Any:
        """The lanes that come to code where masks hold."""
        return self.all_of(self.lanes, *masks)

    def taken(self, mask: Any, holds: bool, asks: bool, *others: Any) -> bool:
        """Whether to run the side of a branch. `asks`: only if some lanes come there."""
        if type(mask) is bool:
            return mask is holds
        if not asks:
            return True
        lanes = self.here(*others, mask if holds else mask.logical_not())
        return lanes is not False and bool(lanes.any())

    def never(self, *masks: Any) -> None:
        """Lanes for which masks hold raise an error."""
        mask = self.all_of(*masks)
        if mask is not False and (mask is True or bool(mask.any())):
            raise Failing

    def negated(self, mask: Any) -> Any:
        return not mask if type(mask) is bool else mask.logical_not()

    def all_of(self, *masks: Any) -> Any:
        """Where all masks hold: True for everywhere."""
        out: Any = True
        for mask in masks:
            if mask is False:
                return False
            if mask is not True:
                out = mask if out is True else out & mask
        return out

    def any_of(self, *masks: Any) -> Any:
        """Where any of them holds: False for nowhere."""
        out: Any = False
        for mask in masks:
            if mask is True:
                return True
            if mask is not False:
                out = mask if out is False else out | mask
        return out

    def later(self, mask: Any, value: Any, before: Any) -> Any:
        """What lanes return for which a condition holds, after others have returned something, or None has."""
        return value if before is None else self.where(mask, value, before)

    def overwriting(self, old: Any, other: Any, *way: Any) -> Any:
        """`other`, with which `old += other` writes: torch is to refuse what it keeps of `old` for a backward pass.

        The code makes a new tensor in place of the write. `way`: the conditions of the sides it is in, and whether each
        is to hold.
        """
        if not isinstance(old, Tensor) or not (self.recording or (self.straight and is_grad_enabled())):
            return other
        if other is old:
            raise Declined  # the write itself keeps it
        lanes = self.here(*[mask if holds else self.negated(mask) for mask, holds in zip(way[::2], way[1::2])])
        if lanes is True or (lanes is not False and bool(lanes.any())):
            increment_version(old)
        return other

    def updated(self, old: Any, new: Any) -> Any:
        """`x += y`, which keeps the dtype and the shape of a tensor."""
        if isinstance(old, Tensor) and (new.dtype is not old.dtype or self._entries(new) != self._entries(old)):
            raise Declined
        return new

    def constant(self, value: Any) -> Tensor:
        """A tensor without dims."""
        if self.wide or type(value) not in (int, float):
            raise Declined
        dtype = torch.int64 if type(value) is int else torch.get_default_dtype()
        return torch.full((self.size,), value, dtype=dtype, device=self.device)

    def going(self, lanes: Any, mask: Any) -> Any:
        """The lanes among those in a loop for which a condition holds: a mask, True for all, False for none."""
        mask = self.all_of(lanes, mask)
        if type(mask) is bool:
            return mask
        count = int(mask.count_nonzero())
        if count == self.size:
            return True
        self._idle += self.size - count
        if self._idle > self._most:
            raise Lasting
        return mask if count else False

    def only(self, mask: Any, holds: bool, value: Any, kind: int) -> Any:
        """A value for lanes for which a condition holds, or does not: others get no derivative through it.

        `kind`: of what operations it is an operand: 1 for those that are not defined for all numbers.
        """
        if kind > self.strict or type(mask) is bool or not isinstance(value, Tensor):
            return value
        if not value.is_floating_point() or (not value.dim() and not value.requires_grad):
            return value
        given = value
        key = id(mask), holds, id(given)
        found = self._kept.get(key)
        if found is None:
            # Any number for which most operations are defined, and their derivatives finite.
            value = self._for_each(value)
            other = torch.full_like(value, 0.5)
            out = self.choice(mask, value, other) if holds else self.choice(mask, other, value)
            found = self._kept[key] = (mask, given, out)
        return found[2]

    def parts(self, value: Any, count: int) -> tuple:
        """So many things that a function returns, or entries of a vector."""
        if isinstance(value, Tensor):
            value = tuple(self.entries(value))
        if type(value) is not tuple or len(value) != count:
            raise Declined
        return value

    def call(self, func: Any, names: tuple[str, ...], lanes: Any, *args: Any) -> Any:
        """Another function of the user's, with masks like the one that calls it. `names`: of the last arguments."""
        if type(func) is types.BuiltinFunctionType and func in ELEMENTWISE_FUNCTIONS and not names:
            return func(*args)
        found = self._called(func, args, names)
        if found is None or self._depth > _DEEP:
            raise Declined
        function, args = found
        around, self.lanes = self.lanes, lanes
        self._depth += 1
        out = function(self, *args)
        self._depth -= 1
        self.lanes = around
        return out

    def where(self, mask: Any, yes: Any, no: Any) -> Any:
        """What a variable holds where the sides of a branch meet."""
        if mask is True or yes is no or no is None:
            return yes
        if mask is False or yes is None:
            return no
        if _kind(yes) or _kind(no) or is_recorded(yes) is not is_recorded(no):
            # Where all lanes take the side of a number, or one that is not recorded, so is what they have.
            count = int(mask.count_nonzero())
            if count in (0, self.size):
                return yes if count else no
        if isinstance(yes, Tensor):
            if isinstance(no, Tensor):
                if yes.dtype is not no.dtype or self._entries(yes) != self._entries(no):
                    raise Declined
                return self.choice(mask, self._for_each(yes), self._for_each(no))
            return torch.where(mask, self._for_each(yes), self._weaker(no, yes))
        if isinstance(no, Tensor):
            return torch.where(mask, self._weaker(yes, no), self._for_each(no))
        if type(yes) is tuple:
            if type(no) is not tuple or len(yes) != len(no):
                raise Declined
            return tuple([self.where(mask, a, b) for a, b in zip(yes, no)])
        return self._numbers(mask, yes, no)

    def _weaker(self, number: Any, tensor: Tensor) -> Any:
        """A number where other lanes have a tensor, which a number of that kind would not have promoted."""
        # (Python divides integers with more digits than torch, and takes them to negative powers.)
        if type(number) not in (int, float) or not tensor.is_floating_point():
            raise Declined
        if not self._is_number(tensor) or not holds(tensor.dtype, number):
            raise Declined
        if self._shown > 1 or (self._shown and tensor.dtype is not torch.float64):
            raise Declined
        self._weakened = True
        return number

    def selected(self, condition: Any, yes: Any, no: Any) -> Tensor:
        """`torch.where`, of which two numbers are of the default dtype."""
        if self.wide and not (isinstance(yes, Tensor) or isinstance(no, Tensor)):
            raise Declined
        return torch.where(condition, yes, no)

    def choice(self, mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        if not self.recording or (self.recording == 1 and not (yes.requires_grad or no.requires_grad)):
            return choose_rows(mask, yes, no)
        if self.size < _MANY or self.wide or self.recording > 1:
            return torch.where(mask, yes, no)
        return apply_plainly(_Choice, mask, yes, no)

    def _numbers(self, mask: Tensor, yes: Any, no: Any) -> Any:
        if type(yes) in (bool, Truths) and type(no) in (bool, Truths):
            sides = [side.mask if type(side) is Truths else torch.as_tensor(side) for side in (yes, no)]
            return Truths(torch.where(mask, *sides))
        kind = _kind(yes)
        if kind is None or kind is not _kind(no):
            raise Declined
        if repr(yes) == repr(no):
            return yes
        dtype = torch.float64 if kind is float else torch.int64
        numbers = [torch.as_tensor(side.values if type(side) is Numbers else side, dtype=dtype) for side in (yes, no)]
        return Numbers(torch.where(mask, *numbers), max(_bound(yes), _bound(no)))


def is_recorded(value: Any) -> bool:
    """Whether torch records a value."""
    return isinstance(value, Tensor) and value.requires_grad


def _kind(number: Any) -> type | None:
    if type(number) is Numbers:
        return float if number.values.is_floating_point() else int
    return type(number) if type(number) is float or (type(number) is int and abs(number) < 2**31) else None


def _bound(number: Any) -> int:
    """The absolute value of an integer, or of those of all lanes, is at most that; 0 for floats."""
    if type(number) is Numbers:
        return number.bound
    return abs(number) if type(number) is int else 0


class _Choice(Function):
    """`torch.where`, whose kernel branches on each element: by bits, it takes a third of the time for many."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        ctx.mask = mask
        ctx.set_materialize_grads(False)
        return choose_rows(mask, yes.detach(), no.detach())

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple:  # type: ignore[override]
        return (None, None, None) if cotangent is None else (None, *split_rows(ctx.mask, cotangent))
