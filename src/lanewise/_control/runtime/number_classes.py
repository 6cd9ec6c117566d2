"""Classes that numbers with lanes have to do with: what they say they are, and what takes Python's own numbers only."""

import datetime
import decimal
from typing import Any

from lanewise._torch_compat import current_graph_task_id

# They take no other numbers as the second operand.
TAKE_PLAIN = (datetime.timedelta, decimal.Decimal)


class EscapedNumber:
    """What a number with lanes is once their `vmap` has ended. `json` names it, which goes by the class alone."""


def shown_class(number: Any) -> type:
    """The class of a number with lanes for those who ask for it."""
    level = getattr(number.value, "level", None)
    return number.kind if level is None or level.alive or current_graph_task_id() != -1 else EscapedNumber
