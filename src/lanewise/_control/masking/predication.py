"""If-conversion: a function of cheap elementwise operations, written so that all lanes go every way.

Each side of a branch runs for all lanes, and what the variables hold where the sides meet is chosen by a mask; a loop
goes on until no lane is in it. What the new code calls is `Masks` in masks.py, its first argument:

    if x < 0:              _lw_1 = _lw_m.truth(x < 0)
        return -x          _lw_r = -x
    y = x.sqrt()           _lw_2 = _lw_r
    return y * x           y = _lw_m.only(_lw_1, False, x).sqrt()
                           _lw_r = y * _lw_m.only(_lw_1, False, x)
                           return _lw_m.where(_lw_1, _lw_2, _lw_r)

This takes functions that do nothing but compute numbers and vectors, so that the sides that a lane does not take have
no effect. What such a side makes of the lane, perhaps no number, is not chosen.
"""

import ast
import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from lanewise._control.masking.masked_expressions import MASKS, MaskedExpressions, Path, calls_by_name, of_masks
from lanewise._control.rewriting.arithmetic import truths_in_numbers
from lanewise._control.rewriting.builders import assign, bind, load_name, when
from lanewise._control.rewriting.kinds import asked_arguments, shows_numbers
from lanewise._control.rewriting.scopes import jumps_out, stores
from lanewise._control.rewriting.source import Function, Unsupported, argument_names

_RESULT = "_lw_r"

# So many statements may a function come to: those after an `if` with a `return` are written once for each side.
_MOST = 200


class Predicated(NamedTuple):
    """A function with masks in place of branches.

    Attributes:
        node: Its definition.
        free: The names that it takes from around it.
        attributes: Those of its first argument that it reads.
        branches: How many it had.
        truths: Whether it may compute with truths.
        defined: Whether operations had better be spared numbers for which they are not defined.
        vectors: Whether it makes vectors of numbers.
        products: Whether it, or a function that it calls, may multiply matrices by vectors.
    """

    node: ast.FunctionDef
    free: frozenset[str]
    attributes: frozenset[str]
    branches: int
    truths: bool
    defined: bool
    vectors: bool
    products: bool


def predicated(node: Function) -> Predicated:
    """Write a function with masks.

    Raises:
        Unsupported: It does anything but compute numbers and vectors.
    """
    arguments = node.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
        raise Unsupported("it takes more than positional arguments")
    writer = _Writer(node)
    given: list[ast.stmt] = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
    body = writer.block(given, ())
    names = argument_names(node)
    shown = 2 if shows_numbers(given, names, False) else int(shows_numbers(given, names, True))
    asked = asked_arguments(given, names)
    if shown or asked:
        body.insert(0, ast.Expr(of_masks("note_numbers", ast.Constant(shown), *map(load_name, asked))))
    if _RESULT not in writer.bound:
        raise Unsupported("it has not always a result")
    new = copy.copy(arguments)
    new.posonlyargs = [ast.arg(MASKS), *arguments.posonlyargs]
    fields: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    out = ast.FunctionDef("_lw_masked", new, [*body, ast.Return(load_name(_RESULT))], [], None, None, **fields)
    ast.fix_missing_locations(ast.copy_location(out, node))
    free, attributes = frozenset(writer.free), frozenset(writer.attributes)
    truths = any(map(truths_in_numbers, given))
    return Predicated(out, free, attributes, writer.branches, truths, writer.defined, writer.vectors, writer.products)


class _Loop:
    """A loop around the statements at hand.

    Attributes:
        going: The variable that says which lanes go on.
        carried: Variables that they carry along.
        returned, value: The variables that say which lanes have returned in it, and what; None where none do.
    """

    def __init__(self, going: str, carried: list[str], returned: str | None, value: str | None) -> None:
        self.going = going
        self.carried = carried
        self.returned, self.value = returned, value
        self.before = {name: f"{going}_{name}" for name in carried}

    def hold(self) -> list[ast.stmt]:
        """Remember what the variables hold for lanes that do not go on."""
        return [assign(before, load_name(name)) for name, before in self.before.items()]

    def choose(self) -> list[ast.stmt]:
        """Give it back to those."""
        return [
            assign(name, _choice(self.going, load_name(name), load_name(before)))
            for name, before in self.before.items()
        ]


