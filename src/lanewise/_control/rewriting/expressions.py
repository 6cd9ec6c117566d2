"""The expressions of a function, rewritten so that lanes can take different ways through them."""

import ast
import copy
from typing import Any

from lanewise._control.rewriting.arithmetic import arithmetic
from lanewise._control.rewriting.builders import call, function, load_name, runtime, thunk
from lanewise._control.rewriting.kinds import calls_user
from lanewise._control.rewriting.number_kinds import gives_entry, is_choice, tells
from lanewise._control.rewriting.scopes import inside
from lanewise._control.rewriting.source import Function, Unsupported, argument_names
from lanewise._core.again.effects import MUTATING

_NATIVE_CALLS = frozenset({"super", "locals", "globals", "vars", "dir"})
# Methods of what a mask picks that do not need it picked (selections.py).
REDUCTIONS = frozenset({"sum", "mean", "prod", "any", "all", "numel"})
# Functions that make one number of a list or a generator, whose condition need not part lanes then (chosen.py).
_OF_LISTS = frozenset(
    "len sum max min any all fsum prod mean fmean median median_low median_high stdev pstdev variance pvariance".split()
)

# What may come out of an expression. `CARRIED`: numbers, or numbers and tensors, each in lanes of their own. `NUMBERS`:
# anything. `KINDS`: anything, but a tensor stands for numbers. `WHOLE`: a tensor that does. `RETURNED`: what the code
# takes that the function returns to.
CARRIED, KINDS, NUMBERS, RETURNED, WHOLE = 0, 1, 2, 3, 4

# Comparisons that have an answer for each lane, whatever it has there.
_ASKS = {
    ast.Is: "is_",
    ast.IsNot: "is_not",
    ast.Eq: "equal",
    ast.NotEq: "unequal",
    ast.In: "contains",
    ast.NotIn: "lacks",
}
# Which argument of `fused` says whether what it gives may be of several kinds.
KEEPS = 4
# What is in an expression keeps it from being computed for one value of a variable after the other.
_APART = (ast.NamedExpr, ast.Lambda, ast.GeneratorExp)


