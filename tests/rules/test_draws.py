"""What layers and distributions draw under each kind of randomness, in chunks, nested and in derivatives."""

import warnings

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lanewise import grad, vmap
from lanewise.errors import RandomnessError

D = torch.float64
B = 5


def ones(*shape):
    return torch.ones(B, *shape)


def numbers(*shape):
    return torch.randn(B, *shape, generator=torch.Generator().manual_seed(0))


def recurrent(kind, **options):
    torch.manual_seed(0)
    return kind(3, 4, 2, dropout=0.5, **options)


torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
DECODER = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
LSTM, GRU, RNN = recurrent(nn.LSTM), recurrent(nn.GRU), recurrent(nn.RNN, bidirectional=True)

LAYERS = {
    "Dropout": (nn.Dropout(), ones(4, 50)),
    "Dropout in place": (lambda x: nn.Dropout(inplace=True)(x * 1), ones(4, 50)),
    "Dropout of a transpose": (lambda x: F.dropout(x.t()), ones(4, 50)),
    "Dropout1d": (nn.Dropout1d(), ones(4, 30, 5)),
    "Dropout1d, one image": (nn.Dropout1d(), ones(30, 5)),
    "Dropout2d": (nn.Dropout2d(), ones(4, 16, 3, 3)),
    "Dropout2d in place": (lambda x: nn.Dropout2d(inplace=True)(x * 1), ones(4, 16, 3, 3)),
    "Dropout3d": (nn.Dropout3d(), ones(4, 16, 2, 2, 2)),
    "AlphaDropout": (nn.AlphaDropout(), ones(4, 50)),
    "AlphaDropout in place": (lambda x: nn.AlphaDropout(inplace=True)(x * 1), ones(4, 50)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(), ones(4, 16, 5)),
    "RReLU": (nn.RReLU(), -ones(4, 50)),
    "gumbel_softmax": (F.gumbel_softmax, ones(4, 50)),
    "gumbel_softmax, hard": (lambda x: F.gumbel_softmax(x, hard=True), ones(40, 50)),
    "FractionalMaxPool2d": (nn.FractionalMaxPool2d(2, output_size=3), numbers(2, 3, 9, 9)),
    "FractionalMaxPool3d": (nn.FractionalMaxPool3d(2, output_size=3), numbers(2, 3, 9, 9, 9)),
    "LSTM": (lambda x: LSTM(x)[0], numbers(5, 2, 3)),
    "LSTM, packed": (lambda x: LSTM(pack_padded_sequence(x, [5, 3]))[1][0], numbers(5, 2, 3)),
    "GRU": (lambda x: GRU(x)[0], numbers(5, 2, 3)),
    "RNN": (lambda x: RNN(x)[0], numbers(5, 2, 3)),
    "attention": (lambda x: ATTENTION(x, x, x)[0], numbers(2, 5, 8)),
    "attention without weights": (lambda x: ATTENTION(x, x, x, need_weights=False)[0], numbers(2, 5, 8)),
    "scaled_dot_product": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), numbers(2, 5, 8)),
    "encoder": (ENCODER, numbers(2, 5, 8)),
    "decoder": (lambda x: DECODER(x, x), numbers(2, 5, 8)),
    "kaiming": (lambda x: nn.init.kaiming_uniform_(torch.empty(3, 4)), ones(1)),
    "xavier": (lambda x: nn.init.xavier_normal_(torch.empty(3, 4)), ones(1)),
    "orthogonal": (lambda x: nn.init.orthogonal_(torch.empty(3, 4)), ones(1)),
    "sparse": (lambda x: nn.init.sparse_(torch.empty(8, 4), 0.5), ones(1)),
    "trunc_normal": (lambda x: nn.init.trunc_normal_(torch.empty(3, 4)), ones(1)),
    "layer made inside": (lambda x: nn.Linear(3, 4).weight, ones(1)),
    "a slice in place": (lambda x: (x * 1)[:, ::2].normal_(), ones(20, 30)),
    "a transpose in place": (lambda x: (x * 1).t().uniform_(), ones(20, 30)),
    "rows in another order": (lambda x: x[torch.randperm(50)], ones(50) * torch.arange(50.0)),
    "svd_lowrank": (lambda x: torch.svd_lowrank(x, 3)[1], numbers(6, 5)),
}

# Loops in Python that draw until all are done: how often depends on the lanes of the chunk.
UNTIL_DONE = ("trunc_normal", "VonMises")


def drawn(f, x, seed=1, **options):
    torch.manual_seed(seed)
    return vmap(f, **options)(x)


