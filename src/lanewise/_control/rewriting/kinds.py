"""Which variables may hold things of several kinds in different lanes, such as None and a tensor, read from the syntax.

Where that may be, an expression that they are part of is computed for each of their values (choices.py).
"""

import ast
import builtins

from torch import Tensor

from lanewise._control.rewriting.scopes import inside, stores

# Modules that have no functions of the user's.
_MODULES = frozenset(("torch", "F", "math", "np", "numpy"))


def _assignments(statement: ast.AST) -> list[tuple[str, ast.expr]] | None:
    """Names and what is assigned to each, where a statement does nothing but that."""
    if not isinstance(statement, ast.Assign):
        return None
    found: list[tuple[str, ast.expr]] = []
    for target in statement.targets:
        value = statement.value
        if isinstance(target, ast.Name):
            found.append((target.id, value))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, part in zip(target.elts, value.elts):
                if not isinstance(name, ast.Name) or isinstance(part, ast.Starred):
                    return None
                found.append((name.id, part))
        else:
            return None
    return found


def calls_user(node: ast.expr) -> bool:
    """Whether an expression may be a call of a function of the user's, which may return things of several kinds."""
    if not isinstance(node, ast.Call):
        return False
    func = node.func
    if isinstance(func, ast.Attribute) and hasattr(Tensor, func.attr):
        return False
    while isinstance(func, ast.Attribute):
        func = func.value
    return isinstance(func, ast.Name) and func.id not in _MODULES and not hasattr(builtins, func.id)


def kinds(body: list[ast.stmt], arguments: ast.arguments) -> tuple[set[str], set[int]]:
    """Names that may hold things of different kinds, such as None, in different lanes; assignments that may make them.

    These by the id of the statement: a value of several kinds may be assigned even where all lanes run.
    """
    found = [(node, pairs) for node in inside(body) if (pairs := _assignments(node)) is not None]
    given = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :] if arguments.defaults else []
    defaults = [*zip(given, arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    names = {arg.arg for arg, default in defaults if isinstance(default, ast.Constant) and _is_kind(default, set())}
    local = set(stores(body)) | {arg.arg for arg in ast.walk(arguments) if isinstance(arg, ast.arg)}
    keeping: set[int] = set()
    kept: set[str] = set()
    while True:
        before = len(names), len(keeping)
        for node, pairs in found:
            names |= {name for name, value in pairs if _is_kind(value, names) or _is_global(value, local)}
            if any(_may_mix(value, names | kept) for _, value in pairs):
                keeping.add(id(node))
                kept |= {name for name, _ in pairs}
        if before == (len(names), len(keeping)):
            return names, keeping


def _is_kind(value: ast.expr, names: set[str]) -> bool:
    """Whether a value may be one that no tensor can hold."""
    if isinstance(value, ast.Constant):
        return type(value.value) not in (bool, int, float, complex)
    if isinstance(value, ast.IfExp):
        return _is_kind(value.body, names) or _is_kind(value.orelse, names)
    if isinstance(value, ast.BoolOp):
        return any(_is_kind(part, names) for part in value.values)
    if isinstance(value, ast.Name):
        return value.id in names
    return isinstance(value, (ast.Attribute, ast.Lambda)) or calls_user(value)


def _is_global(value: ast.expr, local: set[str]) -> bool:
    return isinstance(value, ast.Name) and value.id not in local


def _may_mix(value: ast.expr, names: set[str]) -> bool:
    """Whether lanes that run together may differ in what kind of value it is."""
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, (ast.Attribute, ast.Subscript)):
        return isinstance(value.value, ast.Name) and value.value.id in names
    return isinstance(value, (ast.IfExp, ast.BoolOp)) or calls_user(value)
