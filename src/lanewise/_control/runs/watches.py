"""What looks on while lanes part: warns where they do so for too long, or gives the run up."""

import time
from typing import Any

from lanewise._control.rewriting.compiling import converting
from lanewise._control.runs.telling import Told, instead_of_many, told_of_many
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Restart, machine
from lanewise._core.recording.leaf_gradients import shared_gradients
from lanewise._torch_compat import current_graph_task_id
from lanewise.errors import SlowPathWarning, at_user_line, calls_within, warn_at_user_line

# A parting costs as much as the smallest functions take for thirty lanes in a loop. So many for each lane are worth
# telling of, where lanes do little in between: the thread works for less than so many seconds. Among fewer lanes than
# that, nobody looks for speed.
_OFTEN, _FEW_LANES, _LITTLE = 1.5, 32, 4e-4
# After so many partings the clock is looked at.
_STRIDE = 8


class Telling:
    """Warns inside, at the line of the function that they come to, once lanes part more often than is worth it."""

    __slots__ = ("lanes", "most", "begun", "around")

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.most = int(_OFTEN * lanes)

    def of(self, level: LaneLevel) -> "Telling":
        """For the lanes of a level."""
        return self

    def __enter__(self) -> None:
        self.around = machine.limit, machine.tell
        self.begun = time.thread_time()
        if self.lanes >= _FEW_LANES:
            machine.limit, machine.tell = machine.partings + self.most, self.tell

    def __exit__(self, *exc: object) -> None:
        machine.limit, machine.tell = self.around

    def tell(self) -> None:
        if time.thread_time() - self.begun > _LITTLE * self.most:
            return
        warn_at_user_line(
            SlowPathWarning(
                at_user_line(
                    f"vmap: the {self.lanes} lanes have parted more than {self.most} times and do little "
                    "in between, which may take longer than a Python loop over them. It would take about as long for "
                    "many more lanes",
                    f"{instead_of_many(calls_within('boundary'))}\nvmap(f)(xs)  # with more lanes at once",
                )
            )
        )


class Budget:
    """Gives a run up inside, once it has taken so many seconds, if it has changed nothing that would not be undone.

    Attributes:
        told: Where lanes part, None where that is not known yet.
        looked: When the clock was last looked at.
        longest: The longest time between two looks, which does not count: the thread may have collected garbage.
    """

    __slots__ = ("limit", "told", "level", "begun", "converting", "looked", "longest", "around")

    def __init__(self, limit: float, told: Told | None) -> None:
        self.limit = limit
        self.told = told
        self.level: Any = None
        self.begun = time.thread_time()
        self.converting = converting.seconds
        self.looked = self.longest = 0.0

    def of(self, level: LaneLevel) -> "Budget":
        """For the lanes of a level."""
        self.level = level
        return self

    def __enter__(self) -> None:
        self.around = machine.limit, machine.tell
        machine.limit, machine.tell = machine.partings + _STRIDE, self.look

    def __exit__(self, *exc: object) -> None:
        machine.limit, machine.tell = self.around

    def seconds(self) -> float:
        """How long the thread has worked, but for what it does once: to convert code."""
        return time.thread_time() - self.begun - (converting.seconds - self.converting)

    def look(self) -> None:
        """Lanes have parted some more times."""
        machine.limit, machine.tell = machine.partings + _STRIDE, self.look
        if self.told is None:
            self.told = told_of_many(calls_within("boundary"))
        seconds = self.seconds()
        self.longest = max(self.longest, seconds - self.looked)
        self.looked = seconds
        if seconds - self.longest > self.limit and self._may_stop():
            raise Restart(self.level, structured=True, slow=True)

    def _may_stop(self) -> bool:
        level = self.level
        plain = not (machine.together or machine.assigning) and current_graph_task_id() == level.task
        if not plain or len(machine.boundaries) != 1 or machine.boundaries[0].level is not level:
            return False
        return level.journal.untouched and not shared_gradients(level)
