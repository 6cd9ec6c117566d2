"""Draws with parameters of each lane: under `randomness="same"` those of a loop that sets one seed before each example.

And under every kind the same numbers with and without derivatives, chunks and lanes around.
"""

import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F

from lanewise import functionalize, grad, jvp, linearize, vmap
from lanewise._core import missing
from lanewise.errors import RandomnessError, SlowPathWarning
from tests.oracles import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
XS = torch.linspace(0.1, 0.9, 24).reshape(6, 4)
OWN = torch.Generator()


def seed():
    torch.manual_seed(5)
    OWN.manual_seed(5)


def seeded(run, *args):
    seed()
    return run(*args)


def loop(f, xs):
    return torch.stack([seeded(f, x) for x in xs])


def twice(x):
    """Lanes draw more or fewer numbers, then all draw one, and again as many as they need."""
    return torch._standard_gamma(x) + torch.rand(1) * torch._standard_gamma(x + 1)


def in_a_branch(x):
    y = torch._standard_gamma(x) if x[0] > 0.4 else torch.rand(4)
    return y + torch.rand(4)


def until_few(x):
    n = torch.zeros(())
    while torch.poisson(x * 2).sum() > 1 and n < 20:
        n = n + 1
    return n + torch.rand(2)


SAME = {
    "bernoulli": lambda x: torch.bernoulli(x.repeat(8)),
    "bernoulli of a transpose": lambda x: torch.bernoulli(x.view(2, 2).t()),
    "bernoulli, half": lambda x: torch.bernoulli(x.repeat(100).half()),
    "bernoulli, own generator": lambda x: torch.bernoulli(x, generator=OWN) + torch.rand(1, generator=OWN),
    "bernoulli_ by tensor": lambda x: (0 * x.repeat(8)).bernoulli_(x.repeat(8)),
    "bernoulli_ of a transpose": lambda x: (0 * x.view(2, 2)).t().bernoulli_(x.view(2, 2)),
    "bernoulli_, bfloat16": lambda x: (0 * x.repeat(100)).bernoulli_(x.repeat(100).bfloat16()),
    "bernoulli_ by a shared tensor": lambda x: (0 * x.view(2, 2)).t().bernoulli_(torch.tensor([0.2, 0.7])),
    "bernoulli out": lambda x: torch.bernoulli(x.detach(), out=torch.empty(4)),
    "multinomial, one": lambda x: torch.multinomial(x, 1, True),
    "multinomial, all": lambda x: torch.multinomial(x.repeat(6), 24),
    "multinomial, again": lambda x: torch.multinomial(x, 20, True),
    "multinomial of a transpose": lambda x: torch.multinomial(x.view(2, 2).t(), 1),
    "multinomial of rows": lambda x: torch.multinomial(x.view(2, 2), 5, True),
    "poisson": lambda x: torch.poisson(x * 30) + torch.rand(4),
    "poisson, own generator": lambda x: torch.poisson(x * 30, generator=OWN) + torch.rand(4, generator=OWN),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 40.0), x.detach()) + torch.rand(4),
    "rrelu": lambda x: F.rrelu(x - 0.4, training=True) + torch.rand(4),
    "rrelu_": lambda x: F.rrelu(x - 0.4, training=True, inplace=True) + torch.rand(4),
    "randint_like": lambda x: torch.randint_like(x, (x[0] * 50 + 2).long()) + torch.rand(4),
    "Gamma": lambda x: td.Gamma(x + 0.1, x + 0.2).rsample(),
    "Beta": lambda x: td.Beta(x + 0.1, x + 0.2).rsample() + torch.rand(4),
    "Dirichlet": lambda x: td.Dirichlet(x + 0.1).rsample(),
    "Dirichlet of a draw": lambda x: td.Dirichlet(torch._standard_gamma(x) + 0.1).rsample() + torch.rand(4),
    "StudentT": lambda x: td.StudentT(x + 3).rsample(),
    "Categorical": lambda x: td.Categorical(x).sample((5,)),
    "Multinomial": lambda x: td.Multinomial(10, x).sample(),
    "NegativeBinomial": lambda x: td.NegativeBinomial(10, x).sample(),
    "MixtureSameFamily": lambda x: td.MixtureSameFamily(td.Categorical(x), td.Normal(x, x)).sample((7,)),
    "twice": twice,
    "in a branch": in_a_branch,
    "until few": until_few,
}
each = pytest.mark.parametrize("name", SAME)


