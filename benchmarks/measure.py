"""Timing: peers in one process, in turn, by the CPU time that a call takes."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Part:
    """A call that does only some of the work, the first `share` of it; its time is extrapolated to the whole."""

    call: Call
    share: float

    def __call__(self) -> object:
        return self.call()


def share_of(call: Call) -> float:
    """How much of the work a call does."""
    return call.share if isinstance(call, Part) else 1.0


@dataclass
class Timing:
    """Seconds of CPU time per call, one entry a round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The distance of the quartiles over the median: how far to trust the second digit."""
        if len(self.rounds) < 4:
            return float("nan")
        low, _, high = statistics.quantiles(self.rounds, n=4)
        return (high - low) / self.median


def round_robin(
    calls: Mapping[str, Call],
    *,
    rounds: int = 15,
    block: float = 0.01,
    slow: float = 0.2,
    clocks: Mapping[str, Clock] = MappingProxyType({}),
) -> dict[str, Timing]:
    """Time each call in blocks of at least `block` seconds, the peers taking turns so that drift hits all alike.

    A call that takes more than `slow` seconds sits out after the third round. The clock is the thread's CPU time, which
    other processes do not disturb; `clocks` names another for a peer that works in threads of its own.
    """
    counts = {name: _calibrate(call, clocks.get(name, time.thread_time), block) for name, call in calls.items()}
    timings = {name: Timing() for name in calls}
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            names = list(calls)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                share = share_of(calls[name])
                if turn >= 3 and timings[name].rounds[0] * share > slow:
                    continue
                calls[name]()  # so that no peer pays for the caches that its forerunner has emptied
                seconds = _block(calls[name], counts[name], clocks.get(name, time.thread_time))
                timings[name].rounds.append(seconds / share)
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    return timings


def _block(call: Call, count: int, clock: Clock) -> float:
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def _calibrate(call: Call, clock: Clock, block: float) -> int:
    """Warm up, and find how many calls fill a block."""
    call()
    count = 1
    while True:
        seconds = _block(call, count, clock) * count
        if seconds >= block:
            return count
        count = max(count + 1, min(10 * count, int(1.2 * count * block / max(seconds, 1e-7))))
