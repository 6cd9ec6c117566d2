"""`Tensor.new`, the oldest factory, which torch.distributions uses still. torch's own makes a tensor of no plane."""

import functools
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import current_level
from lanewise._core.plane import Plane


def new(self: Tensor, *args: Any, device: Any = None) -> Tensor:
    """A tensor of the same dtype: of a size that is not filled, from nested lists, or another tensor as it is."""
    if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
        data = args[0]
        return data.detach() if isinstance(data, Tensor) else self.new_tensor(data, device=device)
    size = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args or (0,)
    return self.new_empty(size, device=device)


_torch_new: Any = Tensor.new


@functools.wraps(_torch_new)
def _new_plain(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.new` of a plain tensor. Inside a transformed function the result belongs to it."""
    return (_torch_new if current_level() is None else new)(self, *args, **kwargs)


Plane.new = new  # type: ignore[attr-defined]
Tensor.new = _new_plain  # type: ignore[method-assign]
