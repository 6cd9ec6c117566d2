"""How a value of a batch plane is known on the plane below: "lanes", "uniform", "plain"; "" where it is no tensor."""

from typing import Any

from torch import Tensor

from lanewise._core.batch import BatchLevel


def form_of(level: BatchLevel, value: Any) -> str:
    """The form of a value on the plane of `level`."""
    if not isinstance(value, Tensor):
        return ""
    if level.owns(value):
        return "lanes" if level.mapped(value) else "uniform"
    return "plain"


def give(level: BatchLevel, value: Any, form: str) -> Any:
    """A value of the plane below on the plane of `level`."""
    if value is None or form in ("", "plain"):
        return value
    return level.wrap(value) if form == "lanes" else level.adopt(value)


def take(level: BatchLevel, value: Any, form: str) -> Any:
    """A value of the plane of `level` on the plane below."""
    if not isinstance(value, Tensor):
        return value
    value = level.here(value)
    return level.below(level.expanded, value) if form == "lanes" and not level.mapped(value) else level.physical(value)
