"""`.grad` of a leaf that only some lanes have given a gradient: None in the others."""

import pytest
import torch

from lanewise import grad, vmap

XS = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
KS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])


def one_side(x, k):
    z = x.detach().clone().requires_grad_()
    if x[0] > 0:
        (z**3).sum().backward()
    return z.grad * x if z.grad is not None else x


def both_and_neither(x, k):
    z = x.detach().clone().requires_grad_()
    if x[0] > 0:
        (z**3).sum().backward()
    for i in range(int(k) // 2):
        (z * z[i % 2]).sum().backward()
    return z.grad * x if z.grad is not None else x


def set_in_a_branch(x, k):
    z = x.detach().clone().requires_grad_()
    for i in range(3):
        if x[0] > 0 or k > i:
            (z**3 * i).sum().backward()
        if z.grad is None:
            z = (z.detach() * 2).requires_grad_()
        elif k > 1:
            z.grad = None
        elif k == 0:
            z.grad.zero_()
        else:
            z.grad.add_(1)
    return z.detach() + (5 if z.grad is None else z.grad) * x


def optimizer(x, k):
    z = x.detach().clone().requires_grad_()
    adam = torch.optim.Adam([z], lr=0.1)
    for i in range(3):
        adam.zero_grad()
        if x[0] > 0 or k > i:
            (z**3).sum().backward()
        adam.step()
    return z.detach() * x


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", [one_side, both_and_neither, set_in_a_branch, optimizer], ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x, k) for x, k in zip(XS, KS)])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS, KS), want)
    slopes = torch.stack([grad(lambda x, k: program(x, k).sum())(x, k) for x, k in zip(XS, KS)])
    torch.testing.assert_close(vmap(grad(lambda x, k: program(x, k).sum()))(XS, KS), slopes)
