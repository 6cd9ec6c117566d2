"""Functions that outlive the call they were made in see what its variables held when their lane returned."""

import functools

import pytest
import torch

from lanewise import grad, vmap

XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [-0.1, -0.2, -0.3]], dtype=torch.float64)


def variable_of_a_loop(x):
    def make():
        for v in x:
            if v > 0:

                def scaled():
                    return v * 2 if x[1] > 0 else v * 3  # noqa: B023

                return scaled
        return lambda: x.sum()

    return make()() * x


def bound_anew_after_a_return(x):
    def make(n):
        n = n + 1
        by = lambda: n * x
        if x[0] > 0:
            return [by, 1.0]
        n += 1
        if x[1] > 0:
            return [by, 2.0]
        n = x[2]
        return [by, 3.0]

    by, factor = make(2)
    return by() * factor


def returned_from_while(x):
    def make():
        i = 0
        while True:
            i += 1
            z = x * i
            f = functools.partial(lambda q: q * z.sum() + i, x)  # noqa: B023
            if z[2].abs() > 0.5:
                return {"f": f}

    return make()["f"]()


def methods(x):
    def make():
        scale = x.sum()

        class Scaled:
            def value(self):
                return scale * x

        if scale > 0.5:
            return Scaled()
        scale = scale * 3
        return Scaled()

    return make().value()


def changed_by_the_function_itself(x):
    def make():
        count = 0

        def inc(by):
            nonlocal count
            count += by
            return count

        for v in x:
            inc(1)
            if v > 0.3:
                return inc
        inc(10)
        return inc

    inc = make()
    inc(2)
    return x * inc(1)


PROGRAMS = [
    variable_of_a_loop,
    bound_anew_after_a_return,
    returned_from_while,
    methods,
    changed_by_the_function_itself,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program):
    want = torch.stack([program(x) for x in XS])
    for _ in range(2):
        torch.testing.assert_close(vmap(program)(XS), want)
    leaf = XS.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(sum(program(x).sum() for x in leaf), leaf)
    torch.testing.assert_close(vmap(grad(lambda x: program(x).sum()))(XS), slopes)