class _Writer(MaskedExpressions):
    """One function.

    Attributes:
        owned: Names that the function binds that no other name stands for the value of.
        left: In a loop with `continue`, the variable that says which lanes break it off in this round.
        statements: The number of statements so far.
    """

    def __init__(self, node: Function) -> None:
        super().__init__(node)
        self.owned = _owned([] if isinstance(node, ast.Lambda) else node.body, argument_names(node))
        self.left: str | None = None
        self.statements = 0

    def block(self, body: list[ast.stmt], path: Path, loop: _Loop | None = None) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for position, statement in enumerate(body):
            self.statements += 1
            if self.statements > _MOST:
                raise Unsupported("it is long")
            self.path = path
            rest = body[position + 1 :]
            if isinstance(statement, ast.Return) and statement.value is not None and loop is None:
                out.append(self.bind(_RESULT, self.value(statement.value, True), path))
                return out
            if isinstance(statement, (ast.If, ast.Assert)) and (failure := _failure(statement)) is not None:
                test, others = failure
                out.append(ast.Expr(of_masks("never", self.here(path), self.condition(test))))
                return [*out, *self.block([*others, *rest], path, loop)]
            if isinstance(statement, ast.If):
                jumps = jumps_out([statement])
                if ast.Return in jumps and loop is None:
                    yes, no = [
                        [*side, *([] if _returns(side) else rest)] for side in (statement.body, statement.orelse)
                    ]
                    return [*out, *self.branch(statement.test, yes, no, path, [_RESULT])]
                if jumps and (loop is not None or self.left is None):
                    return [*out, *self.leave(statement, rest, path, loop)]
                names = stores([*statement.body, *statement.orelse])
                out.extend(self.branch(statement.test, statement.body, statement.orelse, path, names))
            elif isinstance(statement, (ast.While, ast.For)):
                if ast.Return in jumps_out([statement]):
                    if loop is not None:
                        raise Unsupported("a `return` in a loop in a loop")
                    return [*out, *self.returning_loop(statement, rest, path)]
                out.extend(self.loop(statement, path))
            elif isinstance(statement, ast.Assign):
                out.extend(self.assignment(statement, path))
            elif isinstance(statement, ast.Break) and loop is None and self.left is not None:
                out.append(assign(self.left, of_masks("any_of", load_name(self.left), self.here(path))))
            elif isinstance(statement, ast.AugAssign):
                out.append(self.update(statement, path))
            elif not isinstance(statement, ast.Pass) and not _is_docstring(statement):
                raise Unsupported(f"`{type(statement).__name__}`")
        return out

    def bind(self, name: str, value: ast.expr, path: Path) -> ast.stmt:
        self.bound.add(name)
        self.made[name] = path
        return assign(name, value)

    def assignment(self, node: ast.Assign, path: Path) -> list[ast.stmt]:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Name):
            return [self.bind(target.id, self.value(node.value), path)]
        names = target.elts if isinstance(target, ast.Tuple) else []
        if not names or len(node.targets) > 1 or not all(isinstance(name, ast.Name) for name in names):
            raise Unsupported("an assignment to anything but variables")
        held = [self.new() for _ in names]
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names):
            out = [assign(each, self.value(value)) for each, value in zip(held, node.value.elts)]
        else:
            out = [bind(held, of_masks("parts", self.value(node.value), ast.Constant(len(names))))]
        return [*out, *[self.bind(name.id, load_name(each), path) for name, each in zip(names, held)]]  # type: ignore[attr-defined]

    def update(self, node: ast.AugAssign, path: Path) -> ast.stmt:
        """`x += y`, which changes nothing but the variable."""
        if not isinstance(node.target, ast.Name) or node.target.id not in self.owned:
            raise Unsupported("a write to what may have another name")
        if isinstance(node.value, ast.Subscript) and node.target.id in _shared(node.value):
            raise Unsupported("a write to what is read")
        old = ast.Name(node.target.id, ast.Load())
        value = self.value(ast.BinOp(old, node.op, node.value))
        if not isinstance(value, ast.BinOp):
            raise Unsupported("a write of a product")
        way = [part for condition, holds in path for part in (load_name(condition), ast.Constant(holds))]
        value.right = of_masks("overwriting", load_name(old.id), value.right, *way)
        return self.bind(old.id, of_masks("updated", load_name(old.id), value), path)

    def branch(
        self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], path: Path, names: list[str]
    ) -> list[ast.stmt]:
        """An `if`, after which `names` hold what each lane's side has given them."""
        self.branches += 1
        condition = self.new()
        out: list[ast.stmt] = [assign(condition, self.condition(test))]
        before, made = set(self.bound), dict(self.made)
        held = {name: self.new() for name in names}
        was = {name: self.new() for name in stores([*body, *orelse]) if name in before}
        out.extend(assign(copied, load_name(name)) for name, copied in was.items())
        out.extend(assign(name, ast.Constant(None)) for name in names if name not in before)
        out.extend(self.side(body, (*path, (condition, True))))
        first, self.bound, self.made = self.bound, set(before), dict(made)
        out.extend(assign(held[name], load_name(name)) for name in names if name in first)
        out.extend(assign(name, load_name(copied)) for name, copied in was.items())
        out.extend(self.side(orelse, (*path, (condition, False))))
        self.bound &= first
        self.made = made
        for name in names:
            if name in self.bound:
                out.append(self.bind(name, _choice(condition, load_name(held[name]), load_name(name)), path))
        return out

    def side(self, body: list[ast.stmt], path: Path) -> list[ast.stmt]:
        """One side of a branch."""
        new = self.block(body, path)
        self.path = path
        return [when(self.taken(calls_by_name(body)), *new)] if new else []

    def returning_loop(self, node: ast.While | ast.For, rest: list[ast.stmt], path: Path) -> list[ast.stmt]:
        """A loop in which lanes may return, and what the others do afterwards."""
        returned, value = self.new(), self.new()
        out = [assign(returned, ast.Constant(False)), assign(value, ast.Constant(None))]
        out.extend(self.loop(node, path, returned, value))
        out.extend(self.block(rest, (*path, (returned, False))))
        if _RESULT in self.bound:
            out.append(self.bind(_RESULT, _choice(returned, load_name(value), load_name(_RESULT)), path))
        return out

    def loop(
        self, node: ast.While | ast.For, path: Path, returned: str | None = None, value: str | None = None
    ) -> list[ast.stmt]:
        if node.orelse:
            raise Unsupported("the `else` of a loop")
        self.branches += 1
        going = self.new()
        before, made = set(self.bound), dict(self.made)
        loop = _Loop(going, [name for name in stores(node.body) if name in before], returned, value)
        for name in loop.carried:
            self.made[name] = path
        inside = (*path, (going, True))
        out = [assign(going, self.here(path))]
        body = [when(ast.Compare(load_name(going), [ast.Is()], [ast.Constant(False)]), ast.Break())]
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value is True:
            around: ast.stmt = ast.While(ast.Constant(True), body, [])
        elif isinstance(node, ast.While):
            self.path = path
            test = of_masks("going", load_name(going), self.condition(node.test))
            around = ast.While(ast.Constant(True), body, [])
            body.insert(0, assign(going, test))
        else:
            targets = stores([node.target])
            if not before.isdisjoint(targets):
                raise Unsupported("the variable of a loop has a value before")
            self.path = path
            around = ast.For(node.target, self.rounds(node.iter, node.target), body, [])
            self.bound.update(targets)
        around_left, self.left = self.left, None
        if ast.Continue in jumps_out(node.body):
            body.extend([*loop.hold(), *self.body_with_continue(node.body, inside, going), *loop.choose()])
            stay = of_masks("going", load_name(going), of_masks("negated", load_name(f"{going}_left")))
            body.append(assign(going, stay))
        else:
            body.extend([*loop.hold(), *self.block(node.body, inside, loop), *loop.choose()])
        self.left = around_left
        self.bound, self.made = before, made
        for name in loop.carried:
            self.made[name] = path
        return [*out, around]

    def body_with_continue(self, body: list[ast.stmt], path: Path, going: str) -> list[ast.stmt]:
        """The body of a loop in which lanes may go on to the next round: those that break it off do so, too."""
        if ast.Return in jumps_out(body):
            raise Unsupported("a `return` in a loop with `continue`")
        self.left = f"{going}_left"
        return [assign(self.left, ast.Constant(False)), *self.block(_jumps_at_ends(body), path)]

    def rounds(self, node: ast.expr, target: ast.expr) -> ast.expr:
        """`range(...)` of numbers that all lanes share, or the entries of a vector, which may be counted."""
        called = node.func if isinstance(node, ast.Call) and not node.keywords else None
        if isinstance(called, ast.Name) and isinstance(node, ast.Call) and called.id in ("range", "enumerate"):
            given = [self.value(arg) for arg in node.args]
            if called.id == "range" and isinstance(target, ast.Name):
                return ast.Call(self.load(called), given, [])
            if isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts):
                return ast.Call(self.load(called), [of_masks("entries", given[0]), *given[1:]], [])
        elif isinstance(target, ast.Name):
            return of_masks("entries", self.value(node))
        raise Unsupported("a loop over anything but a range or a vector")

    def leave(self, node: ast.If, rest: list[ast.stmt], path: Path, loop: _Loop | None) -> list[ast.stmt]:
        """`if test: ...; break`, or `if test: return ...`, and what follows it in the loop."""
        last = node.body[-1]
        returns = isinstance(last, ast.Return) and len(node.body) == 1 and loop is not None and loop.returned
        if loop is None or not (isinstance(last, ast.Break) or returns) or jumps_out(node.body[:-1]):
            raise Unsupported("a jump that is not at the end of an `if` right in the loop")
        condition = self.new()
        test: ast.expr = load_name(condition)
        out: list[ast.stmt] = [assign(condition, self.condition(node.test))]
        if len(node.body) > 1:
            kept = ast.Name(condition, ast.Load())
            self.bound.add(condition)
            self.local.add(condition)
            out.extend(self.branch(kept, node.body[:-1], [], path, stores(node.body)))
        if isinstance(last, ast.Return):
            out.extend(self.leave_for_good(last, condition, path, loop))
        going = assign(loop.going, of_masks("going", load_name(loop.going), of_masks("negated", test)))
        stop = when(ast.Compare(load_name(loop.going), [ast.Is()], [ast.Constant(False)]), ast.Break())
        out.extend([*loop.choose(), going, stop, *loop.hold()])
        for name in loop.carried:
            self.made[name] = path[:-1]
        return [*out, *self.block([*node.orelse, *rest], path, loop)]

    def leave_for_good(self, node: ast.Return, condition: str, path: Path, loop: _Loop) -> list[ast.stmt]:
        assert loop.returned is not None and loop.value is not None
        if node.value is None:
            raise Unsupported("a `return` of nothing")
        self.path = (*path, (condition, True))
        value = self.value(node.value, True)
        leaving = self.new()
        return [
            assign(leaving, of_masks("all_of", load_name(loop.going), load_name(condition))),
            assign(loop.value, of_masks("later", load_name(leaving), value, load_name(loop.value))),
            assign(loop.returned, of_masks("any_of", load_name(loop.returned), load_name(leaving))),
        ]


