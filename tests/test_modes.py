"""Switches that are set around or inside a transform: dispatch modes, grad mode, inference mode, autocast, threads."""

import contextlib
import copy
import itertools
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from lanewise import grad, grad_and_value, hessian, jacrev, jvp, linearize, vmap
from tests.oracles import assert_same

XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
W = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


class Log(TorchDispatchMode):
    """Notes every operation and whether a wrapper was among its operands."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.wrappers = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func).removeprefix("aten."))
        self.wrappers |= any(getattr(kind, "is_plane", False) for kind in types)
        return func(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    """Changes what an operation gives."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


# --- dispatch modes --------------------------------------------------------------------------------------------------


def test_a_mode_around_sees_what_is_carried_out():
    with Log() as log:
        out = vmap(lambda x: x.sin() * 2)(XS)
    assert_same(out, XS.sin() * 2)
    assert log.seen == ["sin.default", "mul.Tensor"]
    assert not log.wrappers


@pytest.mark.parametrize(
    "run",
    [
        lambda: vmap(lambda x: (x @ W).sin() + torch.zeros(2))(XS),
        lambda: vmap(grad(lambda x: (x @ W).sin().sum()))(XS),
        lambda: vmap(vmap(lambda x: x.sin() * torch.ones(3)))(XS.reshape(2, 2, 3)),
        lambda: jvp(lambda x: (x @ W).sin(), (XS,), (XS,)),
        lambda: jacrev(lambda x: (x @ W).sin())(XS[0]),
        lambda: hessian(lambda x: (x @ W).sin().sum())(XS[0]),
        lambda: grad(lambda x: vmap(lambda y: (y @ W).sin())(x).sum())(XS),
    ],
)
def test_no_wrapper_reaches_a_mode_around(run):
    want = run()
    with Log() as log:
        got = run()
    assert_same(got, want)
    assert log.seen
    assert not log.wrappers


def test_a_mode_around_may_change_results():
    first = lambda x: x.sin() + torch.zeros(3, dtype=x.dtype)
    second = lambda x: x * XS[0].sin()
    with Doubled():
        got = vmap(first)(XS), vmap(second)(XS)
    assert_same(got, (2 * XS.sin(), 2 * XS * XS[0].sin()))


def test_modes_inside_see_what_the_function_asks():
    logs = []

    def f(x):
        with Log() as log:
            y = (x.sin() * 2).sum()
        logs.append(log)
        return y

    with Log() as around:
        assert_same(vmap(f)(XS), (XS.sin() * 2).sum(1))
    assert logs[0].seen == ["sin.default", "mul.Tensor", "sum.default"]
    assert logs[0].wrappers
    assert not around.wrappers
    assert around.seen[0] == "sin.default"


def test_flops():
    """Around the transform the work of all lanes, inside it the work of one, as in a loop."""
    per_lane = 2 * 3 * 2
    inside = []

    def f(x):
        with FlopCounterMode(display=False) as counter:
            y = x[None] @ W
        inside.append(counter.get_total_flops())
        return y.sum()

    with FlopCounterMode(display=False) as counter:
        vmap(f)(XS)
    assert (inside, counter.get_total_flops()) == ([per_lane], 4 * per_lane)
    with FlopCounterMode(display=False) as counter:
        vmap(grad(lambda x: (x[None] @ W).sin().sum()))(XS)
    assert counter.get_total_flops() == 2 * 4 * per_lane


def test_modes_are_as_before_also_after_an_error():
    with Log() as first, Log() as second:
        for run in (lambda x: x * 2, lambda x: x @ x @ x):
            with contextlib.suppress(RuntimeError):
                vmap(run)(XS)
            assert _get_current_dispatch_mode_stack() == [first, second]
    assert _get_current_dispatch_mode_stack() == []
    vmap(lambda x: x * 2)(XS)
    assert _get_current_dispatch_mode_stack() == []


