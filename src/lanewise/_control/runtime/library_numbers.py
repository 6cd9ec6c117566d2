"""Functions of libraries that take nothing but Python's own numbers, called with such as differ from lane to lane."""

import datetime
import decimal
import functools
import json
import marshal
import pickle
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

from lanewise._control.runtime.callees import replaced
from lanewise._control.runtime.changes import watched
from lanewise._control.runtime.number_classes import Several
from lanewise._control.runtime.numbers import LaneNumber


def _plain(thing: Any) -> Any:
    """`one_number`, also of what is in a dict. (Elsewhere, one may hold numbers with lanes.)"""
    kind = type(thing)
    if kind is LaneNumber or issubclass(kind, Several):
        return thing.resolve()
    if kind is list or kind is tuple:
        return kind([_plain(entry) for entry in thing])
    if kind is dict:
        return {_plain(key): _plain(value) for key, value in thing.items()}
    return thing


def _with_plain(function: Callable) -> Callable:
    @functools.wraps(function)
    def stand_in(*args: Any, default: Callable | None = None, **kwargs: Any) -> Any:
        if default is not None:
            kwargs["default"] = lambda thing: _plain(default(thing))
        return watched(function, None, *_plain(args), **_plain(kwargs))

    return stand_in


_TAKE_PLAIN: list[Any] = [json.dump, json.dumps, pickle.dump, pickle.dumps, marshal.dumps]
_TAKE_PLAIN += [decimal.Decimal, datetime.timedelta, datetime.date.fromtimestamp, datetime.datetime.fromtimestamp]
# These go by the type of a number, not by `isinstance`.
_TAKE_PLAIN += [
    statistics.variance,
    statistics.pvariance,
    statistics.stdev,
    statistics.pstdev,
    statistics.harmonic_mean,
]
_TAKE_PLAIN += [each for each in vars(time).values() if isinstance(each, types.BuiltinFunctionType)]
for _function in _TAKE_PLAIN:
    replaced.setdefault(_function, _with_plain(_function))  # (some stand-ins know more)
