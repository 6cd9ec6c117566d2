"""The syntax tree of a function: found in its file, and compared with the code that runs."""

import ast
import copy
import dis
import inspect
import linecache
import types
from collections.abc import Iterator
from typing import Any

_FUTURE_FLAGS = 0
for _feature in ("annotations", "generator_stop"):
    _FUTURE_FLAGS |= getattr(__import__("__future__"), _feature).compiler_flag

_ATTEMPTS = 20

Function = ast.FunctionDef | ast.Lambda


class Unsupported(Exception):
    """A function that cannot be converted: the message says why.

    Attributes:
        instead: What to write instead.
        line: Where in its file that is which cannot be converted; 0 for the function as a whole.
    """

    def __init__(self, why: str, instead: str = "", line: int = 0) -> None:
        super().__init__(why)
        self.instead = instead
        self.line = line


_IN_A_FILE = "the function in a file of its own, imported from there"
READ_AGAIN = "importlib.reload(module), or start Python again, once the file has changed"
_NAMED = "def name(x): ...  # in place of the lambda"


def find_function(func: types.FunctionType) -> Function:
    """The definition of a function, at the lines it has in its file.

    Raises:
        Unsupported: There is no source, or it is not that of the code.
    """
    code = func.__code__
    lines = linecache.getlines(code.co_filename, func.__globals__)
    if not lines:
        raise Unsupported(f"it has no source: {code.co_filename} cannot be read", _IN_A_FILE)
    if code.co_name == "<lambda>":
        return _find_lambda(code, lines)
    first = code.co_firstlineno
    for last in _ends(code, lines):
        tree = _parse_block(lines, first, last)
        if tree is None:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name and _first_line(node) == first:
                return node
        break
    raise Unsupported(
        "the source does not hold its definition: the file has changed, or it was made by exec", READ_AGAIN
    )


def _first_line(node: ast.FunctionDef) -> int:
    return node.decorator_list[0].lineno if node.decorator_list else node.lineno


