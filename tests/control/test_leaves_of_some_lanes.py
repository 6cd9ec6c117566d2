"""`.grad` of a leaf that only some lanes have given a gradient: None in the others."""

import pytest
import torch

from lanewise import grad, vmap

pytestmark = pytest.mark.usefixtures("parting")

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


# --- a leaf from outside ---------------------------------------------------------------------------------------------


def some(w, x, k):
    if x.sum() > 0:
        (w * x).sum().backward()
    return x * 0 + 7 if w.grad is None else w.grad * 1


def and_others_later(w, x, k):
    if x.sum() > 0:
        (w * x).sum().backward()
    had = w.grad is not None
    (w * w * x).sum().backward()
    return w.grad * (2.0 if had else 1.0)


def as_often_as_it_says(w, x, k):
    for i in range(int(k)):
        (w * x * (i + 1)).sum().backward()
    return x * 0 + 7 if w.grad is None else w.grad * 1


def by_other_functions(w, x, k):
    def pull():
        if x.sum() > 0:
            (w * x).sum().backward()

    def pulled():
        return w.grad

    pull()
    found = pulled()
    return x * 0 + 7 if found is None else found * 1


def in_a_list(w, x, k):
    if x.sum() > 0:
        (w * x).sum().backward()
    return sum([p.grad for p in [w] if p.grad is not None], x * 0)


OUTSIDE = [some, and_others_later, as_often_as_it_says, by_other_functions, in_a_list]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("way", ["converted", "as written"])
@pytest.mark.parametrize("before", [None, torch.tensor([10.0, 20.0], dtype=torch.float64)], ids=["none", "set"])
@pytest.mark.parametrize("program", OUTSIDE, ids=lambda p: p.__name__)
def test_from_outside(program, before, way, monkeypatch):
    """What it was before, in lanes that have called no backward pass."""
    if way == "as written":
        monkeypatch.setattr("lanewise._control.split.converted", lambda func: None)
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def f(x, k):
        w.grad = None if before is None else before.clone()
        return program(w, x, k)

    want = torch.stack([f(x, k) for x, k in zip(XS, KS)])
    torch.testing.assert_close(vmap(f)(XS, KS), want)
    torch.testing.assert_close(vmap(vmap(f))(XS[:8].view(2, 4, 2), KS[:8].view(2, 4)).flatten(0, 1), want[:8])
