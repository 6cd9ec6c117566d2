"""Operands of custom Functions that are written to, or held in a list or a dict, in every nesting."""

import pytest
import torch
from torch.autograd import Function

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
]


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_nestings(f, nesting):
    assert_as_plain(f, nesting, 3)
