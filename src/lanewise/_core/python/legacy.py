"""`Tensor.new` and `new_tensor`, which torch.distributions use still. torch's own make tensors of no plane."""

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


_torch_new_tensor: Any = Tensor.new_tensor


@functools.wraps(_torch_new_tensor, assigned=("__name__", "__qualname__"))
def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
    """As torch.tensor, but for the dtype and the device; lists may hold lane values."""
    if current_level() is None or not isinstance(data, (list, tuple)):
        return _torch_new_tensor(self, data, **options)
    for name in ("dtype", "device"):
        if options.get(name) is None:
            options[name] = getattr(self, name)
    return torch.tensor(data, **options)


Plane.new = new  # type: ignore[attr-defined]
Tensor.new = _new_plain  # type: ignore[method-assign]
Tensor.new_tensor = new_tensor  # type: ignore[method-assign]
