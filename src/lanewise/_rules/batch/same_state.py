"""`randomness="same"` with parameters of each lane: every lane draws from the state that the first one draws from.

How many numbers that takes may differ between the lanes. From then on they are at different states of the generator,
as if each had been run alone.
"""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.draws.same_draws import State, firsts, history_of, parted_by_draws
from lanewise._core.missing import stack_results, warn_lane_loop
from lanewise._core.plane import Plane, replace_tensors
from lanewise._torch_compat import OpOverload


def from_one_state(level: BatchLevel, op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """The operation below, once for each lane `[B, *S]`; results stacked."""
    generator = kwargs.get("generator")
    own: Any = level.stands_for or level
    if not level.size:
        return _no_lanes(level, op, args, kwargs)
    if any(_shares_state(arg) for arg in args if level.mapped(arg)):
        # Each lane of a `vmap` around has states of its own for the lanes here: all pairs are to be lanes of one level.
        raise parted_by_draws(own, op._schema.name)
    warn_lane_loop(level, op, f'{op} has parameters of each lane under randomness="same", and all draw from one state')
    history = history_of(own, generator)
    if history is not None and own is not level:
        begun = history.begin_apart(own)
    else:
        begun = [State(generator)] * level.size
    outs, ends = [], []
    for lane in range(level.size):
        begun[lane].restore()

        def take(tensor: Any, lane: int = lane) -> Tensor:
            return tensor.value.select(0, lane) if level.mapped(tensor) else level.physical(tensor)

        lane_args, lane_kwargs = replace_tensors(take, args, kwargs)
        outs.append(op(*lane_args, **lane_kwargs))
        ends.append(State(generator))
    which = firsts(ends)
    if any(which):
        if history is None:
            raise parted_by_draws(own, op._schema.name)
        history.part(own, which, ends)
    ends[0].restore()
    return stack_results(op, outs)


def _shares_state(arg: Any) -> bool:
    """Whether the lanes of a level below draw the same numbers, from parameters of their own."""
    value = arg.value
    while isinstance(value, Plane):
        if isinstance(value, BatchTensor) and value.mapped and value.level.randomness == "same":
            return True
        value = value.value
    return False


def _no_lanes(level: BatchLevel, op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Shape and dtype of an empty batch, from a draw with parameters that all of them may have."""
    begun = State(kwargs.get("generator"))

    def ones(tensor: Any) -> Tensor:
        return tensor.value.new_ones(tensor.shape) if level.mapped(tensor) else level.physical(tensor)

    out = op(*replace_tensors(ones, args, {})[0], **kwargs)
    begun.restore()
    return torch.zeros_like(out).unsqueeze(0)[:0]
