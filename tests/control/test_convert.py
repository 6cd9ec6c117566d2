"""Converted functions of plain values do what the functions do: results, errors, and the lines that errors name."""

import ast
import importlib.util
import linecache
import traceback

import pytest
import torch

from lanewise import vmap
from lanewise._control.rewriting.compiling import is_converted
from lanewise._control.rewriting.convert import converted, why_not
from lanewise._core.draws.same_draws import SameDraws
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Boundary, machine
from tests.control import plain_programs
from tests.control.plain_programs import CALLS, PROGRAMS


def outcome(function, args):
    """What a call gives, or its error with the lines of the program that it came through."""
    try:
        return function(*args)
    except Exception as error:
        frames = [
            (frame.name, frame.lineno)
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == plain_programs.__file__
        ]
        return type(error), str(error), type(error.__cause__), frames


class structured:
    """The state in which converted code runs, with two lanes that nothing tells apart."""

    def __enter__(self):
        self.level = LaneLevel(2)
        self.level.__enter__()
        machine.level = self.level
        machine.boundaries.append(Boundary(self.level, self.level.lanes, SameDraws()))

    def __exit__(self, *exc):
        machine.boundaries.pop()
        machine.level = None
        self.level.__exit__(*exc)


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"{p.__name__}{i}" for i, p in enumerate(PROGRAMS)])
@pytest.mark.parametrize("lanes", [False, True], ids=["outside", "inside"])
def test_same_as_the_function(program, lanes):
    new = converted(program)
    assert new is not None, why_not(program)
    for args in CALLS:
        want = outcome(program, args)
        if lanes:
            with structured():
                got = outcome(new, args)
        else:
            got = outcome(new, args)
        assert got == want, args


def test_one_function_converted_alone_and_inside_another():
    """Both forms of the inner lambda have equal code, whose closures differ."""

    def power(x, k):
        for _ in range(int(k)):
            x = x * 1.5
        return x

    def sign(x, k):
        return x if x > 1 else -x

    xs, ks = torch.arange(3.0), torch.tensor([0, 2, 1])
    for f in (sign, power):
        got = vmap(lambda k: vmap(lambda x: f(x, k))(xs))(ks)  # noqa: B023
        assert torch.equal(got, torch.stack([torch.stack([f(x, k) for x in xs]) for k in ks]))


def checked(x):
    assert x != 0, "zero"
    return "positive" if x > 0 else "negative"


def test_a_function_whose_assertions_pytest_has_rewritten():
    new = converted(checked)
    assert new is not None and is_converted(new.__code__)
    assert new(1), new(-1) == ("positive", "negative")
    with pytest.raises(AssertionError, match="zero"):
        new(0)


def module_of(path, text):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_that_has_changed(tmp_path):
    path = tmp_path / "changing.py"
    f = module_of(path, "def f(x):\n    if x > 0:\n        return 1\n    return 2\n").f
    path.write_text("def f(x):\n    if x > 0:\n        return 5\n    return 2\n")
    linecache.clearcache()
    assert converted(f) is None
    assert "the file has changed" in why_not(f)


def test_two_lambdas_of_one_shape(tmp_path):
    text = "a, b = lambda x: 1 if x else 2, lambda x: 1 if not x else 2\n"
    text += "c = (lambda x: (lambda x: x + 1 if x else 0)(x))\n"
    module = module_of(tmp_path / "lambdas.py", text)
    for f in (module.a, module.b, module.c):
        new = converted(f)
        assert new is not None
        assert [new(x) for x in (0, 1)] == [f(x) for x in (0, 1)]


def test_no_source():
    space = {}
    exec("def f(x):\n    return 1 if x else 2", space)
    assert converted(space["f"]) is None
    assert why_not(space["f"]) == "it has no source: <string> cannot be read"


def test_what_cannot_be_converted():
    def generator():
        yield 1

    async def asynchronous():
        return 1

    def walrus(x):
        return x > 0 and (y := x) > 1 and y

    def walrus_in_a_generator(x):
        return any((y := v) > 1 for v in x) and y

    assert why_not(generator) == "it is a generator"
    assert why_not(asynchronous) == "it is asynchronous"
    assert why_not(walrus) == "`:=` stands in an operand that not all lanes evaluate"
    assert why_not(walrus_in_a_generator) == "`:=` stands in a generator"
    assert why_not(len) == "it is of type builtin_function_or_method, not a Python function"


def test_more_branches_than_python_nests():
    text = "def f(x):\n    if x == 0:\n        y = x\n"
    text += "".join(f"    elif x == {i}:\n        y = x * {i} * 2\n" for i in range(1, 40))
    text += "    else:\n        y = -x\n    return y\n"
    linecache.cache["<many>"] = (len(text), None, text.splitlines(True), "<many>")
    space = {}
    exec(compile(text, "<many>", "exec"), space)
    f = space["f"]
    assert "too many statically nested blocks" in why_not(f)
    xs = torch.tensor([3, 38, 3, 50, 0])
    assert torch.equal(vmap(f)(xs), torch.stack([f(x) for x in xs]))


def test_a_file_that_another_thread_keeps_from_being_parsed(monkeypatch):
    parse, failed = ast.parse, []

    def disturbed(*args, **kwargs):
        if len(failed) < 3:
            failed.append(args)
            raise SystemError("AST constructor recursion depth mismatch (before=72, after=56)")
        return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", disturbed)

    def f(x):
        if x > 0:
            return 2 * x
        return -x

    assert vmap(f)(torch.tensor([1.0, -3.0])).tolist() == [2, 3]
    assert len(failed) == 3
