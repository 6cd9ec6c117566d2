"""Nothing is left behind: no level after an exception, no tensor alive without the collector, no thread mixed up."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lanewise import functional_call, grad, grad_and_value, jvp, vjp, vmap
from lanewise._core.level import live_levels
from tests.oracles import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


class Stop(Exception):
    pass


def _raise(error):
    raise error


def _run_vmap(f):
    return vmap(f)(X)


def _run_vmap_vmap(f):
    return vmap(vmap(f))(X)


def _run_grad(f):
    return grad(lambda x: f(x).sum())(X)


def _run_vmap_grad(f):
    return vmap(grad(lambda x: f(x).sum()))(X)


def _run_grad_vmap(f):
    return grad(lambda x: vmap(f)(x).sum())(X)


def _run_jvp(f):
    return jvp(f, (X,), (X,))


def _run_jvp_jvp(f):
    return jvp(lambda x: jvp(f, (x,), (x,))[1], (X,), (X,))


def _run_vjp(f):
    return vjp(f, X)


def _run_vmap_jvp(f):
    return vmap(lambda x: jvp(f, (x,), (x,)))(X)


RUNS = [
    _run_vmap, _run_vmap_vmap, _run_grad, _run_vmap_grad, _run_grad_vmap, _run_jvp, _run_jvp_jvp, _run_vjp,
    _run_vmap_jvp,
]  # fmt: skip
every = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__.removeprefix("_run_"))


def _usable() -> None:
    """The engine works as if nothing had happened, and plain torch is plain."""
    assert live_levels() == []
    assert torch.is_grad_enabled()
    assert type(X + 1) is torch.Tensor
    assert type(torch.zeros(2)) is torch.Tensor
    assert_same(vmap(grad(lambda x: (x * x).sum()))(X), 2 * X)
    assert_same(jvp(torch.sin, (X,), (X,))[1], X.cos() * X)
    y = X.clone().requires_grad_()
    y.sin().sum().backward()
    assert_same(y.grad, X.cos())


@every
@pytest.mark.parametrize(
    "error", [Stop("stop"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=lambda e: type(e).__name__
)
def test_no_level_after_an_exception(run, error):
    with pytest.raises(type(error)):
        run(lambda x: (x.sin(), _raise(error))[0])
    _usable()


@every
def test_no_level_after_an_error_in_an_op(run):
    with pytest.raises(RuntimeError):
        run(lambda x: x.reshape(7, 7, 7))
    _usable()


@every
def test_no_level_after_an_error_in_backward(run):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise Stop("in backward")

    def f(x):
        y = x.clone().requires_grad_() if not x.requires_grad else x
        return torch.autograd.grad(Bad.apply(y).sum(), y)[0]

    # Forward mode stops earlier, for want of a jvp.
    with pytest.raises((Stop, NotImplementedError)):
        run(f)
    _usable()


@every
def test_caught_inside_goes_on(run):
    def f(x):
        try:
            run_inner(x)
        except Stop:
            pass
        return x.sin()

    def run_inner(x):
        return vmap(lambda t: _raise(Stop()))(x.reshape(-1, 1))

    run(f)
    _usable()


def test_grad_mode_is_kept_after_an_exception_in_no_grad():
    with torch.no_grad():
        with pytest.raises(Stop):
            grad(lambda x: _raise(Stop()))(X)
        assert not torch.is_grad_enabled()
    _usable()


def test_bad_arguments_leave_nothing():
    for call in (
        lambda: vmap(lambda x: x, in_dims=5)(X),
        lambda: vmap(lambda x: x, out_dims=7)(X),
        lambda: vmap(lambda x: x)(),
        lambda: vmap(lambda x, y: x)(X, X[:2]),
        lambda: grad(lambda x: x)(X),
        lambda: grad(lambda x: x.sum(), argnums=3)(X),
        lambda: jvp(lambda x: x, (X,), (X[:1],)),
        lambda: vjp(lambda x: x, X)[1](X[:1]),
        lambda: vmap(lambda x: torch.randn(2))(X),
    ):
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            call()
        _usable()


def test_functional_call_restores_the_module():
    module = torch.nn.Linear(3, 2).double()
    before = dict(module.named_parameters())
    fresh = {name: torch.zeros_like(p) for name, p in before.items()}
    module.register_forward_hook(lambda *_: _raise(Stop()))
    with pytest.raises(Stop):
        grad(lambda p: functional_call(module, p, (X,)).sum())(fresh)
    assert all(p is before[name] for name, p in module.named_parameters())
    _usable()


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@every
def test_nothing_is_kept_alive_without_the_garbage_collector(run):
    seen: list[weakref.ref] = []

    def f(x):
        y = (x * 2).sin()
        seen.extend(weakref.ref(t) for t in (x, y))
        return y

    run(f)  # caches fill
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        out = run(f)
        del out
        alive = sum(ref() is not None for ref in seen)
        assert seen
        assert alive == 0, f"{alive} of {len(seen)} tensors of the function live on"
    finally:
        gc.enable()


@every
def test_nothing_is_kept_alive_after_an_exception(run):
    seen: list[weakref.ref] = []

    def f(x):
        y = x.sin()
        seen.append(weakref.ref(y))
        raise Stop

    for _ in range(2):
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(Stop) as caught:
                run(f)
            del caught
            gc.collect()
            assert not any(ref() is not None for ref in seen)
        finally:
            gc.enable()


@every
def test_the_number_of_tensors_does_not_grow(run):
    f = lambda x: (x.sin() * x).cumsum(0)
    run(f)
    before = _live_tensors()
    for _ in range(20):
        run(f)
    assert _live_tensors() <= before  # what other tests have left may go meanwhile


def test_an_input_is_free_once_its_owner_lets_go():
    x = X.clone()
    ref = weakref.ref(x)
    result = vmap(grad(lambda t: t.exp().sum()))(x)
    del x
    assert ref() is None
    assert result.shape == (4, 3)


def test_vjp_function_keeps_the_graph_and_then_frees_it():
    x = X.clone()
    ref = weakref.ref(x)
    _, pull = vjp(torch.sin, x)
    del x
    assert_same(pull(torch.ones(4, 3, dtype=torch.float64))[0], X.cos())
    del pull
    assert ref() is None


def test_captured_parameters_get_one_gradient_for_all_lanes():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    vmap(lambda x: (x * weight).sum())(X).sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert_same(weight.grad, X.sum(0))


def test_backward_inside_adds_the_sum_over_lanes():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def f(x):
        (x * weight).sum().backward()
        return x

    vmap(f)(X)
    assert type(weight.grad) is torch.Tensor
    assert_same(weight.grad, X.sum(0))


def _work(i: int):
    x = X + i
    one = vmap(grad(lambda t: (t**3).sum()))(x)
    two = jvp(lambda t: vmap(torch.exp)(t), (x,), (x,))[1]
    three = grad(lambda t: vmap(lambda s: s.sin().sum())(t).sum())(x)
    return i, one, two, three, live_levels()


def test_threads_do_not_see_each_other():
    with ThreadPoolExecutor(8) as pool:
        for i, one, two, three, levels in pool.map(_work, range(64)):
            x = X + i
            assert_same(one, 3 * x * x)
            assert_same(two, x.exp() * x)
            assert_same(three, x.cos())
            assert levels == []
    _usable()


def test_threads_at_the_same_line_inside():
    barrier = threading.Barrier(4, timeout=30)

    def work(i: int):
        def f(x):
            y = x * i
            barrier.wait()
            z = y.sin()
            barrier.wait()
            return (z * y).sum()

        return i, vmap(grad(f))(X), len(live_levels())

    with ThreadPoolExecutor(4) as pool:
        for i, got, levels in pool.map(work, range(4)):
            y = X * i
            assert_same(got, i * (y.cos() * y + y.sin()))
            assert levels == 0


def test_an_exception_in_one_thread_leaves_the_others_alone():
    def work(i: int):
        if i % 2:
            with pytest.raises(Stop):
                vmap(lambda x: _raise(Stop()))(X)
        return vmap(torch.sin)(X)

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(work, range(32)):
            assert_same(got, X.sin())


def test_backward_in_another_thread():
    x = X.clone().requires_grad_()
    out = vmap(lambda t: (t.exp() * t).sum())(x).sum()
    gradient = vmap(grad(lambda t: t.exp().sum()))(x).sum()

    def backward():
        (out + gradient).backward()
        return live_levels()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(backward).result() == []
    assert_same(x.grad, X.exp() * (X + 1) + X.exp())


def test_vjp_called_in_another_thread():
    _, pull = vjp(vmap(torch.sin), X)
    with ThreadPoolExecutor(1) as pool:
        (got,) = pool.submit(pull, torch.ones_like(X)).result()
    assert_same(got, X.cos())


def test_a_thread_started_inside_is_outside():
    """A new thread has no levels of its own; what it does to plain tensors is plain."""
    found = []

    def f(x):
        thread = threading.Thread(target=lambda: found.append((type(X * 2), len(live_levels()))))
        thread.start()
        thread.join()
        return x.sin()

    assert_same(vmap(f)(X), X.sin())
    assert found == [(torch.Tensor, 0)]


def test_generators_may_be_closed_midway():
    def numbers(x):
        yield grad(lambda t: (t * t).sum())(x)
        yield x

    def f(x):
        stream = numbers(x)
        return next(stream)

    assert_same(vmap(f)(X), 2 * X)
    _usable()


def test_a_lane_tensor_that_escapes_is_named():
    kept = []
    vmap(lambda x: (kept.append(x), x)[1])(X)
    with pytest.raises(RuntimeError, match="your tensor may have escaped from inside a function being vmapped"):
        kept[0].sin()
    kept.clear()
    _usable()


def test_values_with_grad_and_value_are_plain():
    gradient, value = grad_and_value(lambda x: (x * x).sum())(X)
    for t in (gradient, value):
        assert type(t) is torch.Tensor
        assert not t.requires_grad
        assert t.grad_fn is None
