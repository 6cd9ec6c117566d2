"""Lanes in groups: the same results whatever the size, the same random numbers, memory that fits, and one bar."""

import itertools

import numpy as np
import pytest
import torch
import tqdm.auto
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lanewise as lw
from lanewise._transforms import chunks
from lanewise._transforms.chunks import PeakMemory, free_memory
from lanewise.errors import ArgumentError, TransformError

SIZES = [1, 2, 3, 5, 7, 100, "auto"]
every_size = pytest.mark.parametrize("chunk_size", SIZES)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lanes_of_each_call(f, *args, **options) -> list[int]:
    """How many lanes each run of the function had."""
    lanes = []

    def counted(*given):
        lanes.append(lw.debug_unwrap(given[0]).shape[0])
        return f(*given)

    lw.vmap(counted, **options)(*args)
    return lanes


# --- values ----------------------------------------------------------------------------------------------------------


@every_size
def test_results_do_not_depend_on_the_size(chunk_size):
    x, w = seeded(2, 7, 3), seeded(3, seed=1)
    f = lambda x, w: {"y": x * w, "s": (x.sum(), w * 2), "n": 3, "w": w}
    options = {"in_dims": (1, None), "out_dims": {"y": -1, "s": (0, 1), "n": None, "w": None}}
    got, want = lw.vmap(f, chunk_size=chunk_size, **options)(x, w), lw.vmap(f, **options)(x, w)
    assert got["y"].equal(want["y"]) and got["y"].shape == (2, 3, 7)
    assert got["s"][0].equal(want["s"][0]) and got["s"][1].equal(want["s"][1])
    assert got["n"] == 3 and got["w"] is w


@every_size
@pytest.mark.parametrize("out_dims", [0, 1, -1, (1,), (0,)])
def test_one_tensor_and_out_dims_of_every_form(chunk_size, out_dims):
    x = seeded(5, 3)
    got = lw.vmap(lambda a: a * 2, out_dims=out_dims, chunk_size=chunk_size)(x)
    dim = out_dims if isinstance(out_dims, int) else out_dims[0]
    assert got.equal((2 * x).movedim(0, dim))


@every_size
def test_out_dims_none(chunk_size):
    w = seeded(3)
    assert lw.vmap(lambda a: w, out_dims=None, chunk_size=chunk_size)(seeded(5, 3)) is w
    assert lw.vmap(lambda a: "ok", chunk_size=chunk_size)(seeded(5, 3)) == "ok"


@every_size
def test_an_empty_batch(chunk_size):
    got = lw.vmap(lambda a: (a.sum(), a * 2), out_dims=(0, 1), chunk_size=chunk_size)(torch.zeros(0, 3))
    assert got[0].shape == (0,) and got[1].shape == (3, 0)


@every_size
def test_writes_and_gradients_go_through(chunk_size):
    x, want = seeded(5, 3), seeded(5, 3) + 1
    lw.vmap(lambda a: a.add_(1), chunk_size=chunk_size)(x)
    assert x.equal(want)
    x.requires_grad_()
    lw.vmap(lambda a: (a**2).sum(), chunk_size=chunk_size)(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * x)
    assert torch.allclose(lw.grad(lambda x: lw.vmap(torch.sin, chunk_size=chunk_size)(x).sum())(x), x.cos())
    nested = lw.vmap(lw.vmap(torch.sin, chunk_size=chunk_size), chunk_size=chunk_size)
    assert nested(seeded(3, 5)).equal(seeded(3, 5).sin())


def test_the_function_sees_chunks_of_that_size():
    x = seeded(7, 2)
    assert lanes_of_each_call(torch.sin, x, chunk_size=3) == [3, 3, 1]
    assert lanes_of_each_call(torch.sin, x, chunk_size=7) == [7]
    assert lanes_of_each_call(torch.sin, x, chunk_size=8) == [7]
    assert lanes_of_each_call(torch.sin, x) == [7]


def test_chunks_of_different_structures_are_refused():
    count = itertools.count()
    with pytest.raises(TransformError, match=r"the chunks return different structures: \(\*,\) and \(\*, \*\)"):
        lw.vmap(lambda a: (a,) * (next(count) + 1), chunk_size=2)(seeded(4))


# --- random numbers --------------------------------------------------------------------------------------------------


