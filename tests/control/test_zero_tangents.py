"""A lane whose value does not depend on the input has no derivative there, not one of zeros: zero times infinity."""

import pytest
import torch
from torch.autograd import forward_ad

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise._core.level import live_levels
from tests.control.test_absent_lanes import STEEP

D = torch.float64
XS = torch.tensor([0.5, -0.4, 0.3, -1.0, 0.7], dtype=D)
WS = torch.tensor([0.7, 0.6, 0.9, 0.8, 0.7], dtype=D)


def one_branch(op, at, x, w):
    u = torch.full_like(x, at)
    if x > 0:
        u = x * 1
    return op(u, w) + x * x


def both_branches(op, at, x, w):
    if x > 0:
        u = x * w
    else:
        u = torch.tensor(at, dtype=D)
    y = op(u, w)
    return y * y.detach().clamp(-1, 1) if w > 0.65 else x.sin()


def loop(op, at, x, w):
    u, steps = torch.tensor(at, dtype=D), 0
    while steps < 2 and x > 0.1 * steps:
        u = (u - at) * 0.5 + x
        steps += 1
    return op(u, w) * w + x.cos()


def early_return(op, at, x, w):
    def inner(x):
        if x > 0:
            return x / 2
        return x.detach() * 0 + at

    return op(inner(x), w) - x**3


def written(op, at, x, w):
    u = torch.full((2,), at, dtype=D)
    if x > 0:
        u[0] = x
        u[1] = x * 0.5
    return op(u[0], w) + op(u[1], w) * 0.5 + x


def a_number(op, at, x, w):
    u = x if x > 0 else at
    return op(u * 1.0 if torch.is_tensor(u) else torch.tensor(u, dtype=D), w) + x * x


def used_for_its_value_alone(op, at, x, w):
    y = op(x + (at - XS[0]), w)
    return y * y if x < 0.5 else y + x


def unused(op, at, x, w):
    y = op(x + (at - XS[0]), w)
    if x == XS[0]:
        return x * x * w
    return y * x


def divided(op, at, x, w):
    u = op(torch.full_like(x, at), w) if x < 0 else x * 0
    if x < 0.6:
        if x > 0:
            u = x * w
        x = w * 2 if x <= 0 else x / u
    return x * w


PROGRAMS = [one_branch, both_branches, loop, early_return, written, a_number, used_for_its_value_alone, unused, divided]


def along(x):
    return torch.linspace(0.5, 1.5, x.numel(), dtype=D).reshape(x.shape)


def pushed(f, xs, ws):
    return jvp(lambda xs: f(xs, ws), (xs,), (along(xs),))[1]


def by_torch(f, xs, ws):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(xs, along(xs)), ws)).tangent.clone()


def total(f):
    return lambda xs, ws: f(xs, ws).sum()


# What is made of a function of one example, `m` being `vmap` or a loop.
COMPOSITIONS = {
    "vmap(jacfwd)": lambda m, f: m(jacfwd(f)),
    "vmap(jvp)": lambda m, f: m(lambda x, w: jvp(f, (x, w), (along(x), along(w)))[1]),
    "vmap(hessian)": lambda m, f: m(hessian(f)),
    "vmap(mixed hessian)": lambda m, f: m(lambda x, w: hessian(f, (0, 1))(x, w)[0][1]),
    "vmap(jacfwd(jacfwd))": lambda m, f: m(jacfwd(jacfwd(f))),
    "vmap(jacrev(jacfwd))": lambda m, f: m(jacrev(jacfwd(f))),
    "vmap(jacrev(jacrev))": lambda m, f: m(jacrev(jacrev(f))),
    "jvp(vmap)": lambda m, f: lambda xs, ws: pushed(m(f), xs, ws),
    "jvp(jvp(vmap))": lambda m, f: lambda xs, ws: pushed(lambda xs, ws: pushed(m(f), xs, ws), xs, ws),
    "jvp(vmap(jvp))": lambda m, f: lambda xs, ws: pushed(m(lambda x, w: pushed(f, x, w)), xs, ws),
    "jvp(vmap(grad))": lambda m, f: lambda xs, ws: pushed(m(grad(f)), xs, ws),
    "jvp(grad(vmap))": lambda m, f: lambda xs, ws: pushed(grad(lambda xs, ws: (m(f)(xs, ws) ** 2).sum()), xs, ws),
    "grad(jvp(vmap))": lambda m, f: grad(lambda xs, ws: pushed(m(f), xs, ws).sum()),
    "grad(grad(vmap))": lambda m, f: grad(lambda xs, ws: (grad(total(m(f)))(xs, ws) * along(xs)).sum()),
    "jacfwd(grad(vmap))": lambda m, f: jacfwd(grad(total(m(f)))),
    "grad(vmap(grad))": lambda m, f: grad(lambda xs, ws: (m(grad(f))(xs, ws) * along(xs)).sum()),
    "torch's own(vmap)": lambda m, f: lambda xs, ws: by_torch(m(f), xs, ws),
    "grad(vmap(jvp))": lambda m, f: grad(lambda xs, ws: m(lambda x, w: pushed(f, x, w))(xs, ws).sum()),
    "vmap(vmap(jacfwd))": lambda m, f: lambda xs, ws: m(lambda x: m(lambda w: jacfwd(f)(x, w))(ws[:2]))(xs[:3]),
    "vmap(jacfwd(vmap))": lambda m, f: (
        lambda xs, ws: m(lambda x: jacfwd(lambda x: m(lambda w: f(x, w))(ws[:2]))(x))(xs)
    ),
}


def each(f):
    return lambda *columns: torch.stack([f(*row) for row in zip(*columns, strict=True)])


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["sqrt", "power 1.5", "quotient", "asin outside", "norm", "matrix product"])
def test_lanes_without_a_derivative(name, program, composition):
    op, at = STEEP[name]

    def f(x, w):
        return program(op, at, x, w)

    run = COMPOSITIONS[composition]
    got, want = run(vmap, f)(XS, WS), run(each, f)(XS, WS)
    assert not live_levels()
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10, equal_nan=True)


def test_the_next_call_runs_converted_again():
    runs = []

    def f(x):
        runs.append(None)
        u = torch.zeros_like(x)
        if x > 0:
            u = x * 1
        return u.sqrt()

    at_zero, apart = torch.tensor([4.0, -1.0]), torch.tensor([4.0, 1.0, 0.25])
    assert vmap(jacfwd(f))(at_zero).tolist() == [0.25, 0.0]
    runs.clear()
    assert vmap(jacfwd(f))(apart).tolist() == [0.25, 0.5, 1.0]
    assert len(runs) == 1


@pytest.mark.parametrize(
    "kind", [jacfwd, lambda f: lambda x, w: jvp(lambda x: f(x, w), (x,), (torch.ones_like(x),))[1]]
)
def test_parts_of_an_outer_lanes_value_in_branches(kind):
    """Their tangent is laid out for the lanes of all branches, not of the one where the first part is taken."""

    def f(v, w):
        if w > 0.65:
            return v[0] * w
        return v[1] * v[0]

    vs = torch.randn(3, 2, dtype=D)
    got = vmap(vmap(kind(f), (None, 0)), (0, None))(vs, WS)
    torch.testing.assert_close(got, torch.stack([torch.stack([kind(f)(v, w) for w in WS]) for v in vs]))
