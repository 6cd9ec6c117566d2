"""Lanes that part often and do little in between run one by one in later calls, where that takes them less time."""

import time
import warnings

import pytest
import torch

from lanewise import grad, vmap
from lanewise._control.runs import one_by_one


class Clock:
    """Stands for the time that the thread works: it goes on by `step` whenever it is asked for."""

    def __init__(self):
        self.now, self.step = 0.0, 1.0

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", clock)
    monkeypatch.setattr(one_by_one, "_LITTLE", 1.0)
    return clock


@pytest.fixture
def alone(monkeypatch):
    """How many lanes each call of `run` has run alone."""
    counts = []
    plain = one_by_one.Alone.run

    def run(self, level, lanes, *args):
        found = plain(self, level, lanes, *args)
        counts.append(sum(piece.size for piece, _, _ in found))
        return found

    monkeypatch.setattr(one_by_one.Alone, "run", run)
    return counts


def as_loop(f, *columns):
    return torch.stack([torch.as_tensor(f(*row)) for row in zip(*columns)])


def numbers(count=40):
    return torch.arange(1, count + 1)


def test_light_code_runs_one_by_one_from_the_third_call(clock, alone):
    def found(k):
        n = int(k)
        for i in range(100):
            if i == n:
                return torch.tensor(2 * i)
        return torch.tensor(-1)

    want = as_loop(found, numbers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for calls, lanes in enumerate([[], [], [40], [40, 40]]):
            clock.step = 1.0 if calls < 2 else 0.0
            assert torch.equal(vmap(found)(numbers()), want)
            assert alone == lanes


@pytest.mark.filterwarnings("ignore:vmap. the .* lanes have parted:lanewise.errors.SlowPathWarning")
def test_results_that_are_numbers_and_structures(clock, alone):
    def halvings(n):
        n, count = int(n), 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        return {"count": count, "pair": (torch.tensor(count), torch.ones(2) * count)}

    want = [halvings(n) for n in numbers()]
    for calls in range(3):
        clock.step = 1.0 if calls < 2 else 0.0
        got = vmap(halvings)(numbers())
        assert got["count"].tolist() == [each["count"] for each in want]
        assert torch.equal(got["pair"][0], torch.stack([each["pair"][0] for each in want]))
        assert torch.equal(got["pair"][1], torch.stack([each["pair"][1] for each in want]))
    assert alone == [40]


def test_derivatives(clock, alone):
    def powers(x, k):
        for i in range(100):
            if i == int(k):
                return x * x * i
        return x

    xs = torch.linspace(0.5, 2.0, 40)
    want = 2 * xs * numbers()
    for calls in range(4):
        clock.step = 0.0 if calls else 1.0
        leaf = xs.clone().requires_grad_()
        vmap(powers)(leaf, numbers()).sum().backward()
        torch.testing.assert_close(leaf.grad, want)
        torch.testing.assert_close(grad(lambda xs: vmap(powers)(xs, numbers()).sum())(xs), want)
    assert alone == [40] * 6


def test_lanes_that_take_longer_alone_go_on_together_until_many_calls_later(clock, alone):
    def found(k):
        n = int(k)
        for i in range(50):
            if i == n:
                return torch.tensor(3 * i)
        return torch.tensor(-2)

    want = as_loop(found, numbers())
    for _ in range(3):
        assert torch.equal(vmap(found)(numbers()), want)
    assert alone == [16]  # the clock has gone on after sixteen
    for _ in range(15):
        assert torch.equal(vmap(found)(numbers()), want)
    assert alone == [16]
    clock.step = 0.0
    assert torch.equal(vmap(found)(numbers()), want)
    assert alone == [16, 40]


def test_lanes_that_have_written_to_an_argument_do_not_stop_on_the_way(clock, alone):
    def shifted(x, k, writes):
        n = int(k)
        for i in range(50):
            if i == n:
                return torch.nn.functional.relu(x, inplace=writes) + i
        return x

    mapped = vmap(shifted, in_dims=(0, 0, None))
    for writes in (False, False, True, True):
        xs = torch.randn(40)
        again = xs.clone()
        want = torch.stack([shifted(x, k, writes) for x, k in zip(again, numbers())])
        assert torch.equal(mapped(xs, numbers(), writes), want)
        assert torch.equal(xs, again)
    assert alone == [40]


STATE = {"calls": 0}


def draws(k):
    n = int(k)
    for i in range(50):
        if i == n:
            return torch.rand(()) * 0 + i
    return torch.rand(()) * 0


def changes_objects(k):
    n = int(k)
    STATE["calls"] = 0
    for i in range(50):
        if i == n:
            return torch.tensor(i)
    return torch.tensor(0)


def writes(k):
    n = int(k)
    k.add_(0)
    for i in range(50):
        if i == n:
            return torch.tensor(i)
    return torch.tensor(0)


WEIGHT = torch.ones((), requires_grad=True)


def pulls_back(k):
    n = int(k)
    for i in range(50):
        if i == n:
            (WEIGHT * i).backward()
            return torch.tensor(i)
    return torch.tensor(0)


def works(k):
    n, x = int(k), k
    for i in range(50):
        x = x * 1
        if i == n:
            return x
    return x


@pytest.mark.parametrize("f", [draws, changes_objects, writes, pulls_back], ids=lambda f: f.__name__)
def test_what_has_effects_stays_together(f, clock, alone):
    for calls in range(5):
        clock.step = 1.0 if calls < 2 else 0.0
        got = vmap(f, randomness="different" if f is draws else "error")(numbers())
        assert got.tolist() == numbers().tolist()
    assert alone == []


def test_what_works_in_between_stays_together(clock, alone, monkeypatch):
    monkeypatch.setattr(one_by_one, "_LITTLE", 0.0)
    for _ in range(4):
        assert torch.equal(vmap(works)(numbers()), numbers())
    assert alone == []


def test_an_object_that_all_lanes_return_is_that_object(clock, alone):
    one = torch.ones(2)

    def found(k):
        n = int(k)
        for i in range(60):
            if i == n:
                return one, torch.tensor(i)
        return one, torch.tensor(0)

    for calls in range(3):
        clock.step = 1.0 if calls < 2 else 0.0
        same, place = vmap(found, out_dims=(None, 0))(numbers())
        assert same is one and torch.equal(place, numbers())
    assert alone == [40]


@pytest.mark.parametrize("where", ["vmap of vmap", "in a function"])
@pytest.mark.parametrize("other", [lambda y, i: y * i, lambda y, i: 2.5], ids=["tensors", "numbers"])
def test_numbers_that_a_vmap_inside_returns_have_its_lanes(other, where, clock, alone):
    def f(k, y):
        n = int(k)
        for i in range(100):
            if i == n:
                return 0.5 if i % 2 else other(y, i)
        return 1.0

    ys = torch.tensor([1.0, 2.0, 3.0])
    want = torch.stack([as_loop(lambda y, k=k: f(k, y), ys) for k in numbers()])
    over = vmap(vmap(f, (None, 0)), (0, None)) if where == "vmap of vmap" else None
    for calls in range(4):
        clock.step = 1.0 if calls < 2 else 0.0
        found = over(numbers(), ys) if over else vmap(lambda k: vmap(lambda y: f(k, y))(ys))(numbers())
        assert torch.equal(found, want)
    assert not alone
