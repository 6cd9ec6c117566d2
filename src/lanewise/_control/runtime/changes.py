"""Objects that are changed while some lanes wait: only what the running lanes have made is theirs to change."""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lanewise._control.runtime.numbers import LaneNumber
from lanewise._core.again.holdings import ATOMS, look, put_back, unchanged
from lanewise._core.again.unseen import context_changes, unseen_of_class
from lanewise._core.parting.causes import Cause, cause_here
from lanewise._core.parting.lanes import BeginAgain, Disagreement, Restart, machine
from lanewise._core.recording.leaf_gradients import is_shared_leaf, set_otherwise
from lanewise.errors import TransformError, at_user_line, uncounted

_CONTAINERS = frozenset({list, dict, set})
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
            raise Restart(machine.level, cause=_changed("an attribute of a tensor"))
        return thing
    if type(thing) in _IMMUTABLE:
        return thing
    if narrowed():
        if not _is_own(thing):
            raise Restart(machine.level, cause=_changed_thing(thing))
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


def kept_entry(thing: defaultdict, key: Any) -> Any:
    """An entry of a dict that keeps what it is asked for."""
    if narrowed() and key not in thing:
        changes(thing)
    return thing[key]


def changes_outside() -> None:
    """Before a variable of a scope around the function is bound."""
    if narrowed():
        raise Restart(machine.level, cause=_changed("a variable of a scope around it"))


def context(manager: Any) -> Any:
    """Before a context manager is entered."""
    if narrowed() and context_changes(manager):
        raise Restart(machine.level, cause=_changed(f"an object, by the context {type(manager).__name__}"))
    return manager


def keyed(thing: Any) -> Any:
    """`thing`, before one of its entries changes whose key is a number of each lane."""
    if isinstance(thing, dict) and narrowed() and not _is_own(thing):
        what = f"it changes the entry of a {type(thing).__name__} at a number of each lane"
        raise Restart(machine.level, cause=cause_here(what, _KEYED))
    return changes(thing)


_KEYED = "a tensor in place of the dict, out[k] = y with a tensor k; torch.unique(x, return_counts=True) for counts"


def _changed_thing(thing: Any) -> Cause | None:
    kind = type(thing)
    what = f"a {kind.__name__}" if kind in _CONTAINERS else f"an object ({kind.__name__})"
    instead = _BOUND
    if kind is list:
        instead = f"a tensor in place of the list, out[i] = y; or {_BOUND}"
    elif kind.__module__ == "numpy":
        instead = "a tensor in place of the array: y = x.clone(), y[i] = v"
    return _changed(f"{what} that was there before", instead)


_BOUND = "a variable that the branch binds (y = ...), and the change after it"


def _changed(what: str, instead: str = _BOUND) -> Cause | None:
    return cause_here(f"not all lanes come to where it changes {what}", instead)


def changed_inside() -> Cause | None:
    """Why code has to run as written that calls what has changed an object."""
    return cause_here(
        "not all lanes come to where it calls what changes an object that was there before",
        "the call before the branch; or a copy of the object, made in the branch",
    )


# --- code that does not say what it changes --------------------------------------------------------------------------

_MOST = 20_000


class Parts:
    """What objects hold, at any depth, to be compared with what they hold later, and to be put back.

    Objects that the running lanes have made are left out, or (`own`) all others.

    Attributes:
        things: The objects.
        before: Each object below them, how many entries it has, and its parts. None: they are too many.
        gradients: Leaves from outside among them, and their `.grad`.
    """

    __slots__ = ("things", "before", "gradients")

    def __init__(self, things: Any, own: bool = False) -> None:
        tensors = [thing for thing in things if isinstance(thing, Tensor)]
        for thing in things:
            if isinstance(thing, Optimizer):  # one of their own, too, may have leaves of all
                tensors += [leaf for group in thing.param_groups for leaf in group["params"]]
        self.things = [thing for thing in things if not isinstance(thing, ATOMS) and _is_own(thing) is own]
        self.before = look(self.things, _MOST)  # the id of an object is its own as long as it lives
        for _, _, parts in self.before or ():
            tensors += [part for part in parts if isinstance(part, Tensor)]
        self.gradients = [(leaf, leaf.grad) for leaf in tensors if is_shared_leaf(leaf)]

    def changed(self) -> bool:
        """Whether they hold something else by now."""
        return (bool(self.things) and not self._as_before()) or self._gradients_set()

    def begin_again(self) -> None:
        """Put back what they held, for all lanes to run as written."""
        try:
            for held in self.before or ():
                put_back(held)
            for leaf, gradient in self.gradients:
                leaf.grad = gradient
            cause = None
        except Exception as error:
            cause = error
        if cause is not None or not self._as_before():
            raise _not_put_back(self.things) from cause

    def _gradients_set(self) -> bool:
        return any(set_otherwise(machine.level, leaf, gradient) for leaf, gradient in self.gradients)

    def _as_before(self) -> bool:
        return self.before is not None and unchanged(self.before, look(self.things, _MOST))


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


@uncounted
def watched(func: Callable, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A function of a library, while lanes wait: where it changes an object, all have to run as written."""
    if not narrowed():
        return func(*args, **kwargs)
    level = machine.level
    parts = Parts((owner, *args, *kwargs.values()))
    if parts.before is None:
        raise Restart(level, cause=changed_inside())
    try:
        out = func(*args, **kwargs)
    except (Exception, Disagreement, Restart, BeginAgain) as error:
        if not parts.changed():
            raise
        parts.begin_again()
        if not isinstance(error, Exception):
            raise
        raise Restart(level, cause=changed_inside()) from None
    if parts.changed():
        parts.begin_again()
        raise Restart(level, cause=changed_inside())
    return out


def changes_first(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A function that changes its first argument."""
    if args:
        changes(args[0])
    return func(*args, **kwargs)


def built(kind: type, /, *args: Any, **kwargs: Any) -> Any:
    """An object that the running lanes make."""
    unseen = unseen_of_class(kind) if isinstance(kind, type) else None
    if unseen is not None and unseen.making:
        raise Restart(machine.level, cause=changed_inside())
    return made(kind(*args, **kwargs))
