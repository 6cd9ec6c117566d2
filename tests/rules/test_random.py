"""Random operations under each randomness, with mapped, captured and no operands, in chunks and nested."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lanewise import grad, vmap
from tests.oracles import assert_same

LANES = 6


def odds(*shape):
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)


# name -> function of a lane x [4] in (0, 1)
DRAWS = {
    "rand": lambda x: torch.rand(3) + 0 * x.sum(),
    "randn": lambda x: torch.randn(3, 2) + 0 * x.sum(),
    "randint": lambda x: torch.randint(1, 9, (5,)) + 0 * x.sum(),
    "randperm": lambda x: torch.randperm(5) + 0 * x.sum(),
    "normal sized": lambda x: torch.normal(1.0, 2.0, (3,)) + 0 * x.sum(),
    "rand out": lambda x: torch.rand(3, out=torch.empty(3)) + 0 * x.sum(),
    "randn out": lambda x: torch.randn(3, out=torch.empty(3)) + 0 * x.sum(),
    "randint out": lambda x: torch.randint(1, 99, (5,), out=torch.empty(5)) + 0 * x.sum(),
    "randint below out": lambda x: torch.randint(99, (5,), out=torch.empty(5)) + 0 * x.sum(),
    "randperm out": lambda x: torch.randperm(9, out=torch.empty(9, dtype=torch.int64)) + 0 * x.sum(),
    "normal out": lambda x: torch.normal(1.0, 2.0, (3,), out=torch.empty(3)) + 0 * x.sum(),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "normal mean": lambda x: torch.normal(x, 2.0),
    "normal std": lambda x: torch.normal(1.0, x),
    "normal both": lambda x: torch.normal(x, x[0]),
    "uniform_": lambda x: (0 * x).uniform_(1, 2),
    "normal_": lambda x: (0 * x).normal_(),
    "exponential_": lambda x: (0 * x).exponential_(2.0),
    "cauchy_": lambda x: (0 * x).cauchy_(),
    "log_normal_": lambda x: (0 * x).log_normal_(),
    "geometric_": lambda x: (0 * x).geometric_(0.3),
    "random_": lambda x: (0 * x).random_(3, 900),
    "random_ all": lambda x: (0 * x).random_(),
    "bernoulli_": lambda x: (0 * x.repeat(8)).bernoulli_(0.4),
    "bernoulli_ by tensor": lambda x: (0 * x.repeat(8)).bernoulli_(x.repeat(8)),
    "bernoulli": lambda x: torch.bernoulli(x.repeat(8)),
    "bernoulli p": lambda x: torch.bernoulli(x.repeat(8), 0.3),
    "multinomial": lambda x: torch.multinomial(x.repeat(6), 12),
    "multinomial again": lambda x: torch.multinomial(x, 20, True),
    "poisson": lambda x: torch.poisson(x * 30),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 40.0), x),
    "gamma": lambda x: torch._standard_gamma(x),
    "dirichlet": lambda x: torch._sample_dirichlet(x),
    "dropout": lambda x: F.dropout(x.repeat(8), 0.4),
    "dropout_": lambda x: F.dropout(x.repeat(8), 0.4, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x.repeat(8), 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x.repeat(8), 0.4, True),
    "feature_dropout": lambda x: torch.feature_dropout(x.repeat(9, 8, 1), 0.4, True),
    "rrelu": lambda x: F.rrelu(x - 0.3, training=True),
    "rrelu_": lambda x: F.rrelu(x - 0.3, training=True, inplace=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
}
CAPTURED = {name: f for name, f in DRAWS.items() if name != "gumbel"}
pytestmark = pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")


def drawn(f, xs, **options):
    torch.manual_seed(5)
    return vmap(f, **options)(xs)


def lanes_differ(out):
    return all(not torch.equal(out[0], lane) for lane in out[1:])


@pytest.mark.parametrize("name", DRAWS)
def test_error_is_the_default(name):
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode") as caught:
        vmap(DRAWS[name])(odds(LANES, 4))
    assert 'randomness="different"' in str(caught.value)


EVALUATED = {
    "rrelu": nn.RReLU().eval(),
    "rrelu_": lambda x: F.rrelu(x * 1, inplace=True),
    "rrelu of one slope": lambda x: F.rrelu(x, 0.3, 0.3),
    "dropout": nn.Dropout().eval(),
    "dropout by channel": nn.Dropout1d().eval(),
    "alpha_dropout": nn.AlphaDropout().eval(),
    "feature_alpha_dropout": nn.FeatureAlphaDropout().eval(),
    "lstm": nn.LSTM(4, 3, 2, dropout=0.5).eval().requires_grad_(False),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_nothing_is_drawn_in_evaluation(name):
    f = lambda x: EVALUATED[name](x)[0] if name == "lstm" else EVALUATED[name](x)
    xs = odds(LANES, 2, 4) - 0.4
    assert_same(vmap(f)(xs), torch.stack([f(x) for x in xs]))
    leaf = xs.clone().requires_grad_()
    want = torch.autograd.grad(torch.stack([f(x) for x in leaf]).square().sum(), leaf)[0]
    assert_same(vmap(grad(lambda x: f(x).square().sum()))(xs), want)


@pytest.mark.parametrize("name", DRAWS)
def test_different(name):
    """Lanes differ, the shape is a lane's, and the numbers do not depend on the chunks or on where the lanes lie."""
    f = DRAWS[name]
    xs = odds(LANES, 4)
    out = drawn(f, xs, randomness="different")
    torch.manual_seed(0)
    assert out.shape[1:] == f(xs[0]).shape
    assert out.dtype == f(xs[0]).dtype
    assert lanes_differ(out)
    for size in (1, 4, 6):
        assert torch.equal(out, drawn(f, xs, randomness="different", chunk_size=size))
    assert torch.equal(out, drawn(f, xs.t().contiguous(), randomness="different", in_dims=1))


