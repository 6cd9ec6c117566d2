"""Third derivatives along a direction, forward and reverse mixed, against differences of plain autograd's gradients."""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from lanewise import grad, jvp, vmap
from tests.oracles import assert_same

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def apart(*shape: int) -> torch.Tensor:
    """Numbers far enough apart, and from 0, that no step of the differences changes their order."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return ((order - count / 2 + 0.5) * (3 / count)).reshape(shape).to(D)


X, W, V, TARGET = numbers(4, 3), numbers(3, seed=1) + 2, numbers(3, seed=2), numbers(4, 3, seed=3)
POSITIVE = X.abs() + 0.3
SQUARE = numbers(3, 3, seed=4) + 2 * torch.eye(3, dtype=D)
SPD = SQUARE @ SQUARE.mT + torch.eye(3, dtype=D)
SYMMETRIC = SPD + torch.diag(torch.tensor([0.0, 3.0, 7.0], dtype=D))
IMAGE = numbers(1, 2, 5, 5, seed=5)
KERNEL = numbers(2, 2, 3, 3, seed=6)
GRID = numbers(1, 3, 3, 2, seed=7).tanh() * 0.7
ZEROS = torch.tensor([[0.7, 0.0, -1.2, 0.4], [0.0, 1.1, 0.0, 2.0], [0.3, -0.5, 0.9, 1.3]], dtype=D)
LABELS = torch.tensor([1, 0, 2, 1])
ROWS = torch.tensor([[2, 0], [1, 2]])
FAR = torch.tensor([[0.0, -1000.0, 3.0], [800.0, 2.0, 1.0], [5.0, 5.0, 5.0], [0.1, 0.2, -900.0]], dtype=D)


def symmetric(f):
    return lambda a: f((a + a.mT) / 2)


ACTIVATIONS = {
    name: (getattr(F, name), apart(4, 3))
    for name in (
        "celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid",
        "mish", "relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink",
    )
    if name != "glu"
} | {
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "glu": (lambda x: F.glu(x, 0), X),
    "celu alpha": (lambda x: F.celu(x, 0.7), apart(4, 3)),
    "elu alpha": (lambda x: F.elu(x, 0.7), apart(4, 3)),
    "prelu": (F.prelu, apart(4, 3), torch.tensor(0.3, dtype=D)),
    "sigmoid tanh": (lambda x: x.sigmoid() * x.tanh(), X),
    "softplus beta": (lambda x: F.softplus(x, 2, 3), X),
    "sinc": (torch.sinc, X),
    "erfinv": (lambda x: (x.tanh() * 0.9).erfinv(), X),
}  # fmt: skip

POINTWISE = {
    "atan2": (torch.atan2, X, TARGET),
    "hypot": (torch.hypot, X, TARGET),
    "logaddexp": (torch.logaddexp, X, TARGET),
    "logaddexp far": (torch.logaddexp, FAR, FAR.flip(0)),
    "logaddexp equal": (torch.logaddexp, X, X.clone()),
    "logaddexp2": (torch.logaddexp2, X, TARGET),
    "pow 1": (lambda x: x**1, ZEROS),
    "pow 2": (lambda x: x**2, ZEROS),
    "pow 3": (lambda x: x**3, ZEROS),
    "pow 4.0": (lambda x: x**4.0, ZEROS),
    "pow of tensors": (torch.pow, POSITIVE, TARGET),
    "pow with a tensor": (lambda x: x ** torch.tensor([0.0, 1, 2, 3], dtype=D), ZEROS),
    "pow near 0 of tensors": (torch.pow, POSITIVE, torch.tensor([0.0, 1.0, 2.0], dtype=D)),
    "pow of a number": (lambda x: 2**x, X),
    "xlogy": (torch.xlogy, X, POSITIVE),
    "reciprocal rsqrt": (lambda x: x.reciprocal() * x.rsqrt(), POSITIVE),
    "lerp": (torch.lerp, X, TARGET, X.flip(0)),
    "addcdiv": (torch.addcdiv, X, TARGET, POSITIVE),
    "remainder": (lambda a, b: torch.remainder(a, b) * a, apart(4, 3), POSITIVE + 3),
}

REDUCTIONS = {
    "cumprod": (lambda x: x.cumprod(1), ZEROS),
    "cumsum": (lambda x: x.cumsum(1) ** 3, X),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), X),
    "logcumsumexp far": (lambda x: x.logcumsumexp(1), FAR),
    "logsumexp": (lambda x: x.logsumexp(1), X),
    "logsumexp far": (lambda x: x.logsumexp(1), FAR),
    "log_softmax": (lambda x: F.log_softmax(x, 1), X),
    "log_softmax far": (lambda x: F.log_softmax(x, 1), FAR),
    "softmax": (lambda x: F.softmax(x, 1), X),
    "softmin": (lambda x: F.softmin(x, 0), X),
    "prod": (lambda x: x.prod(1), ZEROS),
    "prod all": (lambda x: x.prod(), ZEROS[:2]),
    "std": (lambda x: x.std(1), X),
    "std_mean": (lambda x: torch.cat(torch.std_mean(x, 0)), X),
    "var": (lambda x: x.var(1) ** 2, X),
    "var correction": (lambda x: x.var((0, 1), correction=0) ** 2, X),
    "norm": (lambda x: x.norm(dim=1), X),
    "norm 1": (lambda x: torch.linalg.vector_norm(x, 1, 1) ** 3, apart(4, 3)),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 1), apart(4, 3)),
    "norm 0.5": (lambda x: torch.linalg.vector_norm(x, 0.5, 1), apart(4, 3).sign() + apart(4, 3)),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, torch.inf, 1) ** 3, apart(4, 3) + 0.06),
    "normalize": (lambda x: F.normalize(x, dim=1), X),
    "cosine_similarity": (F.cosine_similarity, X, TARGET),
    "cdist": (torch.cdist, X, TARGET),
    "renorm": (lambda x: x.renorm(2, 0, 0.5), X),
    "amax": (lambda x: x.amax(1) ** 3, apart(4, 3)),
    "sort": (lambda x: x.sort(1)[0] ** 3 * W, apart(4, 3)),
    "scatter_reduce": (lambda x, s: x.scatter_reduce(1, ROWS[:, :1].expand(2, 3), s, "prod"), X[:2], TARGET[:2]),
    "scatter_reduce mean": (lambda x, s: x.scatter_reduce(1, ROWS, s, "mean") ** 3, X[:2], TARGET[:2, :2]),
    "scatter_reduce amax": (lambda x, s: x.scatter_reduce(1, ROWS, s, "amax") ** 3, apart(2, 3), apart(2, 2) + 0.01),
    "segment_reduce max": (lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([3, 1])) ** 3, apart(4)),
    "segment_reduce": (lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([3, 1]), axis=0), ZEROS.mT),
}

NETWORK = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, [3], w, b), X, W, V),
    "layer_norm without weights": (lambda x: F.layer_norm(x, [4, 3]), X),
    "layer_norm negative eps": (lambda x: F.layer_norm(x, [3], eps=-0.01), X * 3),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), numbers(2, 4, 3), numbers(4)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), X, W, V),
    "batch_norm eval": (lambda x, w: F.batch_norm(x, V, W, w) ** 3, X, W),
    "instance_norm": (lambda x: F.instance_norm(x), IMAGE),
    "rms_norm": (lambda x, w: F.rms_norm(x, [3], w), X, W),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), IMAGE),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), X, X[:, :1] + 2),
    "conv2d": (lambda x, k: F.conv2d(x, k, padding=1) ** 2, IMAGE, KERNEL),
    "conv_transpose2d": (lambda x, k: F.conv_transpose2d(x, k, stride=2), IMAGE, KERNEL),
    "linear bilinear": (lambda x, w: F.bilinear(x, x, w), X, numbers(2, 3, 3)),
    "attention": (F.scaled_dot_product_attention, *(numbers(1, 2, 3, 4, seed=i) for i in range(3))),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2) ** 3, IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2) ** 3, apart(1, 2, 5, 5)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2) ** 3, apart(1, 2, 5, 5)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 3, 2), IMAGE.abs() + 0.1),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic") ** 3, IMAGE),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), IMAGE, GRID),
    "grid_sample bicubic": (lambda x, g: F.grid_sample(x, g, "bicubic", align_corners=True), IMAGE, GRID),
    "embedding_bag": (lambda w: F.embedding_bag(ROWS, w, mode="mean") ** 3, X),
    "embedding_bag weighted": (
        lambda w, s: F.embedding_bag(ROWS, w, mode="sum", per_sample_weights=s) ** 2,
        X,
        numbers(2, 2),
    ),
    "embedding_bag max": (lambda w: F.embedding_bag(ROWS, w, mode="max") ** 3, apart(4, 3)),
}

LOSSES = {
    "mse": (F.mse_loss, X, TARGET),
    "l1": (lambda x, y: F.l1_loss(x, y) ** 3, X, TARGET),
    "smooth_l1": (F.smooth_l1_loss, X, TARGET + 0.3),
    "huber": (F.huber_loss, X, TARGET + 0.3),
    "bce": (lambda x, y: F.binary_cross_entropy(x, y), X.sigmoid(), TARGET.sigmoid()),
    "bce logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=W), X, TARGET.sigmoid()),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1, weight=W), X),
    "cross_entropy of odds": (lambda x, y: F.cross_entropy(x, y.softmax(1)), X, TARGET),
    "nll": (lambda x: F.nll_loss(x, LABELS) ** 3, X),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="sum"), X, POSITIVE),
    "poisson_nll": (lambda x, y: F.poisson_nll_loss(x, y, full=True), X, POSITIVE + 2),
    "gaussian_nll": (F.gaussian_nll_loss, X, TARGET, POSITIVE),
    "cosine_embedding": (lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([1, -1, 1, -1])), X, TARGET),
    "triplet": (lambda a, p, n: F.triplet_margin_loss(a, p, n, 5), X, TARGET, X.flip(0)),
    "soft_margin": (lambda x: F.soft_margin_loss(x, TARGET.sign()), X),
    "multi_margin": (lambda x: F.multi_margin_loss(x, LABELS, 2), X),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, -1, 0]] * 4)) ** 3, X),
    "ctc": (
        lambda x: F.ctc_loss(x.log_softmax(2), torch.tensor([[1, 2], [2, 2]]), [5, 4], [2, 2], reduction="none"),
        numbers(5, 2, 3),
    ),
}

LINALG = {
    "det": (torch.linalg.det, SQUARE),
    "det of batches": (torch.linalg.det, torch.stack([SQUARE, SPD])[:, None]),
    "slogdet": (lambda a: torch.linalg.slogdet(a)[1], SQUARE),
    "inv": (torch.linalg.inv, SQUARE),
    "solve": (torch.linalg.solve, SQUARE, X.mT),
    "solve of batches": (torch.linalg.solve, torch.stack([SQUARE, SPD])[:, None], numbers(2, 1, 3, 2)),
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), SQUARE, X.mT),
    "cholesky": (symmetric(torch.linalg.cholesky), SPD),
    "cholesky_solve": (lambda b, a: torch.cholesky_solve(b, a.tril()), X.mT, SQUARE),
    "qr": (lambda a: torch.cat(torch.linalg.qr(a)), X),
    "svd": (lambda a: torch.linalg.svd(a, full_matrices=False)[1], X),
    "svdvals": (torch.linalg.svdvals, X),
    "nuclear norm": (lambda a: torch.linalg.matrix_norm(a, "nuc"), X),
    "eigh": (symmetric(lambda a: torch.linalg.eigh(a)[1].abs()), SYMMETRIC),
    "eigvalsh": (symmetric(torch.linalg.eigvalsh), SYMMETRIC),
    "eig": (lambda a: torch.linalg.eig(a)[1].abs(), SYMMETRIC + X[:3] * 0.1),
    "pinv": (torch.linalg.pinv, X),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b)[0], X, TARGET),
    "lu": (lambda a: torch.cat(torch.linalg.lu(a)[1:]), SQUARE),
    "matrix_exp": (torch.linalg.matrix_exp, SQUARE * 0.3),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), SQUARE),
    "householder": (torch.linalg.householder_product, X * 0.5, V),
    "cross": (lambda a, b: torch.linalg.cross(a, b) ** 2, X, TARGET),
}

if torch.__version__ >= (2, 13):
    CHUNKS = importlib.import_module("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions
    LOSSES["cross_entropy in chunks"] = (
        lambda x, w: F.linear_cross_entropy(x, w, LABELS, options=CHUNKS(batch_chunk_size=2)),
        X,
        numbers(3, 3),
    )
if torch.__version__ < (2, 12):  # it has no derivatives of grid_sample's backward
    NETWORK = {name: row for name, row in NETWORK.items() if not name.startswith("grid_sample")}

CASES = ACTIVATIONS | POINTWISE | REDUCTIONS | NETWORK | LOSSES | LINALG


def weighted(out):
    return (out * torch.linspace(0.4, 1.6, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()


def differences(f, args, tangents):
    """The second derivative of plain autograd's gradient along the tangents, over five points."""
    h = 3e-3
    total = [torch.zeros_like(t) for t in args]
    for step, factor in ((-2, -1), (-1, 16), (0, -30), (1, 16), (2, -1)):
        moved = [(x + step * h * t).requires_grad_() for x, t in zip(args, tangents, strict=True)]
        found = torch.autograd.grad(weighted(f(*moved)), moved, allow_unused=True, materialize_grads=True)
        total = [a + b * (factor / (12 * h * h)) for a, b in zip(total, found, strict=True)]
    return total


