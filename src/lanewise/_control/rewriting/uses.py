"""Whether a function can tell a Python number from a tensor that stands for it, read from the syntax.

A variable that is a number in some lanes and a tensor in others is one tensor, which costs nothing, where it is only
added to tensors, multiplied with them, compared, returned: a number does there what the tensor does. Where its kind is
asked for, and where Python's numbers have more digits, it stays apart (choices.py).
"""

import ast
from collections.abc import Iterable
from typing import NamedTuple

from lanewise._control.rewriting.number_kinds import ANY, is_power_of_two, is_short, number_kinds

_KEEPING = frozenset({"abs", "max", "min"})
_CONVERTING = frozenset({"bool", "float", "int"})
_EXACT = (ast.Add, ast.Sub, ast.Mult)


class _Use(NamedTuple):
    """What becomes of a value.

    Attributes:
        tells: Its kind shows.
        digits: Digits that a tensor has not show.
        targets: The variables that it becomes: it shows where theirs does.
    """

    tells: bool = False
    digits: bool = False
    targets: tuple[str, ...] = ()


_TELLS, _FREE, _ASKED = _Use(True), _Use(), _Use(digits=True)


class Uses(ast.NodeVisitor):
    """Finds the names whose kind, or whose digits, show.

    Attributes:
        kinds: The types of numbers that each name may hold.
        short: Names that hold no numbers but such of few digits; None where tensors have as many digits as Python.
        returned: Whether what the function returns may be asked for its kind.
        telling: What has been found.
        becomes: Names that show where others do.
    """

    def __init__(self, kinds: dict[str, set[str]], short: set[str] | None, returned: bool = False) -> None:
        self.kinds = kinds
        self.short = short
        self.returned = returned
        self.telling: set[str] = set()
        self.becomes: dict[str, set[str]] = {}

    def found(self, body: Iterable[ast.stmt]) -> set[str]:
        """The names, for the statements of a function."""
        for statement in body:
            self.visit(statement)
        while True:
            more = {name for name, targets in self.becomes.items() if targets & self.telling} - self.telling
            if not more:
                return self.telling
            self.telling |= more

    # --- statements ----------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.use(node, _TELLS)
        else:
            super().visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.use(node.iter, _FREE)
        for test in node.ifs:
            self.use(test, _ASKED)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.use(node.value, _TELLS if self.returned else _FREE)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        around, self.returned = self.returned, True
        self.generic_visit(node)
        self.returned = around

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.assigned(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assigned(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            held = ast.Name(node.target.id, ast.Load())
            self.use(ast.BinOp(held, node.op, node.value), _Use(targets=(node.target.id,)))
        else:
            self.generic_visit(node)

    def assigned(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.use(value, _Use(targets=(target.id,)))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, own in zip(target.elts, value.elts):
                self.assigned(part, own)
        else:
            self.visit(target)
            self.use(value, _TELLS)

    def visit_If(self, node: ast.If | ast.While) -> None:
        self.use(node.test, _ASKED)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_While = visit_If  # type: ignore[assignment]

    # --- expressions ---------------------------------------------------------------------------------------------

    def use(self, node: ast.expr, use: _Use) -> None:
        """An expression, and what becomes of its value."""
        if isinstance(node, ast.Name):
            if use.tells or (use.digits and self.short is not None and node.id not in self.short):
                self.telling.add(node.id)
            self.becomes.setdefault(node.id, set()).update(use.targets)
        elif isinstance(node, ast.BinOp):
            self.use(node.left, self.operand(node.op, node.right, use, isinstance(node.op, ast.Div)))
            self.use(node.right, self.operand(node.op, node.left, use, False))
        elif isinstance(node, ast.Compare):
            self.compared(node, use)
        elif isinstance(node, ast.UnaryOp):
            self.use(node.operand, _TELLS if isinstance(node.op, ast.Invert) else use)
        elif isinstance(node, (ast.BoolOp, ast.Tuple, ast.List)):
            for part in node.values if isinstance(node, ast.BoolOp) else node.elts:
                self.use(part, use)
        elif isinstance(node, ast.IfExp):
            self.use(node.test, _ASKED)
            self.use(node.body, use)
            self.use(node.orelse, use)
        elif isinstance(node, ast.Call):
            self.called(node, use)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            self.use(node.elt, _TELLS)
            for generator in node.generators:
                self.visit(generator)
        elif isinstance(node, ast.Lambda):
            self.use(node.body, _TELLS)
        else:
            for part in ast.iter_child_nodes(node):
                self.visit(part)

    def operand(self, op: ast.operator, other: ast.expr, use: _Use, divided: bool) -> _Use:
        """What becomes of an operand, of which `other` is the other one."""
        found = number_kinds(other, self.kinds)
        if found == {ANY}:
            # It meets a tensor. A number of Python's divides one as a tensor does, but is no integer's power.
            return _ASKED if isinstance(op, (*_EXACT, ast.Div)) else _TELLS
        if divided and isinstance(other, ast.Constant) and other.value:
            free = self.short is None or (use == _FREE and self.is_short(other))
            return use._replace(digits=True) if free else _TELLS
        if not isinstance(op, _EXACT) or not self.is_short(other):
            return _TELLS
        if isinstance(op, ast.Mult) and self.short is not None and not is_power_of_two(getattr(other, "value", None)):
            return _TELLS  # a product has the digits of both
        return use._replace(digits=True)

    def is_short(self, node: ast.expr) -> bool:
        if self.short is None:
            return True
        if isinstance(node, ast.UnaryOp):
            return self.is_short(node.operand)
        return node.id in self.short if isinstance(node, ast.Name) else is_short(getattr(node, "value", None))

    def compared(self, node: ast.Compare, use: _Use) -> None:
        sides = [node.left, *node.comparators]
        plain = not any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
        for side in sides:
            others = [other for other in sides if other is not side]
            if not plain and all(isinstance(other, ast.Constant) and other.value is None for other in others):
                self.use(side, _FREE)
            elif plain and all(number_kinds(other, self.kinds) == {ANY} for other in others):
                self.use(side, _ASKED)
            else:
                asked = plain and use == _ASKED and all(map(self.is_short, others))
                self.use(side, _ASKED if asked else _TELLS)

    def called(self, node: ast.Call, use: _Use) -> None:
        func = node.func
        name = func.id if isinstance(func, ast.Name) else None
        within = _TELLS
        if not node.keywords and name in _KEEPING:
            within = use._replace(digits=True)
        elif not node.keywords and name in _CONVERTING:
            within = _ASKED
        elif name == "print":
            within = _FREE
        if not isinstance(func, ast.Name):
            self.visit(func)
        for arg in (*node.args, *[keyword.value for keyword in node.keywords]):
            self.use(arg, within)
