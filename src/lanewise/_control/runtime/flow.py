"""What converted code calls (syntax.py): branches, loops and calls for sets of lanes."""

import builtins
import sys
from typing import Any

from torch import Tensor

from lanewise._control.rewriting import compiling
from lanewise._control.rewriting.expressions import KINDS, NUMBERS
from lanewise._control.runtime.callees import fn
from lanewise._control.runtime.changes import changes, changes_outside, context, made
from lanewise._control.runtime.choices import (
    TRANSFORM,
    augmented,
    both,
    choose,
    contains,
    each,
    either,
    equal,
    handed_over,
    is_,
    is_not,
    keeping,
    kept,
    lacks,
    load,
    negation,
    one_kind,
    result,
    shown_to,
    taker_of,
    truth,
    unequal,
    whole,
)
from lanewise._control.runtime.chosen import ABSENT, for_any, of_chosen
from lanewise._control.runtime.fusion import fused
from lanewise._control.runtime.iterators import hold_iterators, iterator_shared, refuse_iterators
from lanewise._control.runtime.merging import UNBOUND, Mixed, may_see, merge, mixed
from lanewise._control.runtime.merging import join as join_values
from lanewise._control.runtime.numbers import one_number as key
from lanewise._control.runtime.ranges import LaneRange, Sides
from lanewise._control.runtime.replacements import entry_at, gradient, set_item, singleton_false, singleton_true
from lanewise._control.runtime.selections import picked
from lanewise._core.parting.lanes import (
    EMPTY,
    BeginAgain,
    Disagreement,
    Lanes,
    Restart,
    Unmergeable,
    child,
    machine,
    merge_target,
)

__all__ = [
    "ABSENT",
    "augmented",
    "both",
    "changes",
    "changes_outside",
    "choose",
    "contains",
    "context",
    "each",
    "either",
    "equal",
    "fn",
    "for_any",
    "fused",
    "gradient",
    "is_",
    "is_not",
    "entry_at",
    "keeping",
    "kept",
    "key",
    "lacks",
    "load",
    "made",
    "negation",
    "one_kind",
    "of_chosen",
    "picked",
    "result",
    "set_item",
    "singleton_false",
    "singleton_true",
    "unequal",
    "whole",
]

AssertionError = builtins.AssertionError
locals = builtins.locals
slice = builtins.slice

# What tells lanes apart passes through `try` statements.
CONTROL = (Disagreement, Restart, BeginAgain)

# Goes round a loop once.
ONCE = (None,)


# --- functions -------------------------------------------------------------------------------------------------------


class Frame:
    """One call of a converted function whose lanes may part.

    Attributes:
        level: Whose lanes, None where the function runs outside any transform.
        base: The lanes at the call.
        captured: Variables that functions inside the function see, which hold numbers and tensors alone in a Mixed.
        closed: Variables that such functions see after it has returned.
        numbers: Variables of which no tensor stands for numbers where other lanes have one.
        returned: Variables of which none does where what the function returns may be asked which it is.
        dead: Whether no lane is left to run the next statements.
        pieces, values: The lanes that have returned, and what.
        states: What the closed variables held when they did.
    """

    __slots__ = (
        "level",
        "base",
        "captured",
        "closed",
        "numbers",
        "returned",
        "dead",
        "pieces",
        "values",
        "states",
    )

    def __init__(
        self, captured: tuple[str, ...], closed: tuple[str, ...], numbers: tuple[str, ...], returned: tuple[str, ...]
    ) -> None:
        self.level = level = machine.level
        self.base = None if level is None else level.lanes
        self.captured = captured
        self.closed = closed
        self.numbers = numbers
        self.returned = returned
        self.dead = False
        self.pieces: list[Lanes] = []
        self.values: list[Any] = []
        self.states: list[list[Any]] = []

    def returns(self, value: Any, variables: dict | None = None) -> bool:
        """A `return` that only some lanes reach, perhaps. True if it is for all of them."""
        level = self.level
        if not self.pieces and (level is None or level.lanes is self.base):
            return True
        self.pieces.append(level.lanes)
        self.values.append(value)
        if variables is not None:
            self.states.append([*self.state(self.closed, variables), value])
        level.lanes = EMPTY
        self.dead = True
        return False

    def finish(self, value: Any) -> Any:
        """The `return` of the lanes that are left."""
        if not self.pieces:
            return handed_over(self.level, value, shown_to(2)) if type(value) is Mixed else value
        self.pieces.append(self.level.lanes)
        self.values.append(value)
        return self._joined(shown_to(2))

    def result(self) -> Any:
        """What all lanes have returned."""
        return self._joined(shown_to(2))

    def _joined(self, taker: str) -> Any:
        keep = KINDS if taker is TRANSFORM else NUMBERS
        out = join_values(self.level, self.base, self.pieces, self.values, keep)  # type: ignore[arg-type]
        return handed_over(self.level, out, taker) if type(out) is Mixed else out

    def lends(self, *value: Any) -> bool:
        """Whether a function that sees the variables may be part of what has been returned, at different times."""
        return bool(self.pieces) and any(map(may_see, (*self.values, *value)))

    def settle(self, variables: dict) -> list[Any]:
        """What the closed variables held in each lane when it returned, and at last what all have returned."""
        self.captured = names = (*self.closed, "_lw_r")
        pieces, states = self.pieces, self.states
        if not self.dead:
            pieces.append(self.level.lanes)  # type: ignore[union-attr]
            states.append(self.state(names, variables))
        return self.join(self.base, pieces, states, names)  # type: ignore[arg-type]

    def state(self, names: tuple[str, ...], variables: dict) -> list[Any]:
        """What variables hold, taken from a dict of them that nobody needs any more."""
        values = [variables.get(name, UNBOUND) for name in names]
        variables.clear()  # before Python 3.13 the frame keeps the dict, and what is in it
        return values

    def join(self, base: Lanes, pieces: list[Lanes], states: list[list[Any]], names: tuple[str, ...]) -> list[Any]:
        """What variables hold where lanes come together, and these go on."""
        level: Any = self.level
        if not pieces:
            self.dead = True
            level.lanes = EMPTY
            return [UNBOUND] * len(names)
        self.dead = False
        if len(pieces) == 1:
            level.lanes = pieces[0]
            return states[0]
        target = merge_target(base, pieces)
        level.lanes = target.lanes
        merged: dict[tuple, Any] = {}
        out = []
        for name, *values in zip(names, *states):
            if self.returned and name in self.returned:
                self._settle_returned()
            keep = NUMBERS if name in self.numbers else KINDS
            key = keep, *map(id, values)
            if key not in merged:
                # Two names of one object are still two names of one object.
                try:
                    merged[key] = merge(level, target, pieces, values, keep)
                except Unmergeable:
                    merged[key] = mixed(level, base, pieces, values)
            out.append(merged[key])
        for place, name in enumerate(names):
            if type(out[place]) is Mixed and name in self.captured:
                held = out[place]
                out[place] = held.carried(level)
        return out

    def _settle_returned(self) -> None:
        """Find out who takes what the function returns."""
        frame: Any = sys._getframe(1)
        while frame.f_globals is globals():
            frame = frame.f_back
        if taker_of(frame) is not TRANSFORM:
            self.numbers += self.returned
        self.returned = ()


