"""Errors of a `vmap` inside another are those of the lanes around that have them; the others go on."""

import pytest
import torch

from lanewise import grad, vmap

XS = torch.tensor([-1.3, 0.1, 1.4, -0.5])


def branching(t):
    if t > 1.9:
        raise ValueError("too large")
    return t * t


def asking(t):
    if float(t.detach()) > 1.9:
        raise ValueError("too large")
    return t * t


def after_a_loop(t):
    n = 0
    while t < 1:
        t, n = t + 0.5, n + 1
    if n == 0:
        raise ValueError("no step")
    return t * n


def caught(inside, row):
    try:
        y = inside(row).sum()
    except ValueError:
        y = row.sum() * 0 - 1
    return y + row[0]


def returned(inside, row):
    try:
        return inside(row).sum()
    except ValueError:
        return row.sum() * 0 - 1


def in_a_branch(inside, row):
    y = row[1]
    if y > -0.4:
        try:
            y = inside(row).sum()
        except ValueError as error:
            y = row[0] * len(str(error))
    return y


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("f", [branching, asking, after_a_loop], ids=lambda f: f.__name__)
@pytest.mark.parametrize("around", [caught, returned, in_a_branch], ids=lambda f: f.__name__)
def test_as_the_loop(around, f, randomness):
    rows = XS[:, None] + torch.arange(3.0)
    looped = lambda row: torch.stack([f(t) for t in row])
    want = torch.stack([around(looped, row) for row in rows])
    slopes = torch.stack([torch.autograd.functional.jacobian(lambda row: around(looped, row), row) for row in rows])
    inner = vmap(f, randomness=randomness)
    for chunk_size in (None, None, None, 3):
        mapped = lambda g, size=chunk_size: vmap(g, randomness=randomness, chunk_size=size)
        torch.testing.assert_close(mapped(lambda row: around(inner, row))(rows), want)
        torch.testing.assert_close(mapped(grad(lambda row: around(inner, row)))(rows), slopes)


def test_what_nobody_catches_is_raised():
    with pytest.raises(ValueError, match="too large"):
        vmap(lambda row: vmap(branching)(row))(XS[:, None] + torch.arange(3.0))
