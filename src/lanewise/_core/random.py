"""What random operations may do on a batch plane, and the errors where they may not."""

from functools import cache
from typing import Any

import torch

from lanewise.errors import RandomnessError, at_user_line

# Random operations that torch does not tag as such.
_UNTAGGED = frozenset({"aten::_sample_dirichlet", "aten::binomial", "aten::random", "aten::random_"})


@cache
def is_random(op: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags or op._schema.name in _UNTAGGED


def check_random(level: Any, op: Any) -> None:
    """Raise where `randomness="error"` forbids the operation."""
    if level.randomness == "error":
        raise drawn_without_leave(op._schema.name)


def drawn_without_leave(what: str) -> RandomnessError:
    """The error where `randomness="error"` forbids an operation."""
    return RandomnessError(
        at_user_line(
            f"vmap: called random operation while in randomness error mode: {what}",
            'vmap(f, randomness="different")  # every lane draws its own numbers\n'
            'vmap(f, randomness="same")       # all lanes draw the same numbers',
        )
    )


def note_generator(level: Any, generator: torch.Generator) -> None:
    """Before a draw from a generator of the user's: its state, to go back to if the draw has to be made again."""
    if level.drawn is None:
        level.drawn = {}
    if id(generator) not in level.drawn:
        level.drawn[id(generator)] = generator, generator.get_state()


def reseat_generators(level: Any) -> None:
    """Put the states back of all such generators."""
    for generator, state in (level.drawn or {}).values():
        generator.set_state(state)


def unbatched_write(op: Any, name: str) -> RandomnessError:
    """The error for different numbers in each lane, written into a tensor that has no lanes."""
    return RandomnessError(
        at_user_line(
            f"vmap: {op._schema.name}: Cannot ask for different inplace randomness on an unbatched tensor: argument "
            f"`{name}` was made outside the mapped function, or from captured tensors alone, and has no lanes",
            "t = torch.zeros_like(t)  # inside the function, then write the random numbers into it",
        )
    )


def same_with_lanes(op: Any) -> RandomnessError:
    """The error for the same draw in all lanes from parameters that differ from lane to lane."""
    return RandomnessError(
        at_user_line(
            f"vmap: {op._schema.name} does not currently support same randomness with a batched tensor input: the "
            "parameters differ from lane to lane, so one draw cannot be that of all lanes",
            'vmap(f, randomness="different")\n'
            "torch.rand(p.shape) < p          # in place of bernoulli, the same uniform numbers in all lanes",
        )
    )
