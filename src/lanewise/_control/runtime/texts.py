"""What becomes of the text of a tensor: shown, so that one may tell of all lanes, or used, so that each has its own.

A `print` should not send the lanes different ways; `table[f"{x:.1f}"]` must. The statement that asks for a text says
which it is: the instruction that runs has a place in the source (from Python 3.11), and there the text is, say, an
argument of `print`, or part of an error that is raised.
"""

import ast
import builtins
import io
import itertools
import linecache
import logging
import sys
import types
from typing import Any

from lanewise._control.rewriting.source import parsed
from lanewise._core.again.libraries import LIBRARIES
from lanewise._core.python.surface import asking

# Packages that look at values for the person who runs the program.
_LOOKING = frozenset(
    {"IPython", "_pydevd_bundle", "_pytest", "debugpy", "icecream", "ipdb", "pluggy", "pudb", "pydevd", "rich"}
    | {"bdb", "cmd", "code", "doctest", "lanewise", "pdb", "traceback", "tqdm", "unittest", "warnings"}
)
# Modules whose functions show what they are given; of `pprint` and the like, those that return nothing.
_SHOWING = frozenset({"icecream", "loguru", "rich", "tqdm", "traceback", "warnings"})
_LOGGING = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"})
_SHOWING_NAMES = frozenset({"print", "pprint", "pp", "warn"})
# Methods that make a text of itself a part of another.
_TEXTUAL = frozenset(dir(str)) - {"encode", "count", "find", "index", "rfind", "rindex", "startswith", "endswith"}
_MAKING = frozenset({str, repr, format, ascii, list, tuple, sorted, reversed, map})
# Modules that call functions in the place of converted code.
_CALLING = frozenset(
    {
        "lanewise._control.runs.boundary",
        "lanewise._control.runtime.callees",
        "lanewise._control.runtime.changes",
        "lanewise._control.runtime.choices",
        "lanewise._control.runtime.chosen",
        "lanewise._control.runtime.lists",
        "lanewise._control.runtime.replacements",
        "lanewise._control.runtime.tensor_calls",
    }
)
# Packages that make the text of a record, a part of another text.
_DESCRIBING = frozenset({"collections", "dataclasses", "reprlib"})
_SPECIAL = frozenset({"__str__", "__repr__", "__format__"})
# Expressions that hold texts, or make one of them, wherever they stand.
_PARTS = (ast.JoinedStr, ast.FormattedValue, ast.Starred, ast.keyword, ast.Tuple, ast.List)
_SHOWN, _USED, _RETURNED = "shown", "used", "returned"

Span = tuple[int, int, int, int]


