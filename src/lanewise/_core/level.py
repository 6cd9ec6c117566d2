"""Levels: one open transform each, in one order, on a stack per thread."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import Self

from lanewise._core.modes import bring_modes_back, set_modes_aside
from lanewise._core.operations import makes_tensors, writes
from lanewise._torch_compat import (
    AUTOCAST_KEYS,
    FACTORY_KEY,
    FACTORY_KEY_NAME,
    INSIDE_KEY_SET,
    OUTSIDE_KEY,
    OUTSIDE_KEY_NAME,
    ExcludeDispatchKeyGuard,
    ForceDispatchKeyGuard,
    compile_outside,
    compiler_is_loaded,
    dispatch_mode_count,
    forward_level,
    include_key,
    is_any_autocast_enabled,
    is_grad_enabled,
    jit_tracing_state,
    never_compile,
    next_node_number,
    script_alike,
    set_grad_enabled,
    tls_exclude_set,
    tls_include_set,
    tls_is_excluded,
    tls_is_included,
)
from lanewise.errors import TransformError, at_user_line, explained

_order = itertools.count(1)

# What stands for the lanes of a level that has ended.
ENDED = object()

# Operations that are not routed (see factories.py) pass the key that an open level switches on.
_fallthrough = torch.library.Library("_", "IMPL")
_fallthrough.fallback(torch.library.fallthrough_kernel, FACTORY_KEY_NAME)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.levels: list[Level] = []
        # The level whose plane the running code is on: the innermost, or a lower one while a rule runs below.
        self.here: Level | None = None
        # How many reverse passes of transforms are being recorded, one inside another.
        self.orders = 0
        # For each context of saved-tensor hooks that is open: what has been the tangent of a tensor before another,
        # which lies in memory as the tensor does, took its place there.
        self.replaced: list[Any] = []


standing = _Stack()


class _Names:
    """Functions of the torch module that make tensors where no dispatch key can route them.

    While a level is open, in any thread, the names lead to functions that ask for the level of their own thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users: set[Level] = set()
        self.plain: dict[str, Callable] = {}
        self.routed: dict[str, Callable] = {}
        self.changes: list[Callable[[], list[tuple[Any, str, Any]]]] = []
        self.before: list[tuple[Any, str, Any]] = []
        self.compiler_knows = False

    def open(self, level: "Level") -> None:
        with self.lock:
            self.users.add(level)
            torch.__dict__.update(self.routed)
            if not self.before:
                for change in self.changes:
                    for owner, name, value in change():
                        self.before.append((owner, name, vars(owner).get(name)))
                        setattr(owner, name, value)
            self.tell_compiler()

    def close(self, level: "Level") -> None:
        with self.lock:
            if len(self.users) == 1:
                torch.__dict__.update(self.plain)
                while self.before:
                    setattr(*self.before[-1])
                    self.before.pop()
            self.users.discard(level)  # last: an interrupt before it comes here again

    def tell_compiler(self) -> None:
        """See `leave_uncompiled`."""
        if not self.compiler_knows and compiler_is_loaded():
            self.compiler_knows = compile_outside(lambda: standing.levels or standing.orders, self.plain, self.routed)


_names = _Names()


def route_name(name: str, routed: Callable) -> None:
    """Let `torch.<name>` lead to `routed` while a level is open."""
    _names.plain[name] = getattr(torch, name)
    _names.routed[name] = routed
    script_alike(routed, _names.plain[name])


def while_open(changes: Callable[[], list[tuple[Any, str, Any]]]) -> None:
    """Let attributes of classes be other ones while a level is open: `(class, name, value)` each."""
    _names.changes.append(changes)


def leave_uncompiled() -> None:
    """Have compiled functions run as they are written inside of a transform, once the compiler is loaded."""
    _names.tell_compiler()