@pytest.mark.parametrize("name", DRAWS)
def test_same(name):
    """Every lane gets what an example alone would draw."""
    f = DRAWS[name]
    xs = odds(LANES, 4)
    out = drawn(f, xs, randomness="same")
    for x, lane in zip(xs, out, strict=True):
        torch.manual_seed(5)
        torch.testing.assert_close(lane, f(x))
    assert torch.equal(out, drawn(f, xs, randomness="same", chunk_size=4))


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_operands(name):
    """A random operation on tensors without lanes follows the mode too."""
    x = odds(4)
    f = CAPTURED[name]
    carried = torch.zeros(LANES)
    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        vmap(lambda z: f(x) + z)(carried)
    same = drawn(lambda z: f(x) + z, carried, randomness="same")
    assert all(torch.equal(same[0], lane) for lane in same)
    torch.manual_seed(5)
    torch.testing.assert_close(same[0], f(x).to(same.dtype))
    if name.endswith("_") or name in ("random_ all", "bernoulli_ by tensor"):
        # Here the target is made from captured tensors alone: torch.zeros_like makes one that has lanes.
        return
    different = drawn(lambda z: f(x) + z, carried, randomness="different")
    assert lanes_differ(different)
    assert torch.equal(different, drawn(lambda z: f(x) + z, carried, randomness="different", chunk_size=4))


def test_plain_target():
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="Cannot ask for different inplace randomness on an unbatched tensor"):
        vmap(lambda z: x.uniform_() + z, randomness="different")(torch.zeros(3))
    out = vmap(lambda z: torch.zeros_like(x).uniform_() + z, randomness="different")(torch.zeros(3))
    assert lanes_differ(out)
    vmap(lambda z: x.uniform_() + z, randomness="same")(torch.zeros(3))
    assert x.any()


@pytest.mark.parametrize("outer", ["different", "same"])
@pytest.mark.parametrize("inner", ["different", "same"])
@pytest.mark.parametrize("name", ["rand", "rand_like", "uniform_", "dropout", "bernoulli p", "normal mean", "randperm"])
def test_nested(name, inner, outer):
    f = DRAWS[name]
    # Lanes with equal values, so that only the draws can differ.
    xs = odds(4).expand(3, 2, 4).contiguous()
    torch.manual_seed(5)
    out = vmap(vmap(f, randomness=inner), randomness=outer)(xs)
    assert torch.equal(out[:, 0], out[:, 1]) == (inner == "same")
    assert torch.equal(out[0], out[1]) == (outer == "same")


