"""Operations that fail in some lanes: code that catches that sees it in these lanes only, as in a loop."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise import grad, vmap

D = torch.float64
EYE = torch.eye(2, dtype=D)
MATRICES = torch.stack([EYE, -EYE, torch.diag(torch.tensor([1.0, -0.05], dtype=D)), EYE * 2, torch.ones(2, 2, dtype=D)])


def with_jitter(a):
    jitter = 0.0
    while True:
        try:
            return torch.linalg.cholesky(a + jitter * torch.eye(2, dtype=D))
        except RuntimeError:
            jitter = jitter * 10 + 0.1


def inverse_or_zero(a):
    try:
        return torch.linalg.inv(a)
    except torch.linalg.LinAlgError:
        return a * 0


def bare_except(a):
    try:
        return torch.linalg.inv(a).sum() if a[0, 0] > 0 else a.sum()
    except:  # noqa: E722
        return a[0, 1] + 3


def raised_by_a_branch(a):
    try:
        if a[0, 0] < 0:
            raise KeyError
        return a * 2
    except:  # noqa: E722
        return a - 1


@pytest.mark.parametrize("f", [with_jitter, inverse_or_zero, bare_except, raised_by_a_branch])
def test_caught_in_the_lanes_that_fail(f):
    want = torch.stack([f(a) for a in MATRICES])
    for _ in range(2):  # the second time, lanes part from the start
        torch.testing.assert_close(vmap(f)(MATRICES), want)


def test_not_caught_it_comes_out():
    with pytest.raises(torch.linalg.LinAlgError):
        vmap(torch.linalg.inv)(MATRICES)


def test_names_the_lane():
    def f(a):
        if a.sum() > 100:
            return a
        return torch.linalg.inv(a)

    with pytest.raises(torch.linalg.LinAlgError) as caught:
        vmap(lambda a: f(a) if a[0, 0] > -5 else a)(torch.cat([MATRICES, 200 * EYE[None]]))
    assert getattr(caught.value, "lanes", None) == [4]


FACTORIZATIONS = {
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a[0]),
    "cholesky": torch.linalg.cholesky,
    "batch of two": lambda a: torch.linalg.solve(torch.stack([a, a + 3 * EYE]), torch.stack([a[0], a[1]])),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_lanes_that_fail_are_found_at_once(name):
    def f(a):
        try:
            return FACTORIZATIONS[name](a).sum()
        except RuntimeError:
            return a.sum()

    matrices = MATRICES.repeat(20, 1, 1)
    leaf = matrices.clone().requires_grad_()
    want = torch.stack([f(a) for a in leaf])
    (grads,) = torch.autograd.grad(want.sum(), leaf)
    vmap(f)(matrices)
    calls = []
    with Operations(calls):
        torch.testing.assert_close(vmap(f)(matrices), want.detach())
    assert calls.count(torch.ops.aten._linalg_check_errors.default) < 8  # not once for each lane
    torch.testing.assert_close(vmap(grad(f))(matrices), grads)
    torch.testing.assert_close(grad(lambda xs: vmap(f)(xs).sum())(matrices), grads)


class Operations(TorchDispatchMode):
    """Notes the operations that plain torch carries out."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))