def _ends(code: types.CodeType, lines: list[str]) -> Iterator[int]:
    """Numbers of lines that the definition may end with, the likeliest first."""
    if hasattr(code, "co_positions"):
        yield max(_last_line(code), code.co_firstlineno)
    try:
        yield code.co_firstlineno - 1 + len(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    except (SyntaxError, IndentationError, ValueError):
        return


def _last_line(code: types.CodeType) -> int:
    last = max((end for _, end, _, _ in _positions(code) if end is not None), default=code.co_firstlineno)
    inner = [_last_line(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return max([last, *inner])


def _positions(code: types.CodeType) -> Iterator[tuple]:
    """Line, last line, column and last column of each instruction (from Python 3.11)."""
    return code.co_positions()  # type: ignore[attr-defined]


def parsed(text: str) -> ast.Module:
    """`ast.parse`; again where another thread parsed in between, which CPython 3.11 may mistake for an error.

    It counts how deep trees are for all threads together, and raises if the count is another than before.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(text)
        except SystemError:
            pass
    return ast.parse(text)


def _parse_block(lines: list[str], first: int, last: int) -> ast.Module | None:
    """The lines, which may be indented, as a tree with the numbers and columns that they have in the file."""
    block = lines[first - 1 : last]
    if not block:
        return None
    indented = block[0][:1].isspace()
    text = "if 1:\n" + "".join(block) if indented else "".join(block)
    try:
        tree = parsed(text)
    except (SyntaxError, ValueError):
        return None
    return ast.increment_lineno(tree, first - 1 - indented)


_trees: dict[str, tuple[list[str], list[ast.Lambda]]] = {}


def _find_lambda(code: types.CodeType, lines: list[str]) -> ast.Lambda:
    kept = _trees.get(code.co_filename)
    if kept is None or kept[0] is not lines:
        try:
            tree = parsed("".join(lines))
        except SyntaxError:
            raise Unsupported("the file of the lambda cannot be parsed", _NAMED) from None
        kept = lines, [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        _trees[code.co_filename] = kept
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = [
        node
        for node in kept[1]
        if node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno) and argument_names(node) == names
    ]
    if hasattr(code, "co_positions"):
        spans = [position for position in _positions(code) if None not in position[:4]]
        spans = [(l, c, el, ec) for l, el, c, ec in spans if (c, ec) != (0, 0)]
        found = [node for node in found if all(_holds(node.body, span) for span in spans)]
        # A lambda within another one: the code of the inner is in the span of both.
        found.sort(key=lambda node: (node.end_lineno or 0) - node.lineno or (node.end_col_offset or 0))
        found = [node for node in found if not any(_inside(other, node) for other in found if other is not node)]
    if len(found) != 1:
        found = [node for node in found if same_code(code, compile_definition(node, code))]
    if len(found) != 1:
        raise Unsupported("it cannot be told which lambda of the line it is", _NAMED)
    return copy.deepcopy(found[0])


def _holds(node: ast.expr, span: tuple) -> bool:
    line, column, end_line, end_column = span
    return (node.lineno, node.col_offset) <= (line, column) and (end_line, end_column) <= (
        node.end_lineno,
        node.end_col_offset,
    )


def _inside(inner: ast.expr, outer: ast.expr) -> bool:
    return _holds(outer, (inner.lineno, inner.col_offset, inner.end_lineno, inner.end_col_offset))


def argument_names(node: Function) -> tuple[str, ...]:
    """Names of the positional and the keyword-only arguments."""
    arguments = node.args
    return tuple(arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


# --- compiling -------------------------------------------------------------------------------------------------------


_AROUND = "_lw_around"
# What full names begin with in the code of a definition.
PLACE = f"{_AROUND}.<locals>."


def compile_definition(node: Function, like: types.CodeType, cells: tuple[str, ...] = ()) -> types.CodeType:
    """The code object of a definition whose surroundings have the names that `like` takes from them, and `cells`.

    Decorators, annotations and defaults are left out.
    """
    if isinstance(node, ast.Lambda):
        body: list[ast.stmt] = [ast.Return(ast.Lambda(_bare(node.args), node.body))]
        name = "<lambda>"
    else:
        fields: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
        # Under a name of its own: its name would hide the global one, by which it may call itself.
        name = "_lw_function"
        body = [ast.FunctionDef(name, _bare(node.args), node.body, [], None, None, **fields)]
        ast.copy_location(body[0], node)
    free = [ast.arg(cell) for cell in dict.fromkeys((*cells, *like.co_freevars))]
    fields = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    around = ast.FunctionDef(_AROUND, ast.arguments([], free, None, [], [], None, []), body, [], None, None, **fields)
    ast.copy_location(around, node)
    for statement in body:
        ast.copy_location(statement, node)
    ast.fix_missing_locations(around)
    module = ast.Module([around], [])
    flags = like.co_flags & _FUTURE_FLAGS
    try:
        compiled = compile(module, like.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Unsupported(f"its definition does not compile by itself: {error}") from None
    outer = next(const for const in compiled.co_consts if isinstance(const, types.CodeType))
    return next(const for const in outer.co_consts if isinstance(const, types.CodeType) and const.co_name == name)


def _bare(arguments: ast.arguments) -> ast.arguments:
    def bare(arg: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(arg.arg), arg)

    return ast.arguments(
        [bare(arg) for arg in arguments.posonlyargs],
        [bare(arg) for arg in arguments.args],
        None if arguments.vararg is None else bare(arguments.vararg),
        [bare(arg) for arg in arguments.kwonlyargs],
        [None for _ in arguments.kwonlyargs],
        None if arguments.kwarg is None else bare(arguments.kwarg),
        [],
    )


def same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects do the same, wherever they stand."""
    if any(name.startswith("@py") for name in (*one.co_names, *one.co_varnames)):
        # pytest has rewritten the assertions of the module: only the rest can be compared.
        return one.co_varnames[: one.co_argcount] == other.co_varnames[: other.co_argcount]
    if one.co_names != other.co_names or one.co_freevars != other.co_freevars:
        return False
    if one.co_code != other.co_code and _instructions(one) != _instructions(other):
        return False
    if one.co_varnames != other.co_varnames or len(one.co_consts) != len(other.co_consts):
        return False
    return all(_same_const(a, b) for a, b in zip(one.co_consts, other.co_consts))


_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    """What the code does, without how far it jumps, and how it calls methods of names that the file imports."""
    found = []
    for step in dis.get_instructions(code):
        if step.opname in ("PUSH_NULL", "NOP", "EXTENDED_ARG", "CACHE", "PRECALL"):
            continue
        name = step.opname.replace("_METHOD", "_ATTR").replace("LOAD_ATTR", "ATTR")
        name = "CALL" if name in ("CALL_ATTR", "CALL_FUNCTION") else name
        skip = step.opcode in _JUMPS or isinstance(step.argval, types.CodeType)
        found.append((name, None if skip else step.argval))
    return found


def _same_const(a: Any, b: Any) -> bool:
    if isinstance(a, types.CodeType):
        return isinstance(b, types.CodeType) and same_code(a, b)
    if isinstance(a, str) and isinstance(b, str) and "<locals>" in a:
        return True  # before Python 3.11: the qualified name of a nested function, which tells where it stands
    return type(a) is type(b) and repr(a) == repr(b)


# --- private names ---------------------------------------------------------------------------------------------------


class _Mangle(ast.NodeTransformer):
    """Names as the body of a class would have made them."""

    def __init__(self, owner: str) -> None:
        self.prefix = "_" + owner.lstrip("_")

    def name(self, name: Any) -> Any:
        private = isinstance(name, str) and name.startswith("__") and not name.endswith("__") and "." not in name
        return self.prefix + name if private else name

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.name = self.name(node.name)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "attr", "arg", "name"):
            if hasattr(node, field) and not isinstance(node, ast.alias):
                setattr(node, field, self.name(getattr(node, field)))
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            node.names = [self.name(name) for name in node.names]
        return super().generic_visit(node)


def mangled(node: Function, code: types.CodeType, qualname: str) -> Function:
    """The definition with the private names of the class it stands in written out."""
    every = list(_all_names(code))
    if not any("__" in name and not (name.startswith("__") and name.endswith("__")) for name in every):
        return node
    parts = getattr(code, "co_qualname", qualname).split(".")[:-1]
    while parts and parts[-1] == "<locals>":
        parts = parts[:-2]
    if not parts or not parts[-1].lstrip("_"):
        return node
    name = node.name if isinstance(node, ast.FunctionDef) else None
    node = _Mangle(parts[-1]).visit(node)
    if isinstance(node, ast.FunctionDef) and name is not None:
        node.name = name
    return node


def _all_names(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _all_names(const)
