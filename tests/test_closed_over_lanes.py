"""Custom Functions whose formulas find values of lanes in closures and on objects, not among their arguments."""

import threading

import pytest
import torch
from torch.autograd.function import Function

from lanewise import grad, jacfwd, jacrev, jvp, linearize, vjp, vmap

XS = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [2.0, -5.0], [0.5, 0.6]], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


@pytest.fixture(params=[False, True], ids=["", "no loop"], autouse=True)
def deterministic(request):
    """Lanes that part run together also where a loop over them may be the quickest."""
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


def function(forward, backward, push):
    class Closing(Function):
        @staticmethod
        def forward(ctx, v):
            ctx.save_for_backward(v)
            ctx.save_for_forward(v)
            return forward(v)

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx, t):
            return push(t, *ctx.saved_tensors)

    return Closing.apply


def weighed(w):
    return function(lambda v: v * v * w, lambda g, v: 2 * g * v * w, lambda t, v: 2 * t * v * w)


def product(w):
    return function(lambda v: v * w, lambda g, v: g * w, lambda t, v: t * w)


def computed_inside(x):
    return weighed(x.detach() * 2)(x).sum()


def with_a_history(x):
    return weighed(x * 2)(x).sum()


def the_same_in_all_lanes(x):
    return weighed(torch.ones(2, dtype=x.dtype) * 3)(x).sum()


def applied_in_branches(x):
    weigh = weighed(x.detach() * 2)
    return weigh(x).sum() if x.sum() > 0 else weigh(x).sum() * 3


def made_in_branches(x):
    y = x.sin()
    if x.sum() > 0:
        y = weighed(y.detach())(y)
    else:
        y = product(y.detach() * 3)(y)
    return (y * x).sum()


def assigned_in_branches(x):
    w = x.detach() if x.sum() > 0 else x.detach() ** 2
    return weighed(w)(x * x).sum()


class Weights:
    def __init__(self, x):
        self.w, self.k = x.detach() + 1, int(x.detach().sum())

    def of(self, v):
        return v * self.w * self.k


def on_an_object(x):
    weights = Weights(x)
    weigh = function(
        lambda v: weights.of(v * v), lambda g, v: 2 * weights.of(g * v), lambda t, v: 2 * weights.of(t * v)
    )
    return weigh(x).sum()


def written_to_and_back(x):
    w, total = x.detach() + 1, torch.zeros_like(x.detach())

    def pushed(t, v):
        total.add_(w)
        out = 2 * t * v * total
        total.sub_(w)
        return out

    weigh = function(lambda v: v * v * w, pushed, pushed)
    return weigh(x).sum() if x.sum() > 0 else weigh(x).sum() * 2


def counted(x):
    n = int(x.detach().abs().sum())

    def repeated(g, v):
        out = torch.zeros_like(g)
        for _ in range(n):
            out = out + g
        return out

    repeat = function(lambda v: v * n, repeated, repeated)
    return repeat(x).sum() if n > 3 else repeat(x * x).sum()


def handed_out(x):
    w = x.detach() * 2
    product = function(lambda v: (v * w).sum(), lambda g, v: g * w, lambda t, v: (t * w).sum())
    return product(x) if x.sum() > 0 else product(x)


PROGRAMS = [
    computed_inside,
    with_a_history,
    the_same_in_all_lanes,
    applied_in_branches,
    made_in_branches,
    assigned_in_branches,
    on_an_object,
    written_to_and_back,
    counted,
    handed_out,
]


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def pushed(f, xs):
    return jvp(f, (xs,), (xs.cos(),))[1]


def outside(xs, f, **options):
    xs = xs.clone().requires_grad_()
    return torch.autograd.grad(vmap(f, **options)(xs).sum(), xs)[0]


# What each gives: the gradient in each lane, or that times the cosine of the lane, summed.
GRADIENTS = {
    "vmap grad": lambda f: vmap(grad(f))(XS),
    "grad vmap": lambda f: grad(lambda xs: vmap(f)(xs).sum())(XS),
    "grad vmap in_dims=1": lambda f: grad(lambda xs: vmap(f, in_dims=1)(xs.T).sum())(XS),
    "grad vmap vmap": lambda f: grad(lambda xs: vmap(vmap(f))(xs.unflatten(0, (2, 2))).sum())(XS),
    "vmap grad vmap": lambda f: vmap(grad(lambda xs: vmap(f)(xs).sum()))(XS.unflatten(0, (2, 2))).flatten(0, 1),
    "vmap vjp vmap": lambda f: vmap(vjp(vmap(f), XS)[1])(torch.eye(4, dtype=XS.dtype))[0].sum(0),
    "jacrev vmap": lambda f: jacrev(vmap(f))(XS).sum(0),
    "jacfwd vmap": lambda f: jacfwd(vmap(f))(XS).sum(0),
    "autograd": lambda f: outside(XS, f),
    "autograd, chunks": lambda f: outside(XS, f, chunk_size=3),
}
TANGENTS = {
    "vmap jvp": lambda f: vmap(lambda x: pushed(f, x))(XS),
    "jvp vmap": lambda f: pushed(vmap(f), XS),
    "jvp vmap vmap": lambda f: pushed(vmap(vmap(f)), XS.unflatten(0, (2, 2))).flatten(),
    "vmap jvp vmap": lambda f: vmap(lambda xs: pushed(vmap(f), xs))(XS.unflatten(0, (2, 2))).flatten(),
    "linearize vmap": lambda f: linearize(vmap(f), XS)[1](XS.cos()),
}


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_as_in_a_loop(f):
    want = torch.stack([gradient(f, x) for x in XS])
    for name, way in [*GRADIENTS.items()] * 2:
        torch.testing.assert_close(way(f), want, msg=lambda text, name=name: f"{name}: {text}")
    for name, way in [*TANGENTS.items()] * 2:
        torch.testing.assert_close(way(f), (want * XS.cos()).sum(1), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("f", PROGRAMS[:6], ids=lambda f: f.__name__)
def test_second_derivatives(f):
    def twice(x):
        x = x.clone().requires_grad_()
        (once,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(once.sum(), x)[0]

    want = torch.stack([twice(x) for x in XS])
    of_all = lambda xs: vmap(f)(xs).sum()
    for _ in range(2):
        torch.testing.assert_close(grad(lambda xs: grad(of_all)(xs).sum())(XS), want)
        torch.testing.assert_close(vmap(grad(lambda x: grad(f)(x).sum()))(XS), want)
        torch.testing.assert_close(grad(lambda xs: vmap(grad(f))(xs).sum())(XS), want)


def test_passes_of_several_threads_come_to_the_same_lanes():
    xs = XS.clone().requires_grad_()
    total = vmap(applied_in_branches)(xs).sum()
    found: list = [None] * 8

    def differentiate(place):
        (found[place],) = torch.autograd.grad(total, xs, retain_graph=True)

    threads = [threading.Thread(target=differentiate, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = torch.stack([gradient(applied_in_branches, x) for x in XS])
    for each in found:
        torch.testing.assert_close(each, want)
