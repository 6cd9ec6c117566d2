"""Operands of custom Functions that are written to, held in a list or a dict, or tangents, in every nesting."""

import pytest
import torch
from torch.autograd import Function

from lanewise import linearize, vmap
from tests.oracles import assert_same
from tests.plain import NESTINGS, assert_as_plain


class Tripled(Function):
    """In place, with a derivative that is not forward's."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, g):
        return 5 * g


class Scaled(Function):
    """In place, with a jvp."""

    @staticmethod
    def forward(x, w):
        return x.mul_(w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx, t, _):
        return t * ctx.saved_tensors[0]


class Holding(Function):
    """Old style: a tensor in a list, kept on ctx in both ways."""

    @staticmethod
    def forward(ctx, x, pair):
        ctx.pair = pair
        ctx.save_for_backward(x, pair[0])
        return (x * pair[0]).sin() * pair[1]

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        assert len(ctx.needs_input_grad) == 2 and isinstance(ctx.pair, list)
        return 3 * g * w * (x * ctx.pair[0]).cos() * ctx.pair[1], None


class HoldingDeep(Function):
    """New style: a tensor in a tuple in a dict."""

    @staticmethod
    def forward(x, options):
        return (x * options["w"][0]).sin() * options["k"]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, options = inputs
        ctx.k = options["k"]
        ctx.save_for_backward(x, options["w"][0])
        ctx.save_for_forward(x, options["w"][0])

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * (x * w).cos() * ctx.k, None


class HoldingWithJvp(HoldingDeep):
    @staticmethod
    def jvp(ctx, t, nothing):
        x, w = ctx.saved_tensors
        return t * w * (x * w).cos() * ctx.k


class HoldingWithVmap(HoldingDeep):
    @staticmethod
    def vmap(info, in_dims, x, options):
        assert in_dims == (0, {"w": (0,), "k": None})
        return HoldingDeep.apply(x, options), 0


class Solve(Function):
    """Whose backward is a solve again."""

    @staticmethod
    def forward(a, b):
        return torch.linalg.solve(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, g):
        a, x = ctx.saved_tensors
        pulled = Solve.apply(a.mT, g)
        return -pulled.unsqueeze(-1) * x.unsqueeze(-2), pulled


class Applying(Function):
    """Whose jvp applies another Function to the tangent."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, t):
        return 2 * Product.apply(t, ctx.saved_tensors[0])


class Product(Function):
    @staticmethod
    def forward(ctx, t, x):
        ctx.save_for_backward(t, x)
        return t * x

    @staticmethod
    def backward(ctx, g):
        t, x = ctx.saved_tensors
        return g * x, g * t


def written(x):
    y = x.sin()
    z = Tripled.apply(y)
    return z * y + y.cos()


def written_part(x):
    y = x.sin() * 1
    Tripled.apply(y[:2])
    return y * x * y


def written_in_what_was_made_inside(x):
    a = torch.ones(3, dtype=x.dtype) * 1
    a.add_(x)
    last = a[1:]
    Tripled.apply(a)
    return last * 2 + a[0] * x[1]


def written_with_jvp(x):
    y = x.sin()
    a = y * 1
    z = Scaled.apply(a, torch.arange(1.0, 4.0, dtype=x.dtype))
    return z * a + y.cos()


def constant_in_a_list(x):
    return Holding.apply(x, [x.detach() * 2, 2.0]) * x


def made_inside_in_a_list(x):
    return Holding.apply(x, [torch.ones(3, dtype=x.dtype), 2.0]) * x


def with_history_in_a_list(x):
    return Holding.apply(x.cos(), [x * 2, 2.0]) * x


def in_a_dict(x):
    return HoldingDeep.apply(x, {"w": (x.detach() * 2,), "k": 2}) * x


def with_jvp(x):
    return HoldingWithJvp.apply(x, {"w": (x * 2,), "k": 2}) * x


def with_vmap(x):
    return HoldingWithVmap.apply(x, {"w": (x * 2,), "k": 2}) * x


def solved(x):
    return Solve.apply(2 * torch.eye(3, dtype=x.dtype) + x.unsqueeze(-1) * x.cos(), x.sin())


def applied_in_a_jvp(x):
    return Applying.apply(x.sin()) * x


PROGRAMS = [
    written,
    written_part,
    written_in_what_was_made_inside,
    written_with_jvp,
    constant_in_a_list,
    made_inside_in_a_list,
    with_history_in_a_list,
    in_a_dict,
    with_jvp,
    with_vmap,
    solved,
    applied_in_a_jvp,
]


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_nestings(f, nesting):
    assert_as_plain(f, nesting, 3)


def test_a_function_of_tangents_below_a_vmap():
    xs = torch.rand(2, 3)
    with pytest.raises(NotImplementedError, match="Solve is applied to a tangent"):
        linearize(vmap(solved), xs)


class Multiplied(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_forward(x, y)
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y, g * x

    @staticmethod
    def jvp(ctx, t, s):
        x, y = ctx.saved_tensors
        return t * y + s * x


def test_what_linearize_keeps_of_lanes_around_has_its_derivative():
    """The lanes are those of captured tensors, of which the results have a history outside."""
    xs, b, t = torch.rand(3, 2, dtype=torch.float64), torch.rand(2, dtype=torch.float64), torch.rand(2).double()

    def found(product):
        leaf = xs.clone().requires_grad_()
        f = lambda x, b: product(x, b).sin() * (x + b)
        out, push = linearize(lambda b: vmap(lambda x: f(x, b))(leaf), b)
        return [torch.autograd.grad(y.square().sum(), leaf, retain_graph=True)[0] for y in (out, push(t))]

    assert_same(found(Multiplied.apply), found(torch.mul))