class Level:
    """One open plane.

    Attributes:
        order: Position in the order of all planes; an operation belongs to the plane of its highest operand.
        include, exclude: Dispatch state of the plane below, as it was when the level opened.
        grad_mode: Grad mode when the level opened.
        begun: The number of the next node of autograd's graph then.
        pinned: Grad mode of the plane below while a transform runs autograd itself, else None.
        parent: The level of the plane below, None if that is plain torch.
        alive: False once the transform has ended.
        lanes: None; on a batch plane whose lanes have parted, the set that runs; ENDED once the transform has ended.
            The hot paths serve the tensors whose home it is.
        directions: Whether its lanes are directions to differentiate along. What is computed without tangents then
            never has lanes; on the lowest plane it may stay outside.
        watching: Whether it is to know what begins inside.
        shares: Whether what has no lanes stays a plain tensor on it (shared.py).
        moves: Whether what is lifted (plane.py) has another memory than the value that it was of.
        tentative: Whether its function runs in a way that may not do, and then starts again (shared.py, recorded.py).
        unrecorded: Whether nobody asks what autograd would record on it, and not below (shared.py, recorded.py).
        modes: Number of dispatch modes around it. While one of them runs, it is off their stack.
        closing: What is to be done on the plane below just before the level ends, None for nothing.
        asked: Whether code inside has asked for values of its lanes (unasked.py).
    """

    __slots__ = (
        "order",
        "include",
        "exclude",
        "grad_mode",
        "begun",
        "pinned",
        "parent",
        "alive",
        "lanes",
        "modes",
        "_before",
        "_aside",
        "_inside",
        "_outside",
        "__weakref__",
        "__dict__",  # for what few levels change; the others do not pay for setting it
    )
    directions = False
    watching = False
    shares = False
    tentative = False
    unrecorded = False
    moves = False
    closing: list[Callable[[], None]] | None = None
    asked = False

    def __init__(self) -> None:
        if jit_tracing_state() is not None:
            raise _traced()
        self.order = next(_order)
        self.include = tls_include_set()
        self.exclude = tls_exclude_set()
        if is_any_autocast_enabled():
            self.exclude = self.exclude | AUTOCAST_KEYS
        self.grad_mode = is_grad_enabled()
        self.begun = next_node_number()
        self.pinned: bool | None = None
        self.parent = current_level()
        if self.parent is not None:
            if self.parent.watching:
                self.parent.note_within()
        elif tls_is_included(FACTORY_KEY):
            # On no plane, though inside a level: a function that is run again by a saved-tensor hook.
            self.include = self.include - INSIDE_KEY_SET
        self.alive = True
        self.lanes: Any = None

    def __enter__(self) -> Self:
        levels = standing.levels
        self._before = standing.here
        self._aside = None
        self._inside = tls_is_included(FACTORY_KEY)
        self._outside = tls_is_included(OUTSIDE_KEY)
        try:
            if not levels:
                _names.open(self)
            levels.append(self)
            self.modes = dispatch_mode_count()
            if self.modes:
                self._aside = set_modes_aside()
            standing.here = self
            include_key(FACTORY_KEY, True)
            include_key(OUTSIDE_KEY, True)
        except BaseException:
            self._leave()  # an interrupt
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self.closing:
                for close in self.closing:
                    self.below(close)
            self._leave()
        except BaseException:
            self._leave()  # an interrupt: whatever was done before is done again
            raise
        if error is not None and (meaning := explained(error, self)) is not None:
            raise meaning from error

    def _leave(self) -> None:
        """Put back what entering has changed."""
        self.alive = False
        self.lanes = ENDED
        levels = standing.levels
        if self in levels:
            levels.remove(self)
        standing.here = self._before
        if self._aside:
            bring_modes_back(self._aside)
            self._aside = None
        include_key(FACTORY_KEY, self._inside)
        include_key(OUTSIDE_KEY, self._outside)
        if self in _names.users:
            _names.close(self)
        _forget_casts()

    def note_within(self) -> None:
        """Before another level opens on this plane, or autograd runs there: on levels that watch."""

    def note_autograd(self) -> None:
        """Before what is to be recorded on this plane, not below: formulas and passes of the user, some operations."""

    def note_recording(self) -> None:
        """Before a transform records inside, on this plane or on another."""

    def check_write_outside(self, level: "Level", pairs: bool = False) -> None:
        """Before a write to a tensor of a level around this one, of values with the lanes of both (`pairs`) or not."""

    def note_writes(self, op: Any, args: tuple, kwargs: dict) -> None:
        """Before an operation of the user's writes, here or on a plane above."""

    def check_refit(self, tensor: Any) -> None:
        """Before the metadata of a tensor of the level, or of one above it, change in place."""

    def forget_gathered(self) -> None:
        """Gather anew from here on, as a function will that is run again: on levels that keep what they gathered."""

    def below(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call `run(*args)` in the plane below: its dispatch state, its grad mode, its level for factories."""
        now = is_grad_enabled()
        want = (self.grad_mode and now) if self.pinned is None else self.pinned
        if want == now and self.parent is None:
            with ForceDispatchKeyGuard(self.include, self.exclude):
                return run(*args)
        here = standing.here
        standing.here = self.parent
        set_grad_enabled(want)
        try:
            with ForceDispatchKeyGuard(self.include, self.exclude):
                return run(*args)
        finally:
            set_grad_enabled(now)
            standing.here = here

    def user_code_below(self, run: Callable[[], Any]) -> Any:
        """Call code of the user's in the plane below, where autocast is as it is here."""
        cast_here = AUTOCAST_KEYS - tls_exclude_set()

        def run_cast() -> Any:
            with ForceDispatchKeyGuard(tls_include_set(), tls_exclude_set() - cast_here):
                return run()

        _forget_casts()
        try:
            return self.below(run_cast)
        finally:
            _forget_casts()

    def interpret(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Carry out one operation whose highest operand is of this level. (Planes define it.)"""
        raise NotImplementedError

    def failure(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> Exception:
        """What to raise for `error`, which an operation of this level has raised."""
        return error

    def adopt(self, value: Any, origin: Any = None) -> Any:
        """Wrap a tensor made while this is the top level, so that lane values may be written into it later."""
        raise NotImplementedError

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is a wrapper of this level."""
        raise NotImplementedError

    def lifted(self, wrapper: Any) -> bool:
        """Whether a wrapper of this level has lanes, or a tangent: no tensor of the plane below stands for it."""
        return True

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Carry out an operation that makes a tensor from none of this plane."""
        raise NotImplementedError


def run_outside(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    """An operation whose operands are all from outside the function: its results belong to the function's plane.

    What writes to its operands, or gives no tensor, runs as it would outside.
    """
    # Excluded: inside a kernel, or the handler of another class of tensors.
    level = None if tls_is_excluded(FACTORY_KEY) else current_level()
    if level is None or not makes_tensors(op):
        if level is not None and writes(op):
            note_writes(level, op, args, kwargs)
        with ExcludeDispatchKeyGuard(INSIDE_KEY_SET):
            return op(*args, **kwargs)
    if level.directions and level.parent is None:
        if forward_level() >= 0:
            # Autograd's kernel has called, which gives the result its tangent.
            with ExcludeDispatchKeyGuard(INSIDE_KEY_SET):
                return op(*args, **kwargs)
        return level.below(functools.partial(op, *args, **kwargs))
    out = level.factory(op, args, kwargs)
    return _once(level, out) if type(out) in (list, tuple) or level.owns(getattr(out, "value", None)) else out


def _once(level: Level, out: Any) -> Any:
    """The results, wrapped once: a lazy conjugate among the operands comes here resolved, as a tensor of the plane."""
    if type(out) in (list, tuple):
        return type(out)([_once(level, item) for item in out])
    return out.value if level.owns(getattr(out, "value", None)) else out


never_compile(run_outside)
_fallthrough.fallback(run_outside, OUTSIDE_KEY_NAME)


def _forget_casts() -> None:
    """Cast parameters anew from here on: what was cast on one plane is not to be met on another."""
    if is_any_autocast_enabled():
        torch.clear_autocast_cache()


def _traced() -> TransformError:
    return TransformError(
        at_user_line(
            "torch.jit.trace cannot look into a transform: its results for the inputs at hand would become constants",
            "torch.export.export(module, args)  # or torch.compile(f)",
        )
    )


def note_autograd() -> None:
    """Tell the levels of this thread, see `Level.note_autograd`."""
    for level in standing.levels:
        level.note_autograd()


def note_writes(here: Level, op: Any, args: tuple, kwargs: dict) -> None:
    """Before an operation of the user's writes, on the plane of `here`: levels up to it may have to undo that."""
    for level in standing.levels:
        if level.order <= here.order:
            level.note_writes(op, args, kwargs)


def live_levels() -> list[Level]:
    """The levels open on this thread, outermost first."""
    return list(standing.levels)


def current_level() -> Level | None:
    """The level whose plane the running code is on, None for plain torch.

    Below the outermost level the factory key is off; `here` is left as it was, which saves time. The code of a dispatch
    mode around the transform runs where it was entered.
    """
    here = standing.here
    if here is None or not tls_is_included(FACTORY_KEY) or (here.modes and dispatch_mode_count() < here.modes):
        return None
    return here


class pin_grad_mode:
    """For the time of a backward pass that the engine runs with grad mode off: keep the planes below recording.

    Each level's plane below records if it did so when the transform that differentiates was entered.
    """

    __slots__ = ("outer", "saved")

    def __init__(self, outer: bool) -> None:
        self.outer = outer

    def __enter__(self) -> None:
        self.saved = [(level, level.pinned) for level in standing.levels]
        for level, pinned in self.saved:
            level.pinned = (level.grad_mode and self.outer) if pinned is None else pinned

    def __exit__(self, *exc: object) -> None:
        for level, pinned in self.saved:
            level.pinned = pinned


class on_plane:
    """Stand on the plane of `level` (None: plain torch), so that it adopts the tensors made there."""

    __slots__ = ("level", "saved", "factory", "outside")

    def __init__(self, level: Level | None) -> None:
        self.level = level

    def __enter__(self) -> None:
        self.saved = standing.here
        standing.here = self.level
        self.factory = self.outside = False
        if self.level is None:
            # In plain torch, no operation need pass the Python kernels that look for a level.
            if tls_is_included(FACTORY_KEY):
                self.factory = True
                include_key(FACTORY_KEY, False)
            if tls_is_included(OUTSIDE_KEY):
                self.outside = True
                include_key(OUTSIDE_KEY, False)

    def __exit__(self, *exc: object) -> None:
        if self.factory:
            include_key(FACTORY_KEY, True)
        if self.outside:
            include_key(OUTSIDE_KEY, True)
        standing.here = self.saved


class record_as_outside:
    """For a user's formula inside a backward pass under `pin_grad_mode`: grad mode says again what a loop would see.

    The formula then runs with grad mode on, so that its own `no_grad` blocks count on the planes below. With
    `never=True` nothing is recorded on any plane.
    """

    __slots__ = ("never", "saved", "mode")

    def __init__(self, never: bool = False) -> None:
        self.never = never

    def __enter__(self) -> bool:
        self.mode = is_grad_enabled()
        self.saved = []
        for level in reversed(standing.levels):
            if level.pinned is False and not self.never:
                break  # nothing records here, so grad mode says nothing about the planes further down
            if level.pinned:
                self.saved.append((level, level.pinned))
        for level, _ in self.saved:
            level.pinned = False if self.never else None
        switched = bool(self.saved) and not self.never and not self.mode
        if self.never:
            set_grad_enabled(False)
        elif switched:
            set_grad_enabled(True)
        return switched

    def __exit__(self, *exc: object) -> None:
        set_grad_enabled(self.mode)
        for level, pinned in self.saved:
            level.pinned = pinned
