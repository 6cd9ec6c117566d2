"""`Tensor.data` of plain tensors, which cannot share the memory of a wrapper."""

from typing import Any

from torch import Tensor

from lanewise._core.plane import Plane, sync
from lanewise.errors import CapturedWriteError, at_user_line

torch_data: Any = Tensor.data


def _set_plain_data(self: Tensor, new: Any) -> None:
    """`data` of a plain tensor, which cannot share the memory of a wrapper: it has none, and kernels would read it."""
    while isinstance(new, Plane) and not isinstance(self, Plane):
        sync(new)
        if new.level.lifted(new):
            raise CapturedWriteError(
                at_user_line(
                    f"{new.level!r}: inplace arithmetic(self, *extra_args) is not possible because there exists a "
                    "Tensor `other` in extra_args that has more elements than `self`: a value of this level "
                    f"{list(new.shape)} would become the data of a tensor {list(self.shape)} made outside the function",
                    "functional_call(module, {'weight': weight}, x)  # in place of module.weight.data = weight",
                )
            )
        new = new.value
    torch_data.__set__(self, new)


Tensor.data = property(  # type: ignore[assignment]
    torch_data.__get__, _set_plain_data, torch_data.__delete__, torch_data.__doc__
)
