"""Which types of Python numbers a variable may hold, read from the syntax."""

import ast
import math
from collections.abc import Collection

from lanewise._control.rewriting.scopes import inside, stores

# What calls of builtins give.
_GIVES = {
    "bool": "bool",
    "int": "int",
    "len": "int",
    "ord": "int",
    "hash": "int",
    "float": "float",
    "complex": "complex",
}
_RANK = {"bool": 0, "int": 1, "float": 2, "complex": 3}
# A number of a type that depends on what it is of, and what may be anything.
_NUMBER, ANY = "number", "any"
_EXTREMES = frozenset({"max", "min"})
_ENTRIES = _EXTREMES | {"abs"}
_SOME_NUMBER = frozenset({"divmod", "max", "min", "pow", "round", "sum"})


def assignments(statement: ast.AST) -> list[tuple[str, ast.expr]] | None:
    """Names and what is assigned to each, where a statement does nothing but that."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        return [(name, ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value))]
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


def _given(body: list[ast.stmt]) -> dict[str, list[ast.expr | None]]:
    """What each name is bound to, None for what is not seen."""
    given: dict[str, list[ast.expr | None]] = {}
    for node in inside(body):
        pairs = assignments(node)
        if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and isinstance(node.target, ast.Name) and node.value:
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_range(node.iter):
            pairs = [(node.target.id, ast.Constant(0))]
        for name, value in pairs or ():
            given.setdefault(name, []).append(value)
        if pairs is None and isinstance(node, _BINDING):
            for name in stores([node.target] if isinstance(node, ast.For) else [node]):
                given.setdefault(name, []).append(None)
    return given


def kinds_of_numbers(body: list[ast.stmt], arguments: Collection[str]) -> dict[str, set[str]]:
    """The types of Python numbers that each name may hold; `ANY` among them where it may hold what is no number.

    As an argument may.
    """
    given = _given(body)
    kinds = {name: {ANY} if name in arguments else set() for name in given}
    while True:
        before = sum(map(len, kinds.values()))
        for name, values in given.items():
            for value in values:
                kinds[name] |= {ANY} if value is None else number_kinds(value, kinds)
        if before == sum(map(len, kinds.values())):
            return kinds


_BINDING = (ast.Assign, ast.For, ast.withitem, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def number_kinds(value: ast.expr, kinds: dict[str, set[str]]) -> set[str]:
    """The types of numbers that a value may have; `ANY` where it may be no number."""
    if isinstance(value, ast.Constant):
        name = type(value.value).__name__
        return {name if name in _RANK else ANY}
    if isinstance(value, ast.Name):
        return kinds.get(value.id, {ANY})
    if isinstance(value, ast.IfExp):
        return number_kinds(value.body, kinds) | number_kinds(value.orelse, kinds)
    if isinstance(value, ast.BoolOp):
        return set().union(*[number_kinds(part, kinds) for part in value.values])
    if isinstance(value, ast.UnaryOp):
        found = number_kinds(value.operand, kinds)
        return {"bool"} if isinstance(value.op, ast.Not) else {"int" if kind == "bool" else kind for kind in found}
    if isinstance(value, ast.BinOp):
        return {
            _combined(a, value.op, b) for a in number_kinds(value.left, kinds) for b in number_kinds(value.right, kinds)
        }
    if isinstance(value, ast.Compare):
        sides = [number_kinds(side, kinds) for side in (value.left, *value.comparators)]
        truths = {"bool"} if all(side - {ANY} for side in sides) else {ANY}
        return truths | {ANY for side in sides if ANY in side}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id in _EXTREMES and len(value.args) > 1 and not value.keywords:
            return set().union(*[number_kinds(arg, kinds) for arg in value.args])
        if value.func.id == "abs" and len(value.args) == 1:
            return {"int" if kind == "bool" else kind for kind in number_kinds(value.args[0], kinds)}
        if value.func.id in _SOME_NUMBER:
            return {_NUMBER, ANY}
        return {_GIVES.get(value.func.id, ANY)}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "item":
        return {_NUMBER}
    return {ANY}


def _combined(a: str, op: ast.operator, b: str) -> str:
    if ANY in (a, b):
        return ANY
    if _NUMBER in (a, b):
        return _NUMBER
    kind = max(a, b, "int", key=_RANK.__getitem__)
    if isinstance(op, ast.Div):
        return max(kind, "float", key=_RANK.__getitem__)
    return _NUMBER if isinstance(op, ast.Pow) else kind


def gives_entry(value: ast.AST) -> bool:
    """Whether a call gives a number or a tensor as it is given one: `max(x, 0)`."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _ENTRIES


def is_choice(value: ast.expr, entries: bool = True) -> bool:
    """Whether a value has a ternary or its like in it, or (`entries`) `max` or its like, that may be a number."""
    kinds = (ast.IfExp, ast.BoolOp, ast.Call) if entries else (ast.IfExp, ast.BoolOp)
    parts = (part for part in ast.walk(value) if isinstance(part, kinds))
    return any(len(number_kinds(part, {})) > 1 for part in parts if not isinstance(part, ast.Call) or gives_entry(part))


def is_short(value: object) -> bool:
    """Whether a number has so few digits that no dtype rounds it, nor a few sums of such numbers."""
    return isinstance(value, (int, float)) and (abs(value) == math.inf or (abs(value) <= 8 and (value * 4) % 1 == 0))


def is_power_of_two(value: object) -> bool:
    """Whether such a number changes no digits of what it is multiplied with."""
    return is_short(value) and abs(value) in (0.25, 0.5, 1, 2, 4, 8)  # type: ignore[arg-type]


def short_names(body: list[ast.stmt], kinds: dict[str, set[str]]) -> set[str]:
    """Names that hold no numbers but such of few digits, where they hold numbers."""

    def short(value: ast.expr | None) -> bool:
        if isinstance(value, ast.UnaryOp):
            return short(value.operand)
        if isinstance(value, ast.IfExp):
            return short(value.body) and short(value.orelse)
        if isinstance(value, ast.Constant):
            return is_short(value.value)
        if isinstance(value, ast.Call) and gives_entry(value):
            return all(map(short, value.args))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "float":
            return bool(value.args) and isinstance(value.args[0], ast.Constant)  # an infinity
        return value is not None and number_kinds(value, kinds) == {ANY} and not isinstance(value, ast.Call)

    return {name for name, values in _given(body).items() if all(map(short, values))}


_ASKING = frozenset({"isinstance", "type", "hasattr", "callable"})


def tells(node: ast.expr) -> bool:
    """Whether an expression is one that number and tensor give different things for."""
    if isinstance(node, ast.BinOp):
        divided = isinstance(node.op, ast.Div) and isinstance(node.left, ast.Constant)
        return divided or isinstance(node.op, (ast.Pow, ast.FloorDiv, ast.Mod))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    func = node.func if isinstance(node, ast.Call) else None
    return isinstance(func, ast.Name) and func.id in _ASKING