# --- branches --------------------------------------------------------------------------------------------------------


class _Whole(tuple):
    """A condition on which all lanes agree: goes round once, with what it says."""

    parts = False


_YES, _NO = _Whole((True,)), _Whole((False,))


def branch(frame: Frame, condition: Any) -> Any:
    """The sides of an `if`, to go round for: True, False, or first the one and then the other."""
    if condition is True:
        return _YES
    if condition is False:
        return _NO
    level = frame.level
    if level is None:
        return _YES if condition else _NO
    verdict = truth(condition)
    if verdict is True:
        return _YES
    if verdict is False:
        return _NO
    refuse_iterators(level, 1)
    return Branch(frame, verdict)


class Branch:
    """An `if` whose lanes take both sides, first those for which the condition holds."""

    parts = True
    __slots__ = ("frame", "base", "verdict", "sides", "names", "before", "pieces", "states")

    def __init__(self, frame: Frame, verdict: tuple[Tensor, Tensor]) -> None:
        self.frame = frame
        self.base = frame.level.lanes  # type: ignore[union-attr]
        self.verdict = verdict
        self.sides = 0
        self.names: tuple[str, ...] = ()
        self.before: list[Any] | None = None
        self.pieces: list[Lanes] = []
        self.states: list[list[Any]] = []

    def __iter__(self) -> "Branch":
        return self

    def __next__(self) -> bool:
        side = self.sides
        if side == 2:
            raise StopIteration
        self.sides = side + 1
        self.frame.dead = False
        self.frame.level.lanes = child(self.base, self.verdict[side])  # type: ignore[union-attr]
        return side == 0

    def turn(self, names: tuple[str, ...], variables: dict) -> list[Any]:
        """What the variables hold where a side begins."""
        if self.before is None:
            self.names = names
            self.before = self.frame.state(names, variables)
        return self.before

    def side(self, variables: dict) -> None:
        """The end of a side, for the lanes that reach it."""
        frame = self.frame
        if not frame.dead:
            self.pieces.append(frame.level.lanes)  # type: ignore[union-attr]
            self.states.append(frame.state(self.names, variables))

    def join(self) -> list[Any]:
        """Both sides come together."""
        pieces, states = self.pieces, self.states
        self.pieces = self.states = self.before = None  # type: ignore[assignment]
        return self.frame.join(self.base, pieces, states, self.names)


# --- loops -----------------------------------------------------------------------------------------------------------

# So many sets of lanes leave a loop before they are put together, which frees what they alone still hold.
_MANY = 64


