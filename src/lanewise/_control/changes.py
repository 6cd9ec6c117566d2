"""Objects that are changed while some lanes wait: only what the running lanes have made is theirs to change."""

import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.numbers import LaneNumber
from lanewise._core.lanes import BeginAgain, Disagreement, Restart, machine
from lanewise.errors import TransformError, at_user_line

_IMMUTABLE = frozenset({int, float, complex, bool, str, bytes, tuple, frozenset, type(None), range, LaneNumber})


def narrowed() -> bool:
    """Whether other lanes wait to go on from where they left those that run."""
    level = machine.level
    if level is None:
        return False
    for call in reversed(machine.boundaries):
        if call.level is level:
            return level.lanes is not call.base
    return False


def changes(thing: Any, attribute: bool = False) -> Any:
    """Before an object is changed. One that lanes share which do not run cannot be: all have to run as written.

    What is written into a tensor is for the lanes that run; its attributes (`.grad`) are those of an object.
    """
    if isinstance(thing, Tensor):
        if attribute and narrowed() and getattr(thing, "home", None) is not machine.level.lanes:
            raise Restart(machine.level)
        return thing
    if type(thing) in _IMMUTABLE:
        return thing
    if narrowed():
        if not _is_own(thing):
            raise Restart(machine.level)
        return thing
    level = machine.level
    if level is not None and level.aliases is not None:
        level.aliases.check_container(level, thing)
    return thing


def _is_own(thing: Any) -> bool:
    """Whether the running lanes have made an object."""
    for call in reversed(machine.boundaries):
        kept = call.made.get(id(thing))
        if kept is not None:
            return kept[1] is machine.level.lanes
    return False


def made(thing: Any) -> Any:
    """A container or an object that the running lanes have just made, and which they may change."""
    if narrowed():
        call = machine.boundaries[-1]
        if len(call.made) >= call.room:
            # Those that nobody else knows: the references are the entry's and that of the question.
            call.made = {key: kept for key, kept in call.made.items() if sys.getrefcount(kept[0]) > 2}
            call.room = 2 * len(call.made) + 64
        call.made[id(thing)] = thing, machine.level.lanes
    return thing


def changes_outside() -> None:
    """Before a variable of a scope around the function is bound."""
    if narrowed():
        raise Restart(machine.level)


# --- code that does not say what it changes --------------------------------------------------------------------------

# What has no parts that could be changed; what code consists of.
_DATA = (str, bytes, int, float, complex, type(None), Tensor, LaneNumber, torch.dtype, torch.device, torch.Size, range)
_ATOMS = (*_DATA, type, types.ModuleType, types.CodeType, types.FunctionType, types.BuiltinFunctionType)
_MOST = 20_000


class _Unset:
    """In place of what a slot or a cell holds that was not set."""


class Parts:
    """What objects hold, at any depth, to be compared with what they hold later, and to be put back.

    Objects that the running lanes have made are left out.

    Attributes:
        things: The objects.
        before: Each object below them, how many entries it has, and its parts. None: they are too many.
    """

    __slots__ = ("things", "before")

    def __init__(self, things: Any) -> None:
        self.things = [thing for thing in things if not isinstance(thing, _ATOMS) and not _is_own(thing)]
        self.before = self._look()  # the id of an object is its own as long as it lives

    def changed(self) -> bool:
        """Whether they hold something else by now."""
        return bool(self.things) and not self._as_before()

    def begin_again(self) -> None:
        """Put back what they held, for all lanes to run as written."""
        try:
            for thing, size, parts in self.before or ():
                _put_back(thing, size, parts)
            cause = None
        except Exception as error:
            cause = error
        if cause is not None or not self._as_before():
            raise _not_put_back(self.things) from cause

    def _as_before(self) -> bool:
        now = self._look()
        if self.before is None or now is None or len(now) != len(self.before):
            return False
        for (thing, _, parts), (other, _, others) in zip(self.before, now, strict=True):
            if thing is not other or not _same(parts, others):
                return False
        return True

    def _look(self) -> list[tuple[Any, int, list]] | None:
        found = []
        seen: set[int] = set()
        pending = list(self.things)
        while pending:
            thing = pending.pop()
            if isinstance(thing, _ATOMS) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if len(seen) > _MOST:
                return None
            entries = _entries(thing)
            parts = entries + _attributes(thing)
            found.append((thing, len(entries), parts))
            pending.extend(parts)
        return found


