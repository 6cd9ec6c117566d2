"""Whether an object is known to others than the one that keeps it alive here."""

from sys import getrefcount
from typing import Any
from weakref import ref


class _KnownOnce:
    """What one other object refers to."""


def _times_known(reference: Any) -> int:
    thing = reference()
    return 0 if thing is None else getrefcount(thing)


# (How many references the question itself makes differs between Pythons.)
_known_once = [_KnownOnce()]
_ONCE = _times_known(ref(_known_once[0]))


def known_to_others(reference: Any) -> bool:
    """Whether more than one object refers to what a weak reference does."""
    return _times_known(reference) > _ONCE