RANDOM = {
    "rand": lambda x: x + torch.rand(2, dtype=x.dtype),
    "randn_like": lambda x: torch.randn_like(x),
    "dropout": lambda x: torch.nn.functional.dropout(x + torch.rand(()), 0.5),
    "in place": lambda x: torch.empty_like(x).normal_() + x,
    "several": lambda x: torch.rand(()) + torch.randperm(2) + torch.nn.functional.dropout(x, 0.3),
    "nested": lambda x: lw.vmap(lambda a: a + torch.rand(()), randomness="different")(x),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 6, "auto"])
def test_random_numbers_do_not_depend_on_the_size(name, randomness, chunk_size):
    x = torch.ones(6, 2)
    results, states = [], []
    for size in (None, chunk_size):
        torch.manual_seed(5)
        results.append(lw.vmap(RANDOM[name], randomness=randomness, chunk_size=size)(x))
        states.append(torch.get_rng_state())
    assert results[0].equal(results[1])
    assert states[0].equal(states[1]), "the generator is left elsewhere"
    if randomness == "different":
        assert len(results[0].unique()) > 4
    else:
        assert results[0].equal(results[0][:1].expand(6, 2))


OWN = torch.Generator()
SIGNS = torch.tensor([1.0, -1, 2, -2, 3, -3, 4, -4, 5, -5])
PARTED = {
    "both": lambda x: torch.rand(()) if x > 0 else torch.rand(()),
    "one": lambda x: torch.rand(()) if x > 0 else x * 0 + torch.rand(3)[1],
    "after": lambda x: (torch.rand(()) if x > 0 else x) * 0 + torch.rand(()),
    "shapes": lambda x: torch.rand(3)[2] if x > 0 else torch.rand(()),
    "in place": lambda x: torch.zeros(2).uniform_()[0] if x > 0 else torch.zeros(3).uniform_()[1],
    "gamma": lambda x: torch._standard_gamma(torch.full((), 2.0)) if x > 0 else torch._standard_gamma(x * 0 + 2),
    "generator": lambda x: (
        (torch.rand((), generator=OWN) + (torch.rand((), generator=OWN) if x > 2 else x)) * 0
        + torch.rand((), generator=OWN)
    ),
    "dropout": lambda x: (
        (
            torch.nn.functional.dropout(torch.ones(52), 0.5)
            if x > 0
            else torch.nn.functional.dropout(torch.ones(52), 0.5)
        )
        .gt(0)
        .double()
        @ 2 ** torch.arange(52.0).double()
    ),
}
each_parted = pytest.mark.parametrize("name", PARTED)


def numbers(name, xs, *chunk_sizes):
    f = PARTED[name]
    for chunk_size in chunk_sizes:
        f = lw.vmap(f, randomness="different", chunk_size=chunk_size)
    torch.manual_seed(5)
    OWN.manual_seed(6)
    return f(xs)


@each_parted
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, "auto"])
def test_parted_lanes_share_no_numbers(name, chunk_size):
    # Sorted, most chunks are of lanes that go one way, and other chunks go the other.
    for xs in (SIGNS, SIGNS.sort().values):
        got = numbers(name, xs, chunk_size)
        assert got.unique().numel() == 10
        assert got.equal(numbers(name, xs, chunk_size))


@each_parted
@pytest.mark.parametrize("inner", [None, 2, 3])
@pytest.mark.parametrize("outer", [None, 2, 3])
def test_parted_lanes_of_two_vmaps_share_no_numbers(name, inner, outer):
    xs = torch.stack([SIGNS, -SIGNS, SIGNS + 0.5, SIGNS.flip(0), SIGNS - 0.2])
    assert numbers(name, xs, inner, outer).unique().numel() == 50


@pytest.mark.parametrize("chunk_size", [2, 3])
def test_a_checkpoint_draws_again_what_parted_lanes_drew(chunk_size):
    def f(x):
        return checkpoint(lambda a: a * PARTED["both"](a), x, use_reentrant=False)

    xs = SIGNS.clone().requires_grad_()
    out = lw.vmap(f, randomness="different", chunk_size=chunk_size)(xs)
    out.sum().backward()
    assert xs.grad is not None and xs.grad.unique().numel() == 10
    torch.testing.assert_close(xs.grad * xs.detach(), out.detach())


