"""Running statistics without lanes, updated by the statistics of each lane in turn, as a loop over the lanes does.

A loop computes `r <- keep r + new` for each lane: what a lane does to `r` is a pair `(keep, new)`, so is what it does
in several calls of one norm, and so is what all lanes do, the one after the other. Each level keeps its pair while it
is open, since a later call of the same norm belongs in the middle: lane 0 makes all its calls before lane 1 makes any.

A cumulative average (a BatchNorm whose momentum is None) weighs all statistics alike, in whatever order they come.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lanewise._core.batch import BatchLevel
from lanewise._core.dual import DualLevel
from lanewise._core.factories import route, unrouted
from lanewise._core.journal import Journal
from lanewise._core.lane_level import LaneLevel
from lanewise._core.level import Level, current_level
from lanewise._core.plane import Plane, detached
from lanewise._torch_compat import BatchNormBase, InstanceNormBase, preserve_version
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten
_BATCH_NORMS = {BatchNormBase.forward.__code__, nn.SyncBatchNorm.forward.__code__}
_NORMS = {*_BATCH_NORMS, InstanceNormBase.forward.__code__}


class Step(NamedTuple):
    """A plane between that of the operation and that of a captured tensor; `lanes` is 1 where none of them `varies`."""

    level: Level
    lanes: int
    varies: bool


class Pair(NamedTuple):
    """`r -> keep r + new`, with `new` [C], or [B, C] for what is done in each lane."""

    keep: float
    new: Tensor


class Entry:
    """What was done to one statistic at one level.

    Attributes:
        statistic: The statistic, held so that no other takes its id.
        before, after: Its value before the first update and after the last; kept by the outermost level.
        sealed: The calls that are complete.
        source: Who made the last call: the level above, which may still change what the call does.
        last: The last call.
    """

    __slots__ = ("statistic", "before", "after", "sealed", "source", "last")

    def __init__(self, statistic: Tensor) -> None:
        self.statistic = statistic
        self.before: Tensor | None = None
        self.after: Any = None
        self.sealed: Pair | None = None
        self.source: object = None
        self.last: Pair | None = None


_entries: weakref.WeakKeyDictionary[Level, dict[int, Entry]] = weakref.WeakKeyDictionary()


def update_running(
    level: Level,
    statistics: Sequence[Tensor | None],
    news: Sequence[Tensor | None],
    operands: list[Tensor],
    momentum: float,
) -> None:
    """Update captured statistics, and the count of batches of the BatchNorm that they belong to.

    Args:
        level: The level of the operation.
        statistics: The running statistics [C].
        news: For each that is captured, `momentum` times the statistics of the lanes, [C] on the level's plane.
        operands: What the operation was given; a level counts where one of these has its lanes.
        momentum: The weight of a new statistic.
    """
    module = _running_norm(_BATCH_NORMS)
    own = () if module is None else (module.running_mean, module.running_var)
    if not any(t is not None and t is mine for t in statistics for mine in own):
        module = None
    alike = module is not None and module.momentum is None
    captured = [(t, new) for t, new in zip(statistics, news, strict=True) if t is not None and new is not None]
    for statistic, new in captured:
        steps = _steps_down(level, statistic, operands)
        _prepare_to_run_again(steps, statistic, 0)
        if alike:
            lanes = _count_lanes(steps)
            # The module counted this call as one batch: the momentum is one over the count.
            before = round(1 / momentum) - 1
            keep, scale = before / (before + lanes), (before + 1) / (before + lanes)
            _add_alike(steps, statistic, Pair(keep, new), scale)
        else:
            _push(steps, statistic, Pair(1 - momentum, new), object())
    counter = None if module is None else module.num_batches_tracked
    if counter is not None:
        steps = _steps_down(level, counter, operands)
        if alike and not captured and _count_lanes(steps) > 1:
            raise _one_count_for_many(module)
        _prepare_to_run_again(steps, counter, 1)
        _count_more(steps, counter)


def _prepare_to_run_again(steps: list[Step], target: Tensor, written: int) -> None:
    """Note what a tensor from outside held before `written` was added, should lanes part and the function start again.

    Where lanes part already, each part would make its updates before the next part makes any.
    """
    for level, _, varies in steps:
        if isinstance(level, LaneLevel) and varies:
            raise _lanes_part(target)
        if isinstance(level, BatchLevel) and level.restartable:
            if isinstance(level.journal, list):
                level.journal = Journal([given for given in level.journal if isinstance(given, Tensor)])
            held = level.below(lambda: detached(target) - written)
            level.journal.add(target, held)


def _steps_down(level: Level, target: Tensor, operands: list[Tensor]) -> list[Step]:
    """The planes that an update passes on its way to the plane of `target`, the innermost first."""
    steps: list[Step] = []
    at: Level | None = level
    while at is not None and not at.owns(target):
        varies = isinstance(at, BatchLevel) and any(at.mapped(operand) for operand in operands)
        steps.append(Step(at, at.size if isinstance(at, BatchLevel) and varies else 1, varies))
        operands = [t.value if isinstance(t, Plane) and t.level is at else t for t in operands]
        at = at.parent
    return steps


def _count_lanes(steps: list[Step]) -> int:
    """How often a loop over all lanes on the way would update the target."""
    total = 1
    for step in steps:
        total *= step.lanes
    return total


def _push(steps: list[Step], statistic: Tensor, pair: Pair, source: Any) -> None:
    """Join what `source` does in each lane of the first step with what was done before, and hand it down.

    `pair.new` is on the plane of the first step's level.
    """
    if not steps:
        if not isinstance(source, Level):
            return _write(statistic, statistic, pair)
        entry = _entry(source, statistic)
        if entry.before is None:
            entry.before = statistic.detach().clone()
        elif not isinstance(statistic, Plane) and not torch.equal(statistic, entry.after):
            raise _written_between(statistic)
        _write(statistic, entry.before, pair)
        entry.after = statistic.detach().clone()
        return None
    step, *rest = steps

    def below() -> None:
        whole = Pair(pair.keep, _value(step.level, pair.new))
        if not step.varies:
            return _push(rest, statistic, whole, source)
        entry = _entry(step.level, statistic)
        if entry.source is not source:
            entry.sealed = _then(entry.sealed, entry.last)
        entry.source, entry.last = source, whole
        return _push(rest, statistic, _over_lanes(step.lanes, _then(entry.sealed, whole), statistic), step.level)

    return step.level.below(below)


def _value(level: Level, new: Tensor) -> Tensor:
    """The value below: [B, C] or [C]"""
    return new.value if level.owns(new) else new  # type: ignore[attr-defined]


def _then(first: Pair | None, second: Pair | None) -> Any:
    """One pair for two, the first before the second."""
    if first is None or second is None:
        return second if first is None else first
    return Pair(first.keep * second.keep, first.new * second.keep + second.new)


def _over_lanes(lanes: int, pair: Pair, statistic: Tensor) -> Pair:
    """What one lane does, [B, C] or the same in all, [C] -> what all lanes do, one after the other, [C]"""
    keep, new = pair
    wide = _wide(new)
    powers = torch.arange(lanes - 1, -1, -1, dtype=wide.dtype, device=wide.device)
    weights = torch.pow(keep, powers)
    total = (wide * weights.unsqueeze(1)).sum(0) if new.dim() > statistic.dim() else wide * weights.sum()
    return Pair(keep**lanes, total)


def _add_alike(steps: list[Step], statistic: Tensor, pair: Pair, scale: float) -> None:
    """Sum the statistics of all lanes, each with the same weight, then write."""
    if not steps:
        _write(statistic, statistic, Pair(pair.keep, pair.new * scale))
        return
    step, *rest = steps

    def below() -> None:
        value = _wide(_value(step.level, pair.new))
        value = value.sum(0) if value.dim() > statistic.dim() else value * step.lanes
        _add_alike(rest, statistic, Pair(pair.keep, value), scale)

    step.level.below(below)


def _wide(value: Tensor) -> Tensor:
    """In single precision at least."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _write(statistic: Tensor, before: Tensor, pair: Pair) -> None:
    """Kernels write statistics without counting a new version, and so does this.

    A backward pass that saved the statistics, which it does not read, would refuse them.
    """
    chain = [statistic]
    while isinstance(chain[-1], Plane):
        chain.append(chain[-1].value)
    with torch.no_grad(), preserve_version(*chain):
        statistic.copy_(_wide(before) * pair.keep + _wide(pair.new))


