"""Classes that numbers with lanes have to do with: what they say they are, and what takes Python's own numbers only."""

import datetime
import decimal
from collections.abc import Callable
from typing import Any

from lanewise._torch_compat import current_graph_task_id

# They take no other numbers as the second operand.
TAKE_PLAIN = (datetime.timedelta, decimal.Decimal)


class Several:
    """What holds numbers, or numbers and tensors, of several kinds, each for some lanes (merging.py)."""

    __slots__ = ()

    # How functions of torch are called with such values, and others; and `isinstance` (several.py).
    call: Callable[[Callable, tuple, dict], Any]
    each_kind: Callable[..., Any]
    isinstance: Callable[[Any], Any]

    def resolve(self) -> Any:
        """The value of the lanes that go on."""
        raise NotImplementedError

    def settled(self, level: Any) -> Any:
        """A tensor that stands for numbers, too, or the value of the lanes that go on."""
        raise NotImplementedError


class EscapedNumber:
    """What a number with lanes is once their `vmap` has ended. `json` names it, which goes by the class alone."""


def shown_class(number: Any) -> type:
    """The class of a number with lanes for those who ask for it."""
    level = getattr(number.value, "level", None)
    return number.kind if level is None or level.alive or current_graph_task_id() != -1 else EscapedNumber
