"""Containers that some lanes have made are theirs to change: the function goes on where lanes part."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise import grad, vmap
from lanewise._control.runs import boundary
from lanewise._core.parting.lanes import Boundary

D = torch.float64


class Count(TorchDispatchMode):
    """How often an operation runs."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def stages(y):
    slopes = [y.cos()]
    for weight in (0.5, 0.75):
        slopes.append((y + weight * slopes[-1]).cos())
    sums = {"half": sum(slopes) / 2}
    sums["all"] = sums["half"] * 2
    return sums["all"]


def march(y):
    while y < 10:
        y = y + stages(y).abs() + 0.1
        halves = [y / 2 for _ in range(2)]
        halves[0] = halves[0] + 1
        y = halves[0] + halves[1] - 1
    return y


def test_lists_and_dicts_made_inside_a_loop():
    ys = torch.linspace(0, 9, 40, dtype=D)
    want = torch.stack([march(y) for y in ys])
    torch.testing.assert_close(vmap(march)(ys), want)
    with Count(torch.ops.aten.cos.default) as seen:
        torch.testing.assert_close(vmap(march)(ys), want)
    assert seen.count % 3 == 0 and seen.count <= 3 * 100  # three for each round: no round runs again for some lanes
    grads = torch.stack([torch.autograd.grad(march(y), y)[0] for y in ys.clone().requires_grad_().unbind()])
    torch.testing.assert_close(vmap(grad(march))(ys), grads)


def test_a_list_made_before_lanes_part_has_entries_of_each_lane():
    def f(x):
        steps = []
        while x < 3:
            x = x * 1.5 + 0.1
            steps.append(x)
        return x + sum(steps)

    def g(x):
        if x > 0:
            parts = [x]
        else:
            parts = [x, -x]
        parts.append(x * x)
        return sum(parts) * len(parts)

    def h(x):
        found = {}
        if x > 0:
            kept = found
            kept["x"] = x
        found["y"] = x * 2
        return sum(found.values())

    xs = torch.linspace(-1, 2, 7, dtype=D).abs() + 0.01
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]))
    xs = torch.linspace(-1, 2, 7, dtype=D)
    for program in (g, h):
        torch.testing.assert_close(vmap(program)(xs), torch.stack([program(x) for x in xs]))


def test_lists_out_of_use_are_not_kept(monkeypatch):
    calls = []

    def remember(*args):
        calls.append(Boundary(*args))
        return calls[-1]

    monkeypatch.setattr(boundary, "Boundary", remember)

    def f(x):
        n = 0
        while x < 1000:
            pair = [x]
            pair.append(x + 1)
            x = pair[1]
            n += 1
        return x, n

    x, n = vmap(f)(torch.tensor([0.5, 900.5], dtype=D))
    assert n.tolist() == [1000, 100]
    torch.testing.assert_close(x, torch.tensor([1000.5, 1000.5], dtype=D))
    assert 0 < max(len(call.made) for call in calls) < 100


def _named_tuple_inside(x):
    Step = namedtuple("Step", "x count")
    step = Step(x, 0)
    while step.x > 1 and step.count < 3:
        step = step._replace(x=step.x / 2, count=step.count + 1)
    return step


def _dataclass_inside(x):
    @dataclasses.dataclass
    class Step:
        x: torch.Tensor
        count: int

    return Step(x / 2, 1) if x > 1 else Step(x, 0)


@pytest.mark.parametrize("f", [_named_tuple_inside, _dataclass_inside])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_a_class_of_results_that_the_function_defines(f, chunk_size):
    xs = torch.tensor([0.5, 1.5, 1.2])
    for _ in range(4):
        got = vmap(f, chunk_size=chunk_size)(xs)
        assert type(got).__qualname__ == type(f(xs[0])).__qualname__ and type(got).__module__ == __name__
        assert got.x.tolist() == [f(x).x.item() for x in xs] and got.count.tolist() == [0, 1, 1]


def test_names_of_what_the_function_defines():
    names = []

    def f(x):
        class Outer:
            class Inner:
                def method(self):
                    return lambda: x

        def inner():
            return x

        y = x if x > 1 else x * 2
        defined = (Outer, Outer.Inner, Outer.Inner.method, inner, Outer.Inner().method())
        names.append([each.__qualname__ for each in defined])
        return y

    xs = torch.tensor([0.5, 1.5])
    f(xs[0])
    for _ in range(3):
        vmap(f)(xs)
    assert len(names) > 3 and all(found == names[0] for found in names)
