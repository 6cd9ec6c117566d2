"""Converted code: found, rewritten and compiled once for each code object, and made into functions."""

import dis
import inspect
import threading
import time
import types
from typing import Any

from lanewise._control.rewriting.builders import RUNTIME
from lanewise._control.rewriting.source import (
    PLACE,
    READ_AGAIN,
    Function,
    Unsupported,
    compile_definition,
    find_function,
    mangled,
    same_code,
)
from lanewise._control.rewriting.syntax import rewrite

_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# By code object: its converted form, or why there is none.
_converted: dict[types.CodeType, types.CodeType | Unsupported] = {}


class _Runtime:
    """What converted code calls: the module flow.py, once that has been imported, and a closure that holds it."""

    module: Any = None
    cells: Any = None


runtime = _Runtime()


class _Converting(threading.local):
    """How long this thread has worked to convert code."""

    seconds = 0.0


converting = _Converting()


def converted_code(func: types.FunctionType) -> types.CodeType | Unsupported:
    """The converted code of a function, or why there is none."""
    code = func.__code__
    found = _converted.get(code)
    if found is None:
        begun = time.thread_time()
        try:
            found = _convert(func)
        except Unsupported as reason:
            found = reason
        converting.seconds += time.thread_time() - begun
        _converted[code] = found
        if isinstance(found, types.CodeType):
            _converted[found] = found
    return found


def is_converted(code: types.CodeType) -> bool:
    """Whether code calls the runtime itself, as a function inside a converted one does."""
    return RUNTIME in code.co_freevars


def definition(func: types.FunctionType) -> Function:
    """The syntax of a function as it stands in its file.

    Raises:
        Unsupported: There is no source, or it is not that of the code.
    """
    code = func.__code__
    node = mangled(find_function(func), code, func.__qualname__)
    if not same_code(code, compile_definition(node, code)):
        raise Unsupported(
            "its source is not that of the code: the file has changed, or a tool has rewritten the code", READ_AGAIN
        )
    return node


def _convert(func: types.FunctionType) -> types.CodeType:
    code = func.__code__
    if is_converted(code):
        return code
    if code.co_flags & _NOT_PLAIN:
        raise _not_plain(code)
    node = definition(func)
    rewrite(node, frozenset(code.co_cellvars))
    new = compile_definition(node, code, (RUNTIME,))
    return _named(new, PLACE + new.co_name, getattr(code, "co_qualname", func.__qualname__)).replace(
        co_name=code.co_name
    )


def _named(code: types.CodeType, made: str, own: str) -> types.CodeType:
    """The code with its own full name, and with those of the functions and classes inside, which show them."""

    def name(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _named(value, made, own)
        return own + value[len(made) :] if isinstance(value, str) and value.startswith(made) else value

    names: dict[str, Any] = {"co_consts": tuple(map(name, code.co_consts))}
    if hasattr(code, "co_qualname"):
        names["co_qualname"] = name(code.co_qualname)  # type: ignore[attr-defined]
    return code.replace(**names)


def _not_plain(code: types.CodeType) -> Unsupported:
    if code.co_flags & inspect.CO_GENERATOR:
        what, instead = "it is a generator", "a list that the function returns, in place of what it yields"
    else:
        what, instead = "it is asynchronous", "def, in place of async def"
    return Unsupported(what, instead, _first_line_of(code, "YIELD_VALUE"))


def _first_line_of(code: types.CodeType, opname: str) -> int:
    """The line of the first instruction of a kind, 0 if there is none."""
    line = 0
    starts = dict(dis.findlinestarts(code))
    for step in dis.get_instructions(code):
        line = starts.get(step.offset) or line
        if step.opname == opname:
            return line
    return 0


# By converted code: where its cells are in the closure of the function, -1 for the runtime. None: that alone.
_plans: dict[types.CodeType, tuple[int, ...] | None] = {}


def instantiate(func: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    """A function that is `func` with converted code: its globals, closure, defaults and names."""
    if code is func.__code__ or is_converted(func.__code__):
        # (The code of a function inside a converted one may equal what that function alone was converted to.)
        return func
    plan = _plans.get(code, ())
    if plan == ():
        free = func.__code__.co_freevars
        plan = tuple([-1 if name == RUNTIME else free.index(name) for name in code.co_freevars]) or None
        _plans[code] = plan = None if plan == (-1,) else plan
        if runtime.cells is None:
            runtime.cells = (types.CellType(runtime.module),)
    cells: Any = runtime.cells
    if plan is not None:
        own: Any = func.__closure__
        cells = tuple([cells[0] if place < 0 else own[place] for place in plan])
    elif not code.co_freevars:
        cells = None
    new = types.FunctionType(code, func.__globals__, func.__name__, func.__defaults__, cells)
    defaults = func.__kwdefaults__
    if defaults:
        new.__kwdefaults__ = defaults
    return new
