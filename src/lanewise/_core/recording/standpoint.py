"""Where code of a transformed function stands, so that what it leaves behind can run there again.

A hook, or a function under `checkpoint`, is called in a backward pass, where the levels may have ended long ago. For
that time they are open again, with the lanes that ran then, and lanes may part as they did.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.weak import WeakTensorKeyDictionary

from lanewise._core.batch import BatchLevel
from lanewise._core.level import Level, current_level, live_levels, on_plane, standing
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import BeginAgain, Boundary, Disagreement, Restart, machine
from lanewise._torch_compat import (
    FACTORY_KEY,
    ORDER_KEY,
    OUTSIDE_KEY,
    current_graph_task_id,
    include_key,
    tls_is_included,
)
from lanewise.errors import TransformError, at_user_line


class Standpoint:
    """The plane that the running code is on, the lanes that run, and how they part.

    Attributes:
        level: The level of the plane, None for plain torch.
        levels: All open levels, outermost first, each with its lanes.
        converted: The level whose lanes part in converted code, or None.
        calls: For each call that is run again for lanes it leaves behind: the level, its lanes at the call, and what
            they have drawn.
        orders: How many reverse passes of transforms record.
        replaced: The tangents that others have taken the place of since, in memory only, by tensor.
    """

    __slots__ = ("level", "levels", "converted", "calls", "orders", "replaced")

    def __init__(self) -> None:
        self.orders = standing.orders
        self.replaced: Any = WeakTensorKeyDictionary()
        self.level = current_level()
        self.levels = [(level, level.lanes) for level in live_levels()] if self.level is not None else []
        self.converted = machine.level
        self.calls = [(call.level, call.base, call.draws.copy()) for call in machine.boundaries]
        for level, _ in self.levels:
            level.forget_gathered()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Stand there again: code inside runs as it did then, though a backward pass is running."""
        before = standing.orders
        tangents = [(tensor, tensor.tangent) for tensor in self.replaced]
        for tensor, tangent in self.replaced.items():
            tensor.tangent = tangent
        _record(self.orders)
        try:
            with on_plane(None) if self.level is None else _Again(self):
                yield
        finally:
            _record(before)
            for tensor, tangent in tangents:
                tensor.tangent = tangent


def _record(orders: int) -> None:
    standing.orders = orders
    include_key(ORDER_KEY, orders > 0)


class _Again:
    __slots__ = ("stand", "running", "ended", "plane", "keys", "before")

    def __init__(self, stand: Standpoint) -> None:
        self.stand = stand

    def __enter__(self) -> None:
        stand = self.stand
        self.ended = [level for level, _ in stand.levels if not level.alive]
        self.running = [_Running(level, lanes) for level, lanes in stand.levels]
        for running in self.running:
            running.open()
        self.plane = on_plane(stand.level)
        self.plane.__enter__()
        self.keys = tls_is_included(FACTORY_KEY), tls_is_included(OUTSIDE_KEY)
        include_key(FACTORY_KEY, True)
        include_key(OUTSIDE_KEY, True)
        self.before = machine.level, machine.boundaries, machine.together
        machine.level = stand.converted
        calls = [Boundary(level, base, draws.copy()) for level, base, draws in stand.calls]
        machine.boundaries = [*machine.boundaries, *calls]
        machine.together = 0

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        machine.level, machine.boundaries, machine.together = self.before
        if machine.raised:
            machine.raised[:] = [entry for entry in machine.raised if entry[1] not in self.ended]
        include_key(FACTORY_KEY, self.keys[0])
        include_key(OUTSIDE_KEY, self.keys[1])
        self.plane.__exit__(kind, error, trace)
        for running in reversed(self.running):
            running.close()
        if isinstance(error, (Disagreement, Restart, BeginAgain)) and error.level in self.ended:
            raise _parts_anew(error.level) from None


class _Running:
    """A level with the lanes that ran: open again if it has ended since, with nothing that could be undone."""

    __slots__ = ("level", "lanes", "before", "ended")

    def __init__(self, level: Level, lanes: Any) -> None:
        self.level = level
        self.lanes = lanes

    def open(self) -> None:
        level = self.level
        self.ended = not level.alive
        if self.ended:
            level.alive = True
            level.closing = None
            if isinstance(level, BatchLevel):
                level.journal = None
                level.restartable = False
            level.__enter__()
        self.before = level.lanes, getattr(level, "task", -1)
        level.lanes = self.lanes
        if isinstance(level, LaneLevel):
            level.task = current_graph_task_id()
        level.forget_gathered()

    def close(self) -> None:
        level = self.level
        level.forget_gathered()
        level.lanes, task = self.before
        if isinstance(level, LaneLevel):
            level.task = task
        if self.ended:
            level.__exit__(None, None, None)


def _parts_anew(level: Level) -> TransformError:
    return TransformError(
        at_user_line(
            f"{level!r}, which has ended: code that runs again in a backward pass takes other ways than it did",
            "checkpoint(f, x)  # of a function that does the same when it is called again",
        )
    )
