"""Forward rules against differences: once, twice, over reverse mode and under it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lanewise import grad, jvp
from tests.oracles import (
    FIRST,
    SECOND,
    along,
    assert_same,
    difference,
    differentiable,
    directions,
    filled,
    floats,
    gradients,
    loss,
    second_difference,
)


def check_tangents(f: Callable, *args: torch.Tensor, order: int = 2) -> None:
    """jvp of `f` at `args`; with `order=2` jvp of jvp, of the gradient, and the gradient of jvp."""
    places = differentiable(args)
    v, w = directions(args, 1), directions(args, 2)
    primals = tuple(args[n] for n in places)
    g = lambda *xs: floats(f(*filled(args, xs)))

    value, tangent = jvp(g, primals, v)
    assert_same(value, g(*primals))
    assert_same(tangent, difference(f, args, v), FIRST)
    if order < 2:
        return
    assert_same(jvp(lambda *xs: jvp(g, xs, v)[1], primals, w)[1], second_difference(f, args, v, w), SECOND)
    scalar = lambda *xs: loss(g(*xs))
    want = second_difference(lambda *xs: loss(f(*xs)), args, v, w)[0]
    pushed = jvp(grad(scalar, argnums=tuple(range(len(primals)))), primals, v)[1]
    assert_same(along(pushed, w), want, SECOND)
    leaves = tuple(x.clone().requires_grad_() for x in primals)
    outside = loss(jvp(g, leaves, v)[1])
    assert_same(along(gradients(outside, leaves), w), want, SECOND)
