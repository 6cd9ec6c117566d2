"""Indexing with tensors, against the loop."""

import pytest
import torch

from lanewise import grad, hessian, vmap
from tests.rules.lanes import bools, check, distinct, ints, normal

CASES = {
    "gather": (lambda x, i: x.gather(0, i), normal(3, 4), ints(0, 3, 2, 4)),
    "gather last": (lambda x, i: x.gather(-1, i), normal(3, 4), ints(0, 4, 3, 5)),
    "gather 0-dim": (lambda x, i: x.gather(0, i), normal(), ints(0, 1)),
    "gather 0-dim by 1-dim": (lambda x, i: x.gather(0, i), normal(), ints(0, 1, 3)),
    "gather 1-dim by 0-dim": (lambda x, i: x.gather(0, i), normal(4), ints(0, 4)),
    "scatter": (lambda x, i, s: x.scatter(1, i.expand(2, 3), s), normal(2, 4), distinct(4, 3), normal(2, 3)),
    "scatter value": (lambda x, i: x.scatter(0, i, 2.5), normal(4, 3), ints(0, 4, 2, 3)),
    "scatter value 0-dim": (lambda x, i: x.scatter(0, i, 2.5), normal(), ints(0, 1)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), normal(4, 3), ints(0, 4, 5, 3), normal(5, 3)),
    "scatter_add_": (lambda x, i, s: own(x).scatter_add_(0, i, s), normal(4), ints(0, 4, 5), normal(5)),
    "scatter_add 0-dim": (lambda x, i, s: x.scatter_add(0, i, s), normal(), ints(0, 1), normal()),
    "scatter_": (lambda x, i: own(x).scatter_(1, i, 1.5), normal(2, 4), ints(0, 4, 2, 2)),
    "index_select": (lambda x, i: x.index_select(1, i), normal(2, 4, 3), ints(0, 4, 5)),
    "index_select first": (lambda x, i: x.index_select(0, i), normal(4, 3), ints(0, 4, 5)),
    "index_select 0-dim": (lambda x, i: x.index_select(0, i), normal(), ints(0, 1, 1)),
    "index_select by 0-dim": (lambda x, i: x.index_select(-1, i), normal(2, 4), ints(0, 4)),
    "index_add": (lambda x, i, s: x.index_add(1, i, s, alpha=2), normal(2, 4), ints(0, 4, 3), normal(2, 3)),
    "index_add_": (lambda x, i, s: own(x).index_add_(0, i, s), normal(4, 2), ints(0, 4, 3), normal(3, 2)),
    "index_add 0-dim": (lambda x, i, s: x.index_add(0, i, s), normal(), ints(0, 1, 1), normal()),
    "index_copy": (lambda x, i, s: x.index_copy(1, i, s), normal(2, 4), distinct(4, 3), normal(2, 3)),
    "index_copy_": (lambda x, i, s: own(x).index_copy_(0, i, s), normal(4, 2), distinct(4, 3), normal(3, 2)),
    "index_fill": (lambda x, i: x.index_fill(1, i, 3), normal(2, 4), ints(-4, 4, 2)),
    "index_fill_": (lambda x, i: own(x).index_fill_(0, i, 3), normal(4), ints(-4, 4, 2)),
    "index_fill tensor": (lambda x, i, v: x.index_fill(1, i, v), normal(2, 4), ints(0, 4, 3), normal()),
    "index_fill_ tensor": (lambda x, i, v: own(x).index_fill_(0, i, v), normal(4), ints(0, 4, 3), normal()),
    "index_fill 0-dim": (lambda x, i, v: x.index_fill(0, i, v), normal(), ints(0, 1, 1), normal()),
    "index": (lambda x, i: x[i], normal(4, 3), ints(-4, 4, 5)),
    "index last": (lambda x, i: x[..., i], normal(2, 3, 4), ints(-4, 4, 5, 2)),
    "index pair": (lambda x, i, j: x[i, j], normal(4, 3, 2), ints(0, 4, 5), ints(0, 3, 2, 1)),
    "index pair inside": (lambda x, i, j: x[:, i, j], normal(2, 4, 3, 2), ints(0, 4, 5), ints(0, 3, 5)),
    "index apart": (lambda x, i, j: x[i, :, j], normal(4, 2, 3), ints(0, 4, 5), ints(0, 3, 5)),
    "index far apart": (lambda x, i, j: x[:, i, :, j], normal(2, 4, 2, 3), ints(0, 4, 5), ints(0, 3, 1)),
    "index_put": (lambda x, i, v: x.index_put((i,), v), normal(4, 3), distinct(4, 2), normal(2, 3)),
    "index_put row": (lambda x, i, v: x.index_put((i,), v), normal(4, 3), distinct(4, 2), normal(3)),
    "index_put 0-dim": (lambda x, i, v: x.index_put((i,), v), normal(4, 3), ints(0, 4, 2), normal()),
    "index_put add": (lambda x, i, v: x.index_put((i,), v, True), normal(4, 3), ints(0, 4, 6), normal(6, 1)),
    "put last": (
        lambda x, i, v: torch.ops.aten.index_put(x, [None, i], v, True),
        normal(2, 4),
        ints(0, 4, 3),
        normal(2, 3),
    ),
    "put apart": (
        lambda x, i, v: torch.ops.aten.index_put(x, [i, None, i], v, True),
        normal(3, 2, 3),
        ints(0, 3, 4),
        normal(4, 2),
    ),
    "put apart broadcast": (
        lambda x, i, v: torch.ops.aten.index_put(x, [i, None, i], v, True),
        normal(3, 2, 3),
        ints(0, 3, 4),
        normal(2),
    ),
    "put inside": (
        lambda x, i, v: torch.ops.aten.index_put(x, [None, i, i], v, True),
        normal(2, 3, 3, 2),
        ints(0, 3, 4),
        normal(2, 4, 2),
    ),
    "setitem": (lambda x, i, v: put_in(x, i, v), normal(4, 3), distinct(4, 2), normal(2, 3)),
    "mask setitem": (lambda x, m: put_in(x, m, 2.5), normal(4, 3), bools(4, 3)),
    "mask setitem rows": (lambda x, m, v: put_in(x, m, v), normal(4, 3), bools(4), normal(3)),
    "mask setitem value": (lambda x, m, v: put_in(x, m, v), normal(4, 3), bools(4, 3), normal()),
    "mask put inside": (
        lambda x, m, v: torch.ops.aten.index_put(x, [None, m], v, True),
        normal(2, 3, 4),
        bools(3),
        normal(2, 1, 4),
    ),
    "mask of as many": (lambda x, i, v: x[(x > 9).index_fill(0, i, True)] * v, normal(5, 2), distinct(5, 2), normal()),
    "unsafe index": (lambda x, i: torch.ops.aten._unsafe_index(x, [None, i]), normal(2, 4), ints(0, 4, 5)),
    "unsafe masked index": (
        lambda x, m, i: torch.ops.aten._unsafe_masked_index(x, m, [i], 1.0),
        normal(5),
        bools(3),
        ints(0, 5, 3),
    ),
    "take": (lambda x, i: x.take(i), normal(2, 3), ints(-6, 6, 4)),
    "take 0-dim": (lambda x, i: x.take(i), normal(), ints(0, 1)),
    "put": (lambda x, i, s: x.put(i, s, True), normal(2, 3), ints(-6, 6, 2, 2), normal(4)),
    "put_": (lambda x, i, s: own(x).put_(i, s), normal(2, 3), distinct(6, 4), normal(4)),
    "masked_fill tensor": (lambda x, m, v: x.masked_fill(m, v), normal(3, 2), bools(2), normal()),
    "masked_fill wider mask": (lambda x, m, v: x.masked_fill(m, v), normal(2), bools(3, 2), normal()),
    "masked_fill_ tensor": (lambda x, m, v: own(x).masked_fill_(m, v), normal(3, 2), bools(2), normal()),
    "masked_scatter": (lambda x, m, s: x.masked_scatter(m, s), normal(2, 3), bools(2, 3), normal(7)),
    "masked_scatter wide": (lambda x, m, s: x.masked_scatter(m, s), normal(2, 3), bools(3), normal(2, 3)),
    "masked_scatter_": (lambda x, m, s: own(x).masked_scatter_(m, s), normal(2, 3), bools(3), normal(6)),
    "masked_select": (lambda x, i: x.masked_select((x > 9).index_fill(0, i, True)), normal(5), distinct(5, 2)),
    "cat": (lambda x, y: torch.cat([x, y, x], 1), normal(2, 3), normal(2, 1)),
    "cat empty": (lambda x, y: torch.cat([torch.zeros(0), x, y]), normal(2, 3), normal(1, 3)),
    "cat mixed": (lambda x, y: torch.cat([x, y]), ints(0, 9, 3), normal(2, dtype=torch.float32)),
}
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def own(x):
    """A copy that belongs to the lane, whatever x is."""
    return torch.zeros_like(x).copy_(x)