def _one_count_for_many(module: Any) -> TransformError:
    return TransformError(
        at_user_line(
            f"vmap: {module}: a BatchNorm with momentum=None averages over all batches so far. Its running statistics "
            "have lanes, but `num_batches_tracked`, made outside the mapped function, has none, and would count on "
            "from lane to lane",
            "params, buffers = lanewise.stack_module_state(models)  # all buffers, num_batches_tracked too\n"
            "vmap(f)(params, buffers, xs)",
        )
    )


def _written_between(statistic: Tensor) -> TransformError:
    return TransformError(
        at_user_line(
            f"vmap: batch norm: the running statistics {list(statistic.shape)}, made outside the mapped function, were "
            "updated with statistics of each lane, then without lanes, and now with lanes again: a loop would make all "
            "these updates for one example before any for the next",
            "module.eval()                                       # use the running statistics as they are\n"
            "vmap(f)(xs, buffers)                                # running statistics for each lane, passed in",
        )
    )


def _entry(level: Level, statistic: Tensor) -> Entry:
    entries = _entries.setdefault(level, {})
    return entries.setdefault(id(statistic), Entry(statistic))


def _count_more(steps: list[Step], counter: Tensor) -> None:
    """Add the lanes that the module's own `+= 1` did not count."""
    missing = _count_lanes(steps) - 1

    def write() -> None:
        with torch.no_grad():
            counter.add_(missing)

    if missing:
        run: Callable[[], None] = write
        for level, _, _ in reversed(steps):
            run = _within(level, run)
        run()


