"""Python numbers, NumPy arrays and other objects of lane values that a custom Function keeps on `ctx`, as in a loop."""

import numpy as np
import pytest
import torch
from torch.autograd import Function

from lanewise import grad, jacfwd, jacrev, jvp, vjp, vmap

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")

XS = torch.tensor([[0.3, 1.2, -0.5], [0.7, -0.4, 0.9], [-1.1, 0.2, 0.6], [0.4, 0.8, -0.3]], dtype=torch.float64)


class OldStyle(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.array = np.exp(x.detach().numpy())
        ctx.factor = float(x.sum())
        if x[0] > 0:
            ctx.place = int(x.argmax())
        ctx.save_for_backward(x)
        return torch.from_numpy(ctx.array) * ctx.factor

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        more = x[ctx.place] if hasattr(ctx, "place") else x.prod()
        return g * torch.from_numpy(ctx.array) * (ctx.factor + more)


class NewStyle(Function):
    @staticmethod
    def forward(x, scale):
        return x.sin() * float(x.sum()) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale = inputs
        ctx.kept = [3, {"first": float(x[0]), "whole": x}, scale]
        ctx.sign = "+" if x.sum() > 0.8 else "-"
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        whole = ctx.kept[1]["whole"]
        factor = ctx.kept[1]["first"] * ctx.kept[2]
        return g * x.cos() * factor * whole if ctx.sign == "+" else g * factor, None

    @staticmethod
    def jvp(ctx, t, _):
        return t * ctx.kept[1]["first"] * (2 if ctx.sign == "+" else 3)


FUNCTIONS = {"old style": OldStyle.apply, "new style": lambda x: NewStyle.apply(x, 2.0)}


def plain_gradient(f):
    """By torch.autograd alone."""

    def run(x):
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(x).sin().sum(), x)[0]

    return run


def plain_jacobian(f):
    return lambda x: torch.autograd.functional.jacobian(f, x.detach().clone())


def plain_second(f):
    def first(x):
        return torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)[0]

    return lambda x: torch.autograd.functional.jacobian(first, x.detach().clone().requires_grad_())


def stacked(f):
    return torch.stack([f(x) for x in XS])


def sines(f):
    return lambda x: f(x).sin().sum()


WAYS = {
    "vmap": (lambda f: vmap(f)(XS), lambda f: f),
    "chunks": (lambda f: vmap(f, chunk_size=3)(XS), lambda f: f),
    "a branch": (
        lambda f: vmap(lambda x: f(x) if x[1] > 0 else f(x) * 2)(XS),
        lambda f: lambda x: f(x) * (1 + (x[1] <= 0)),
    ),
    "vmap(grad)": (lambda f: vmap(grad(sines(f)))(XS), plain_gradient),
    "grad(vmap)": (lambda f: grad(lambda xs: vmap(f)(xs).sin().sum())(XS), plain_gradient),
    "autograd around": (lambda f: plain_gradient(vmap(f))(XS), plain_gradient),
    "autograd inside": (lambda f: vmap(plain_gradient(f))(XS), plain_gradient),
    "a branch, vmap(grad)": (
        lambda f: vmap(grad(lambda x: sines(f)(x) if x[1] > 0 else 2 * sines(f)(x)))(XS),
        lambda f: lambda x: plain_gradient(f)(x) * (1 + (x[1] <= 0)),
    ),
    "vmap(vmap(grad))": (lambda f: vmap(vmap(grad(sines(f))))(XS.view(2, 2, 3)).view(4, 3), plain_gradient),
    "vmap(grad(vmap))": (
        lambda f: vmap(grad(lambda xs: vmap(f)(xs).sin().sum()))(XS.view(2, 2, 3)).view(4, 3),
        plain_gradient,
    ),
    "vmap(jacrev)": (lambda f: vmap(jacrev(f))(XS), plain_jacobian),
    "jacrev(vmap)": (
        lambda f: jacrev(vmap(f))(XS)[range(4), :, range(4)],
        plain_jacobian,
    ),
    "vmap(jacrev(grad))": (lambda f: vmap(jacrev(grad(sines(f))))(XS), plain_second),
    "pulled later": (lambda f: vjp(vmap(f), XS)[1](vmap(f)(XS).cos())[0], plain_gradient),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_in_a_loop(function, way):
    ours, loop = WAYS[way]
    want = stacked(loop(FUNCTIONS[function]))
    got = ours(FUNCTIONS[function])
    torch.testing.assert_close(got, want)
    assert not got.requires_grad and got.dtype is want.dtype


def test_forward_mode_by_the_users_formula():
    f = FUNCTIONS["new style"]

    def pushed(x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.cos())
            return torch.autograd.forward_ad.unpack_dual(f(dual)).tangent

    want = stacked(pushed)
    torch.testing.assert_close(vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(XS), want)
    torch.testing.assert_close(jvp(vmap(f), (XS,), (XS.cos(),))[1], want)
    torch.testing.assert_close(
        vmap(jacfwd(f))(XS), stacked(lambda x: torch.stack([jvp(f, (x,), (e,))[1] for e in torch.eye(3).double()], 1))
    )


def test_forward_mode_derived_from_the_backward():
    f = FUNCTIONS["old style"]
    want = stacked(lambda x: plain_jacobian(f)(x) @ x.cos())
    torch.testing.assert_close(vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(XS), want)
    torch.testing.assert_close(jvp(vmap(f), (XS,), (XS.cos(),))[1], want)


def test_what_is_the_same_in_all_lanes_needs_no_second_run():
    seen = []

    class Same(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = 3.0
            return x * float(x.sum())

        @staticmethod
        def backward(ctx, g):
            seen.append(g.shape)
            return g * ctx.factor

    grad(lambda xs: vmap(Same.apply)(xs).sum())(XS)
    assert len(seen) == 1
