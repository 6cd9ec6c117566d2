"""Python numbers of each lane that a custom Function is given, or keeps on `ctx`: their values go as a tensor."""

from typing import Any, NamedTuple

from lanewise._core.level import on_plane
from lanewise._core.plane import Plane

# The classes of such numbers: made of a `kind`, one of Python's types, and a `value`, a tensor `[]`.
number_classes: set[type] = set()
# Those of what is of one kind in some lanes and of another in others; `resolve()` gives that of the lanes that go on.
mixed_classes: set[type] = set()


class Number(NamedTuple):
    """What a number is besides its values."""

    cls: Any
    kind: type

    def of(self, value: Any) -> Any:
        """The number on the plane of its values; the values themselves where lanes are an ordinary dim of theirs."""
        if value.dim():
            return value
        number = self.cls(self.kind, value)
        if isinstance(number.value, Plane):
            return number
        with on_plane(None):
            return self.kind(number.value.item())


def as_number(value: Any) -> Number | None:
    """What a number of each lane is besides its values; None for anything else."""
    return Number(type(value), value.kind) if type(value) in number_classes else None
