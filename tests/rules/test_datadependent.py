"""Python values and shapes that depend on values: right where lanes agree, an error where they do not."""

import pytest
import torch

from lanewise import vmap

XS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


ITEM = "It looks like you're calling .item on a Tensor"
CONTROL = "attempting to use a Tensor in some data-dependent control flow"
NO_ONE_VALUE = {
    "item": (lambda x: x[0].item(), ITEM),
    "float": (lambda x: float(x[0]), ITEM),
    "int": (lambda x: int(x[0]), ITEM),
    "slice": (lambda x: x[: x[0].long()], ITEM),
    "range": (lambda x: list(range(x[0].long())), ITEM),
    "if": (lambda x: 1 if x[0] > 2 else 0, CONTROL),
    "is_nonzero": (lambda x: torch.is_nonzero(x[0]), CONTROL),
    "any": (lambda x: any(x > 2), CONTROL),
}


@pytest.mark.parametrize("name", NO_ONE_VALUE)
def test_no_one_value(name):
    f, phrase = NO_ONE_VALUE[name]
    with pytest.raises(RuntimeError) as caught:
        vmap(lambda x: (f(x), x)[1])(XS)
    text = str(caught.value)
    assert phrase in text
    assert "test_datadependent.py" in text and "Write instead" in text


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
        with pytest.raises(RuntimeError, match="data-dependent control flow"):
            vmap(lambda x, y, c=compare: x * c(x, y))(XS, ys)


def test_comparisons_do_not_mix_lanes():
    """Lane 0 equals, lane 1 does not: there is no one answer, whichever way round."""
    for flip in (False, True):
        ys = XS.clone()
        ys[int(flip)] += 1
        with pytest.raises(RuntimeError, match="true in some lanes"):
            vmap(lambda x, y: x * torch.equal(x, y))(XS, ys)


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
PHRASES = {
    "mask": "can support dynamic shape.*Attempting to batch over indexing with a boolean mask",
    "masked_select": "vmap over `mask` in torch.masked_select",
}


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
@pytest.mark.parametrize("name", DYNAMIC)
def test_shapes_that_depend_on_values(name):
    f = DYNAMIC[name]
    alike = torch.tensor([[3.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    assert torch.equal(vmap(f)(alike), torch.stack([f(x) for x in alike]))
    nested = torch.stack([alike, alike.flip(0)])
    assert torch.equal(vmap(vmap(f))(nested), torch.stack([torch.stack([f(x) for x in row]) for row in nested]))
    with pytest.raises(RuntimeError, match="dynamic shape") as caught:
        vmap(f)(torch.tensor([[2.0, 0.0, 0.0], [1.0, 7.0, 3.0]]))
    if name in PHRASES:
        caught.match(PHRASES[name])
    assert "test_datadependent.py" in str(caught.value)


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
    with pytest.raises(RuntimeError, match="It looks like you're calling .item"):
        vmap(torch.tensor_split)(torch.zeros(2, 5), torch.tensor([[1, 3], [2, 3]]))


def test_sparse_is_refused():
    with pytest.raises(RuntimeError, match="sparse tensors cannot have lanes"):
        vmap(lambda x: x.to_sparse())(torch.eye(3).expand(2, 3, 3))
