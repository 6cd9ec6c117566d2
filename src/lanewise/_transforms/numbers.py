"""Python numbers that a mapped function returns: those of each lane, once values of lanes were asked for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import on_plane
from lanewise.errors import LaneValueError, at_user_line

try:
    import numpy
except ImportError:  # torch does without it, and so do we
    numpy = None

NUMBERS: tuple[type, ...] = (bool, int, float, complex)
if numpy is not None:
    NUMBERS += (numpy.number, numpy.bool_)


def number_as_tensor(level: BatchLevel, number: Any, where: Callable[[], str]) -> Tensor:
    """A number that is the same in all lanes `[B]`, as stacking it for each would make it. On the plane below.

    `where`: which result it is, for messages.
    """
    if isinstance(number, int) and not fits(number):
        raise too_large(where(), number)
    with on_plane(None):
        plain = torch.tensor(number)
    return level.below(plain.repeat, level.own_size)


def same_number(a: Any, b: Any) -> bool:
    """Whether two of Python's numbers cannot be told apart: zeros of two signs can, and one NaN from another cannot."""
    return a is b or (type(a) is type(b) and repr(a) == repr(b))


def fits(number: int) -> bool:
    """Whether int64 holds a number."""
    return -(2**63) <= number < 2**63


def too_large(where: str, number: int) -> LaneValueError:
    """The error for an int that no tensor holds."""
    shown = str(number) if abs(number) < 10**40 else f"an int of {number.bit_length()} bits"
    return LaneValueError(
        at_user_line(
            f"vmap: {where}: {shown} does not fit into a tensor: Overflow when unpacking long long: the ints of lanes "
            "become one of int64",
            'vmap(f, out_dims="list")(xs)  # a list of Python\'s own ints, one for each lane\n'
            "return float(n)  # rounded",
        )
    )
