"""Generators of Python and NumPy that are made inside with a seed of each lane draw what those of a loop draw."""

import random

import numpy as np
import pytest
import torch

from lanewise import vmap

SEEDS = torch.tensor([3, 1, 4, 1, 0])


def numpys(k):
    generator = np.random.default_rng(int(k))
    drawn = generator.normal()
    if k > 2:
        drawn = drawn + generator.normal()
    return torch.tensor(drawn + generator.integers(5))


def of_a_list(k):
    return torch.tensor(np.random.default_rng([int(k), 3]).normal(size=2))


def by_name(k):
    return torch.tensor(np.random.default_rng(seed=int(k)).normal())


def of_a_sequence(k):
    return torch.tensor(np.random.Generator(np.random.PCG64(np.random.SeedSequence(int(k)))).normal())


def old(k):
    return torch.tensor(np.random.RandomState(int(k)).rand(2))


def pythons(k):
    generator = random.Random(int(k))
    drawn = generator.random()
    if k > 2:
        drawn += generator.random()
    return torch.tensor(drawn + generator.gauss(0, 1) + generator.randint(0, 100))


def torchs(k):
    generator = torch.Generator().manual_seed(int(k))
    drawn = torch.rand((), generator=generator)
    if k > 2:
        drawn = drawn + torch.randn((), generator=generator)
    return drawn + torch.rand((), generator=generator)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize(
    "f", [numpys, of_a_list, by_name, of_a_sequence, old, pythons, torchs], ids=lambda f: f.__name__
)
def test_as_the_loop(f):
    how = {"randomness": "same" if f is torchs else "error"}
    want = torch.stack([f(k) for k in SEEDS])
    for _ in range(2):
        torch.testing.assert_close(vmap(f, **how)(SEEDS), want)
    torch.testing.assert_close(vmap(f, chunk_size=2, **how)(SEEDS), want)
    torch.testing.assert_close(vmap(vmap(f, **how), **how)(SEEDS[None])[0], want)


# Code without a source runs as it is written, and so does that of libraries.
WITHOUT_SOURCE = """
import torch
OUTSIDE = torch.Generator()

def made_inside(k):
    generator = torch.Generator().manual_seed(int(k))
    return torch.rand(2, generator=generator)

def seeded(k):
    OUTSIDE.manual_seed(int(k))
    return torch.rand(2, generator=OUTSIDE) + torch.rand(2, generator=OUTSIDE)

def drawn_from_before(k):
    first = torch.rand(2, generator=OUTSIDE)
    OUTSIDE.manual_seed(int(k))
    return first + torch.rand(2, generator=OUTSIDE)

def seeded_alike(k):
    OUTSIDE.manual_seed(3)
    return torch.rand(2, generator=OUTSIDE) + k

def not_seeded(k):
    return torch.rand(2, generator=OUTSIDE) + k + torch.rand(2, generator=OUTSIDE)
"""


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 4])
@pytest.mark.parametrize("name", ["made_inside", "seeded", "drawn_from_before", "seeded_alike", "not_seeded"])
def test_generators_in_chunks_of_code_without_a_source(name, chunk_size):
    space: dict = {}
    exec(WITHOUT_SOURCE, space)
    f, outside = space[name], space["OUTSIDE"]

    def run(how, *args):
        outside.manual_seed(7)
        return how(*args)

    want = torch.stack([run(f, k) for k in SEEDS])
    for _ in range(2):
        assert torch.equal(run(vmap(f, randomness="same", chunk_size=chunk_size), SEEDS), want)
