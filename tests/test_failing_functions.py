"""What a call that raises leaves behind: running statistics as they were, no level, torch's names and states."""

import os
import sys

import pytest
import torch
from torch import nn

import lanewise
from lanewise import grad, jacrev, jvp, vmap
from lanewise._core.level import current_level, live_levels, standing
from lanewise._core.parting.lanes import machine
from lanewise._torch_compat import OUTSIDE_KEY, tls_is_excluded

XS = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1))


def raises_after(norm, error):
    def f(x):
        norm(x)
        raise error

    return f


def raises_in_a_branch(norm, error):
    def f(x):
        y = norm(x) if x[0, 0] > 0 else norm(2 * x)
        if x[0, 0] > 0:
            raise error
        return y

    return f


def raises_between(norm, error):
    def f(x):
        y = norm(norm(x))
        if (y > -100).all():
            norm(y)
            raise error
        return y

    return f


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
}
FUNCTIONS = [raises_after, raises_in_a_branch, raises_between]
CALLS = {
    "vmap": lambda f: vmap(f)(XS),
    "vmap(vmap)": lambda f: vmap(vmap(f))(XS[None]),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum()))(XS),
    "grad(vmap)": lambda f: grad(lambda xs: vmap(f)(xs).sum())(XS),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,)))(XS),
    "jacrev(vmap)": lambda f: jacrev(vmap(f))(XS),
}


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("make", FUNCTIONS)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), Cancelled()], ids=lambda error: type(error).__name__
)
def test_running_statistics_are_as_before(name, make, how, error):
    norm = NORMS[name]()
    for x in XS:
        norm(x + 1)
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    versions = [buffer._version for buffer in (norm.running_mean, norm.running_var)]
    with pytest.raises(type(error)):
        CALLS[how](make(norm, error))
    after = norm.state_dict()
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    assert versions == [buffer._version for buffer in (norm.running_mean, norm.running_var)]
    assert not live_levels()
    # And it goes on as if nothing had been.
    twin = NORMS[name]()
    twin.load_state_dict(before)
    vmap(norm)(XS)
    for x in XS:
        twin(x)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)


def test_an_error_that_the_function_catches_undoes_nothing():
    norm, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def f(x, norm):
        try:
            norm(x)
            raise ValueError
        except ValueError:
            return norm(x)

    vmap(lambda x: f(x, norm))(XS)
    for x in XS:
        f(x, twin)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)


def test_chunks_that_were_done_stay_done():
    norm, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def f(x):
        y = norm(x)
        if x is not None and len(seen) == 1:
            raise ValueError
        seen.append(x.shape)
        return y

    seen = []
    with pytest.raises(ValueError):
        vmap(f, chunk_size=2)(XS)
    for x in XS[:2]:
        twin(x)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[key], value)


def test_states_are_put_back():
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch.empty, torch.is_inference_mode_enabled()

    def f(x):
        torch.set_grad_enabled(True)
        raise KeyboardInterrupt

    for call in CALLS.values():
        with pytest.raises(KeyboardInterrupt):
            call(f)
        assert not live_levels()
    assert modes == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.empty, torch.is_inference_mode_enabled())


# --- interrupts ------------------------------------------------------------------------------------------------------

PACKAGE = os.path.dirname(lanewise.__file__) + os.sep


def interrupted_at(run, number):
    """Raise where a function of the library is called, or has called another, for the `number`-th time.

    There Python looks for signals. Not at the entry of `__exit__`, which is lost to all context managers.
    """
    seen = 0

    def watch(frame, event, arg):
        nonlocal seen
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(PACKAGE) or code.co_name[0] == "<":
            return
        if event == "call" and code.co_name == "__exit__":
            return
        seen += 1
        if seen == number:
            sys.setprofile(None)
            raise Cancelled

    sys.setprofile(watch)
    try:
        run()
    except Cancelled:
        pass
    finally:
        sys.setprofile(None)
    return seen


def branching(x):
    while x.sum() < 3:
        x = x * 1.5
    return x.sin() * float(x[1]) if x[0] > 1 else (x + torch.zeros(3)).cos()


ROWS = torch.tensor([[0.5, 0.8, 0.1], [1.2, 0.3, 0.9], [0.2, 0.2, 0.4]])
PROGRAMS = {
    "vmap": lambda: vmap(lambda x: (x * 2).sin() + torch.zeros(3))(ROWS),
    "plain inside": lambda: vmap(lambda x: x * sum([torch.ones(3) * k for k in range(5)]))(ROWS),
    "vmap(grad)": lambda: vmap(grad(lambda x: x.sin().sum()))(ROWS),
    "vmap(vmap)": lambda: vmap(vmap(lambda x: torch.tensor([1.0, 2.0]) * x))(ROWS),
    "jvp": lambda: jvp(lambda x: x.sin() * 2, (ROWS,), (ROWS,)),
    "jacrev": lambda: jacrev(lambda x: x.sin() * 2)(ROWS[0]),
    "random": lambda: vmap(lambda x: x + torch.rand(3), randomness="different", chunk_size=2)(ROWS),
    "branches": lambda: vmap(branching)(ROWS),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_leaves_no_state(name):
    run = PROGRAMS[name]
    run()
    names = torch.empty, torch.tensor
    calls = interrupted_at(run, -1)
    assert calls > 50
    for number in range(1, calls + 1, max(calls // 60, 1)):
        interrupted_at(run, number)
        assert not live_levels() and current_level() is None, number
        assert not standing.orders and machine.level is None and not machine.boundaries and not machine.together, number
        assert torch.is_grad_enabled() and (torch.empty, torch.tensor) == names, number
        assert type(torch.zeros(2) + 1) is torch.Tensor and not tls_is_excluded(OUTSIDE_KEY)
        machine.raised.clear()
