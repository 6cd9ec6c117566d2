"""Lanes that part, in converted code and by running again: writes, nestings, derivatives, draws, errors, resources."""

import copy
import gc
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise._core.level import live_levels
from lanewise._core.parting.lanes import machine
from lanewise.errors import SlowPathWarning
from tests.control import writing_programs
from tests.control.compositions import examples, scalar
from tests.control.programs import PROGRAMS
from tests.oracles import assert_same

D = torch.float64
XS = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(1))
KS = torch.tensor([-1.0, 0.5, 2.0], dtype=D)
EXACT = (1e-10, 1e-10)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)
    return request.param


def stacked(results):
    if isinstance(results[0], tuple):
        return tuple(torch.stack(column) for column in zip(*results, strict=True))
    return torch.stack(results)


def loop(f, *args):
    return stacked([f(*row) for row in zip(*args, strict=True)])


def jacobian(f, x):
    return torch.autograd.functional.jacobian(f, x)


def second(f, x):
    return torch.autograd.functional.hessian(f, x)


# --- writes in place -------------------------------------------------------------------------------------------------


def written(seed=0, lanes=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(lanes, 3, dtype=D, generator=generator), torch.randn(lanes, 2, 3, dtype=D, generator=generator)


def number(out):
    return sum(scalar(t) for t in (out if isinstance(out, tuple) else (out,)))


WRITES = pytest.mark.parametrize("f", writing_programs.PROGRAMS, ids=lambda f: f.__name__)


@WRITES
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_writes(f, chunk_size):
    """The results, and what the caller sees in the arguments."""
    got_args, want_args = written(), written()
    assert_same(vmap(f, chunk_size=chunk_size)(*got_args), loop(f, *want_args), EXACT)
    assert_same(got_args, want_args, EXACT)


@WRITES
def test_writes_to_lanes_that_lie_apart(f):
    if f.__name__ == "narrow_views":
        pytest.skip("takes a view that an example of this layout does not have")
    (xs, ys), want_args = written(1), written(1)
    xs, ys = xs.t().contiguous(), ys.movedim(0, 1).contiguous()
    assert_same(vmap(f, in_dims=1)(xs, ys), loop(f, *want_args), EXACT)
    assert_same((xs.t(), ys.movedim(1, 0)), want_args, EXACT)


@WRITES
def test_writes_in_pairs_of_lanes(f):
    got_args, want_args = ([t.unflatten(0, (2, 3)) for t in written(2)] for _ in range(2))
    assert_same(vmap(vmap(f))(*got_args), stacked([loop(f, *row) for row in zip(*want_args, strict=True)]), EXACT)
    assert_same(got_args, want_args, EXACT)


@WRITES
def test_writes_to_copies_inside_a_vmap_inside(f):
    def scaled(x, y, s):
        return number(f(x * s, y * s))

    xs, ys = written(3)
    want = torch.stack([torch.stack([scaled(x, y, s) for s in KS]) for x, y in zip(xs, ys, strict=True)])
    assert_same(vmap(lambda x, y: vmap(lambda s: scaled(x, y, s))(KS))(xs, ys), want, EXACT)


@WRITES
def test_gradients_of_writes(f):
    if f.__name__ == "outkw":
        pytest.skip("torch has no gradients of out=")

    def of_copies(x, y):
        return number(f(x * 1, y * 1)) + 0 * (x.sum() + y.sum())

    def outside(function):
        args = [t.requires_grad_() for t in written(4)]
        return torch.autograd.grad(function(of_copies)(*args).sin().sum(), args)

    got, want = outside(vmap), outside(lambda f: lambda xs, ys: loop(f, xs.unbind(), ys.unbind()))
    assert_same(got, want, EXACT)
    each = [torch.autograd.functional.jacobian(of_copies, row) for row in zip(*written(4), strict=True)]
    assert_same(vmap(grad(of_copies, argnums=(0, 1)))(*written(4)), stacked(each), EXACT)


@WRITES
def test_tangents_of_writes(f):
    if f.__name__ == "outkw":
        pytest.skip("torch has no forward mode of out=")

    def of_copies(x, y):
        return number(f(x * 1, y * 1)) + 0 * x.sum()

    def pushed(x, y, s, t):
        with forward_ad.dual_level():
            out = of_copies(forward_ad.make_dual(x, s), forward_ad.make_dual(y, t))
            return torch.clone(forward_ad.unpack_dual(out).tangent)  # type: ignore[arg-type]

    args, tangents = written(5), written(6)
    got = vmap(lambda x, y, s, t: jvp(of_copies, (x, y), (s, t))[1])(*args, *tangents)
    assert_same(got, loop(pushed, *args, *tangents), EXACT)


# --- derivatives -----------------------------------------------------------------------------------------------------


def with_jacrev(f, xs, ks):
    return vmap(lambda x, k: jacrev(lambda x: f(x, k))(x))(xs, ks), loop(
        lambda x, k: jacobian(lambda x: f(x, k), x), xs, ks
    )


def with_jacfwd(f, xs, ks):
    return vmap(lambda x, k: jacfwd(lambda x: f(x, k))(x))(xs, ks), loop(
        lambda x, k: jacobian(lambda x: f(x, k), x), xs, ks
    )


def with_hessian(f, xs, ks):
    def wave(x, k):
        return scalar(f(x, k)).sin()

    got = vmap(lambda x, k: hessian(lambda x: wave(x, k))(x))(xs, ks)
    return got, loop(lambda x, k: second(lambda x: wave(x, k), x), xs, ks)


def with_vmap_inside_grad_inside(f, xs, ks):
    got = vmap(grad(lambda x: scalar(vmap(lambda k: f(x, k))(ks[:4]).sin())))(xs)
    want = loop(lambda x: jacobian(lambda x: scalar(torch.stack([f(x, k) for k in ks[:4]]).sin()), x), xs)
    return got, want


def with_grad_of_pairs(f, xs, ks):
    got = grad(lambda xs: scalar(vmap(lambda k: vmap(lambda x: f(x, k))(xs))(ks[:4]).sin()))(xs)
    pairs = lambda xs: torch.stack([torch.stack([f(x, k) for x in xs.unbind()]) for k in ks[:4]])
    return got, jacobian(lambda xs: scalar(pairs(xs).sin()), xs)


NESTINGS = [with_jacrev, with_jacfwd, with_hessian, with_vmap_inside_grad_inside, with_grad_of_pairs]


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("nesting", NESTINGS, ids=lambda nesting: nesting.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nested_derivatives(program, nesting):
    if program.__name__ == "with_blocks" and nesting is with_jacfwd:
        pytest.skip("forward mode differentiates what no_grad hides from reverse mode")
    got, want = nesting(program, *examples())
    assert_same(got, want, (1e-9, 1e-9))


def test_jvp_both_ways():
    def f(x):
        if x.sum() > 0:
            return x.prod() * x
        return x.sin()

    ts = XS.flip(0)
    want = loop(lambda x, t: jacobian(f, x) @ t, XS, ts)
    assert_same(vmap(lambda x, t: jvp(f, (x,), (t,))[1])(XS, ts), want)
    assert_same(jvp(vmap(f), (XS,), (ts,))[1], want)
    got = jvp(vmap(grad(lambda x: f(x).sum())), (XS,), (ts,))[1]
    assert_same(got, loop(lambda x, t: second(lambda x: f(x).sum(), x) @ t, XS, ts))


def test_a_branch_on_a_derivative():
    def f(x):
        slope = grad(lambda x: (x**3).sum())(x)
        if slope[0] > 0.3:
            return slope.sum()
        return (slope * x).sum()

    assert_same(vmap(f)(XS), loop(f, XS))
    assert_same(vmap(grad(f))(XS), loop(grad(f), XS))
    assert_same(vmap(hessian(f))(XS), loop(hessian(f), XS))


def test_gradients_of_rows_that_different_lanes_use():
    """What puts cotangents side by side has the lanes of any of them."""

    def f(x):
        a, b, c = x.unbind()
        if a > 0:
            y = a * b
        else:
            y = c.sin()
        left, right = x.split([1, 2])
        z = left.sum() if y > 0 else right.sum()
        return y * z

    assert_same(vmap(grad(f))(XS), loop(grad(f), XS))
    assert_same(vmap(hessian(f))(XS), loop(hessian(f), XS))


def _eigen(x):
    values, vectors = torch.linalg.eigh(torch.outer(x, x) + torch.diag(KS))
    return (values[0] * 2 if x[0] > 0 else (vectors[:, 0] ** 2 * KS).sum()) * x[1]


def _singular(x):
    u, s, _ = torch.linalg.svd(torch.outer(x, x) + torch.diag(KS))
    return (s[0] * 2 if x[0] > 0 else (u[:, 0] ** 2 * KS).sum()) * x[1]


def _moments(x):
    variance, mean = torch.var_mean(x)
    q, r = torch.linalg.qr(torch.outer(x, x) + torch.eye(3, dtype=D))
    return (variance if x[0] > 0 else mean) * (q[0, 0] if x[1] > 0 else r[0, 0])


def _recurrent(x, lstm=nn.LSTM(3, 2).double()):  # noqa: B008
    out, (h, c) = lstm(torch.stack([x, x * 2]))
    return h.sum() if x[0] > 0 else (c.sum() if x[1] > 0 else out[0].sum())


@pytest.mark.parametrize("f", [_eigen, _singular, _moments, _recurrent])
def test_gradients_of_results_that_different_lanes_use(f):
    assert_same(vmap(grad(f))(XS), loop(grad(f), XS), (1e-8, 1e-9))


def test_nan_of_a_branch_not_taken():
    def f(x):
        if x[0] > 0:
            return x[0].log() + x.sum()
        return x.sum()

    got = vmap(grad(f))(XS)
    assert_same(got, loop(grad(f), XS))
    assert not got.isnan().any()
    xs = torch.tensor([[0.0], [4.0]], dtype=D, requires_grad=True)
    (got,) = torch.autograd.grad(vmap(lambda x: x[0].sqrt() if x[0] > 0 else x[0] * 2)(xs).sum(), xs)
    assert got.tolist() == [[2.0], [0.25]]


def test_no_grad_at_the_condition_only():
    def f(x):
        with torch.no_grad():
            big = x.norm() > 1
            c = x.sum() if big else x.prod()
        return x * c

    xs = XS.clone().requires_grad_()
    (got,) = torch.autograd.grad(vmap(f)(xs).sum(), xs)
    (want,) = torch.autograd.grad(loop(f, xs.unbind()).sum(), xs)
    assert_same(got, want)


# --- autograd inside -------------------------------------------------------------------------------------------------


def test_autograd_grad_inside():
    def f(x):
        p = x.clone().requires_grad_()
        y = (p**2).sum() if p.sum() > 0 else p.exp().sum()
        (slope,) = torch.autograd.grad(y, p)
        return slope * x if slope[0] > 0.5 else slope + x

    assert_same(vmap(f)(XS), loop(f, XS))


def test_backward_inside():
    def f(x):
        p = x.clone().requires_grad_()
        for i in range(3):
            if p[i] > 0:
                (p[i] ** 3).backward()
            else:
                p.sin().sum().backward()
        return p.grad if p.grad[0] > 1 else p.grad * 2

    assert_same(vmap(f)(XS), loop(f, XS))


def _of_all(w, x):
    (w * x).sum().backward()
    return x if x[0] > 0 else -x


def _of_each_branch(w, x):
    y = (w * x).sum() if x.sum() > 0 else (w**2 * x).sum()
    y.backward()
    return y.detach()


def _of_some(w, x):
    if x[0] > 0:
        (w * 2).sum().backward()
    return x * 1


def _of_all_and_some(w, x):
    (w * x).sum().backward()
    if x[0] > 0:
        (w * x).sin().sum().backward()
    elif x[1] > 0:
        return x * 3
    return x * 1


def _again_and_again(w, x):
    for i in range(3):
        if x[i] > 0:
            (w[i] * x).sum().backward()
        elif x[0] > 0:
            (w * x[i]).sum().backward()
        if x.prod() > 0:
            (w * 2).sum().backward()
    return x * 1


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("f", [_of_all, _of_each_branch, _of_some, _of_all_and_some, _again_and_again])
def test_gradients_of_a_captured_parameter(f, before):
    """Each lane adds once, whether it runs again or not."""

    def parameter():
        w = torch.ones(3, dtype=D, requires_grad=True)
        w.grad = torch.ones(3, dtype=D) if before else None
        return w

    got, want = parameter(), parameter()
    assert_same(vmap(lambda x: f(got, x))(XS), loop(lambda x: f(want, x), XS))
    assert_same(got.grad, want.grad)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2 if x.sum() > 0 else x * 5

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 2 * x if x.sum() > 0 else cotangent * 5


@pytest.mark.parametrize("function", [Square, Branching])
def test_custom_functions(function):
    def f(x):
        if x[0] > 0:
            return function.apply(x).sum()
        return (function.apply(x) * x).sum()

    assert_same(vmap(f)(XS), loop(f, XS))
    assert_same(vmap(grad(f))(XS), loop(grad(f), XS))
    xs = XS.clone().requires_grad_()
    (got,) = torch.autograd.grad(vmap(f)(xs).sum(), xs)
    (want,) = torch.autograd.grad(loop(f, xs.unbind()).sum(), xs)
    assert_same(got, want)


def test_the_very_object_from_every_branch():
    shared = torch.ones(2)

    def f(x):
        if x[0] > 0:
            return shared, x.sum()
        return shared, x.prod()

    got, _ = vmap(f, out_dims=(None, 0))(XS)
    assert got.equal(shared)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2


def test_a_custom_function_of_a_captured_parameter():
    """Its gradient counts the lanes that called it."""
    w = torch.ones((), dtype=D, requires_grad=True)

    def f(x):
        if x[0] > 0:
            return Scaled.apply(w)
        return w * 3

    (got,) = torch.autograd.grad(vmap(f)(XS).sum(), w)
    (want,) = torch.autograd.grad(loop(f, XS).sum(), w)
    assert_same(got, want)


def test_hooks_in_branches():
    def f(x):
        y = x * 2
        if x[0] > 0:
            y = y.sin()
            y.register_hook(lambda g: g * g.sum())
        return y.sum() * x[1]

    xs = XS.clone().requires_grad_()
    (got,) = torch.autograd.grad(vmap(f)(xs).sum(), xs)
    (want,) = torch.autograd.grad(loop(f, xs.unbind()).sum(), xs)
    assert_same(got, want)
    assert_same(vmap(grad(f))(XS), want)


def test_checkpoints_in_branches():
    def f(x):
        if x[0] > 0:
            return checkpoint(torch.sin, x, use_reentrant=False).sum()
        return checkpoint(lambda x: x.exp() * x, x, use_reentrant=False).prod()

    xs = XS.clone().requires_grad_()
    (got,) = torch.autograd.grad(vmap(f)(xs).sum(), xs)
    (want,) = torch.autograd.grad(loop(f, xs.unbind()).sum(), xs)
    assert_same(got, want)


# --- nestings --------------------------------------------------------------------------------------------------------


def _captured_first(x, each):
    def h(y):
        if x[0] > 0:
            return x.sum() * y
        if x[1] * y > 0:
            return y * 2
        return y - x[2]

    return each(h)


def _outer_before_and_after(x, each):
    if x[0] > 0:
        x = x * 2
    z = each(lambda y: y * x.sum() if y > 0 else y)
    if z.sum() > 0:
        z = z + x[0]
    return z


def _inside_branches(x, each):
    if x[0] > 0:
        return each(lambda y: y * x.sum() if y > 0 else y)
    return each(lambda y: y * x.prod()) if x[1] > 0 else KS * x[0]


@pytest.mark.parametrize("f", [_captured_first, _outer_before_and_after, _inside_branches])
def test_captured_outer_lanes(f):
    def inner(x):
        return f(x, lambda h: vmap(h)(KS))

    def plain(x):
        return f(x, lambda h: torch.stack([h(y) for y in KS]))

    assert_same(vmap(inner)(XS), loop(plain, XS))
    assert_same(vmap(jacrev(inner))(XS), loop(lambda x: jacobian(plain, x), XS))
    assert_same(vmap(jacfwd(inner))(XS), loop(lambda x: jacobian(plain, x), XS))
    pairs = torch.stack([XS, -XS])
    assert_same(vmap(vmap(inner))(pairs), torch.stack([loop(plain, xs) for xs in pairs]))


def test_writes_to_captured_outer_values_in_branches():
    """Once for each outer lane, as any write of what has no inner lanes; and for those outer lanes only."""
    xs = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [2.0, -1.0], [-3.0, 1.0]], dtype=D)

    def f(x, each):
        z = x * 1

        def h(k):
            if x[0] * k > 0.4 and k < 1:
                z.add_(1)
            return k * x.sum()

        return z, each(h)

    got = vmap(lambda x: f(x, lambda h: vmap(h)(KS)))(xs)
    want = stacked([f(x, lambda h: torch.stack([h(k) for k in KS])) for x in xs])
    assert_same(got, want)