class Expressions(ast.NodeTransformer):
    """Rewrites expressions.

    Attributes:
        node: The function.
        suspects: Names that may hold different things in different lanes at some point.
        known: Names that surely do not, here.
        mixing: Names that may hold things of different kinds, such as None, in different lanes: what they are part of
            is computed for each.
        thunks: Number of operands around, which not all lanes evaluate.
        count: Number of names that were made up.
        changing: Whether the function may change a list, a dict or an attribute.
        apart: Whether the operations of an expression are to go one by one.
        writing: Whether the function may write to tensors in place.
        keeps: What an expression may give of several kinds: `KINDS`, or `NUMBERS` and tensors, too.
    """

    def __init__(self, node: Function) -> None:
        self.node = node
        self.suspects: set[str] = set()
        self.known = set(argument_names(node))
        self.mixing: set[str] = set()
        self.thunks = 0
        self.count = 0
        self.changing = False
        self.apart = False
        self.writing = False
        self.keeps = NUMBERS

    def new(self) -> str:
        self.count += 1
        return f"_lw_{self.count}"

    def visit_defaults(self, arguments: ast.arguments) -> None:
        arguments.defaults = [self.visit(value) for value in arguments.defaults]
        arguments.kw_defaults = [None if value is None else self.visit(value) for value in arguments.kw_defaults]

    def nested(self, node: Function) -> None:
        """Rewrite a function inside the function."""
        raise NotImplementedError

    def unsure(self, name: str) -> bool:
        return name in self.suspects and name not in self.known

    def may_mix(self, node: ast.AST) -> bool:
        """Whether an operand may be a variable that holds things of different kinds here."""
        return isinstance(node, ast.Name) and self.unsure(node.id) and node.id in self.mixing

    def may_be_mixed(self, node: ast.expr, entries: bool) -> bool:
        """Whether an expression that is no name may give things of different kinds (`entries`: as `max` may)."""
        if isinstance(node, ast.Name):
            return False
        return calls_user(node) or is_choice(node, entries) or any(map(self.may_mix, ast.walk(node)))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            if not self.thunks:
                self.known.add(node.id)
        elif self.unsure(node.id):
            return ast.copy_location(call(runtime("load"), node, ast.Constant(node.id)), node)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        if self.thunks:
            raise Unsupported(
                "`:=` stands in an operand that not all lanes evaluate",
                "name = value  # as a statement before",
                node.lineno,
            )
        node.value = self.visit(node.value)
        self.known.add(node.target.id)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self.visit_defaults(node.args)
        self.nested(node)
        return node

    def kept(self, node: ast.expr) -> ast.expr:
        """An expression whose value may be a Mixed."""
        if isinstance(node, ast.Name) and self.unsure(node.id):
            return ast.copy_location(call(runtime("kept"), node, ast.Constant(node.id)), node)
        if isinstance(node, ast.IfExp):
            return self.visit_IfExp(node, True)
        if isinstance(node, ast.BoolOp):
            return self.visit_BoolOp(node, True)
        if isinstance(node, ast.Call):
            return self.visit_Call(node, True)
        if isinstance(node, ast.BinOp):
            return self.visit_BinOp(node, True)
        if isinstance(node, ast.UnaryOp):
            return self.visit_UnaryOp(node, True)
        if isinstance(node, ast.Compare):
            return self.visit_Compare(node, True, True)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return self.for_each_value(node, [node.value], True) or self.visit(node)
        return self.visit(node)

    def if_kept(self, keep: bool) -> list[ast.expr]:
        """The last argument of what may give a Mixed."""
        return [ast.Constant(self.keeps)] if keep else []

    def for_each_value(self, node: ast.expr, operands: list[ast.expr], keep: bool = False) -> ast.expr | None:
        """An expression as one that is computed for each of the values of its operands; None if it need not be.

        Calls among the operands are carried out before, once.
        """
        parts = [part for operand in operands for part in _entries(operand)]
        names = {part.id for part in parts if isinstance(part, ast.Name) and self.may_mix(part)}
        keeps = isinstance(node, (ast.BinOp, ast.UnaryOp)) or gives_entry(node)
        apart = tells(node) or (keep and self.keeps >= NUMBERS and keeps)
        telling = {id(part) for part in parts if self.may_be_mixed(part, tells(node))} if apart else set()
        if not (names or telling) or _acts(node) or _stays_whole(node):
            return None
        if isinstance(node, ast.Compare):
            parts = [node.left, node.comparators[0]]  # what comes after them need not be asked
        before = {
            self.new(): part
            for part in parts
            if id(part) in telling or any(isinstance(below, ast.Call) for below in ast.walk(part))
        }
        values = [call(runtime("kept"), load_name(name), ast.Constant(name)) for name in sorted(names)]
        around, self.keeps = self.keeps, min(self.keeps, NUMBERS)
        values += [self.kept(copy.deepcopy(part)) for part in before.values()]
        self.keeps = around
        known = set(self.known)
        self.known |= names
        self.thunks += 1
        rest: Any = _Put({id(part): name for name, part in before.items()}).visit(node)
        body = self.kept(rest) if keep else self.visit(rest)
        self.thunks -= 1
        self.known = known
        run = function([*sorted(names), *before], body)
        return ast.copy_location(
            call(runtime("each"), run, ast.Constant(min(self.keeps, NUMBERS) if keep else 0), *values), node
        )

    def later(self, node: ast.expr, keep: bool = False) -> ast.expr:
        """An operand that not all lanes evaluate, as a function without arguments."""
        self.thunks += 1
        out = self.kept(node) if keep else self.visit(node)
        self.thunks -= 1
        return thunk(out)

    def visit_BoolOp(self, node: ast.BoolOp, keep: bool = False) -> ast.expr:
        combine = "both" if isinstance(node.op, ast.And) else "either"
        return ast.copy_location(self.chain(combine, node.values, keep), node)

    def chain(self, combine: str, values: list[ast.expr], keep: bool) -> ast.expr:
        if len(values) == 1:
            return self.kept(values[0]) if keep else self.visit(values[0])
        kept = self.if_kept(keep)
        around, self.keeps = self.keeps, min(self.keeps, NUMBERS)
        first = self.kept(values[0])
        self.thunks += 1
        rest = self.chain(combine, values[1:], keep)
        self.thunks -= 1
        self.keeps = around
        return ast.copy_location(call(runtime(combine), first, thunk(rest), *kept), values[0])

    def visit_IfExp(self, node: ast.IfExp, keep: bool = False) -> ast.expr:
        test = self.kept(node.test)
        kept = self.if_kept(keep)
        around, self.keeps = self.keeps, min(self.keeps, NUMBERS)
        sides = self.later(node.body, keep), self.later(node.orelse, keep)
        self.keeps = around
        return ast.copy_location(call(runtime("choose"), test, *sides, *kept), node)

    def fused(self, node: ast.expr, keep: bool) -> ast.expr | None:
        """An expression of elementwise operations, to be computed as a whole; None if it does anything else."""
        found = None if self.apart else arithmetic(node)
        if found is None or (
            (tells(node) or keep) and any(is_choice(operand, tells(node)) for operand in found.operands.values())
        ):
            return None
        keep = keep and any(map(self.may_mix, found.operands.values()))
        values = [
            self.kept(operand) if isinstance(operand, ast.Name) else self.visit(operand)
            for operand in found.operands.values()
        ]
        kinds = isinstance(node, ast.Compare), self.writing, min(self.keeps, NUMBERS) if keep else 0
        operations: list[ast.expr] = [function(list(found.operands), found.body)]
        if found.calls:
            self.apart = True
            operations.append(function(list(found.operands), self.visit(copy.deepcopy(found.body))))
            self.apart = False
        else:
            operations.append(ast.Constant(None))
        return ast.copy_location(call(runtime("fused"), *operations, *map(ast.Constant, kinds), *values), node)

    def visit_BinOp(self, node: ast.BinOp, keep: bool = False) -> ast.expr:
        out = self.fused(node, keep) or self.for_each_value(node, [node.left, node.right], keep)
        return out or self.generic_visit(node)  # type: ignore[return-value]

    def visit_UnaryOp(self, node: ast.UnaryOp, keep: bool = False) -> ast.expr:
        if (out := self.fused(node, keep)) is not None:
            return out
        if isinstance(node.op, ast.Not):
            return ast.copy_location(call(runtime("negation"), self.kept(node.operand)), node)
        if (out := self.for_each_value(node, [node.operand], keep)) is not None:
            return out
        node.operand = self.visit(node.operand)
        return node

    def visit_Compare(self, node: ast.Compare, whole: bool = True, keep: bool = False) -> ast.expr:
        if (out := self.fused(node, keep)) is not None:
            return out
        sides = [node.left, *node.comparators]
        if len(node.ops) == 1 and (asks := _ASKS.get(type(node.ops[0]))) is not None and self.may_ask(node):
            return ast.copy_location(call(runtime(asks), *map(self.kept, sides)), node)
        if whole and (out := self.for_each_value(node, sides, keep)) is not None:
            return out
        if len(node.ops) == 1:
            return self.comparison(node, self.visit(node.left), node.ops[0], self.visit(node.comparators[0]))
        middle = self.visit(node.comparators[0])
        again = middle
        if not isinstance(node.comparators[0], (ast.Name, ast.Constant)):
            temporary = self.new()
            middle = ast.NamedExpr(ast.Name(temporary, ast.Store()), middle)
            again = load_name(temporary)
        first = self.comparison(node, self.visit(node.left), node.ops[0], middle)
        rest = ast.copy_location(ast.Compare(again, node.ops[1:], node.comparators[1:]), node)
        self.thunks += 1
        tail = self.visit_rest(rest)
        self.thunks -= 1
        return ast.copy_location(call(runtime("both"), first, thunk(tail)), node)

    def may_ask(self, node: ast.Compare) -> bool:
        """Whether a comparison may be a question to each lane about the kind of what it has."""
        by_identity = isinstance(node.ops[0], (ast.Is, ast.IsNot))
        for side in (node.left, node.comparators[0]):
            if isinstance(side, (ast.Attribute, ast.Subscript)) and isinstance(side.value, ast.Name):
                side = side.value
            if isinstance(side, ast.Name) and self.unsure(side.id):
                if by_identity or side.id in self.mixing:
                    return True
        return False

    def visit_rest(self, node: ast.Compare) -> ast.expr:
        """The rest of a chain, whose left operand has been visited."""
        left, node.left = node.left, ast.Constant(None)
        if len(node.ops) == 1:
            return self.comparison(node, left, node.ops[0], self.visit(node.comparators[0]))
        out = self.visit_Compare(node, False)
        assert isinstance(out, ast.Call)
        first = out.args[0]
        if isinstance(first, ast.Compare):
            first.left = left
        else:
            assert isinstance(first, ast.Call)
            first.args[0] = left
        return out

    def comparison(self, node: ast.Compare, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
        by_identity = isinstance(op, (ast.Is, ast.IsNot)) and not (_is_no_number(left) or _is_no_number(right))
        if by_identity or isinstance(op, (ast.In, ast.NotIn)):
            out: ast.expr = call(runtime(_ASKS[type(op)]), left, right)
        else:
            out = ast.Compare(left, [op], [right])
        return ast.copy_location(out, node)

    def visit_Call(self, node: ast.Call, keep: bool = False) -> ast.expr:
        if (out := self.fused(node, keep)) is not None:
            return out
        owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        if (out := self.for_each_value(node, [owner, *node.args, *_values_of(node.keywords)], keep)) is not None:
            return out
        if _is_filtered(node):
            return self.of_chosen(node)
        func, returns_kinds = node.func, calls_user(node) or gives_entry(node)
        node.args = [self.visit(arg) for arg in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        if isinstance(func, ast.Name) and func.id in _NATIVE_CALLS:
            if func.id == "super" and not node.args and self.thunks:
                names = argument_names(self.node)
                if not names:
                    raise Unsupported(
                        "`super()` in a function without arguments", "super(Class, instance)", node.lineno
                    )
                node.args = [load_name("__class__"), load_name(names[0])]
            return node
        if isinstance(func, ast.Attribute) and func.attr in REDUCTIONS and isinstance(func.value, ast.Subscript):
            # Of `x[mask].sum()`, `x[mask]` is not needed.
            func.value = self.visit_Subscript(func.value, "picked")
            node.func = ast.copy_location(call(runtime("fn"), func), func)
            return node
        node.func = ast.copy_location(call(runtime("fn"), self.visit(func)), func)
        if keep and returns_kinds:
            node.args.insert(0, node.func)
            node.func = runtime("keeping")
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        shown = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return self.for_each_value(node, shown) or self.generic_visit(node)  # type: ignore[return-value]

    def of_chosen(self, node: ast.Call) -> ast.expr:
        """`sum(v for v in values if v > 0)`, with an entry that is absent for each that is left out."""
        entries: Any = node.args[0]
        *_, last = entries.generators
        test = last.ifs[0] if len(last.ifs) == 1 else ast.BoolOp(ast.And(), last.ifs)
        last.ifs = []
        entry = ast.IfExp(test, entries.elt, runtime("ABSENT"))
        chosen = ast.copy_location(ast.GeneratorExp(entry, entries.generators), entries)
        func = node.func
        if isinstance(func, ast.Name) and func.id in ("any", "all"):
            first = call(runtime("for_any"), self.visit(copy.deepcopy(func)), self.comprehension(chosen, True))
            node.args = [ast.copy_location(first, entries)]
            node.func = ast.copy_location(call(runtime("fn"), self.visit(func)), func)
            return node
        listed = ast.Constant(isinstance(entries, ast.ListComp))
        called = ast.copy_location(call(runtime("fn"), self.visit(func)), func)
        node.func = runtime("of_chosen")
        node.args = [called, listed, self.comprehension(chosen, True), *[self.visit(arg) for arg in node.args[1:]]]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        return node

    def visit_Subscript(self, node: ast.Subscript, get: str = "entry_at") -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            node.value = ast.copy_location(call(runtime("changes"), self.visit(node.value)), node.value)
            node.slice = self.visit(node.slice)
            return node
        if (out := self.for_each_value(node, [node.value, node.slice])) is not None:
            return out
        if _is_constant(node.slice) and not isinstance(node.slice, ast.Constant):
            node.value = self.visit(node.value)
            return node
        value = self.visit(node.value)
        return ast.copy_location(call(runtime(get), value, self.index(node.slice)), node)

    def index(self, node: ast.expr) -> ast.expr:
        """What stands in brackets, as an expression."""
        if isinstance(node, ast.Slice):
            parts = [
                ast.Constant(None) if part is None else self.visit(part) for part in (node.lower, node.upper, node.step)
            ]
            return ast.copy_location(call(runtime("slice"), *parts), node)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple([self.index(part) for part in node.elts], ast.Load()), node)
        return self.visit(node)

    def key(self, node: ast.expr) -> ast.expr:
        """An expression whose value is to be a key of a dict or an entry of a set, once visited."""
        return node if isinstance(node, ast.Constant) else ast.copy_location(call(runtime("key"), node), node)

    def made(self, node: ast.expr) -> ast.expr:
        """A list, set or dict, which the lanes that make it may change."""
        return ast.copy_location(call(runtime("made"), node), node) if self.changing else node

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        return self.made(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        if (out := self.for_each_value(node, [key for key in node.keys if key is not None])) is not None:
            return out
        self.generic_visit(node)
        node.keys = [None if key is None else self.key(key) for key in node.keys]
        return self.made(node)

    def visit_Set(self, node: ast.Set) -> ast.expr:
        if (out := self.for_each_value(node, node.elts)) is not None:
            return out
        self.generic_visit(node)
        node.elts = [part if isinstance(part, ast.Starred) else self.key(part) for part in node.elts]
        return self.made(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and (out := self.for_each_value(node, [node.value])) is not None:
            return out
        node.value = self.visit(node.value)
        if not isinstance(node.ctx, ast.Load):
            node.value = ast.copy_location(call(runtime("changes"), node.value, ast.Constant(True)), node.value)
        elif node.attr == "grad":
            return ast.copy_location(call(runtime("gradient"), node.value), node)
        return node

    def comprehension(self, node: Any, keep: bool = False) -> Any:
        if any(generator.is_async for generator in node.generators):
            raise Unsupported("it has an asynchronous comprehension", "a loop of statements", node.lineno)
        inner = {name for generator in node.generators for name in _targets(generator.target)}
        known = set(self.known)
        self.known |= inner
        if keep:
            node.generators = [self.visit(generator) for generator in node.generators]
            node.elt = self.kept(node.elt)
        else:
            node = self.generic_visit(node)
        if isinstance(node, ast.DictComp):
            node.key = self.key(node.key)
        elif isinstance(node, ast.SetComp):
            node.elt = self.key(node.elt)
        self.known = known | (self.known - inner if not self.thunks else set())
        return node if isinstance(node, ast.GeneratorExp) else self.made(node)

    visit_ListComp = visit_SetComp = visit_DictComp = comprehension

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        # What takes its entries, such as `any`, may be done in some lanes while it goes on for others.
        for part in inside([node]):
            if isinstance(part, ast.NamedExpr):
                raise Unsupported("`:=` stands in a generator", "a loop of statements", part.lineno)
        return self.comprehension(node)


def _is_filtered(node: ast.Call) -> bool:
    """Whether a function makes one number of a comprehension of which only the last `for` has conditions."""
    name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
    entries = node.args[0] if node.args else None
    if name not in _OF_LISTS or not isinstance(entries, (ast.ListComp, ast.GeneratorExp)):
        return False
    *others, last = entries.generators
    if not last.ifs or any(each.ifs for each in others) or (name in ("any", "all") and len(node.args) > 1):
        return False
    return not any(isinstance(part, ast.NamedExpr) for part in ast.walk(entries))


def _values_of(keywords: list[ast.keyword]) -> list[ast.expr]:
    return [keyword.value for keyword in keywords]


def _acts(node: ast.expr) -> bool:
    """Whether an expression is for what it does: it changes a container, or prints."""
    func = node.func if isinstance(node, ast.Call) else None
    return (isinstance(func, ast.Attribute) and func.attr in MUTATING) or (
        isinstance(func, ast.Name) and func.id == "print"
    )


def _stays_whole(node: ast.expr) -> bool:
    """Whether something in an expression keeps it from being computed for one value after the other."""
    return any(
        isinstance(part, _APART) or (isinstance(part, ast.Name) and part.id in _NATIVE_CALLS) for part in ast.walk(node)
    )


def _entries(operand: ast.expr) -> list[ast.expr]:
    """What an expression takes as an operand: the entries of a list, one by one."""
    parts = operand.elts if isinstance(operand, (ast.List, ast.Tuple)) else [operand]
    return [part for part in parts if not isinstance(part, ast.Starred)]


class _Put(ast.NodeTransformer):
    """Puts names in place of expressions, given by id."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> ast.AST:
        name = self.names.get(id(node))
        return self.generic_visit(node) if name is None else ast.copy_location(load_name(name), node)


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Slice):
        return all(part is None or _is_constant(part) for part in (node.lower, node.upper, node.step))
    if isinstance(node, ast.Tuple):
        return all(_is_constant(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    return isinstance(node, ast.Constant)


def _is_no_number(node: ast.expr) -> bool:
    """Whether it is plain to see, as in `x is None`."""
    return isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, complex))


def _targets(node: ast.expr) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
