"""Under `torch.compile`, which traces torch's own transforms only, a call goes to the one of the same name.

This is the one place that hands work to torch.func. Outside of compilation nothing but the question is asked.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from lanewise._core.batch import BatchTensor
from lanewise._core.level import leave_uncompiled
from lanewise._core.plane import Plane
from lanewise._torch_compat import never_compile, run_as_written
from lanewise.errors import TransformError, at_user_line


def _functions_of(owner: Any) -> Iterator[FunctionType]:
    """The functions of a module; of a class its methods and those behind its properties too."""
    for entry in list(vars(owner).values()):
        if isinstance(entry, FunctionType):
            yield entry
        elif isinstance(entry, (classmethod, staticmethod, property)):
            for part in ("__func__", "fget", "fset"):
                if isinstance(function := getattr(entry, part, None), FunctionType):
                    yield function


# A compiled function that meets tensors of a plane runs uncompiled: their handlers and methods are not for tracing.
for _plane in (Plane, BatchTensor):
    for _function in _functions_of(_plane):
        never_compile(_function)


def never_compile_packages(*names: str) -> None:
    """Keep the compiler from what is loaded of some packages, where a call inside a compiled function has led to it.

    Its branches on lane values and its numbers of lanes do, and options that torch lacks. What hands over to torch's
    transforms is left to it. It takes 4 us for each function.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(names) and name != __name__:
            kinds = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
            for function in itertools.chain(*map(_functions_of, (module, *kinds))):
                if function.__module__ == name and not _hands_over(function.__code__):
                    run_as_written(function.__code__)


def _hands_over(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return "traced" in (*code.co_names, *code.co_freevars) or any(map(_hands_over, inner))


_plain_compile = torch.compile


@functools.wraps(_plain_compile)
def _compile(*args: Any, **kwargs: Any) -> Any:
    out = _plain_compile(*args, **kwargs)
    leave_uncompiled()  # it has loaded the compiler, be it inside a transform
    return out


never_compile(_compile)
torch.compile = _compile

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


# What torch's vmap says of a value that would decide where a function goes on.
_DECIDING = ("data-dependent control flow", "calling .item() on a Tensor")


def explaining(func: Callable) -> Callable:
    """The function of a `vmap` under the compiler, whose lanes cannot take different ways: says so where they would."""

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, TransformError) or not any(phrase in str(error) for phrase in _DECIDING):
                raise
            raise TransformError(
                at_user_line(
                    "vmap: inside a function that torch.compile compiles, lanes cannot take different ways: it traces "
                    "torch's own vmap, which has no data-dependent control flow (`if`, `while` and .item() on lane "
                    "values, cond, switch, while_loop, error_if)",
                    "vmap(f)(xs)  # called outside of the compiled function; f itself may be compiled",
                )
            ) from error

    return called


def without_keywords(func: Callable, kwargs: dict[str, Any]) -> Callable:
    """`func` with its keyword arguments given, for transforms that take none."""
    return (lambda *args: func(*args, **kwargs)) if kwargs else func
