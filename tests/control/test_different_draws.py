"""`randomness="different"` where lanes draw unlike others: no number is drawn twice, all can be drawn again."""

import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lanewise import vmap

D = torch.float64
XS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 3.0])
OWN = torch.Generator()

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


def padded(drawn, size=30):
    return torch.cat([drawn.reshape(-1), torch.full((size - drawn.numel(),), float("nan"), dtype=D)])


def sized(x):
    return padded(torch.rand(int(x), dtype=D))


def several(x):
    return padded(torch.cat([torch.rand(n, dtype=D) for n in (3, int(x), 2, int(x) + 1)]))


def in_a_branch(x):
    return padded(torch.rand(2 if x > 2 else 4, dtype=D))


def of_two_kinds(x):
    return padded(torch.randn(int(x), dtype=D) if x > 2 else torch.rand(int(x), dtype=D))


def of_two_shapes(x):
    return padded(torch.rand(int(x), 2, dtype=D) if x > 2 else torch.rand(2, int(x), dtype=D))


def of_a_mask(x):
    values = torch.arange(5.0, dtype=D)
    return padded(torch.rand_like(values[values < x]))


def in_place(x):
    return padded(torch.empty(int(x), dtype=D).uniform_())


def not_converted(x):
    try:
        if x > 2:
            return padded(torch.rand(3, dtype=D))
    finally:
        pass
    return padded(torch.rand(2, dtype=D))


def in_a_generator(x):
    def walk():
        for _ in range(int(x)):
            yield torch.rand((), dtype=D)

    return padded(torch.stack(list(walk())))


def in_a_while(x):
    drawn = []
    while len(drawn) < int(x):
        drawn.append(torch.rand((), dtype=D))
    return padded(torch.stack(drawn))


def of_a_generator_of_its_own(x):
    return padded(torch.cat([torch.rand(2, dtype=D, generator=OWN), torch.rand(int(x), dtype=D, generator=OWN)]))


def of_two_generators(x):
    return padded(torch.cat([torch.rand(2, dtype=D, generator=OWN), torch.rand(int(x), dtype=D)]))


def in_two_vmaps(x):
    return vmap(lambda y: padded(torch.rand(int(y), dtype=D)), randomness="different")(torch.arange(1.0, 5.0) + x)


PROGRAMS = [
    f for f in list(globals().values()) if type(f) is types.FunctionType and f.__code__.co_varnames[:1] == ("x",)
]


def run(program, chunk_size):
    torch.manual_seed(0)
    OWN.manual_seed(5)
    return vmap(program, randomness="different", chunk_size=chunk_size)(XS)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_no_number_is_drawn_twice(program, chunk_size):
    for _ in range(2):
        got = run(program, chunk_size)
        after = torch.cat([torch.rand(300, dtype=D), torch.rand(300, dtype=D, generator=OWN)])
        numbers = torch.cat([got.flatten(), after])
        numbers = numbers[~numbers.isnan()]
        assert numbers.unique().numel() == numbers.numel()
        torch.testing.assert_close(run(program, chunk_size), got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("program", [sized, several, in_a_branch, not_converted], ids=lambda p: p.__name__)
def test_a_checkpoint_draws_them_again(program, chunk_size, use_reentrant):
    def scaled(v, x):
        return v * program(x).nansum()

    def f(v, x):
        return checkpoint(scaled, v, x, use_reentrant=use_reentrant)

    vs = torch.linspace(1, 2, len(XS), dtype=D).requires_grad_()
    out = vmap(f, randomness="different", chunk_size=chunk_size)(vs, XS)
    out.sum().backward()
    torch.testing.assert_close(vs.grad, (out / vs).detach())
