"""Losses and distances, against the loop."""

import pytest
import torch
import torch.nn.functional as F

from lanewise import hessian, jacrev, vmap
from tests.rules.lanes import bools, check, ints, normal

REDUCTIONS = ("none", "mean", "sum")


def unit(*shape):
    return lambda g: torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1


def signs(*shape):
    return lambda g: torch.randint(2, shape, generator=g).to(torch.float64) * 2 - 1


def targets(high, *shape):
    """Classes below `high`, the first one ignored."""

    def make(g):
        target = torch.randint(high, shape, generator=g)
        return torch.where(torch.rand(shape, generator=g) < 0.2, -100, target)

    return make


PAIRS = {
    "mse": (F.mse_loss, normal(2, 3), normal(2, 3)),
    "mse 0-dim": (F.mse_loss, normal(), normal()),
    "l1": (F.l1_loss, normal(2, 3), normal(2, 3)),
    "huber": (lambda x, y, **kw: F.huber_loss(x, y, delta=0.7, **kw), normal(4), normal(4)),
    "smooth_l1": (lambda x, y, **kw: F.smooth_l1_loss(x, y, beta=0.7, **kw), normal(4), normal(4)),
    "soft_margin": (F.soft_margin_loss, normal(4), signs(4)),
    "bce": (F.binary_cross_entropy, unit(2, 3), unit(2, 3)),
    "bce logits": (F.binary_cross_entropy_with_logits, normal(2, 3), unit(2, 3)),
    "kl_div": (lambda x, y, **kw: F.kl_div(x.log(), y, **kw), unit(4), unit(4)),
    "poisson": (F.poisson_nll_loss, normal(4), unit(4)),
    "hinge": (F.hinge_embedding_loss, normal(4), signs(4)),
    "nll": (lambda x, t, **kw: F.nll_loss(x.log_softmax(1), t, **kw), normal(6, 3), targets(3, 6)),
    "nll one": (lambda x, t, **kw: F.nll_loss(x.log_softmax(0), t, **kw), normal(3), ints(0, 3)),
    "nll 2d": (lambda x, t, **kw: F.nll_loss(x, t, ignore_index=1, **kw), normal(2, 3, 2, 2), ints(0, 3, 2, 2, 2)),
    "nll 1d": (F.nll_loss, normal(2, 3, 4), ints(0, 3, 2, 4)),
    "cross entropy": (F.cross_entropy, normal(3), ints(0, 3)),
    "multi_margin": (F.multi_margin_loss, normal(4, 3), ints(0, 3, 4)),
    "multi_margin one": (lambda x, t, **kw: F.multi_margin_loss(x, t, 2, 0.5, **kw), normal(3), ints(0, 3)),
    "multilabel_margin": (
        F.multilabel_margin_loss,
        normal(4, 3),
        lambda g: torch.cat([torch.randint(3, (4, 1), generator=g), torch.full((4, 2), -1)], 1),
    ),
    "multilabel_margin one": (
        F.multilabel_margin_loss,
        normal(3),
        lambda g: torch.cat([torch.randint(3, (1,), generator=g), torch.full((2,), -1)]),
    ),
}
WEIGHTED = {
    "bce": (lambda x, y, w, **kw: F.binary_cross_entropy(x, y, w, **kw), unit(2, 3), unit(2, 3), unit(3)),
    "bce logits": (
        lambda x, y, w, **kw: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=w * 2, **kw),
        normal(2, 3),
        unit(2, 3),
        unit(3),
    ),
    "nll": (lambda x, t, w, **kw: F.nll_loss(x, t, w, **kw), normal(6, 3), targets(3, 6), unit(3)),
    "nll one": (lambda x, t, w, **kw: F.nll_loss(x, t, w, **kw), normal(3), ints(0, 3), unit(3)),
    "nll 2d": (
        lambda x, t, w, **kw: F.nll_loss(x, t, w, **kw),
        normal(2, 3, 2, 2),
        targets(3, 2, 2, 2),
        unit(3),
    ),
    "multi_margin": (
        lambda x, t, w, **kw: F.multi_margin_loss(x, t, weight=w, **kw),
        normal(4, 3),
        ints(0, 3, 4),
        unit(3),
    ),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_loss(name, reduction):
    f, *makers = PAIRS[name]
    check(lambda *args: f(*args, reduction=reduction), *makers, fixed=(1,) if name == "soft_margin" else ())


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_loss(name, reduction):
    f, *makers = WEIGHTED[name]
    check(lambda *args: f(*args, reduction=reduction), *makers, fixed=(2,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_of_three(reduction):
    check(lambda a, p, n: F.triplet_margin_loss(a, p, n, reduction=reduction), normal(2, 3), normal(2, 3), normal(2, 3))
    check(lambda x, y, s: F.margin_ranking_loss(x, y, s, reduction=reduction), normal(4), normal(4), signs(4))
    check(lambda x, y, v: F.gaussian_nll_loss(x, y, v.exp(), reduction=reduction), normal(4), normal(4), normal(4))
    check(lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(2), reduction=reduction), normal(2, 3), normal(2, 3))


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ctc(reduction):
    def padded(x, t):
        return F.ctc_loss(x.log_softmax(2), t, (5, 4), (2, 1), reduction=reduction)

    def joined(x, t):
        return F.ctc_loss(x.log_softmax(2), t, (5, 4), (2, 1), reduction=reduction, zero_infinity=True)

    def counted(x, t, n):
        return F.ctc_loss(x.log_softmax(2), t, torch.tensor([5, 4]), n, reduction=reduction)

    check(padded, normal(5, 2, 4), ints(1, 4, 2, 2), nested=False)
    check(joined, normal(5, 2, 4), ints(1, 4, 3), nested=False)
    check(counted, normal(5, 2, 4), ints(1, 4, 2, 2), ints(1, 3, 2), nested=False)


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(p):
    check(lambda x: F.pdist(x, p), normal(4, 3))
    check(lambda x, y: torch.cdist(x, y, p), normal(2, 4, 3), normal(2, 5, 3))


def test_distances_by_matrix_products():
    check(lambda x, y: torch.cdist(x, y, 2.0, "use_mm_for_euclid_dist"), normal(4, 3), normal(5, 3))


def test_masks_in_losses():
    check(lambda x, m: F.mse_loss(x, m.to(x.dtype)), normal(3), bools(3))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_smoothed_cross_entropy(reduction):
    t = torch.tensor([0, 2, -100])
    check(lambda x: F.cross_entropy(x, t, label_smoothing=0.1, reduction=reduction), normal(3, 4))


OF_DIFFERENCES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "cross entropy of logits": F.binary_cross_entropy_with_logits,
    "poisson": F.poisson_nll_loss,
    "soft margin": lambda a, b, reduction: F.soft_margin_loss(a, b.detach().sign(), reduction=reduction),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_curvature_of_the_root_of_a_loss(name, reduction):
    """Where the loss is not the last step, the formula of a second derivative gives the slope of each term."""

    def root(x):
        return (OF_DIFFERENCES[name](x, 2 * x.flip(0), reduction=reduction).abs() + 1).sqrt()

    xs = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = torch.stack([torch.autograd.functional.hessian(root, x) for x in xs])
    for curvature in (hessian(root), jacrev(jacrev(root))):
        torch.testing.assert_close(vmap(curvature)(xs), want)
        torch.testing.assert_close(curvature(xs[0]), want[0])
    together = hessian(lambda xs: vmap(root)(xs).sum())(xs)
    torch.testing.assert_close(torch.stack([together[i, :, :, i] for i in range(3)]), want)
