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

from lanewise._control.rewriting.builders import (
    assign,
    attribute,
    bind,
    call,
    load_name,
    local_variables,
    once,
    runtime,
    strings,
    when,
)
from lanewise._control.rewriting.expressions import KEEPS, KINDS, NUMBERS, RETURNED, Expressions
from lanewise._control.rewriting.kinds import kinds
from lanewise._control.rewriting.scopes import (
    FORKS,
    SCOPES,
    changes_objects,
    declared,
    headers,
    inside,
    jumps_out,
    loop_variables,
    nested_return,
    settled,
    stores,
    writes_in_place,
)
from lanewise._control.rewriting.source import Function, Unsupported
from lanewise._core.again.unseen import ANSWERS

_FRAME = "_lw_f"
# Expressions whose value is a new container.
_NEW = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
# What may give a value of several kinds.
_MIXES = frozenset(("each", "keeping", "kept"))
_UNSUPPORTED = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)


def rewrite(node: Function, captured: frozenset[str]) -> None:
    """Rewrite a definition in place. `captured`: names that functions inside it take from it.

    Raises:
        Unsupported: It does what cannot be rewritten.
    """
    _Rewriter(node, captured).run()


# --- rewriting -------------------------------------------------------------------------------------------------------


class _Rewriter(Expressions):
    """One function.

    Attributes:
        outer: Names that belong to a scope around it, and are assigned.
        closed: Names that functions inside see, and that lanes which go on may assign after others have returned.
        places: The loops and branches around a statement, innermost last: the loop's variable, None for a branch.
        numbers: Names whose Python numbers no tensor can stand for where other lanes have one.
        returned: Names for which that goes where what the function returns may be asked for its kind.
        apart_here: By id: such assignments to variables that functions inside see: lanes go on that have one kind.
        passing: By the id of each `for` that is not around the statement: its variables, which nobody else reads. What
            they hold once it is over is that of some lanes.
        keeping: By id: assignments of values that may be of several kinds.
    """

    def __init__(self, node: Function, captured: frozenset[str]) -> None:
        super().__init__(node)
        self.captured = captured
        body: list[ast.stmt] = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
        self.body = body
        self.outer = declared(body)
        self.changing = changes_objects(body)
        self.writing = writes_in_place(body)
        self.simple = not nested_return(body)
        self.forks = any(isinstance(part, FORKS) for part in inside(body))
        joining = [part for part in inside(body) if isinstance(part, (*FORKS, ast.Try, ast.Match))]
        self.suspects = set(stores(joining)) - self.outer
        self.mixing, self.keeping, self.numbers, self.returned = kinds(body, node.args)
        self.apart_here: set[int] = set()
        self.mixing -= self.outer | captured
        for statement in [part for part in inside(body) if id(part) in self.keeping]:
            if (names := set(stores([statement]))) & (self.outer | captured):
                self.keeping.remove(id(statement))
                if names & self.numbers:
                    self.apart_here.add(id(statement))
            else:
                self.suspects |= set(stores([statement]))
        self.closed = () if self.simple else tuple(sorted(captured & set(stores(body)) - self.outer))
        self.places: list[str | None] = []
        self.passing = {loop: names - captured for loop, names in loop_variables(body).items()}

    def run(self) -> None:
        for part in inside(self.body):
            if isinstance(part, _UNSUPPORTED) or type(part).__name__ == "TryStar":
                raise Unsupported(f"it contains `{type(part).__name__}`", line=getattr(part, "lineno", 0))
            if isinstance(part, ast.Try) and part.finalbody:
                guarded = [*part.body, *part.handlers, *part.orelse, *part.finalbody]
                left = jumps_out(guarded)
                if left and not (self.simple and left == {ast.Return}):
                    jump = next(each for each in inside(guarded) if isinstance(each, tuple(left)))
                    raise Unsupported(
                        "some lanes may leave a `try` that has a `finally` before others do",
                        "y = ...  # a variable, in place of the jump; and the jump after the `try`",
                        jump.lineno,  # type: ignore[attr-defined]
                    )
        if isinstance(self.node, ast.Lambda):
            self.node.body = self.given_back(self.node.body)
            return
        body = self.block(self.body)
        if not self.simple:
            body.extend(self.leave(ast.Constant(None)))
        if self.forks:
            captured = sorted(self.captured & self.suspects)
            names = [captured, list(self.closed)]
            names += [sorted(self.suspects & shown) for shown in (self.numbers, self.returned)]
            body.insert(_after_docstring(body), assign(_FRAME, call(runtime("Frame"), *map(strings, names))))
        self.node.body = body

    def bound(self, nodes: list[Any]) -> list[str]:
        left = self.outer.union(*self.passing.values())
        return [name for name in stores(nodes) if name not in left]

    def jump(self) -> list[ast.stmt]:
        return [ast.Continue()] if self.places else self.leave(None)

    def leave_if_dead(self) -> ast.stmt:
        return when(attribute(_FRAME, "dead"), *self.jump())

    def leave(self, value: ast.expr | None) -> list[ast.stmt]:
        """The end of the function, for the last lanes in it, or (None) where all have returned."""
        values = [] if value is None else [value]
        end = call(attribute(_FRAME, "result" if value is None else "finish"))
        if not self.closed:
            return [ast.Return(ast.Call(end.func, values, []))]
        names = [*self.closed, "_lw_r"]
        settled = bind(names, call(attribute(_FRAME, "settle"), local_variables()))
        return [
            *[assign("_lw_r", value) for value in values],
            when(call(attribute(_FRAME, "lends"), *[load_name("_lw_r") for _ in values]), settled, _return_noted()),
            ast.Return(ast.Call(end.func, [load_name("_lw_r") for _ in values], [])),
        ]

    # --- statements ----------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            new: list[ast.stmt] = []
            if self.outer and not isinstance(statement, (ast.Global, ast.Nonlocal)):
                if self.outer & set(stores(headers(statement))):
                    new.append(ast.Expr(call(runtime("changes_outside"))))
            visited = self.visit(statement)
            new.extend(visited if isinstance(visited, list) else [visited])
            out.extend(ast.copy_location(part, statement) for part in new)
            if isinstance(statement, (ast.Return, ast.Break, ast.Continue)):
                break
        return out

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        names = self.bound([*node.body, *node.orelse])
        jumps = jumps_out([node])  # of what is not rewritten yet, which is done in place inside a `try`
        branch = self.new()
        test = self.kept(node.test)
        before = set(self.known)
        self.places.append(None)
        body = self.block(node.body)
        self.known = set(before)
        orelse = self.block(node.orelse)
        self.places.pop()
        self.known = before - set(names)
        parts = attribute(branch, "parts")
        sides: list[ast.stmt] = []
        if names:
            sides.append(when(parts, bind(names, call(attribute(branch, "turn"), strings(names), local_variables()))))
        sides.append(ast.copy_location(ast.If(load_name("_lw_b"), body, orelse), node))
        sides.append(when(parts, ast.Expr(call(attribute(branch, "side"), local_variables()))))
        out = [
            assign(branch, call(runtime("branch"), load_name(_FRAME), test)),
            ast.For(ast.Name("_lw_b", ast.Store()), load_name(branch), sides, []),
            when(parts, bind(names, call(attribute(branch, "join")))),
        ]
        if jumps:
            out.append(self.leave_if_dead())
        return out

    def visit_Assert(self, node: ast.Assert) -> Any:
        if not __debug__:
            return ast.Pass()
        message = [] if node.msg is None else [node.msg]
        error = ast.Call(runtime("AssertionError"), message, [])
        fail = ast.copy_location(ast.Raise(error, None), node)
        return self.visit_If(ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [fail], []), node))

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        loop = self.new()
        names = self.bound([node.test, *node.body, *node.orelse])
        jumps = jumps_out(node.body), jumps_out(node.orelse)
        before = self.enter_loop(names, [ast.Expr(node.test), *node.body], node.body)
        test = self.kept(node.test)
        over = call(attribute(loop, "over"), load_name("_lw_t"), local_variables())
        going = ast.Compare(load_name("_lw_t"), [ast.IsNot()], [ast.Constant(True)])
        head = [assign("_lw_t", test), when(ast.BoolOp(ast.And(), [going, over]), ast.Break())]
        body = self.loop_body(loop, names, node.body)
        around = ast.While(ast.Constant(True), head + body, [])
        return [self.open_loop(loop, names), around, *self.close_loop(loop, names, node.orelse, jumps, before)]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        loop = self.new()
        names = self.bound([node.target, *node.body, *node.orelse])
        jumps = jumps_out(node.body), jumps_out(node.orelse)
        if self.outer & set(stores([node.target])):
            raise Unsupported(
                "the variable of a `for` belongs to a scope around the function",
                "for i in items: name = i  # with a variable of its own",
                node.lineno,
            )
        items = call(attribute(loop, "items"), self.visit(node.iter), ast.Constant(_is_temporary(node.iter)))
        start = ast.copy_location(ast.Assign([node.target], load_name("_lw_i")), node)
        before = self.enter_loop(names, [start, *node.body], node.body)
        over = call(attribute(loop, "over"), attribute(loop, "more"), local_variables())
        head = [when(ast.BoolOp(ast.And(), [attribute(loop, "asks"), over]), ast.Break()), *self.block([start])]
        passing = self.passing.pop(id(node), set())
        body = self.loop_body(loop, names, node.body)
        self.passing[id(node)] = passing
        around = ast.For(ast.Name("_lw_i", ast.Store()), items, head + body, [])
        return [self.open_loop(loop, names), around, *self.close_loop(loop, names, node.orelse, jumps, before)]

    def open_loop(self, loop: str, names: list[str]) -> ast.stmt:
        return assign(loop, call(runtime("Loop"), load_name(_FRAME), strings(names)))

    def enter_loop(self, names: list[str], each: list[ast.stmt], body: list[ast.stmt]) -> set[str]:
        """Set what is known where a round of the loop begins; returns what was known before."""
        before = set(self.known)
        if ast.Continue in jumps_out(body):
            self.known -= set(names)
        else:
            self.known &= settled(each, self.known, self.keeping)
        return before

    def loop_body(self, loop: str, names: list[str], body: list[ast.stmt]) -> list[ast.stmt]:
        kinds = jumps_out(body)
        self.places.append(loop)
        new = self.block(body)
        self.places.pop()
        if not kinds:
            return new
        out: list[ast.stmt] = [once(new)]
        if ast.Continue in kinds:
            out.append(when(attribute(loop, "waits"), bind(names, call(attribute(loop, "rejoin"), local_variables()))))
        out.append(when(attribute(_FRAME, "dead"), ast.Break()))
        return out

    def close_loop(
        self, loop: str, names: list[str], orelse: list[ast.stmt], jumps: tuple[set[type], set[type]], before: set[str]
    ) -> list[ast.stmt]:
        kinds, last = jumps
        self.known = before - set(names)
        out: list[ast.stmt] = []
        parts = attribute(loop, "parts")
        if orelse:
            out.append(when(parts, bind(names, call(attribute(loop, "exhausted"), local_variables()))))
            self.places.append(None)
            orelse = self.block(orelse)
            self.places.pop()
            out.append(once([when(attribute(_FRAME, "dead"), ast.Continue()), *orelse]))
            self.known -= set(names)
        if ast.Break in kinds:
            out.append(when(attribute(loop, "broke"), ast.Expr(call(attribute(loop, "revive")))))
        out.append(when(parts, bind(names, call(attribute(loop, "join"), local_variables()))))
        if ast.Return in kinds or last:
            out.append(self.leave_if_dead())
        return out

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        return [ast.Expr(call(attribute(self.innermost_loop(), "leave"), local_variables())), ast.Continue()]

    def visit_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        if self.places[-1] is not None:
            return [node]
        return [ast.Expr(call(attribute(self.innermost_loop(), "wait"), local_variables())), ast.Continue()]

    def innermost_loop(self) -> str:
        return next(place for place in reversed(self.places) if place is not None)

    def visit_Return(self, node: ast.Return) -> Any:
        if self.simple:
            return ast.Return(ast.Constant(None) if node.value is None else self.given_back(node.value))
        self.keeps = RETURNED
        value = ast.Constant(None) if node.value is None else self.kept(node.value)
        self.keeps = NUMBERS
        if not self.places:
            return self.leave(value)
        variables = [local_variables()] if self.closed else []
        return [
            assign("_lw_r", value),
            when(call(attribute(_FRAME, "returns"), load_name("_lw_r"), *variables), _return_noted()),
            *self.jump(),
        ]

    def given_back(self, node: ast.expr) -> ast.expr:
        """What a function returns whose lanes return together."""
        self.keeps = RETURNED
        value = self.kept(node)
        self.keeps = NUMBERS
        mixes = isinstance(node, (ast.IfExp, ast.BoolOp)) or _may_be_mixed(value)
        return ast.copy_location(call(runtime("result"), value), node) if mixes else value

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        if node.exc is not None:
            node.exc = self.visit(node.exc)
        if node.cause is not None:
            node.cause = self.visit(node.cause)
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        for item in node.items:
            item.context_expr = call(runtime("context"), self.visit(item.context_expr))
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
            control = ast.ExceptHandler(runtime("CONTROL"), None, [ast.Raise(None, None)])
            node.handlers.insert(0, ast.copy_location(control, node))
        self.known = before - unsure
        node.finalbody = self.block(node.finalbody)
        self.known = before - unsure
        return node

    def visit_Match(self, node: ast.Match) -> ast.stmt:
        subject = node.subject
        if isinstance(subject, ast.Name) and self.unsure(subject.id):
            node.subject = call(runtime("one_kind"), subject, ast.Constant(subject.id))
        else:
            node.subject = call(runtime("one_kind"), self.visit(subject), ast.Constant(""))
        before = set(self.known)
        unsure = set(stores([node]))
        for case in node.cases:
            self.known = before | set(stores([case.pattern]))
            case.pattern = _Patterns().visit(case.pattern)
            if case.guard is not None:
                case.guard = self.visit(case.guard)
            case.body = self.block(case.body)
        self.known = before - unsure
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        if id(node) in self.keeping:
            names = set(stores([node]))
            self.keeps = NUMBERS if names & self.numbers else RETURNED if names & self.returned else KINDS
            node.value = self.kept_parts(node.value)
            if self.keeps == KINDS and _calls(node.value, "keeping"):
                node.value = ast.copy_location(call(runtime("whole"), node.value), node.value)
            self.keeps = NUMBERS
            node.targets = [self.visit(target) for target in node.targets]
            self.known -= names
            return node
        if id(node) in self.apart_here and isinstance(node.targets[0], ast.Name):
            value = call(runtime("one_kind"), self.kept(node.value), ast.Constant(node.targets[0].id))
        else:
            value = self.visit(node.value)
        if isinstance(node.value, _NEW):
            value = ast.copy_location(call(runtime("made"), value), node.value)
        if len(node.targets) == 1 and isinstance(target := node.targets[0], ast.Subscript):
            # The value comes first, as it does in the statement.
            place = self.visit(target.value)
            return ast.Expr(call(runtime("set_item"), value, place, self.index(target.slice)))
        node.value = value
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def kept_parts(self, value: ast.expr) -> ast.expr:
        """The values that an assignment gives to names, which may each be of several kinds."""
        if not isinstance(value, ast.Tuple):
            return self.kept(value)
        return ast.copy_location(ast.Tuple([self.kept(part) for part in value.elts], ast.Load()), value)

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
        if id(node) in self.keeping:
            function = ast.Constant(f"i{type(node.op).__name__.lower()}")
            held, value = self.kept(ast.Name(target.id, ast.Load())), self.kept(node.value)
            self.known.discard(target.id)
            return ast.copy_location(assign(target.id, call(runtime("augmented"), function, held, value)), node)
        node.value = self.visit(node.value)
        out: list[ast.stmt] = []
        if id(node) in self.apart_here:
            out.append(assign(target.id, call(runtime("one_kind"), load_name(target.id), ast.Constant(target.id))))
        elif self.unsure(target.id):
            out.append(assign(target.id, call(runtime("load"), load_name(target.id), ast.Constant(target.id))))
        out.append(ast.Expr(call(runtime("changes"), load_name(target.id))))
        self.known.add(target.id)
        return [*out, node]

    def visit_Delete(self, node: ast.Delete) -> ast.stmt:
        node.targets = [self.visit(target) for target in node.targets]
        self.known -= set(stores([node]))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        self.visit_defaults(node.args)
        self.nested(node)
        self.known.add(node.name)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        self.known.add(node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name not in ANSWERS:
                self.nested(statement)
        self.known.add(node.name)
        return node

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        self.known |= set(stores([node]))
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        self.known |= set(stores([node]))
        return node

    def nested(self, node: Function) -> None:
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


class _Patterns(ast.NodeTransformer):
    """The patterns of a `match`: `True` and `False` are compared as numbers of lanes are."""

    def visit_MatchSingleton(self, node: ast.MatchSingleton) -> ast.pattern:
        if node.value is None:
            return node
        return ast.copy_location(ast.MatchValue(runtime(f"singleton_{str(node.value).lower()}")), node)


def _calls(value: ast.expr, *names: str) -> bool:
    """Whether rewritten code calls one of some functions of flow.py."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in names


def _may_be_mixed(value: ast.expr) -> bool:
    """Whether a rewritten expression may be of several kinds."""
    fused = _calls(value, "fused") and value.args[KEEPS].value  # type: ignore[attr-defined]
    return bool(fused) or _calls(value, *_MIXES)


def _return_noted() -> ast.stmt:
    return ast.Return(call(runtime("result"), load_name("_lw_r")))


def _after_docstring(body: list[ast.stmt]) -> int:
    first = body[0] if body else None
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str)


def _is_temporary(node: ast.expr) -> bool:
    """Whether nothing else can hold the value of an expression: that of a call, perhaps."""
    return not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
