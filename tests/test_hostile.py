"""Arguments that make no sense end in an error, on lanes as without: never in a crash of the process."""

import os
import subprocess
import sys

import pytest
import torch

from lanewise import vmap
from tests.hostile import operations

FULL = os.environ.get("LANEWISE_FULL") == "1"
CASES = 12 if FULL else 1
TOTAL = len(operations()) * CASES
STEP = 1 if FULL else 3  # one in so many operations in a short run
PARTS = 8 if FULL else 2


def child(start: int, stop: int, *flags: str) -> tuple[int, str]:
    """The exit status, and the last line: the case that was run last."""
    command = [sys.executable, "-m", "tests.hostile", str(start), str(stop), str(STEP), str(CASES), *flags]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=os.path.dirname(os.path.dirname(__file__)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    return done.returncode, lines[-1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the child limits its memory")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_process_crashes(part):
    """Where a kernel crashes without lanes too, that is torch's; the cases after it run in a new process."""
    at, end = TOTAL * part // PARTS, TOTAL * (part + 1) // PARTS
    while at < end:
        status, last = child(at, end)
        if status == 0:
            return
        number = int(last.split()[0])
        without_lanes, _ = child(number, number + 1, "--plain")
        assert without_lanes != 0, (
            f"case {last} ended with {status}; python -m tests.hostile {number} {number + 1} {CASES}"
        )
        at = number + 1


FEW_DIMS = {
    "svd": lambda x: torch.linalg.svd(x)[1],
    "lu": lambda x: torch.linalg.lu(x)[2],
    "qr": lambda x: torch.linalg.qr(x)[1],
    "inverse": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "eigh": torch.linalg.eigvalsh,
    "split": lambda x: x.sum().split(1)[0],
    "unbind": lambda x: x.sum().unbind()[0],
    "select": lambda x: x.sum().select(0, 0),
    "slice": lambda x: x.sum()[:1],
    "t": lambda x: x.expand(2, 2, 3).t(),
    "view_as_complex": lambda x: torch.view_as_complex(x.sum()),
    "bucketize": lambda x: torch.bucketize(x, x.sum()),
    "in place": lambda x: (x * 1).mul_(x[None]),
    "fill": lambda x: (x * 1).fill_(x),
    "baddbmm": lambda x: torch.baddbmm(x, x, x),
    "mm": lambda x: torch.mm(x[:2, None], x[:, None].expand(3, 2)[:2]),
    "dot": lambda x: torch.dot(x.expand(3, 3), x),
    "bmm": lambda x: torch.bmm(x.expand(1, 1, 3, 3), x.expand(1, 1, 3, 3)),
    "addr": lambda x: torch.addr(x, x.expand(1, 3), x),
    "pixel_unshuffle": lambda x: torch.pixel_unshuffle(x.expand(3, 3), 1),
    "normal": lambda x: torch.normal(x, -x.abs() - 1),
    "bernoulli": lambda x: torch.bernoulli(x + 5),
}


@pytest.mark.parametrize("name", FEW_DIMS)
def test_lanes_are_not_taken_for_a_dim_that_is_missing(name):
    """Three lanes of a vector with three elements look like a matrix below."""
    f, x = FEW_DIMS[name], torch.rand(3, 3, dtype=torch.float64)
    with pytest.raises((RuntimeError, IndexError)):
        f(x[0])
    with pytest.raises((RuntimeError, IndexError)):
        vmap(f, randomness="different")(x)


@pytest.mark.parametrize("f", [torch.any, torch.all])
def test_reductions_over_no_dims(f):
    x = torch.tensor([[[0.0, 1.0]], [[0.0, 0.0]]])
    for dim in ((), None, (0,), (0, 1)):
        assert torch.equal(vmap(lambda x, dim=dim: f(x, dim=dim))(x), torch.stack([f(lane, dim=dim) for lane in x]))