def _entries(thing: Any) -> list:
    """What a container holds, whatever methods of its own it has for that: keys and then values of a dict."""
    kind: Any
    if isinstance(thing, dict):
        kind = _plain(thing)
        return [*kind.keys(thing), *kind.values(thing)]
    for kind in (list, tuple, deque):
        if isinstance(thing, kind):
            return [*kind.__iter__(thing)]
    for kind in (set, frozenset):
        if isinstance(thing, kind):
            return sorted(kind.__iter__(thing), key=id)
    return []


def _plain(thing: dict) -> Any:
    """The type whose methods know the order of a dict."""
    return OrderedDict if isinstance(thing, OrderedDict) else dict


def _attributes(thing: Any) -> list:
    """The type of an object, what its slots and its cell hold, the names of its attributes and then their values."""
    parts = [type(thing)]
    parts += [_held(slot, thing) for slot in _slots(type(thing))]
    if type(thing) is types.CellType:
        try:
            parts.append(thing.cell_contents)
        except ValueError:
            parts.append(_Unset)
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is dict:
        parts.extend(attributes.keys())
        parts.extend(attributes.values())
    return parts


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    found = []
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:
            found += [slot for slot in base.__dict__.values() if type(slot) is types.MemberDescriptorType]
    return found


def _held(slot: types.MemberDescriptorType, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:
        return _Unset


def _put_back(thing: Any, size: int, parts: list) -> None:
    """Make an object hold what it held, whatever methods of its own it has for that."""
    entries, kind, rest = parts[:size], parts[size], parts[size + 1 :]
    if isinstance(thing, (list, set, dict, deque)) and not _same(_entries(thing), entries):
        if isinstance(thing, dict):
            plain = _plain(thing)
            plain.clear(thing)
            for key, value in zip(entries[: size // 2], entries[size // 2 :], strict=True):
                plain.__setitem__(thing, key, value)
        elif isinstance(thing, list):
            list.__setitem__(thing, slice(None), entries)
        elif isinstance(thing, set):
            set.clear(thing)
            set.update(thing, entries)
        else:
            deque.clear(thing)
            deque.extend(thing, entries)
    if _same(_attributes(thing), parts[size:]):
        return
    if type(thing) is not kind:
        thing.__class__ = kind
    slots = _slots(kind)
    for slot, value in zip(slots, rest, strict=False):
        if _held(slot, thing) is value:
            continue
        if value is _Unset:
            slot.__delete__(thing)
        else:
            slot.__set__(thing, value)
    rest = rest[len(slots) :]
    if type(thing) is types.CellType:
        if rest[0] is _Unset:
            del thing.cell_contents
        else:
            thing.cell_contents = rest[0]
        return
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is dict:
        half = len(rest) // 2
        attributes.clear()
        attributes.update(zip(rest[:half], rest[half:], strict=True))


def _same(parts: list, others: list) -> bool:
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _not_put_back(things: list) -> TransformError:
    kinds = ", ".join(sorted({type(thing).__name__ for thing in things}))
    return TransformError(
        at_user_line(
            f"vmap: called code changed an object on the way of some lanes ({kinds}, or what they hold), and what it "
            "held before cannot be put back for all lanes to run as written",
            "change the object before the branch, or outside the mapped function\n"
            "thing = copy.deepcopy(thing)  # inside the function, in the branch: the running lanes' own",
        )
    )


def watched(func: Callable, owner: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of a library, while lanes wait: where it changes an object, all have to run as written."""
    if not narrowed():
        return func(*args, **kwargs)
    level = machine.level
    parts = Parts((owner, *args, *kwargs.values()))
    if parts.before is None:
        raise Restart(level)
    try:
        out = func(*args, **kwargs)
    except (Exception, Disagreement, Restart, BeginAgain) as error:
        if not parts.changed():
            raise
        parts.begin_again()
        if not isinstance(error, Exception):
            raise
        raise Restart(level) from None
    if parts.changed():
        parts.begin_again()
        raise Restart(level)
    return out


def changes_first(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function that changes its first argument."""
    if args:
        changes(args[0])
    return func(*args, **kwargs)


def built(kind: type, *args: Any, **kwargs: Any) -> Any:
    """An object that the running lanes make."""
    return made(kind(*args, **kwargs))


# --- iterators ------------------------------------------------------------------------------------------------------


def holds_iterators(variables: Any) -> bool:
    """Whether one of the variables where lanes part is an iterator: each lane would have one of its own."""
    for value in variables.values():
        if hasattr(type(value), "__next__"):
            break
    else:
        return False
    return any(hasattr(type(value), "__next__") and not name.startswith("_lw") for name, value in variables.items())
