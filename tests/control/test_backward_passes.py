"""Branches on lane values in what a backward pass calls, inside a vmap or after it: checkpointed functions, hooks."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lanewise import grad, jacrev, jvp, vjp, vmap
from lanewise._core.level import live_levels
from lanewise._core.parting.lanes import machine
from tests.oracles import assert_same

D = torch.float64
XS = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(1))
TS = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(2))
W = torch.tensor([0.5, -1.0, 2.0], dtype=D)

pytestmark = [
    pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning"),
    pytest.mark.usefixtures("parting"),
]


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)
        monkeypatch.setattr("lanewise._control.runtime.hooks.converted", lambda func: None)
    yield request.param
    assert not live_levels()
    assert not machine.raised
    assert machine.level is None and not machine.boundaries and not machine.together


def loop(f, xs):
    return torch.stack([f(x) for x in xs])


def mapped(f, xs):
    return vmap(f)(xs)


def leaf(x):
    return x.clone().requires_grad_()


# --- where the backward pass runs ------------------------------------------------------------------------------------


def after(f, run):
    xs, w = leaf(XS), leaf(W)
    out = run(lambda x: f(x, w), xs)
    (out * torch.arange(1.0, 7.0)).sum().backward()
    return out.detach(), xs.grad, w.grad


def twice(f, run):
    xs, w = leaf(XS), leaf(W)
    out = run(lambda x: f(x, w), xs).square().sum()
    first = torch.autograd.grad(out, (xs, w), create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), (xs, w))


def outer_grad(f, run):
    return (grad(lambda xs: run(lambda x: f(x, leaf(W)), xs).sum())(XS),)


def forward_over_reverse(f, run):
    return (jvp(grad(lambda xs: run(lambda x: f(x, leaf(W)), xs).square().sum()), (XS,), (TS,))[1],)


def inner_grad(f, run):
    return (run(grad(lambda x: f(x, leaf(W))), XS),)


def inner_backward(f, run):
    w = leaf(W)

    def g(x):
        x = x.detach().clone().requires_grad_()
        f(x, w).backward()
        return x.grad

    return run(g, XS), w.grad


def nested(f, run):
    xs, w = leaf(XS), leaf(W)
    out = run(lambda x: run(lambda v: f(x * 1.5, v), torch.stack([w, 2 * w, -w])), xs)
    out.sum().backward()
    return xs.grad, w.grad


def many_cotangents(f, run):
    _, pull = vjp(lambda xs: run(lambda x: f(x, leaf(W)), xs), XS)
    return (run(lambda row: pull(row)[0], TS.T.contiguous()),)


WHERE = [after, twice, outer_grad, forward_over_reverse, inner_grad, inner_backward, nested, many_cotangents]
# torch refuses `torch.autograd.grad` of a reentrant checkpoint.
REENTRANT = [where for where in WHERE if where is not twice]


def check(where, f, reference=None):
    got, want = where(f, mapped), where(reference or f, loop)
    for mine, other in zip(got, want, strict=True):
        assert_same(mine.detach(), other.detach())


# --- checkpoint ------------------------------------------------------------------------------------------------------


def branch(x, w):
    return (x.sin() * w).sum() if x[1] > 0 else (x.exp() * w * x).sum() * 2


def repeated(x, w):
    steps = 0
    while (x * x).sum() > 0.7 and steps < 5:
        x = x * 0.5 * w.sin()
        steps = steps + 1
    return (x * w).exp().sum()


def number(x, w):
    k = float(x[0].detach())
    return ((x * w).sin() * k).sum()


def branch_in_branch(x, w):
    if x[0] > 0:
        y = x * w
        if y.sum() > 0:
            y = y.sin()
    else:
        y = x.exp() + w
    return (y * y).sum()


def halves(x):
    while x.square().sum() > 0.5:
        yield x
        x = x * 0.5


def not_converted(x, w):
    total = x.sum() * w.sum()
    for y in halves(x):
        total = total + (y * w).square().sum()
    return total


BLOCKS = pytest.mark.parametrize("block", [branch, repeated, number, branch_in_branch, not_converted])


@BLOCKS
@pytest.mark.parametrize("where", WHERE)
def test_a_checkpoint_that_branches(where, block):
    check(where, lambda x, w: checkpoint(block, x, w, use_reentrant=False), block)


@BLOCKS
@pytest.mark.parametrize("where", REENTRANT)
def test_a_reentrant_checkpoint_that_branches(where, block):
    check(where, lambda x, w: checkpoint(block, x, w, use_reentrant=True), block)


@pytest.mark.parametrize("where", WHERE)
def test_a_checkpoint_after_a_branch_and_in_one(where):
    def f(x, w, block=lambda x, w: checkpoint(branch, x, w, use_reentrant=False)):
        if x[2] > 0:
            x = block(x * 2, w) * x
        return block(x, w)

    check(where, f, lambda x, w: f(x, w, branch))


@pytest.mark.parametrize("where", WHERE)
def test_a_checkpoint_in_a_checkpoint(where):
    def f(x, w, save=lambda block, *args: checkpoint(block, *args, use_reentrant=False)):
        inner = lambda a, b: save(branch, a * b, b).exp() if a[0] > 0 else a.sum() * b.prod()
        return save(inner, x, w)

    check(where, f, lambda x, w: f(x, w, lambda block, *args: block(*args)))


def drawing(x):
    x = torch.dropout(x, 0.5, True)
    if x[0] > 0:
        x = torch.dropout(x.sin(), 0.5, True)
    else:
        x = x.exp() * torch.rand(3, dtype=D)
    return (x * x).sum()


def drawing_as_written(x):
    y = torch.rand_like(x) * x
    return sum((z * torch.rand_like(z)).square().sum() for z in halves(y)) + y.sum()


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("block", [drawing, drawing_as_written])
def test_a_checkpoint_draws_the_same_numbers_again(block, randomness):
    def gradient(save):
        def f(x):
            if x[2] > 0:
                x = x * torch.rand((), dtype=D)
            return save(x)

        torch.manual_seed(3)
        xs = leaf(XS)
        vmap(f, randomness=randomness)(xs).sum().backward()
        torch.manual_seed(3)
        return xs.grad, vmap(grad(f), randomness=randomness)(XS)

    got = gradient(lambda x: checkpoint(block, x, use_reentrant=False))
    for mine, other in zip(got, gradient(block), strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize("branches", [False, True])
def test_a_checkpoint_that_does_something_else_the_second_time(branches):
    again = []

    def block(x):
        if again and x[0] > 0:
            x = x.sin()
        return x.exp() * x

    def f(x):
        if branches and x[1] > 0:
            x = x * 2
        return checkpoint(block, x, use_reentrant=False).sum()

    out = vmap(f)(leaf(XS))
    again.append(True)
    with pytest.raises(RuntimeError, match="control flow|different metadata|different number"):
        out.sum().backward()


# --- hooks -----------------------------------------------------------------------------------------------------------


def choice(x, w):
    y = x * w
    y.register_hook(lambda g: g if g.sum() > 0 else 2 * g)
    return y.sin().sum()


def values_of_the_function(x, w):
    y = x * w
    if x[0] > 0:
        y = y.sin()
        y.register_hook(lambda g: g * y if g.sum() > 0 else 2 * g * x)
    return y.sin().sum()


def loop_in_a_hook(x, w):
    y = x * w

    def halve(g):
        while g.norm() > 0.5:
            g = g * 0.7
        return g

    y.register_hook(halve)
    return y.sin().sum() * 2


def none_in_some_lanes(x, w):
    y = x * w

    def triple(g):
        if g.sum() > 0:
            return g * 3

    y.register_hook(triple)
    return y.sin().sum() * 2


def one_hook_sees_what_another_got(x, w):
    y = x * w
    kept = {}
    z = y.sin()
    z.register_hook(lambda g: kept.update(g=g))

    def second(g):
        if (kept["g"][0] * g).sum() > 0:
            return g * kept["g"] * z
        return kept["g"].sum() * g

    y.register_hook(second)
    return z.exp().sum()


def set_after_use(x, w):
    y = x * w
    z = y.sin()
    y.register_hook(lambda g: g * g)
    return (z * y).sum()


def set_on_what_all_lanes_share(x, w):
    y = w * 2
    z = y[1:]
    z.register_hook(lambda g: g * g + 1)
    y.register_hook(lambda g: g.clamp(max=0.5) * g.sum())
    return (x[1:] * z).sum() * y.sum()


def set_by_some_lanes(x, w):
    y = x * w
    if x[0] > 0:
        y = y * 2
        u = y.sin()
        y.register_hook(lambda g: g * g * u if g.sum() > 0 else g)
    else:
        u = y.cos()
        y.register_hook(lambda g: g * u + 1)
    v = y * u
    y.register_hook(lambda g: g + g * g)
    return v.sum()


def set_on_more_lanes_than_run(x, w):
    y = x * w
    if x[0] > 0:
        y.register_hook(lambda g: g + 1)
    return y.sin().sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if g.sum() > 0:
            return 3 * g * x * x
        return g * x.exp()


def function(x, w):
    y = Cube.apply(x * w)
    if x[0] > 0:
        y = y * 2
    return y.sin().sum()


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def module_hooks(x, w):
    module = Double()
    module.register_full_backward_pre_hook(lambda module, out: (out[0] * 3 if out[0].sum() > 0 else out[0],))
    module.register_full_backward_hook(
        lambda module, into, out: tuple(g if g.sum() > 0 else 2 * g + out[0][0] for g in into)
    )
    return module(x * w).sin().sum()


HOOKED = [
    choice,
    values_of_the_function,
    loop_in_a_hook,
    none_in_some_lanes,
    one_hook_sees_what_another_got,
    set_after_use,
    set_on_what_all_lanes_share,
    set_by_some_lanes,
    set_on_more_lanes_than_run,
    function,
    module_hooks,
]


@pytest.mark.parametrize("f", HOOKED)
@pytest.mark.parametrize("where", WHERE)
def test_hooks(where, f):
    check(where, f)


def test_hooks_after_a_function_in_chunks():
    xs, others = leaf(XS), leaf(XS)
    vmap(lambda x: choice(x, W), chunk_size=4)(xs).sum().backward()
    loop(lambda x: choice(x, W), others).sum().backward()
    assert_same(xs.grad, others.grad)


def test_an_error_in_a_hook_names_the_lanes():
    def f(x):
        y = x * 2

        def fails(g):
            if g[0] < 0:
                raise ValueError("negative")
            return g

        y.register_hook(fails)
        return y.sum() * x[0]

    with pytest.raises(ValueError, match="negative") as failure:
        vmap(f)(leaf(XS)).sum().backward()
    assert failure.value.lanes == (XS[:, 0] < 0).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("run", [loop, mapped])
@pytest.mark.parametrize("order", [1, 2])
def test_a_hook_that_branches_on_directions(order, run):
    """Each row of a Jacobian goes back on its own."""

    def of(run, xs):
        return run(lambda x: choice(x, W), xs).square().sum(0, keepdim=True) * xs[:2, 0]

    def rows(y, xs, order):
        if not order:
            return y
        back = [torch.autograd.grad(one, xs, retain_graph=True, create_graph=True)[0] for one in y.flatten()]
        return torch.stack([rows(g, xs, order - 1) for g in back]).unflatten(0, y.shape)

    transform = jacrev if order == 1 else lambda f: jacrev(jacrev(f))
    xs = leaf(XS)
    assert_same(transform(lambda xs: of(run, xs))(XS), rows(of(loop, xs), xs, order).detach())


# --- what no lane uses -----------------------------------------------------------------------------------------------


def rooted(t):
    """A root for some lanes only, infinite in its derivative or no number where others run."""
    if t < 0:
        return -t
    return t.sqrt() * 0.5


def root_of_an_expression(x, y):
    v = rooted(-(y + x))
    return x * 2 if y < 1 else v


def branch_in_a_branch(x, y):
    t = -(y + x)
    if x < 2:
        v = -t if t < 0 else t.sqrt() * 0.5
    else:
        v = rooted(x - y * 1.5) * 2
    return x * y if y < 1 else v


def layer(x, y):
    rows = torch.stack([-(y + x), y * x]).sqrt()
    v = torch.nn.functional.linear(rows, torch.ones(3, 2, dtype=rows.dtype) * y).sum() if x + y < 0 else x * y
    return x * 2 if y < 1 else v


def loop_in_a_branch(x, y):
    t = -(y + x)
    if t >= 0:
        v = t.sqrt() * 2
        while v > 0.5:
            v = v * 0.5 - 0.1 * t
    else:
        v = t * 3
    return y * 2 if y < 1 else v


@pytest.mark.parametrize("f", [root_of_an_expression, branch_in_a_branch, layer, loop_in_a_branch])
def test_a_side_whose_result_no_lane_uses(f):
    """It has no cotangent at all, which is not zero for all lanes."""
    xs = torch.tensor([0.5, -1.5, 2.5, 0.0, -0.25, 1.0, -1.0, 3.0], dtype=torch.float64)
    ys = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, 1.5, 0.25], dtype=torch.float64)
    for place, given in enumerate((xs, ys)):
        leaves = [each.clone().requires_grad_() for each in given]
        results = [f(*pair) for pair in (zip(leaves, ys) if place == 0 else zip(xs, leaves))]
        found = torch.autograd.grad(torch.stack(results).sum(), leaves, allow_unused=True)
        want = torch.stack([torch.zeros_like(xs[0]) if each is None else each for each in found])
        torch.testing.assert_close(vmap(grad(f, place))(xs, ys), want)
        got = grad(lambda *args: vmap(f)(*args).sum(), place)(xs, ys)
        torch.testing.assert_close(got, want)
