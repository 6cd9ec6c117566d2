"""jvp(jvp(f)), alone and mapped, against differences of differences."""

import pytest

from lanewise import jvp, vmap
from tests.cases import SECOND_DIFFERENCE, Case
from tests.oracles import SECOND, Layout, assert_same, directions, loop_vmap, of_floats, pack, second_difference


def _second(case: Case, args, first, second):
    f, primals = of_floats(case.f, args)
    return jvp(lambda *xs: jvp(f, xs, first)[1], primals, second)[1]


@pytest.mark.parametrize("case", SECOND_DIFFERENCE, ids=str)
def test_jvp_jvp(case: Case):
    args = case.draw(1, seed=10)[0]
    first, second = directions(args, 1), directions(args, 2)
    assert_same(_second(case, args, first, second), second_difference(case.f, args, first, second), SECOND)


@pytest.mark.parametrize("case", SECOND_DIFFERENCE, ids=str)
def test_vmap_jvp_jvp(case: Case):
    lanes = case.draw(2, seed=11)
    first, second = directions(lanes[0], 1), directions(lanes[0], 2)
    packed = pack(lanes, Layout(tuple(0 for _ in lanes[0]), 2))
    want = loop_vmap(lambda *xs: second_difference(case.f, xs, first, second))(*packed)
    assert_same(vmap(lambda *xs: _second(case, xs, first, second))(*packed), want, SECOND)
