"""Python's functions of lists of numbers that differ from lane to lane, against the loop, and for all lanes at once."""

import bisect
import functools
import heapq
import math
import operator
import statistics
import warnings

import pytest
import torch

from lanewise import grad, vmap
from lanewise._control.runtime import lists

XS = torch.tensor(
    [
        [0.5, -1.5, 2.0, 0.25],
        [3.0, 0.1, -0.2, 3.0],
        [-1.0, -2.0, -3.0, -0.5],
        [0.3, 0.7, 0.7, 1e3],
        [0.0, -0.0, 1.0, 9.0],
    ],
    dtype=torch.float64,
)
NANS = torch.tensor([[1.0, math.nan, 3.0], [math.nan, 2.0, 1.0], [2.0, 1.0, 0.5]], dtype=torch.float64)
KS = torch.tensor([[3, 0, -2, 3], [1, 1, 0, 5], [7, -1, -1, 2], [0, 0, 0, 0]])


def heap_order(x):
    heap = x.tolist()
    heapq.heapify(heap)
    heapq.heappush(heap, 0.4)
    first = heapq.heappop(heap)
    return torch.tensor([first, heapq.heapreplace(heap, first + 1.0), heapq.heappushpop(heap, 0.1), *heap])


def sorted_in_place(x):
    values = x.tolist()
    values.sort(key=lambda v: -abs(v))
    values.append(0.0)
    values.sort(reverse=True)
    return torch.tensor(values)


def without_largest(x):
    values = x.tolist()
    values.remove(max(values))
    gone = values.pop(values.index(min(values)))
    return torch.tensor([gone, *values])


def inserted(x):
    ordered = sorted(x.tolist())
    bisect.insort(ordered, 0.6)
    return torch.tensor([bisect.bisect(ordered, 0.5), *ordered])


def in_a_branch(x):
    values = x.tolist()
    if values[0] > 0:
        return torch.tensor(sum(v for v in values if v > 0)) * 2
    return torch.tensor(math.fsum(values) + len([v for v in values if v < -1]))


def own_sum(x):
    def sum(entries):
        return 10.0 * entries[-1] if entries else -1.0

    return torch.tensor(sum([v for v in x.tolist() if v > 0.2]), dtype=torch.float64)