class Loop:
    """A loop, which lanes leave one by one.

    Attributes:
        base: The lanes at its start.
        top: The lanes at the start of the round.
        parts: Whether lanes have taken different ways.
        waits: Lanes that have reached a `continue`, and what their variables hold.
        exits: Lanes for which the condition does not hold any more, or nothing is left.
        breaks: Lanes that have reached a `break`.
        broke: Whether all did so at once.
        shared: Whether it goes over an iterator that is known elsewhere, too: each lane would have one of its own.
        asks, more: For a range with lanes: that its condition has to be asked, and what it says.
    """

    __slots__ = (
        "frame",
        "names",
        "base",
        "top",
        "parts",
        "waits",
        "exits",
        "breaks",
        "broke",
        "shared",
        "asks",
        "more",
    )

    def __init__(self, frame: Frame, names: tuple[str, ...]) -> None:
        self.frame = frame
        self.names = names
        level = frame.level
        self.base: Any = None if level is None else level.lanes
        self.top = self.base
        self.parts = False
        self.waits: list[tuple[Lanes, list[Any]]] = []
        self.exits: list[tuple[Lanes, list[Any]]] = []
        self.breaks: list[tuple[Lanes, list[Any]]] = []
        self.broke = self.shared = False
        self.asks = False
        self.more: Any = True

    def items(self, iterable: Any, temporary: bool) -> Any:
        """What the loop goes over."""
        if type(iterable) is LaneRange:
            self.asks = True
            return iterable.rounds(self)
        if not temporary and hasattr(type(iterable), "__next__"):
            changes(iterable)
            self.shared = True
        return iterable

    def over(self, condition: Any, variables: dict) -> bool:
        """Go on with the lanes for which the condition holds; True if there are none."""
        verdict = condition if type(condition) is Sides else truth(condition)
        if verdict is True:
            return False
        if verdict is False:
            return True
        level = self.frame.level
        lanes = level.lanes  # type: ignore[union-attr]
        self._leave(self.exits, child(lanes, verdict[1]), variables)
        level.lanes = self.top = child(lanes, verdict[0])  # type: ignore[union-attr]
        self.parts = True
        return False

    def _leave(self, side: list[tuple[Lanes, list[Any]]], lanes: Lanes, variables: dict) -> None:
        if hold_iterators(variables):
            raise Restart(self.frame.level, cause=iterator_shared())
        side.append((lanes, self.frame.state(self.names, variables)))
        if len(side) >= _MANY:
            side[:] = [self._together(side)]

    def _together(self, side: list[tuple[Lanes, list[Any]]]) -> tuple[Lanes, list[Any]]:
        frame = self.frame
        level: Any = frame.level
        running, captured, dead = level.lanes, frame.captured, frame.dead
        frame.captured = ()
        states = frame.join(self.base, [lanes for lanes, _ in side], [state for _, state in side], self.names)
        frame.captured, frame.dead = captured, dead
        lanes, level.lanes = level.lanes, running
        return lanes, states

    def leave(self, variables: dict) -> None:
        """A `break`."""
        frame = self.frame
        level = frame.level
        frame.dead = True
        if not self.parts and (level is None or level.lanes is self.base):
            self.broke = True
            return
        if self.shared:
            raise Restart(level, cause=iterator_shared())
        self._leave(self.breaks, level.lanes, variables)  # type: ignore[union-attr]
        level.lanes = EMPTY  # type: ignore[union-attr]
        self.parts = True

    def wait(self, variables: dict) -> None:
        """A `continue` inside a branch."""
        frame = self.frame
        level = frame.level
        frame.dead = True
        lanes: Any = None if level is None else level.lanes
        self.waits.append((lanes, frame.state(self.names, variables)))
        if level is not None:
            level.lanes = EMPTY

    def rejoin(self, variables: dict) -> list[Any]:
        """The next round begins: lanes that wait come back."""
        frame = self.frame
        waits, self.waits = self.waits, []
        if frame.level is None:
            frame.dead = False
            return waits[0][1]
        if not frame.dead:
            waits.append((frame.level.lanes, frame.state(self.names, variables)))
        out = frame.join(self.top, [lanes for lanes, _ in waits], [state for _, state in waits], self.names)
        self.top = frame.level.lanes
        return out

    def revive(self) -> None:
        """After a `break` of all lanes at once."""
        self.frame.dead = False

    def exhausted(self, variables: dict) -> list[Any]:
        """The `else` of a loop, for lanes that did not break."""
        exits, self.exits = self.exits, []
        return self._join(exits, variables)

    def join(self, variables: dict) -> list[Any]:
        """The end of a loop: all that have not returned go on."""
        exits = [*self.exits, *self.breaks]
        self.exits, self.breaks = [], []
        return self._join(exits, variables)

    def _join(self, exits: list[tuple[Lanes, list[Any]]], variables: dict) -> list[Any]:
        frame = self.frame
        level: Any = frame.level
        if not frame.dead:
            exits.append((level.lanes, frame.state(self.names, variables)))
        elif level.lanes is not EMPTY:
            return frame.state(self.names, variables)  # all lanes at once are on their way out of the loop around
        return frame.join(self.base, [lanes for lanes, _ in exits], [state for _, state in exits], self.names)


compiling.runtime.module = sys.modules[__name__]
