"""Pieces of syntax trees that rewritten code is made of."""

import ast

RUNTIME = "_lw"


def load_name(identifier: str) -> ast.Name:
    return ast.Name(identifier, ast.Load())


def runtime(attribute: str) -> ast.Attribute:
    return ast.Attribute(load_name(RUNTIME), attribute, ast.Load())


def attribute(variable: str, attribute: str) -> ast.Attribute:
    return ast.Attribute(load_name(variable), attribute, ast.Load())


def call(function: ast.expr, *args: ast.expr) -> ast.Call:
    return ast.Call(function, list(args), [])


def local_variables() -> ast.expr:
    return call(runtime("locals"))


def strings(names: list[str]) -> ast.expr:
    return ast.Constant(tuple(names))  # type: ignore[arg-type]


def assign(target: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(target, ast.Store())], value)


def bind(names: list[str], value: ast.expr) -> ast.stmt:
    """`(a, b) = value`, or `value` alone where there are no names."""
    if not names:
        return ast.Expr(value)
    return ast.Assign([ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())], value)


def when(test: ast.expr, *body: ast.stmt) -> ast.stmt:
    return ast.If(test, list(body), [])


def once(body: list[ast.stmt]) -> ast.stmt:
    """Statements that `continue` leaves."""
    return ast.For(ast.Name("_lw_o", ast.Store()), runtime("ONCE"), body, [])


def thunk(body: ast.expr) -> ast.expr:
    return function([], body)


def function(names: list[str], body: ast.expr) -> ast.expr:
    """`lambda a, b: body`"""
    return ast.Lambda(ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []), body)
