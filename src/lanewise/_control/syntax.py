"""The syntax of a function, rewritten so that lanes can take different ways through it.

A branch becomes a `for` over the sets of lanes that take each side, in the same frame; a loop goes on with the lanes
that stay in it. Where they come together, the variables that were assigned are merged. Where all lanes go the same way,
each costs a few attribute tests. What the new code calls is in flow.py:

    if x > 0:              _lw_1 = _lw.branch(_lw_f, x > 0)
        y = f(x)           for _lw_b in _lw_1:
    else:                      if _lw_1.parts: (y,) = _lw_1.turn(("y",), locals())
        y = -x                 if _lw_b: y = _lw.fn(f)(x)
                               else: y = -x
                               if _lw_1.parts: _lw_1.side(locals())
                           if _lw_1.parts: (y,) = _lw_1.join()

Jumps that only some lanes take are noted; `_lw_f.dead` says that no lane is left to run the statements that follow, and
the loops around them are left one by one.
"""

import ast
import copy
from typing import Any

from lanewise._control.scopes import FORKS, SCOPES, declared, inside, jumps_out, nested_return, settled, stores
from lanewise._control.source import Function, Unsupported, argument_names

RUNTIME = "_lw"
_FRAME = "_lw_f"
_NATIVE_CALLS = frozenset({"super", "locals", "globals", "vars", "dir", "isinstance_"})
_UNSUPPORTED = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


def rewrite(node: Function, captured: frozenset[str]) -> None:
    """Rewrite a definition in place. `captured`: names that functions inside it take from it.

    Raises:
        Unsupported: It does what cannot be rewritten.
    """
    _Rewriter(node, captured).run()


# --- building --------------------------------------------------------------------------------------------------------


def _name(identifier: str) -> ast.Name:
    return ast.Name(identifier, ast.Load())


def _runtime(attribute: str) -> ast.Attribute:
    return ast.Attribute(_name(RUNTIME), attribute, ast.Load())


def _of(variable: str, attribute: str) -> ast.Attribute:
    return ast.Attribute(_name(variable), attribute, ast.Load())


def _call(function: ast.expr, *args: ast.expr) -> ast.Call:
    return ast.Call(function, list(args), [])


def _locals() -> ast.expr:
    return _call(_runtime("locals"))


def _strings(names: list[str]) -> ast.expr:
    return ast.Constant(tuple(names))


def _assign(target: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(target, ast.Store())], value)


def _bind(names: list[str], value: ast.expr) -> ast.stmt:
    """`(a, b) = value`, or `value` alone where there are no names."""
    if not names:
        return ast.Expr(value)
    return ast.Assign([ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())], value)


def _when(test: ast.expr, *body: ast.stmt) -> ast.stmt:
    return ast.If(test, list(body), [])


def _once(body: list[ast.stmt]) -> ast.stmt:
    """Statements that `continue` leaves."""
    return ast.For(ast.Name("_lw_o", ast.Store()), _runtime("ONCE"), body, [])


def _thunk(body: ast.expr) -> ast.expr:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


