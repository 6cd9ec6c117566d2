"""Numbers of each lane as keys, and asked for their type; objects that lanes meet again with."""

import functools
from fractions import Fraction

import pytest
import torch

from lanewise import grad, vmap

KS = torch.tensor([0, 1, 2, 3, 2, 5])
XS = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)[torch.tensor([3, 0, 5, 1, 4, 2])]


def dict_in_a_branch(x, k):
    d = {int(k): x.sum()} if x[0] > 0 else {0: x.sum() * 2}
    return d.get(0, 1.0) * x


def set_in_a_branch(x, k):
    if x[0] > 0:
        s = {int(k), 1}
    else:
        s = {0, int(k)}
    return x * len(s) + (2 in s)


def comprehensions(x, k):
    d = {int(k) + i: v for i, v in enumerate(x)}
    s = {int(v > 0) for v in x}
    d.update({int(k) + 1: x[0]})
    d.setdefault(int(k) - 1, x[1])
    s.add(int(k))
    return sum(key * value for key, value in d.items()) * sum(s) + x * len(dict.fromkeys([int(k), 1]))


def builtins(x, k):
    s = set(map(int, [k, 1])) | frozenset((int(k) + 1,))
    d = dict(zip([int(k), 1], [2.0, 3.0]))
    return x * len(s) + sum(s) + sum(d.values())


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


class Cached:
    @functools.lru_cache(maxsize=8)  # noqa: B019
    def square(self, n, *, by=1):
        return n * n * by


CACHED = Cached()


def caches(x, k):
    return x * fibonacci(int(k)) + CACHED.square(int(k)) + CACHED.square(1, by=k.item())


def dispatch(x, k):
    @functools.singledispatch
    def kind(value):
        return 1.0

    kind.register(int, lambda value: 2.0)
    kind.register(float, lambda value: 3.0)
    return x * (kind(int(k)) * 10 + kind(float(x[0].detach())) * 100 + kind(None))


def library(x, k):
    return x * float(Fraction(int(k), 3))


class Point:
    def __init__(self, at):
        self.at = at

    @classmethod
    def make(cls, at):
        if at[0] > 0:
            return cls(at)
        return cls(at * 2)


def objects(x, k):
    return (x[0] if x[0] > 0.3 else -x[0]) + Point.make(x).at


def objects_written(x, k):
    factor = x[0] if x[0] > 0.3 else -x[0]
    point = Point.make(x * factor)
    point.at[1:] += x[0]
    point.at.mul_(2)
    return point.at * x


PROGRAMS = [
    dict_in_a_branch,
    set_in_a_branch,
    comprehensions,
    builtins,
    caches,
    dispatch,
    library,
    objects,
    objects_written,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x, k) for x, k in zip(XS, KS)])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS, KS), want)
    leaf = XS.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(sum(program(x, k).sum() for x, k in zip(leaf, KS)), leaf)
    torch.testing.assert_close(vmap(grad(lambda x, k: program(x, k).sum()))(XS, KS), slopes)


def test_a_set_from_outside():
    """Once for each way that lanes take: plain numbers, which later calls can be compared with."""
    seen = set()

    def noted(x, k):
        seen.add(int(k))
        return x

    for _ in range(2):
        vmap(noted)(XS, KS)
    assert seen == {0, 1, 2, 3, 5}
    assert {type(n) for n in seen} == {int}