def close(a, b):
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, randomness):
    f, x = LAYERS[name]
    out = drawn(f, x, randomness=randomness)
    for chunk_size in (1, 3) if name not in UNTIL_DONE else ():
        close(drawn(f, x, randomness=randomness, chunk_size=chunk_size), out)
    torch.manual_seed(1)
    one = f(x[0])
    assert (one.shape, one.dtype) == (out.shape[1:], out.dtype)
    like_inputs = torch.equal(x[0], x[1])
    if like_inputs:
        assert torch.equal(out[0], out[1]) == (randomness == "same")
    if randomness == "same":
        close(out[0], one)
    for outer in ("different", "same"):
        pairs = drawn(vmap(f, randomness=randomness), torch.stack([x, x]), randomness=outer)
        if like_inputs:
            assert torch.equal(pairs[0, 0], pairs[0, 1]) == (randomness == "same")
        # (Up to rounding: kernels may compute with rows by several, and round the rest in another way.)
        assert torch.allclose(pairs[0], pairs[1], rtol=1e-5, atol=1e-6) == (outer == "same")


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_refused_without_a_choice(name):
    f, x = LAYERS[name]
    pairs = torch.stack([x, x])
    with pytest.raises(RandomnessError):
        vmap(f)(x)
    with pytest.raises(RandomnessError):
        vmap(vmap(f), randomness="different")(pairs)
    with pytest.raises(RandomnessError):
        vmap(vmap(f, randomness="different"))(pairs)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("name", [name for name in LAYERS if "place" not in name and LAYERS[name][1].dim() > 2])
def test_gradients_of_layers(name, randomness):
    """The same numbers are drawn with gradients taken inside and outside."""
    f, x = LAYERS[name]
    torch.manual_seed(1)
    inside = vmap(grad(lambda x: f(x).sum()), randomness=randomness)(x)
    torch.manual_seed(1)
    outside = grad(lambda x: vmap(f, randomness=randomness)(x).sum())(x)
    close(inside, outside)


