"""What random operations may do on a batch plane, and the errors where they may not."""

import hashlib
from ctypes import string_at
from typing import Any

import torch

from lanewise._core.operations import asked_once
from lanewise._core.parting.lanes import with_around
from lanewise._torch_compat import generator_identity
from lanewise.errors import RandomnessError, at_user_line

# Random operations that torch does not tag as such.
_UNTAGGED = frozenset({"aten::_sample_dirichlet", "aten::binomial", "aten::random", "aten::random_"})


@asked_once
def is_random(op: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags or op._schema.name in _UNTAGGED


def check_random(level: Any, op: Any, args: tuple, kwargs: dict) -> None:
    """Raise where `randomness="error"` forbids the operation."""
    if level.randomness == "error" and not _on_meta(args, kwargs):
        raise drawn_without_leave(op._schema.name, "jacfwd" if level.directions else "vmap")


def _on_meta(args: tuple, kwargs: dict) -> bool:
    """Whether an operation is on tensors without numbers, for which none are drawn."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in (*args, *kwargs.values()))


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

    def digest(self) -> bytes:
        """What stands for the states: that of others is the same where they are."""
        return _hashed([self.cpu, *(state for _, _, state in self.devices)])

    def equals(self, other: "Generators") -> bool:
        """Whether the states are the same."""
        devices = zip(self.devices, other.devices)
        return torch.equal(self.cpu, other.cpu) and all(torch.equal(own[-1], its[-1]) for own, its in devices)


def digest(generator: torch.Generator | None) -> bytes:
    """What stands for the state of a generator, or of the default ones."""
    return Generators().digest() if generator is None else _hashed([generator.get_state()])


def _hashed(states: list[torch.Tensor]) -> bytes:
    text = b"".join(string_at(state.data_ptr(), state.nbytes) for state in states)
    return hashlib.blake2b(text, digest_size=16).digest()


def note_generator(level: Any, generator: torch.Generator) -> None:
    """Before a draw from a generator of the user's: its state, to go back to if the draw has to be made again.

    So it is for levels around whose lanes are part of this one's pairs.
    """
    key = generator_identity(generator)
    for each in with_around(level):
        if each.drawn is None:
            each.drawn = {}
        if key not in each.drawn:
            each.drawn[key] = generator, generator.get_state()


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
    """The error for the same draw in all lanes by an operation that knows no lanes."""
    return RandomnessError(
        at_user_line(
            f"vmap: {op._schema.name} does not currently support same randomness with a batched tensor input: it runs "
            "once per lane, and each time draws other numbers",
            'vmap(f, randomness="different")',
        )
    )


def no_state_for_lanes(what: str) -> RandomnessError:
    """The error for draws that take more numbers in some lanes than in others, where these cannot part."""
    return RandomnessError(
        at_user_line(
            f"vmap: {what} does not currently support same randomness with a batched tensor input here, in a formula "
            "for derivatives or a transform inside: it draws more numbers in some lanes than in others, and the lanes "
            "cannot go on from states of their own",
            'vmap(f, randomness="different")\n'
            "noise = torch.poisson(rate)  # in the function itself, and used in the formula or transform",
        )
    )
