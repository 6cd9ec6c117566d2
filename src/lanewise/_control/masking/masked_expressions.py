"""Expressions of a function with masks in place of branches: numbers and vectors of all lanes (predication.py)."""

import ast
from collections.abc import Iterable

from lanewise._control.rewriting.arithmetic import COMPARISONS, ELEMENTWISE, FUNCTIONS, OPERATORS
from lanewise._control.rewriting.builders import attribute, call, load_name
from lanewise._control.rewriting.scopes import stores
from lanewise._control.rewriting.source import Function, Unsupported, argument_names

MASKS = "_lw_m"

_NEW = frozenset("zeros_like ones_like full_like".split())
# Methods that make a number of a vector, and what they are along a dim.
_REDUCED = {"sum": "sum", "mean": "mean", "norm": "norm", "max": "amax", "min": "amin", "all": "all", "any": "any"}
# Those that are called alike along a dim, and give a number alone.
_ALONG = frozenset(["sum", "mean"])
# Elementwise functions of torch.nn.functional.
_ACTIVATIONS = frozenset(
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus softsign".split()
)
_CONSTANTS = frozenset("zeros ones tensor".split())
_BOUNDS = frozenset(["min", "max"])
_NUMBERS = frozenset("pi inf nan e tau".split())
# Operations that are not defined for all numbers, and such that take long for what is no number.
_NARROW = frozenset("acos acosh asin atanh log log10 log1p log2 pow rsqrt sqrt lgamma fmod remainder".split())
_SLOW = frozenset("acos asin atan atan2 cos exp log sin tan tanh pow sinh cosh lgamma".split())

# A condition, and whether it holds where the code at hand counts.
Path = tuple[tuple[str, bool], ...]