# --- rewriting -------------------------------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    """One function.

    Attributes:
        outer: Names that belong to a scope around it, and are assigned.
        suspects: Names that may hold different things in different lanes at some point.
        known: Names that surely do not, here.
        places: The loops and branches around a statement, innermost last: the loop's variable, None for a branch.
    """

    def __init__(self, node: Function, captured: frozenset[str]) -> None:
        self.node = node
        self.captured = captured
        body = node.body if isinstance(node.body, list) else [ast.Return(node.body)]
        self.body: list[ast.stmt] = body
        self.outer = declared(body)
        self.simple = not nested_return(body)
        self.forks = any(isinstance(part, FORKS) for part in inside(body))
        joining = [part for part in inside(body) if isinstance(part, (*FORKS, ast.Try, ast.Match))]
        self.suspects = set(stores(joining)) - self.outer
        self.known = set(argument_names(node))
        self.places: list[str | None] = []
        self.count = 0
        self.thunks = 0

    def run(self) -> None:
        for part in inside(self.body):
            if isinstance(part, _UNSUPPORTED) or type(part).__name__ == "TryStar":
                raise Unsupported(f"it contains `{type(part).__name__}`")
            if isinstance(part, ast.Try) and part.finalbody:
                guarded = [*part.body, *part.handlers, *part.orelse, *part.finalbody]
                if any(isinstance(fork, FORKS) and jumps_out([fork]) for fork in inside(guarded)):
                    raise Unsupported("lanes may leave a `try` with a `finally` one by one")
        if isinstance(self.node, ast.Lambda):
            self.node.body = self.visit(self.node.body)
            return
        body = self.block(self.body)
        if not self.simple:
            body.append(ast.Return(_call(_of(_FRAME, "finish"), ast.Constant(None))))
        if self.forks:
            captured = sorted(self.captured & self.suspects)
            body.insert(_after_docstring(body), _assign(_FRAME, _call(_runtime("Frame"), _strings(captured))))
        self.node.body = body

    def new(self) -> str:
        self.count += 1
        return f"_lw_{self.count}"

    def bound(self, nodes: list[Any]) -> list[str]:
        return [name for name in stores(nodes) if name not in self.outer]

    def jump(self) -> ast.stmt:
        return ast.Continue() if self.places else ast.Return(_call(_of(_FRAME, "result")))

    def leave_if_dead(self) -> ast.stmt:
        return _when(_of(_FRAME, "dead"), self.jump())

    # --- statements ----------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            new: list[ast.stmt] = []
            if self.outer and not isinstance(statement, (ast.Global, ast.Nonlocal)):
                if self.outer & set(stores(_headers(statement))):
                    new.append(ast.Expr(_call(_runtime("changes_outside"))))
            visited = self.visit(statement)
            new.extend(visited if isinstance(visited, list) else [visited])
            out.extend(ast.copy_location(part, statement) for part in new)
            if isinstance(statement, (ast.Return, ast.Break, ast.Continue)):
                break
        return out

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        names = self.bound([*node.body, *node.orelse])
        branch = self.new()
        test = self.visit(node.test)
        before = set(self.known)
        self.places.append(None)
        body = self.block(node.body)
        self.known = set(before)
        orelse = self.block(node.orelse)
        self.places.pop()
        self.known = before - set(names)
        parts = _of(branch, "parts")
        sides: list[ast.stmt] = []
        if names:
            sides.append(_when(parts, _bind(names, _call(_of(branch, "turn"), _strings(names), _locals()))))
        sides.append(ast.copy_location(ast.If(_name("_lw_b"), body, orelse), node))
        sides.append(_when(parts, ast.Expr(_call(_of(branch, "side"), _locals()))))
        out = [
            _assign(branch, _call(_runtime("branch"), _name(_FRAME), test)),
            ast.For(ast.Name("_lw_b", ast.Store()), _name(branch), sides, []),
            _when(parts, _bind(names, _call(_of(branch, "join")))),
        ]
        if jumps_out([node]):
            out.append(self.leave_if_dead())
        return out

    def visit_Assert(self, node: ast.Assert) -> Any:
        if not __debug__:
            return ast.Pass()
        message = [] if node.msg is None else [node.msg]
        error = ast.Call(_runtime("AssertionError"), message, [])
        fail = ast.copy_location(ast.Raise(error, None), node)
        return self.visit_If(ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [fail], []), node))

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        loop = self.new()
        names = self.bound([node.test, *node.body, *node.orelse])
        before = self.enter_loop(names, [ast.Expr(node.test), *node.body], node.body)
        test = self.visit(node.test)
        over = _call(_of(loop, "over"), _name("_lw_t"), _locals())
        going = ast.Compare(_name("_lw_t"), [ast.IsNot()], [ast.Constant(True)])
        head = [_assign("_lw_t", test), _when(ast.BoolOp(ast.And(), [going, over]), ast.Break())]
        body = self.loop_body(loop, names, node.body)
        around = ast.While(ast.Constant(True), head + body, [])
        return [self.open_loop(loop, names), around, *self.close_loop(loop, names, node, before)]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        loop = self.new()
        names = self.bound([node.target, *node.body, *node.orelse])
        if self.outer & set(stores([node.target])):
            raise Unsupported("the variable of a `for` belongs to a scope around the function")
        items = _call(_of(loop, "items"), self.visit(node.iter), ast.Constant(_is_temporary(node.iter)))
        start = ast.copy_location(ast.Assign([node.target], _name("_lw_i")), node)
        before = self.enter_loop(names, [start, *node.body], node.body)
        over = _call(_of(loop, "over"), _of(loop, "more"), _locals())
        head = [_when(ast.BoolOp(ast.And(), [_of(loop, "asks"), over]), ast.Break()), *self.block([start])]
        body = self.loop_body(loop, names, node.body)
        around = ast.For(ast.Name("_lw_i", ast.Store()), items, head + body, [])
        return [self.open_loop(loop, names), around, *self.close_loop(loop, names, node, before)]

    def open_loop(self, loop: str, names: list[str]) -> ast.stmt:
        return _assign(loop, _call(_runtime("Loop"), _name(_FRAME), _strings(names)))

    def enter_loop(self, names: list[str], each: list[ast.stmt], body: list[ast.stmt]) -> set[str]:
        """Set what is known where a round of the loop begins; returns what was known before."""
        before = set(self.known)
        if ast.Continue in jumps_out(body):
            self.known -= set(names)
        else:
            self.known &= settled(each, self.known)
        return before

    def loop_body(self, loop: str, names: list[str], body: list[ast.stmt]) -> list[ast.stmt]:
        kinds = jumps_out(body)
        self.places.append(loop)
        new = self.block(body)
        self.places.pop()
        if not kinds:
            return new
        out: list[ast.stmt] = [_once(new)]
        if ast.Continue in kinds:
            out.append(_when(_of(loop, "waits"), _bind(names, _call(_of(loop, "rejoin"), _locals()))))
        out.append(_when(_of(_FRAME, "dead"), ast.Break()))
        return out

    def close_loop(self, loop: str, names: list[str], node: ast.While | ast.For, before: set[str]) -> list[ast.stmt]:
        kinds = jumps_out(node.body)
        self.known = before - set(names)
        out: list[ast.stmt] = []
        parts = _of(loop, "parts")
        if node.orelse:
            out.append(_when(parts, _bind(names, _call(_of(loop, "exhausted"), _locals()))))
            self.places.append(None)
            orelse = self.block(node.orelse)
            self.places.pop()
            out.append(_once([_when(_of(_FRAME, "dead"), ast.Continue()), *orelse]))
            self.known -= set(names)
        if ast.Break in kinds:
            out.append(_when(_of(loop, "broke"), ast.Expr(_call(_of(loop, "revive")))))
        out.append(_when(parts, _bind(names, _call(_of(loop, "join"), _locals()))))
        if ast.Return in kinds or jumps_out(node.orelse):
            out.append(self.leave_if_dead())
        return out

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        return [ast.Expr(_call(_of(self.innermost_loop(), "leave"), _locals())), ast.Continue()]

    def visit_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        if self.places[-1] is not None:
            return [node]
        return [ast.Expr(_call(_of(self.innermost_loop(), "wait"), _locals())), ast.Continue()]

    def innermost_loop(self) -> str:
        return next(place for place in reversed(self.places) if place is not None)

    def visit_Return(self, node: ast.Return) -> Any:
        value = ast.Constant(None) if node.value is None else self.visit(node.value)
        if self.simple:
            return ast.Return(value)
        if not self.places:
            return ast.Return(_call(_of(_FRAME, "finish"), value))
        return [
            _assign("_lw_r", value),
            _when(_call(_of(_FRAME, "returns"), _name("_lw_r")), ast.Return(_name("_lw_r"))),
            self.jump(),
        ]

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        if node.exc is not None:
            node.exc = self.visit(node.exc)
        if node.cause is not None:
            node.cause = self.visit(node.cause)
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        for item in node.items:
            item.context_expr = self.visit(item.context_expr)
            if item.optional_vars is not None:
                item.optional_vars = self.visit(item.optional_vars)
        node.body = self.block(node.body)
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        before = set(self.known)
        unsure = set(stores([node]))
        node.body = self.block(node.body)
        node.orelse = self.block(node.orelse)
        for handler in node.handlers:
            self.known = before - unsure
            if handler.type is not None:
                handler.type = self.visit(handler.type)
            handler.body = self.block(handler.body)
        if node.handlers:
            # What tells lanes apart is not for the user's `except:` to catch.
            control = ast.ExceptHandler(_runtime("CONTROL"), None, [ast.Raise(None, None)])
            node.handlers.insert(0, ast.copy_location(control, node))
        self.known = before - unsure
        node.finalbody = self.block(node.finalbody)
        self.known = before - unsure
        return node

    def visit_Match(self, node: ast.Match) -> ast.stmt:
        node.subject = self.visit(node.subject)
        before = set(self.known)
        unsure = set(stores([node]))
        for case in node.cases:
            self.known = before | set(stores([case.pattern]))
            if case.guard is not None:
                case.guard = self.visit(case.guard)
            case.body = self.block(case.body)
        self.known = before - unsure
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        value = self.visit(node.value)
        if len(node.targets) == 1 and isinstance(target := node.targets[0], ast.Subscript):
            # The value comes first, as it does in the statement.
            place = self.visit(target.value)
            return ast.Expr(_call(_runtime("set_item"), value, place, self.index(target.slice)))
        node.value = value
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.Pass() if isinstance(node.target, ast.Name) else node
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        target = node.target
        if not isinstance(target, ast.Name):
            node.target = self.visit(target)
            node.value = self.visit(node.value)
            return node
        node.value = self.visit(node.value)
        number = isinstance(node.value, ast.Constant)
        out: list[ast.stmt] = []
        if self.unsure(target.id):
            out.append(_assign(target.id, _call(_runtime("load"), _name(target.id), ast.Constant(target.id))))
        if not number:
            out.append(ast.Expr(_call(_runtime("changes"), _name(target.id))))
        self.known.add(target.id)
        return [*out, node]

    def visit_Delete(self, node: ast.Delete) -> ast.stmt:
        node.targets = [self.visit(target) for target in node.targets]
        self.known -= set(stores([node]))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        self.visit_defaults(node.args)
        _rewrite_nested(node)
        self.known.add(node.name)
        return node

    def visit_defaults(self, arguments: ast.arguments) -> None:
        arguments.defaults = [self.visit(value) for value in arguments.defaults]
        arguments.kw_defaults = [None if value is None else self.visit(value) for value in arguments.kw_defaults]

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        self.known.add(node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                _rewrite_nested(statement)
        self.known.add(node.name)
        return node

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        self.known |= set(stores([node]))
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        self.known |= set(stores([node]))
        return node

    # --- expressions ---------------------------------------------------------------------------------------------

    def unsure(self, name: str) -> bool:
        return name in self.suspects and name not in self.known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            if not self.thunks:
                self.known.add(node.id)
        elif self.unsure(node.id):
            return ast.copy_location(_call(_runtime("load"), node, ast.Constant(node.id)), node)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        if self.thunks:
            raise Unsupported("`:=` in an operand that not all lanes evaluate")
        node.value = self.visit(node.value)
        self.known.add(node.target.id)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self.visit_defaults(node.args)
        _rewrite_nested(node)
        return node

    def later(self, node: ast.expr) -> ast.expr:
        """An operand that not all lanes evaluate, as a function without arguments."""
        self.thunks += 1
        out = self.visit(node)
        self.thunks -= 1
        return _thunk(out)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        combine = "both" if isinstance(node.op, ast.And) else "either"
        return ast.copy_location(self.chain(combine, node.values), node)

    def chain(self, combine: str, values: list[ast.expr]) -> ast.expr:
        first = self.visit(values[0])
        if len(values) == 1:
            return first
        self.thunks += 1
        rest = self.chain(combine, values[1:])
        self.thunks -= 1
        return ast.copy_location(_call(_runtime(combine), first, _thunk(rest)), values[0])

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        out = _call(_runtime("choose"), test, self.later(node.body), self.later(node.orelse))
        return ast.copy_location(out, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        node.operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ast.copy_location(_call(_runtime("negation"), node.operand), node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) == 1:
            return self.comparison(node, self.visit(node.left), node.ops[0], self.visit(node.comparators[0]))
        middle = self.visit(node.comparators[0])
        again = middle
        if not isinstance(node.comparators[0], (ast.Name, ast.Constant)):
            temporary = self.new()
            middle = ast.NamedExpr(ast.Name(temporary, ast.Store()), middle)
            again = _name(temporary)
        first = self.comparison(node, self.visit(node.left), node.ops[0], middle)
        rest = ast.copy_location(ast.Compare(again, node.ops[1:], node.comparators[1:]), node)
        self.thunks += 1
        tail = self.visit_rest(rest)
        self.thunks -= 1
        return ast.copy_location(_call(_runtime("both"), first, _thunk(tail)), node)

    def visit_rest(self, node: ast.Compare) -> ast.expr:
        """The rest of a chain, whose left operand has been visited."""
        left, node.left = node.left, ast.Constant(None)
        if len(node.ops) == 1:
            return self.comparison(node, left, node.ops[0], self.visit(node.comparators[0]))
        out = self.visit_Compare(node)
        assert isinstance(out, ast.Call)
        first = out.args[0]
        if isinstance(first, ast.Compare):
            first.left = left
        else:
            assert isinstance(first, ast.Call)
            first.args[0] = left
        return out

    def comparison(self, node: ast.Compare, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
        if isinstance(op, (ast.In, ast.NotIn)):
            out = _call(_runtime("contains" if isinstance(op, ast.In) else "lacks"), left, right)
        else:
            out = ast.Compare(left, [op], [right])
        return ast.copy_location(out, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        func = node.func
        node.args = [self.visit(arg) for arg in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        if isinstance(func, ast.Name) and func.id in _NATIVE_CALLS:
            if func.id == "super" and not node.args and self.thunks:
                names = argument_names(self.node)
                if not names:
                    raise Unsupported("`super()` without an argument of the function")
                node.args = [_name("__class__"), _name(names[0])]
            return node
        node.func = ast.copy_location(_call(_runtime("fn"), self.visit(func)), func)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            node.value = ast.copy_location(_call(_runtime("changes"), self.visit(node.value)), node.value)
            node.slice = self.visit(node.slice)
            return node
        if _is_constant(node.slice):
            node.value = self.visit(node.value)
            return node
        value = self.visit(node.value)
        return ast.copy_location(_call(_runtime("item"), value, self.index(node.slice)), node)

    def index(self, node: ast.expr) -> ast.expr:
        """What stands in brackets, as an expression."""
        if isinstance(node, ast.Slice):
            parts = [
                ast.Constant(None) if part is None else self.visit(part) for part in (node.lower, node.upper, node.step)
            ]
            return ast.copy_location(_call(_runtime("slice"), *parts), node)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple([self.index(part) for part in node.elts], ast.Load()), node)
        return self.visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.value = self.visit(node.value)
        if not isinstance(node.ctx, ast.Load):
            node.value = ast.copy_location(_call(_runtime("changes"), node.value), node.value)
        return node

    def comprehension(self, node: Any) -> Any:
        if any(generator.is_async for generator in node.generators):
            raise Unsupported("an asynchronous comprehension")
        inner = {name for generator in node.generators for name in _targets(generator.target)}
        known = set(self.known)
        self.known |= inner
        node = self.generic_visit(node)
        self.known = known | (self.known - inner if not self.thunks else set())
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension


def _rewrite_nested(node: Function) -> None:
    """Rewrite a function inside the function; one that cannot be is left as it is, and is found out when called."""
    body = node.body if isinstance(node.body, list) else [node.body]
    if any(isinstance(part, _UNSUPPORTED) for part in inside(body)):
        return
    inner = [part for part in ast.walk(node) if isinstance(part, SCOPES) and part is not node]
    names = {part.id for scope in inner for part in ast.walk(scope) if isinstance(part, ast.Name)}
    twin = copy.deepcopy(node)
    try:
        rewrite(twin, frozenset(names))
    except Unsupported:
        return
    node.body = twin.body  # type: ignore[assignment]


def _after_docstring(body: list[ast.stmt]) -> int:
    first = body[0] if body else None
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str)


def _headers(statement: ast.stmt) -> list[ast.AST]:
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


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Slice):
        return all(part is None or _is_constant(part) for part in (node.lower, node.upper, node.step))
    if isinstance(node, ast.Tuple):
        return all(_is_constant(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    return isinstance(node, ast.Constant)


def _is_temporary(node: ast.expr) -> bool:
    """Whether nothing else can hold the value of an expression: that of a call, perhaps."""
    return not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))


def _targets(node: ast.expr) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