class _Source:
    """The tree of one file: its expressions and statements by their place, and what each is a part of."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.by_span: dict[Span, ast.AST] = {}
        self.around: dict[ast.AST, ast.AST] = {}
        self.statements: list[ast.stmt] = []
        try:
            tree = parsed("".join(lines))
        except (SyntaxError, ValueError):
            return
        for node in ast.walk(tree):
            for part in ast.iter_child_nodes(node):
                self.around[part] = node
            if isinstance(node, ast.stmt):
                self.statements.append(node)
            elif isinstance(node, ast.expr):
                # From the outside in: of two at the same place, the inner one stays.
                self.by_span[_span(node)] = node

    def at(self, frame: types.FrameType) -> ast.AST | None:
        """What a frame is at: an expression, or where only the line is known the innermost statement of it."""
        code = frame.f_code
        if hasattr(code, "co_positions"):
            places: Any = code.co_positions()  # type: ignore[attr-defined]
            line, last, column, end = next(itertools.islice(places, frame.f_lasti // 2, None))
            if None in (line, last, column, end):
                return None
            found = self.by_span.get((line, column, last, end))
            return found or self._call_ending((line, column, last, end))
        return self.on_line(frame.f_lineno)

    def on_line(self, line: int) -> ast.AST | None:
        """The innermost statement that a line is part of."""
        found = [one for one in self.statements if one.lineno <= line <= (one.end_lineno or one.lineno)]
        inner = max(found, key=lambda one: one.lineno, default=None)
        return inner.value if isinstance(inner, ast.Expr) else inner

    def _call_ending(self, span: Span) -> ast.AST | None:
        """The innermost call around a place that ends where it does: that of a method may begin at its name."""
        around = [
            (begin, node)
            for begin, node in self.by_span.items()
            if isinstance(node, ast.Call) and begin[2:] == span[2:] and begin[:2] <= span[:2]
        ]
        return max(around, key=lambda entry: entry[0][:2])[1] if around else None


def _span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


_sources: dict[str, _Source] = {}


def _source_of(frame: types.FrameType, lines: list[str]) -> _Source:
    name = frame.f_code.co_filename
    known = _sources.get(name)
    if known is None or known.lines is not lines:
        known = _sources[name] = _Source(lines)
    return known


def is_used(frame: types.FrameType | None) -> bool:
    """Whether the text that a frame asks for is used, not shown."""
    inside = False  # code of a library has asked for it
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        lines = linecache.getlines(code.co_filename, frame.f_globals)
        generated = not lines and code.co_name in _SPECIAL
        if generated or package in _DESCRIBING or module in _CALLING:
            frame = frame.f_back
            continue
        if package in _LOOKING:
            return False
        if package == "logging" and code.co_name == "emit":
            return _logged(frame.f_locals.get("self"))
        library = package in LIBRARIES
        if not lines and not library:
            return _SHOWING_NAMES.isdisjoint(code.co_names)
        source = _source_of(frame, lines)
        node = source.at(frame)
        if library:
            if node is not None and _fate(source, node, frame, inside) is _SHOWN:
                return False
            inside, frame = True, frame.f_back
            continue
        fate = _USED if node is None else _fate(source, node, frame, inside)
        if fate is not _RETURNED or code.co_name not in _SPECIAL:
            return fate is not _SHOWN
        frame = frame.f_back  # the text of an object is used where that is asked for
    return False


def _fate(source: _Source, node: ast.AST, frame: types.FrameType, inside: bool) -> str:
    """What the statement around does with a text, or with what it is made a part of.

    `inside`: a library has asked for it, called at `node`.
    """
    if isinstance(node, ast.Call):
        if _shows(node, frame):
            return _SHOWN
        dropped = isinstance(source.around[node], ast.Expr)
        if (dropped or not inside) and not _makes_text(node, frame):
            return _USED  # by what is called
    while not isinstance(node, ast.stmt):
        part, node = node, source.around[node]
        if isinstance(node, ast.Call):
            if _shows(node, frame):
                return _SHOWN
            if isinstance(source.around[node], ast.Raise):
                return _raised(source, node, frame)
            if part is node.func or not _makes_text(node, frame):
                return _USED
        elif isinstance(node, ast.Attribute):
            call = source.around[node]
            if node.attr not in _TEXTUAL or not isinstance(call, ast.Call) or call.func is not node:
                return _USED
            node = call
        elif isinstance(node, ast.BinOp):
            if not isinstance(node.op, (ast.Add, ast.Mod, ast.Mult)):
                return _USED
        elif isinstance(node, (ast.IfExp, ast.Assert)):
            if part is node.test:
                return _USED
        elif isinstance(node, ast.Subscript):
            if part is not node.value:
                return _USED
        elif isinstance(node, ast.Dict):
            if part not in node.values:
                return _USED
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            if part is not node.elt:
                return _USED
        elif not isinstance(node, (*_PARTS, ast.stmt)):
            return _USED
    if isinstance(node, ast.Return):
        return _RETURNED
    if isinstance(node, (ast.Raise, ast.Assert)):
        return _raised(source, node, frame)
    return _SHOWN if isinstance(node, ast.Expr) else _USED


def _raised(source: _Source, node: ast.AST, frame: types.FrameType) -> str:
    """The fate of the text of an error: used where code of the function catches the error under a name."""
    while not _catches(source, node):
        below: Any = frame.f_back
        while below is not None and (
            str(below.f_globals.get("__name__")) in _CALLING or not linecache.getlines(below.f_code.co_filename)
        ):
            below = below.f_back
        if below is None or str(below.f_globals.get("__name__")).partition(".")[0] in LIBRARIES | _LOOKING:
            return _SHOWN  # it leaves the mapped function, or goes to code that does not look at its text
        frame = below
        source = _source_of(frame, linecache.getlines(frame.f_code.co_filename, frame.f_globals))
        found = source.at(frame)
        if found is None:
            return _USED
        node = found
    return _USED


def _catches(source: _Source, node: ast.AST) -> bool:
    """Whether a `try` around, in the same function, catches errors under a name."""
    while node in source.around:
        part, node = node, source.around[node]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(node, ast.Try) and part in node.body and any(handler.name for handler in node.handlers):
            return True
    return False


def _shows(call: ast.Call, frame: types.FrameType) -> bool:
    """Whether a call shows its arguments."""
    func = _value_of(call.func, frame)
    if func is None:
        return False
    name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    package = str(getattr(func, "__module__", "")).partition(".")[0]
    if package == "logging":
        return name in _LOGGING and not _kept_by(owner if isinstance(owner, logging.Logger) else logging.getLogger())
    if name in ("write", "writelines"):
        return not _is_file(owner)
    if package == "pprint" and owner is not None:
        return name == "pprint" and not _is_file(getattr(owner, "_stream", None))
    if func is builtins.print or package in _SHOWING or (package in ("pprint", "_warnings") and name in _SHOWING_NAMES):
        return not _goes_to_a_file(call, frame)
    return False


def _goes_to_a_file(call: ast.Call, frame: types.FrameType) -> bool:
    """Whether `print`, or its like, writes to what may be read again."""
    for entry in call.keywords:
        if entry.arg in ("file", "stream"):
            stream = _value_of(entry.value, frame)
        elif entry.arg is None:
            options = _value_of(entry.value, frame)
            stream = options.get("file") if isinstance(options, dict) else None
            if stream is None:
                continue
        else:
            continue
        if stream is None and not (isinstance(entry.value, ast.Constant) and entry.value.value is None):
            return True  # what it is cannot be told
        if stream is not None:
            return _is_file(stream)
    return _keeps(sys.stdout)


def _is_file(stream: Any) -> bool:
    """Whether a stream is none of those that show what is written, or keeps it."""
    shown = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return not any(stream is one for one in shown) or _keeps(stream)


def _keeps(stream: Any) -> bool:
    """Whether a stream in the place of the terminal holds what is written for the program to read."""
    if type(stream) is io.TextIOWrapper:
        return stream.name not in ("<stdout>", "<stderr>")
    return type(stream) is io.StringIO


def _logged(handler: Any) -> bool:
    """Whether a handler of log records writes them to what may be read again."""
    package = type(handler).__module__.partition(".")[0]
    return package not in _LOOKING and _keeps(getattr(handler, "stream", None))


def _kept_by(logger: Any) -> bool:
    """Whether any handler of a logger does."""
    while logger is not None:
        if any(map(_logged, logger.handlers)):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _makes_text(call: ast.Call, frame: types.FrameType) -> bool:
    """Whether what a call gives is made of the texts in its arguments."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in ("join", "format") and isinstance(call.func.value, (ast.Constant, ast.JoinedStr))
    func = _value_of(call.func, frame)
    return isinstance(func, (type, types.BuiltinFunctionType)) and func in _MAKING


def _value_of(node: ast.expr, frame: types.FrameType) -> Any:
    """What a name, or an attribute of one, stands for; None where that is not known."""
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        return None if owner is None else getattr(owner, node.attr, None)
    if not isinstance(node, ast.Name):
        return None
    code = frame.f_code
    if node.id in code.co_varnames or node.id in code.co_cellvars or node.id in code.co_freevars:
        variables: Any = frame.f_locals
        value = variables.get(node.id)
        if type(variables) is dict:
            variables.clear()  # before Python 3.13 the frame keeps the dict, and what is in it
        return value
    return frame.f_globals.get(node.id, getattr(builtins, node.id, None))


asking.is_used = is_used
