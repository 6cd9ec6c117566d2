"""Random programs that change objects from outside and change them back, with branches and loops in between."""

import collections
import functools
import linecache
import os
import random

import pytest
import torch

from lanewise import grad, vmap
from tests.control.test_outside_objects import Stack

D = torch.float64
SEEDS = range(200 if os.environ.get("LANEWISE_FULL") else 12)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


class Outside:
    def __init__(self):
        self.row = [1.0]
        self.table = {}
        self.count = 0
        self.stack = Stack()
        self.queue = collections.deque()
        self.rows = [[], []]

    def sizes(self):
        return len(self.row), len(self.table), self.count, self.stack.depth, len(self.queue), len(self.rows[1])


# What is done, what undoes it, and what can be told from it.
CHANGES = [
    ("o.row.append(1.0)", "o.row.pop()", "len(o.row)"),
    ("o.count += 1", "o.count -= 1", "o.count"),
    ("o.stack.push(1)", "o.stack.pop()", "o.stack.depth"),
    ("o.table[len(o.table)] = 1", "o.table.popitem()", "len(o.table)"),
    ("o.queue.appendleft(1)", "o.queue.popleft()", "len(o.queue)"),
    ("o.rows[1].append(2)", "o.rows[1].pop()", "len(o.rows[1])"),
    ("add(o)", "o.row.pop()", "len(o.row)"),
    ("SHARED.append(1)", "SHARED.pop()", "len(SHARED)"),
]
CONDITIONS = ["y[0] > 0", "y[1] > 0.3", "y.sum() > 0", "x[2] < 0.2", "y[0].item() > y[1].item()", "int(x[0] * 3) > 0"]
HEAD = """SHARED = []


def add(o):
    o.row.append(2.0)


def branch(o, y):
    o.count += 1
    out = y * o.count if y[0] > 0 else y + o.count
    o.count -= 1
    return out


def program(o, x):
    y = x * 1
"""


def indented(lines):
    return ["    " + line for line in lines]


def block(rng, depth):
    lines = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.randint(0, 9) if depth else 0
        inner = block(rng, depth - 1) if depth else [f"y = y + 0.1 * {rng.choice(CHANGES)[2]}"]
        do, undo, measure = rng.choice(CHANGES)
        if kind < 4:
            lines += [do, *inner, f"y = y * 0.9 + 0.1 * {measure}", undo]
        elif kind < 6:
            lines += [f"if {rng.choice(CONDITIONS)}:", *indented(inner)]
            if rng.random() < 0.6:
                lines += ["else:", *indented(block(rng, depth - 1))]
        elif kind == 6:
            lines += [f"for i{depth} in range(int(x[1] > 0) + 1):", *indented(inner)]
        elif kind == 7:
            condition = f"n{depth} < 2 and {rng.choice(CONDITIONS)}"
            lines += [f"n{depth} = 0", f"while {condition}:", f"    n{depth} += 1", *indented(inner)]
        elif kind == 8:
            lines += ["y = branch(o, y)"]
        else:
            lines += ["try:", *indented([do, *inner]), "finally:", f"    {undo}"]
    return lines


def program(seed, source):
    text = HEAD + "\n".join(indented(block(random.Random(seed), 3))) + "\n    return y\n"
    name = f"<changes {seed} {source}>"
    if source:
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = {"torch": torch, "__name__": "random_changes"}
    exec(compile(text, name, "exec"), space)
    return space["program"]


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_as_the_loop(seed, source):
    f = program(seed, source)
    xs = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(seed))
    leaf = xs.clone().requires_grad_()
    want = torch.stack([f(Outside(), x) for x in leaf])
    gradient = torch.autograd.grad((want**2).sum(), leaf)[0]
    want = want.detach()
    o = Outside()
    before = o.sizes()
    for _ in range(2):
        torch.testing.assert_close(vmap(lambda x: f(o, x))(xs), want)
        torch.testing.assert_close(vmap(functools.partial(f, o), chunk_size=4)(xs), want)
        pairs = vmap(vmap(f, in_dims=(None, 0)), in_dims=(None, 0))(o, torch.stack([xs, xs.flip(0)]))
        torch.testing.assert_close(pairs, torch.stack([want, want.flip(0)]))
        torch.testing.assert_close(vmap(grad(lambda x: (f(o, x) ** 2).sum()))(xs), gradient)
        assert o.sizes() == before
