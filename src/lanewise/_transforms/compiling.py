"""Under `torch.compile`, which traces torch's own transforms only, a call goes to the one of the same name.

This is the one place that hands work to torch.func. Outside of compilation nothing but the question is asked.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from lanewise._core.batch import BatchTensor
from lanewise._core.plane import Plane
from lanewise._torch_compat import never_compile
from lanewise.errors import TransformError

# A compiled function that meets tensors of a plane runs uncompiled: their handlers and methods are not for tracing.
for _plane in (Plane, BatchTensor):
    for _entry in vars(_plane).values():
        for _part in ("__func__", "fget", "fset"):
            _function = getattr(_entry, _part, _entry)
            if isinstance(_function, FunctionType):
                never_compile(_function)

# Whether this code is being traced by `torch.compile`; the compiler takes the answer for a constant.
is_compiling = torch.compiler.is_compiling


def traced(name: str, *args: Any, **options: Any) -> Any:
    """Call torch's transform of that name. Options that only this library has must stand at their defaults."""
    passed = {}
    for option, value in options.items():
        if option in ("memory_budget", "axis_size", "progress") or (option, name) == ("chunk_size", "jacfwd"):
            if value:
                raise TransformError(f"{name}: {option}= does not work under torch.compile; leave it out there")
        elif value == "auto":
            raise TransformError(f'{name}: {option}="auto" does not work under torch.compile; give a number there')
        else:
            passed[option] = value
    if torch.compiler.is_compiling():
        return getattr(torch.func, name)(*args, **passed)
    raise AssertionError("called outside of torch.compile")


def without_keywords(func: Callable, kwargs: dict[str, Any]) -> Callable:
    """`func` with its keyword arguments given, for transforms that take none."""
    return (lambda *args: func(*args, **kwargs)) if kwargs else func
