"""Converted functions of plain values do what the functions do: results, errors, and the lines that errors name."""

import traceback

import pytest
import torch

from lanewise import vmap
from lanewise._control.convert import converted, why_not
from lanewise._core.lane_level import LaneLevel
from lanewise._core.lanes import Boundary, machine
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
        machine.boundaries.append(Boundary(self.level, self.level.lanes))

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
