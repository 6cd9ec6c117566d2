"""Loops that three hundred lanes leave one after the other."""

import torch

from lanewise import grad, vmap

XS = torch.linspace(0.1, 1, 300, dtype=torch.float64)
NS = torch.arange(300)


def numbers(x, n):
    i, s = 0, x
    while i < n:
        s = s * 0.99 + x
        i = i + 1
        if i % 7 == 3 and x > 0.5:
            continue
        if s > 40:
            break
    else:
        s = s + 1
    return s + i


def words(x, n):
    i, mode = 0, "none"
    while i < n:
        i = i + 1
        mode = "odd" if i % 2 else "even"
        y = x * i
    return y if mode == "odd" else x


def test_values():
    for f in (numbers, words):
        torch.testing.assert_close(vmap(f)(XS, NS), torch.stack([f(x, n) for x, n in zip(XS, NS)]))


def test_gradients():
    leaf = XS.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(numbers(x, n) for x, n in zip(leaf, NS)), leaf)
    torch.testing.assert_close(vmap(grad(numbers))(XS, NS), want)
    torch.testing.assert_close(grad(lambda xs: vmap(numbers)(xs, NS).sum())(XS), want)
