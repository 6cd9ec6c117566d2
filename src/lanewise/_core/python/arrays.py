"""NumPy arrays of tensors with lanes: each set of lanes that agree has one array, which cannot be written to.

A write would have to reach the tensor, whose lanes have no memory of their own. `torch.from_numpy` of such an array is
the tensor again, as it would be without lanes.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import route_name
from lanewise._core.plane import Plane, numbers_of

# The tensors that arrays were made of, by the id of the array, which is alive.
_tensors: dict[int, tuple[weakref.ref, Any]] = {}


def hand_out(array: Any, tensor: Any) -> Any:
    """A copy of an array, that of a tensor with lanes."""
    array = array.copy()
    array.flags.writeable = False
    key = id(array)
    _tensors[key] = weakref.ref(array, lambda _: _tensors.pop(key, None)), tensor
    return array


def tensor_behind(array: Any) -> Any:
    """The tensor that an array was made of, without history; anything else as it is."""
    found = _tensors.get(id(array))
    return array if found is None or found[0]() is not array else found[1].detach()


def in_memory_of(array: Any, made: Any) -> Any:
    """A tensor made inside, with a note of the array in whose memory it lies: no lanes can be written there."""
    if isinstance(made, Plane) and hasattr(array, "__array_interface__"):
        if made.numel() and numbers_of(made).data_ptr() == array.__array_interface__["data"][0]:
            made.array = weakref.ref(array)
    return made


_from_numpy = torch.from_numpy


@functools.wraps(_from_numpy)
def from_numpy(array: Any) -> Tensor:
    """`torch.from_numpy`"""
    found = tensor_behind(array)
    return found if isinstance(found, Tensor) and found is not array else in_memory_of(array, _from_numpy(array))


route_name("from_numpy", from_numpy)
