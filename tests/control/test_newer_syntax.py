"""Syntax that not every Python has: programs as texts, run where Python knows it, against a loop over examples."""

import importlib.util
import sys

import pytest
import torch

from lanewise import grad, vmap
from tests.oracles import assert_same

PROGRAMS = {
    "starred index": (11, """
def f(x):
    rows, place = x.expand(2, 2), (0, 1)
    if x > 0:
        return rows[*place] * 2
    return rows[*place]
"""),
    "except*": (11, """
def f(x):
    y = x
    try:
        if x > 0:
            raise ExceptionGroup("many", [ValueError("a"), TypeError("b")])
        y = x * 2
    except* ValueError:
        y = x * 3 if x > 1 else x * 4
    except* TypeError:
        y = y + x
    return y
"""),
    "quotes in an f-string": (12, """
def f(x):
    names = {"one": "abc", "two": "ab"}
    text = f"{names["one" if x > 0 else "two"]}{
        # a comment
        "d"
    }"
    return x * len(text)
"""),
    "names in comprehensions": (12, """
def f(x):
    i = 10
    terms = [x * i if x > i else -x for i in range(3)]
    calls = [lambda: x + i for i in range(3)]
    if x > 1:
        terms = [term + call() for term, call in zip(terms, calls) if term > 0]
    return sum(terms) + x * i
"""),
    "type parameters": (12, """
def f[T: (int, float)](x: T, *rest: *tuple[int, ...]) -> T:
    type Pair = tuple[int, int]

    def inner[U](y: U) -> U:
        return y * 2 if y > 2 else y

    if x > 1:
        return inner(x)
    return inner(-x)
"""),
    "defaults of type parameters": (13, """
def f[T = int](x: T) -> T:
    if x > 0:
        return x * 2
    return x
"""),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_a_loop(name, tmp_path):
    minor, text = PROGRAMS[name]
    if sys.version_info < (3, minor):
        pytest.skip(f"syntax of Python 3.{minor}")
    path = tmp_path / "program.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    f = module.f
    xs = torch.tensor([-1.3, 0.4, 1.2, 2.7, -0.2], dtype=torch.float64)

    def slope(x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    slopes = torch.stack([slope(x) for x in xs])
    assert_same(vmap(f)(xs), torch.stack([f(x) for x in xs]))
    assert_same(vmap(grad(f))(xs), slopes)
    assert_same(grad(lambda xs: vmap(f)(xs).sum())(xs), slopes)
