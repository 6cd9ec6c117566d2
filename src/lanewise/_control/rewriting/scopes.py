"""What statements do to names and to the flow of control, read from their syntax."""

import ast
from collections.abc import Iterable, Iterator

from lanewise._core.again.effects import MUTATING

# Statements after which lanes that took different ways come together.
FORKS = (ast.If, ast.While, ast.For, ast.Assert)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
JUMPS = (ast.Return, ast.Break, ast.Continue)
PREFIX = "_lw"


def inside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes and all below them in the same scope; scopes themselves count, not what is in them."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, SCOPES):
            pending.extend(ast.iter_child_nodes(node))


def stores(nodes: Iterable[ast.AST]) -> list[str]:
    """The names that are bound or deleted, each once, in the order of their places."""
    found: dict[str, None] = {}
    for node in nodes:
        for name in _stores(node, False):
            if not name.startswith(PREFIX):
                found.setdefault(name)
    return list(found)


def _stores(node: ast.AST, comprehended: bool) -> Iterator[str]:
    if isinstance(node, ast.NamedExpr):
        yield node.target.id
        yield from _stores(node.value, comprehended)
        return
    if isinstance(node, ast.Name):
        if not comprehended and not isinstance(node.ctx, ast.Load):
            yield node.id
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    comprehended = comprehended or isinstance(node, COMPREHENSIONS)
    for below in ast.iter_child_nodes(node):
        yield from _stores(below, comprehended)


def declared(body: list[ast.stmt]) -> set[str]:
    """Names declared global or nonlocal."""
    return {name for node in inside(body) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}


def headers(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a statement that run before the statements in it."""
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.test]
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, ast.With):
        return list(statement.items)
    if isinstance(statement, ast.Match):
        return [statement.subject]
    if isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
        return []
    return [statement]


def jumps_out(nodes: Iterable[ast.AST], in_loop: bool = False) -> set[type]:
    """The kinds of jumps among statements that leave them: Return, and Break and Continue of a loop around them."""
    found: set[type] = set()
    for node in nodes:
        if isinstance(node, JUMPS):
            if isinstance(node, ast.Return) or not in_loop:
                found.add(type(node))
        elif isinstance(node, (ast.While, ast.For, ast.AsyncFor)):
            found |= jumps_out(node.body, True)
            found |= jumps_out(node.orelse, in_loop)
        elif not isinstance(node, SCOPES):
            found |= jumps_out(ast.iter_child_nodes(node), in_loop)
    return found


def nested_return(body: list[ast.stmt]) -> bool:
    """Whether some lanes may return while others go on."""
    return any(isinstance(node, FORKS) and ast.Return in jumps_out([node], True) for node in inside(body))


def settled(body: list[ast.stmt], known: set[str], keeping: set[int]) -> set[str]:
    """Which names surely hold one value for all lanes after statements, if those `known` did before.

    `keeping`: assignments of values that may be of several kinds, by id.
    """
    known = set(known)
    for statement in body:
        if isinstance(statement, ast.With):
            known = settled(statement.body, known | set(stores(statement.items)), keeping)
        elif isinstance(statement, ast.Delete) or id(statement) in keeping:
            known -= set(stores([statement]))
        elif isinstance(statement, (*FORKS, ast.Try, ast.Match)) or type(statement).__name__ == "TryStar":
            known -= set(stores([statement]))
        else:
            known |= set(stores([statement]))
    return known


def changes_objects(body: list[ast.stmt]) -> bool:
    """Whether statements may change a list, a dict or an attribute."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
                return True
            if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Attribute) and node.attr in MUTATING):
                return True
    return False


def writes_in_place(body: list[ast.stmt]) -> bool:
    """Whether statements may write to a tensor: `x += y`, `x[i] = y`, `x.add_(y)`, `out=x`."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.AugAssign) or (isinstance(node, ast.keyword) and node.arg == "out"):
                return True
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                return True
            if isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.endswith("__"):
                return True
    return False


def loop_variables(body: list[ast.stmt]) -> dict[int, set[str]]:
    """By the id of each `for` in a function: variables of it that are not read anywhere else."""
    loops = [node for node in inside(body) if isinstance(node, ast.For)]
    if not loops or any(name in _LOOKS for name in _reads(body)):
        return {}
    everywhere = _reads(body)
    return {
        id(node): {
            name
            for name in stores([node.target])
            if everywhere.get(name, 0) == _reads([node.target, *node.body]).get(name, 0)
        }
        for node in loops
    }


# Functions that see variables without naming them.
_LOOKS = frozenset({"locals", "vars", "dir", "eval", "exec"})


def _reads(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """How often names are read or deleted, in functions inside too."""
    found: dict[str, int] = {}
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Store):
                found[part.id] = found.get(part.id, 0) + 1
            elif isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                found[part.target.id] = found.get(part.target.id, 0) + 1
    return found
