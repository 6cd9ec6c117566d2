"""Writes to arguments and views that share one memory, before lanes part: undone as one, whichever view wrote."""

import pytest
import torch

from lanewise import vmap

F64 = torch.float64


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.split.converted", lambda func: None)


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
