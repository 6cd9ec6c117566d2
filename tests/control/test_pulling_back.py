"""Many cotangents pulled back at once through functions, and hooks, whose lanes part."""

import pytest
import torch

from lanewise import grad, jacrev, jvp, vjp, vmap
from lanewise._core.level import live_levels
from lanewise._core.parting.lanes import machine
from tests.oracles import assert_same

pytestmark = pytest.mark.usefixtures("parting")

D = torch.float64
XS = torch.randn(5, 2, dtype=D, generator=torch.Generator().manual_seed(0))
W = torch.randn(2, 2, dtype=D, generator=torch.Generator().manual_seed(1))
EYE = torch.eye(2, dtype=D)


@pytest.fixture(params=["converted", "as written"], autouse=True)
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)
        monkeypatch.setattr("lanewise._control.runtime.hooks.converted", lambda func: None)
    yield
    assert not live_levels()
    assert not machine.raised


def branch(x, w=W):
    y = x.sin() @ w
    if x.sum() > 0:
        return y * x
    return y.exp()


def loops(x, w=W):
    y, steps = x.sin(), 0
    while y.norm() < 2 and steps < 6:
        y = y * 1.5 + x[0] * 0.1
        steps += 1
    if x[0] > 0:
        y = y @ w
    return y


def nested(x, w=W):
    if x[0] > 0:
        y = x.exp()
        if x[1] > 0:
            y = y * x[1]
    else:
        y = (x @ w).cos()
    z = y * y
    if y.sum() > 1:
        return z + x
    return z * x


def hooked(x, w=W):
    y = x.sin() @ w
    y.register_hook(lambda g: g * 2 if g.sum() > 0 else g.square())
    return y * x


def hooked_in_branch(x, w=W):
    y = (x @ w).sin()
    if x.sum() > 0:
        y.register_hook(lambda g: g * 2 if g[0] > 0 else g.square())
        return y * x
    y.register_hook(lambda g: None if g[0] > 0 else -g)
    return y.exp() * x.sum()


FUNCTIONS = [branch, loops, nested, hooked, hooked_in_branch]