# --- random numbers --------------------------------------------------------------------------------------------------


def test_draws_decide_as_often_as_they_should():
    torch.manual_seed(0)

    def rare(x):
        return torch.ones(()) if torch.rand(()) > 0.7 else torch.zeros(())

    assert abs(vmap(rare, randomness="different")(torch.zeros(4000)).mean() - 0.3) < 0.03

    def rounds(x):
        n = 0
        while torch.rand(()) > 0.5 and n < 20:
            n += 1
        return torch.tensor(float(n))

    counts = vmap(rounds, randomness="different")(torch.zeros(4000))
    assert abs(counts.mean() - 1) < 0.12 and abs((counts == 0).double().mean() - 0.5) < 0.04

    def of_a_mask(x):
        u = torch.rand(3)
        return u[u > 0.5].sum() + torch.rand(())

    assert abs(vmap(of_a_mask, randomness="different")(torch.zeros(4000)).mean() - 1.625) < 0.06


@pytest.mark.parametrize("lanes", [2, 4000])
def test_draws_from_a_generator_of_the_user_s(lanes):
    generator = torch.Generator().manual_seed(0)

    def f(x):
        return torch.ones(()) if torch.rand((), generator=generator) > 0.7 else torch.zeros(())

    rounds = 8000 // lanes
    means = [vmap(f, randomness="different")(torch.zeros(lanes)).mean() for _ in range(rounds)]
    assert abs(torch.stack(means).mean() - 0.3) < 0.03


