"""Forward rules of reductions, indexing, products, networks, losses and linear algebra."""

import pytest
import torch
import torch.nn.functional as F

from lanewise import jvp
from tests.oracles import assert_same
from tests.rules.tangents import check_tangents

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


X = numbers(3, 4)
Y = numbers(3, 4, seed=1)
V = numbers(4, seed=2)
SQUARE = numbers(3, 3, seed=3) + 2 * torch.eye(3, dtype=D)
IMAGE = numbers(2, 4, 5, 6, seed=4)
ROWS = torch.tensor([2, 0, 2])
LABELS = torch.tensor([1, 3, 0])

REDUCTIONS = {
    "amax amin": (lambda x: x.amax(0) * x.amin((0, 1)), X),
    "cummax": (lambda x: x.cummax(1)[0] * x.cummin(0)[0], X),
    "cumprod": (lambda x: x.cumprod(0) * x.cumprod(1), X),
    "cumsum": (lambda x: x.cumsum(0) * x, X),
    "kthvalue": (lambda x: x.kthvalue(2)[0] * x.kthvalue(1, 0, True)[0].sum(), X),
    "log_softmax": (lambda x: F.log_softmax(x, 0) * F.log_softmax(x, 1), X),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), X),
    "logsumexp": (lambda x: x.logsumexp(0) * x.logsumexp((0, 1)), X),
    "max min": (lambda x: x.max() * x.min() * x.max(0)[0] * x.min(1, True)[0], X),
    "mean": (lambda x: x.mean() * x.mean(0) * x.mean((0, 1), True), X),
    "median mode": (lambda x: x.median(0)[0] * x.mode(0)[0] * x.median() * x.nanmedian(0)[0], X),
    "nansum": (lambda x: x.nansum(0) * x.nansum(), X),
    "norms": (lambda x: torch.stack([torch.linalg.vector_norm(x, p) for p in (0.5, 1, 2, 3, torch.inf)]) ** 2, X),
    "norm of all": (lambda x: torch.ops.aten.norm.Scalar(x, 3) * torch.ops.aten.norm.ScalarOpt_dtype(x, 2, dtype=D), X),
    "norm dims": (lambda x: x.norm(dim=0) * torch.linalg.vector_norm(x, 1, (0, 1), True), X),
    "prod": (lambda x: x.prod() * x.prod(0) * x.prod(1, True), X),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 0.7), X),
    "segment_reduce": (
        lambda x: torch.stack(
            [torch.segment_reduce(x * x, r, lengths=torch.tensor([1, 2]), axis=0) for r in ("sum", "mean")]
        ),
        X,
    ),
    "softmax": (lambda x: F.softmax(x, 0) * F.softmax(x, 1), X),
    "sort topk": (lambda x: x.sort(0)[0] * x.sort(stable=True, dim=1, descending=True)[0] * x.topk(1, 0)[0], X),
    "std var": (lambda x: x.std() * x.var(0) * x.std(1, keepdim=True) * x.var((0, 1), correction=0), X),
    "std_mean": (lambda x: torch.std_mean(x, 0)[0] * torch.var_mean(x, 0)[0] * torch.var_mean(x, 0)[1], X),
    "sum": (lambda x: x.sum() * x.sum(0) * x.sum((0, 1), True), X),
    "trace": (lambda x: x.trace() * x.diagonal().sum(), X),
}