def test_numbers_that_differ_between_chunks_or_do_not():
    nan = lw.vmap(lambda x: (x, float("nan")), out_dims=(0, None), chunk_size=2)(SIGNS)[1]
    assert isinstance(nan, float) and nan != nan
    with pytest.raises(ArgumentError, match="out_dims"):
        lw.vmap(lambda x: (x, 0.0 if x > 0 else -0.0), out_dims=(0, None), chunk_size=1)(SIGNS)
    got = lw.vmap(lambda x: np.float64(1.5) if x > 0 else np.float64(2.5), chunk_size=1)(SIGNS)
    assert got.dtype is torch.float64 and got.equal(torch.where(SIGNS > 0, 1.5, 2.5).double())


def test_successive_calls_draw_on():
    f = lw.vmap(lambda x: x + torch.rand(()), randomness="different", chunk_size=2)
    first, second = f(torch.zeros(4)), f(torch.zeros(4))
    assert len({*first.tolist(), *second.tolist()}) == 8


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_a_generator_draws_on_where_the_first_chunks_do_not_draw(randomness):
    f = lw.vmap(lambda x: torch.rand((), generator=OWN) if x > 0 else x, randomness=randomness, chunk_size=2)
    xs = torch.tensor([-1.0, -2, 3, 4, 5, 6])
    OWN.manual_seed(7)
    drawn = [f(xs.abs()), f(xs)[2:], f(xs)[2:]]
    if randomness == "different":
        assert torch.cat(drawn).unique().numel() == 14
    else:
        OWN.manual_seed(7)
        for numbers in drawn:
            assert (numbers == torch.rand((), generator=OWN)).all()


# --- memory ----------------------------------------------------------------------------------------------------------


def work(x: Tensor) -> Tensor:
    """Two temporaries and their product at one time: 3 x 8000 bytes and one number per lane."""
    return ((x + 1) * (x + 2)).sum()


@pytest.mark.parametrize(("budget", "want"), [(1, 1), (100_000, 4), (200_000, 8), (400_000, 16), (10**9, 64)])
def test_auto_takes_the_largest_power_of_two_that_fits(budget, want):
    lanes = lanes_of_each_call(work, seeded(64 + 3, 1000), chunk_size="auto", memory_budget=budget)
    assert lanes[:2] == [1, 2] and sum(lanes) == 67
    assert set(lanes[2:-1]) <= {want} and lanes[-1] <= want
    assert want == 1 or lanes[2] == want
    if want > 1:
        x = seeded(want, 1000)
        with PeakMemory() as memory:
            lw.vmap(work)(x)
        assert memory.peak <= budget


def test_a_measurement_is_kept_for_like_arguments():
    lanes = []
    f = lw.vmap(lambda x: lanes.append(1) or work(x), chunk_size="auto", memory_budget=10**9)
    f(seeded(16, 1000))
    assert len(lanes) == 3
    f(seeded(16, 1000))
    assert len(lanes) == 4
    f(seeded(16, 500))
    assert len(lanes) == 7


def test_the_default_budget_is_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(chunks, "free_memory", lambda device: 2 * 100_000)
    assert lanes_of_each_call(work, seeded(67, 1000), chunk_size="auto")[2] == 4


def test_free_memory_is_what_the_system_says():
    free = free_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50


def test_peak_memory_is_of_what_is_made_inside():
    x = seeded(4, 1000)
    with PeakMemory() as memory:
        y = x.view(-1)[:2000].mul_(2) + 1
        z = y * 2
        del y
        z.add(1)
    assert memory.peak == 2 * 2000 * 8
    with PeakMemory() as memory:
        lw.vmap(lambda a: a.sin() + 1)(x)
    assert memory.peak == 2 * 4000 * 8


def test_peak_memory_below_other_transforms():
    peaks = []

    def f(x):
        with PeakMemory() as memory:
            out = lw.vmap(lambda a: a.sin() + 1)(x)
        peaks.append(memory.peak)
        return out

    lw.vmap(f)(seeded(2, 4, 1000))
    lw.grad(lambda x: f(x).sum())(seeded(4, 1000))
    assert peaks[0] == 2 * 8000 * 8 and peaks[1] >= 2 * 4000 * 8


