"""A process that runs operations with hostile arguments on lanes.

Wrong dims, huge and negative sizes, empty tensors, wrong dtypes, None: any error will do, a crash will not. The number
of the case that runs is printed first, so that the parent knows which one it was.

    python -m tests.hostile START STOP STEP CASES            # so many cases for each operation
    python -m tests.hostile START STOP STEP CASES --plain    # without lanes
"""

import random
import resource
import sys
import warnings
from typing import Any

import torch

from lanewise import grad, jvp, vmap
from lanewise._core.batch import BATCH_RULES

GIB = 2**30
NUMBERS = [-(2**62), -7, -1, 0, 1, 2, 3, 2**40, 2**62]
FLOATS = [float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e300]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (3, 0), (2, 2), (1, 2, 3), (2, 3, 3), (2, 1, 4, 4), (1, 2, 3, 3, 3)]
KINDS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
    torch.uint8,
]
STRINGS = ["", "mean", "none", "reflect", "no such mode"]


def operations() -> list[Any]:
    """Every overload with a batching rule, in a fixed order."""
    return sorted(BATCH_RULES, key=str)


def hostile_tensor(dice: random.Random) -> torch.Tensor:
    shape, kind = dice.choice(SHAPES), dice.choice(KINDS[:2] * 3 + KINDS)
    values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(dice.randrange(99))) * dice.choice(
        [1, 3, 100]
    )
    return values.to(kind) if dice.random() < 0.8 else values.to(kind).transpose(0, -1).contiguous().transpose(0, -1)


def hostile(kind: str, dice: random.Random) -> Any:
    """An argument for one type of a schema; now and then one of another type."""
    if kind.endswith("?") or kind.startswith("Optional["):
        if dice.random() < 0.4:
            return None
        kind = kind.removesuffix("?").removeprefix("Optional[").removesuffix("]")
    if dice.random() < 0.03:
        return dice.choice([None, 3, "text", [], (1, 2), 2.5])
    if kind.startswith("List["):
        inner = kind[5:-1]
        return [hostile(inner, dice) for _ in range(dice.choice([0, 1, 2, 2, 3]))]
    if kind == "Tensor":
        return hostile_tensor(dice)
    if kind in ("int", "SymInt"):
        return dice.choice(NUMBERS + [0, 1, 1, 2])
    if kind in ("float", "number", "Scalar"):
        return dice.choice(FLOATS + [1, 2.0])
    if kind == "bool":
        return dice.random() < 0.5
    if kind == "str":
        return dice.choice(STRINGS)
    return None


def case(op: Any, number: int) -> tuple[list, dict]:
    dice = random.Random(f"{op} {number}")
    positional, named = [], {}
    for argument in op._schema.arguments:
        if argument.name in ("dtype", "layout", "device", "pin_memory", "memory_format", "generator"):
            continue
        if argument.has_default_value() and dice.random() < 0.5:
            if not argument.kwarg_only:
                break
            continue
        value = hostile(str(argument.type), dice)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def attempt(op: Any, number: int, plain: bool) -> None:
    args, kwargs = case(op, number)
    places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    lanes = [args[place] for place in places]

    def run(*values: torch.Tensor) -> Any:
        given = list(args)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        return op(*given, **kwargs)

    def total(*values: torch.Tensor) -> torch.Tensor:
        out = run(*values)
        return (out if isinstance(out, torch.Tensor) else out[0]).sum().real

    if plain:
        calls = [lambda: run(*[lane[0] for lane in lanes])]
    elif not lanes:
        calls = [lambda: vmap(run, axis_size=2, randomness="different")()]
    else:
        some = tuple(0 if (number + k) % 3 else None for k in range(len(lanes)))
        calls = [
            lambda: vmap(run, randomness="different")(*lanes),
            lambda: vmap(run, in_dims=some, randomness="same")(*[x if d == 0 else x[0] for x, d in zip(lanes, some)]),
            lambda: vmap(run, randomness="different")(*[lane[:0] for lane in lanes]),
            lambda: vmap(grad(total), randomness="different")(*lanes),
            lambda: vmap(lambda *x: jvp(run, x, x), randomness="different")(*lanes),
        ]
    for call in calls:
        try:
            call()
        except Exception:
            pass


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (6 * GIB, 6 * GIB))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start, stop, step, cases = map(int, sys.argv[1:5])
    ops = operations()
    for number in range(start, stop, step):
        print(number, ops[number // cases], flush=True)
        attempt(ops[number // cases], number % cases, "--plain" in sys.argv)


if __name__ == "__main__":
    main()
