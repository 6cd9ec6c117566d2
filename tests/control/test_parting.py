"""Which functions are run for lanes that part: those whose lanes did, and no others that look like them."""

import functools

import pytest
import torch
from torch import nn

from lanewise import grad, vmap
from lanewise._transforms.parting import code_of, parts

pytestmark = pytest.mark.usefixtures("parting")

XS = torch.tensor([1.0, -1.0])


def absolute(x):
    return x if x > 0 else -x


def double(x):
    return x * 2


def decorated(f):
    def inner(x):
        return f(x)

    return inner


class Absolute(nn.Module):
    def forward(self, x):
        return absolute(x)


def check(parting, other):
    assert torch.equal(vmap(parting)(XS), torch.stack([torch.as_tensor(parting(x)) for x in XS]))
    assert parts(code_of(parting))
    vmap(other)(XS)
    assert not parts(code_of(other))


def test_plain_functions():
    check(lambda x: x if x > 0 else -x, lambda x: x * 2)


def test_closures_over_functions():
    check(decorated(absolute), decorated(double))


def test_transforms():
    check(grad(lambda x: x if x > 0 else -x), grad(lambda x: x * 3))


def test_partial_applications():
    check(functools.partial(lambda a, x: a * x if x > 0 else x, 2.0), functools.partial(lambda a, x: a * x, 2.0))


def test_containers_of_modules():
    check(nn.Sequential(Absolute()), nn.Sequential(nn.Tanh()))