FLOATS = {
    "sum": lambda x: sum(x.tolist()),
    "sum start": lambda x: sum(x.tolist(), 1.5),
    "sum int start": lambda x: sum(x.tolist(), 2),
    "sum own start": lambda x: sum(x.tolist(), x[0].item()),
    "sum of tensors": lambda x: sum(x),
    "sum of some tensors": lambda x: sum(v * 2 for v in x if v > 0.2),
    "sum of products": lambda x: sum(v * w for v, w in zip(x.tolist(), x.tolist()[1:])),
    "fsum": lambda x: math.fsum(x.tolist()),
    "fsum of a tensor": lambda x: math.fsum(x),
    "fsum of some": lambda x: math.fsum(v for v in x.tolist() if v != 3.0),
    "dist": lambda x: math.dist(x.tolist(), [1.0, 0.0, 2.0, 0.0]),
    "prod": lambda x: math.prod(x.tolist(), start=0.5),
    "prod of some": lambda x: math.prod([v for v in x.tolist() if v > -1], start=0.5),
    "count": lambda x: sum(1 for v in x.tolist() if v > 0),
    "count of tensors": lambda x: sum(1 for v in x if v > 0),
    "count of pairs": lambda x: sum(2 for v in x.tolist() for w in x.tolist() if v > w),
    "len": lambda x: len([v for v in x.tolist() if v > 0]),
    "len, two conditions": lambda x: len([v for v in x.tolist() if v > 0 if v < 2]),
    "sum of some": lambda x: sum([v for v in x.tolist() if v > 0], 0.0),
    "sum of some or 0": lambda x: sum(v for v in x.tolist() if v > 0),
    "inverse of some": lambda x: sum((1 / v for v in x.tolist() if v != 0), 0.0),
    "max of some": lambda x: max([v for v in x.tolist() if v < 3], default=-1.0),
    "max of some or int": lambda x: float(max((v for v in x.tolist() if v > 0.2), default=7)),
    "min by key": lambda x: min((v for v in x.tolist() if v < 3), key=abs),
    "any": lambda x: any(v > 1 for v in x.tolist()),
    "any of some": lambda x: any(v > 1 for v in x.tolist() if v < 5),
    "all of some": lambda x: all(v < 1 for v in x.tolist() if v > 0),
    "all of some numbers": lambda x: all([v - 3 for v in x.tolist() if v > 0]),  # noqa: C419
    "mean": lambda x: statistics.mean(x.tolist()),
    "fmean": lambda x: statistics.fmean(x.tolist(), weights=[1, 2, 3, 4]),
    "mean of some": lambda x: statistics.mean([v for v in x.tolist() if v != 1e3]),
    "median": lambda x: statistics.median(v for v in x.tolist()),
    "variance": lambda x: statistics.variance(x.tolist()),
    "stdev": lambda x: statistics.stdev(x.tolist(), xbar=0.5),
    "list.count": lambda x: x.tolist().count(0.0),
    "list.index": lambda x: x.tolist().index(max(x.tolist())),
    "in": lambda x: torch.tensor(3.0 in x.tolist()),
    "not in": lambda x: torch.tensor(0.7 not in x.tolist()),
    "reversed": lambda x: sum(v * i for i, v in enumerate(reversed(x.tolist()))),
    "reduce": lambda x: functools.reduce(operator.add, x.tolist()),
    "sorted by key": lambda x: torch.tensor(sorted(x.tolist(), key=abs)),
    "sorted by key, reversed": lambda x: torch.tensor(sorted(x.tolist(), key=lambda v: v > 0, reverse=True)),
    "argsort": lambda x: torch.tensor(sorted(range(4), key=x.tolist().__getitem__)),
    "argmax": lambda x: max(range(4), key=x.tolist().__getitem__),
    "nlargest": lambda x: torch.tensor(heapq.nlargest(2, x.tolist())),
    "nsmallest by key": lambda x: torch.tensor(heapq.nsmallest(2, x.tolist(), key=abs)),
    "isclose": lambda x: torch.tensor([math.isclose(v, 0.5, abs_tol=0.3) for v in x.tolist()]),
    "heap": heap_order,
    "sort": sorted_in_place,
    "remove, pop": without_largest,
    "insort": inserted,
    "in a branch": in_a_branch,
    "a function of that name": own_sum,
}
INTS = {
    "sum": lambda k: sum(k.tolist()),
    "sum of truths": lambda k: sum(v > 0 for v in k.tolist()),
    "sum of some": lambda k: sum(v for v in k.tolist() if v > 0),
    "sum of some, float start": lambda k: sum((v for v in k.tolist() if v > 0), 0.5),
    "mean": lambda k: float(statistics.mean(k.tolist())),
    "quantiles": lambda k: torch.tensor(statistics.quantiles(k.tolist())),
    "median_low": lambda k: statistics.median_low(k.tolist()),
    "count": lambda k: k.tolist().count(k[0].item()),
    "index": lambda k: k.tolist().index(k[3].item()),
    "in": lambda k: k[0].item() in k.tolist()[1:],
    "sorted": lambda k: torch.tensor(sorted(k.tolist(), key=lambda v: v % 3)),
    "gcd": lambda k: math.gcd(*k.tolist()),
}
# What runs again, or asks for a Python number, in some lanes; the numbers are those of a loop.
PARTS = {"min by key", "a function of that name", "argmax", "max of some or int", "sum of some or 0"}


def loop(f, xs):
    return torch.stack([torch.as_tensor(f(x)) for x in xs])


def check(f, xs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = vmap(f)(xs)
    expected = loop(f, xs)
    assert isinstance(out, torch.Tensor) and out.shape == expected.shape and out.dtype is expected.dtype
    assert torch.allclose(out, expected, rtol=0, atol=0, equal_nan=True), f"{out}, not {expected}"


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name):
    check(FLOATS[name], XS)


