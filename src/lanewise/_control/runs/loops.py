"""A loop over the examples, which nothing beats where a function does little: tried first, timed, and gone back to.

To convert a function, to compile masks for it and to part its lanes takes some milliseconds. In less than that, a loop
has done all examples of a light function: so the first calls are loops, where they take no longer. Then all lanes run
together. Where that takes as long as a loop would, it is given up: the call comes to its end in a loop, and so do later
ones.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from lanewise._control.runs import pacing
from lanewise._control.runs.one_by_one import keep_together, may_be_alone, noted, positional, stacked
from lanewise._control.runs.pacing import Pace
from lanewise._control.runs.split import run_apart
from lanewise._control.runs.telling import warn_loop
from lanewise._control.runs.watches import Budget
from lanewise._core.again.traces import without_traces
from lanewise._core.batch import BatchLevel
from lanewise._core.draws.random import Generators, drawn_without_leave
from lanewise._core.level import live_levels
from lanewise._core.parting.joins import MANY_WAYS
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.unasked import note_question
from lanewise._core.trees import LEAF, Spec, unflatten
from lanewise._torch_compat import current_graph_task_id, saves_by_hooks
from lanewise._transforms.arguments import Call
from lanewise._transforms.parting import code_of, parted, runner
from lanewise._transforms.ragged import is_ragged
from lanewise._transforms.vmap import lane_rows, leave, mapping_of
from lanewise.errors import name_lanes

# The clock is looked at after so many examples, and then after so many more each time. The first ones also warm caches.
_FIRST, _STRIDE = (1, 4, 12), 8
# How long an example takes is judged by those of the time that a loop may take, divided by so much.
_SAMPLE = 16
# After so many looks at the clock, the longest time between two does not count: the thread may have done something
# else, such as to collect garbage.
_LOOKS = 2
# A loop by so much longer than was thought of is left for a run of all lanes together.
_LONGER = 4.0
_NO_NAMES: dict[str, Any] = {}


def run_looped(
    call: Call, leaves: list, dims: list, spec: Spec, out_dims: Any, randomness: str, place: tuple[int, int, int]
) -> tuple[list, list, Spec] | None:
    """One chunk of a `vmap` whose lanes part, where a loop over the examples may do; None where not.

    Returns:
        The leaves of the result, lanes at their dims; the dims, and the structure.
    """
    code = code_of(call.func)
    ways = parted.get(code)
    if ways is None or mapping_of(call.func) is not None or _looked_on():
        return None
    digits, depth = place[1].bit_length(), _depth(call.func)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if (
        pacing.FREE <= 0
        or randomness != "error"
        or not may_be_alone(code, call.func)
        or _same_ways()
        or any(leaf.is_inference() for leaf in tensors)
    ):
        ways.together.add(digits)
        return None
    pace = ways.paces.setdefault((digits, depth), Pace())
    loop = _Loop(call, leaves, dims, spec, place, tensors)
    alone = pace.runs_alone()
    free = 0.0 if alone else pace.free()
    again = pace.cold and pace.known and not alone
    if (alone or free > 0 or again) and not loop.may_begin():
        ways.together.add(digits)
        return None
    if alone:
        loop.go_on(_longer_than(_LONGER * max(pace.each * loop.count, pacing.FREE)))
        pace.alone = loop.complete
    elif free > 0:
        loop.go_on(lambda done, each: _too_long(loop.count - done, each, loop.seconds, free))
    elif again:
        pace.cold = False
        loop.go_on(lambda done, each: done > 1)
    if loop.failed:
        pace.known = True  # what a loop comes to is known
        return None
    if loop.results:
        loop.note(pace)
    if loop.complete:
        return loop.result(out_dims)
    begun = time.thread_time()
    stays = digits in ways.together
    found = runner.masked(call.func, leaves, dims, spec, out_dims, place)
    if found is not None:
        stays = pace.note_together(loop.count, time.thread_time() - begun)
    else:
        budget = Budget(pace.each * loop.count * (1 + stays) + pacing.COLD, pace.told)
        found = run_apart(call, leaves, dims, spec, out_dims, randomness, place, budget=budget)
        pace.told = noted(code) or budget.told
        stays = found is not None and pace.note_together(loop.count, budget.seconds())
        if found is None and not (loop.results or loop.may_begin()):
            found = run_apart(call, leaves, dims, spec, out_dims, randomness, place)
        elif found is None:
            pace.go_alone()
            loop.go_on(_longer_than(_LONGER * budget.limit))
            if loop.results:
                loop.note(pace)
            pace.alone = loop.complete
            if loop.complete:
                found = loop.result(out_dims)
            else:
                found = run_apart(call, leaves, dims, spec, out_dims, randomness, place)
    if depth == 0:
        (ways.together.add if stays else ways.together.discard)(digits)
    return found


def _same_ways() -> bool:
    """Whether time may not decide which way lanes run.

    The last digits of numbers depend on that, and so does how often processes exchange what they have.
    """
    exchanging = torch.distributed.is_available() and torch.distributed.is_initialized()
    return exchanging or torch.are_deterministic_algorithms_enabled()


def _looked_on() -> bool:
    """Whether a transform or code around might see in which way lanes run.

    Such as a checkpoint, which expects what is saved for a backward pass to be the same when it runs again.
    """
    if machine.boundaries or saves_by_hooks(True) is not None or current_graph_task_id() >= 0:
        return True
    return any(isinstance(level, BatchLevel) for level in live_levels())


def _too_long(left: int, each: float, spent: float, free: float) -> bool:
    """Whether a loop for as many as are left will take too long, as far as that is known from some examples."""
    return spent > free / _SAMPLE and left * each > free


def _longer_than(limit: float) -> Callable[[int, float], bool]:
    return lambda done, each: each * done > limit


def _depth(func: Any) -> int:
    """In how many transforms a function is wrapped, whose code counts as its own."""
    depth = 0
    while hasattr(func, "__wrapped__"):
        func, depth = func.__wrapped__, depth + 1
    return depth


class _Loop:
    """The examples one by one, as far as that has come.

    Attributes:
        count: How many there are.
        results: Those of the first of them.
        failed: Whether one has raised, or drawn random numbers: all run together, which says more of that.
        inside: Whether a `vmap` inside has returned a Python number: all run together then (`keep_together`).
        seconds: How long they took.
        warm: From which one on they tell how long an example takes.
        cold: How long those before took.
        looks: How often the clock was looked at since.
        longest: The longest time between two of these, and for how many examples.
    """

    def __init__(
        self, call: Call, leaves: list, dims: list, spec: Spec, place: tuple[int, int, int], tensors: list[Tensor]
    ) -> None:
        self.call = call
        self.leaves = leaves
        self.dims = dims
        self.spec = spec
        self.place = place
        self.count = place[1]
        self.tensors = tensors
        self.versions: list[int] = []
        self.results: list[Any] = []
        self.failed = self.inside = False
        self.seconds = self.cold = 0.0
        self.warm = self.looks = 0
        self.longest = 0.0, 0

    @property
    def complete(self) -> bool:
        """Whether all examples are done."""
        return len(self.results) == self.count

    @property
    def each(self) -> float:
        """How long an example takes."""
        done, seconds = len(self.results) - self.warm, self.seconds - self.cold
        longest, count = self.longest if self.looks >= _LOOKS else (0.0, 0)
        return (seconds - longest) / (done - count)

    def may_begin(self) -> bool:
        """Whether nothing but the result tells how often the function runs. From then on, writes outside are seen."""
        outside = without_traces(self.call.func, self.leaves)
        if outside is None:
            return False
        self.tensors += [tensor for tensor in outside if not tensor.is_inference()]
        self.versions = [tensor._version for tensor in self.tensors]
        return True

    def written(self) -> bool:
        """Whether an argument, or a tensor from outside, has been written to: what is done stays done."""
        return self.versions != [tensor._version for tensor in self.tensors]

    def go_on(self, enough: Callable[[int, float], bool]) -> None:
        """Run the next examples, until `enough(how many are done, seconds for each)`."""
        before = Generators()
        around, machine.alone = machine.alone, self._number_inside
        try:
            self._run(enough)
        except Exception as error:
            if self.written():
                if not hasattr(error, "lanes"):
                    name_lanes(error, [self.place[0] + len(self.results)])
                raise
            self._fail()
        finally:
            machine.alone = around
        if self.inside and not self.written():
            keep_together(code_of(self.call.func), self.call.func)
            self._fail()
        if not before.equals(Generators()):
            if self.written():
                raise drawn_without_leave("in a lane that ran by itself")
            before.reseat()
            self._fail()

    def _number_inside(self) -> None:
        self.inside = True

    def _fail(self) -> None:
        self.failed = True
        self.results.clear()

    def _run(self, enough: Callable[[int, float], bool]) -> None:
        func, results, count = self.call.func, self.results, self.count
        begun = time.thread_time() - self.seconds
        done = looked = len(results)
        while done < count:
            if done in _FIRST[:2]:
                self.warm, self.cold, self.looks, self.longest = done, self.seconds, 0, (0.0, 0)
            until = min(next((stop for stop in _FIRST if stop > done), count), count)
            for args, kwargs in self._examples(done, until):
                results.append(func(*args, **kwargs))
                done += 1
                if self.inside and not self.written():
                    return
                if done == until or done % _STRIDE == 0:
                    before, self.seconds = self.seconds, time.thread_time() - begun
                    self.looks += 1
                    self.longest = max(self.longest, (self.seconds - before, done - looked))
                    looked = done
                    if done < count and enough(done, self.each) and not self.written():
                        return

    def _examples(self, done: int, until: int) -> Iterator[tuple[Sequence, dict]]:
        """The arguments of examples."""
        start, _, total = self.place
        place = (start + done, until - done, total)
        columns = [
            repeat(leaf) if dim is None else lane_rows(leaf, dim, place).unbind(0)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        rows = zip(*columns, range(until - done))
        if self.spec == positional(len(self.leaves)):
            return ((row[:-1], _NO_NAMES) for row in rows)
        return (unflatten(list(row[:-1]), self.spec) for row in rows)

    def note(self, pace: Pace) -> None:
        """What is known then of how long the examples take."""
        pace.note_loop(self.each, self.seconds, self.complete, cold=len(self.results) == 1)
        if not (pace.alone and pace.sure and self.complete and self.count > MANY_WAYS):
            return
        pace.untold += self.seconds
        if self.seconds >= pacing.FREE or pace.untold >= pacing.LONG:
            pace.untold = 0.0
            warn_loop(self.count, pace.told)

    def result(self, out_dims: Any) -> tuple[list, list, Spec]:
        """The leaves of what all examples have returned, lanes at their dims; the dims, and the structure."""
        call, leaves = self.call, self.leaves
        found = None if is_ragged(out_dims) else stacked(self.results)
        if found is None:
            return run_apart(call, leaves, self.dims, self.spec, out_dims, "error", self.place, self.results)
        parts, spec = found
        if out_dims == 0 and type(out_dims) is int and spec is LEAF and parts[0][1]:
            return [parts[0][0]], [0], LEAF
        start, count, total = self.place
        with BatchLevel(count, "error", total, start) as level:
            note_question(level)  # in other ways, the lanes of this function have parted
            out = unflatten([level.wrap(part) if has_lanes else part for part, has_lanes in parts], spec)
            return leave(level, out, out_dims, call.func, leaves)
