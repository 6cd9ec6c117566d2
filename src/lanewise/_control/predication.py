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

from lanewise._control.arithmetic import COMPARISONS, ELEMENTWISE, OPERATORS, truths_in_numbers
from lanewise._control.builders import assign, attribute, call, load_name, when
from lanewise._control.scopes import jumps_out, stores
from lanewise._control.source import Function, Unsupported, argument_names

MASKS = "_lw_m"
_RESULT = "_lw_r"

_NEW = frozenset("zeros_like ones_like full_like".split())
# Methods that make a number of a vector, and what they are along a dim.
_REDUCED = {"sum": "sum", "mean": "mean", "norm": "norm", "max": "amax", "min": "amin", "all": "all", "any": "any"}
_CONSTANTS = frozenset("zeros ones tensor".split())
_NUMBERS = frozenset("pi inf nan e tau".split())
# So many statements may a function come to: those after an `if` with a `return` are written once for each side.
_MOST = 200

# Operations that are not defined for all numbers, and such that take long for what is no number.
_NARROW = frozenset("acos acosh asin atanh log log10 log1p log2 pow rsqrt sqrt lgamma fmod remainder".split())
_SLOW = frozenset("acos asin atan atan2 cos exp log sin tan tanh pow sinh cosh lgamma".split())

# A condition, and whether it holds where the code at hand counts.
_Path = tuple[tuple[str, bool], ...]


class Predicated(NamedTuple):
    """A function with masks in place of branches.

    Attributes:
        node: Its definition.
        free: The names that it takes from around it.
        attributes: Those of its first argument that it reads.
        branches: How many it had.
        loops: Whether it goes round a loop.
        truths: Whether it may compute with truths.
        defined: Whether operations had better be spared numbers for which they are not defined.
    """

    node: ast.FunctionDef
    free: frozenset[str]
    attributes: frozenset[str]
    branches: int
    loops: bool
    truths: bool
    defined: bool


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
    if _RESULT not in writer.bound or not (writer.branches or writer.calls_others):
        raise Unsupported("it has no branches, or not always a result")
    new = copy.copy(arguments)
    new.posonlyargs = [ast.arg(MASKS), *arguments.posonlyargs]
    fields: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    out = ast.FunctionDef("_lw_masked", new, [*body, ast.Return(load_name(_RESULT))], [], None, None, **fields)
    ast.fix_missing_locations(ast.copy_location(out, node))
    defined = writer.calls >= {_NARROW, _SLOW}
    free, attributes = frozenset(writer.free), frozenset(writer.attributes)
    truths = any(map(truths_in_numbers, given))
    return Predicated(out, free, attributes, writer.branches, writer.loops, truths, defined)


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


