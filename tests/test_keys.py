"""`lanewise.random`: known answers, equality with a loop bit for bit, distributions, derivatives, messages."""

import math

import pytest
import torch
from scipy import stats

from lanewise import grad, jacfwd, jvp, random, vmap
from lanewise._rules.philox import philox, philox_words
from lanewise.errors import ArgumentError

D = torch.float64
# Counter, key and output of philox4x32-10, from the known answers published with Random123.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
LOGITS = torch.tensor([0.3, -1.0, 2.0, -math.inf])
SAMPLERS = {
    "bits": lambda k: random.bits(k, (3, 2)),
    "split": lambda k: random.split(k, 5),
    "fold_in": lambda k: random.fold_in(k, 2**40 + 3),
    "uniform": lambda k: random.uniform(k, (7,), -2.0, 3.0),
    "uniform double": lambda k: random.uniform(k, (2, 3), dtype=D),
    "uniform half": lambda k: random.uniform(k, (7,), dtype=torch.float16),
    "normal": lambda k: random.normal(k, (9,), 1.0, 2.0),
    "normal one": random.normal,
    "normal double": lambda k: random.normal(k, (9,), dtype=D),
    "normal brain": lambda k: random.normal(k, (9,), dtype=torch.bfloat16),
    "truncated_normal": lambda k: random.truncated_normal(k, -0.5, 2.0, (9,)),
    "exponential": lambda k: random.exponential(k, (9,), 3.0),
    "gumbel": lambda k: random.gumbel(k, (9,)),
    "laplace": lambda k: random.laplace(k, (9,)),
    "logistic": lambda k: random.logistic(k, (9,)),
    "cauchy": lambda k: random.cauchy(k, (9,)),
    "bernoulli": lambda k: random.bernoulli(k, torch.tensor([0.1, 0.5, 0.9])),
    "randint": lambda k: random.randint(k, (9,), -3, 10),
    "randint int32": lambda k: random.randint(k, None, torch.tensor([0, 5]), 2**20, dtype=torch.int32),
    "permutation": lambda k: random.permutation(k, 9),
    "permutation of a tensor": lambda k: random.permutation(k, torch.arange(12).reshape(3, 4), 1),
    "categorical": lambda k: random.categorical(k, LOGITS, shape=(4,)),
    "nothing": lambda k: random.normal(k, (0, 3)),
}


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter, key, want):
    assert philox(torch.tensor(key), torch.tensor(counter)).tolist() == want


def by_hand(counter, key):
    """Philox in Python's whole numbers."""
    mask = 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & mask,
            first >> 32 ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    return counter


def test_streams_of_words():
    key = torch.tensor([123456789, 0xFEDCBA98])
    want = [word for block in range(3) for word in by_hand([block, 0, 7, 0], key.tolist())]
    assert philox_words(key, 7, 10).tolist() == want[:10]
    many = philox_words(key, 0, 150_001)
    assert many.shape == (150_001,) and many[131_072:131_076].tolist() == by_hand([32_768, 0, 0, 0], key.tolist())
    assert random.bits(key, (150_000,)).equal(many[:-1])


@pytest.mark.parametrize("name", SAMPLERS)
def test_lanes_draw_what_iterations_draw(name):
    """Bit for bit, however the lanes are split, and two deep."""
    f = SAMPLERS[name]
    keys = random.split(random.key(3), 6)
    want = torch.stack([f(key) for key in keys])
    assert want.dtype == f(keys[0]).dtype
    for chunk_size in (None, 1, 4):
        assert torch.equal(vmap(f, chunk_size=chunk_size)(keys), want)
    assert torch.equal(vmap(vmap(f))(keys.view(2, 3, 2)), want.view(2, 3, *want.shape[1:]))
    assert torch.equal(vmap(f, in_dims=1)(keys.t()), want)
    assert torch.equal(
        vmap(lambda key, _: f(key), in_dims=(None, 0))(keys[0], torch.zeros(2)), torch.stack([want[0]] * 2)
    )
    assert vmap(f)(keys[:0]).shape == (0, *want.shape[1:])