def jacobian(f, x, create_graph=False):
    """Row by row, by plain torch."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    y = f(x)
    rows = [torch.autograd.grad(y, x, c, retain_graph=True, create_graph=create_graph)[0] for c in EYE]
    return torch.stack(rows)


def pulled(f, x):
    pull = vjp(f, x)[1]
    return vmap(lambda c: pull(c)[0])(EYE)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_one_vmap_inside_another(f):
    want = torch.stack([jacobian(f, x) for x in XS])
    assert_same(vmap(lambda x: pulled(f, x))(XS), want)
    assert_same(torch.stack([pulled(f, x) for x in XS]), want)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_three_vmaps(f):
    grid = torch.stack([XS, 0.7 * XS, XS - 0.4])
    want = torch.stack([torch.stack([jacobian(f, x) for x in xs]) for xs in grid])
    assert_same(vmap(vmap(lambda x: pulled(f, x)))(grid), want)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_in_a_branch(f):
    def g(x):
        pull = vjp(f, x)[1]
        if x[1] > 0:
            return vmap(lambda c: pull(c)[0])(EYE)
        return vmap(lambda c: 3 * pull(c)[0])(EYE)

    want = torch.stack([jacobian(f, x) * (1 if x[1] > 0 else 3) for x in XS])
    assert_same(vmap(g)(XS), want)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_branches_on_what_was_pulled_back(f):
    def g(x):
        pull = vjp(f, x)[1]

        def turned(c):
            back = pull(c)[0]
            if back.sum() > 0:
                return back * 2
            return pull(back)[0]

        return vmap(turned)(EYE)

    def want(x):
        x = x.clone().requires_grad_()
        y = f(x)
        back = [torch.autograd.grad(y, x, c, retain_graph=True)[0] for c in EYE]
        twice = [2 * b if b.sum() > 0 else torch.autograd.grad(y, x, b, retain_graph=True)[0] for b in back]
        return torch.stack(twice)

    assert_same(vmap(g)(XS), torch.stack([want(x) for x in XS]))


@pytest.mark.parametrize("f", FUNCTIONS)
def test_cotangents_without_lanes_and_made_inside(f):
    def g(x):
        pull = vjp(f, x)[1]

        def each(c):
            own = torch.zeros(2, dtype=D)
            own[0] = c[0]
            return pull(own)[0], pull(torch.ones(2, dtype=D))[0] * c, pull(x)[0] * c

        return vmap(each)(EYE)

    def want(x):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        one, all_ones, by_x = [
            torch.autograd.grad(y, leaf, c, retain_graph=True)[0] for c in (EYE[0], torch.ones(2, dtype=D), x)
        ]
        none = torch.autograd.grad(y, leaf, 0 * x)[0]
        return torch.stack([one, none]), all_ones * EYE, by_x * EYE

    assert_same(vmap(g)(XS), tuple(map(torch.stack, zip(*[want(x) for x in XS]))))


@pytest.mark.parametrize("f", [branch, loops, nested])
def test_differentiated_again(f):
    def g(x, w):
        return pulled(lambda x: f(x, w), x).square().sum()

    def plain(x, w):
        return jacobian(lambda x: f(x, w), x, create_graph=True).square().sum()

    def want(x):
        x, w = x.clone().requires_grad_(), W.clone().requires_grad_()
        return torch.autograd.grad(plain(x, w), (x, w), materialize_grads=True)

    rows = [want(x) for x in XS]
    want_x, want_w = torch.stack([a for a, _ in rows]), torch.stack([b for _, b in rows])
    assert_same(vmap(grad(g, (0, 1)), (0, None))(XS, W), (want_x, want_w))
    assert_same(grad(lambda xs, w: vmap(g, (0, None))(xs, w).sum(), (0, 1))(XS, W), (want_x, want_w.sum(0)))
    assert_same(vmap(jacrev(lambda x: g(x, W)))(XS), want_x)
    along = vmap(lambda x, t: jvp(lambda x: g(x, W), (x,), (t,))[1])(XS, XS.flip(0))
    assert_same(along, (want_x * XS.flip(0)).sum(1))
    w = W.clone().requires_grad_()
    vmap(g, (0, None))(XS, w).sum().backward()
    assert_same(w.grad, want_w.sum(0))


@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_jacrev(f, chunk_size):
    """A hook may branch on the rows of the Jacobian."""
    want = torch.stack([jacobian(f, x) for x in XS])
    assert_same(torch.stack([jacrev(f, chunk_size=chunk_size)(x) for x in XS]), want)
    assert_same(vmap(jacrev(f, chunk_size=chunk_size))(XS), want)


def test_jacrev_with_a_hook_that_catches_what_is_raised():
    def careful(g):
        try:
            return g * 2 if g.sum() > 0 else g.square()
        except:  # noqa: E722
            return g * 100

    def f(x):
        y = x.sin() @ W
        y.register_hook(careful)
        return y * x

    assert_same(vmap(jacrev(f))(XS), torch.stack([jacobian(f, x) for x in XS]))


def test_jacrev_of_captured_parameters():
    w = W.clone().requires_grad_()
    jacrev(lambda x: hooked(x, w))(XS[0]).square().sum().backward()
    got, w.grad = w.grad, None
    x = XS[0].clone().requires_grad_()
    jacobian(lambda x: hooked(x, w), x, create_graph=True).square().sum().backward()
    assert_same(got, w.grad)


@pytest.mark.parametrize("f", [branch, loops, nested])
def test_grads_batched(f):
    def g(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, EYE, is_grads_batched=True)[0]

    assert_same(vmap(g)(XS), torch.stack([jacobian(f, x) for x in XS]))
