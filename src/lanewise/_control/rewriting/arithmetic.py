"""Expressions of elementwise operations only, found in the syntax: they can be computed below the lanes as a whole."""

import ast

# Elementwise functions of torch, and methods of the same names, whose operands are all tensors or numbers. None gives
# back an operand itself, or another dtype than its operands' but for bool.
ELEMENTWISE = frozenset(
    "abs acos acosh asin asinh atan atan2 atanh ceil clamp copysign cos cosh erf erfc exp exp2 expm1 floor fmod hypot "
    "lgamma log log10 log1p log2 logical_and logical_not logical_or logical_xor maximum minimum pow reciprocal relu "
    "remainder round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc where".split()
)
# Those that are functions of operands by position alone.
FUNCTIONS = ELEMENTWISE - {"where", "clamp"}
OPERATORS = (
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.BitAnd,
    ast.BitOr,
    ast.BitXor,
)
COMPARISONS = (ast.Lt, ast.LtE, ast.Eq, ast.NotEq, ast.Gt, ast.GtE)
# Methods and functions that give truths.
_TRUTHS = frozenset("all any logical_and logical_not logical_or logical_xor".split())
_LONGEST = 8


class Arithmetic:
    """One such expression.

    Attributes:
        operands: The names and attributes it is computed from, by the names that stand for them.
        body: The expression in terms of these.
        calls: Whether it calls functions or methods.
    """

    def __init__(self) -> None:
        self.operands: dict[str, ast.expr] = {}
        self.calls = False
        self.operations = 0
        self.body: ast.expr
        self._names: dict[str, str] = {}

    def take(self, node: ast.expr) -> ast.expr | None:
        """The expression with its operands replaced; None where it does anything else."""
        if isinstance(node, ast.Constant):
            return node if type(node.value) in (int, float) else None
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._operand(node) if _is_path(node) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            return self._rebuilt(node, ast.BinOp, node.left, node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
            return self._rebuilt(node, ast.UnaryOp, node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], COMPARISONS):
            return self._rebuilt(node, ast.Compare, node.left, node.comparators[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
            if node.func.attr in ELEMENTWISE and (node.func.attr != "where" or len(node.args) > 1):
                self.calls = True
                return self._rebuilt(node, ast.Call, node.func.value, *node.args)
        return None

    def _operand(self, node: ast.expr) -> ast.expr:
        key = ast.dump(node)
        name = self._names.setdefault(key, f"_lw_a{len(self._names)}")
        self.operands[name] = node
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _rebuilt(self, node: ast.expr, kind: type, *parts: ast.expr) -> ast.expr | None:
        self.operations += 1
        new: list[ast.expr] = []
        for part in parts:
            taken = self.take(part)
            if taken is None:
                return None
            new.append(taken)
        if kind is ast.BinOp:
            out: ast.expr = ast.BinOp(new[0], node.op, new[1])  # type: ignore[attr-defined]
        elif kind is ast.UnaryOp:
            out = ast.UnaryOp(node.op, new[0])  # type: ignore[attr-defined]
        elif kind is ast.Compare:
            out = ast.Compare(new[0], node.ops, new[1:])  # type: ignore[attr-defined]
        else:
            func = node.func  # type: ignore[attr-defined]
            out = ast.Call(ast.copy_location(ast.Attribute(new[0], func.attr, ast.Load()), func), new[1:], [])
        return ast.copy_location(out, node)


def arithmetic(node: ast.expr) -> Arithmetic | None:
    """The expression taken apart, None where it does anything else, or one operation alone."""
    found = Arithmetic()
    body = found.take(node)
    if body is None or found.operations < 2 or not found.operands or len(found.operands) > _LONGEST:
        return None
    found.body = body
    return found


def _is_path(node: ast.expr) -> bool:
    """Whether it is a name, or an attribute of one, and so on: what can be read without a further effect."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def truths_in_numbers(node: ast.AST, asked: bool = False) -> bool:
    """Whether a truth may be more than asked for, as in `(x > 0) * 2`. `asked`: it is what an `if` goes by."""
    if isinstance(node, ast.Compare) and not asked:
        return True
    called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    truths = called in _TRUTHS
    if truths and not asked:
        return True
    combines = isinstance(node, (ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Attribute)) or truths
    for field, part in ast.iter_fields(node):
        parts = part if isinstance(part, list) else [part]
        for place, each in enumerate(parts):
            condition = field == "test" or (called == "where" and field == "args" and place == 0)
            if isinstance(each, ast.AST) and truths_in_numbers(each, condition or (combines and asked)):
                return True
    return False
