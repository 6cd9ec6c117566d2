"""Hooks of tensors in every nesting of transforms that differentiate backwards."""

import pytest
import torch

from tests.plain import BACKWARD, assert_as_plain


def of_an_argument(x):
    if x.requires_grad:
        x.register_hook(lambda g: g * 2)
    return x.sin() * x


def of_a_view(x):
    y = x * x
    part = y[:2]
    if part.requires_grad:
        part.register_hook(lambda g: g * 3)
    return torch.cat([part.sin(), y[2:]])


def of_a_view_that_is_written_to(x):
    y = x * x
    part = y[:2]
    part.mul_(x[:2])
    if part.requires_grad:
        part.register_hook(lambda g: g * 3)
    return torch.cat([part.sin(), y[2:]])


def two_one_removed(x):
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
        y.register_hook(lambda g: g * 5).remove()
        y.register_hook(lambda g: None)
    return y.sin()


def with_a_value_of_the_lane(x):
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda g: g * x)
    return y.sin()


def before_a_write(x):
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
    y.mul_(x)
    return y.sin()


def of_a_node(x):
    y = x * x
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return y.sin()


PROGRAMS = [
    of_an_argument,
    of_a_view,
    of_a_view_that_is_written_to,
    two_one_removed,
    with_a_value_of_the_lane,
    before_a_write,
    of_a_node,
]


@pytest.mark.parametrize("nesting", BACKWARD)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_nestings(f, nesting):
    assert_as_plain(f, nesting, 3)