INDEXING = {
    "cat stack": (lambda x, y: torch.cat([x, y, x * y]) * torch.stack([x, y]).sum(), X, Y),
    "embedding": (lambda w: F.embedding(ROWS, w) ** 2, X),
    "embedding_bag": (
        lambda w, f: F.embedding_bag(ROWS, w * w, torch.tensor([0, 2]), mode="sum", per_sample_weights=f),
        X,
        V[:3],
    ),
    "flip roll": (lambda x: x.flip(0) * x.roll(1, 1) * x.rot90(2), X),
    "gather": (lambda x: x.gather(0, ROWS.expand(4, 3).T) * x.take(ROWS).sum() * x.take_along_dim(ROWS[:, None], 1), X),
    "index": (lambda x: x[ROWS] * x[:, 1:][ROWS, 0].sum() * x[x > 0].sum(), X),
    "index_add": (lambda x, y: x.index_add(0, ROWS, y, alpha=2) ** 2, X, Y),
    "index_copy": (lambda x, y: x.index_copy(0, ROWS[:2], y[:2]) ** 2, X, Y),
    "index_fill": (lambda x, v: x.index_fill(0, ROWS, v) * x.index_fill(1, ROWS, 2.0), X, V[0]),
    "index_put": (lambda x, y: x.index_put((ROWS,), y, accumulate=True) * x.index_put((ROWS[:2],), y[0]), X, Y),
    "index_select": (lambda x: x.index_select(1, ROWS) ** 2, X),
    "masked": (lambda x, y: x.masked_scatter(Y > 0, y) * x.masked_select(X > 0).sum(), X, Y),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0) ** 2, X),
    "pad modes": (lambda x: F.pad(x[None], (1, 2), "reflect") ** 2 + F.pad(x[None], (1, 2), "replicate") ** 2, X),
    "put": (lambda x, v: x.put(ROWS[:2], v[:2], accumulate=True) ** 2, X, V),
    "repeat": (lambda x: x.repeat(2, 1) ** 2, X),
    "scatter": (
        lambda x, y: x.scatter(0, ROWS[None], y) * x.scatter(0, ROWS[None], 2.0) * x.scatter_add(0, ROWS[None], y),
        X,
        Y[:1, :3],
    ),
    "slice_scatter": (
        lambda x, y: (
            torch.slice_scatter(x, y[:1], 0, 1, 2) * torch.select_scatter(x, y[0], 0, 1) * x.diagonal_scatter(y[0, :3])
        ),
        X,
        Y,
    ),
    "triangles": (lambda x: x.tril() * x + x.triu(1) ** 2 + torch.diag_embed(x)[0, :3], X),
    "unfold": (lambda x: x.unfold(1, 2, 1) ** 2, X),
    "views": (lambda x: x.t().unsqueeze(0).expand(2, 4, 3).permute(2, 0, 1).reshape(-1) ** 2, X),
}

PRODUCTS = {
    "addbmm": (
        lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2),
        numbers(3, 2),
        numbers(2, 3, 4),
        numbers(2, 4, 2),
    ),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2) * c, V[:1], X, Y.T),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=2), V[:3], X, V),
    "addr": (lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=2), X, V[:3], V),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=2), numbers(2, 3, 2), numbers(2, 3, 4), numbers(2, 4, 2)),
    "bilinear": (F.bilinear, X, Y, numbers(2, 4, 4)),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), IMAGE, numbers(2, 4, 3, 2) / 5, V[:2]),
    "conv strided groups": (lambda x, w: F.conv2d(x, w, stride=2, groups=2) ** 2, IMAGE, numbers(2, 2, 2, 2)),
    "conv transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2) ** 2, IMAGE[:1], numbers(4, 1, 2, 2)),
    "dot": (lambda a, b: torch.dot(a, b) * torch.vdot(a, b), V, V + 1),
    "linear": (lambda x, w, b: F.linear(x, w, b) * F.linear(x[0], w), X, Y, V[:3]),
    "matmul": (lambda a, b: (a @ b.T) @ (a @ b.T), X, Y),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[numbers(1, 2, 3, 4)] * 3),
    "attention mask": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m),
        *[numbers(1, 2, 3, 4)] * 2,
        numbers(3, 3),
    ),
}

NETWORKS = {
    "adaptive pools": (lambda x: F.adaptive_avg_pool2d(x, 2) ** 2 * F.adaptive_max_pool2d(x, 2), IMAGE),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2) ** 2, IMAGE),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), IMAGE, V, V),
    "batch_norm eval": (lambda x, w: F.batch_norm(x, V, V * V, w), IMAGE, V),
    "dropout": (lambda x: torch.manual_seed(0) and F.dropout(x * x, 0.5), X),
    "fft": (lambda x: torch.fft.rfft(x).abs() * torch.fft.irfft(torch.fft.rfft(x), 4).sum(), X),
    "fold": (lambda x: F.unfold(x, 2) ** 2, IMAGE),
    "glu": (F.glu, X),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, V, V),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), IMAGE, V),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") ** 2 + F.interpolate(x, scale_factor=2),
        IMAGE,
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), X, V, V),
    "layer_norm bare": (lambda x: F.layer_norm(x, (3, 4)), X),
    "max_pool": (lambda x: F.max_pool2d(x, 2) ** 2 * F.max_pool2d(x, 3, 1, 1)[:, :, ::2, ::2][:, :, :2], IMAGE),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2) ** 2, IMAGE),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), X, V),
}