GENERATOR = torch.Generator().manual_seed(0)
SCALE = torch.rand(3, dtype=D, generator=GENERATOR) * 2 + 0.5
PLACE = torch.randn(3, dtype=D, generator=GENERATOR) * 0.1
ODDS = torch.rand(3, dtype=D, generator=GENERATOR) * 0.8 + 0.1
ROOT = torch.eye(3, dtype=D) + 0.3 * torch.randn(3, 3, dtype=D, generator=GENERATOR).tril(-1)
HALF = torch.tensor(0.5, dtype=D)
DISTRIBUTIONS = {
    "Bernoulli": (td.Bernoulli, ODDS),
    "Beta": (td.Beta, SCALE, SCALE + 0.1),
    "Binomial": (lambda p: td.Binomial(5, p), ODDS),
    "Categorical": (lambda p: td.Categorical(probs=p), ODDS),
    "Categorical, logits": (lambda a: td.Categorical(logits=a), PLACE),
    "Cauchy": (td.Cauchy, PLACE, SCALE),
    "Chi2": (td.Chi2, SCALE),
    "ContinuousBernoulli": (td.ContinuousBernoulli, ODDS),
    "Dirichlet": (td.Dirichlet, SCALE),
    "Exponential": (td.Exponential, SCALE),
    "FisherSnedecor": (lambda a, b: td.FisherSnedecor(a, b + 4), SCALE, SCALE),
    "Gamma": (td.Gamma, SCALE, SCALE + 0.1),
    "Geometric": (td.Geometric, ODDS),
    "Gumbel": (td.Gumbel, PLACE, SCALE),
    "HalfCauchy": (td.HalfCauchy, SCALE),
    "HalfNormal": (td.HalfNormal, SCALE),
    "Independent": (lambda a, b: td.Independent(td.Normal(a, b), 1), PLACE, SCALE),
    "InverseGamma": (lambda a, b: td.InverseGamma(a + 2, b), SCALE, SCALE),
    "Kumaraswamy": (td.Kumaraswamy, SCALE, SCALE),
    "Laplace": (td.Laplace, PLACE, SCALE),
    "LKJCholesky": (lambda a: td.LKJCholesky(3, a[0]), SCALE),
    "LogNormal": (td.LogNormal, PLACE, SCALE),
    "LogisticNormal": (td.LogisticNormal, PLACE, SCALE),
    "LowRankMultivariateNormal": (
        lambda a, root, b: td.LowRankMultivariateNormal(a, root[:, :1], b),
        PLACE,
        ROOT,
        SCALE,
    ),
    "MixtureSameFamily": (lambda a, b: td.MixtureSameFamily(td.Categorical(logits=a), td.Normal(a, b)), PLACE, SCALE),
    "Multinomial": (lambda p: td.Multinomial(4, p), ODDS),
    "MultivariateNormal": (lambda a, root: td.MultivariateNormal(a, scale_tril=root), PLACE, ROOT),
    "NegativeBinomial": (lambda p: td.NegativeBinomial(5, p * 0.5), ODDS),
    "Normal": (td.Normal, PLACE, SCALE),
    "OneHotCategorical": (lambda a: td.OneHotCategorical(logits=a), PLACE),
    "OneHotCategoricalStraightThrough": (lambda a: td.OneHotCategoricalStraightThrough(logits=a), PLACE),
    "Pareto": (lambda a, b: td.Pareto(a, b + 3), SCALE, SCALE),
    "Poisson": (td.Poisson, SCALE),
    "RelaxedBernoulli": (lambda p: td.RelaxedBernoulli(HALF, p), ODDS),
    "RelaxedOneHotCategorical": (lambda a: td.RelaxedOneHotCategorical(HALF, logits=a), PLACE),
    "StudentT": (lambda a, b: td.StudentT(b + 3, a, b), PLACE, SCALE),
    "TransformedDistribution": (
        lambda a, b: td.TransformedDistribution(td.Normal(a, b), [td.TanhTransform()]),
        PLACE,
        SCALE,
    ),
    "Uniform": (lambda a, b: td.Uniform(a, a + b), PLACE, SCALE),
    "VonMises": (td.VonMises, PLACE, SCALE),
    "Weibull": (td.Weibull, SCALE, SCALE),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    """Lanes are independent, do not depend on the chunks, and follow the distribution that torch draws from."""
    make, *parameters = DISTRIBUTIONS[name]
    lanes = [p.expand(200, *p.shape) for p in parameters]

    def f(*parameters):
        return make(*parameters).sample((20,))

    torch.manual_seed(3)
    out = vmap(f, randomness="different")(*lanes)
    if name not in UNTIL_DONE:
        torch.manual_seed(3)
        torch.testing.assert_close(vmap(f, randomness="different", chunk_size=64)(*lanes), out)
    assert not torch.equal(out[0], out[1])
    want = make(*parameters).sample((4000,))
    assert (out.shape[2:], out.dtype) == (want.shape[1:], want.dtype)
    for place in (0, -1):
        one, other = (t.reshape(4000, -1)[:, place].double() for t in (out.flatten(0, 1), want))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert stats.ks_2samp(one, other).pvalue > 1e-3
    with pytest.raises(RandomnessError):
        vmap(f)(*lanes)
    if make(*parameters).has_rsample:
        slopes = vmap(grad(lambda *p: make(*p).rsample().sum()), randomness="different")(*lanes)
        assert slopes.isfinite().all()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_from_outside(name):
    """A distribution whose parameters are captured draws for each lane, or once for all."""
    make, *parameters = DISTRIBUTIONS[name]
    one = make(*parameters)
    out = vmap(lambda x: one.sample((20,)) + x, randomness="different")(torch.zeros(3))
    assert len({tuple(lane.flatten().tolist()) for lane in out}) == 3
    out = vmap(lambda x: one.sample((20,)) + x, randomness="same")(torch.zeros(3))
    assert torch.equal(out[0], out[1])
    with pytest.raises(RandomnessError):
        vmap(lambda x: one.sample((20,)) + x)(torch.zeros(3))


LOCATED = ["Cauchy", "Gumbel", "Laplace", "LogNormal", "MultivariateNormal", "Normal", "Uniform"]


@pytest.mark.parametrize("name", LOCATED)
def test_gradients_of_draws(name):
    """By differences, with the same numbers drawn on either side."""
    make, *parameters = DISTRIBUTIONS[name]
    lanes = [torch.stack([p, p * 1.1]) for p in parameters]

    def total(*lanes):
        torch.manual_seed(0)
        return vmap(lambda *p: make(*p).rsample((4,)).sin(), randomness="different")(*lanes).sum()

    for place, lane in enumerate(lanes):
        direction = torch.ones_like(lane) if lane.dim() < 3 else torch.ones_like(lane).tril()
        moved = [[*lanes[:place], lane + step * direction, *lanes[place + 1 :]] for step in (1e-6, -1e-6)]
        want = (total(*moved[0]) - total(*moved[1])) / 2e-6
        got = (grad(total, argnums=place)(*lanes) * direction).sum()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_oldest_factory():
    x = torch.arange(6.0, dtype=D).reshape(3, 2)
    f = lambda x: (x.new(2).copy_(x), x.new((1.0, 2.0)), x.new(torch.Size([2, 2])).zero_(), x.new().shape, x.new(x) * 2)
    got, want = vmap(f)(x), [f(lane) for lane in x]
    for k in (0, 1, 2, 4):
        stacked = torch.stack([lane[k] for lane in want])
        assert torch.equal(got[k], stacked) and got[k].dtype == stacked.dtype
    assert got[3] == (0,)
