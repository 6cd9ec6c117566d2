"""Which of Python's numbers a tensor holds."""

import math
from typing import Any

import torch

from lanewise._control.runtime.numbers import LaneNumber, largest


def holds(dtype: torch.dtype, number: Any) -> bool:
    """Whether a tensor holds a number of Python's: an int as it is, a float but for the rounding of float32."""
    if type(number) is LaneNumber:
        if number.kind is not int:
            return dtype.itemsize > 2 or not dtype.is_floating_point
        number = largest(number) if dtype.is_signed else -1
    if dtype is torch.bool or type(number) is complex:
        return True
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        return limits.min <= number <= limits.max
    if number == 0 or number != number or abs(number) == math.inf:
        return True
    rounding = torch.finfo(dtype)
    if not rounding.smallest_normal <= abs(number) <= rounding.max:
        return False
    if type(number) is float and rounding.bits > 16:
        return True
    digits = math.frexp(number)[0] * 2 / rounding.eps
    return digits.is_integer() and float(number) == number
