"""Random programs against the loop over examples, in values and gradients, under one and two vmaps."""

import os

import pytest
import torch

from lanewise import vmap
from tests.control import fuzz
from tests.control.compositions import COMPOSITIONS, by_vmap, by_vmap_grad, by_vmap_vmap, examples, gradients

FULL = bool(os.environ.get("LANEWISE_FULL"))
SEEDS = 2000 if FULL else 100


def check(seed: int, compositions=COMPOSITIONS, kinds: bool = False) -> None:
    """One program of each kind under each composition."""
    f, text = fuzz.program(seed, in_place=seed % 3 == 0, kinds=kinds)
    try:
        gradients(f, *examples(seed, lanes=6))
    except RuntimeError:
        return  # torch itself has no derivative: what it kept was written to
    except TypeError:  # of lanes with None or a text
        with pytest.raises(TypeError):
            vmap(f)(*examples(seed, lanes=6))
        return
    for composition in compositions:
        got, want = composition(f, *examples(seed, lanes=6))
        assert torch.allclose(got, want, rtol=1e-8, atol=1e-8), f"seed {seed}, {composition.__name__}\n{text}"


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("kinds", [False, True], ids=["numbers", "kinds"])
@pytest.mark.parametrize("chunk", range(10))
def test_random_programs(chunk, kinds):
    for seed in range(chunk, SEEDS, 10):
        check(seed, COMPOSITIONS if FULL else (by_vmap, by_vmap_grad, by_vmap_vmap), kinds)
