"""Operations that fail in some lanes: code that catches that sees it in these lanes only, as in a loop."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise import error_if, grad, vmap, while_loop
from lanewise.errors import CheckError

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


def some_raise(a):
    try:
        if a[0, 0] > 1.5:
            return a * 3
        if a[0, 0] < 0:
            raise ValueError
    finally:
        a = a + 0
    return a


def calls_what_is_not_converted(a):
    try:
        b = some_raise(a)
    except ValueError:
        b = a - 1
    return a + b


def checked(a):
    try:
        b = error_if(a, a[0, 0] < 0, "negative") * 2
    except CheckError:
        b = a - 1
    return a + b


def checked_in_a_branch(a):
    return checked(a) if a.sum() > -1.9 else a


def too_many_steps(mode, a):
    try:
        return while_loop(lambda s: s.sum() < 3, lambda s: s + 0.3, a, max_steps=2, mode=mode)
    except RuntimeError:
        return a - 1


def until_it_works(a):
    if a[0, 0] > 1.5:
        return a
    tries = 0
    while tries < 4:
        tries += 1
        try:
            a = torch.linalg.cholesky(a)
            break
        except RuntimeError:
            a = a + 0.6 * torch.eye(2, dtype=D)
    if a.sum() > 50:
        return a - tries
    return a * tries


def until_it_works_in_a_loop(a):
    rounds = 0
    for _ in range(2):
        for k in range(3):
            if float(a[0, 0].detach()) > 9 + k:
                a = a * 0.9
        else:
            rounds += 1
        while True:
            try:
                break
            except ValueError:
                pass
    return a + rounds


def jumps_out_of_try_with_finally(a):
    while True:
        try:
            if a[0, 0] > 0.9:
                raise ValueError
            break
        except ValueError:
            a = a / 2
        finally:
            a = a + 0.05
    return a


def continues_out_of_try_with_finally(a):
    for k in range(3):
        if a[0, 0] > k:
            break
        try:
            a = a + 1
            continue
        finally:
            a = a * 0.9
    return a


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        if x[0, 0] < 0:
            raise ValueError
        return cotangent * 3


def raising_backward(a):
    try:
        return grad(lambda b: (Raising.apply(b) * b).sum())(a)
    except ValueError:
        return a * 5


CAUGHT = [with_jitter, inverse_or_zero, bare_except, raised_by_a_branch, calls_what_is_not_converted, checked]
CAUGHT += [checked_in_a_branch, partial(too_many_steps, "compact"), partial(too_many_steps, "mask"), until_it_works]
CAUGHT += [until_it_works_in_a_loop, jumps_out_of_try_with_finally, continues_out_of_try_with_finally, raising_backward]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("f", CAUGHT)
def test_caught_in_the_lanes_that_fail(f):
    want = torch.stack([f(a) for a in MATRICES])
    for _ in range(2):  # the second time, lanes part from the start
        torch.testing.assert_close(vmap(f)(MATRICES), want)
        torch.testing.assert_close(vmap(f, chunk_size=3)(MATRICES), want)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("f", CAUGHT)
def test_derivatives(f):
    leaf = MATRICES.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(f(a).sum() for a in leaf), leaf)
    torch.testing.assert_close(vmap(grad(lambda a: f(a).sum()))(MATRICES), want)
    torch.testing.assert_close(grad(lambda xs: vmap(f)(xs).sum())(MATRICES), want)


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