def test_draws_after_a_branch_are_each_lane_s_own():
    torch.manual_seed(0)

    def f(x):
        if torch.rand(()) > 0.7:
            return torch.rand(())
        return torch.rand(()) + 10

    out = vmap(f, randomness="different")(torch.zeros(4000))
    low, high = out[out < 5], out[out > 5]
    assert abs(len(low) / 4000 - 0.3) < 0.03 and abs(low.mean() - 0.5) < 0.04 and abs(high.mean() - 10.5) < 0.04
    assert low.unique().numel() > len(low) - 3


def test_draws_do_not_depend_on_chunks():
    def f(x):
        u = torch.rand(())
        return u if x > 0 else -u

    xs = torch.linspace(-1, 1, 11)
    results = []
    for chunk_size in (None, 4, 1):
        torch.manual_seed(5)
        results.append(vmap(f, randomness="different", chunk_size=chunk_size)(xs))
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(vmap(f, randomness="different")(xs), results[0])


def test_the_same_draw_for_all(way):
    def f(x):
        n = torch.randn(2)
        return n[0] if n.sum() > 0 else n[1]

    assert vmap(f, randomness="same")(torch.zeros(3)).unique().numel() == 1

    def g(x):
        u = torch.rand(())
        return u + torch.rand(()) if x > 0 else u - 1

    out = vmap(g, randomness="same")(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert out[0] == out[2] and out[1] == out[3]


def test_dropout():
    torch.manual_seed(0)

    def f(x):
        y = F.dropout(torch.ones(100), 0.3)
        if x > 0:
            y = F.dropout(y, 0.5)
        return (y != 0).double().mean()

    xs = torch.linspace(-1, 1, 300)
    kept = vmap(f, randomness="different")(xs)
    assert abs(kept[xs <= 0].mean() - 0.7) < 0.02 and abs(kept[xs > 0].mean() - 0.35) < 0.02


# --- exceptions ------------------------------------------------------------------------------------------------------


def untouched():
    return machine.level is None and not machine.boundaries and not live_levels() and machine.together == 0


def test_the_lanes_of_an_error():
    def f(x):
        if x[0] > 0:
            raise ValueError("boom")
        return x.sum()

    places = (XS[:, 0] > 0).nonzero().squeeze(1).tolist()
    with pytest.raises(ValueError, match="boom") as caught:
        vmap(f)(XS)
    assert caught.value.lanes == places
    if sys.version_info >= (3, 11):  # errors have notes from then on
        assert any(f"lanes {places[0]}, {places[1]}" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="boom") as caught:
        vmap(vmap(f))(XS.unflatten(0, (2, 3)))
    assert caught.value.lanes == [divmod(place, 3) for place in places]
    assert untouched()


def test_an_interrupt_leaves_nothing():
    def f(x):
        if x[0] > 0:
            raise KeyboardInterrupt
        return x

    with pytest.raises(KeyboardInterrupt):
        vmap(f)(XS)
    assert untouched()
    assert_same(vmap(lambda x: x if x[0] > 0 else -x)(XS), loop(lambda x: x if x[0] > 0 else -x, XS))


def _raised_and_caught(x):
    try:
        if x[0] > 0:
            raise ValueError
        y = x * 2
    except ValueError:
        y = x * 3
    finally:
        x = x + 1
    return y + x


def _division(x):
    try:
        return 1 / int(x[0] > 0) * x
    except ZeroDivisionError:
        return -x


def _lookup(x):
    try:
        return x * [1, 2][int(x[0] > 0) + int(x[1] > 0)]
    except IndexError:
        return x * 0


@pytest.mark.parametrize("f", [_raised_and_caught, _division, _lookup])
def test_exceptions_caught_inside(f):
    assert_same(vmap(f)(XS), loop(f, XS))
    total = lambda x: f(x).sum()
    assert_same(vmap(grad(total))(XS), loop(grad(total), XS))


# --- shapes, sizes, threads, memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [0, 1, 2])
def test_few_lanes(lanes):
    f = lambda x: x.sum() if x[0] > 0 else x.prod()
    vmap(f)(XS)
    got = vmap(f)(XS[:lanes])
    assert torch.equal(got, torch.tensor([f(x) for x in XS[:lanes]], dtype=D))
    assert vmap(grad(f))(XS[:lanes]).shape == (lanes, 3)
    assert vmap(vmap(f))(XS[:lanes].expand(2, lanes, 3)).shape == (2, lanes)
    assert vmap(vmap(f))(XS[:lanes, None].expand(lanes, 2, 3)).shape == (lanes, 2)


def test_dims():
    def f(x):
        if x[0] > 0:
            return x.sum(), (x, 1)
        return x.prod(), (-x, 2)

    total, (signed, which) = vmap(f, in_dims=1, out_dims=(0, (1, 0)))(XS.t())
    assert_same(total, loop(lambda x: f(x)[0], XS))
    assert_same(signed.t(), loop(lambda x: f(x)[1][0], XS))
    assert which.tolist() == [f(x)[1][1] for x in XS]


DYNAMIC = {
    "mask": lambda x, n: x[x > 0].sum(),
    "nonzero": lambda x, n: x[(x > 0).nonzero().flatten()].prod(),
    "where": lambda x, n: torch.where(x > 0)[0].sum() * x,
    "masked_select": lambda x, n: torch.masked_select(x, x > 0).prod(),
    "two masks": lambda x, n: torch.cat([x[x > 0], x[x <= 0]]),
    "unique": lambda x, n: torch.unique(x > 0).numel() * x,
    "bincount": lambda x, n: torch.bincount((x > 0).long()).double().sum() * x,
    "arange": lambda x, n: x[torch.arange(n)].sum(),
    "slice": lambda x, n: x[:n].sum(),
    "split": lambda x, n: torch.split(x, [n, 3 - n])[0].sum(),
    "chunk": lambda x, n: x.chunk(n + 1)[0].sum(),
    "tensor_split": lambda x, n: x.tensor_split(n + 1)[-1].sum(),
    "topk": lambda x, n: x.topk(n).values.sum(),
    "repeat": lambda x, n: x.repeat(n + 1).sum(),
    "expand": lambda x, n: x.expand(n + 1, 3).sum(),
    "pad": lambda x, n: F.pad(x, (n, 0)).prod(),
    "roll": lambda x, n: torch.roll(x, n),
    "zeros": lambda x, n: torch.zeros(n + 1, dtype=D).numel() * x,
    "linspace": lambda x, n: torch.linspace(0, 1, n + 2, dtype=D).sum() * x,
    "eye": lambda x, n: torch.eye(n + 1, dtype=D).sum() * x,
    "dim": lambda x, n: torch.outer(x, x[:2]).cumsum(n % 2).sum(n % 2).sum(),
    "tolist": lambda x, n: x * sum(x.tolist()),
    "tensor of a list": lambda x, n: x * torch.tensor(x.tolist(), dtype=D),
    "tensor of items": lambda x, n: torch.tensor([x[0].item(), 2.0], dtype=D) + x.sum(),
    "full": lambda x, n: torch.full((2,), x[0].item(), dtype=D) * x.sum(),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", DYNAMIC)
def test_shapes_and_numbers_of_each_lane(name):
    def f(x):
        return DYNAMIC[name](x, int((x > 0).sum()))

    xs = XS.clone().requires_grad_()
    got, want = vmap(f)(xs), loop(f, xs.unbind())
    assert_same(got, want)
    assert_same(torch.autograd.grad(got.sin().sum(), xs), torch.autograd.grad(want.sin().sum(), xs))


def test_a_hundred_ways():
    def f(x):
        y = x
        try:
            for _ in range(int(x)):
                y = y * 0.9 + 1
        finally:
            pass
        return y

    xs = torch.arange(100.0, dtype=D)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = vmap(f)(xs)
    assert_same(got, loop(f, xs))
    assert sum(issubclass(warning.category, SlowPathWarning) for warning in caught) <= 1


def test_threads():
    f = lambda x: x.sum() if x[0] > 0 else x.prod()
    results = {}

    def work(number):
        for _ in range(10):
            results[number] = vmap(f)(XS * number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(1, 5):
        assert_same(results[number], loop(f, XS * number))


def test_nothing_is_kept():
    def f(x, y):
        z = x * 2
        z[0] = 1
        y.add_(1)
        if x[0] > 0:
            z = z + y
            y.mul_(2)
        elif x[1] > 0:
            z = z * y
        return z.sum()

    def once():
        xs, ys = XS.clone(), XS.clone()
        vmap(f)(xs, ys)
        vmap(grad(lambda x, y: f(x * 1, y * 1)))(xs, ys)
        vmap(vmap(f))(xs[None].clone(), ys[None].clone())
        return weakref.ref(xs), weakref.ref(ys)

    def tensors():
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    once()
    gc.collect()
    gc.disable()
    try:
        given = once()
        before = tensors()
        for _ in range(5):
            once()
        assert tensors() <= before and all(reference() is None for reference in given)
    finally:
        gc.enable()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double().eval()

    def forward(self, x):
        y = self.norm(x)
        return y * 2 if y.sum() > 0 else y - x


def test_modules_with_buffers():
    net = Normed()
    batches = torch.randn(6, 4, 3, dtype=D, generator=torch.Generator().manual_seed(0))
    twin = copy.deepcopy(net)
    assert_same(vmap(net)(batches), loop(twin, batches))
    assert_same(tuple(net.buffers()), tuple(twin.buffers()))