class MaskedExpressions:
    """Rewrites expressions for all lanes, where those of a path count.

    Attributes:
        local: Names that the function binds.
        bound: Those that surely have a value here.
        free: Names that it takes from around it.
        first, attributes: The name of its first argument, None if that changes, and what it reads of it.
        branches: The number of branches so far.
        vectors: Whether it makes vectors of numbers.
        products: Whether it, or a function that it calls, may multiply matrices by vectors.
        calls: Which of `_NARROW` and `_SLOW` it calls functions of.
        narrow: Number of operations around the expression at hand that are not defined for all numbers.
        made: Where the lanes of a value counted, by its name: those of the path that it was bound on.
        path: Where the expression at hand counts.
    """

    def __init__(self, node: Function) -> None:
        body = [] if isinstance(node, ast.Lambda) else node.body
        self.local = {*argument_names(node), *stores(body)}
        self.bound = set(argument_names(node))
        self.free: set[str] = set()
        self.first = next(iter(argument_names(node)), None)
        if self.first in stores(body):
            self.first = None
        self.attributes: set[str] = set()
        self.branches = 0
        self.vectors = False
        self.products = False
        self.calls: set[frozenset[str]] = set()
        self.narrow = 0
        self.made: dict[str, Path] = {}
        self.path: Path = ()
        self.count = 0

    @property
    def defined(self) -> bool:
        """Whether operations had better be spared numbers for which they are not defined."""
        return self.calls >= {_NARROW, _SLOW}

    def new(self) -> str:
        self.count += 1
        return f"_lw_{self.count}"

    def condition(self, node: ast.expr) -> ast.expr:
        """What is asked for its truth, as a mask."""
        if isinstance(node, ast.BoolOp):
            combine = "all_of" if isinstance(node.op, ast.And) else "any_of"
            return of_masks(combine, *[self.condition(value) for value in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return of_masks("negated", self.condition(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            operands = [node.left, *node.comparators]
            pairs = zip(operands, node.ops, operands[1:])
            return of_masks("all_of", *[self.condition(ast.Compare(a, [op], [b])) for a, op, b in pairs])
        return of_masks("truth", self.value(node))

    def value(self, node: ast.expr, returned: bool = False) -> ast.expr:
        """An expression whose value is a number of each lane; `returned`: or a tuple of such."""
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
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
            return self.product(node.left, node.right)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            bounds = [
                ast.Constant(None) if each is None else self.value(each)
                for each in (node.slice.lower, node.slice.upper)
            ]
            if node.slice.step is None:
                return of_masks("part", self.value(node.value), *bounds)
        elif isinstance(node, ast.Subscript):
            return of_masks("entry", self.value(node.value), self.value(node.slice))
        if isinstance(node, ast.IfExp):
            return self.choice(node, returned)
        if isinstance(node, ast.Call):
            return self.function(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _NUMBERS:
            if node.value.id in ("math", "torch"):
                return ast.Attribute(self.load(node.value), node.attr, ast.Load())
        if isinstance(node, ast.Attribute) and _is_torch(node.value) and node.attr in FUNCTIONS:
            return ast.Attribute(self.value(node.value), node.attr, ast.Load())  # for a function that calls it
        if isinstance(node, ast.Attribute) and node.attr == "T" and not _is_name(node.value, self.first):
            return of_masks("turned", self.value(node.value))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.first:
            self.attributes.add(node.attr)
            return ast.Attribute(load_name(node.value.id), node.attr, ast.Load())
        raise Unsupported(f"`{type(node).__name__}`")

    def choice(self, node: ast.IfExp, returned: bool) -> ast.expr:
        """`a if test else b`"""
        self.branches += 1
        condition = self.new()
        test = ast.NamedExpr(ast.Name(condition, ast.Store()), self.condition(node.test))
        path = self.path
        sides = []
        for side, holds in ((node.body, True), (node.orelse, False)):
            self.path = (*path, (condition, holds))
            value = self.value(side, returned)
            sides.append(ast.IfExp(self.taken(calls_by_name([side])), value, ast.Constant(None)))
        self.path = path
        return of_masks("where", test, *sides)

    def function(self, node: ast.Call) -> ast.expr:
        func = node.func
        if isinstance(func, ast.Name):
            given = [self.value(arg) for arg in (*node.args, *[each.value for each in node.keywords])]
            if func.id == "abs":
                return ast.Call(self.load(func), given, [])
            if func.id == "len":
                return of_masks("length", self.load(func), *given)
            self.products = True
            names = ast.Constant(tuple([each.arg for each in node.keywords]))  # type: ignore[arg-type]
            return of_masks("call", self.load(func), names, self.here(self.path), *given)
        if not isinstance(func, ast.Attribute):
            raise Unsupported("a call of a function that is not known")
        name = func.attr
        of_torch = _is_torch(func.value) and "torch" not in self.local
        self.free.update(["torch"] if of_torch else [])
        if name in _REDUCED and not of_torch and _takes_all(name, node.args, node.keywords):
            return of_masks("reduced", ast.Constant(_REDUCED[name]), self.value(func.value))
        if of_torch and (found := self.of_vectors(name, node)) is not None:
            return found
        if _is_linalg(func.value) and name in ("norm", "vector_norm") and len(node.args) == 1 and not node.keywords:
            self.value(func.value.value)  # type: ignore[attr-defined]
            return of_masks("reduced", ast.Constant("norm"), self.value(node.args[0]))
        if name == "linear" and _is_functional(func.value) and 1 < len(node.args) < 4 and not node.keywords:
            self.load(func.value)  # type: ignore[arg-type]
            self.products = True
            given = [self.value(arg) for arg in node.args]
            return of_masks("linear", *given, *[ast.Constant(None)] * (3 - len(given)))
        if name in _ACTIVATIONS and _is_functional(func.value) and len(node.args) == 1 and not node.keywords:
            return ast.Call(ast.Attribute(self.value(func.value), name, ast.Load()), [self.value(node.args[0])], [])
        if of_torch and name in _CONSTANTS and len(node.args) == 1 and not node.keywords:
            return of_masks("constant", self.constant(name, node.args[0]))
        if name == "dot" and not of_torch and len(node.args) == 1 and not node.keywords:
            return of_masks("dot", self.value(func.value), self.value(node.args[0]))
        if name in _NEW and of_torch and not node.keywords:
            known = True
        else:
            known = name in ELEMENTWISE and (name != "where" or len(node.args) > 1)
            known = known and {each.arg for each in node.keywords} <= (_BOUNDS if name == "clamp" else set())
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

    def product(self, left: ast.expr, right: ast.expr) -> ast.expr:
        self.products = True
        return of_masks("product", self.value(left), self.value(right))

    def of_vectors(self, name: str, node: ast.Call) -> ast.expr | None:
        """A function of torch that makes a number of vectors, or a vector; None for another one."""
        args = node.args
        if name in _ALONG and args and _takes_all(name, args[1:], node.keywords):
            return of_masks("reduced", ast.Constant(name), self.value(args[0]))
        if node.keywords:
            return None
        if name == "dot" and len(args) == 2:
            return of_masks("dot", *map(self.value, args))
        if name == "matmul" and len(args) == 2:
            return self.product(*args)
        if name in ("stack", "cat") and len(args) == 1 and isinstance(args[0], (ast.List, ast.Tuple)):
            self.vectors = True
            return of_masks(name, *map(self.value, args[0].elts))
        return None

    def taken(self, asks: bool) -> ast.expr:
        """Whether to run what is on the path at hand. `asks`: only if some lanes come there."""
        condition, holds = self.path[-1]
        others = [where_it_counts(place) for place in self.path[:-1]] if asks else []
        return of_masks("taken", load_name(condition), ast.Constant(holds), ast.Constant(asks), *others)

    def here(self, path: Path) -> ast.expr:
        """The lanes of a path."""
        return of_masks("here", *[where_it_counts(place) for place in path])

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
                out = of_masks("only", load_name(condition), ast.Constant(holds), out, kind)
        return out


def _takes_all(name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    """Whether a reduction with these arguments takes all entries of a vector, which has one dim."""
    dims = [*args, *[each.value for each in keywords if each.arg == "dim"]]
    if len(dims) != len(args) + len(keywords) or len(dims) > (name in _ALONG):
        return False
    return all(ast.unparse(dim) in ("0", "-1") for dim in dims)


def _is_linalg(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "linalg" and _is_torch(node.value)


def _is_functional(node: ast.expr) -> bool:
    return _is_name(node, "F")


def _is_torch(node: ast.expr) -> bool:
    return _is_name(node, "torch")


def _is_name(node: ast.expr, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def calls_by_name(nodes: Iterable[ast.AST]) -> bool:
    """Whether they may call a function of the user's."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) for each in nodes for node in ast.walk(each)
    )


def of_masks(method: str, *args: ast.expr) -> ast.expr:
    return call(attribute(MASKS, method), *args)


def where_it_counts(place: tuple[str, bool]) -> ast.expr:
    condition, holds = place
    return load_name(condition) if holds else of_masks("negated", load_name(condition))
