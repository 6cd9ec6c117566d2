"""Python floats that torch takes of a tensor (`eps=t`), told from those that the function itself asks for.

Either asks `t.__float__()`, and only the first loses a derivative that the function may count on. Which it is, the call
that the frame is in says: it is looked up by the names it is written with.
"""

import dis
import functools
import sys
from types import BuiltinFunctionType, CodeType, FrameType, MethodDescriptorType
from typing import Any

from torch import Tensor

from lanewise._core.dual import derived
from lanewise.errors import at_user_line

_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_RESULTS = ("BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "CALL", "CALL_FUNCTION_EX", "CALL_KW")


def check_float(x: Tensor) -> None:
    """Raise where torch takes a tensor with a derivative for a float; called by its `__float__`.

    So does torch itself, outside, for a tensor that has a history.
    """
    if not derived(x):
        return
    frame = sys._getframe(2)
    path = _called(frame.f_code, frame.f_lasti)
    if path and _is_of_torch(_look_up(frame, path)):
        names = [name for name, value in frame.f_locals.items() if value is x]
        argument = f"argument '{names[0]}'" if names else "an argument"
        raise TypeError(
            at_user_line(
                f"{path[-1]}(): {argument} must be float, not Tensor: a tensor that has a derivative, which would "
                "be lost",
                "t.detach()  # or float(t), where it is meant to be a constant\n"
                "or write the formula with operations that take a tensor there",
            )
        )


@functools.lru_cache(1024)
def _called(code: CodeType, place: int) -> tuple[str, ...]:
    """The names of what is called at a place in code: `("torch", "logit")`, `("", "logit")` of a result, else ()."""
    before: list[dis.Instruction] = []
    for call in dis.get_instructions(code):
        if call.offset == place:
            break
        before.append(call)
    else:
        return ()
    where = getattr(call, "positions", None)  # Python 3.10 has none
    if where is None or not call.opname.startswith(("CALL", "PRECALL")):
        return ()
    path: tuple[str, ...] = ()
    for other in before:
        at = other.positions  # type: ignore[attr-defined]
        if (at.lineno, at.col_offset) != (where.lineno, where.col_offset):
            continue
        if other.opname in _NAMES:
            path = (other.argval,)
        elif other.opname in _ATTRIBUTES:
            path = (*(path or ("",)), other.argval)
        elif other.opname in _RESULTS:
            path = ()
    return path


def _look_up(frame: FrameType, path: tuple[str, ...]) -> Any:
    name, *attributes = path
    if not name:
        return getattr(Tensor, attributes[-1], None)
    for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if name in names:
            return functools.reduce(lambda value, attribute: getattr(value, attribute, None), attributes, names[name])
    return None


def _is_of_torch(function: Any) -> bool:
    """Whether it is a function or a method that torch implements in C++."""
    if type(function) is MethodDescriptorType:
        return issubclass(Tensor, function.__objclass__)
    if type(function) is not BuiltinFunctionType:
        return False
    return isinstance(function.__self__, Tensor) or (function.__module__ or "").split(".")[0] == "torch"
