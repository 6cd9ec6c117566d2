"""Objects that lanes share, changed on the way of some by code that does not say so."""

import bisect
import collections
import contextlib
import heapq
import itertools
import operator
import queue

import pytest
import torch

from lanewise import vmap

XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [0.1, 0.2, -0.3]], dtype=torch.float64)


def exit_stack(x):
    calls = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: calls.append(1))
        if x[1] > 0:
            stack.callback(lambda: calls.append(2))
    return x * sum(calls)


def counter(x):
    count = collections.Counter()
    count.update([1])
    if x[1] > 0:
        count.update([1, 2])
    return x * count[1] + len(count)


def functions_of_modules(x):
    heap, line, row = [3], [1, 2], [4, 5]
    waiting = queue.Queue()
    waiting.put(1)
    if x[1] > 0:
        heapq.heappush(heap, 1)
        bisect.insort(line, 0)
        operator.setitem(row, 0, 9)
        waiting.put(2)
    return x * waiting.qsize() + heap[0] + line[0] + row[0]


def unbound_methods(x):
    row, table, kinds = [1, 2], {"a": 1}, {1}
    if x[1] > 0:
        list.append(row, 3)
        dict.update(table, b=2)
        set.add(kinds, 5)
    return x * len(row) + len(table) + len(kinds)


def modules(x):
    layers = torch.nn.Sequential(torch.nn.Identity())
    if x[1] > 0:
        layers.append(torch.nn.Tanh())
        layers.add_module("last", torch.nn.Sigmoid())
    return layers(x) + len(layers)


def optimizer(x):
    z = x.detach().clone().requires_grad_()
    sgd = torch.optim.SGD([z], lr=0.1, momentum=0.9)
    for i in range(3):
        (z**3).sum().backward()
        if x[1] > 0:
            sgd.step()
        if x[0] > i - 1:
            sgd.zero_grad()
    return z.detach()


def zero_grad(x):
    z = x.detach().clone().requires_grad_()
    sgd = torch.optim.SGD([z], lr=0.1)
    (z**3).sum().backward()
    if x[1] > 0:
        sgd.zero_grad()
    (z**2).sum().backward()
    return z.grad * 1


def attributes_by_name(x):
    class Box:
        value = 1.0

    box = Box()
    if x[1] > 0:
        setattr(box, "value", 2.0)  # noqa: B010
    return x * box.value


def cannot_be_converted(x):
    class Sum:
        def __init__(self):
            self.total = 0.0
            self.calls = 0

        def put(self, v):
            self.calls += 1
            try:
                if v > 0:
                    self.total = self.total + v
                    return 1
                self.total = self.total - v * 2
            finally:
                self.calls += 1
            return 2

    found = Sum()
    kinds = 0
    for v in x:
        kinds = kinds + found.put(v)
    return found.total * found.calls * x + kinds


def list_argument(x):
    def put(row, v):
        try:
            if v > 0:
                row.append(1.0)
                return
            row.append(2.0)
        finally:
            row.append(0.5)

    row = []
    for v in x:
        put(row, v)
    return x * sum(row) + len(row)


def iterators(x):
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    first = sum(itertools.islice(numbers, 2)) if x[0] > 0 else 0.0
    entries = (v for v in x)
    if x[1] > 0:
        first = max(entries)
    return x * first + sum(numbers) + sum(entries)


def iterator_in_a_comprehension(x):
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    found = 0.0
    if x[0] > 0:
        found = [n for n in numbers if n < 3][0]
    return x * found + len(list(numbers))


def iterator_in_a_loop(x):
    numbers = iter(range(20))
    total = x * 0
    while total[0] < 3:
        total = total + sum(itertools.islice(numbers, 2)) + x
    return total + sum(numbers)


PROGRAMS = [
    exit_stack,
    counter,
    functions_of_modules,
    unbound_methods,
    modules,
    optimizer,
    zero_grad,
    attributes_by_name,
    cannot_be_converted,
    list_argument,
    iterators,
    iterator_in_a_comprehension,
    iterator_in_a_loop,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x) for x in XS])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS), want)
