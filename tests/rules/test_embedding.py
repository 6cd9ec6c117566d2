"""Embedding tables and bags against the loop."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lanewise import grad, jacrev, vmap
from tests.oracles import assert_same
from tests.rules.lanes import check, ints, normal


def bag(**options):
    def f(w, i, *weights):
        more = {"per_sample_weights": weights[0]} if weights else {}
        return F.embedding_bag(i, w, torch.tensor([0, 2, 2]), **more, **options)

    return f


def bag_offsets(i, o, w, **options):
    return F.embedding_bag(i, w, o.sort()[0] * torch.tensor([0, 1, 1]), **options)


TABLE = torch.arange(10.0).reshape(5, 2) + 1
CASES = {
    "plain": (lambda w, i: F.embedding(i, w), normal(5, 3), ints(0, 5, 4)),
    "grid": (lambda w, i: F.embedding(i, w), normal(5, 3), ints(0, 5, 2, 3)),
    "one index": (lambda w, i: F.embedding(i, w), normal(5, 3), ints(0, 5)),
    "padding": (lambda w, i: F.embedding(i, w, padding_idx=1), normal(3, 2), ints(0, 3, 6)),
    "frequencies": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), normal(3, 2), ints(0, 3, 6)),
    "both": (lambda w, i: F.embedding(i, w, 0, scale_grad_by_freq=True), normal(3, 2), ints(0, 3, 2, 3)),
    "max_norm": (lambda w, i: F.embedding(i, w.clone(), max_norm=0.5), normal(5, 3), ints(0, 5, 4)),
    "bag sum": (bag(mode="sum"), normal(5, 3), ints(0, 5, 6)),
    "bag mean": (bag(mode="mean"), normal(5, 3), ints(0, 5, 6)),
    "bag max": (bag(mode="max"), normal(5, 3), ints(0, 5, 6)),
    "bag sum padding": (bag(mode="sum", padding_idx=1), normal(3, 2), ints(0, 3, 6)),
    "bag mean padding": (bag(mode="mean", padding_idx=1), normal(3, 2), ints(0, 3, 6)),
    "bag max padding": (bag(mode="max", padding_idx=1), normal(3, 2), ints(0, 3, 6)),
    "bag last offset": (bag(mode="mean", include_last_offset=True), normal(5, 3), ints(0, 5, 2)),
    "bag weights": (bag(mode="sum"), normal(5, 3), ints(0, 5, 6), normal(6)),
    "bag weights padding": (bag(mode="sum", padding_idx=1), normal(3, 2), ints(0, 3, 6), normal(6)),
    "bag offsets": (
        lambda w, i, o: bag_offsets(i, o, w, mode="mean"),
        normal(5, 3),
        ints(0, 5, 6),
        ints(0, 6, 3),
    ),
    "bag grid": (lambda w, i: F.embedding_bag(i, w, mode="sum"), normal(5, 3), ints(0, 5, 2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_the_loop(name):
    f, *makers = CASES[name]
    check(f, *makers)


def test_table_of_each_lane_is_shortened_in_place():
    table = torch.randn(3, 5, 2).mul_(3)
    rows = table.clone()
    index = torch.tensor([0, 3])
    vmap(lambda w: F.embedding(index, w, max_norm=1.0))(table)
    for row in rows:
        F.embedding(index, row, max_norm=1.0)
    assert_same(table, rows)


@pytest.mark.parametrize("make", [lambda: torch.full((5, 2), 3.0), lambda: TABLE.clone(), lambda: TABLE * 2])
def test_a_table_made_inside_has_rows_of_each_lane(make):
    def f(i):
        table = make()
        return F.embedding(i, table, max_norm=1.0), table

    indices = torch.tensor([[0, 1], [2, 3], [4, 4]])
    for _ in range(3):
        assert_same(vmap(f)(indices), tuple(map(torch.stack, zip(*map(f, indices)))))


SHORTENED = {
    "table": lambda table, i: F.embedding(i, table, max_norm=1.0),
    "view": lambda table, i: F.embedding(i, table[1:].view(-1, 1), max_norm=0.5),
    "bag": lambda table, i: F.embedding_bag(i[None], table, max_norm=1.0),
    "lanes that ask": lambda table, i: F.embedding(i, table, max_norm=1.0) * (2 if i.sum() > 4 else 3),
}


@pytest.mark.parametrize("name", SHORTENED)
@pytest.mark.parametrize("passed", ["captured", "passed", "within another vmap"])
def test_a_table_from_outside_is_shortened_as_in_the_loop(name, passed):
    f = SHORTENED[name]
    indices = torch.tensor([[0, 1], [2, 3], [4, 4]])
    before = TABLE * 3
    for _ in range(3):
        table, ours = before.clone(), before.clone()
        expected = torch.stack([f(table, i) for i in indices])
        if passed == "passed":
            got = vmap(f, (None, 0))(ours, indices)
        elif passed == "captured":
            got = vmap(partial(f, ours))(indices)
        else:
            got = vmap(vmap(partial(f, ours)))(indices[None])[0]
        assert_same(got, expected)
        assert_same(ours, table)


def test_bags_with_indices_past_the_last_offset():
    weight, index = torch.randn(5, 2), torch.randint(0, 5, (3, 6))
    offsets = torch.tensor([0, 2, 5])

    def f(i):
        return F.embedding_bag(i, weight, offsets, mode="sum", include_last_offset=True)

    assert_same(vmap(f)(index), torch.stack([f(i) for i in index]))


@pytest.mark.parametrize("index", [-1, 3])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
def test_an_index_out_of_range_reaches_no_other_lane(index, scale_grad_by_freq):
    tables = torch.arange(12.0).reshape(2, 3, 2)
    indices = torch.tensor([[0, 1], [2, 1]])
    indices[1, 1] = index
    for call in (F.embedding, lambda i, w, **options: F.embedding_bag(i[None], w, **options)):
        for dims in ((0, 0), (0, None), (None, 0)):
            given = indices if dims[0] == 0 else indices[1], tables if dims[1] == 0 else tables[1]
            with pytest.raises((IndexError, RuntimeError)):
                vmap(partial(call, scale_grad_by_freq=scale_grad_by_freq), in_dims=dims)(*given)


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_dense_where_they_have_lanes(bag):
    weight, tokens = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 6, (4, 5))

    def loss(weight, token, sparse):
        if bag:
            return (F.embedding_bag(token[None], weight, mode="mean", sparse=sparse) ** 3).sum()
        return (F.embedding(token, weight, sparse=sparse) ** 3).sum()

    def slope(weight, token):
        weight = weight.clone().requires_grad_()
        return torch.autograd.grad(loss(weight, token, False), weight)[0]

    f = grad(lambda weight, token: loss(weight, token, True))
    want = torch.stack([slope(weight, token) for token in tokens])
    assert_same(vmap(f, in_dims=(None, 0))(weight, tokens), want)
    assert_same(vmap(f)(weight.expand(4, 6, 3), tokens), want)
    assert_same(vmap(f, in_dims=(None, 0), chunk_size=3)(weight, tokens), want)
    assert_same(vmap(f, in_dims=(None, 0))(weight, tokens[:0]), want[:0])
    tables = torch.stack([weight, weight.sin()])
    both = torch.stack([torch.stack([slope(table, token) for token in tokens]) for table in tables])
    assert_same(vmap(vmap(f, in_dims=(None, 0)), in_dims=(0, None))(tables, tokens), both)
    rows = jacrev(lambda weight, token: F.embedding(token, weight, sparse=True) ** 3)
    if not bag:
        assert_same(vmap(rows, in_dims=(None, 0))(weight, tokens).sum((1, 2)), want)


@pytest.mark.parametrize("padding", [0, 2, 5, -1])
def test_sparse_gradients_leave_out_the_padding(padding):
    """Of which lanes have different amounts."""
    weight, tokens = torch.randn(6, 3, dtype=torch.float64), torch.tensor([[0, 2, 2], [1, 5, 0], [5, 5, 5], [3, 4, 1]])

    def loss(weight, token, sparse=True):
        return (F.embedding(token, weight, padding_idx=padding, sparse=sparse) ** 3).sum()

    def slope(weight, token):
        weight = weight.clone().requires_grad_()
        return torch.autograd.grad(loss(weight, token, False), weight)[0]

    want = torch.stack([slope(weight, token) for token in tokens])
    assert_same(vmap(grad(loss), in_dims=(None, 0))(weight, tokens), want)
    assert_same(vmap(grad(loss))(torch.stack([weight] * 4), tokens), want)
    tables = torch.stack([weight, weight.sin()])
    both = torch.stack([torch.stack([slope(table, token) for token in tokens]) for table in tables])
    assert_same(vmap(vmap(grad(loss), in_dims=(None, 0)), in_dims=(0, None))(tables, tokens), both)
    assert_same(
        grad(lambda weight: vmap(loss, in_dims=(None, 0))(weight, tokens).sum())(weight).to_dense(), want.sum(0)
    )

    def by_module(token):
        table = torch.nn.Embedding(6, 3, padding_idx=padding, sparse=True, _weight=weight.clone())
        (table(token) ** 3).sum().backward()
        return table.weight.grad.to_dense()

    assert_same(vmap(by_module)(tokens), want)


def test_sparse_tensors_of_lane_values_are_refused():
    with pytest.raises(RuntimeError, match="makes a tensor of layout sparse_coo in each lane"):
        vmap(lambda v: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), v, (2,)).to_dense())(torch.ones(3, 2))


@pytest.mark.parametrize("name", SHORTENED)
def test_a_table_that_is_differentiated_is_shortened_as_in_the_loop(name):
    f = SHORTENED[name]
    indices = torch.tensor([[0, 1], [2, 3], [4, 4]])

    def slope(table, i):
        alias = table.detach().requires_grad_()
        return torch.autograd.grad(f(alias, i).square().sum(), alias)[0]

    for _ in range(3):
        table, ours = TABLE * 3, TABLE * 3
        expected = torch.stack([slope(table, i) for i in indices])
        assert_same(vmap(lambda i, w=ours: grad(lambda w: f(w, i).square().sum())(w))(indices), expected)
        assert_same(ours, table)