def test_lanes_draw_what_iterations_draw_inside_derivatives():
    def loss(w, key):
        return (random.normal(key, (3,), w, w.exp()) * random.uniform(random.fold_in(key, 1), (3,), 0.0, w)).sum()

    keys, w = random.split(random.key(0), 5), torch.tensor([0.1, 0.5, 0.7], dtype=D)

    def plain(key):
        leaf = w.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf, key), leaf)[0]

    want = torch.stack([plain(key) for key in keys])
    assert torch.equal(vmap(grad(loss), in_dims=(None, 0))(w, keys), want)
    assert torch.equal(vmap(grad(loss), in_dims=(None, 0), chunk_size=2)(w, keys), want)
    total = grad(lambda w: vmap(loss, in_dims=(None, 0))(w, keys).sum())(w)
    torch.testing.assert_close(total, want.sum(0))
    forward = vmap(lambda key: jvp(lambda w: loss(w, key), (w,), (w,))[1])(keys)
    torch.testing.assert_close(forward, want @ w)
    torch.testing.assert_close(vmap(lambda key: jacfwd(loss)(w, key))(keys), want)


PARAMETERS = {
    "uniform": (lambda k, a, b: random.uniform(k, (50,), a, b), 0.2, 1.5),
    "normal": (lambda k, a, b: random.normal(k, (50,), a, b), 0.2, 1.5),
    "truncated_normal": (lambda k, a, b: random.truncated_normal(k, a, b, (50,)), -0.2, 1.5),
    "exponential": (lambda k, a, b: random.exponential(k, (50,), a) * b, 0.7, 1.0),
    "gumbel": (lambda k, a, b: random.gumbel(k, (50,), a, b), 0.2, 1.5),
    "laplace": (lambda k, a, b: random.laplace(k, (50,), a, b), 0.2, 1.5),
    "logistic": (lambda k, a, b: random.logistic(k, (50,), a, b), 0.2, 1.5),
    "cauchy": (lambda k, a, b: random.cauchy(k, (50,), a, b), 0.2, 1.5),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_derivatives_in_parameters(name):
    f, a, b = PARAMETERS[name]
    a, b, key, step = torch.tensor(a, dtype=D), torch.tensor(b, dtype=D), random.key(5), 1e-6
    for number in (0, 1):
        move = [step * (number == k) for k in (0, 1)]
        want = (f(key, a + move[0], b + move[1]) - f(key, a - move[0], b - move[1])) / (2 * step)
        got = jacfwd(f, argnums=number + 1)(key, a, b)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            grad(lambda *x: f(key, *x).sum(), argnums=number)(a, b), want.sum(), rtol=1e-5, atol=1e-5
        )


DISTRIBUTIONS = {
    "uniform": (lambda k, n: random.uniform(k, n, -2.0, 3.0), stats.uniform(-2, 5)),
    "uniform double": (lambda k, n: random.uniform(k, n, dtype=D), stats.uniform()),
    "normal": (lambda k, n: random.normal(k, n, 1.0, 2.0), stats.norm(1, 2)),
    "normal double": (lambda k, n: random.normal(k, n, dtype=D), stats.norm()),
    "truncated_normal": (lambda k, n: random.truncated_normal(k, -0.5, 2.0, n), stats.truncnorm(-0.5, 2.0)),
    "exponential": (lambda k, n: random.exponential(k, n, 3.0), stats.expon(scale=1 / 3)),
    "gumbel": (lambda k, n: random.gumbel(k, n, 1.0, 2.0), stats.gumbel_r(1, 2)),
    "laplace": (lambda k, n: random.laplace(k, n, 1.0, 2.0), stats.laplace(1, 2)),
    "logistic": (lambda k, n: random.logistic(k, n, 1.0, 2.0), stats.logistic(1, 2)),
    "cauchy": (lambda k, n: random.cauchy(k, n, 1.0, 2.0), stats.cauchy(1, 2)),
}


