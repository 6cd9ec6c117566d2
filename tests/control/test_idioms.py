"""What people write for one example, against the loop: values and gradients, as often as it is called."""

import pytest
import torch

from lanewise import grad, vmap
from tests.control.idiom_programs import PROGRAMS

D = torch.float64
CASES = [(kinds, f) for kinds, programs in PROGRAMS.items() for f in programs]


def arguments(kinds, lanes):
    generator = torch.Generator().manual_seed(1)
    known = {
        "x": torch.randn(lanes, 6, dtype=D, generator=generator),
        "i": torch.randint(0, 6, (lanes, 6), generator=generator),
        "j": torch.randint(0, 6, (lanes, 6), generator=generator),
        "e": torch.randint(0, 6, (lanes, 2), generator=generator),
    }
    return [known[kind] for kind in kinds]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("lanes", [9, 40])
@pytest.mark.parametrize("kinds, f", CASES, ids=[f.__name__ for _, f in CASES])
def test_as_the_loop(kinds, f, lanes):
    rows = arguments(kinds, lanes)
    want = torch.stack([f(*row) for row in zip(*rows)])
    for _ in range(3):  # later calls begin where earlier ones have led
        got = vmap(f)(*rows)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    if "x" not in kinds:
        return
    place = kinds.index("x")
    leaf = rows[place].clone().requires_grad_()
    tracked = [leaf if at == place else row for at, row in enumerate(rows)]
    total = sum(f(*row) for row in zip(*tracked))
    if not total.requires_grad:
        return
    (grads,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(vmap(grad(f, argnums=place))(*rows), grads, rtol=1e-8, atol=1e-8)
    (got,) = torch.autograd.grad(vmap(f)(*tracked).sum(), leaf)
    torch.testing.assert_close(got, grads, rtol=1e-8, atol=1e-8)
