"""What makes tensors in the ways of old: `Tensor.new`, `new_tensor`, `torch.FloatTensor`, `torch.LongTensor`.

torch's own make tensors of no plane, and read each entry of a list as a Python number.
"""

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import current_level, route_name
from lanewise._core.plane import Plane
from lanewise._core.python.factories import joined, leaves_of
from lanewise.errors import at_user_line, user_line


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


def _length(self: Plane) -> int:
    """`len(x)`, which `torch.Tensor` and the like ask of the entries of a list, too."""
    if self.dim():
        return self.shape[0]
    if "Tensor(" not in user_line():
        raise TypeError("len() of a 0-d tensor")
    raise TypeError(
        at_user_line(
            "len() of a 0-d tensor: torch.Tensor and torch.DoubleTensor, unlike torch.tensor, read each entry of a "
            "list as one Python number, which a value of this transform is not",
            "torch.tensor([x[0], x[1]], dtype=torch.float32)  # in place of torch.Tensor([x[0], x[1]])",
        )
    )


Plane.__len__ = _length  # type: ignore[method-assign]


class _Typed(type):
    """What stands for `torch.FloatTensor` while a level is open: a class that is equal to it."""

    plain: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        data = args[0] if len(args) == 1 else None
        if current_level() is None:
            return cls.plain(*args, **kwargs)
        if isinstance(data, (list, tuple)) and any(isinstance(leaf, Plane) for leaf in leaves_of(data)):
            return joined(data, cls.plain.dtype, "cpu")
        # Sizes may be numbers that differ from lane to lane.
        return cls.plain(*[operator.index(arg) if isinstance(arg, int) else arg for arg in args], **kwargs)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __eq__(cls, other: Any) -> bool:
        return cls.plain is (other.plain if type(other) is _Typed else other)

    def __hash__(cls) -> int:
        return hash(cls.plain)

    def __repr__(cls) -> str:
        return repr(cls.plain)


# (Each name takes 0.1 us more when a level opens.)
for _name in ("FloatTensor", "LongTensor"):
    # By its name `Tensor.type` knows such a class.
    route_name(_name, _Typed(f"torch.{_name}", (), {"plain": getattr(torch, _name)}))
