"""Hooks of gradients whose lanes part: run again for those that were left behind, or converted, as any function."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lanewise._control.rewriting.convert import converted
from lanewise._control.runs.boundary import boundary
from lanewise._control.runs.results import put_together
from lanewise._core.again.around import undo_writes_around
from lanewise._core.again.journal import Journal
from lanewise._core.again.outside import held_before, reach_of
from lanewise._core.parting.lanes import Restart, arrived, machine, raise_caught
from lanewise._core.recording.hooks import HookLevel


def run_hook(level: HookLevel, hook: Callable, args: tuple, unchanged: Any) -> Any:
    """What a hook gives in place of `unchanged`; None where it leaves that as it is in all lanes."""
    func = converted(hook)
    held = held_before(reach_of(hook), args)
    together, machine.together = machine.together, 0
    try:
        while True:
            level.journal = Journal(None, level.root)
            results: list[Any] = []
            run = partial(_or_unchanged, results, func or hook, args, unchanged)
            try:
                out = boundary(level, run, put_together, structured=func is not None)
                if machine.raised:
                    raise_caught(level, Restart)
                return out if results else None
            except BaseException as error:
                if arrived(level, error, Restart) is None:
                    raise
                level.journal.undo(level)
                undo_writes_around(level)
                if held is not None:
                    held.put_back()
                func = None
    finally:
        machine.together = together


def _or_unchanged(results: list, hook: Callable, args: tuple, unchanged: Any) -> Any:
    out = hook(*args)
    if out is None:
        return unchanged
    results.append(out)
    return out
