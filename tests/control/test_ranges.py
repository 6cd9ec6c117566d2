"""Loops over ranges whose length differs between many lanes, which run in the order in which they leave."""

import pytest
import torch

import lanewise
from lanewise._control.runtime import ranges
from tests.control.compositions import COMPOSITIONS, SECOND, check_as_the_loop
from tests.control.test_fuzz import check


@pytest.fixture
def ordered(monkeypatch):
    """Few lanes run in order, too; counts how often."""
    made = []
    plain = ranges._queue

    def queue(level, numbers):
        found = plain(level, numbers)
        made.append(found is not None)
        return found

    monkeypatch.setattr(ranges, "_LANES", 2)
    monkeypatch.setattr(ranges, "_GROUPS", 2)
    monkeypatch.setattr(ranges, "_queue", queue)
    return made


def summed(x, k):
    total = torch.zeros(3, dtype=x.dtype)
    for i in range(int(k)):
        total = total + x.sin() * (i + 1)
    return total


def from_two(x, k):
    y = x * 1
    for i in range(2, int(k) + 1):
        y = y * x + i
    return y


def by_steps_down(x, k):
    y = x * 1
    for i in range(4, int(k), -2):
        y = y.sin() + i
    return y


def with_break(x, k):
    y = x * 1
    for i in range(int(k)):
        y = y * 1.5
        if y.sum() > 3:
            break
        y = y + i
    return y


def with_continue(x, k):
    y = x * 1
    for i in range(int(k)):
        if y[0] > 0:
            y = y * 0.5
            continue
        y = y.cos() + i
    return y


def with_return(x, k):
    y = x * 1
    for _ in range(int(k)):
        y = y * 2
        if y[1] > 2:
            return y.sin()
    return y


def with_else(x, k):
    y = x * 1
    for i in range(int(k)):
        if x[0] * i > 1:
            break
        y = y + x * i
    else:
        y = y.exp()
    return y


def nested(x, k):
    y = x * 1
    for i in range(int(k)):
        for j in range(int(k) - i):
            y = y.sin() + j * x
        y = y * 1.1
    return y


def rows_written(x, k):
    rows = torch.zeros(5, 3, dtype=x.dtype)
    for i in range(int(k)):
        rows[i] = x * i
    return rows


def written_in_place(x, k):
    y = x.clone()
    for i in range(int(k)):
        y.mul_(x).add_(i)
    return y


def listed(x, k):
    parts = [x]
    for _ in range(int(k)):
        parts.append(parts[-1].sin() * x)
    return torch.stack(parts).sum(0)


def view_kept(x, k):
    y = x * 2
    head = y[:2]
    for i in range(int(k)):
        y = y + i
        head = head * x[0]
    return torch.cat([y, head])


def last_number(x, k):
    i = -1
    y = x * 1
    for i in range(int(k)):
        y = y + min(i, 1)
    return y * i


PROGRAMS = [
    summed,
    from_two,
    by_steps_down,
    with_break,
    with_continue,
    with_return,
    with_else,
    nested,
    rows_written,
    written_in_place,
    listed,
    view_kept,
    last_number,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_in_order(program, composition, ordered):
    check_as_the_loop(program, composition)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
def test_random_programs_in_order(ordered):
    for seed in range(40):
        check(seed)
    assert any(ordered)


def test_which_loops_run_in_order(monkeypatch):
    rounds = []
    plain = ranges._Queue.sides

    def sides(queue, lanes):
        rounds.append(lanes.size)
        return plain(queue, lanes)

    monkeypatch.setattr(ranges._Queue, "sides", sides)

    def f(x, n):
        y = x * 1
        for i in range(int(n)):
            y = y + i
        return y

    many = torch.arange(1200) % 6
    xs = torch.randn(1200)
    want = torch.stack([x + sum(range(int(n))) for x, n in zip(xs, many)])
    assert torch.allclose(lanewise.vmap(f)(xs, many), want)
    assert rounds == [1200, 1000, 800, 600, 400, 200]
    rounds.clear()
    assert torch.allclose(lanewise.vmap(f)(xs[:50], many[:50]), want[:50])
    assert torch.allclose(lanewise.vmap(f)(xs, many // 3), torch.stack([x * 1 for x in xs]))
    assert not rounds


@pytest.mark.parametrize("stop", [2**62, 70000])
def test_ranges_too_long_to_count(stop):
    def f(n):
        total = torch.zeros((), dtype=torch.int64)
        for i in range(int(n)):
            if i >= 3:
                break
            total = total + i
        return total

    stops = torch.tensor([0, 1, 2, 3, stop]).repeat(60)
    assert lanewise.vmap(f)(stops).tolist() == [0, 0, 1, 3, 3] * 60


def test_an_error_in_a_round_names_its_lanes():
    def f(x, n):
        for i in range(int(n)):
            if i == 4:
                raise ValueError("too long")
            x = x + i
        return x

    with pytest.raises(ValueError, match="too long") as caught:
        lanewise.vmap(f)(torch.zeros(300), torch.arange(300) % 6)
    assert sorted(caught.value.lanes) == [lane for lane in range(300) if lane % 6 == 5]  # type: ignore[attr-defined]


def test_draws_in_order(ordered):
    def f(x, n):
        for _ in range(int(n)):
            x = x + torch.rand(())
        return x

    xs, ns = torch.zeros(8), torch.tensor([3, 0, 2, 5, 1, 3, 3, 4])
    torch.manual_seed(3)
    same = lanewise.vmap(f, randomness="same")(xs, ns)
    for lane, n in enumerate(ns):
        torch.manual_seed(3)
        assert torch.allclose(same[lane], f(xs[lane], n))
    torch.manual_seed(3)
    different = lanewise.vmap(f, randomness="different")(xs, ns)
    assert len(set(different.tolist())) == 8
    assert (different <= ns).all()
    assert any(ordered)
