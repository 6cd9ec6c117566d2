"""Sorting, searching, counting, against the loop."""

import pytest
import torch

from lanewise import grad, vmap
from tests.rules.lanes import bools, check, distinct, ints, normal


def ascending(*shape):
    return lambda g: torch.randn(shape, generator=g, dtype=torch.float64).sort(-1).values


CASES = {
    "sort": (lambda x: x.sort(0, True), normal(4, 3)),
    "sort 0-dim": (lambda x: x.sort(), normal()),
    "sort stable": (lambda x: torch.sort(x, stable=True, dim=1), normal(2, 3)),
    "argsort": (lambda x: x.argsort(0), normal(4, 3)),
    "argsort stable": (lambda x: x.argsort(dim=0, stable=True), ints(0, 3, 5)),
    "msort": (lambda x: x.msort(), normal(4, 3)),
    "argmax": (lambda x: x.argmax(), normal(2, 3)),
    "argmax kept": (lambda x: x.argmax(keepdim=True), normal(2, 3)),
    "argmax dim": (lambda x: x.argmax(-1, True), normal(2, 3)),
    "argmin 0-dim": (lambda x: (x.argmin(), x.argmin(0, True)), normal()),
    "aminmax": (lambda x: tuple(x.aminmax()), normal(2, 3)),
    "aminmax dim": (lambda x: tuple(x.aminmax(dim=1, keepdim=True)), normal(2, 3)),
    "aminmax kept": (lambda x: tuple(torch.aminmax(x, keepdim=True)), normal(2, 3)),
    "aminmax 0-dim": (lambda x: tuple(x.aminmax(dim=0, keepdim=True)), normal()),
    "logsumexp": (lambda x: x.logsumexp((0, -1), True), normal(2, 3, 2)),
    "logsumexp 0-dim": (lambda x: x.logsumexp(0), normal()),
    "logsumexp ints": (lambda x: x.logsumexp(0), ints(0, 4, 3)),
    "count_nonzero": (lambda x: torch.count_nonzero(x), ints(0, 2, 3, 4)),
    "count_nonzero dims": (lambda x: torch.count_nonzero(x, (0, 2)), ints(0, 2, 3, 4, 2)),
    "searchsorted": (lambda b, x: torch.searchsorted(b, x), ascending(5), normal(3, 2)),
    "searchsorted right": (lambda b, x: torch.searchsorted(b, x, right=True), ascending(2, 5), normal(2, 3)),
    "searchsorted 0-dim": (lambda b, x: torch.searchsorted(b, x, out_int32=True), ascending(5), normal()),
    "searchsorted number": (lambda b: torch.searchsorted(b, 0.3), ascending(5)),
    "searchsorted sorter": (lambda b, x: torch.searchsorted(b, x, sorter=b.argsort()), normal(5), normal(3)),
    "searchsorted mixed": (lambda b, x: torch.searchsorted(b, x), ints(0, 1, 4), normal(3)),
    "bucketize": (lambda x, b: torch.bucketize(x, b, right=True), normal(2, 3), ascending(4)),
    "bucketize number": (lambda b: torch.bucketize(0.2, b), ascending(4)),
    "isin": (lambda x, t: torch.isin(x, t), ints(0, 6, 2, 3), ints(0, 6, 4)),
    "isin not": (lambda x, t: torch.isin(x, t, invert=True), ints(0, 6, 2, 3), ints(0, 6, 2, 1)),
    "isin 0-dim": (lambda x, t: torch.isin(x, t), ints(0, 2), ints(0, 2)),
    "isin nothing": (lambda x, t: torch.isin(x, t), ints(0, 6, 3), ints(0, 6, 0)),
    "isin mixed": (lambda x, t: torch.isin(x, t), ints(0, 4, 3), lambda g: torch.arange(3.0)),
    "isin number": (lambda x: torch.isin(x, 2), ints(0, 6, 2, 3)),
    "isin a number": (lambda t: torch.isin(2, t), ints(0, 4, 3)),
    "unique once": (lambda x: x.sort().values.unique_consecutive(), distinct(5, 5)),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=4), bools(2, 3)),
    "nonzero_static fill": (lambda x: torch.nonzero_static(x, size=2, fill_value=9), bools(5)),
    "renorm": (lambda x: x.renorm(2, 1, 0.7), normal(2, 3, 2)),
    "renorm_": (lambda x: x.clone().renorm_(1, 0, 0.7), normal(2, 3)),
    "dist": (lambda x, y: torch.dist(x, y, 3), normal(2, 3), normal(3)),
    "nonzero": (lambda x: x.argsort().nonzero(), normal(4)),
    "where nonzero": (lambda x: torch.where(x.argsort() > 1), normal(4)),
}


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_sorting(name):
    f, *makers = CASES[name]
    grad = torch.__version__ >= (2, 12) or not name.startswith("aminmax")  # torch 2.11 has no gradient of it
    check(f, *makers, grad=grad, empty=name not in ("unique once", "nonzero", "where nonzero"))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segment_reduce(reduce):
    lengths = lambda g: torch.tensor([2, 0, 3])[torch.randperm(3, generator=g)]
    check(lambda x, n: torch.segment_reduce(x, reduce, lengths=n, unsafe=True), normal(5), lengths, nested=False)
    check(lambda x, n: torch.segment_reduce(x, reduce, lengths=n, unsafe=True), normal(5, 2), lengths, nested=False)


@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
def test_equal_elements_share_the_gradient_of_a_median(median):
    x = torch.tensor([[1.0, 1.0, 0.0, 2.0], [3.0, 3.0, 3.0, 5.0], [float("nan"), 1.0, 2.0, 3.0]])
    leaves = [row.clone().requires_grad_() for row in x]
    want = torch.stack([torch.autograd.grad(median(leaf), leaf)[0] for leaf in leaves])
    for slopes in (grad(lambda x: vmap(median)(x).sum())(x), vmap(grad(median))(x)):
        torch.testing.assert_close(slopes, want)