@each
def test_as_the_loop(name):
    f = SAME[name]
    want = loop(f, XS)
    for options in ({}, {"chunk_size": 4}, {"chunk_size": 1}):
        assert_same(seeded(vmap(f, randomness="same", **options), XS), want)
    assert_same(seeded(lambda: vmap(f, randomness="same", in_dims=1)(XS.t().contiguous())), want)


@each
def test_two_vmaps(name):
    f = SAME[name]
    inner = vmap(f, randomness="same")
    got = seeded(lambda: vmap(inner, randomness="same")(XS.view(2, 3, 4)))
    assert_same(got.flatten(0, 1), loop(f, XS))


@each
def test_three_vmaps(name):
    f = SAME[name]
    inner = vmap(vmap(f, randomness="same"), randomness="same")
    for _ in range(2):
        got = seeded(lambda: vmap(inner, randomness="same")(XS.view(3, 1, 2, 4)))
        assert_same(got.flatten(0, 2), loop(f, XS))


@each
def test_with_derivatives(name):
    f = SAME[name]
    want = loop(f, XS)
    if want.dtype.is_floating_point:
        leaf = XS.clone().requires_grad_()
        assert_same(seeded(lambda: vmap(f, randomness="same")(leaf)).detach(), want)
    assert_same(seeded(lambda: jvp(vmap(f, randomness="same"), (XS,), (XS,)))[0], want)
    assert_same(seeded(lambda: vmap(lambda x: jvp(f, (x,), (x,))[0], randomness="same")(XS)), want)


@pytest.mark.parametrize("name", ["Gamma", "Dirichlet of a draw", "StudentT", "rrelu", "rrelu_", "twice"])
def test_derivatives(name):
    f = SAME[name]
    mapped = vmap(f, randomness="same")
    assert_same(seeded(lambda: jvp(mapped, (XS,), (XS,)))[1], loop(lambda x: jvp(f, (x,), (x,))[1], XS), (1e-4, 1e-5))
    want = loop(grad(lambda x: f(x).square().sum()), XS)
    assert_same(seeded(lambda: grad(lambda xs: mapped(xs).square().sum())(XS)), want, (1e-4, 1e-4))
    assert_same(seeded(lambda: vmap(grad(lambda x: f(x).square().sum()), randomness="same")(XS)), want, (1e-4, 1e-4))


@each
def test_no_lanes(name):
    want = seeded(lambda: SAME[name](XS[0]))
    got = vmap(SAME[name], randomness="same")(XS[:0])
    assert got.shape == (0, *want.shape)
    assert got.dtype == want.dtype


def test_in_a_formula_for_derivatives():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * torch.poisson(x * 30)

    with pytest.raises(RandomnessError) as caught:
        vmap(grad(Noisy.apply), randomness="same")(XS[:, 0])
    said = str(caught.value).splitlines()
    assert said[0] == (
        "vmap: aten::poisson does not currently support same randomness with a batched tensor input here, in a formula "
        "for derivatives or a transform inside: it draws more numbers in some lanes than in others, and the lanes "
        "cannot go on from states of their own"
    )
    assert said[1].endswith("return g * torch.poisson(x * 30)")
    assert said[2:] == [
        "Write instead:",
        '  vmap(f, randomness="different")',
        "  noise = torch.poisson(rate)  # in the function itself, and used in the formula or transform",
    ]


def test_a_warning_says_that_lanes_draw_one_after_the_other(monkeypatch):
    monkeypatch.setattr(missing, "_warned", set())
    with pytest.warns(SlowPathWarning) as caught:
        vmap(torch.poisson, randomness="same")(XS)
    assert [str(warning.message) for warning in caught] == [
        "vmap: There is a performance drop because aten.poisson.default has parameters of each lane under "
        'randomness="same", and all draw from one state: it runs once per lane (6 calls, about 4 us each more than one '
        "batched call)"
    ]


# --- the same numbers with and without derivatives -------------------------------------------------------------------