def _within(level: Level, run: Callable[[], None]) -> Callable[[], None]:
    return lambda: level.below(run)


def _running_norm(forwards: set[Any]) -> Any:
    """The norm whose forward is running, None if there is none: only it knows its count, its average and its name."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forwards:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _lanes_part(statistic: Tensor) -> TransformError:
    module = _running_norm(_NORMS) or "batch norm"
    return TransformError(
        at_user_line(
            f"vmap: {module}: running statistics {list(statistic.shape)} made outside the mapped function are updated "
            "where lanes take different branches: the lanes of one branch would update them before those of the other, "
            "in an order that is not a loop's",
            "module.eval()                                       # use the running statistics as they are\n"
            "lanewise.replace_all_batch_norm_modules_(module)    # batch norm without running statistics\n"
            "vmap(f)(xs, buffers)                                # running statistics for each lane, passed in",
        )
    )


# --- instance norm ---------------------------------------------------------------------------------------------------


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """x [N, C, *sp], all others [C]. torch's own updates copies of the statistics, and writes them back."""
    level, given = current_level(), [t for t in (x, weight, bias, running_mean, running_var) if t is not None]
    running = [t for t in (running_mean, running_var) if t is not None]
    options = momentum, eps, cudnn_enabled
    if level is None or not use_input_stats or not running or not any(isinstance(t, Plane) for t in given):
        statistics = running_mean, running_var, use_input_stats
        return unrouted(aten.instance_norm.default, x, weight, bias, *statistics, *options)
    with torch.no_grad():
        dims = list(range(2, x.dim()))
        var, mean = torch.var_mean(x, dims)
        for statistic, new in ((running_mean, mean), (running_var, var)):
            if statistic is None:
                continue
            news = new.mean(0).to(statistic.dtype) * momentum
            if level.owns(statistic):
                statistic.mul_(1 - momentum).add_(_for_writing_into(statistic, news))
            else:
                update_running(level, [statistic], [news], given, momentum)
    return unrouted(aten.instance_norm.default, x, weight, bias, None, None, True, *options)


route(aten.instance_norm.default, _instance_norm)


def _for_writing_into(statistic: Tensor, new: Tensor) -> Tensor:
    """`new` without the tangents of planes that the statistic, or what holds its lanes, does not lie on."""
    planes: set[Level] = set()
    while isinstance(statistic, Plane):
        planes.add(statistic.level)
        statistic = statistic.value
    return _without_tangents(new, planes)


def _without_tangents(new: Tensor, kept: set[Level]) -> Tensor:
    if not isinstance(new, Plane):
        return new
    value = new.level.below(_without_tangents, new.value, kept)
    if isinstance(new.level, DualLevel) and new.level not in kept:
        return value
    if value is new.value or not isinstance(new.level, BatchLevel):
        return new
    out = new.level.alias(new)  # type: ignore[arg-type]
    out.value = value
    return out
