"""What an operation that failed on lanes says of one of them: the error of a loop, whose shapes are the user's."""

from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.random import is_random
from lanewise._core.plane import argument, map_tensors, tensors_of, written_arguments, written_statistics
from lanewise.errors import LanewiseError, note_at_user_line

# What kernels raise for operands that they do not take. (Others come from hooks of the user's that a kernel calls.)
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError)

# In no more lanes than these is it looked for the one that fails.
_MANY = 1024


def failure_in_one_lane(level: Any, error: Exception, func: Any, args: tuple, kwargs: dict) -> Exception:
    """The error to raise for `error`, which an operation on lanes of `level` has raised.

    It is that of the first lane in which the operation fails alone, if there is one.
    """
    if not isinstance(error, FAILURES) or isinstance(error, LanewiseError):
        return error  # from code that a kernel calls, such as a checkpoint that has seen enough; or from a rule
    if func.namespace not in ("aten", "prims") or _lacks_memory(error):
        return error
    found, lane = (error, 0) if is_random(func) else _first_failure(level, error, func, args, kwargs)
    if not isinstance(found, LanewiseError):
        where = ""
        if lane and level.own_size == level.size:
            found.lanes = [level.place[1] + lane]  # type: ignore[attr-defined]
            where = f" (lane {level.place[1] + lane})"
        note_at_user_line(found, f"{func}{where}, with the shapes of one example: {_told(func, args, kwargs)}")
    return found


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _first_failure(level: Any, error: Exception, func: Any, args: tuple, kwargs: dict) -> tuple[Exception, int]:
    try:
        with torch.no_grad():
            here = [map_tensors(level.here, value) for value in (*args, *kwargs.values())]
            for lane in range(min(level.size, _MANY) if level.size else 1):
                try:
                    level.below(_run, level, lane, func, args, kwargs, here)
                except Exception as alone:
                    return alone, lane
    except Exception:
        pass  # the operands are not to be had for the lanes that run
    return error, 0


def _run(level: Any, lane: int, func: Any, args: tuple, kwargs: dict, here: list) -> None:
    """The operation on one lane of its operands, which are `here`; called in the plane below."""
    written: list[Tensor] = written_statistics(func, args, kwargs)
    for position, name in written_arguments(func):
        map_tensors(written.append, argument(args, kwargs, position, name))

    def taken(given: Any, tensor: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [taken(*pair) for pair in zip(given, tensor, strict=True)]
        if not isinstance(given, Tensor):
            return given
        if not level.mapped(tensor):
            value = level.physical(tensor)
        else:
            value = tensor.value.select(0, lane) if level.size else tensor.value.new_zeros(tensor.shape)
        return value.clone() if any(given is each for each in written) else value

    values = [taken(*pair) for pair in zip((*args, *kwargs.values()), here, strict=True)]
    func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))


def _told(func: Any, args: tuple, kwargs: dict) -> str:
    """The arguments by name, tensors by shape and dtype as the mapped function sees them."""
    names = [arg.name for arg in func._schema.arguments]
    given = [*zip(names, args), *kwargs.items()]
    return ", ".join(
        f"{name} {_shape(value)}" if tensors_of((value,), {}) else f"{name}={value!r}" for name, value in given
    )


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return f"[{', '.join('None' if item is None else _shape(item) for item in value)}]"
