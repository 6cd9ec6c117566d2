"""Writes to arguments and views that share one memory, before lanes part: undone as one, whichever view wrote."""

import pytest
import torch

from lanewise import vmap

F64 = torch.float64


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)


def two(a, b):
    a.add_(1)
    b.mul_(2)
    if a.sum() > 2:
        return a * 2 + b
    if b.sum() > 0:
        return a
    return a - b


SPLITS = {
    "halves": lambda x: (x[:4], x[4:]),
    "columns": lambda x: (x[:, :3], x[:, 3:]),
    "reversed": lambda x: (x[4:], x[:4]),
    "one": lambda x: (x, x),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("lanes", [0, 1, 2, 8])
def test_arguments_of_one_memory(name, lanes):
    whole = torch.randn(8, 6, dtype=F64, generator=torch.Generator().manual_seed(lanes))
    for _ in range(2):
        ours, loops = whole.clone(), whole.clone()
        got = vmap(two)(*[part[:lanes] for part in SPLITS[name](ours)])
        rows = [two(a, b) for a, b in zip(*[part[:lanes] for part in SPLITS[name](loops)], strict=True)]
        assert got.shape[0] == len(rows)
        if rows:
            torch.testing.assert_close(got, torch.stack(rows))
        torch.testing.assert_close(ours, loops)


def overlapping(x):
    try:
        x[:2].add_(1)
        x[1:].mul_(3)
        if x.sum() > 4:
            x[0] -= 5
        return x.sum() if x[2] > 0 else x[0]
    finally:
        pass


def calls_overlapping(x):
    y = x * 1
    out = overlapping(y) if x[0] > -10 else x.sum()
    return out + y.prod()


@pytest.mark.parametrize("f", [overlapping, calls_overlapping])
@pytest.mark.parametrize("lanes", [1, 2, 5, 12])
def test_views_that_overlap(f, lanes):
    whole = torch.randn(lanes, 4, dtype=F64, generator=torch.Generator().manual_seed(lanes))
    for _ in range(2):
        ours, loops = whole.clone(), whole.clone()
        torch.testing.assert_close(vmap(f)(ours), torch.stack([f(x) for x in loops]))
        torch.testing.assert_close(ours, loops)


def rows_of(f, rows):
    return torch.stack([f(row) for row in rows])


# What is made of a view of what was the same in all lanes, once that has been written to. `each` is a loop or vmap.
USES = {
    "returned": lambda v, x, each: v,
    "added": lambda v, x, each: v + 1,
    "its rows": lambda v, x, each: each(lambda row: row * 2, v),
    "inside": lambda v, x, each: each(lambda a: a * v, x),
    "alone inside": lambda v, x, each: each(lambda a: v + 0, x),
    "beside a branch inside": lambda v, x, each: each(lambda a: (a if a > 0 else a * 3) * v, x),
    "alone beside a branch inside": lambda v, x, each: each(lambda a: v + 0 if a > 0 else v * 3, x),
    "an element": lambda v, x, each: each(lambda a: v[1, 0] * (a if a > 0 else a * 3), x),
    "a condition inside": lambda v, x, each: each(lambda a: a if v[1, 0] > a else -a, x),
}
WRITES = {
    "the whole": lambda z, v, x: z.add_(x),
    "a part": lambda z, v, x: z[1].add_(x[1]),
    "assignment": lambda z, v, x: z.__setitem__(slice(1, None), x[1:]),
    "another view": lambda z, v, x: z.view(1, 3).mul_(x),
}


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use", USES)
def test_views_of_what_gets_lanes_later(use, write, parts):
    def with_each(each):
        def f(x):
            if parts and x[0] > 1.5:
                x = x * 2
            z = torch.arange(3, dtype=F64)
            v = z.view(3, 1)
            WRITES[write](z, v, x)
            return USES[use](v, x, each)

        return f

    xs = torch.tensor([[1.0, 2, 3], [-1, 2, 4], [2, 0, 1]], dtype=F64)
    out = vmap(with_each(lambda f, rows: vmap(f)(rows)))(xs)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, torch.stack([with_each(rows_of)(x) for x in xs]), rtol=0, atol=0)
