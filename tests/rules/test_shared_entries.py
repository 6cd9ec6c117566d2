"""Operations in place on lists whose entries share memory: each entry sees what was written for those before it."""

import pytest
import torch

from lanewise import grad, jvp, vmap

D = torch.float64
XS = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(1))
TS = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(2))


def twice_the_same(x):
    a = x.clone()
    torch._foreach_add_([a, a], [x, x * 2])
    return a


def a_part_and_the_whole(x):
    a = x.clone()
    torch._foreach_mul_([a[:1], a], [x[:1], x])
    return a


def by_a_number(x):
    a = x.clone()
    torch._foreach_mul_([a, a], 3.0)
    return a


def by_numbers(x):
    a = x.clone()
    torch._foreach_mul_([a, a], [3.0, 0.5])
    return a


def from_each_other(x):
    a, b = x.clone(), x.sin()
    torch._foreach_add_([a, b], [b, a], alpha=2)
    return a * b


def from_itself(x):
    a = x.clone()
    torch._foreach_mul_([a, a], [a, a])
    return a


def three_lists(x):
    a = x.clone()
    torch._foreach_addcmul_([a, a], [x, a], [a, x], value=2.0)
    return a


def apart(x):
    a, b = x.clone(), x.sin()
    torch._foreach_mul_([a, b], [x, x])
    return a + b


FUNCTIONS = [
    twice_the_same,
    a_part_and_the_whole,
    by_a_number,
    by_numbers,
    from_each_other,
    from_itself,
    three_lists,
    apart,
]


@pytest.mark.parametrize("f", FUNCTIONS)
def test_values_and_tangents(f):
    step = 1e-5
    want = torch.stack([(f(x + step * t) - f(x - step * t)) / (2 * step) for x, t in zip(XS, TS)])
    pushed = [
        jvp(vmap(f), (XS,), (TS,)),
        vmap(lambda x, t: jvp(f, (x,), (t,)))(XS, TS),
        tuple(map(torch.stack, zip(*[jvp(f, (x,), (t,)) for x, t in zip(XS, TS)]))),
    ]
    for value, tangent in pushed:
        torch.testing.assert_close(value, torch.stack([f(x) for x in XS]))
        torch.testing.assert_close(tangent, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("f", [f for f in FUNCTIONS if f not in (from_itself, three_lists)])
def test_gradients(f):
    """By differences: of an entry that stands twice in a list, torch's gradient knows one write alone.

    (What is multiplied with itself in place has no gradient in torch, which raises.)
    """
    step = 1e-5
    ways = step * torch.eye(3, dtype=D)
    want = torch.stack([torch.stack([(f(x + t) - f(x - t)).sum() / (2 * step) for t in ways]) for x in XS])
    for got in (vmap(grad(lambda x: f(x).sum()))(XS), grad(lambda xs: vmap(f)(xs).sum())(XS)):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