def test_backward_under_a_mode():
    xs = XS.clone().requires_grad_()
    out = vmap(lambda x: (x @ W).sin().sum())(xs)
    with Log() as log:
        (g,) = torch.autograd.grad(out.sum(), xs)
    assert_same(g, (XS @ W).cos() @ W.T)
    assert not log.wrappers


def test_fake_tensors():
    with FakeTensorMode():
        x, w = torch.empty(4, 3), torch.empty(3, 2)
        assert vmap(lambda x: (x @ w).sin() + torch.zeros(2))(x).shape == (4, 2)
        assert vmap(grad(lambda x: (x @ w + torch.ones(2)).sin().sum()))(x).shape == (4, 3)
        assert hessian(lambda x: (x.sin() * torch.ones(3)).sum())(x[0]).shape == (3, 3)
    assert vmap(lambda x: (x @ w).sin())(x).shape == (4, 2)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: vmap(lambda x: (x @ w).sin() + torch.zeros(2))(x),
        lambda x, w: vmap(grad(lambda x: (x @ w).sin().sum()))(x),
        lambda x, w: jvp(lambda x: (x @ w).sin(), (x,), (torch.ones_like(x),))[1],
        lambda x, w: jacrev(lambda x: (x @ w).sin())(x[0]),
    ],
    ids=["vmap", "vmap of grad", "jvp", "jacrev"],
)
def test_tracing(f, tracing):
    """The trace has the operations below, and gives the same numbers for other arguments."""
    graph = make_fx(f, tracing_mode=tracing)(XS, W)
    assert_same(graph(XS + 1, W * 2), f(XS + 1, W * 2))


# --- grad mode, inference mode, autocast -----------------------------------------------------------------------------

SWITCHES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(("around", "before", "after"), list(itertools.product(SWITCHES, SWITCHES, SWITCHES)))
def test_grad_modes_as_in_a_loop(around, before, after, tracked):
    """Value, requires_grad, the gradient from outside; or torch's own error where the loop has one."""

    def f(x):
        with SWITCHES[before]():
            y = x.sin() * W[0, 0]
        with SWITCHES[after]():
            return (y * x).sum()

    outcomes = []
    for run in (vmap(f), lambda xs: torch.stack([f(x) for x in xs])):
        xs = XS.clone().requires_grad_(tracked)
        try:
            with SWITCHES[around]():
                out = run(xs)
            gradient = torch.autograd.grad(out.sum(), xs)[0] if out.requires_grad else None
            outcomes.append((out.requires_grad, out.is_inference(), out.detach(), gradient))
        except RuntimeError as error:
            outcomes.append(str(error).split(".")[0])
    got, want = outcomes
    if isinstance(want, str):
        assert got == want
        return
    assert got[:2] == want[:2]
    assert_same(got[2].clone(), want[2].clone())
    assert (got[3] is None) == (want[3] is None)
    if want[3] is not None:
        assert_same(got[3], want[3])


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(("around", "before", "inside"), list(itertools.product(SWITCHES, SWITCHES, SWITCHES)))
def test_grad_in_every_position(around, before, inside, tracked):
    """`grad` inside a mapped function: what the same transform in a loop gives, history included."""

    def loss(x):
        with SWITCHES[inside]():
            y = x.sin()
        return (y * x).sum()

    def f(x):
        with SWITCHES[before]():
            g, value = grad_and_value(loss)(x)
        return g * value

    outcomes = []
    for run in (vmap(f), lambda xs: torch.stack([f(x) for x in xs])):
        xs = XS.clone().requires_grad_(tracked)
        try:
            with SWITCHES[around]():
                out = run(xs)
            gradient = torch.autograd.grad(out.sum(), xs)[0] if out.requires_grad else None
            outcomes.append((out.requires_grad, out.detach(), gradient))
        except RuntimeError as error:
            outcomes.append(str(error).split(".")[0])
    got, want = outcomes
    if isinstance(want, str):
        assert got == want
        return
    assert got[0] == want[0]
    assert_same(got[1].clone(), want[1].clone())
    if want[2] is not None:
        assert_same(got[2], want[2])


