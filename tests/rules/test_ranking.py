"""Sorting many rows at once: values and places to the bit as each lane has them alone, equal elements included."""

import pytest
import torch

from lanewise import grad, vmap
from lanewise._rules.batch import ranking

LANES, ROWS, LENGTH = 40, 9, 100


def _distinct(g):
    return torch.randn(LANES, ROWS, LENGTH, generator=g)


def _equal_in_some_rows(g):
    x = _distinct(g)
    x[3, 2, 10:14] = x[3, 2, 50]
    x[7, :, 99] = x[7, :, 0]
    x[9, 1, :7] = 5.0  # among the greatest
    x[11, 1, :7] = -5.0  # among the least
    return x


def _zeros_of_both_signs(g):
    x = _distinct(g)
    x[5, 5, 20:30] = -0.0
    x[5, 5, 25:40] = 0.0
    return x


def _infinite(g):
    x = _distinct(g)
    x[2, 3, 4], x[2, 3, 5], x[30, 0, 9] = float("inf"), -float("inf"), -float("inf")
    return x


def _not_numbers(g):
    x = _distinct(g)
    x[2, 3, 4:8] = float("nan")
    x[6, 1, 50] = -float("nan")
    return x


def _few_values(g):
    return torch.randint(0, 6, (LANES, ROWS, LENGTH), generator=g).float()


INPUTS = {f.__name__[1:]: f for f in (_distinct, _equal_in_some_rows, _zeros_of_both_signs, _infinite)}
LEFT_TO_TORCH = {f.__name__[1:]: f for f in (_not_numbers, _few_values)}
SORTS = {
    "sort": lambda x: tuple(x.sort()),
    "descending": lambda x: tuple(x.sort(1, descending=True)),
    "stable": lambda x: tuple(torch.sort(x, dim=-1, stable=True)),
    "stable descending": lambda x: tuple(torch.sort(x, dim=1, stable=True, descending=True)),
    "argsort": lambda x: (x.argsort(-1),),
    "argsort stable": lambda x: (torch.argsort(x, dim=1, stable=True, descending=True),),
    "topk": lambda x: tuple(x.topk(5)),
    "topk least": lambda x: tuple(x.topk(7, largest=False)),
    "topk row": lambda x: tuple((x[0] + 0).topk(3)),
}


@pytest.fixture
def taken(monkeypatch):
    """How often rows were sorted at once."""
    found = []
    order = ranking._order

    def counted(*args):
        out = order(*args)
        found.extend(out[:1] if out[0] is not None else ())
        return out

    monkeypatch.setattr(ranking, "_order", counted)
    return found


def _equals_the_loop(f, x):
    for got, wanted in zip(vmap(f)(x), map(torch.stack, zip(*[f(lane) for lane in x]))):
        assert got.dtype is wanted.dtype and got.shape == wanted.shape
        assert torch.equal(got.nan_to_num(7.5) if got.is_floating_point() else got, wanted.nan_to_num(7.5))
        if got.is_floating_point():
            assert torch.equal(got.signbit(), wanted.signbit())


@pytest.mark.parametrize("what", SORTS)
@pytest.mark.parametrize("name", INPUTS)
def test_at_once(name, what, taken):
    x = INPUTS[name](torch.Generator().manual_seed(0))
    x = x.repeat(3, 1, 1) if what == "topk row" else x
    _equals_the_loop(SORTS[what], x)
    assert len(taken) == (1 if "topk" in what or ranking._has_radix_sort() else 0)


@pytest.mark.parametrize("what", SORTS)
@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_left_to_torch(name, what, taken):
    _equals_the_loop(SORTS[what], LEFT_TO_TORCH[name](torch.Generator().manual_seed(0)))
    assert name != "not_numbers" or not taken


@pytest.mark.parametrize(
    "f",
    [
        lambda x: tuple(x.sort(0)),
        lambda x: tuple(x.mT.sort(1)),
        lambda x: tuple(x.double().sort(1)),
        lambda x: tuple(x.topk(5, 0)),
        lambda x: tuple(x.topk(1)),
        lambda x: tuple(x.long().topk(5)),
        lambda x: tuple(x[:, :4].topk(4)),
    ],
    ids=["other dim", "turned", "float64", "topk other dim", "topk 1", "topk int64", "topk of all"],
)
def test_what_it_is_not_for(f, taken):
    _equals_the_loop(f, _distinct(torch.Generator().manual_seed(0)))
    assert not taken


@pytest.mark.parametrize("what", ["sort", "stable descending", "topk"])
def test_gradients(what, taken):
    x = _equal_in_some_rows(torch.Generator().manual_seed(0))
    values = lambda x: SORTS[what](x)[0]
    weights = torch.linspace(0, 1, values(x[0])[0].numel())
    loss = lambda x: (values(x) * weights).square().sum()
    alone = torch.stack([grad(loss)(lane) for lane in x])
    assert not taken
    torch.testing.assert_close(vmap(grad(loss))(x), alone)
    assert taken or what != "topk"
    torch.testing.assert_close(grad(lambda x: vmap(loss)(x).sum())(x), alone)
    second = lambda x: (grad(loss)(x) * x).sum()
    torch.testing.assert_close(vmap(grad(second))(x), torch.stack([grad(second)(lane) for lane in x]))


@pytest.mark.parametrize("what", ["sort", "stable descending", "topk"])
def test_parts_go_their_own_ways(what, taken):
    g = torch.Generator().manual_seed(0)
    x = torch.cat([_distinct(g), _distinct(g), _not_numbers(g), _distinct(g), _few_values(g), _equal_in_some_rows(g)])
    _equals_the_loop(SORTS[what], torch.cat([x, x]))
    assert 1 < len(taken) or what != "topk"