@pytest.mark.parametrize("name", CASES)
def test_as_differences(name):
    f, *args = CASES[name]
    every = tuple(range(len(args)))
    tangents = tuple(numbers(*t.shape, seed=20 + n) for n, t in enumerate(args))
    want = differences(f, args, tangents)
    scale = 1 + max(t.abs().max().item() for t in want)
    along = sum((w * t).sum() for w, t in zip(want, tangents, strict=True))

    def loss(*xs):
        return weighted(f(*xs))

    def slope(g, tangents=tangents):
        return lambda *xs: jvp(g, xs, tangents)[1]

    def pulled(g, tangents=tangents):
        return grad(lambda *xs: sum((a * b).sum() for a, b in zip(g(*xs), tangents, strict=True)), every)

    def close(got, want, what):
        for g, w in zip(got, want, strict=True):
            assert (g - w).abs().max() < 1e-5 * scale, f"{what}: {(g - w).abs().max():.2g} of {scale:.2g}"

    gradient = grad(loss, every)
    close(pulled(pulled(gradient))(*args), want, "grad(grad(grad))")
    close(slope(pulled(gradient))(*args), want, "jvp(grad(grad))")
    close(pulled(slope(gradient))(*args), want, "grad(jvp(grad))")
    close(pulled(grad(slope(loss), every))(*args), want, "grad(grad(jvp))")
    close(slope(slope(gradient))(*args), want, "jvp(jvp(grad))")
    close(slope(grad(slope(loss), every))(*args), want, "jvp(grad(jvp))")
    close(grad(slope(slope(loss)), every)(*args), want, "grad(jvp(jvp))")
    close([slope(slope(slope(loss)))(*args)], [along], "jvp(jvp(jvp))")

    twice = [tuple(torch.stack([x, x]) for x in given) for given in (args, tangents, want)]
    for way, g in (("jvp(jvp(grad))", slope(slope(gradient))), ("grad(grad(grad))", pulled(pulled(gradient)))):
        got = vmap(g)(*twice[0])
        close(got, twice[2], f"vmap({way})")
        assert_same([g[0] for g in got], [g[1] for g in got])
    gradient = grad(lambda *xs: vmap(loss)(*xs).sum(), every)
    close(pulled(pulled(gradient, twice[1]), twice[1])(*twice[0]), twice[2], "grad(grad(grad(vmap)))")
    close(slope(slope(gradient, twice[1]), twice[1])(*twice[0]), twice[2], "jvp(jvp(grad(vmap)))")