def test_an_outer_level_forbids():
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(vmap(lambda x: x + torch.rand(2), randomness="different"))(torch.zeros(2, 3))


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_generators(randomness):
    """A generator of the user's is used, and the default one left alone."""
    before = torch.get_rng_state()
    xs = odds(3, 4)

    def run(seed):
        generator = torch.Generator().manual_seed(seed)

        def f(x):
            numbers = torch.rand(2, generator=generator) + torch.normal(x[:2], 1.0, generator=generator)
            return numbers + (x[:2] * 1).uniform_(generator=generator)

        return vmap(f, randomness=randomness)(xs)

    runs = [run(seed) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(before, torch.get_rng_state())


def test_generators_in_chunks():
    def run(**options):
        generator = torch.Generator().manual_seed(3)

        def f(x):
            first = torch.rand(2, generator=generator)
            return first + (x[:2] * 1).normal_(generator=generator)

        return [vmap(f, **options)(odds(5, 4)) for _ in range(2)]

    for randomness in ("different", "same"):
        once, again = run(randomness=randomness)
        assert not torch.equal(once, again)
        for size in (1, 2, 4):
            for a, b in zip((once, again), run(randomness=randomness, chunk_size=size), strict=True):
                assert torch.equal(a, b)


def test_moments():
    """The draws of lanes with their own parameters have those parameters' moments."""
    p = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    again = drawn(lambda p: torch.multinomial(p, 4000, True), p, randomness="different")
    counts = torch.stack([torch.bincount(lane, minlength=3) for lane in again]) / 4000
    torch.testing.assert_close(counts, p, atol=0.03, rtol=0)
    firsts = drawn(lambda p: torch.multinomial(p, 2), p.repeat(3000, 1), randomness="different")[:, 0]
    share = torch.stack([torch.bincount(firsts[k::2], minlength=3) for k in range(2)]) / 3000
    torch.testing.assert_close(share, p, atol=0.04, rtol=0)
    bernoulli = drawn(lambda p: torch.bernoulli(p.expand(4000, 3)), p, randomness="different")
    torch.testing.assert_close(bernoulli.mean(1), p, atol=0.03, rtol=0)
    poisson = drawn(lambda p: torch.poisson(p.expand(4000, 3) * 5), p, randomness="different")
    torch.testing.assert_close(poisson.mean(1), p * 5, atol=0.2, rtol=0)
    orders = drawn(lambda z: torch.randperm(3) + 0 * z.long(), torch.zeros(3000), randomness="different")
    torch.testing.assert_close(orders.double().mean(0), torch.ones(3, dtype=torch.float64), atol=0.06, rtol=0)


def test_dropout_gradients():
    xs = torch.randn(5, 40, requires_grad=True)
    out = drawn(lambda x: F.dropout(x, 0.5), xs, randomness="different")
    (grad,) = torch.autograd.grad(out.sum(), xs)
    assert torch.equal(grad, torch.where(out == 0, 0.0, 2.0))
    w = torch.ones(40, requires_grad=True)
    out = drawn(lambda z: F.dropout(w, 0.5) + z, torch.zeros(5), randomness="different")
    (grad,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(grad, out.sum(0).detach())


@pytest.mark.parametrize(
    "bad", [torch.tensor([[0.5, -0.1]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[0.5, float("nan")]])]
)
def test_no_distribution(bad):
    with pytest.raises(RuntimeError, match="multinomial"):
        vmap(lambda p: torch.multinomial(p, 1), randomness="different")(bad)


def test_no_lanes():
    for name, f in DRAWS.items():
        out = vmap(f, randomness="different")(torch.zeros(0, 4))
        assert out.shape[1:] == f(odds(4)).shape, name


@pytest.mark.parametrize("name", ["normal mean", "normal std", "normal both", "bernoulli", "poisson"])
def test_draws_have_the_derivative_zero(name):
    f = DRAWS[name]
    xs = odds(3, 4).requires_grad_()
    out = drawn(f, xs, randomness="different")
    assert out.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), xs)
    assert not grad.any()


# --- tensors without numbers ------------------------------------------------------------------------------------------

CAPTURED_META = torch.empty(2, device="meta")
ON_META = {
    "linear": lambda x: nn.Linear(2, 3, device="meta")(x.to("meta")),
    "embedding": lambda x: nn.Embedding(4, 2, device="meta").weight,
    "recurrent": lambda x: nn.LSTM(2, 3, device="meta").weight_ih_l0,
    "transformer": lambda x: nn.TransformerEncoderLayer(4, 2, 8, device="meta").linear1.weight,
    "rand": lambda x: torch.rand(3, device="meta"),
    "randint": lambda x: torch.randint(3, (2,), device="meta"),
    "randperm": lambda x: torch.randperm(3, device="meta"),
    "randn_like": lambda x: torch.randn_like(x, device="meta"),
    "bernoulli": lambda x: torch.bernoulli(x.to("meta")),
    "multinomial": lambda x: torch.multinomial(x.to("meta"), 1),
    "dropout": lambda x: torch.dropout(x.to("meta"), 0.5, True),
    "poisson": lambda x: torch.poisson(x.to("meta")),
    "normal_": lambda x: x.to("meta").normal_(),
    "uniform_": lambda x: torch.empty(2, device="meta").uniform_(),
    "in a branch": lambda x: torch.rand(3, device="meta") if x.sum() > 0 else torch.randn(3, device="meta"),
    "captured": lambda x: CAPTURED_META.normal_() * 1,
}


@pytest.mark.parametrize("randomness", ["error", "different", "same"])
@pytest.mark.parametrize("name", ON_META)
def test_tensors_on_meta_draw_nothing(name, randomness):
    xs = torch.tensor([[1.0, 2.0], [-1.0, -3.0], [0.5, 0.0]])
    want = ON_META[name](xs[0])
    for _ in range(2):
        out = vmap(ON_META[name], randomness=randomness)(xs)
        assert out.is_meta
        assert (out.shape, out.dtype) == ((3, *want.shape), want.dtype)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(lambda x: x + torch.rand(2))(xs)


def test_the_first_context_of_a_device_inside():
    """torch collects once what it is for, which must not be while a transform leads names elsewhere."""
    program = """
import torch
from lanewise import vmap

def f(x):
    with torch.device("meta"):
        made = [torch.empty(2), torch.zeros(2), torch.tensor(1.0), torch.nn.Linear(2, 2).weight]
    assert all(each.is_meta for each in made)
    return x

vmap(f)(torch.zeros(3))
with torch.device("meta"):
    assert torch.empty(2).is_meta
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
