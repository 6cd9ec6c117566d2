"""Which variables may hold things of several kinds in different lanes, such as None and a tensor, read from the syntax.

A tensor and a Python number are of different kinds, and so are numbers of different types. Where that may be, an
expression that they are part of is computed for each of their values (choices.py).
"""

import ast
import builtins
from collections.abc import Collection

from torch import Tensor

from lanewise._control.rewriting.number_kinds import (
    ANY,
    assignments,
    gives_entry,
    is_choice,
    kinds_of_numbers,
    number_kinds,
    short_names,
    tells,
)
from lanewise._control.rewriting.scopes import inside, stores
from lanewise._control.rewriting.uses import Uses

# Modules that have no functions of the user's.
_MODULES = frozenset(("torch", "F", "math", "np", "numpy"))


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


def kinds(body: list[ast.stmt], arguments: ast.arguments) -> tuple[set[str], set[int], set[str], set[str]]:
    """Names that may hold things of different kinds, such as None, in different lanes; assignments that may make them.

    These by the id of the statement: a value of several kinds may be assigned even where all lanes run. At last the
    names whose Python numbers no tensor can stand for where other lanes have one, and those for which that goes where
    what the function returns may be asked for its kind.
    """
    found = [(node, pairs) for node in inside(body) if (pairs := assignments(node)) is not None]
    given = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :] if arguments.defaults else []
    defaults = [*zip(given, arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    names = {arg.arg for arg, default in defaults if isinstance(default, ast.Constant) and _is_kind(default, set())}
    taken = {arg.arg for arg in ast.walk(arguments) if isinstance(arg, ast.arg)}
    local = set(stores(body)) | taken
    numbers = kinds_of_numbers(body, taken)
    apart = Uses(numbers, short_names(body, numbers)).found(body)
    apart |= {name for name, held in numbers.items() if len(held - {ANY}) > 1 or "bool" in held}
    names |= {name for name in apart if len(numbers.get(name, ())) > 1}
    returned = Uses(numbers, short_names(body, numbers), True).found(body) - apart
    entries = any(gives_entry(value) for _, pairs in found for _, value in pairs)
    told = Uses(numbers, None).found(body) if entries else set()
    keeping: set[int] = set()
    kept: set[str] = set()
    while True:
        before = len(names), len(keeping)
        for node, pairs in found:
            names |= {name for name, value in pairs if _is_kind(value, names) or _is_global(value, local)}
            if isinstance(node, ast.AugAssign) and not {name for name, _ in pairs} & apart & names:
                continue
            pairs = [(name, value) for name, value in pairs if name in told or not gives_entry(value)]
            if any(_may_mix(value, names | kept, numbers) for _, value in pairs):
                keeping.add(id(node))
                kept |= {name for name, _ in pairs}
        if before == (len(names), len(keeping)):
            return names, keeping, apart, returned


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


def _may_mix(value: ast.expr, names: set[str], numbers: dict[str, set[str]]) -> bool:
    """Whether lanes that run together may differ in what kind of value it is."""
    if isinstance(value, (ast.BinOp, ast.UnaryOp, ast.Compare)) or gives_entry(value):
        return len(number_kinds(value, numbers)) > 1
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, (ast.Attribute, ast.Subscript)):
        return isinstance(value.value, ast.Name) and value.value.id in names
    return isinstance(value, (ast.IfExp, ast.BoolOp)) or calls_user(value)


def shows_numbers(body: list[ast.stmt], arguments: Collection[str], digits: bool) -> bool:
    """Whether a value may be a Python number in some lanes and a tensor in others, and can be told from one.

    `digits`: by its digits, too, of which Python has more than most tensors.
    """
    numbers = kinds_of_numbers(body, arguments)
    several = {name for name, held in numbers.items() if len(held) > 1 and ANY in held}
    if not digits:
        several |= {name for node in inside(body) for name, value in assignments(node) or () if _has_call(value)}
    short = short_names(body, numbers) if digits else None
    if several and several & Uses(numbers, short).found(body):
        return True
    operations = (node for node in inside(body) if isinstance(node, ast.BinOp) and tells(node))
    sides = (side for node in operations for side in (node.left, node.right))
    if any(is_choice(side) or _has_call(side) for side in sides):
        return True
    given = (part for node in inside(body) for part in _given_to_method(node))
    return any(len(kinds) > 1 and ANY in kinds for kinds in (number_kinds(part, numbers) for part in given))


def _given_to_method(node: ast.AST) -> list[ast.expr]:
    """The operands, but for names, of a method or a function of a module, and of lists of them."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    parts = [node.func.value, *node.args, *[keyword.value for keyword in node.keywords]]
    parts = [each for part in parts for each in (part.elts if isinstance(part, (ast.List, ast.Tuple)) else [part])]
    return [part for part in parts if not isinstance(part, ast.Name)]


def asked_arguments(body: list[ast.stmt], arguments: Collection[str]) -> list[str]:
    """The arguments of which a function can tell whether they are numbers or tensors."""
    return sorted(Uses(kinds_of_numbers(body, arguments), None).found(body).intersection(arguments))


def _has_call(value: ast.expr) -> bool:
    return any(isinstance(part, ast.expr) and calls_user(part) for part in ast.walk(value))
