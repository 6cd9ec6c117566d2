"""Generators that are seeded, or whose state is read, while some lanes run: `torch.manual_seed`, `fork_rng` and others.

Under `randomness="same"` each lane has a state of the generator of its own (same_draws.py): who sets it sets that of
the lanes that run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lanewise._control.runtime.numbers import one_number
from lanewise._core.draws.same_draws import histories


def seeds(func: Callable, generator: torch.Generator | None, /, *args: Any, **kwargs: Any) -> Any:
    """Call what sets the state of a generator."""
    found = histories(generator)
    for _, history in found:
        history.leave()
    out = func(*map(one_number, args), **kwargs)
    for level, history in found:
        history.move(level, level.lanes)
    return out


def reads(func: Callable, generator: torch.Generator | None, /, *args: Any, **kwargs: Any) -> Any:
    """Call what reads the state of a generator."""
    for level, history in histories(generator):
        history.meet(level)
    return func(*args, **kwargs)


_GENERATOR = {"manual_seed": seeds, "seed": seeds, "set_state": seeds, "get_state": reads, "clone_state": reads}


def generator_method(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a generator."""
    how = _GENERATOR.get(func.__name__)
    return func(*args, **kwargs) if how is None else how(func, func.__self__, *args, **kwargs)  # type: ignore[attr-defined]


@contextmanager
def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
    """`torch.random.fork_rng`: all lanes that come in get the state back, also those that have left by a jump."""
    found = histories(None)
    for level, history in found:
        history.meet(level)
    entered = [level.lanes for level, _ in found]
    try:
        with torch.random.fork_rng(*args, **kwargs):
            try:
                yield
            finally:
                for _, history in found:
                    history.leave()
    finally:
        for (level, history), lanes in zip(found, entered, strict=True):
            history.move(level, lanes)


stand_ins: dict[Any, Callable] = {torch.random.fork_rng: fork_rng}
for _module in (torch, torch.cuda):
    for _name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"):
        if hasattr(_module, _name):
            stand_ins[getattr(_module, _name)] = partial(seeds, getattr(_module, _name), None)
    for _name in ("get_rng_state", "get_rng_state_all"):
        if hasattr(_module, _name):
            stand_ins[getattr(_module, _name)] = partial(reads, getattr(_module, _name), None)