@pytest.mark.parametrize("lanes", [1, 2000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name, lanes):
    """Kolmogorov-Smirnov, of one stream and across the first numbers of many keys."""
    draw, want = DISTRIBUTIONS[name]
    keys = random.split(random.key(11), lanes)
    numbers = vmap(lambda key: draw(key, (40_000 // lanes,)))(keys).double().flatten()
    assert stats.kstest(numbers.numpy(), want.cdf).pvalue > 1e-3
    assert bool(numbers.isfinite().all())


def chi_square(counts, probabilities):
    weights = probabilities.double()
    return stats.chisquare(counts.numpy(), (weights / weights.sum() * counts.sum()).numpy()).pvalue


def test_discrete_distributions():
    keys = random.split(random.key(2), 30_000)
    faces = vmap(lambda key: random.randint(key, (), -1, 5))(keys)
    assert chi_square((faces + 1).bincount(minlength=6), torch.full((6,), 1 / 6)) > 1e-3
    drawn = vmap(lambda key: random.categorical(key, LOGITS))(keys)
    assert not (drawn == 3).any()
    assert chi_square(drawn.bincount(minlength=3), LOGITS.softmax(0)[:3]) > 1e-3
    heads = vmap(lambda key: random.bernoulli(key, 0.3))(keys)
    assert stats.binomtest(int(heads.sum()), 30_000, 0.3).pvalue > 1e-3
    orders = vmap(lambda key: random.permutation(key, 4))(keys)
    numbers = (orders * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
    assert numbers.shape == (24,) and chi_square(numbers, torch.full((24,), 1 / 24)) > 1e-3


def test_uses_of_a_key_are_independent():
    """Draws, children and folded keys share no words; neighbours are not correlated."""
    key = random.key(0)
    words = [random.bits(key, (4000,)), random.split(key, 2000).flatten()]
    words.append(torch.stack([random.fold_in(key, n) for n in range(500)]).flatten())
    assert torch.cat(words).unique().numel() > 8990
    seeds = torch.stack([random.uniform(random.key(seed), (200,)) for seed in range(200)])
    for a, b in ((seeds[:-1], seeds[1:]), (seeds[:, :-1], seeds[:, 1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02


def test_keys():
    assert random.key(-1).equal(random.key(2**64 - 1)) and random.key(-1).tolist() == [0xFFFFFFFF] * 2
    assert random.key(2**32 + 5).tolist() == [5, 1]
    assert random.split(random.key(0), 5)[:2].equal(random.split(random.key(0)))
    assert random.fold_in(random.key(0), torch.tensor(7)).equal(random.fold_in(random.key(0), 7))
    numbers = torch.tensor([0, -1, 2**40])
    folded = vmap(random.fold_in, in_dims=(None, 0))(random.key(1), numbers)
    assert folded.equal(torch.stack([random.fold_in(random.key(1), n) for n in numbers.tolist()]))


def test_edges():
    """Where the words are all zeros or all ones, no number is out of range or infinite."""
    key = random.key(0)
    for dtype in (torch.float32, D, torch.float16, torch.bfloat16):
        x = random.uniform(key, (100_000,), dtype=dtype)
        assert x.dtype == dtype and x.min() >= 0 and x.max() < 1
        assert random.normal(key, (100_000,), dtype=dtype).isfinite().all()
    assert random.randint(key, (1000,), 0, 2**32).max() >= 2**31
    assert random.randint(key, (5,), 3, 4).tolist() == [3] * 5
    assert random.bernoulli(key, 0.0, (1000,)).sum() == 0 and random.bernoulli(key, 1.0, (1000,)).all()


def test_within_torch_compile():
    f = lambda key: random.normal(key, (3,)) + random.uniform(random.split(key)[0], (3,))
    assert torch.equal(torch.compile(f, backend="eager")(random.key(0)), f(random.key(0)))


KEY = random.key(0)
MISTAKES = {
    "key(1.5)": (lambda: random.key(1.5), "key: seed is a whole number of 64 bits, got 1.5", "key(0)"),
    "uniform": (
        lambda: random.uniform(random.split(KEY, 3), (2,)),
        "uniform: key is two words, int64 [2], got torch.int64 [3, 2]",
        "vmap(lambda k: uniform(k, ...))(keys)  # one key for each lane",
    ),
    "no key": (lambda: random.normal((3,)), "normal: key is two words, int64 [2], got (3,)", "key = random.key(0)"),
    "shape": (lambda: random.normal(KEY, 3), "normal: shape is a tuple of sizes, got 3", "normal(key, (3, 4))"),
    "negative": (lambda: random.bits(KEY, (-1,)), "bits: shape is a tuple of sizes, got (-1,)", "bits(key, (3, 4))"),
    "dtype": (
        lambda: random.normal(KEY, (2,), dtype=torch.int64),
        "normal: dtype is a floating one, got torch.int64",
        "dtype=torch.float32",
    ),
    "parameter": (
        lambda: random.normal(KEY, (2,), torch.zeros(3)),
        "normal: a parameter [3] does not broadcast to shape [2]",
        "normal(key, (3,), ...)",
    ),
    "num": (lambda: random.split(KEY, -1), "split: num is how many keys to make, got -1", "split(key, 2)"),
    "data": (
        lambda: random.fold_in(KEY, torch.zeros(2)),
        "fold_in: data is one whole number, got torch.float32 [2]",
        "vmap(fold_in, in_dims=(None, 0))(key, numbers)  # a key for each of several numbers",
    ),
    "data number": (
        lambda: random.fold_in(KEY, 1.0),
        "fold_in: data is a whole number, got 1.0",
        "fold_in(key, step)",
    ),
    "bounds": (
        lambda: random.randint(KEY, (2,), 3, 3),
        "randint: high must be above low, and at most 2**32 above it, got low=3 and high=3",
        "randint(key, shape, 0, 10)  # numbers from 0 to 9",
    ),
    "bound": (
        lambda: random.randint(KEY, (2,), 0, 3.0),
        "randint: high is a whole number, got 3.0",
        "randint(key, shape, 0, 10)",
    ),
    "order": (
        lambda: random.permutation(KEY, -1),
        "permutation: x is a tensor, or how many numbers to order, got -1",
        "permutation(key, 5)",
    ),
    "order of one": (
        lambda: random.permutation(KEY, torch.tensor(1.0)),
        "permutation: x has no dim to order along",
        "permutation(key, x[None])",
    ),
    "logits": (
        lambda: random.categorical(KEY, torch.arange(3)),
        "categorical: logits is a floating tensor with a dim for the alternatives, got torch.int64 [3]",
        "categorical(key, torch.log(probabilities))",
    ),
    "logits dim": (
        lambda: random.categorical(KEY, torch.zeros(3), 1),
        "categorical: logits [3] has no dim 1",
        "dim=-1",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name):
    make, text, instead = MISTAKES[name]
    with pytest.raises(ArgumentError) as caught:
        make()
    first, line, write, code = str(caught.value).split("\n")
    assert (
        first == text and line.startswith(f"  at {__file__}:") and write == "Write instead:" and code == f"  {instead}"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda x: random.key(int(x[0] > 0)),
        lambda x: random.key(-int(x[0] * 1e15)),
        lambda x: random.fold_in(KEY, int(x[0] * 100)),
        lambda x: random.normal(random.key(x[1].long().item()), (3,)),
        lambda x: random.split(KEY, 2 + int(x[0] > 0))[1],
    ],
)
def test_numbers_that_differ_from_lane_to_lane(make):
    xs = torch.tensor([[1.0, 3.0], [-2.0, 4.0], [0.5, 3.0]])
    want = torch.stack([make(x) for x in xs])
    assert torch.equal(vmap(make)(xs), want)
    assert torch.equal(vmap(vmap(make))(xs[:, None])[:, 0], want)
