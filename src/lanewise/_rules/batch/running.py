"""Running statistics without lanes, updated by the statistics of each lane in turn, as a loop over the lanes does.

A loop computes `r <- keep r + new` for each lane. A cumulative average (a BatchNorm whose momentum is None) weighs all
statistics alike, in whatever order they come.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lanewise._core.batch import BatchLevel
from lanewise._core.dual import DualLevel
from lanewise._core.level import Level, current_level, note_writes
from lanewise._core.plane import Plane, detached, versioned
from lanewise._core.python.factories import route, unrouted
from lanewise._rules.batch.updates import (
    Entry,
    Update,
    count_runs,
    prepare_to_run_again,
    push,
    steps_down,
    wide,
)
from lanewise._torch_compat import BatchNormBase, preserve_version
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten
_BATCH_NORMS = {BatchNormBase.forward.__code__, nn.SyncBatchNorm.forward.__code__}


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
    module = _running_batch_norm()
    own = () if module is None else (module.running_mean, module.running_var)
    if not any(t is not None and t is mine for t in statistics for mine in own):
        module = None
    alike = module is not None and module.momentum is None
    captured = [(t, new) for t, new in zip(statistics, news, strict=True) if t is not None and new is not None]
    for statistic, _ in captured:
        if isinstance(statistic, Plane):
            level.check_write_outside(statistic.level, pairs=True)
    for statistic, new in captured:
        steps = steps_down(level, statistic, operands)
        prepare_to_run_again(steps, statistic, partial(_copy, statistic))
        if alike:
            # The module counted this call as one batch: the momentum is one over the count.
            batches = round(1 / momentum) - 1
            update = Update(1, new * (batches + 1))
            push(steps, statistic, update, object(), False, partial(_write_mean, statistic, batches))
        else:
            push(steps, statistic, Update(1 - momentum, new), object(), True, partial(_write_decayed, statistic))
    counter = None if module is None else module.num_batches_tracked
    if counter is not None:
        steps = steps_down(level, counter, operands)
        if alike and not captured and count_runs(steps) > 1:
            raise _one_count_for_many(module)
        prepare_to_run_again(steps, counter, lambda: detached(counter) - 1)
        push(steps, counter, Update(1, None), object(), False, partial(_write_count, counter))


def _copy(target: Tensor) -> Tensor:
    return detached(target).clone()


def _write_decayed(statistic: Tensor, entry: Entry | None, update: Update, again: bool = False) -> None:
    if entry is None:
        _write(statistic, statistic, update)
        return
    if entry.before is None:
        entry.before = statistic.detach().clone()
    elif _written_elsewhere(statistic, entry):
        if again:
            return
        raise _written_between(statistic)
    _write(statistic, entry.before, update)
    entry.after = statistic.detach().clone()


def _write_mean(statistic: Tensor, batches: Any, entry: Entry | None, update: Update, again: bool = False) -> None:
    """The mean of `batches` values, and of those of `update` that it does not hold yet."""
    if entry is None:
        entry = Entry(statistic)
    if again:
        if _written_elsewhere(statistic, entry):
            return
        batches = entry.batches
    count, total = update.weight - entry.written.weight, update.new - entry.written.new
    entry.written, entry.batches = update, batches + count
    if entry.batches:
        _write(statistic, statistic, Update(batches / entry.batches, total / entry.batches))
    if isinstance(count, Tensor):
        entry.after = statistic.detach().clone()


def _write_count(counter: Tensor, entry: Entry | None, update: Update, again: bool = False) -> None:
    """Add the lanes that the module's own `+= 1` did not count."""
    if entry is None or (again and _written_elsewhere(counter, entry)):
        return
    missing = update.weight - entry.written.weight - (0 if again else 1)
    entry.written = update
    with torch.no_grad():
        counter.add_(missing)
    if isinstance(missing, Tensor):
        entry.after = counter.detach().clone()


def _written_elsewhere(target: Tensor, entry: Entry) -> bool:
    return not isinstance(target, Plane) and not torch.equal(target, entry.after)


def _write(statistic: Tensor, before: Tensor, update: Update) -> None:
    """Kernels write statistics without counting a new version, and so does this.

    A backward pass that saved the statistics, which it does not read, would refuse them.
    """
    with torch.no_grad(), preserve_version(*versioned(statistic)):
        statistic.copy_(wide(before) * update.weight + wide(update.new))


def _one_count_for_many(module: Any) -> TransformError:
    return TransformError(
        at_user_line(
            f"vmap: {_name_of_running() or module}: a BatchNorm with momentum=None averages over all batches so far. "
            "Its running statistics have lanes, but `num_batches_tracked`, made outside the mapped function, has none, "
            "and would count on "
            "from lane to lane",
            "params, buffers = lanewise.stack_module_state(models)  # all buffers, num_batches_tracked too\n"
            "vmap(f)(params, buffers, xs)",
        )
    )


def _written_between(statistic: Tensor) -> TransformError:
    return TransformError(
        at_user_line(
            f"vmap: {_name_of_running() or 'batch norm'}: the running statistics {list(statistic.shape)}, made outside "
            "the mapped function, were updated with statistics of each lane, then without lanes, and now with lanes "
            "again: a loop would make all "
            "these updates for one example before any for the next",
            "module.eval()                                       # use the running statistics as they are\n"
            "vmap(f)(xs, buffers)                                # running statistics for each lane, passed in",
        )
    )


def _running_batch_norm() -> Any:
    """The BatchNorm whose forward is running, None if there is none: only it knows its count and its average."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _BATCH_NORMS:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _name_of_running() -> str:
    """The normalisation whose forward is running, by its name in the outermost module that runs; empty without one."""
    norm: Any = None
    outermost: Any = None
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            outermost = module
            norm = module if norm is None and hasattr(module, "running_mean") else norm
        frame = frame.f_back
    if norm is None:
        return ""
    name = next((name for name, module in outermost.named_modules() if module is norm), "")
    return f"`{name}`, {norm}" if name else str(norm)


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
        args = (x, weight, bias, running_mean, running_var, use_input_stats, *options)
        if level is not None:
            note_writes(level, aten.instance_norm.default, args, {})
        return unrouted(aten.instance_norm.default, *args)
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
                update_running(level, [statistic], [news], [*given, news], momentum)
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
