"""Python values and shapes that depend on values, where lanes agree and where they do not."""

import pytest
import torch

from lanewise import vmap

XS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

PYTHON_VALUES = {
    "item": lambda x: x * x[0].item(),
    "float": lambda x: x * float(x[0]),
    "int": lambda x: x * int(x[0]),
    "slice": lambda x: x[: x[0].long()].sum() * x,
    "range": lambda x: sum((i * x for i in range(x[0].long())), x),
    "if": lambda x: x * (1 if x[0] > 2 else 0),
    "is_nonzero": lambda x: x + torch.is_nonzero(x[0] - 1),
    "any": lambda x: x * any(x > 2),
}


@pytest.mark.parametrize("name", PYTHON_VALUES)
def test_python_values_that_differ(name):
    f = PYTHON_VALUES[name]
    assert torch.equal(vmap(f)(XS), torch.stack([f(x) for x in XS]))
    nested = torch.stack([XS, XS + 1])
    assert torch.equal(vmap(vmap(f))(nested), torch.stack([torch.stack([f(x) for x in row]) for row in nested]))


def test_a_value_without_lanes():
    c = torch.tensor(3)

    def f(x):
        n = torch.tensor(2)
        k = torch.ones(3).sum()
        assert n.item() == 2 and float(k) == 3.0 and bool(n > 1) and int(c) == 3
        return x[: n.item()] * int(torch.arange(4)[2])

    assert torch.equal(vmap(f)(XS), XS * 2)


def test_comparisons_of_lanes():
    ys = XS.clone()
    assert vmap(lambda x, y: x * torch.equal(x, y))(XS, ys).equal(XS)
    assert vmap(lambda x, y: x * torch.equal(x, y + 1))(XS, ys).equal(XS * 0)
    assert vmap(lambda x, y: x * torch.allclose(x, y))(XS, ys + 1e-9).equal(XS)
    assert vmap(lambda x: x * torch.equal(x, torch.ones(3)))(XS).equal(XS * 0)
    ys[1] = 0
    for compare in (torch.equal, torch.allclose):
        got = vmap(lambda x, y, c=compare: x * c(x, y))(XS, ys)
        assert got.equal(torch.stack([XS[0], XS[1] * 0]))


def test_comparisons_do_not_mix_lanes():
    """Lane 0 equals, lane 1 does not, and the other way round."""
    for flip in (False, True):
        ys = XS.clone()
        ys[int(flip)] += 1
        got = vmap(lambda x, y: torch.tensor(torch.equal(x, y)))(XS, ys)
        assert got.tolist() == [flip, not flip]


DYNAMIC = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x)[0],
    "argwhere": lambda x: torch.argwhere(x),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "bincount": lambda x: torch.bincount(x.long()),
}


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
@pytest.mark.parametrize("name", DYNAMIC)
def test_shapes_that_depend_on_values(name):
    f = DYNAMIC[name]
    alike = torch.tensor([[3.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    assert torch.equal(vmap(f)(alike), torch.stack([f(x) for x in alike]))
    nested = torch.stack([alike, alike.flip(0)])
    assert torch.equal(vmap(vmap(f))(nested), torch.stack([torch.stack([f(x) for x in row]) for row in nested]))
    ragged = torch.tensor([[2.0, 0.0, 0.0], [1.0, 7.0, 3.0]])
    assert torch.equal(vmap(lambda x: f(x).sum())(ragged), torch.stack([f(x).sum() for x in ragged]))
    with pytest.raises(RuntimeError, match="lanes return tensors of different shapes") as caught:
        vmap(f)(ragged)
    assert "test_datadependent.py" in str(caught.value) and 'out_dims="list"' in str(caught.value)
    for got, x in zip(vmap(f, out_dims="list")(ragged), ragged, strict=True):
        assert torch.equal(got, f(x))


def test_a_mask_of_all_lanes_may_change_the_shape():
    mask = torch.tensor([True, False])
    assert torch.equal(vmap(lambda x: x[mask])(XS), XS[:, :1])
    assert torch.equal(vmap(lambda x: x[torch.tensor([True, False])])(XS), XS[:, :1])


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
def test_counts():
    xs = torch.rand(3, 8)
    for f in (
        lambda x: torch.histc(x, 4, 0, 1),
        lambda x: torch.histogram(x, 4, range=(0.0, 1.0))[0],
        lambda x: torch.bincount((x * 3).long(), minlength=5),
        lambda x: torch.bincount((x * 3).long(), weights=x, minlength=5),
        lambda x: torch.bincount((x * 3).long(), weights=x.double(), minlength=3),
    ):
        assert torch.equal(vmap(f)(xs), torch.stack([f(x) for x in xs]))


@pytest.mark.parametrize("bad", [torch.bincount, torch.repeat_interleave])
def test_negative_counts(bad):
    with pytest.raises(RuntimeError, match="negative"):
        vmap(bad)(torch.tensor([[1, -1], [2, 0]]))


def test_resize_as():
    def f(x, y):
        return (x * 1).resize_as_(y)

    xs, ys = torch.randn(3, 6), torch.randn(3, 2, 2)
    assert torch.equal(vmap(f)(xs, ys), torch.stack([f(x, y) for x, y in zip(xs, ys, strict=True)]))


def test_split_at_tensor_indices():
    cuts = torch.tensor([1, 3])
    parts = vmap(lambda x: torch.tensor_split(x, cuts))(torch.arange(10.0).view(2, 5))
    assert [part.shape for part in parts] == [(2, 1), (2, 2), (2, 2)]
    cuts = torch.tensor([[1, 3], [2, 3]])
    xs = torch.randn(2, 5)
    got = vmap(torch.tensor_split, out_dims="list")(xs, cuts)
    for parts, x, cut in zip(got, xs, cuts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parts, torch.tensor_split(x, cut), strict=True))


def test_sparse_is_refused():
    with pytest.raises(RuntimeError, match="sparse tensors cannot have lanes"):
        vmap(lambda x: x.to_sparse())(torch.eye(3).expand(2, 3, 3))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("last", [2.0, float("nan")])
def test_numbers_of_lanes_of_any_rank(shape, last):
    xs = torch.tensor([1.0, float("nan"), last]).reshape(3, *shape)
    for item in (torch.Tensor.item, torch.ops.aten.item):
        torch.testing.assert_close(vmap(item)(xs), xs.flatten(), equal_nan=True)
        torch.testing.assert_close(vmap(item)(xs[1:2].expand(2, *shape)), xs.flatten()[[1, 1]], equal_nan=True)
        agreed = vmap(item, out_dims=None)(xs[1:2].expand(2, *shape))  # a Python number, as all lanes have it
        assert isinstance(agreed, float) and agreed != agreed


@pytest.mark.parametrize("inside", [lambda: torch.tensor([1.0, 2.0]), lambda: torch.tensor(1.0)], ids=["[2]", "[]"])
def test_comparisons_with_tensors_made_inside(inside):
    def f(x):
        return x * 2 if torch.allclose(x, inside()) or torch.equal(inside().expand(2), x) else -x

    for rows in ([[1.0, 2.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 2.0], [1.0, 2.0]]):
        xs = torch.tensor(rows)
        assert torch.equal(vmap(f)(xs), torch.stack([f(x) for x in xs]))
