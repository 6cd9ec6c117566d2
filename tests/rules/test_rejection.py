"""Gamma, Dirichlet, Poisson and binomial numbers with parameters of each lane: distributions, edges, derivatives."""

import numpy as np
import pytest
import torch
from scipy import stats

from lanewise import grad, jacfwd, jvp, linearize, vmap
from lanewise.errors import RandomnessError

D = torch.float64


def drawn(f, *parameters, lanes=400, count=100):
    """`count` numbers in each of `lanes` lanes, all with the same parameters."""
    given = [torch.full((lanes, count), float(parameter), dtype=D) for parameter in parameters]
    return vmap(f, randomness="different")(*given).flatten()


def chi_square(numbers, want):
    """Counts between quantiles, or of each number where there are few, against the distribution."""
    edges = np.unique([want.ppf(k / 40) for k in range(1, 40)])
    chances = np.diff(np.concatenate([[0], want.cdf(edges), [1]]))
    counts = np.bincount(np.searchsorted(edges, numbers.numpy()), minlength=len(edges) + 1)
    kept = chances * len(numbers) > 5
    return stats.chisquare(counts[kept], chances[kept] / chances[kept].sum() * counts[kept].sum()).pvalue


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 2.5, 40.0])
def test_gamma(shape):
    assert stats.kstest(drawn(torch._standard_gamma, shape).numpy(), stats.gamma(shape).cdf).pvalue > 1e-3


@pytest.mark.parametrize("rate", [0.3, 3.0, 9.9, 10.0, 12.0, 50.0, 1000.0])
def test_poisson(rate):
    assert chi_square(drawn(torch.poisson, rate), stats.poisson(rate)) > 1e-3


@pytest.mark.parametrize(
    ("count", "p"),
    [(5, 0.3), (20, 0.5), (20, 0.9), (100, 0.05), (100, 0.1), (100, 0.2), (100, 0.7), (1000, 0.5), (10**6, 1e-6)],
)
def test_binomial(count, p):
    assert chi_square(drawn(torch.binomial, count, p), stats.binom(count, p)) > 1e-3


def test_dirichlet():
    shapes = torch.tensor([0.5, 2.0, 7.0], dtype=D).expand(4000, 3)
    out = vmap(torch._sample_dirichlet, randomness="different")(shapes)
    torch.testing.assert_close(out.sum(-1), torch.ones(4000, dtype=D))
    assert stats.kstest(out[:, 0].numpy(), stats.beta(0.5, 9).cdf).pvalue > 1e-3


