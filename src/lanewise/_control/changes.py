"""Objects that are changed while some lanes wait: only what the running lanes have made is theirs to change."""

import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.numbers import LaneNumber
from lanewise._core.lanes import Restart, machine

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


class Parts:
    """What objects hold, at any depth, to be compared with what they hold later.

    Objects that the running lanes have made are left out.
    """

    __slots__ = ("things", "before", "kept")

    def __init__(self, things: Any) -> None:
        self.things = [thing for thing in things if not isinstance(thing, _ATOMS) and not _is_own(thing)]
        self.kept: list[list] = []  # the id of an object is its own as long as it lives
        self.before = self._look()

    def changed(self) -> bool:
        """Whether they hold something else by now, or are too many to tell."""
        return bool(self.things) and (self.before is None or self.before != self._look())

    def _look(self) -> list | None:
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
            parts = _parts(thing)
            self.kept.append(parts)
            found.append((id(thing), [id(part) for part in parts]))
            pending.extend(parts)
        return found


def _parts(thing: Any) -> list:
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts.extend(thing.keys())
        parts.extend(thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        parts.extend(thing)
    for base in type(thing).__mro__:
        names = base.__dict__.get("__slots__", ())
        parts.extend(getattr(thing, name, None) for name in ((names,) if isinstance(names, str) else names))
    if type(thing) is types.CellType:
        try:
            parts.append(thing.cell_contents)
        except ValueError:
            pass
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is dict:
        parts.extend(attributes.keys())
        parts.extend(attributes.values())
    return parts


def watched(func: Callable, owner: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of a library, while lanes wait: where it changes an object, all have to run as written."""
    if not narrowed():
        return func(*args, **kwargs)
    parts = Parts((owner, *args, *kwargs.values()))
    try:
        out = func(*args, **kwargs)
    except Exception:
        if parts.changed():
            raise Restart(machine.level) from None
        raise
    if parts.changed():
        raise Restart(machine.level)
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
