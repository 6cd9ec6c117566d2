"""`linearize` of functions on whose way lanes differ, and of custom Functions."""

import pytest
import torch

from lanewise import functionalize, grad, jvp, linearize, vmap

XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [-0.1, -0.2, -0.3]], dtype=torch.float64)


def ternary(x):
    out, push = linearize(lambda v: v.sin() if v.sum() > 0 else v**3, x)
    return push(x) + out


def returns_and_loops(x):
    def f(v):
        y = v * 1
        if v[0] > 0:
            y[1:] = v[0]
        while y.norm() < 3:
            y = y * 1.7
        if v[1] > 0:
            return v.exp()
        return y * 2

    out, push = linearize(f, x)
    tangent = x * 0.5
    if x[0] > -0.2:
        tangent = push(tangent)
    return push(x) + out * push(tangent)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("program", [ternary, returns_and_loops], ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x) for x in XS])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS), want)
    slopes = torch.stack([grad(lambda x: program(x).sum())(x) for x in XS])
    torch.testing.assert_close(vmap(grad(lambda x: program(x).sum()))(XS), slopes)
    torch.testing.assert_close(grad(lambda xs: vmap(program)(xs).sum())(XS), slopes)


def branches(x):
    y = x * x[0] if x.sum() > 0 else x.sin()
    while y.norm() < 1:
        y = y * 1.5
    return y


def test_around_lanes_that_part():
    tangents = XS.flip(0)
    out, push = linearize(lambda xs: vmap(branches)(xs), XS)
    want, pushed = jvp(lambda xs: torch.stack([branches(x) for x in xs]), (XS,), (tangents,))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(push(tangents), pushed)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x


def test_a_custom_function_without_jvp():
    out, push = linearize(Square.apply, XS)
    torch.testing.assert_close(out, XS**2)
    torch.testing.assert_close(push(XS + 1), 2 * XS * (XS + 1))
    got = vmap(lambda x: linearize(lambda x: Square.apply(x) if x[0] > 0 else x, x)[1](x + 1))(XS)
    torch.testing.assert_close(got, torch.where(XS[:, :1] > 0, 2 * XS * (XS + 1), XS + 1))


def writes(x):
    y = x.clone()
    if x[0] > -0.2:
        y.mul_(2)
    if y[0] > y[1]:
        y[0] = y[1]
    if y[1] > y[2]:
        t = y[1].clone()
        y[1] = y[2] * 1
        y[2] = t
    return y


@pytest.mark.parametrize("seed", range(3))
def test_writes_of_some_lanes(seed):
    random = torch.Generator().manual_seed(seed)
    xs, ts = (torch.randn(6, 3, dtype=torch.float64, generator=random) for _ in range(2))
    want = torch.stack([jvp(writes, (x,), (t,))[1] for x, t in zip(xs, ts)])
    torch.testing.assert_close(vmap(lambda x, t: linearize(writes, x)[1](t))(xs, ts), want)
    torch.testing.assert_close(linearize(vmap(writes), xs)[1](ts), want)
    torch.testing.assert_close(vmap(lambda x: functionalize(writes)(x))(xs), torch.stack([writes(x) for x in xs]))


def shared_views(x):
    zeros = torch.zeros(3, dtype=x.dtype)
    first = zeros[0]
    if x[0] > 0:
        zeros[1] = 3.0
        first.copy_(zeros[1] * 1)
    if x[1] > 0:
        zeros[2] = x[0]
        zeros[1:2].copy_(zeros[0:1])
    return zeros * x


def test_what_is_written_is_a_view_of_what_becomes_lanes():
    torch.testing.assert_close(vmap(shared_views)(XS), torch.stack([shared_views(x) for x in XS]))
