"""What a function under `checkpoint` finds when a backward pass runs it again: the tensors that stood in its modules.

`functional_call` puts tensors into a module for the time of a call. The backward pass comes later, and the module has
its own tensors then: a function that ran with the given ones runs again with them.

The reentrant kind of `checkpoint` knows `backward()` only. Inside a transform that differentiates it is of the other.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.utils.checkpoint import checkpoint

from lanewise._core.dual import DualLevel
from lanewise._core.level import current_level, live_levels, record_as_outside
from lanewise._torch_compat import CheckpointFrame, CheckpointFunction
from lanewise._transforms.orders import recording


class _InForce(threading.local):
    """For each call of `functional_call` that runs, outermost first: a function that puts its tensors in again."""

    swaps: tuple[Callable[[], AbstractContextManager], ...] = ()


in_force = _InForce()


def as_it_was(run: Callable) -> Callable:
    """`run` with the tensors in its modules that are there now, whenever it is called."""
    swaps = in_force.swaps
    if not swaps:
        return run

    @functools.wraps(run)
    def again(*args: Any, **kwargs: Any) -> Any:
        if in_force.swaps is swaps:
            return run(*args, **kwargs)
        before, in_force.swaps = in_force.swaps, ()
        try:
            with ExitStack() as stack:
                for swap in swaps:
                    stack.enter_context(swap())
                return run(*args, **kwargs)
        finally:
            in_force.swaps = before

    return again


def _differentiating() -> bool:
    return recording() or (current_level() is not None and any(type(level) is DualLevel for level in live_levels()))


_frame_init = CheckpointFrame.__init__
_reentrant_forward = CheckpointFunction.forward


def _init(self: Any, recompute: Callable, *args: Any, **kwargs: Any) -> None:
    run = as_it_was(recompute)

    def run_again(*args: Any) -> Any:
        with record_as_outside():
            return run(*args)

    _frame_init(self, run_again, *args, **kwargs)


@functools.wraps(_reentrant_forward)
def _forward(ctx: Any, run: Callable, *args: Any) -> Any:
    return _reentrant_forward(ctx, as_it_was(run), *args)


def _apply(cls: Any, run: Callable, preserve: bool, *args: Any) -> Any:
    if _differentiating():
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve)
    return super(CheckpointFunction, cls).apply(run, preserve, *args)


CheckpointFrame.__init__ = _init
CheckpointFunction.forward = staticmethod(_forward)
CheckpointFunction.apply = classmethod(_apply)
