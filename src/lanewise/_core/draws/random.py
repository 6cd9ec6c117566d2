"""What random operations may do on a batch plane, and the errors where they may not."""

from collections import OrderedDict
from typing import Any

import torch

from lanewise._core.level import on_plane
from lanewise._core.operations import asked_once
from lanewise._torch_compat import generator_identity
from lanewise.errors import RandomnessError, at_user_line

# Random operations that torch does not tag as such.
_UNTAGGED = frozenset({"aten::_sample_dirichlet", "aten::binomial", "aten::random", "aten::random_"})


@asked_once
def is_random(op: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags or op._schema.name in _UNTAGGED


def check_random(level: Any, op: Any) -> None:
    """Raise where `randomness="error"` forbids the operation."""
    if level.randomness == "error":
        raise drawn_without_leave(op._schema.name, "jacfwd" if level.directions else "vmap")


def drawn_without_leave(what: str, api: str = "vmap") -> RandomnessError:
    """The error where `randomness="error"` forbids an operation."""
    one, all_of_them = ("lane", "lanes") if api == "vmap" else ("direction", "directions")
    return RandomnessError(
        at_user_line(
            f"{api}: called random operation while in randomness error mode: {what}",
            f'{api}(f, randomness="different")  # every {one} draws its own numbers\n'
            f'{api}(f, randomness="same")       # all {all_of_them} draw the same numbers',
        )
    )


class Generators:
    """The state of every device's default random generator, to start each chunk from the same one."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.devices = []
        for kind in ("cuda", "xpu"):
            module = getattr(torch, kind)
            if module.is_initialized():
                self.devices.extend((module, i, module.get_rng_state(i)) for i in range(module.device_count()))
        if torch.backends.mps.is_available():
            self.devices.append((torch.mps, None, torch.mps.get_rng_state()))

    def reseat(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self.cpu)
        for module, index, state in self.devices:
            module.set_rng_state(state) if index is None else module.set_rng_state(state, index)

    def equals(self, other: "Generators") -> bool:
        """Whether the states are the same."""
        devices = zip(self.devices, other.devices)
        return torch.equal(self.cpu, other.cpu) and all(torch.equal(own[-1], its[-1]) for own, its in devices)


def note_generator(level: Any, generator: torch.Generator) -> None:
    """Before a draw from a generator of the user's: its state, to go back to if the draw has to be made again."""
    if level.drawn is None:
        level.drawn = {}
    key = generator_identity(generator)
    if key not in level.drawn:
        level.drawn[key] = generator, generator.get_state()


def reseat_generators(level: Any) -> None:
    """Put the states back of all such generators."""
    for generator, state in (level.drawn or {}).values():
        generator.set_state(state)


class _Seat:
    """A user's generator in a chunk loop. It is kept alive: another one in its place would be taken for it.

    Attributes:
        first: Its state when the first chunk came to it, None where that did not.
        left: Its state after the last chunk that drew from it.
        order: That of the level that last did.
    """

    __slots__ = ("generator", "first", "left", "order")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.first: torch.Tensor | None = None
        self.left: torch.Tensor | None = None
        self.order = -1


_seats: OrderedDict[int, _Seat] = OrderedDict()
_drawn_from: dict[int, _Seat] = {}
_MOST_GENERATORS = 64


def reseat(generator: torch.Generator, order: int, start: int) -> None:
    """Let every chunk start from the same state of a user's generator, as the chunk loop does for the default one.

    One that the chunk has seeded itself stays as it is: it is not at the state at which the chunk before has left it.

    Args:
        generator: The generator.
        order: That of the chunk's level.
        start: The chunk's first lane.
    """
    key = generator_identity(generator)
    seat = _seats.pop(key, None) or _Seat(generator)
    if seat.order != order:
        with on_plane(None):
            if start == 0:
                seat.first = generator.get_state()
            elif seat.first is not None and (seat.left is None or torch.equal(seat.left, generator.get_state())):
                generator.set_state(seat.first)
    seat.order = order
    _seats[key] = _drawn_from[key] = seat
    while len(_seats) > _MOST_GENERATORS:
        _seats.popitem(last=False)


def note_left() -> None:
    """After a chunk: the states that it has left the generators at."""
    with on_plane(None):
        for seat in _drawn_from.values():
            seat.left = seat.generator.get_state()
    _drawn_from.clear()


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
    """The error for the same draw in all lanes by an operation that knows no lanes."""
    return RandomnessError(
        at_user_line(
            f"vmap: {op._schema.name} does not currently support same randomness with a batched tensor input: it runs "
            "once per lane, and each time draws other numbers",
            'vmap(f, randomness="different")',
        )
    )


def no_state_for_lanes(op: Any) -> RandomnessError:
    """The error for draws that take more numbers in some lanes than in others, in a backward or forward formula."""
    return RandomnessError(
        at_user_line(
            f"vmap: {op._schema.name} does not currently support same randomness with a batched tensor input in a "
            "formula for derivatives: it draws more numbers in some lanes than in others, and the lanes cannot go on "
            "from states of their own there",
            'vmap(f, randomness="different")\n'
            "noise = torch.poisson(rate)  # in the function itself, and used in the formula",
        )
    )
