"""Functions whose lanes may part, converted: the way in for transforms."""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from lanewise._control.rewriting.compiling import converted_code
from lanewise._control.rewriting.source import Unsupported
from lanewise._control.runtime import flow, library_numbers, several  # noqa: F401  (what converted code calls)
from lanewise._control.runtime.callees import call_apart, callee
from lanewise._core.again.libraries import is_library


def converted(func: Callable) -> Callable | None:
    """A function like `func` that lets lanes part while `machine.level` is set; None if there is none."""
    out = callee(func)
    if out is func and not isinstance(func, types.FunctionType):
        return None
    return None if isinstance(out, functools.partial) and out.func is call_apart else out


def why_not(func: Any) -> str:
    """Why a function has no converted form, as the end of a sentence; empty if it has one."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, nn.Module):
        func = func.forward
    func = getattr(func, "__func__", func)
    if not isinstance(func, types.FunctionType):
        return f"it is of type {type(func).__name__}, not a Python function"
    if is_library(func):
        return ""
    code = converted_code(func)
    return str(code) if isinstance(code, Unsupported) else ""
