"""Keywords of calls are the user's: none of their names is that of a parameter of what stands in between."""

import ast
import dataclasses
import functools
import math
import pathlib
import types
from typing import Any

import pytest
import torch

import lanewise
from lanewise import debug, grad, jacrev, vmap

XS = torch.tensor([1.0, -1.0, 2.0, -0.5])
# Every name that a parameter has there.
NAMES = (
    "func function kind text runs owner generator op cls level args kwargs name keys numbers value thing index key "
    "lanes call code frame run depth keep operands entries data x tensor result out"
).split()


def everything(*found, **given):
    return sum(given.values()) + sum(found)


def apply(func, x):
    return func(x)


class Callable_:
    def __call__(self, func, x):
        return func(x)

    def method(self, func, kind):
        return func(kind)

    @staticmethod
    def static(func, owner):
        return func(owner)

    @classmethod
    def of_class(cls, func, cells):
        return func(cells)


class Module(torch.nn.Module):
    def forward(self, func, x):
        return func(x)


class Hooked(Module):
    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: None)


@dataclasses.dataclass
class Event:
    kind: Any
    func: Any = 1


@functools.lru_cache
def cached(func, kind):
    return kind * 2


def generator(func, x):
    yield func(x)


def by_generator(func, x):
    return next(generator(func=func, x=x))


@torch.no_grad()
def wrapped(func, kind):
    return func(kind)


thing, module, hooked = Callable_(), Module(), Hooked()

CALLS = {
    "names": lambda x: everything(**dict.fromkeys(NAMES, x)),
    "function": lambda x: apply(func=torch.sin, x=x),
    "lambda": lambda x: (lambda func, runs: func(runs))(func=torch.sin, runs=x),
    "object": lambda x: thing(func=torch.sin, x=x),
    "method": lambda x: thing.method(func=torch.sin, kind=x),
    "static": lambda x: thing.static(func=torch.sin, owner=x),
    "class method": lambda x: thing.of_class(func=torch.sin, cells=x),
    "module": lambda x: module(func=torch.sin, x=x),
    "hooked": lambda x: hooked(torch.sin, x=x),
    "partial": lambda x: functools.partial(apply, func=torch.sin)(x=x),
    "wrapped": lambda x: wrapped(func=torch.sin, kind=x),
    "cached": lambda x: x * cached(func=2, kind=3),
    "generator": lambda x: by_generator(func=torch.sin, x=x),
    "vmap": lambda x: vmap(func=torch.sin)(x[None])[0],
    "vmap of names": lambda x: vmap(everything, in_dims={"func": 0, "kind": None})(func=x[None], kind=x)[0],
    "grad": lambda x: grad(func=torch.sin)(x),
    "grad of names": lambda x: grad(lambda x, func: x * func)(x, func=x),
    "jacrev": lambda x: jacrev(func=torch.sin)(x),
    "dataclass": lambda x: Event(kind=x, func=2).kind * 2,
    "namespace": lambda x: types.SimpleNamespace(func=x, kind=2).func * 2,
    "dict": lambda x: dict(func=x, kind=2 * x)["kind"],  # noqa: C408
    "update": lambda x: functools.reduce(lambda a, b: a + b, (lambda d: d.update(func=x) or d)({}).values()),
    "format": lambda x: x * len("{func}{kind}".format(func=1, kind=2)),  # noqa: UP032
    "math": lambda x: x * math.isclose(float(x), 1.1, rel_tol=0.5, abs_tol=0.0),
    "a lane's keyword": lambda x: x * math.isclose(1.1, 1.0, rel_tol=abs(float(x))),
    "prod": lambda x: x * math.prod([1, 2], start=3),
    "sum": lambda x: sum([x, x], start=x),
    "sorted": lambda x: sorted([x, -x], key=lambda value: value, reverse=True)[0],
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", CALLS)
def test_calls_by_keyword(name):
    call = CALLS[name]

    def f(x):
        return call(x) if x > 0 else x

    for _ in range(2):
        torch.testing.assert_close(vmap(f)(XS), torch.stack([f(x) for x in XS]))


def test_keywords_of_debug_print(capsys):
    vmap(lambda x: debug.print("{text} {args:.1f} {level}", text="a", args=x, level=3))(XS[:2])
    assert capsys.readouterr().out == "a 1.0 3\na -1.0 3\n"


def test_keywords_of_a_custom_operator():
    @torch.library.custom_op("lanewise_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, *, op: float, func: float) -> torch.Tensor:
        return x * op * func

    scaled.register_vmap(lambda info, dims, x, op, func: (x * op * func, dims[0]))
    torch.testing.assert_close(vmap(lambda x: scaled(x, op=2.0, func=3.0))(XS), XS * 6)
    torch.testing.assert_close(vmap(lambda x: x + scaled(torch.ones(()), op=2.0, func=3.0))(XS), XS + 6)


# Those that have the names of what they stand for, or whose keywords are no names of the user's.
OWN_NAMES = {
    "_control/functional/checks.py check_functions",
    "_control/runtime/library_numbers.py stand_in",
    "_core/distributed.py distributed",
    "_core/layouts.py _with_values",
    "_core/python/factories.py made",
    "_core/python/legacy.py __call__",
    "_core/python/legacy.py new_tensor",
    "_core/recording/autograd.py enter_engine",
    "_core/recording/autograd.py grad",
    "_core/recording/passes.py run_backward",
    "_core/short/direct.py method",
    "_transforms/compiling.py traced",
    "_transforms/orders.py segment_reduce",
    "_transforms/rearrange.py rearrange",
    "_transforms/reruns.py _init",
}


def test_no_wrapper_has_a_parameter_that_a_keyword_could_hit():
    root = pathlib.Path(lanewise.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        where = path.relative_to(root).as_posix()
        if where.startswith("_rules/"):
            continue  # what takes keywords there has those of an operation's schema
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node.args.kwarg is not None:
                named = [*node.args.args, *node.args.kwonlyargs]
                if any(each.arg != "self" for each in named):
                    found.add(f"{where} {getattr(node, 'name', 'lambda')}")
    assert found == OWN_NAMES
