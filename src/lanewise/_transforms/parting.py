"""Functions whose lanes take different ways: which they are, and who runs them."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.around import undo_writes_around
from lanewise._core.again.journal import Journal
from lanewise._core.again.outside import Before
from lanewise._core.batch import BatchLevel
from lanewise._core.draws.random import reseat_generators
from lanewise._core.level import current_level
from lanewise._core.parting.interleaved import FrontHookedLevel, FrontLevel, lanes_in_front
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Disagreement, OperationFailed, Restart, arrived, machine
from lanewise._core.parting.picked import by_number, lost
from lanewise._core.recording.tensor_hooks import HookedLevel, sets_late_hooks
from lanewise._core.short.shared import forget

# The levels of functions whose lanes part.
_PARTING = (LaneLevel, HookedLevel, FrontLevel, FrontHookedLevel)


class Ways:
    """What is known of a function whose lanes part.

    Attributes:
        together: For which numbers of lanes, by their binary digits, they are known to run together.
        paces: How long as many take (loops.py), also those of transforms of the function, by how many these are.
    """

    __slots__ = ("together", "paces")

    def __init__(self) -> None:
        self.together: set[int] = set()
        self.paces: dict[tuple[int, int], Any] = {}


# By code, the functions whose lanes were seen to part. They are run for that from the start.
parted: dict[Any, Ways] = {}


class _Runner:
    """What runs a function whose lanes part: `run(call, leaves, dims, spec, out_dims, randomness, place)`.

    `looped`, called like that, gives what that does where a loop over the examples is tried, or None.
    `masked(func, leaves, dims, spec, out_dims, place)` gives it for a cheap function, or None;
    `masked_plainly(func, args, in_dims)` the result alone, where lanes are in front of all that has some.
    `straight(func, args, in_dims)` likewise for one whose lanes go one way, NotImplemented for not at this call.
    `abreast(func, args, in_dims)` likewise for one that computes with tensors.
    `number_as_tensor(number)` is the tensor of a number that each of the lanes around has.
    """

    run: Callable[..., Any]
    looped: Callable[..., Any]
    masked: Callable[..., Any]
    masked_plainly: Callable[..., Any]
    straight: Callable[..., Any]
    abreast: Callable[..., Any]
    number_as_tensor: Callable[[Any], Tensor]


runner = _Runner()


# So many functions in the scope of a function, and in theirs, are looked at.
_MOST = 64
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})


def code_of(func: Any, seen: set[int] | None = None) -> Any:
    """What stands for a function among those whose lanes parted: closures and methods by their code.

    For a transform of a function that function does, for a module its class and those of its parts, and for a function
    that has others in its scope, or is given others by `partial`, these as well: all of one kind have the same code.
    """
    while hasattr(func, "__wrapped__"):
        func = func.__wrapped__
    if type(func) is types.FunctionType and func.__closure__ is None and func.__defaults__ is None:
        return func.__code__
    seen = set() if seen is None else seen
    if isinstance(func, functools.partial):
        return _with_scope(code_of(func.func, seen), [*func.args, *func.keywords.values()], seen)
    if isinstance(func, torch.nn.Module):
        if type(func).__module__ == "torch.nn.modules.container":
            return frozenset([type(part) for part in func.modules()])
        forward = getattr(type(func), "forward", None) or type(func)  # a scripted module's class has none to give
        return (forward, type(func), *map(type, func.children()))
    code = getattr(func, "__code__", None) or id(func)
    scope = [*map(_content, getattr(func, "__closure__", None) or ()), *(getattr(func, "__defaults__", None) or ())]
    code = _with_scope(code, scope, seen)
    owner = getattr(func, "__self__", None)
    if owner is None:
        return code
    return code, (owner if isinstance(owner, type) else type(owner)).__qualname__


def _with_scope(code: Any, things: list, seen: set[int]) -> Any:
    """A function's code, and that of the functions and modules among what is in its scope."""
    inner = [_code_in(thing, seen) for thing in things]
    return (code, *inner) if any(inner) else code


def _code_in(thing: Any, seen: set[int]) -> Any:
    if type(thing) not in _FUNCTIONS:
        # (Not `isinstance`: that asks a proxy, perhaps one with nothing behind it.)
        return type(thing) if issubclass(type(thing), torch.nn.Module) else None
    own = id(getattr(thing, "__func__", thing))
    if own in seen or len(seen) >= _MOST:
        return getattr(thing, "__code__", None)
    seen.add(own)
    return code_of(thing, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def parts(code: Any) -> bool:
    """Whether lanes may part from the start: they did before, or those of the `vmap` around do now."""
    return code in parted or type(current_level()) in _PARTING


def remember(level: BatchLevel, code: Any) -> None:
    """A function starts again that needs a level of another kind: from now on it has one."""
    if level.hooked:
        sets_late_hooks.add(code)
    if level.shows:
        by_number.add(code)
    if level.in_front:
        lanes_in_front.add(code)


def check_lost(level: BatchLevel, code: Any) -> None:
    """At the end of a function: what it wrote to copies that stand for views must have gone into what they were of."""
    if level.picked is not None and lost(level):
        by_number.add(code)
        raise Disagreement(level) if level.lanes is None else Restart(level)


def starts_again(level: BatchLevel, code: Any, error: BaseException, held: Before | None) -> bool:
    """Undo what the function did before its lanes disagreed, so that it can be run with lanes that part.

    On a tentative level, what it did before anything that this does not do for.
    Where there are no lanes, what it did before an error, so that it can be run with other answers to what it asked.

    `held`: what objects outside held before that, if it may have changed them.

    False where neither is so, and `error` stays: running statistics are left as they were before the call.
    """
    failed = isinstance(error, Exception) and any(raised[:2] == (OperationFailed, level) for raised in machine.raised)
    if level.answers is not None and isinstance(error, Exception):
        level.answers.change(error)
    elif arrived(level, error, Disagreement) is None and not (level.tentative and isinstance(error, Exception)):
        if isinstance(level.journal, Journal):
            level.journal.undo_updates()
        if failed:
            _fails_around(level)
        return False
    elif level.tentative:
        forget(code)
    else:
        if level.answers is None:
            parted.setdefault(code, Ways())
        remember(level, code)
    if isinstance(level.journal, Journal):
        level.journal.undo(level)
    undo_writes_around(level)
    if held is not None:
        held.put_back()
    reseat_generators(level)
    return True


def _fails_around(level: BatchLevel) -> None:
    """An error leaves a level in which an operation failed: lanes around that catch it may have others."""
    around: Any = level.parent
    while around is not None and not getattr(around, "restartable", False):
        around = around.parent
    if around is not None:
        machine.raised.append((OperationFailed, around))
