"""Numbers and vectors of all lanes, as masked functions have them (masks.py), and matrices that all lanes share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from lanewise._rules.batch.choosing import by_equals
from lanewise._torch_compat import apply_plainly, forward_level

# Of all elements, torch has others for the gradients of these than along a dim.
_CHOOSING = ("amax", "amin")


class Declined(Exception):
    """Masks do not give what lanes would that part."""


class Narrow(Declined):
    """Vectors are made of numbers that are not `[B, 1]`."""


class Matrix:
    """A matrix that all lanes share, for products with vectors. Nothing else is done with it."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Vectors:
    """What masked functions do with numbers, vectors and matrices.

    Values are numbers of each lane `[B]`. Where some are vectors of each lane `[B, S]`, S > 1, numbers are `[B, 1]`, so
    that the ones go with the others as they do in a lane.

    Attributes:
        size: The number of lanes.
        wide: Whether there are vectors.
    """

    __slots__ = ("size", "wide")

    def __init__(self, size: int, wide: bool) -> None:
        self.size = size
        self.wide = wide

    def _entries(self, value: Tensor) -> int:
        """The number of entries of a vector, 1 for a number."""
        return value.shape[1] if value.dim() == 2 else 1

    def _is_number(self, value: Tensor) -> bool:
        return self._entries(value) == 1

    def _for_each(self, value: Tensor) -> Tensor:
        """A value that all lanes share, or not, for each of them."""
        if value.dim() == 1 + self.wide and value.shape[0] == self.size:
            return value
        return value.expand(self.size, self._entries(value)) if self.wide else value.expand(self.size)

    def reduced(self, name: str, value: Any) -> Tensor:
        """A method that makes a number of a vector."""
        if not isinstance(value, Tensor) or self._is_number(value):
            raise Declined
        out = getattr(value, name)(dim=1, keepdim=True)
        if name not in _CHOOSING or not value.requires_grad:
            return out
        if type(value) is Tensor and forward_level() < 0:
            return apply_plainly(_Chosen, value, out.detach())
        return by_equals(value, out.detach().squeeze(1)).unsqueeze(1)

    def dot(self, a: Any, b: Any) -> Tensor:
        """The product of two vectors."""
        if self._is_number(a) or self._entries(a) != self._entries(b) or a.dtype is not b.dtype:
            raise Declined
        if a.dtype is torch.bool:
            raise Declined
        if a.dtype.itemsize < 4:  # it is not to round each product
            row, column = self._for_each(a).unsqueeze(1), self._for_each(b).unsqueeze(2)
            return torch.bmm(row, column).squeeze(1)
        return (a * b).sum(1, keepdim=True)

    def product(self, a: Any, b: Any) -> Tensor:
        """The product of two vectors, or of a matrix and a vector."""
        if type(a) is Matrix:
            return self.linear(b, a, None)
        if type(b) is Matrix:
            return torch.mm(self._vector(a, b.value.shape[0], b.value.dtype), b.value)
        return self.dot(a, b)

    def linear(self, value: Any, weight: Any, bias: Any) -> Tensor:
        """`F.linear` of a vector."""
        if type(weight) is not Matrix:
            raise Declined
        rows, entries = weight.value.shape
        out = F.linear(self._vector(value, entries, weight.value.dtype), weight.value)
        return out if bias is None else out + self._vector(bias, rows, out.dtype)

    def turned(self, value: Any) -> Any:
        """`W.T`"""
        if type(value) is not Matrix:
            raise Declined
        return Matrix(value.value.T)

    def _vector(self, value: Any, entries: int, dtype: torch.dtype) -> Tensor:
        if not isinstance(value, Tensor) or self._entries(value) != entries or value.dtype is not dtype:
            raise Declined
        return value

    def entry(self, value: Any, place: int) -> Tensor:
        """An entry of a vector."""
        length = self.length(len, value)
        if type(place) is not int or not -length <= place < length:
            raise Declined
        return value.narrow(1, place % length, 1)

    def part(self, value: Any, start: Any, stop: Any) -> Tensor:
        """Several entries of a vector, next to each other."""
        start, stop, _ = slice(start, stop).indices(self.length(len, value))
        if stop - start < 2:
            raise Declined  # a vector of one entry is not a number
        return value.narrow(1, start, stop - start)

    def stack(self, *numbers: Any) -> Tensor:
        """`torch.stack`, a vector of numbers."""
        return self._joined(numbers, True)

    def cat(self, *vectors: Any) -> Tensor:
        """`torch.cat`, a vector of vectors."""
        return self._joined(vectors, False)

    def _joined(self, values: tuple, of_numbers: bool) -> Tensor:
        if not self.wide:
            raise Narrow
        for value in values:
            if not isinstance(value, Tensor) or self._is_number(value) is not of_numbers:
                raise Declined
            if value.dtype is not values[0].dtype:
                raise Declined
        if len(values) < 2:
            raise Declined
        return torch.cat([self._for_each(value) for value in values], 1)

    def entries(self, value: Any) -> list[Tensor]:
        """The entries of a vector."""
        return [self.entry(value, place) for place in range(self.length(len, value))]

    def length(self, _: Any, value: Any) -> int:
        """`len` of a vector."""
        if not isinstance(value, Tensor) or self._is_number(value):
            raise Declined
        return value.shape[1]


class _Chosen(Function):
    """`by_equals` in one operation, which takes a third of the time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, found: Tensor) -> Tensor:  # type: ignore[override]
        """value [B, S], found [B, 1] -> [B, 1]"""
        ctx.save_for_backward(value, found)
        return found.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:  # type: ignore[override]
        value, found = ctx.saved_tensors
        equal = (value == found) | (value != value)  # what is found is NaN if there is one
        return torch.where(equal, cotangent / equal.sum(1, keepdim=True), 0), None