@pytest.mark.parametrize("name", INTS)
def test_ints(name):
    check(INTS[name], KS)


@pytest.mark.parametrize("name", ["sum", "fsum", "count", "len", "max of some", "median", "sorted by key"])
def test_nan(name):
    check(FLOATS[name], NANS)


def test_the_same_nan_is_found():
    def f(x):
        values = x.tolist()
        return values.index(values[1]) + 10 * values.count(values[0]) + 100 * (values[1] in values)

    check(f, NANS)


@pytest.mark.parametrize("name", [name for name in FLOATS if name not in PARTS])
def test_nothing_runs_again(name):
    runs = []

    def f(x):
        runs.append(None)
        return FLOATS[name](x)

    vmap(f)(XS)
    runs.clear()
    vmap(f)(XS)
    assert len(runs) == 1 or name == "in a branch"


@pytest.mark.parametrize("name", ["sum", "sum of some", "len", "mean", "list.index", "heap", "any of some"])
def test_pairs_of_lanes(name):
    xs = torch.stack([XS, XS.flip(0), XS * 2])
    out = vmap(vmap(FLOATS[name]))(xs)
    assert torch.equal(out, torch.stack([loop(FLOATS[name], x) for x in xs]))


@pytest.mark.parametrize("name", ["sum", "sum of some", "len", "mean", "list.count"])
def test_with_derivatives(name):
    f = FLOATS[name]
    cost = lambda x: (x * f(x)).sum()
    assert torch.equal(vmap(grad(cost))(XS), torch.stack([grad(cost)(x) for x in XS]))
    outer = grad(lambda xs: vmap(cost)(xs).sum())(XS)
    assert torch.allclose(outer, torch.stack([grad(cost)(x) for x in XS]))


def test_derivative_of_a_sum_of_some_tensors():
    f = lambda x: sum(v.sqrt() for v in x if v > 0)
    xs = XS[[0, 1, 3, 4]]
    expected = torch.stack([grad(f)(x) for x in xs])
    assert torch.equal(vmap(grad(f))(xs), expected)
    assert torch.allclose(grad(lambda xs: vmap(f)(xs).sum())(xs), expected)


@pytest.mark.parametrize(
    ("f", "error"),
    [
        (lambda x: x.tolist().index(0.25), ValueError),
        (lambda x: max(v for v in x.tolist() if v > 0), ValueError),
        (lambda x: statistics.mean([v for v in x.tolist() if v > 0.26]), statistics.StatisticsError),
        (lambda x: sum(1 / v for v in x.tolist() if v < 5), ZeroDivisionError),
        (lambda x: x.tolist().remove(9.0), ValueError),
    ],
)
def test_what_some_lane_raises(f, error):
    with pytest.raises(error) as found:
        vmap(f)(XS)
    (lane,) = found.value.lanes if hasattr(found.value, "lanes") else (None,)
    with pytest.raises(error) as expected:
        f(XS[lane])
    assert str(found.value) == str(expected.value)


def neumaier(entries, start=0):
    """What `sum` is from Python 3.12 on."""
    total, lost = start, 0.0
    for x in entries:
        new = total + x
        lost += (total - new) + x if abs(total) >= abs(x) else (x - new) + total
        total = new
    return total + lost


def test_sums_of_floats_that_python_compensates(monkeypatch):
    xs = torch.tensor([[1.0, 1e100, 1.0, -1e100], [0.1, 0.2, 0.3, 0.4], [1e16, 1.0, 1.0, -1e16]], dtype=torch.float64)
    monkeypatch.setattr(lists, "_COMPENSATED", True)
    monkeypatch.setattr(lists, "sum", neumaier, raising=False)
    expected = torch.tensor([neumaier(x) for x in xs.tolist()], dtype=torch.float32)
    assert expected[0] == 2.0
    assert torch.equal(vmap(lambda x: sum(x.tolist()))(xs), expected)
    assert torch.equal(vmap(lambda x: sum(v * 1.0 for v in x.tolist()))(xs), expected)