def test_auto_under_other_transforms():
    x = seeded(4, 9, 5)
    f = lw.vmap(lambda a: (a**3).sum(), chunk_size="auto", memory_budget=500)
    assert torch.allclose(lw.vmap(f)(x), (x**3).sum(-1))
    assert torch.allclose(lw.grad(lambda x: f(x).sum())(x[0]), 3 * x[0] ** 2)
    assert torch.allclose(lw.jvp(f, (x[0],), (x[0],))[1], 3 * (x[0] ** 3).sum(-1))
    assert torch.allclose(lw.vmap(lw.grad(lambda x: f(x).sum()))(x), 3 * x**2)


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bars(monkeypatch):
    made = []

    class Bar:
        def __init__(self, **options):
            self.options, self.updates, self.closed = options, [], False
            made.append(self)

        def update(self, n):
            self.updates.append(n)

        def close(self):
            self.closed = True

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    return made


def test_a_bar_counts_lanes(bars):
    lw.vmap(torch.sin, chunk_size=3, progress=True)(seeded(7))
    (bar,) = bars
    assert bar.options["total"] == 7 and bar.options["desc"] == "sin"
    assert bar.updates == [3, 3, 1] and bar.closed


def test_a_bar_with_a_text_and_without_chunks(bars):
    lw.vmap(torch.sin, progress="per-sample")(seeded(7))
    assert bars[0].options["desc"] == "per-sample" and bars[0].updates == [7]


def test_only_the_outermost_loop_has_a_bar(bars):
    inner = lw.vmap(torch.sin, chunk_size=2, progress=True)
    lw.vmap(lambda x: lw.jacrev(inner, chunk_size=2, progress=True)(x).sum(), chunk_size=2, progress=True)(seeded(4, 4))
    assert len(bars) == 1 and bars[0].updates == [2, 2]
    inner(seeded(4))
    assert len(bars) == 2


def test_jacobians_have_bars(bars):
    x = seeded(4)
    lw.jacrev(torch.sin, chunk_size=2, progress=True)(x)
    lw.jacfwd(torch.sin, chunk_size=2, progress=True)(x)
    lw.hessian(torch.sum, chunk_size=2, progress=True)(x)
    assert [bar.updates for bar in bars] == [[2, 2]] * 3


def test_a_bar_is_closed_by_an_exception(bars):
    def bad(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lw.vmap(bad, chunk_size=2, progress=True)(seeded(4))
    assert bars[0].closed
    lw.vmap(torch.sin, chunk_size=2, progress=True)(seeded(4))
    assert len(bars) == 2


def test_the_real_bar_writes_to_stderr(capsys):
    lw.vmap(torch.sin, chunk_size=2, progress="lanes")(seeded(4))
    assert "lanes: 100%" in capsys.readouterr().err


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, "some", True])
def test_a_chunk_size_that_makes_no_sense(chunk_size):
    with pytest.raises(ArgumentError, match="vmap: chunk_size should be None or greater than 0"):
        lw.vmap(torch.sin, chunk_size=chunk_size)
    with pytest.raises(ArgumentError, match="jacrev: `chunk_size` should be greater than 0"):
        lw.jacrev(torch.sin, chunk_size=chunk_size)


def test_a_budget_needs_auto():
    with pytest.raises(ArgumentError, match='memory_budget is a number of bytes for chunk_size="auto"'):
        lw.vmap(torch.sin, memory_budget=10**6)


def test_python_values_that_differ_between_chunks():
    xs = torch.tensor([-1.0, -2.0, 3.0, 4.0])
    programs = (lambda x: x if x > 0 else 0.0, lambda x: 3 if x > 0 else 4, lambda x: x > 0 if x > 3 else False)
    for f in programs:
        torch.testing.assert_close(lw.vmap(f, chunk_size=2)(xs), lw.vmap(f)(xs))
    assert lw.vmap(lambda x: 7, chunk_size=2)(xs) == 7
    with pytest.raises(RuntimeError, match="lanes of different chunks return 'n' and 'p'"):
        lw.vmap(lambda x: "p" if x > 0 else "n", chunk_size=2)(xs)


def test_draws_do_without_numpy(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", missing)
    for randomness in ("same", "different"):
        got = lw.vmap(lambda x: x + torch.rand(2), randomness=randomness, chunk_size=2)(torch.zeros(5, 2))
        assert got.unique(dim=0).shape[0] == (1 if randomness == "same" else 5)
