"""`Tensor.data` where it is set: of wrappers, and of plain tensors, which cannot share the memory of a wrapper."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.around import note_data_set
from lanewise._core.dual import DualLevel, DualTensor
from lanewise._core.level import note_autograd, standing
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.plane import Plane, sync, tracked
from lanewise.errors import CapturedWriteError, at_user_line

torch_data: Any = Tensor.data


def _set_plain_data(self: Tensor, new: Any) -> None:
    """`data` of a plain tensor, which cannot share the memory of a wrapper: it has none, and kernels would read it."""
    if isinstance(self, Plane):
        torch_data.__set__(self, new)
        return
    if standing.levels:
        note_data_set(self)
    torch_data.__set__(self, from_around(self, new))


def from_around(tensor: Any, new: Any) -> Any:
    """`new`, to become the data of a tensor, without the planes that this does not lie on."""
    order = tensor.level.order if isinstance(tensor, Plane) else 0
    while isinstance(new, Plane) and new.level.order > order:
        sync(new)
        if new.level.lifted(new):
            if isinstance(tensor, Plane):
                new.level.check_write_outside(tensor.level, pairs=True)
            raise CapturedWriteError(
                at_user_line(
                    f"{new.level!r}: inplace arithmetic(self, *extra_args) is not possible because there exists a "
                    "Tensor `other` in extra_args that has more elements than `self`: a value of this level "
                    f"{list(new.shape)} would become the data of a tensor {list(tensor.shape)} made outside the "
                    "function",
                    "functional_call(module, {'weight': weight}, x)  # in place of module.weight.data = weight",
                )
            )
        new = new.value
    return new


Tensor.data = property(  # type: ignore[assignment]
    torch_data.__get__, _set_plain_data, torch_data.__delete__, torch_data.__doc__
)


def set_data(wrapper: Any, own: Any) -> None:
    """`wrapper.data = own`, of the same level. Its history, on the planes below too, stays, and so does its tangent."""
    level: Any = wrapper.level
    note_autograd()  # what has kept a leaf for its backward pass finds the new data in it
    note_data_set(wrapper)
    torch_data.__set__(wrapper, own)
    new: Any = own.data
    if not level.lifted(wrapper):
        before = level.alias(wrapper)
        before.origin = wrapper.origin
        wrapper.replaced = [*getattr(wrapper, "replaced", ()), before]  # its views stay views of that
    same_shape: bool = wrapper.shape == new.shape
    if isinstance(level, DualLevel):
        sync(wrapper)
        if wrapper.tangent is not None and same_shape:
            new = level.wrap(new.value, wrapper.tangent)
        old = wrapper.value
    else:
        here = level.here(wrapper) if isinstance(level, LaneLevel) else wrapper
        if level.mapped(new) and not level.mapped(here):
            old = level.below(level.expanded, here)
        else:
            old = here.value
            if level.mapped(here) and not level.mapped(new) and _has_derivatives(old):
                new = level.wrap(level.below(level.expanded, new))
    if same_shape and _has_derivatives(old):
        new.value = level.below(_with_data, old, new.value)
    level.copy_slots(wrapper, new)


def _has_derivatives(value: Any) -> bool:
    """Whether a value has a history or a tangent on its plane or on one below."""
    if tracked(value):
        return True
    while isinstance(value, Plane):
        if isinstance(value, DualTensor) and value.tangent is not None:
            return True
        value = value.value
    return False


def _with_data(old: Tensor, new: Tensor) -> Tensor:
    with torch.enable_grad():
        kept = old.clone()
    kept.data = new
    return kept
