"""Functions written for lanes that stay abreast: what they do with values goes to running.py, which knows of lanes.

    y = x @ self.w + b            y = _lw_a.add(_lw_a.matmul(x, _lw_a.get(self, "w")), b)
    return F.relu(y).sum(-1)      return _lw_a.method(_lw_a.method(F, "relu", y), "sum", -1)

Branches and loops stay as they are: a condition on a value of lanes is declined when it is asked. This takes functions
that do nothing but compute, so that nothing is to be undone where a call is declined.
"""

import ast
import inspect
import types
from typing import Any

from lanewise._control.rewriting.builders import attribute, call
from lanewise._control.rewriting.compiling import definition
from lanewise._control.rewriting.scopes import stores
from lanewise._control.rewriting.source import Unsupported, argument_names, compile_definition

RUNTIME = "_lw_a"

_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_OPERATORS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.USub: "neg",
    ast.Invert: "invert",
}
# What is left as it is, but for what is in it.
_STATEMENTS = (ast.Return, ast.Pass, ast.Break, ast.Continue)
_EXPRESSIONS = (
    ast.Name,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.NamedExpr,
    ast.ListComp,
    ast.GeneratorExp,
    ast.DictComp,
)
_PARTS = (ast.keyword, ast.expr_context, ast.operator, ast.boolop, ast.cmpop, ast.unaryop, ast.arguments, ast.arg)
_HIDDEN = frozenset(["super", "locals", "globals", "vars", "eval", "exec", "dir"])


def written(func: types.FunctionType) -> types.CodeType:
    """The code of a function for lanes abreast, which takes `RUNTIME` from around it.

    Raises:
        Unsupported: It does more than compute, or there is no source.
    """
    code = func.__code__
    if code.co_flags & _NOT_PLAIN:
        raise Unsupported("it is a generator or asynchronous")
    node = definition(func)
    body = [] if isinstance(node, ast.Lambda) else node.body
    writer = _Writer(_own(body, argument_names(node)))
    if isinstance(node, ast.Lambda):
        node.body = writer.visit(node.body)
    else:
        node.body = [writer.visit(statement) for statement in body]
    return compile_definition(node, code, (RUNTIME,))


def _own(body: list[ast.stmt], arguments: tuple[str, ...]) -> set[str]:
    """Variables that hold nothing but lists and dictionaries made in the function."""
    own = set(stores(body)) - set(arguments)
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                own.difference_update(_others(target, node.value))
        elif isinstance(node, ast.AnnAssign) and not isinstance(node.value, (ast.List, ast.Dict, ast.ListComp)):
            own.difference_update(_names(node.target))
        elif isinstance(node, (ast.AugAssign, ast.For, ast.NamedExpr, ast.comprehension)):
            own.difference_update(_names(node.target))
    return own


def _others(target: ast.expr, value: ast.expr) -> set[str]:
    """The names of an assignment that get anything but a list or a dictionary made there."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        if not any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts)):
            return set().union(*map(_others, target.elts, value.elts))
    if isinstance(target, ast.Name) and isinstance(value, (ast.List, ast.Dict, ast.ListComp)):
        return set()
    return _names(target)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _asks(name: str, *args: ast.expr) -> ast.expr:
    return call(attribute(RUNTIME, name), *args)


def _pattern(target: ast.expr) -> Any:
    """For each variable of a target None, and for what is unpacked further such a tuple."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    pattern = tuple(map(_pattern, target.elts))
    if any(each is not None for each in pattern) and any(isinstance(each, ast.Starred) for each in target.elts):
        raise Unsupported("an assignment that unpacks at unknown places")
    return pattern


