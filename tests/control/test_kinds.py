"""Variables that are None in some lanes, or hold what no tensor can hold: as in a loop, and without more ways."""

import pytest
import torch

from lanewise import errors, vmap
from lanewise._core.parting.lanes import machine
from tests.control.compositions import COMPOSITIONS, check_as_the_loop, loop
from tests.control.kind_programs import OTHERS, TOGETHER

D = torch.float64


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", TOGETHER + OTHERS, ids=lambda p: p.__name__)
def test_as_the_loop(program, composition):
    check_as_the_loop(program, composition)


@pytest.mark.parametrize("program", TOGETHER, ids=lambda p: p.__name__)
def test_lanes_come_together_again(program):
    """So lanes part a few times in each round, however many there are (and no warning says that they part often)."""
    xs, ks = torch.randn(200, 6, dtype=D, generator=torch.Generator().manual_seed(1)), torch.zeros(200)
    vmap(program)(xs, ks)
    before = machine.partings
    got = vmap(program)(xs, ks)
    assert machine.partings - before <= 7 * 6
    torch.testing.assert_close(got, loop(program, xs, ks), rtol=1e-9, atol=1e-9)


def best_of(x):
    best = None
    if x > 0:
        best = x
    return best


@pytest.mark.parametrize(
    "use, error",
    [
        (lambda best: best + 1, TypeError),
        (lambda best: -best, TypeError),
        (lambda best: best.sin(), AttributeError),
        (lambda best: best[None], TypeError),
        (lambda best: best < 1, TypeError),
        (lambda best: torch.sin(best), TypeError),
        (lambda best: abs(best) * 2 + 1, TypeError),
    ],
)
def test_errors_are_those_of_the_lanes_with_none(use, error):
    def f(x):
        best = None
        if x > 0:
            best = x
        return use(best)

    with pytest.raises(error) as failure:
        vmap(f)(torch.tensor([1.0, -1.0, 2.0]))
    assert failure.value.lanes == [1]


def best_in_a_loop(x):
    best = None
    if x > 0:
        best = x
    for _ in range(2):
        return best


def best_by_expression(x):
    return x if x > 0 else None


def best_of_another(x):
    return best_in_a_loop(x)


@pytest.mark.parametrize("f", [best_of, best_in_a_loop, best_by_expression, best_of_another])
def test_none_in_some_results(f):
    xs = torch.tensor([1.0, -1.0, 2.0])
    with pytest.raises(errors.LaneValueError, match="different types NoneType and Tensor"):
        vmap(f)(xs)
    assert vmap(f, out_dims="list")(xs) == [1.0, None, 2.0]