def test_inference_tensors():
    with torch.inference_mode():
        xs = torch.randn(4, 3)
        assert vmap(lambda x: x.sin())(xs).is_inference()
        assert_same(vmap(grad(lambda x: x.sin().sum()))(xs), xs.cos())
        assert_same(jacrev(torch.sin)(xs[0]), torch.diag(xs[0].cos()))
    assert_same(vmap(grad(lambda x: x.sin().sum()))(xs), xs.cos().clone())


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast(where):
    """Cast once, where the loop casts; outside of the region not at all."""
    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    region = lambda: torch.autocast("cpu", dtype=torch.bfloat16)

    def f(x):
        with region() if where == "inside" else contextlib.nullcontext():
            y = x[None] @ w
        return (y.float() @ w.T).sum()

    results = []
    for run in (vmap(f), lambda xs: torch.stack([f(x) for x in xs])):
        with region() if where == "around" else contextlib.nullcontext():
            out = run(x)
        results.append((out.detach(), torch.autograd.grad(out.float().sum(), w)[0]))
    assert results[0][0].dtype == results[1][0].dtype
    assert_same(results[0], results[1], (2e-2, 2e-2))
    with region():
        got = vmap(grad(lambda x: (x[None] @ w).float().sin().sum()))(x)
    assert got.dtype == torch.float32


# --- threads ---------------------------------------------------------------------------------------------------------


def in_thread(run):
    """Run in a thread of its own; its result or its error."""
    box = []

    def target():
        try:
            box.append((run(), None))
        except Exception as error:
            box.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result


def test_wrappers_in_a_thread_started_inside():
    assert_same(vmap(lambda x: in_thread(lambda: (x.sin() * W[:, 0]).sum()))(XS), (XS.sin() * W[:, 0]).sum(1))
    assert_same(
        vmap(lambda x: in_thread(lambda: grad(lambda y: y.sin().sum())(x)))(XS),
        XS.cos(),
    )


def test_backward_in_another_thread():
    xs = XS.clone().requires_grad_()
    out = vmap(lambda x: (x.sin() * W[:, 0]).sum())(xs)
    in_thread(lambda: out.sum().backward())
    assert_same(xs.grad, XS.cos() * W[:, 0])

    def f(x):
        y = x.detach().requires_grad_()
        value = (y.sin() * W[:, 0]).sum()
        in_thread(value.backward)
        return y.grad

    assert_same(vmap(f)(XS), XS.cos() * W[:, 0])


