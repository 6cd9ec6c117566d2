"""Iterators within reach of a variable, not in it: what some lanes take from them the others still have."""

import collections
import functools
import itertools
import types

import pytest
import torch

from lanewise import grad, vmap

XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [0.1, 0.2, -0.3]], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


class Box:
    pass


class Slotted:
    __slots__ = ("entries",)


def numbers():
    return iter([1.0, 2.0, 3.0, 4.0, 5.0])


def first(entries, count=2):
    return sum(itertools.islice(entries, count))


def in_a_list(x):
    box, y = [numbers()], x
    if x[1] > 0:
        y = y * first(box[0])
    return y + sum(box[0])


def in_an_attribute(x):
    box, y = Box(), x
    box.entries = numbers()
    if x[1] > 0:
        y = y * list(box.entries)[0]
    return y + len(list(box.entries))


def in_a_slot(x):
    box, y = Slotted(), x
    box.entries = numbers()
    if x[1] > 0:
        y = y * sum(box.entries)
    return y + sum(box.entries)


def in_a_dict(x):
    box, y = {"a": numbers()}, x
    if x[1] > 0:
        y = y * sum(v for v in box["a"])
    return y + sum(box["a"])


def in_a_tuple(x):
    box, y = (numbers(), 1), x
    if x[1] > 0:
        a, b, *_ = box[0]
        y = y * a * b
    return y + sum(box[0])


def deeper(x):
    box, y = Box(), x
    box.rows = [[numbers()]]
    if x[1] > 0:
        y = y * max(box.rows[0][0])
    return y + sum(box.rows[0][0])


def in_a_deque(x):
    box, y = collections.deque([numbers()]), x
    if x[1] > 0:
        y = y * sum(box[0])
    return y + sum(box[0])


def in_a_conditional_expression(x):
    entries, box = numbers(), [numbers()]
    y = sum(entries) * sum(box[0]) * x if x[1] > 0 else x
    return y + sum(entries) + sum(box[0])


def in_an_and(x):
    box = [numbers()]
    y = x * 2 if x[1] > 0 and first(box[0]) > 1 else x
    return y + sum(box[0])


def in_an_or(x):
    entries = numbers()
    y = x * 2 if x[1] > 0 or first(entries) > 10 else x
    return y + sum(entries)


def by_in(x):
    box, y = [numbers()], x
    if x[1] > 0:
        y = y * 3 if 2.0 in box[0] else y
    return y + sum(box[0])


def by_a_star(x):
    box, y = [numbers()], x
    if x[1] > 0:
        y = y * max(*box[0])
    return y + sum(box[0])


def by_zip(x):
    box, y = [numbers()], x
    if x[1] > 0:
        y = y + sum(a * b for a, b in zip(box[0], [1, 2], strict=False))
    return y + sum(box[0])


def by_dict(x):
    box, y = [enumerate([3.0, 4.0, 5.0])], x
    if x[1] > 0:
        y = y + dict(box[0])[1]
    return y + len(list(box[0]))


def by_its_method(x):
    box, y = [numbers()], x
    if x[1] > 0:
        y = y * box[0].__next__()
    return y + sum(box[0])


def by_a_method_in_a_variable(x):
    take, y = [numbers()][0].__next__, x
    if x[1] > 0:
        y = y * take()
    return y + take()


def by_a_partial(x):
    take, y = functools.partial(next, numbers()), x
    if x[1] > 0:
        y = y * take()
    return y + take()


def of_a_generator(x):
    def walk():
        yield 1.0
        yield 2.0
        yield 3.0

    box, y = [walk()], x
    if x[1] > 0:
        y = y * first(box[0])
    return y + sum(box[0])


def of_a_map(x):
    box, y = [map(lambda v: v * x[0], [1.0, 2.0, 3.0])], x  # noqa: C417
    if x[1] > 0:
        y = y * first(box[0])
    return y + sum(box[0])


def in_a_function(x):
    box = [numbers()]

    def take(v):
        if v[1] > 0:
            return v * first(box[0])
        return v

    return take(x) + sum(box[0])


def in_a_function_made_elsewhere(x):
    def make(entries):
        return lambda: first(entries)

    take, y = make(numbers()), x
    if x[1] > 0:
        y = y * take()
    return y + take()


def in_a_function_that_is_not_converted(x):
    def take(entries, v):
        for place in range(3):
            try:
                if v[place] > 0.3:
                    break
                v = v + first(entries, 1)
            finally:
                v = v + 1
        return v

    entries = numbers()
    return take(entries, x) + sum(entries)


def of_self(x):
    class Source:
        def __init__(self):
            self.entries = numbers()

        def take(self, v):
            if v[1] > 0:
                return v * first(self.entries)
            return v

    source = Source()
    return source.take(x) + sum(source.entries)


def in_a_while(x):
    box, y = [numbers()], x
    while y[0] < 3:
        y = y + first(box[0], 1) + 0.5
    return y + sum(box[0])


def in_a_range(x):
    box, y = [numbers()], x
    for _ in range(int(x[2] > 0) + 1):
        y = y + first(box[0], 1)
    return y + sum(box[0])


def in_a_try(x):
    box = [numbers()]
    try:
        if x[1] > 0:
            raise ValueError
        y = x * first(box[0], 1)
    except ValueError:
        y = x * first(box[0], 3)
    return y + sum(box[0])


def in_a_comprehension(x):
    box = [numbers()]
    kept = [v for v in x if v > 0 and first(box[0], 1) > 0]
    return x * len(kept) + sum(box[0])


def by_any(x):
    entries = numbers()
    found = any(v * x[0] > 1 for v in entries)
    return x * (2 if found else 1) + sum(entries)


PROGRAMS = [
    f for f in list(globals().values()) if type(f) is types.FunctionType and f.__code__.co_varnames[:1] == ("x",)
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program):
    def scalar(x):
        return (program(x) ** 2).sum()

    leaf = XS.clone().requires_grad_()
    want = torch.stack([program(x) for x in leaf])
    gradient = torch.autograd.grad((want**2).sum(), leaf)[0]
    want = want.detach()
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS), want)
        torch.testing.assert_close(
            vmap(vmap(program))(torch.stack([XS, XS.flip(0)])), torch.stack([want, want.flip(0)])
        )
        torch.testing.assert_close(vmap(grad(scalar))(XS), gradient)
        torch.testing.assert_close(grad(lambda xs: (vmap(program)(xs) ** 2).sum())(XS), gradient)
