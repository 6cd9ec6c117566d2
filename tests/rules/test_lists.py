"""Operations on lists of tensors, also by a number of each lane: values and derivatives, against differences."""

import pytest
import torch

from lanewise import grad, jvp, vmap
from tests.oracles import difference, loss, second_difference

D = torch.float64
G = torch.Generator().manual_seed(0)
XS, YS, SS = (torch.rand(3, *shape, dtype=D, generator=G) * 0.5 + 0.3 for shape in ((4,), (2, 4), ()))
DIRECTION = tuple(torch.full(x.shape[1:], 0.3, dtype=D) for x in (XS, YS, SS))

OPERATIONS = {
    "add": lambda x, y, s: torch.ops.aten._foreach_add.Tensor([x, y], s),  # torch._foreach_add takes it as a number
    "add of a list": lambda x, y, s: torch._foreach_add([x, y], [y[0], x], alpha=2),
    "addcdiv": lambda x, y, s: torch._foreach_addcdiv([x, y], [y[0], x], [y[1], y], [0.5, 2.0]),
    "addcmul by a tensor": lambda x, y, s: torch._foreach_addcmul([x], [y[0]], [x], torch.tensor([0.5])),
    "div": lambda x, y, s: torch._foreach_div([x, y], s),
    "exp": lambda x, y, s: torch._foreach_exp([x, y]),
    "lerp": lambda x, y, s: torch._foreach_lerp([x, y], [y[0], x], 0.3),
    "mul": lambda x, y, s: torch._foreach_mul([x, y], s),
    "norm": lambda x, y, s: torch._foreach_norm([x, y]),
    "norm of the first order": lambda x, y, s: torch._foreach_norm([x, y], 1),
    "pow": lambda x, y, s: torch._foreach_pow(2.0, [x, y]),
}


def in_place(change):
    def f(x, y, s):
        written = [x.clone(), y.clone()]
        change(written, x * 1.5, s)
        return written

    return f


def views_in_place(x, y, s):
    written = [x.clone()[1:], y.clone()[0]]
    torch._foreach_mul_(written, [x[1:], y[1]])
    return written


IN_PLACE = {
    "add": in_place(lambda xs, x, s: torch._foreach_add_(xs, [x, x])),
    "add a number of each lane": in_place(lambda xs, x, s: torch.ops.aten._foreach_add_.Tensor(xs, s)),
    "addcmul": in_place(lambda xs, x, s: torch._foreach_addcmul_(xs, [x, x], [x, x], value=2.0)),
    "copy": in_place(lambda xs, x, s: torch._foreach_copy_(xs, [x, x])),
    "div by a number of each lane": in_place(lambda xs, x, s: torch._foreach_div_(xs, s)),
    "mul by a number of each lane": in_place(lambda xs, x, s: torch._foreach_mul_(xs, s)),
    "views": views_in_place,
    "views of one": in_place(lambda xs, x, s: torch._foreach_mul_([xs[0][1:], xs[0][:2]], [3.0, 2.0])),
    "scalars in a tensor": in_place(lambda xs, x, s: torch._foreach_addcdiv_(xs, [x, x], [x, x], torch.tensor([2, 3]))),
    "shared": in_place(lambda xs, x, s: torch._foreach_addcmul_([xs[0]] * 2, [x, x], [x, x], torch.tensor([2, 3]))),
    "sqrt": in_place(lambda xs, x, s: torch._foreach_sqrt_(xs)),
    "zero": in_place(lambda xs, x, s: torch._foreach_zero_(xs)),
}
ALL = {**OPERATIONS, **{f"{name}, in place": f for name, f in IN_PLACE.items()}}
# What torch has no derivative of, or a wrong one.
ONLY_FORWARD = ("addcmul by a tensor", "copy", "scalars in a tensor", "shared", "zero")
BY_NUMBER = ("add", "div", "mul")


def tangent(f):
    return lambda *xs: jvp(lambda *ys: loss(f(*ys)), xs, DIRECTION)[1]


def slope(f):
    return lambda *xs: sum((g * d).sum() for g, d in zip(grad(lambda ys: loss(f(*ys)))(xs), DIRECTION, strict=True))


def tangents(f):
    return jvp(vmap(lambda *xs: loss(f(*xs))), (XS, YS, SS), tuple(d.expand(3, *d.shape) for d in DIRECTION))[1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ALL)
def test_values_and_derivatives(name):
    f = ALL[name]
    lanes = list(zip(XS, YS, SS, strict=True))
    want = [torch.stack(column) for column in zip(*[f(*lane) for lane in lanes], strict=True)]
    for got, column in zip(vmap(f)(XS, YS, SS), want, strict=True):
        torch.testing.assert_close(got, column, rtol=1e-14, atol=0)
    first = torch.stack([difference(lambda *xs: (loss(f(*xs)),), lane, DIRECTION)[0] for lane in lanes])
    second = torch.stack(
        [second_difference(lambda *xs: (loss(f(*xs)),), lane, DIRECTION, DIRECTION)[0] for lane in lanes]
    )
    close = lambda got, wanted: torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    close(vmap(tangent(f))(XS, YS, SS), first)
    close(tangents(f), first)
    close(vmap(lambda *xs: jvp(tangent(f), xs, DIRECTION)[1])(XS, YS, SS), second)
    if not name.startswith(ONLY_FORWARD) and name not in BY_NUMBER:
        close(vmap(slope(f))(XS, YS, SS), first)
        close(vmap(slope(lambda *xs: [tangent(f)(*xs)]))(XS, YS, SS), second * loss([torch.ones((), dtype=D)]))


def test_views_of_one_tensor_where_lanes_part():
    def f(x):
        c = torch.zeros(2, dtype=D)
        if x.sum() > 0:
            torch._foreach_add_([c, c[:1]], 1)
        return c

    torch.testing.assert_close(
        vmap(f)(torch.tensor([1.0, -1.0, 2.0], dtype=D)).tolist(), [[2.0, 1.0], [0.0, 0.0], [2.0, 1.0]]
    )