def test_transforms_in_several_threads():
    def work(seed):
        xs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for _ in range(20):
            got = vmap(grad(lambda x: (x.sin() * torch.ones(3)).exp().sum()))(xs)
            torch.testing.assert_close(got, xs.sin().exp() * xs.cos())
        return True

    results = []
    threads = [threading.Thread(target=lambda seed=seed: results.append(work(seed))) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def viewed(x):
    with torch.inference_mode():
        y = F.linear(x, torch.ones(3, 2), torch.ones(3))
        if x[0] > 0:
            y = y * 2
        return y + x.view(1, 2).sum()


def viewed_and_written(x):
    with torch.inference_mode():
        y = F.linear(x, torch.ones(3, 2)).clone()
        y[0] = x[1]
        if x.unsqueeze(0)[0, 1] > 0:
            y.mul_(2)
        return y.T if y.dim() > 1 else y[1:]


@pytest.mark.parametrize("f", [viewed, viewed_and_written])
@pytest.mark.parametrize("inference", [False, True])
def test_views_in_inference_mode(f, inference):
    """A view of an ordinary tensor is ordinary in inference mode, too."""
    xs = torch.tensor([[1.0, -2.0], [-1.0, 3.0], [0.5, 1.0], [-0.5, -1.0]])
    with torch.inference_mode(inference):
        want = torch.stack([f(x) for x in xs])
        got = vmap(f)(xs)
        torch.testing.assert_close(got, want)
        assert got.is_inference() == want.is_inference()
        torch.testing.assert_close(vmap(vmap(f))(xs[None]), want[None])


def test_fake_tensors_made_inside():
    """As DTensor makes them of the shapes of its operands."""

    def shape(x):
        with FakeTensorMode():
            fake = torch.empty_strided((2, 3), (3, 1))
            length = len((fake.sin() ** 2).sum(0))
        return x * length

    torch.testing.assert_close(vmap(shape)(torch.ones(4)), torch.full((4,), 3.0))


# --- function modes --------------------------------------------------------------------------------------------------


class Through(TorchFunctionMode):
    """Lets every function through, as the mode of a default device does most."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def made_a_leaf(x, w):
    x = x.detach().clone().requires_grad_()
    (x**3).sum().backward()
    return x.grad * w


def gradient_of_captured(x, w):
    w = w.detach().requires_grad_()
    (w * x).sum().backward()
    return w.grad * x


def numbers_in_a_branch(x, w):
    if x[0] > 0:
        return w * x[0].item() + float(x[1]) + x.tolist()[2] + float(x.numpy()[0]) + int(x[2] > 0)
    return x * w


def list_of_numbers(x, w):
    return torch.tensor([v.item() if v > 0 else 0.0 for v in x], dtype=x.dtype) * w


FREE = {
    "detach": lambda x, w: x.detach() * x + w.detach() * x,
    "Tensor.detach": lambda x, w: torch.Tensor.detach(x) * x + torch.Tensor.detach(w) * x,
    "torch.detach": lambda x, w: torch.detach(x) * x + torch.detach(w) * x,
    "detach_": lambda x, w: x.clone().detach_() * x + w.clone().detach_() * x,
    "data": lambda x, w: x.data * x + w.data * x,
    "new": lambda x, w: x.new(2).fill_(3).sum() * x + x.new_tensor([1.0, 2.0]).sum() + w.new_tensor([1.0]) * x,
    "deepcopy": lambda x, w: copy.deepcopy(w) * x,
    "leaf": made_a_leaf,
    "gradient of captured": gradient_of_captured,
}
WITH_NUMBERS = {"numbers in a branch": numbers_in_a_branch, "list of numbers": list_of_numbers}
UNDER = {
    "vmap": lambda f: vmap(f)(XS),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum()))(XS),
    "grad(vmap)": lambda f: grad(lambda xs: vmap(f)(xs).sum())(XS),
    "vmap(vmap)": lambda f: vmap(vmap(f))(XS.reshape(2, 2, 3)),
    "jvp": lambda f: jvp(f, (XS[0],), (XS[1],))[1],
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,))[1])(XS),
    "jvp(vmap)": lambda f: jvp(vmap(f), (XS,), (XS,))[1],
    "linearize": lambda f: linearize(f, XS[0])[1](XS[1]),
}


@pytest.mark.parametrize("transform", UNDER.values(), ids=UNDER.keys())
@pytest.mark.parametrize("mode", [Through, lambda: torch.device("cpu")], ids=["a mode", "a default device"])
@pytest.mark.parametrize("f", (FREE | WITH_NUMBERS).values(), ids=(FREE | WITH_NUMBERS).keys())
def test_function_modes_change_nothing(f, mode, transform):
    if f is numbers_in_a_branch and transform is not UNDER["vmap"]:
        pytest.skip("`numpy()` of what is differentiated")
    w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    want = transform(lambda x: f(x, w))
    with mode():
        got = transform(lambda x: f(x, w))
    assert_same(got, want)


@pytest.mark.parametrize("f", WITH_NUMBERS.values(), ids=WITH_NUMBERS.keys())
def test_numbers_under_a_default_device(f):
    with torch.device("cpu"):
        assert_same(vmap(lambda x: f(x, XS[1]))(XS), torch.stack([f(x, XS[1]) for x in XS]))