DIFFERENT = {
    "poisson": lambda x: torch.poisson(x * 30),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 40.0), x.detach()),
    "gamma": lambda x: torch._standard_gamma(x),
    "Gamma": lambda x: td.Gamma(x + 0.1, x + 0.2).rsample(),
    "Beta": lambda x: td.Beta(x + 0.1, x + 0.2).rsample(),
    "Dirichlet": lambda x: td.Dirichlet(x + 0.1).rsample(),
    "StudentT": lambda x: td.StudentT(x + 3).rsample(),
    "NegativeBinomial": lambda x: td.NegativeBinomial(10, x).sample(),
    "bernoulli": lambda x: torch.bernoulli(x),
    "normal": lambda x: torch.normal(x, x),
    "randint_like": lambda x: torch.randint_like(x, 3, 900),
    "randint_like, below a tensor": lambda x: torch.randint_like(x, torch.tensor(900)),
    "rrelu": lambda x: F.rrelu(x - 0.4, training=True),
    "rrelu_": lambda x: F.rrelu(x - 0.4, training=True, inplace=True),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_numbers_are_the_same_ones_with_derivatives(name):
    f = DIFFERENT[name]
    tangent = torch.ones_like(XS)

    def mapped(xs, **options):
        return vmap(f, randomness="different", **options)(xs)

    want = seeded(lambda: mapped(XS))
    others = {
        "jvp(vmap)": lambda: jvp(mapped, (XS,), (tangent,))[0],
        "jvp(vmap) in chunks": lambda: jvp(lambda xs: mapped(xs, chunk_size=4), (XS,), (tangent,))[0],
        "linearize(vmap)": lambda: linearize(mapped, XS)[0],
        "vmap(jvp)": lambda: vmap(lambda x: jvp(f, (x,), (x,))[0], randomness="different", chunk_size=4)(XS),
        "vmap(linearize)": lambda: vmap(lambda x: linearize(f, x)[0], randomness="different")(XS),
        "backward": lambda: mapped(XS.clone().requires_grad_()).detach(),
    }
    for way, run in others.items():
        assert torch.equal(seeded(run), want), way


@pytest.mark.parametrize("name", DIFFERENT)
def test_no_two_lanes_of_two_vmaps_share_numbers(name):
    """In whatever chunks of either."""
    f = DIFFERENT[name]
    xs = XS[:1].expand(6, 40, 4).flatten(1).expand(3, 6, 160).contiguous()

    def mapped(inner, outer):
        return seeded(
            lambda: vmap(vmap(f, randomness="different", chunk_size=inner), randomness="different", chunk_size=outer)(
                xs
            )
        )

    want = mapped(None, None)
    assert want.flatten(0, 1).unique(dim=0).shape[0] == 18
    for inner, outer in ((2, None), (4, 1), (1, 2)):
        assert torch.equal(mapped(inner, outer), want)


def test_torch_has_no_derivative_of_them():
    for f in (lambda x: torch.binomial(torch.full_like(x, 40.0), x), torch._sample_dirichlet):
        mapped = vmap(f, randomness="different")
        with pytest.raises(RuntimeError, match="derivative for aten::.* is not implemented"):
            mapped(XS.clone().requires_grad_()).sum().backward()
        with pytest.raises(RuntimeError, match="derivative for aten::.* is not implemented"):
            jvp(mapped, (XS,), (XS,))


def fake_quantised(x):
    one, lowest, highest, scale = torch.ones(1), torch.tensor(0.0), torch.tensor(1.0), torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int32)
    return x * torch.fused_moving_avg_obs_fake_quant(
        torch.arange(4.0), one.long(), one.long(), lowest, highest, scale, zero, 0.1, 0, 255, -1
    )


# What writes to an argument and returns another tensor.
WRITES_AND_RETURNS = {
    "rrelu": lambda x: F.rrelu(x - 0.4, training=True),
    "batch_norm": lambda x: F.batch_norm(x.view(2, 2), torch.zeros(2), torch.ones(2), training=True),
    "fake quantised": fake_quantised,
}


@pytest.mark.parametrize("name", WRITES_AND_RETURNS)
def test_results_beside_writes(name):
    f = WRITES_AND_RETURNS[name]
    want = seeded(lambda: f(XS[0]))
    assert_same(seeded(lambda: functionalize(f)(XS[0])), want)
    value, push = seeded(lambda: linearize(f, XS[0]))
    assert_same(value, want)
    assert_same(push(XS[0]), seeded(lambda: jvp(f, (XS[0],), (XS[0],)))[1])


def test_the_derivative_of_rrelu_in_place():
    f = WRITES_AND_RETURNS["rrelu"]
    in_place = lambda x: F.rrelu(x - 0.4, training=True, inplace=True)
    assert_same(seeded(lambda: jvp(in_place, (XS[0],), (XS[0],))), seeded(lambda: jvp(f, (XS[0],), (XS[0],))))