RANK_1 = torch.tensor([[1.0, 2, 3], [2, 4, 6], [3, 6, 9]], dtype=D)
SINGULAR = {
    "rank 2": RANK_1 + torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=D),
    "rank 2, a pivot of rounding errors": torch.outer(V, W) + torch.outer(W, TARGET[0]),
    "rank 1": RANK_1,
    "rank 1, pivots of rounding errors": torch.outer(V, W),
    "rank 0": RANK_1 * 0,
    "regular": SQUARE,
    "rows of other sizes": SQUARE * torch.tensor([[1e4], [1.0], [1e-9]], dtype=D),
}


def expanded(a):
    """The determinant [3, 3] -> [] along the first row."""
    minors = [a[1:][:, [j for j in range(3) if j != i]] for i in range(3)]
    return sum((-1) ** i * a[0, i] * (m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]) for i, m in enumerate(minors))


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_determinant(name, order):
    a, t = SINGULAR[name], numbers(3, 3, seed=9)
    ways = {
        "jvp": lambda f: lambda x: jvp(f, (x,), (t,))[1],
        "grad": lambda f: lambda x: (grad(f)(x) * t).sum(),
    }
    for nested in itertools.product(ways, repeat=order):
        if nested == ("grad",):
            continue  # torch's own
        got, want = torch.linalg.det, expanded
        for way in nested:
            got, want = ways[way](got), ways[way](want)
        for g in (got(a), vmap(got)(torch.stack([a, a]))[1]):
            assert (g - want(a)).abs() < 1e-6 * (1 + want(a).abs()), nested


def test_small_rows_are_not_taken_for_singular():
    a, t = torch.diag(torch.tensor([1e10, 1e-10], dtype=D)), torch.diag(torch.tensor([1.0, 0.0], dtype=D))
    assert_same(jvp(torch.linalg.det, (a,), (t,))[1], torch.tensor(1e-10, dtype=D))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_logarithms_of_sums_where_nothing_has_been_added_yet(order):
    x, t = torch.tensor([-torch.inf, -torch.inf, 1.0, 2.0], dtype=D), numbers(4)

    def along(f, order):
        return f if order == 0 else along(lambda x: jvp(f, (x,), (t,))[1], order - 1)

    assert_same(along(lambda x: x.logcumsumexp(0)[3], order)(x), along(lambda x: x.exp().sum().log(), order)(x))