def _unpacked(target: ast.expr, value: ast.expr) -> ast.expr:
    """The value (rewritten), with a question for each part that the target unpacks."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return value
    pattern = _pattern(target)
    parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else ()
    if len(parts) == len(pattern) and not any(isinstance(each, ast.Starred) for each in (*parts, *target.elts)):
        return ast.Tuple(list(map(_unpacked, target.elts, parts)), ast.Load())
    return _asks("unpacked", value, ast.Constant(pattern))


class _Writer(ast.NodeTransformer):
    """Rewrites statements and expressions. `own`: variables of lists and dictionaries that nobody else has."""

    def __init__(self, own: set[str]) -> None:
        self.own = own

    def visit(self, node: ast.AST) -> Any:
        new = super().visit(node)
        return ast.copy_location(new, node) if isinstance(new, (ast.expr, ast.stmt)) else new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_PARTS)):
            raise Unsupported(f"`{type(node).__name__}`")
        return super().generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _HIDDEN:
            raise Unsupported(f"`{node.id}`")
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        value = node.value
        if isinstance(value, ast.Constant):
            return node
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "append":
            holder = value.func.value
            if isinstance(holder, ast.Name) and holder.id in self.own and len(value.args) == 1:
                return ast.Expr(ast.Call(value.func, [self.visit(value.args[0])], []))
        raise Unsupported("a statement whose value nobody uses")

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        value = self.visit(node.value)
        for target in node.targets:
            value = _unpacked(target, value)
        return ast.Assign([self._target(target) for target in node.targets], value)

    def visit_Starred(self, node: ast.Starred) -> ast.expr:
        return ast.Starred(_asks("rounds", self.visit(node.value)), node.ctx)

    def visit_If(self, node: ast.If | ast.While) -> ast.stmt:
        body, orelse = [[self.visit(each) for each in part] for part in (node.body, node.orelse)]
        return type(node)(self._truth(node.test), body, orelse)

    visit_While = visit_If

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return ast.IfExp(self._truth(node.test), self.visit(node.body), self.visit(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return ast.BoolOp(node.op, [*map(self._truth, node.values[:-1]), self.visit(node.values[-1])])

    def _truth(self, node: ast.expr) -> ast.expr:
        return _asks("truth", self.visit(node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.Pass()
        return ast.Assign([self._target(node.target)], self.visit(node.value))

    def _target(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in self.own:
            return ast.Subscript(node.value, self._index(node.slice), ast.Store())
        for each in ast.walk(node):
            if not isinstance(each, (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context)):
                raise Unsupported("an assignment to anything but variables")
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            raise Unsupported("a write")
        old = ast.Name(node.target.id, ast.Load())
        value = _asks("updated", old, _asks(_operator_name(node.op), old, self.visit(node.value)))
        return ast.Assign([node.target], value)

    def visit_For(self, node: ast.For) -> ast.stmt:
        body = [self.visit(each) for each in node.body]
        orelse = [self.visit(each) for each in node.orelse]
        return ast.For(self._target(node.target), self._rounds(node), body, orelse)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if node.is_async:
            raise Unsupported("an asynchronous loop")
        ifs = [self._truth(each) for each in node.ifs]
        return ast.comprehension(self._target(node.target), self._rounds(node), ifs, 0)

    def _rounds(self, node: ast.For | ast.comprehension) -> ast.expr:
        pattern = _pattern(node.target)
        if pattern is None:
            return _asks("rounds", self.visit(node.iter))
        return _asks("unpacked_rounds", self.visit(node.iter), ast.Constant(pattern))

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return ast.Assert(self._truth(node.test), None)  # where it fails, the lanes are run anew

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        return ast.Raise(attribute(RUNTIME, "Declined"), None)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        args = [self.visit(arg) for arg in node.args]
        keywords = [ast.keyword(each.arg, self._keyword(each)) for each in node.keywords]
        func = node.func
        if isinstance(func, ast.Attribute):
            given = [self.visit(func.value), ast.Constant(func.attr), *args]
            return ast.Call(attribute(RUNTIME, "method"), given, keywords)
        return ast.Call(attribute(RUNTIME, "call"), [self.visit(func), *args], keywords)

    def _keyword(self, node: ast.keyword) -> ast.expr:
        value = self.visit(node.value)
        return value if node.arg is not None else _asks("rounds", value)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return _asks("get", self.visit(node.value), ast.Constant(node.attr))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return _asks(_operator_name(node.op), self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._truth(node.operand))
        return _asks(_operator_name(node.op), self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        left, right, kind = self.visit(node.left), [self.visit(each) for each in node.comparators], node.ops[0]
        if len(node.ops) > 1 or isinstance(kind, (ast.In, ast.NotIn)):
            return ast.Compare(_asks("basic", left), node.ops, [_asks("basic", each) for each in right])
        if isinstance(kind, (ast.Is, ast.IsNot)):
            if not any(isinstance(each, ast.Constant) for each in (left, right[0])):
                left, right = _asks("itself", left), [_asks("itself", right[0])]
            return ast.Compare(left, node.ops, right)
        return _asks(_operator_name(kind), left, right[0])

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return _asks("item", self.visit(node.value), self._index(node.slice))

    def _index(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Slice):
            bounds = [
                ast.Constant(None) if each is None else self.visit(each) for each in (node.lower, node.upper, node.step)
            ]
            return _asks("bounds", *bounds)
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self._index(each) for each in node.elts], ast.Load())
        return self.visit(node)


def _operator_name(node: ast.AST) -> str:
    name = _OPERATORS.get(type(node))
    if name is None:
        raise Unsupported(f"`{type(node).__name__}`")
    return name