def put_in(x, index, value):
    out = own(x)
    out[index] = value
    return out


@pytest.mark.parametrize("name", CASES)
def test_index(name):
    f, *makers = CASES[name]
    # How many elements a mask picks is unknown where there are no lanes.
    check(f, *makers, empty=name not in ("mask of as many", "masked_select"))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce(reduce, include_self):
    args = normal(4, 2), ints(0, 4, 5, 2), normal(5, 2)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, reduce, include_self=include_self), *args)
    check(lambda x, i, s: own(x).scatter_reduce_(0, i, s, reduce, include_self=include_self), *args, grad=False)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce):
    args = normal(2, 4), ints(0, 4, 5), normal(2, 5)
    check(lambda x, i, s: x.index_reduce(1, i, s, reduce), *args, grad=reduce != "prod")
    check(lambda x, i, s: own(x).index_reduce_(1, i, s, reduce, include_self=False), *args, grad=False)


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_scatter_with_a_reduction(reduce):
    check(lambda x, i, s: x.scatter(0, i, s, reduce=reduce), normal(4), ints(0, 4, 5), normal(5), grad=False)
    check(lambda x, i: x.scatter(0, i, 2.0, reduce=reduce), normal(4), ints(0, 4, 5), grad=False)


def put_at(x, index, value):
    out = own(x)
    out[index] = value
    return out