LOSSES = {
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), V), X, Y),
    "bce logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=V), X, Y),
    "cdist": (torch.cdist, X, Y),
    "cdist p": (lambda x, y: torch.cdist(x, y, 3.0), X, Y),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS, V.abs(), label_smoothing=0.1), X),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.7) + F.smooth_l1_loss(x, y, beta=0.8), X, Y),
    "kl_div": (lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"), X, Y),
    "mse": (lambda x, y: F.mse_loss(x, y) * F.mse_loss(x, y, reduction="sum"), X, Y),
    "multi_margin": (lambda x: F.multi_margin_loss(x, LABELS, p=2, margin=0.7), X),
    "nll": (lambda x: F.nll_loss(x, LABELS, reduction="sum") ** 2, X),
    "pdist": (lambda x: F.pdist(x) * F.pdist(x, 3.0), X),
}

LINALG = {
    "cholesky": (lambda a: torch.linalg.cholesky(a @ a.T), SQUARE),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(a.tril()), SQUARE),
    "det": (lambda a: torch.linalg.det(a) * torch.linalg.slogdet(a)[1], SQUARE),
    "eigh": (lambda a: torch.linalg.eigh(a + a.T)[0], SQUARE),
    "inv": (torch.linalg.inv, SQUARE),
    "matrix_exp": (torch.linalg.matrix_exp, SQUARE / 4),
    "solve": (torch.linalg.solve, SQUARE, X),
    "solve right": (lambda a, b: torch.linalg.solve(a, b.T, left=False), SQUARE, X),
    "solve vector": (torch.linalg.solve, SQUARE, V[:3]),
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), SQUARE, X),
    "svdvals": (torch.linalg.svdvals, X),
}

FIRST_ORDER = {
    "ctc": (lambda x: F.ctc_loss(F.log_softmax(x, 2), torch.tensor([[1, 2]]), (5,), (2,)), numbers(5, 1, 4)),
    "multilabel_margin": (lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, 3, -1, 0]] * 3)), X),
    "scatter_reduce": (lambda x, y: x.scatter_reduce(0, ROWS[None], y[:1, :3], "prod", include_self=False), X, Y),
    "segment max": (lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([1, 2]), axis=0), X),
}

# torch 2.11 has no gradient of aminmax.
(REDUCTIONS if torch.__version__ >= (2, 12) else FIRST_ORDER)["aminmax"] = (lambda x: x.aminmax(dim=0)[1].sin(), X)

ALL = {**REDUCTIONS, **INDEXING, **PRODUCTS, **NETWORKS, **LOSSES, **LINALG}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_twice(case):
    check_tangents(*case)


@pytest.mark.parametrize("case", FIRST_ORDER.values(), ids=FIRST_ORDER.keys())
def test_once(case):
    check_tangents(*case, order=1)


def test_ties_share():
    x, t = torch.tensor([1.0, 3.0, 3.0], dtype=D), torch.tensor([1.0, 2.0, 4.0], dtype=D)
    for f in (torch.amax, torch.max, lambda x: torch.linalg.vector_norm(x, torch.inf)):
        assert_same(jvp(lambda x, f=f: f(x), (x,), (t,))[1], torch.tensor(3.0, dtype=D))
    assert_same(jvp(lambda x: x.max(0)[0], (x,), (t,))[1], t[x.max(0)[1]])


def test_distances_of_equal_points():
    x, t = torch.ones(2, 3, dtype=D), torch.ones(2, 3, dtype=D)
    assert_same(jvp(lambda x: torch.cdist(x, x.clone()), (x,), (t,))[1], torch.zeros(2, 2, dtype=D))
    assert_same(jvp(torch.linalg.vector_norm, (0 * x,), (t,))[1], torch.zeros((), dtype=D))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_logsumexp_of_nothing(shape):
    x = torch.zeros(shape, dtype=D)
    out, tangent = jvp(lambda x: x.logsumexp(0), (x,), (x,))
    assert torch.equal(out, x.logsumexp(0))
    assert torch.equal(tangent, torch.zeros_like(out))
