"""Where objects from outside may be, for a run that is given up to leave nothing behind in them."""

import array
import contextvars
import os
import threading
import types
import weakref

import numpy as np
import pytest
import torch

from lanewise import cond, grad, jacrev, vmap, while_loop
from tests.control.test_outside_objects import WAYS, D, Outside

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")

# A module of the user's.
MODULE = types.ModuleType("users_module")
exec(
    """
ROWS, COUNT = [], 0


def push():
    ROWS.append(1)


def up(step):
    global COUNT
    COUNT += step


class Registry:
    entries = []

    @staticmethod
    def add():
        Registry.entries.append(1)
""",
    MODULE.__dict__,
)


class Base:
    shared: list = []

    def __init__(self):
        self.own = []

    def push(self):
        self.shared.append(1)
        self.own.append(1)

    def pop(self):
        self.shared.pop()
        self.own.pop()


class Derived(Base):
    count = 0


class Counted(type):
    def bump(cls, step):
        cls.count += step


class OfAKind(metaclass=Counted):
    count = 0


class Context:
    depth = 0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1


class Added:
    count = 0

    def __iadd__(self, step):
        self.count += step
        return self


ROW, DERIVED, CONTEXT, ADDED = [1.0, 2.0], Derived(), Context(), Added()
PUSH, PUSHES, BOUND = lambda: ROW.append(1.0), {"a": lambda: ROW.append(1.0)}, ROW.append
ARRAY, NUMBERS, TENSOR = array.array("d", [1.0]), np.zeros(2), torch.ones(3, dtype=D)
VARIABLE, LOCAL = contextvars.ContextVar("variable", default=1), threading.local()
LOCAL.count = 0


def row():
    return ROW


def balanced(enter, leave, measure):
    def program(o, x):
        enter()
        y = x * measure()
        if x[1] > 0:
            enter()
            y = y * measure()
            leave()
        leave()
        return y

    return program


def step(owner, name, by):
    def change():
        setattr(owner, name, getattr(owner, name) + by)

    return change


def in_the_condition(o, x):
    ROW.append(1.0)

    def longer(x):
        ROW.append(1.0)
        y = x * len(ROW)
        ROW.pop()
        return y

    y = cond(x[1] > 0, longer, lambda x: x * len(ROW), (x,))
    ROW.pop()
    return y


def in_the_loop(o, x):
    ROW.append(1.0)

    def body(x):
        ROW.append(1.0)
        y = x + len(ROW) * 0.1
        ROW.pop()
        return y

    y = while_loop(lambda x: x[1] < 1, body, x)
    ROW.pop()
    return y


def deeper(y):
    ROW.append(1.0)
    out = y * len(ROW)
    if y.sum() > 0:
        ROW.append(1.0)
        out = out * len(ROW)
        ROW.pop()
    ROW.pop()
    return out


def in_an_inner_vmap(o, x):
    ROW.append(1.0)
    y = vmap(deeper)(x)
    ROW.pop()
    return y * len(ROW)


def in_an_inner_gradient(o, x):
    ROW.append(1.0)
    y = grad(lambda x: (deeper(x) ** 2).sum())(x)
    ROW.pop()
    return y * len(ROW)


def in_an_inner_jacobian(o, x):
    return jacrev(lambda x: deeper(x) ** 2)(x).sum(0)


def by_a_function_given(o, x):
    def call(function):
        function()
        return len(ROW)

    y = x * call(lambda: ROW.append(1.0))
    if x[1] > 0:
        y = y * call(lambda: ROW.append(1.0))
        ROW.pop()
    ROW.pop()
    return y


def in_a_context(o, x):
    with CONTEXT:
        y = x * CONTEXT.depth
        if x[1] > 0:
            with CONTEXT:
                y = y * CONTEXT.depth
    return y


def by_an_operator(o, x):
    added = ADDED
    added += 1
    y = x * added.count
    if x[1] > 0:
        added += 1
        y = y * added.count
        added += -1
    added += -1
    return y


def add_to(thing, by):
    thing[0] += by


PROGRAMS = [f for f in list(globals().values()) if type(f) is types.FunctionType]
PROGRAMS = {f.__name__: f for f in PROGRAMS if f.__code__.co_varnames[:2] == ("o", "x")}
PROGRAMS |= {
    "a module's function": balanced(lambda: MODULE.push(), lambda: MODULE.ROWS.pop(), lambda: len(MODULE.ROWS)),
    "a module's global": balanced(lambda: MODULE.up(1), lambda: MODULE.up(-1), lambda: MODULE.COUNT),
    "a module's attribute": balanced(step(MODULE, "COUNT", 1), step(MODULE, "COUNT", -1), lambda: MODULE.COUNT),
    "a class of a module": balanced(
        lambda: MODULE.Registry.add(), lambda: MODULE.Registry.entries.pop(), lambda: len(MODULE.Registry.entries)
    ),
    "a list of a class": balanced(
        lambda: DERIVED.push(), lambda: DERIVED.pop(), lambda: len(DERIVED.shared) * len(DERIVED.own)
    ),
    "the class of an object": balanced(
        step(type(DERIVED), "count", 1), step(type(DERIVED), "count", -1), lambda: Derived.count
    ),
    "a metaclass": balanced(lambda: OfAKind.bump(1), lambda: OfAKind.bump(-1), lambda: OfAKind.count),
    "a function": balanced(lambda: PUSH(), lambda: ROW.pop(), lambda: len(ROW)),
    "a function of a dict": balanced(lambda: PUSHES["a"](), lambda: ROW.pop(), lambda: len(ROW)),
    "a bound method": balanced(lambda: BOUND(1.0), lambda: ROW.pop(), lambda: len(ROW)),
    "a result": balanced(lambda: row().append(1.0), lambda: row().pop(), lambda: len(row())),
    "an array": balanced(lambda: ARRAY.append(1.0), lambda: ARRAY.pop(), lambda: len(ARRAY)),
    "an array of NumPy": balanced(lambda: add_to(NUMBERS, 1), lambda: add_to(NUMBERS, -1), lambda: float(NUMBERS[0])),
    "a tensor": balanced(lambda: TENSOR.add_(1), lambda: TENSOR.sub_(1), lambda: TENSOR.clone()),
    "an entry of a tensor": balanced(lambda: add_to(TENSOR, 1), lambda: add_to(TENSOR, -1), lambda: TENSOR.clone()),
    "a context variable": balanced(
        lambda: VARIABLE.set(VARIABLE.get() + 1), lambda: VARIABLE.set(VARIABLE.get() - 1), lambda: VARIABLE.get()
    ),
    "of a thread": balanced(step(LOCAL, "count", 1), step(LOCAL, "count", -1), lambda: LOCAL.count),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_loop(name, way):
    f, loop = way(PROGRAMS[name], Outside())
    xs = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [0.1, 0.2, -0.3]], dtype=D)
    for given in (xs.abs(), xs, -xs, xs):
        want = loop(given)  # before what a run might leave behind
        torch.testing.assert_close(f(given), want)