def _owned(body: list[ast.stmt], arguments: tuple[str, ...]) -> set[str]:
    """Names whose values are made for them, and share memory with those of no other name."""
    owned: set[str] = set(stores(body)) - set(arguments)
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Assign):
            made = isinstance(node.value, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant)) or (
                isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            )
            owned.difference_update(() if made else stores(node.targets), _shared(node.value))
        elif isinstance(node, ast.For) and not _is_range(node.iter):
            owned.difference_update(stores([node.target]), _shared(node.iter))
    return owned


def _shared(node: ast.expr) -> Iterable[str]:
    """The names with whose values that of an expression may share memory."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Subscript):
        parts = [node.value]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Tuple):
        parts = node.elts
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        parts = [*node.args, *[each.value for each in node.keywords]]
    for part in parts:
        yield from _shared(part)


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _choice(condition: str, yes: ast.expr, no: ast.expr) -> ast.expr:
    return of_masks("where", load_name(condition), yes, no)


def _failure(node: ast.If | ast.Assert) -> tuple[ast.expr, list[ast.stmt]] | None:
    """When a statement raises, and what it does else; None for one that does not raise at the end of a side."""
    if isinstance(node, ast.Assert):
        return (ast.UnaryOp(ast.Not(), node.test) if __debug__ else ast.Constant(0)), []
    if isinstance(node.body[-1], ast.Raise):
        return node.test, node.orelse
    if node.orelse and isinstance(node.orelse[-1], ast.Raise):
        return ast.UnaryOp(ast.Not(), node.test), node.body
    return None


def _jumps_at_ends(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body of a loop with what follows a jump in the sides that do not jump; `continue` goes without saying."""
    for position, node in enumerate(body):
        if isinstance(node, ast.Continue):
            return body[:position]
        if isinstance(node, ast.Break):
            return body[: position + 1]
        if isinstance(node, ast.If) and jumps_out([node]):
            rest = body[position + 1 :]
            yes, no = [_jumps_at_ends([*side, *rest]) for side in (node.body, node.orelse)]
            return [*body[:position], ast.If(node.test, yes or [ast.Pass()], no)]
    return body


def _returns(body: Iterable[ast.stmt]) -> bool:
    """Whether statements always end in a `return`."""
    return any(
        isinstance(statement, ast.Return)
        or (isinstance(statement, ast.If) and _returns(statement.body) and _returns(statement.orelse))
        for statement in body
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
