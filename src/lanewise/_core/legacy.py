"""`Tensor.new`, the oldest factory, which torch.distributions uses still. torch's own makes a tensor of no plane."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.plane import Plane


def new(self: Tensor, *args: Any, device: Any = None) -> Tensor:
    """A tensor of the same dtype: of a size that is not filled, from nested lists, or another tensor as it is."""
    if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
        data = args[0]
        return data.detach() if isinstance(data, Tensor) else self.new_tensor(data, device=device)
    size = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args or (0,)
    return self.new_empty(size, device=device)


Plane.new = new  # type: ignore[attr-defined]