NUMBERS = {
    "first": (lambda x, i: x[i], normal(4, 3), ints(-4, 4)),
    "only": (lambda x, i: x[i], normal(4), ints(-4, 4)),
    "last": (lambda x, i: x[..., i], normal(2, 4), ints(-4, 4)),
    "inside": (lambda x, i: x[1, i, None, :2], normal(2, 4, 3), ints(0, 4)),
    "two": (lambda x, i, j: x[i, :, j], normal(4, 2, 3), ints(0, 4), ints(0, 3)),
    "with a list": (lambda x, i, j: x[i, :, j], normal(4, 2, 3), ints(0, 4), ints(0, 3, 5)),
    "with a mask": (lambda x, i: x[i, torch.tensor([True, False, True])], normal(4, 3, 2), ints(0, 4)),
    "with a step": (lambda x, i: x[::2, i], normal(5, 4), ints(0, 4, dtype=torch.int32)),
    "set": (lambda x, i, v: put_at(x, i, v), normal(4, 3), ints(-4, 4), normal(3)),
    "set a number": (lambda x, i: put_at(x, i, 2), normal(4), ints(-4, 4)),
    "set last": (lambda x, i, v: put_at(x, (..., i), v), normal(2, 4), ints(0, 4), normal()),
    "set inside": (lambda x, i, v: put_at(x, (1, slice(1, None), i), v), normal(2, 3, 4), ints(0, 4), normal(2)),
    "set two": (lambda x, i, v: put_at(x, (i, slice(None), i), v), normal(3, 2, 3), ints(0, 3), normal(2)),
    "set widened": (lambda x, i, v: put_at(x, (None, i), v), normal(4, 3), ints(0, 4), normal(1, 3)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_lane_as_index(name):
    f, *makers = NUMBERS[name]
    check(f, *makers)


def test_a_number_of_a_lane_as_index_of_a_captured_table():
    table = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    numbers, runs = torch.arange(40).flip(0), []

    def f(i):
        runs.append(i)
        return table[i].sin() * table[i, 0] + [table, table * 2][1][-1 - i, 1:].sum()

    out = vmap(f)(numbers)
    assert len(runs) <= 2  # once until the lanes are seen to differ, once for all of them
    want = torch.stack([f(i) for i in numbers])
    torch.testing.assert_close(out, want)
    for got, expected in zip(*(torch.autograd.grad(o.cos().sum(), table) for o in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_number_of_a_lane_out_of_range():
    xs = torch.zeros(3, 4)
    for f in (lambda x, i: x[i], lambda x, i: put_at(x, i, 1.0)):
        with pytest.raises(IndexError, match="out of"):
            vmap(f)(xs, torch.tensor([0, 1, 4]))
    with pytest.raises(IndexError, match="too many indices"):
        vmap(lambda x, i: x[0, i])(xs, torch.tensor([0, 1, 2]))
    assert vmap(lambda i: int(torch.arange(3)[torch.tensor(1)]) * i)(torch.ones(2)).tolist() == [1, 1]


def test_gradients_of_values_written_through_masks_with_as_many_in_each_lane():
    def f(x):
        y = x * 1.0
        y[x > 0] = x[x > 0] ** 2
        return y.sum()

    xs = torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, -1.0]])
    assert torch.equal(vmap(grad(f))(xs), torch.stack([grad(f)(x) for x in xs]))


@pytest.mark.parametrize("value", [lambda x, m: x.sum() ** 3, lambda x, m: x[m] ** 3], ids=["one", "each"])
def test_second_derivatives_through_masks_that_differ(value):
    def f(x):
        y = x**2
        m = x > 0
        y[m] = value(x, m)
        return y.sum().sin()

    xs = torch.tensor([[0.5, -1, 2], [1, -1, -1], [1, 2, -1]], dtype=torch.float64)
    assert torch.allclose(vmap(hessian(f))(xs), torch.stack([torch.autograd.functional.hessian(f, x) for x in xs]))


def _by_a_tensor(y):
    y[y > 0] = torch.tensor(2.0)


EXPANDED = {
    "mask, number": lambda y: y.__setitem__(y > 0, 2.0),
    "mask, tensor": _by_a_tensor,
    "mask of some rows": lambda y: y.__setitem__(y > torch.tensor([[0.0], [5.0], [-5.0]]), 2.0),
    "added by a mask": lambda y: y.index_put_((y > 0,), torch.tensor(2.0), accumulate=True),
    "index_fill_": lambda y: y.index_fill_(0, torch.tensor([0]), 2.0),
    "index_fill_ by a tensor": lambda y: y.index_fill_(0, torch.tensor([0]), torch.tensor(2.0)),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 2.0),
}


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("captured", [False, True], ids=["lanes", "captured"])
@pytest.mark.parametrize("write", EXPANDED.values(), ids=EXPANDED)
def test_written_where_elements_share_memory(write, captured):
    xs = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]])

    def f(x):
        x = x * 1
        y = (torch.tensor([1.0, -2.0]) if captured else x).expand(3, 2)
        write(y)
        return x, y * 1, (x * y).sum()

    want = [torch.stack(parts) for parts in zip(*map(f, xs))]
    for got in (vmap(f)(xs), vmap(f, -1)(xs.T.contiguous())):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    if not captured:
        return  # torch's own gradients refuse it
    leaf = xs.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(part.sum() for x in leaf for part in f(x)), leaf)
    torch.testing.assert_close(grad(lambda xs: sum(part.sum() for part in vmap(f)(xs)))(xs), want)
    torch.testing.assert_close(vmap(grad(lambda x: sum(part.sum() for part in f(x))))(xs), want)