def test_edges():
    run = lambda f, *parameters: vmap(f, randomness="different")(
        *[torch.tensor(p, dtype=D) for p in parameters]
    ).tolist()
    assert run(torch._standard_gamma, [0.0]) == [0.0]
    assert run(torch.poisson, [0.0]) == [0.0]
    assert run(torch.binomial, [0.0, 5.0, 5.0], [0.5, 0.0, 1.0]) == [0.0, 0.0, 5.0]
    with pytest.raises(RuntimeError, match="rates >= 0"):
        run(torch.poisson, [-1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_shapes_that_broadcast(dtype):
    counts, odds = torch.full((3,), 20.0, dtype=dtype), torch.rand(3, 2, 4).to(dtype)
    out = vmap(torch.binomial, randomness="different")(counts, odds)
    assert (out.shape, out.dtype) == ((3, 2, 4), dtype)
    assert vmap(torch.poisson, randomness="different")(odds[:0]).shape == (0, 2, 4)


def test_chunks_and_generators():
    rates = torch.rand(7, 3, dtype=D) * 30
    for f in (
        torch.poisson,
        torch._standard_gamma,
        torch._sample_dirichlet,
        lambda x: torch.binomial(x.round(), x / 30),
    ):
        torch.manual_seed(1)
        want = vmap(lambda x, f=f: (f(x), torch.rand(2)), randomness="different")(rates)
        for chunk_size in (1, 3):
            torch.manual_seed(1)
            got = vmap(lambda x, f=f: (f(x), torch.rand(2)), randomness="different", chunk_size=chunk_size)(rates)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    generator = torch.Generator().manual_seed(3)
    first = vmap(lambda x: torch.poisson(x, generator), randomness="different")(rates)
    generator.manual_seed(3)
    assert torch.equal(vmap(lambda x: torch.poisson(x, generator), randomness="different")(rates), first)


def test_nested():
    rates = torch.full((3, 4, 50), 4.0)
    out = vmap(vmap(torch.poisson, randomness="different"), randomness="different")(rates)
    assert len({tuple(row.tolist()) for row in out.flatten(0, 1)}) == 12
    out = vmap(vmap(torch.poisson, randomness="different"), randomness="same")(rates)
    assert len({tuple(row.tolist()) for row in out.flatten(0, 1)}) == 4
    assert torch.equal(out[0], out[1])
    with pytest.raises(RandomnessError):
        vmap(vmap(torch.poisson, randomness="different"))(rates)


def test_derivatives_outside_and_inside_are_those_of_torch():
    shapes = torch.rand(5, 3, dtype=D) * 3 + 0.2

    def both(f, loss):
        torch.manual_seed(0)
        inside = vmap(grad(lambda x: loss(f(x))), randomness="different")(shapes)
        torch.manual_seed(0)
        leaf = shapes.clone().requires_grad_()
        out = vmap(f, randomness="different")(leaf)
        vmap(loss)(out).sum().backward()
        torch.testing.assert_close(inside, leaf.grad)
        return out.detach(), leaf.grad

    out, slope = both(torch._standard_gamma, lambda y: y.sin().sum())
    torch.testing.assert_close(slope, out.cos() * torch._standard_gamma_grad(shapes, out))
    both(lambda x: torch.distributions.Dirichlet(x).rsample(), lambda y: (y * torch.arange(3.0)).sin().sum())
    _, slope = both(torch.poisson, lambda y: y.sum())
    assert not slope.any()


def test_no_second_derivative():
    """torch has none either, and says so."""
    shapes = (torch.rand(5, 3, dtype=D) + 0.2).requires_grad_()
    out = vmap(torch._standard_gamma, randomness="different")(shapes)
    (slope,) = torch.autograd.grad(out.square().sum(), shapes, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(slope.sum(), shapes)


td = torch.distributions
FORWARD = {
    "Beta": lambda p: td.Beta(p[0], p[1]),
    "Dirichlet": td.Dirichlet,
    "Dirichlet of rows": lambda p: td.Dirichlet(torch.stack([p, p + 1])),
    "transformed": lambda p: td.TransformedDistribution(td.Beta(p[1], p[2]), [td.transforms.ExpTransform()]),
    "Gamma": lambda p: td.Gamma(p[0], p[1]),
    "StudentT": lambda p: td.StudentT(p[0], p[1], p[2]),
    "FisherSnedecor": lambda p: td.FisherSnedecor(p[0], p[1]),
    "InverseGamma": lambda p: td.InverseGamma(p[0], p[1]),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode(name):
    """Tangents are the rows of what torch's backward gives."""
    p, t = torch.tensor([1.3, 2.1, 0.7], dtype=D), torch.tensor([0.5, -1.0, 2.0], dtype=D)

    def f(p):
        torch.manual_seed(3)
        return FORWARD[name](p).rsample()

    want = torch.autograd.functional.jacobian(f, p)
    torch.testing.assert_close(jvp(f, (p,), (t,)), (f(p), want @ t))
    torch.testing.assert_close(linearize(f, p)[1](t), want @ t)
    torch.testing.assert_close(jacfwd(f, randomness="same")(p), want)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_of_lanes(name):
    """<w, Jv> = <J'w, v> in each lane."""
    lanes = torch.rand(4, 3, dtype=D) + 0.5
    draw = lambda p: FORWARD[name](p).rsample().sin().sum()
    torch.manual_seed(3)
    pushed = vmap(lambda p: jvp(draw, (p,), (p,))[1], randomness="different")(lanes)
    torch.manual_seed(3)
    pulled = vmap(lambda p: grad(draw)(p) @ p, randomness="different")(lanes)
    torch.testing.assert_close(pushed, pulled)
