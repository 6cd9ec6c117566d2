"""Numbers of each lane that a custom Function is given, and keeps: each lane's own, in each transform."""

import pytest
import torch
from torch.autograd import Function

from lanewise import jvp, vmap
from tests.control.compositions import (
    COMPOSITIONS,
    by_autograd,
    by_grad_vmap,
    by_vmap,
    by_vmap_grad,
    by_vmap_grad_vmap,
    by_vmap_vmap,
    check_as_the_loop,
    examples,
    tangents,
)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


class Scaled(Function):
    """The number is an attribute, as it is most often."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k, None

    @staticmethod
    def jvp(ctx, t, _):
        return t * ctx.k


class Asked(Function):
    """The number is one that forward itself asks for."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.both = {"numbers": [x.detach()[0].item(), k], "rest": "text"}
        return x * k + 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.both["numbers"][1], None

    @staticmethod
    def jvp(ctx, t, _):
        return t * ctx.both["numbers"][1]


class Listed(Function):
    """Numbers in a list, and a context that is set up afterwards."""

    @staticmethod
    def forward(x, k, both):
        return x * k * both[0] + both[1]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k, ctx.both = inputs[1:]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k * ctx.both[0], None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return t * ctx.k * ctx.both[0]


class Powers(Function):
    """The number says how often a loop runs."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        for _ in range(n):
            x = x * 2
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * 2**ctx.n, None

    @staticmethod
    def jvp(ctx, t, _):
        return t * 2**ctx.n


class Derived(Function):
    """There is no jvp, and the gradients of some lanes hang on `x`."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return x * k if k > 0 else x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.k if ctx.k > 0 else 2 * g * x, None


def in_a_branch(x, k):
    if x[1] > 0:
        return Scaled.apply(x, x[0].item()) * x
    return Scaled.apply(x, 2.0)


FUNCTIONS = {
    "an attribute": lambda x, k: Scaled.apply(x, float(x.detach()[0])) * x,
    "of the lanes around": lambda x, k: Scaled.apply(x, int(k)) * x,
    "of either kind": lambda x, k: Scaled.apply(x, x.detach()[0] if k > 1 else 2.0) * x,
    "asked inside": lambda x, k: Asked.apply(x, float(x.detach()[1])) * x,
    "in a list": lambda x, k: Listed.apply(x, int(k), [float(x.detach()[1]), 3.0]) * x,
    "in a branch": in_a_branch,
    "an inner vmap": lambda x, k: vmap(lambda v: Scaled.apply(v, float(x.detach()[0])) * v)(x),
    "of inner lanes": lambda x, k: vmap(lambda v: Scaled.apply(v, v.detach().item()) * v)(x) * k,
    "how often": lambda x, k: Powers.apply(x, int(k)) * x,
}


@pytest.mark.parametrize("composition", [*COMPOSITIONS, by_vmap_grad_vmap])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_the_loop(name, composition):
    for _ in range(2):
        check_as_the_loop(FUNCTIONS[name], composition)


def derived(x, k):
    return Derived.apply(x, float(x.detach()[0])) * k


def written_out(x, k):
    return (x * float(x.detach()[0]) if x[0] > 0 else x * x) * k


@pytest.mark.parametrize("composition", [by_vmap, by_vmap_grad, by_grad_vmap, by_autograd, by_vmap_vmap])
def test_a_formula_that_branches_on_a_number(composition):
    for _ in range(2):
        check_as_the_loop(derived, composition)


def test_tangents_derived_from_a_formula_that_branches_on_a_number():
    xs, ks = examples()
    ts = torch.linspace(-1.0, 1.0, xs.numel(), dtype=xs.dtype).reshape(xs.shape)
    want = tangents(written_out, xs, ks, ts)
    for _ in range(2):
        torch.testing.assert_close(jvp(lambda xs: vmap(derived)(xs, ks), (xs,), (ts,))[1], want)
        by_lane = vmap(lambda x, k, t: jvp(lambda x: derived(x, k), (x,), (t,))[1])(xs, ks, ts)
        torch.testing.assert_close(by_lane, want)
