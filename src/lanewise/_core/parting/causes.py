"""Why converted code will not do for a function: what its warning says, noted where it is found out."""

from types import CodeType
from typing import NamedTuple

from lanewise.errors import user_call


class Cause(NamedTuple):
    """What keeps a function from going on with all lanes where they part.

    Attributes:
        function, file, first: Its name, its file, and the line that it begins with.
        what: What it does.
        line: Where; 0 for the function as a whole.
        instead: What to write instead.
    """

    function: str
    file: str
    first: int
    what: str
    line: int
    instead: str


def cause_here(what: str, instead: str) -> Cause | None:
    """That of the user's code that runs, at the line that it has come to."""
    call = user_call()
    if call is None:
        return None
    return Cause(
        call.code.co_name,
        call.code.co_filename,
        call.code.co_firstlineno,
        f"runs as it was written: {what}",
        call.line,
        instead,
    )


def changed_by(code: CodeType) -> Cause:
    """That of a function which may come to code that changes objects where Python calls it by itself."""
    return Cause(
        code.co_name,
        code.co_filename,
        code.co_firstlineno,
        "may change an object where Python calls it by itself, so that the function runs as it was written",
        0,
        "a method that is called by its name: table.find(x) for x in table, cache.get(k) for cache[k]",
    )