def test_a_global_that_is_bound_later():
    space = {}
    exec("def push():\n    ROWS.append(1)\n    return len(ROWS)\n\ndef pop():\n    ROWS.pop()", space)
    push, pop = space["push"], space["pop"]

    def program(x):
        y = x * push()
        y = y * 2 if x > 0 else -y
        pop()
        return y

    mapped = vmap(program)
    space["ROWS"] = []
    torch.testing.assert_close(mapped(torch.tensor([1.0, -1.0])), torch.tensor([2.0, 1.0]))
    assert space["ROWS"] == []


class Proxy:
    """An object that is not there yet, as those of web frameworks."""

    @property
    def __class__(self):
        raise RuntimeError("nothing behind it")

    @property
    def __dict__(self):
        raise RuntimeError("nothing behind it")

    def __getattribute__(self, name):
        raise RuntimeError("nothing behind it")


def test_objects_that_answer_nothing():
    proxy, many = Proxy(), list(range(1_000_000))
    seen = [proxy]

    def program(x):
        seen.append(many)
        y = x * len(seen)
        y = y * 2 if x > 0 else -y
        seen.pop()
        return y if proxy is not None else y * 2

    torch.testing.assert_close(vmap(program)(torch.tensor([1.0, -1.0])), torch.tensor([4.0, 2.0]))
    assert len(seen) == 1
    assert seen[0] is proxy


def with_a_hook(o, x):
    y = x * 2

    def hook(g):
        o.row.append(1.0)
        changed = g * len(o.row)
        if g[1] > 0:
            o.row.append(1.0)
            changed = changed * len(o.row)
            o.row.pop()
        o.row.pop()
        return changed

    y.register_hook(hook)
    return (y * y).sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, o):
        ctx.save_for_backward(x)
        ctx.o = o
        o.row.append(1.0)
        y = x * len(o.row)
        if x[1] > 0:
            o.row.append(1.0)
            y = y * len(o.row)
            o.row.pop()
        o.row.pop()
        return y

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        ctx.o.stack.push(1.0)
        y = x * g * ctx.o.stack.depth
        if x[1] > 0:
            ctx.o.stack.push(1.0)
            y = y * ctx.o.stack.depth
            ctx.o.stack.pop()
        ctx.o.stack.pop()
        return y, None


def with_a_function(o, x):
    return Scaled.apply(x, o).sum()


@pytest.mark.parametrize("program", [with_a_hook, with_a_function], ids=lambda p: p.__name__)
def test_in_a_backward_pass(program):
    xs = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [0.1, 0.2, -0.3]], dtype=D)

    def by_autograd(f):
        leaf = xs.clone().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    o = Outside()
    want = by_autograd(lambda xs: sum(program(o, x) for x in xs))
    o = Outside()
    for _ in range(2):
        torch.testing.assert_close(vmap(grad(lambda x: program(o, x)))(xs), want)
        torch.testing.assert_close(grad(lambda xs: vmap(lambda x: program(o, x))(xs).sum())(xs), want)
        torch.testing.assert_close(by_autograd(lambda xs: vmap(lambda x: program(o, x))(xs).sum()), want)
        assert (len(o.row), o.stack.depth) == (2, 0)


class _Counter:
    def __init__(self):
        self.n = 0


COUNTED = _Counter()
REFERENCE = weakref.ref(COUNTED)
COUNTS = {"n": 0}


def _through_a_weak_reference():
    REFERENCE().n += 1
    return REFERENCE().n


def _through_the_globals():
    globals()["COUNTS"]["n"] += 1
    return globals()["COUNTS"]["n"]


def _through_the_environment():
    os.environ["LANEWISE_COUNT"] = str(int(os.environ.get("LANEWISE_COUNT", "0")) + 1)
    return int(os.environ["LANEWISE_COUNT"])


@pytest.mark.parametrize("count", [_through_a_weak_reference, _through_the_globals, _through_the_environment])
def test_reached_by_other_ways(count, monkeypatch):
    """Changed once, where the function starts again as its lanes part."""
    monkeypatch.setattr(COUNTED, "n", 0)
    monkeypatch.setitem(COUNTS, "n", 0)
    monkeypatch.setenv("LANEWISE_COUNT", "0")

    def f(x):
        n = count()
        return x * n if x > 0 else -x * n

    assert torch.equal(vmap(f)(torch.tensor([1.0, -2.0, 3.0])), torch.tensor([1.0, 2.0, 3.0]))
    assert count() == 2
