"""What a warning says of lanes that part in code that runs as it was written: where, why, and what to write instead."""

import linecache
import types
from typing import NamedTuple

from lanewise._control.rewriting.compiling import converted_code, is_converted
from lanewise._control.rewriting.source import Unsupported
from lanewise._core.again.libraries import of_library
from lanewise._core.parting.causes import Cause
from lanewise.errors import SlowPathWarning, Step, warn_at_user_line

_BRANCH = "torch.where(x > 0, a, b)  # in place of a branch that does little"
_TENSORS = (
    "operations on tensors where Python's own numbers decide: torch.where(x > 0, a, b) for an `if`, rows[k] for "
    "table[int(k)], and x[x > 0].sum(), or sum(v for v in values if v > 0), for a list of what is picked"
)
_ARRAY = "functions of torch in place of NumPy's: torch.cumsum(x, 0) for np.cumsum(x.numpy())"
_TEXT = "the number as a result of the function, and its text made outside"
_KEY = "rows[k] for table[int(k)], with a tensor of what the table holds; torch.unique(x) for a set"
_SIZE = "a size that all lanes share, and a mask: torch.where(torch.arange(most) < n, x, 0) for x[:int(n)]"
# By the library's function that asks each lane for its own: what to write instead.
_ANSWERS = {
    **dict.fromkeys(("numpy", "__array__"), _ARRAY),
    **dict.fromkeys(("__format__", "__str__", "__repr__"), _TEXT),
    **dict.fromkeys(("__hash__", "key", "one_number", "entry_at", "set_", "frozenset_", "dict_", "_with_key"), _KEY),
    **dict.fromkeys(("__index__", "call_with_numbers"), _SIZE),
}
_WITHIN = frozenset({"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
# Parts of torch between a line of the user's and the operation that it writes.
_BETWEEN = ("torch._", "torch.nn.modules.module", "torch.overrides", "torch.utils._")


class Told(NamedTuple):
    """Where lanes part and why, as rows of a warning, and what to write instead."""

    rows: str
    instead: str


def told(calls: list[Step] | None, restarted: Cause | None) -> Told:
    """What to tell of lanes that parted in `calls`, innermost first.

    `restarted`: why the outermost of them runs as it was written, though it can be converted; None if it cannot be.
    """
    calls = calls or []
    rows = _rows(calls)
    cause = _cause(calls) or restarted
    if cause is None:
        return Told(rows, _instead(calls, ""))
    text = _text(cause.file, cause.line)
    where = "" if not cause.line else f" (line {cause.line}: {text})" if text else f" (line {cause.line})"
    return Told(f"{rows}\n  {cause.function} ({cause.file}:{cause.first}) {cause.what}{where}", cause.instead)


def told_of_many(calls: list[Step]) -> Told:
    """What to tell of lanes that part often in `calls`, innermost first, and do little in between."""
    answer = _ANSWERS.get(calls[0].asks) if calls else None
    return Told(_rows(calls), answer or f"{_BRANCH}\n  {_TENSORS}")


def instead_of_many(calls: list[Step]) -> str:
    """What to write instead where lanes part often in `calls`, innermost first, and do little in between."""
    return (_ANSWERS.get(calls[0].asks) if calls else None) or _BRANCH


def warn_loop(lanes: int, why: Told | None) -> None:
    """Warn of so many lanes that run one by one because that takes no longer than to run together."""
    text = f"vmap: the {lanes} lanes part so often that they run one by one, which takes about as long as a Python loop"
    rows = "" if why is None else f"{why.rows}\nWrite instead:\n  {why.instead}"
    warn_at_user_line(SlowPathWarning(f"{text} over them{rows}"))


def _rows(calls: list[Step]) -> str:
    place = next((call for call in calls if call.users), None)
    return "" if place is None else f"\n  they part at {_at(place.code.co_filename, place.line)}"


def _cause(calls: list[Step]) -> Cause | None:
    library, inner = "", None  # the outermost library's function that was called since, and the user's that was not
    for call in calls:
        module = str(call.names.get("__name__", ""))
        if not call.users or of_library(module):
            library = library if module.startswith(_BETWEEN) else f"{module}.{call.code.co_name}"
        elif call.code.co_name not in _WITHIN:
            if is_converted(call.code):
                return _of_converted(calls, call, library) if inner is None else _called(inner, library)
            reason = _reason(call)
            if reason is not None:
                return _of(call, f"is not converted: {reason}", reason.line, reason.instead)
            library, inner = "", call
    return _called(inner, library) if inner is not None and library else None


def _reason(call: Step) -> Unsupported | None:
    """Why the code of a call cannot be converted; None if it can."""
    cells = tuple([types.CellType() for _ in call.code.co_freevars])
    code = converted_code(types.FunctionType(call.code, call.names, closure=cells))
    return code if isinstance(code, Unsupported) else None


def _of(call: Step, what: str, line: int, instead: str) -> Cause:
    code = call.code
    return Cause(code.co_name, code.co_filename, code.co_firstlineno, what, line, instead)


def _of_converted(calls: list[Step], call: Step, library: str) -> Cause:
    instead = _instead(calls, library)
    if library:
        return _of(call, f"calls {library} there, which runs as it was written", 0, instead)
    return _of(call, "asks there for a number, a text or a key of Python's own", 0, instead)


def _instead(calls: list[Step], library: str) -> str:
    """What to write where lanes are asked for Python's own by a library, or by the user's code."""
    answer = _ANSWERS.get(calls[0].asks) if calls else None
    return answer or (f"operations on tensors, in place of {library}" if library else _TENSORS)


def _called(call: Step, library: str) -> Cause:
    by = library or "a function written in C"
    return _of(call, f"is called by {by}, which runs as it was written", 0, "the call in a loop of the function's own")


def _at(file: str, line: int) -> str:
    text = _text(file, line)
    return f"{file}:{line}: {text}" if text else f"{file}:{line}"


def _text(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()