class _Writer:
    """One function.

    Attributes:
        local: Names that the function binds.
        owned: Those of them that no other name stands for the value of.
        bound: Those that surely have a value here.
        free: Names that it takes from around it.
        first, attributes: The name of its first argument, None if that changes, and what it reads of it.
        branches: The number of branches so far.
        loops: Whether it goes round a loop.
        calls_others: Whether it calls functions of the user's, which may have branches.
        calls: Which of `_NARROW` and `_SLOW` it calls functions of.
        narrow: Number of operations around the expression at hand that are not defined for all numbers.
        made: Where the lanes of a value counted, by its name: those of the path that it was bound on.
        path: Where the expression at hand counts.
    """

    def __init__(self, node: Function) -> None:
        body = [] if isinstance(node, ast.Lambda) else node.body
        self.local = {*argument_names(node), *stores(body)}
        self.owned = _owned(body, argument_names(node))
        self.bound = set(argument_names(node))
        self.free: set[str] = set()
        self.first = next(iter(argument_names(node)), None)
        if self.first in stores(body):
            self.first = None
        self.attributes: set[str] = set()
        self.branches = 0
        self.loops = self.calls_others = False
        self.calls: set[frozenset[str]] = set()
        self.narrow = 0
        self.made: dict[str, _Path] = {}
        self.path: _Path = ()
        self.count = 0
        self.statements = 0

    def new(self) -> str:
        self.count += 1
        return f"_lw_{self.count}"

    # --- statements --------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], path: _Path, loop: _Loop | None = None) -> list[ast.stmt]:
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
            if isinstance(statement, ast.If):
                jumps = jumps_out([statement])
                if ast.Return in jumps and loop is None:
                    yes, no = [
                        [*side, *([] if _returns(side) else rest)] for side in (statement.body, statement.orelse)
                    ]
                    return [*out, *self.branch(statement.test, yes, no, path, [_RESULT])]
                if jumps:
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
            elif isinstance(statement, ast.AugAssign):
                out.append(self.update(statement, path))
            elif not isinstance(statement, ast.Pass) and not _is_docstring(statement):
                raise Unsupported(f"`{type(statement).__name__}`")
        return out

    def bind(self, name: str, value: ast.expr, path: _Path) -> ast.stmt:
        self.bound.add(name)
        self.made[name] = path
        return assign(name, value)

    def assignment(self, node: ast.Assign, path: _Path) -> list[ast.stmt]:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Name):
            return [self.bind(target.id, self.value(node.value), path)]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else []
        names = target.elts if isinstance(target, ast.Tuple) else []
        if (
            not names
            or len(node.targets) > 1
            or len(values) != len(names)
            or not all(isinstance(name, ast.Name) for name in names)
        ):
            raise Unsupported("an assignment to anything but variables")
        held = [self.new() for _ in names]
        out = [assign(each, self.value(value)) for each, value in zip(held, values)]
        return [*out, *[self.bind(name.id, load_name(each), path) for name, each in zip(names, held)]]  # type: ignore[attr-defined]

    def update(self, node: ast.AugAssign, path: _Path) -> ast.stmt:
        """`x += y`, which changes nothing but the variable."""
        if not isinstance(node.target, ast.Name) or node.target.id not in self.owned:
            raise Unsupported("a write to what may have another name")
        old = ast.Name(node.target.id, ast.Load())
        value = self.value(ast.BinOp(old, node.op, node.value))
        return self.bind(old.id, _masks("updated", load_name(old.id), value), path)

    def branch(
        self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], path: _Path, names: list[str]
    ) -> list[ast.stmt]:
        """An `if`, after which `names` hold what each lane's side has given them."""
        self.branches += 1
        condition = self.new()
        out: list[ast.stmt] = [assign(condition, self.condition(test))]
        before, made = set(self.bound), dict(self.made)
        held = {name: self.new() for name in names}
        was = {name: self.new() for name in stores([*body, *orelse]) if name in before}
        out.extend(assign(copied, load_name(name)) for name, copied in was.items())
        out.extend(self.block(body, (*path, (condition, True))))
        first, self.bound, self.made = self.bound, set(before), dict(made)
        out.extend(assign(held[name], load_name(name)) for name in names if name in first)
        out.extend(assign(name, load_name(copied)) for name, copied in was.items())
        out.extend(self.block(orelse, (*path, (condition, False))))
        self.bound &= first
        self.made = made
        for name in names:
            if name in self.bound:
                out.append(self.bind(name, _choice(condition, load_name(held[name]), load_name(name)), path))
        return out

    def returning_loop(self, node: ast.While | ast.For, rest: list[ast.stmt], path: _Path) -> list[ast.stmt]:
        """A loop in which lanes may return, and what the others do afterwards."""
        returned, value = self.new(), self.new()
        out = [assign(returned, ast.Constant(False)), assign(value, ast.Constant(None))]
        out.extend(self.loop(node, path, returned, value))
        out.extend(self.block(rest, (*path, (returned, False))))
        if _RESULT in self.bound:
            out.append(self.bind(_RESULT, _choice(returned, load_name(value), load_name(_RESULT)), path))
        return out

    def loop(
        self, node: ast.While | ast.For, path: _Path, returned: str | None = None, value: str | None = None
    ) -> list[ast.stmt]:
        if node.orelse:
            raise Unsupported("the `else` of a loop")
        self.branches += 1
        self.loops = True
        going = self.new()
        before, made = set(self.bound), dict(self.made)
        loop = _Loop(going, [name for name in stores(node.body) if name in before], returned, value)
        for name in loop.carried:
            self.made[name] = path
        inside = (*path, (going, True))
        out = [assign(going, _masks("all_of", *[_where_it_counts(place) for place in path]))]
        body = [when(ast.Compare(load_name(going), [ast.Is()], [ast.Constant(False)]), ast.Break())]
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value is True:
            around: ast.stmt = ast.While(ast.Constant(True), body, [])
        elif isinstance(node, ast.While):
            self.path = path
            test = _masks("going", load_name(going), self.condition(node.test))
            around = ast.While(ast.Constant(True), body, [])
            body.insert(0, assign(going, test))
        else:
            if not isinstance(node.target, ast.Name) or node.target.id in before:
                raise Unsupported("the variable of a loop has a value before")
            around = ast.For(ast.Name(node.target.id, ast.Store()), self.rounds(node.iter), body, [])
            self.bound.add(node.target.id)
        body.extend([*loop.hold(), *self.block(node.body, inside, loop), *loop.choose()])
        self.bound, self.made = before, made
        for name in loop.carried:
            self.made[name] = path
        return [*out, around]

    def rounds(self, node: ast.expr) -> ast.expr:
        """`range(...)` of numbers that all lanes share."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            if not node.keywords and all(isinstance(arg, (ast.Constant, ast.Name)) for arg in node.args):
                return ast.Call(self.load(node.func), [self.value(arg) for arg in node.args], [])
        raise Unsupported("a loop over anything but a range")

    def leave(self, node: ast.If, rest: list[ast.stmt], path: _Path, loop: _Loop | None) -> list[ast.stmt]:
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
        going = assign(loop.going, _masks("going", load_name(loop.going), _masks("negated", test)))
        stop = when(ast.Compare(load_name(loop.going), [ast.Is()], [ast.Constant(False)]), ast.Break())
        out.extend([*loop.choose(), going, stop, *loop.hold()])
        for name in loop.carried:
            self.made[name] = path[:-1]
        return [*out, *self.block([*node.orelse, *rest], path, loop)]

    def leave_for_good(self, node: ast.Return, condition: str, path: _Path, loop: _Loop) -> list[ast.stmt]:
        assert loop.returned is not None and loop.value is not None
        if node.value is None:
            raise Unsupported("a `return` of nothing")
        self.path = (*path, (condition, True))
        value = self.value(node.value, True)
        leaving = self.new()
        return [
            assign(leaving, _masks("all_of", load_name(loop.going), load_name(condition))),
            assign(loop.value, _masks("later", load_name(leaving), value, load_name(loop.value))),
            assign(loop.returned, _masks("any_of", load_name(loop.returned), load_name(leaving))),
        ]

    # --- expressions -------------------------------------------------------------------------------------------------

    def condition(self, node: ast.expr) -> ast.expr:
        """What is asked for its truth, as a mask."""
        if isinstance(node, ast.BoolOp):
            combine = "all_of" if isinstance(node.op, ast.And) else "any_of"
            return _masks(combine, *[self.condition(value) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _masks("negated", self.condition(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            operands = [node.left, *node.comparators]
            pairs = zip(operands, node.ops, operands[1:])
            return _masks("all_of", *[self.condition(ast.Compare(a, [op], [b])) for a, op, b in pairs])
        return _masks("truth", self.value(node))

    def value(self, node: ast.expr, returned: bool = False) -> ast.expr:
        """An expression whose value is a number of each lane; `returned`: or a tuple of such."""
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node
        if isinstance(node, ast.Name):
            return self.load(node)
        if isinstance(node, ast.Tuple) and returned:
            return ast.Tuple([self.value(each) for each in node.elts], ast.Load())
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            self.narrow += isinstance(node.op, ast.Pow)
            out = ast.BinOp(self.value(node.left), node.op, self.value(node.right))
            self.narrow -= isinstance(node.op, ast.Pow)
            return out
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
            return ast.UnaryOp(node.op, self.value(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], COMPARISONS):
            return ast.Compare(self.value(node.left), node.ops, [self.value(node.comparators[0])])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return _masks("dot", self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Subscript) and (place := _whole_number(node.slice)) is not None:
            return _masks("entry", self.value(node.value), ast.Constant(place))
        if isinstance(node, ast.IfExp):
            return self.choice(node)
        if isinstance(node, ast.Call):
            return self.function(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _NUMBERS:
            if node.value.id in ("math", "torch"):
                return ast.Attribute(self.load(node.value), node.attr, ast.Load())
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.first:
            self.attributes.add(node.attr)
            return ast.Attribute(load_name(node.value.id), node.attr, ast.Load())
        raise Unsupported(f"`{type(node).__name__}`")

    def choice(self, node: ast.IfExp) -> ast.expr:
        """`a if test else b`"""
        self.branches += 1
        condition = self.new()
        test = ast.NamedExpr(ast.Name(condition, ast.Store()), self.condition(node.test))
        path = self.path
        sides = []
        for side, holds in ((node.body, True), (node.orelse, False)):
            self.path = (*path, (condition, holds))
            sides.append(self.value(side))
        self.path = path
        return _masks("where", test, *sides)

    def function(self, node: ast.Call) -> ast.expr:
        func = node.func
        if isinstance(func, ast.Name) and not node.keywords:
            given = [self.value(arg) for arg in node.args]
            if func.id == "abs":
                return ast.Call(self.load(func), given, [])
            self.calls_others = True
            return _masks("call", self.load(func), *given)
        if not isinstance(func, ast.Attribute):
            raise Unsupported("a call of a function that is not known")
        name = func.attr
        if name in _REDUCED and not node.args and not node.keywords:
            return _masks("reduced", ast.Constant(_REDUCED[name]), self.value(func.value))
        of_torch = isinstance(func.value, ast.Name) and func.value.id == "torch"
        if of_torch and name in _CONSTANTS and len(node.args) == 1 and not node.keywords:
            return _masks("constant", self.constant(name, node.args[0]))
        if name == "dot" and not of_torch and len(node.args) == 1 and not node.keywords:
            return _masks("dot", self.value(func.value), self.value(node.args[0]))
        if name in _NEW and of_torch and not node.keywords:
            known = True
        else:
            known = name in ELEMENTWISE and (name != "where" or len(node.args) > 1)
            known = known and (not node.keywords or (name == "clamp" and all(each.arg for each in node.keywords)))
        if not known:
            raise Unsupported(f"a call of `{name}`")
        self.calls |= {kind for kind in (_NARROW, _SLOW) if name in kind}
        self.narrow += name in _NARROW
        keywords = [ast.keyword(each.arg, self.value(each.value)) for each in node.keywords]
        new: ast.expr = ast.Attribute(self.value(func.value), name, ast.Load())
        if of_torch and name == "where":
            new = attribute(MASKS, "selected")
        out = ast.Call(new, [self.value(arg) for arg in node.args], keywords)
        self.narrow -= name in _NARROW
        return out

    def constant(self, name: str, node: ast.expr) -> ast.expr:
        """`torch.zeros(())`, `torch.ones(())` or `torch.tensor(1.5)`: the number in it."""
        if name == "tensor":
            value = self.value(node)
            if isinstance(node, ast.Constant) or (
                isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
            ):
                return value
        elif isinstance(node, ast.Tuple) and not node.elts:
            return ast.Constant(float(name == "ones"))
        raise Unsupported(f"a call of `{name}`")

    def load(self, node: ast.Name) -> ast.expr:
        """A name. What a side makes of a value from before it is for the lanes that take the side."""
        name = node.id
        if name not in self.local:
            self.free.add(name)
        elif name not in self.bound:
            raise Unsupported(f"`{name}` may have no value")
        out: ast.expr = load_name(name)
        if name in self.local:
            for condition, holds in self.path[len(self.made.get(name, ())) :]:
                kind = ast.Constant(1 if self.narrow else 2)
                out = _masks("only", load_name(condition), ast.Constant(holds), out, kind)
        return out


def _owned(body: list[ast.stmt], arguments: tuple[str, ...]) -> set[str]:
    """Names whose values are made for them, and given to no other name."""
    owned: set[str] = set(stores(body)) - set(arguments)
    for node in ast.walk(ast.Module(body, [])):
        given: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            given = [node.value, *(node.value.elts if isinstance(node.value, ast.Tuple) else [])]
            made = isinstance(node.value, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant)) or (
                isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            )
            owned -= set() if made else set(stores(node.targets))
        elif isinstance(node, ast.IfExp):
            given = [node.body, node.orelse]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = node.args
        owned -= {each.id for each in given if isinstance(each, ast.Name)}
    return owned


def _whole_number(node: ast.expr) -> int | None:
    """What a number stands for that is written out."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _whole_number(node.operand)
        return None if number is None else -number
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _masks(method: str, *args: ast.expr) -> ast.expr:
    return call(attribute(MASKS, method), *args)


def _choice(condition: str, yes: ast.expr, no: ast.expr) -> ast.expr:
    return _masks("where", load_name(condition), yes, no)


def _where_it_counts(place: tuple[str, bool]) -> ast.expr:
    condition, holds = place
    return load_name(condition) if holds else _masks("negated", load_name(condition))


def _returns(body: Iterable[ast.stmt]) -> bool:
    """Whether statements always end in a `return`."""
    return any(
        isinstance(statement, ast.Return)
        or (isinstance(statement, ast.If) and _returns(statement.body) and _returns(statement.orelse))
        for statement in body
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
