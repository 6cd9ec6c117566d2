"""What is remembered of a function whose lanes part is not taken for that of another one."""

import functools
import warnings

import pytest
import torch
from torch import nn

from lanewise import grad, hessian, jvp, vmap
from lanewise._transforms.parting import code_of, parted

XS = torch.arange(60.0).reshape(12, 5).sin()


def picky(x):
    out = []
    for i in range(len(x)):
        if x[i] > 0:
            out.append(x[i] * i)
    return sum(out) if out else x.sum() * 0


def plain(x):
    return (x * 2).sum()


def directional(f):
    h = lambda x: f(x).sum()

    def forward(x):
        return jvp(h, (x,), (torch.ones_like(x),))[1]

    return forward


def three_deep(f):
    g = lambda x: f(x)
    h = lambda x: g(x)
    return lambda x: h(x)


def recursive(f):
    def even(n, x):
        return f(x) if n == 0 else odd(n - 1, x)

    def odd(n, x):
        return even(n - 1, x)

    return lambda x: even(2, x)


class Base:
    def run(self, x):
        return self.step(x)


class Picky(Base):
    def step(self, x):
        return picky(x)


class Plain(Base):
    def step(self, x):
        return plain(x)


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)


class PickyPart(nn.Module):
    def forward(self, x):
        return picky(x)


class PlainPart(nn.Module):
    def forward(self, x):
        return plain(x)


def called(f, x):
    return f(x)


def model_of(net):
    return lambda x: net(x)


MAKES = {
    "directional": directional,
    "hessian": lambda f: hessian(lambda x: f(x) * x.sum()),
    "grad in a closure": lambda f: (lambda g: lambda x: g(x).sum())(grad(f)),
    "three deep": three_deep,
    "recursive": recursive,
    "partial": lambda f: functools.partial(called, f),
    "partial of a keyword": lambda f: functools.partial(lambda x, f: f(x), f=f),
    "default": lambda f: lambda x, f=f: f(x),
    "method": lambda f: (Picky if f is picky else Plain)().run,
    "module": lambda f: Net(PickyPart() if f is picky else PlainPart()),
    "module in a closure": lambda f: model_of(PickyPart() if f is picky else PlainPart()),
    "method in a closure": lambda f: model_of((Picky if f is picky else Plain)().run),
}


@pytest.mark.parametrize("name", MAKES)
def test_functions_of_one_kind_are_told_apart(name):
    make = MAKES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vmap(make(picky))(XS)
    assert code_of(make(picky)) in parted
    assert code_of(make(plain)) not in parted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = vmap(make(plain))(XS)
    torch.testing.assert_close(out, torch.stack([make(plain)(x) for x in XS]))


def test_methods_that_classes_inherit_are_told_apart():
    class One(torch.autograd.Function):
        pass

    class Other(torch.autograd.Function):
        pass

    assert code_of(One.apply) == code_of(One.apply) != code_of(Other.apply)


def test_closures_made_anew_are_one():
    assert code_of(directional(picky)) == code_of(directional(picky))
    assert code_of(recursive(picky)) == code_of(recursive(picky))


def test_functions_that_all_know_others_take_no_time():
    def all_of(a, b, c, d):
        return [lambda x: (a, b, c, d, x)[-1] for _ in range(4)]

    functions = [lambda x: x] * 4
    for _ in range(40):
        functions = all_of(*functions)
    assert code_of(functions[0]) == code_of(functions[1])
