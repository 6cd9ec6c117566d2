"""Objects that lanes share, changed on the way of some by code that does not say so."""

import bisect
import collections
import contextlib
import functools
import heapq
import itertools
import operator
import queue
import random

import pytest
import torch
from torch import nn

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
    layers = nn.Sequential(nn.Identity())
    if x[1] > 0:
        layers.append(nn.Tanh())
        layers.add_module("last", nn.Sigmoid())
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


def _put(row, v):
    try:
        if v > 0:
            row.append(1.0)
            return
        row.append(2.0)
    finally:
        row.append(0.5)


def list_argument(x):
    row = []
    for v in x:
        _put(row, v)
    return x * sum(row) + len(row)


def list_argument_of_some(x):
    if x.sum() > 0.2:
        row = []
        for v in x:
            _put(row, v)
        return x * sum(row) + len(row)
    return x


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
    list_argument_of_some,
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


# --- objects from outside, changed and changed back -------------------------------------------------------------------


class Slotted:
    __slots__ = ("value", "other")

    def __init__(self):
        self.value = 1.0


class Outside:
    """What the programs change, new for each run."""

    def __init__(self):
        self.dropout = nn.Dropout(1.0)
        self.layers = nn.ModuleList([nn.Tanh()])
        self.table = nn.ModuleDict({"a": nn.Tanh()})
        self.row = [1.0, 2.0, 3.0, 4.0]
        self.count = collections.Counter(a=2)
        self.order = collections.OrderedDict(a=1.0, b=2.0)
        self.waiting = queue.Queue()
        self.slotted = Slotted()


def eval_and_train(o, x):
    if x[1] > 0:
        o.dropout.eval()
        y = o.dropout(x)
        o.dropout.train()
        return y
    return o.dropout(x)


def train_false(o, x):
    if x[1] > 0:
        o.layers.train(False)
    y = x * (2 if o.layers[0].training else 3)
    if x[1] > 0:
        o.layers.train()
    return y


def module_added(o, x):
    if x[1] > 0:
        o.dropout.add_module("inner", nn.Tanh())
        y = x * len(list(o.dropout.children()))
        del o.dropout.inner
        return y
    return x * (5 + len(list(o.dropout.children())))


def buffer_registered(o, x):
    if x[1] > 0:
        o.dropout.register_buffer("scale", torch.tensor(4.0, dtype=torch.float64))
        y = x * o.dropout.scale
        del o.dropout.scale
        return y
    return x * (2 if hasattr(o.dropout, "scale") else 3)


def hook_registered(o, x):
    if x[1] > 0:
        handle = o.layers[0].register_forward_hook(lambda module, args, out: out * 100)
        y = o.layers[0](x)
        handle.remove()
        return y
    return o.layers[0](x)


def layers_added(o, x):
    if x[1] > 0:
        o.layers.extend([nn.Tanh(), nn.Tanh()])
        o.table.update({"b": nn.Sigmoid()})
        y = x * len(o.layers) * len(o.table)
        o.layers.pop(-1)
        o.layers.pop(-1)
        o.table.pop("b")
        return y
    return x * len(o.layers) * len(o.table)


def shuffled(o, x):
    if x[1] > 0:
        random.Random(0).shuffle(o.row)
        y = x * o.row[0]
        o.row.sort()
        return y
    return x * o.row[0]


def counted(o, x):
    if x[1] > 0:
        o.count.update(["a", "b"])
        y = x * o.count["a"]
        o.count.subtract(["a", "b"])
        return y
    return x * (o.count["a"] + 5)


def moved_to_end(o, x):
    if x[1] > 0:
        o.order.move_to_end("a")
        y = x * next(iter(o.order.values()))
        o.order.move_to_end("a", last=False)
        return y
    return x * next(iter(o.order.values()))


def moved_by_a_library(o, x):
    if x[1] > 0:
        o.dropout.apply(lambda module: o.order.move_to_end("a"))
        y = x * next(iter(o.order.values()))
        o.dropout.apply(lambda module: o.order.move_to_end("a", last=False))
        return y
    return x * next(iter(o.order.values()))


def queued(o, x):
    if x[1] > 0:
        o.waiting.put(3.0)
        return x * o.waiting.get() + o.waiting.qsize()
    return x + o.waiting.qsize()


def slots_written(o, x):
    def write(slotted, v):
        try:
            slotted.value, slotted.other = (2.0, 5.0) if v > 0 else (3.0, 7.0)
        finally:
            y = slotted.value * slotted.other
        if hasattr(slotted, "other"):
            slotted.value = 1.0
            del slotted.other
        return y

    return x * write(o.slotted, x[1]) + o.slotted.value


def failed_on_the_way(o, x):
    y = x * 1
    if x[1] > 0:
        try:
            o.table.update([("b", nn.Tanh()), 3])
        except Exception:
            y = x * len(o.table)
            o.table.pop("b")
    return y * len(o.table)


CHANGED = [
    eval_and_train,
    train_false,
    module_added,
    buffer_registered,
    hook_registered,
    layers_added,
    shuffled,
    counted,
    moved_to_end,
    moved_by_a_library,
    queued,
    slots_written,
    failed_on_the_way,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", CHANGED, ids=lambda p: p.__name__)
@pytest.mark.parametrize("flip", [1, -1])
def test_changes_of_some_lanes_are_not_seen_by_others(program, flip):
    outside = Outside()
    want = torch.stack([program(outside, x * flip) for x in XS])
    outside = Outside()
    for _ in range(2):
        got = vmap(functools.partial(program, outside), randomness="same")(XS * flip)
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
def test_objects_too_large_to_compare_are_not_changed_before_all_run_as_written():
    outside = Outside()
    outside.dropout.rows = [[] for _ in range(30_000)]
    want = torch.stack([eval_and_train(outside, x) for x in XS])
    torch.testing.assert_close(vmap(functools.partial(eval_and_train, outside), randomness="same")(XS), want)


def test_what_cannot_be_put_back_is_said():
    class Key:
        sound = True

        def __hash__(self):
            if not self.sound:
                raise TypeError("unhashable by now")
            return 1

    def spoil(table, v):
        try:
            if v > 0:
                table["b"] = 2
                Key.sound = False
                return 2
        finally:
            table["c"] = 3
        return 1

    table = {Key(): 1}
    with pytest.raises(RuntimeError) as caught:
        vmap(lambda x: x * spoil(table, x[1]) if x[0] > 0 else x)(torch.tensor([[1.0, 2.0], [2.0, 1.0], [-1, 2]]))
    assert str(caught.value).startswith(
        "vmap: called code changed an object on the way of some lanes (cell, dict, or what they hold), and what it "
        f"held before cannot be put back for all lanes to run as written\n  at {__file__}"
    )
