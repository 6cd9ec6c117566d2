"""Derivatives in every nesting of forward and reverse, by differences, where torch's gradient itself is wrong.

It is for these arguments: none of torch.autograd's numbers is an oracle here.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise.errors import FunctionError, TransformError
from tests.oracles import FIRST, SECOND, assert_same, difference

D = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def rotated(x):
    return torch.complex(x, x.flip(0))


def written(write):
    """What one tensor that stands twice in a list is after a write to the list."""

    def f(x):
        y = x * 2
        write([y, y], [x, x**2])
        return y**2

    return f


X = normal(3, 2)
ROW = torch.zeros(2, dtype=D)
LIMIT = normal(2, seed=1)

VARIANCES = {
    "std": (lambda x: torch.std(x, ()), X),
    "std keepdim": (lambda x: torch.std(x, (), correction=0, keepdim=True), X),
    "var": (lambda x: torch.var(x, ()), X),
    "std method": (lambda x: x.std([]), X),
    "var unbiased": (lambda x: torch.var(x, (), False), X),
    "std_mean": (lambda x: torch.stack(torch.std_mean(x, ())), X),
    "var_mean": (lambda x: torch.stack(torch.var_mean(x, [], correction=0)), X),
    "std complex": (lambda x: torch.std(rotated(x), ()), X),
    "var_mean complex": (lambda x: torch.var_mean(rotated(x), ())[0], X),
}
LIMITS = {
    "clamp up to one limit": (lambda v: torch.clamp(ROW, v, v) ** 2, LIMIT + 5),
    "clamp down to one limit": (lambda v: torch.clamp(ROW, v, v) ** 2, LIMIT - 5),
    "clamp at one limit": (lambda v: torch.clamp(LIMIT, v, v) ** 2, LIMIT),
    "clamp between equal limits": (lambda x: torch.clamp(x, LIMIT, LIMIT) ** 2 + x, LIMIT),
    "clamp between equal numbers": (lambda x: torch.clamp(x, 2, 2.0) ** 2 + x, ROW + 2),
    "clamp between numbers that cross": (lambda x: torch.clamp(x, 3, 2) ** 2 + x, ROW + 2),
    "clip by rows": (lambda x: x.clip(x[:1], x[:1]) ** 2, X),
    "clamp_": (lambda x: (x * 1).clamp_(x[:1], x[:1]) ** 2, X),
    "clamp_ by numbers": (lambda x: (x * 1).clamp_(2, 2) ** 2 + x, ROW + 2),
}
LISTS = {
    "_foreach_add_": (written(torch._foreach_add_), X),
    "_foreach_mul_": (written(torch._foreach_mul_), X),
    "_foreach_mul_ by a number": (written(lambda a, b: torch._foreach_mul_(a, 1.5)), X),
    "_foreach_add_ of itself": (written(lambda a, b: torch._foreach_add_(a, a)), X),
    "_foreach_sin_": (written(lambda a, b: torch._foreach_sin_(a)), X),
    "_foreach_lerp_": (written(lambda a, b: torch._foreach_lerp_(a, b, 0.3)), X),
    "_foreach_addcmul_": (written(lambda a, b: torch._foreach_addcmul_(a, b, b, 0.3)), X),
    "_foreach_copy_": (written(torch._foreach_copy_), X),
    "_foreach_mul_ of rows": (written(lambda a, b: torch._foreach_mul_([a[0], a[1][0]], [b[1], b[0][1]])), X),
}
SCATTERED = {
    "as_strided_scatter": (lambda x: torch.as_strided_scatter(x, x[0] ** 2, (2,), (2,), 1) ** 2, X),
    "as_strided_scatter into columns": (lambda x: torch.as_strided_scatter(x.mT, x[0] * x[1], (2,), (1,)) ** 2, X),
    "as_strided_scatter into a slice": (lambda x: torch.as_strided_scatter(x[1:], x[:2].mT, (2, 2), (1, 2)) ** 3, X),
}
PLACES = torch.tensor([[0, 2, 1, 2], [2, 0, 0, 1]])
SAME = torch.tensor([1.0, 1, 1, 1], dtype=D)


def reduced(reduce, include_self, indexed=False):
    """A reduction of numbers that equal what is there before it."""

    def f(x):
        there = x[2].expand(3)
        reduction = there.index_reduce if indexed else there.scatter_reduce
        return reduction(0, torch.tensor([2, 0]), x[:2], reduce, include_self=include_self) ** 2

    return f


REDUCTIONS = {
    "scatter_reduce amax": (reduced("amax", False), SAME),
    "scatter_reduce amin": (reduced("amin", False), SAME),
    "index_reduce amax": (reduced("amax", False, True), SAME),
    "scatter_reduce_ amax": (
        lambda x: (x * 1).scatter_reduce_(0, PLACES[0, :2], x[2:] ** 2, "amax", include_self=False),
        SAME,
    ),
    "index_reduce_ amin": (
        lambda x: (x * 1).index_reduce_(0, PLACES[0, :2], x[2:] ** 2, "amin", include_self=False),
        SAME,
    ),
    "scatter_reduce of a part": (lambda x: (x[:, :3] ** 2).scatter_reduce(1, PLACES[:, :3], x, "amax"), normal(2, 4)),
    "scatter_reduce prod of zeros": (lambda x: (x[:3] + 1).scatter_reduce(0, PLACES[0], x, "prod"), SAME * 0),
    "scatter_reduce prod alone": (
        lambda x: (x[:3] + 1).scatter_reduce(0, PLACES[1], x, "prod", include_self=False),
        torch.tensor([0.5, 0, 0, 2], dtype=D),
    ),
    "scatter_reduce prod into more": (lambda x: x.T.scatter_reduce(1, PLACES[:, :2], x * 0, "prod"), normal(4, 2)),
    "index_reduce prod of zeros": (
        lambda x: (x[:, :3] + 1).index_reduce(1, PLACES[0, 1:], x[:, 1:], "prod"),
        torch.tensor([[0.5, 0, 0, 0], [0, 1, 0, 2]], dtype=D),
    ),
}
NORMS = {
    "norm of zeros": (lambda x: torch.linalg.vector_norm(x * ROW, dim=1), X),
    "3-norm of zeros": (lambda x: torch.linalg.vector_norm(x * ROW, 3, keepdim=True), X),
    "2.5-norm of a row of zeros": (lambda x: torch.linalg.vector_norm(torch.stack([x[0], x[0] * 0]), 2.5, -1), X),
    "complex 1-norm": (lambda x: torch.linalg.vector_norm(rotated(x), 1, -1), X),
    "norm along a dim, p=1": (lambda x: torch.ops.aten.norm(x, 1, [-1], True) ** 2, X),
    "cdist of a set with itself": (lambda x: torch.cdist(x, x), X),
    "cdist of a set with itself, p=3": (lambda x: torch.cdist(x, x, p=3.0), X),
    "cdist of a set with itself, p=0.5": (lambda x: torch.cdist(x, x, p=0.5), X),
    "cdist by products": (lambda x: torch.cdist(x, x[:2] * 2 + 1, compute_mode="use_mm_for_euclid_dist"), X),
    "pdist, two rows the same": (lambda x: F.pdist(torch.cat([x, x[:1]]), 2.5), X),
    "pairwise_distance, p=1": (lambda x: F.pairwise_distance(x[:2], x[1:], 1.0), X),
    "dist, p=1": (lambda x: torch.dist(x[:2], x[1:], 1), X),
    "renorm, p=1": (lambda x: x.renorm(1, 0, 0.5), X),
    "std of one": (lambda x: torch.std(x[:1], 0, correction=0), X),
    "std of equal complex numbers": (lambda x: torch.std(rotated(x)[:1].expand(3, 2), 0), X),
}
LOGARITHMS = {
    "xlogy at 0": (lambda x: torch.xlogy(x, x[0] + 2), torch.zeros(3, 2, dtype=D)),
    "xlogy by a number at 0": (lambda x: torch.xlogy(x**2 + x, 2.0), torch.zeros(2, dtype=D)),
    "xlog1py at 0": (lambda x: torch.special.xlog1py(x, x), torch.zeros(2, dtype=D)),
}
TWICE = torch.tensor([1, 0, 1])
GRID = torch.tensor([[0, 1], [0, 2], [2, 1]])
FLAT = torch.tensor([[[0, 0], [1, 3]]])


def assigned(index):
    """What `y[index] = x` makes of y."""

    def f(x):
        y = x * 2
        y[index] = x.sin()
        return y**2

    return f


# The last of several writes to one place counts.
WRITES = {
    "assignment": (assigned(TWICE), X),
    "assignment to columns": (assigned((slice(None), torch.tensor([1, 1]))), X),
    "assignment to entries": (assigned((TWICE[:, None], torch.tensor([[0, 1]]))), X),
    "assignment through a mask": (assigned(torch.tensor([[True, False], [True, True], [False, True]]).any(1)), X),
    "index_put of one row": (lambda x: x.index_put((TWICE,), x[0] ** 2) ** 2, X),
    "scatter": (lambda x: x.scatter(0, GRID, x**2) ** 2, X),
    "scatter of a part": (lambda x: x.scatter(-1, TWICE[:2, None] * 0, x**2) ** 2, X),
    "scatter_": (lambda x: (x * 2).scatter_(0, GRID, x**2) ** 2, X),
    "index_copy": (lambda x: x.index_copy(0, TWICE, x**2) ** 2, X),
    "index_copy_": (lambda x: (x * 2).index_copy_(-1, TWICE[:2] * 0, x**2) ** 2, X),
    "put": (lambda x: x.put(TWICE, x[:, 0] ** 2) ** 2, X),
    "put_": (lambda x: (x * 2).put_(GRID, x**2) ** 2, X),
    "max_unpool1d": (lambda x: F.max_unpool1d(x[None, :2], FLAT, 2) ** 2, X),
    "max_unpool2d": (lambda x: F.max_unpool2d(x[None, None, :2], FLAT[None], 2) ** 2, X),
    "max_unpool3d": (lambda x: F.max_unpool3d(x[None, None, :2, None], FLAT[None, :, :, None], 2) ** 2, X),
}
FAR = torch.tensor([1e4, -3.0, 2.0, 1e3], dtype=D)
OTHERS = {
    "polar at 0": (lambda x: torch.polar(x[:2] * x[2], x[1:]).imag, X * torch.tensor([[1.0], [1.0], [0.0]], dtype=D)),
    "poisson_nll_loss at 0": (lambda x: F.poisson_nll_loss(x[0], x[1:], full=True, reduction="sum"), X * 0),
    "poisson_nll_loss": (lambda x: F.poisson_nll_loss(x, x.exp() + 3, full=True), X),
    "logit beyond eps": (lambda x: torch.logit(x, 0.2), torch.tensor([0.0, 1.0, 0.5, 1.2], dtype=D)),
    "logsumexp complex": (lambda x: torch.logsumexp(rotated(x), 0).abs(), X),
    "logcumsumexp complex": (lambda x: torch.logcumsumexp(rotated(x), 0).abs(), X),
    "logaddexp complex": (lambda x: torch.logaddexp(rotated(x[:2]), rotated(x[1:])).abs(), X),
    "logaddexp complex, far": (lambda x: torch.logaddexp(torch.complex(x, x * 1e-4), x[1] + 0j).real, FAR),
    "logcumsumexp complex, far": (lambda x: torch.logcumsumexp(torch.complex(x, x * 1e-4), 0).real, FAR),
    "cross_entropy of a view": (
        lambda x: F.cross_entropy(x.reshape(1, 1, 3, 2).permute(0, 3, 1, 2), torch.tensor([[[0, 1, 1]]])),
        X,
    ),
    "cosine_similarity of zeros": (lambda x: F.cosine_similarity(x[0], x[1], dim=0, eps=0.5), X * 0),
    "renorm of zeros": (lambda x: x.renorm(2, 0, 0.5), X * 0),
}
BESSEL = {
    name: (getattr(torch.special, name), torch.tensor([0.3, -1.7], dtype=D))
    for name in ("bessel_j0", "bessel_j1", "modified_bessel_i0", "modified_bessel_i1", "spherical_bessel_j0")
} | {
    name: (getattr(torch.special, name), torch.tensor([0.4, 1.7, 3.0], dtype=D))
    for name in (
        "bessel_y0", "bessel_y1", "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0",
        "scaled_modified_bessel_k1",
    )
} | {
    "hermite_polynomial_h": (lambda x: torch.special.hermite_polynomial_h(x, torch.tensor([[0.0], [3.0]])), X[0]),
    "hermite_polynomial_he": (lambda x: torch.special.hermite_polynomial_he(x, 4), X),
}  # fmt: skip
CASES = VARIANCES | LIMITS | LISTS | SCATTERED | REDUCTIONS | NORMS | LOGARITHMS | WRITES | OTHERS | BESSEL


@pytest.mark.filterwarnings("ignore:.*is in beta")
@pytest.mark.parametrize("name", CASES)
def test_differences(name):
    f, x = CASES[name]
    directions = [normal(*x.shape, seed=10 + n) * 0.5 for n in range(2)]
    weight = normal(*f(x).shape, seed=20)

    def loss(x):
        return (f(x) * weight).sum()

    def along(g, v):
        return lambda x: difference(g, (x,), (v,))[0]

    ways = {
        "jvp": lambda g, v: lambda x: jvp(g, (x,), (v,))[1],
        "grad": lambda g, v: lambda x: (grad(g)(x) * v).sum(),
    }
    want = loss
    for order, tolerance in ((1, FIRST), (2, SECOND)):
        want = along(want, directions[order - 1])
        number = want(x)
        for nested in itertools.product(ways, repeat=order):
            got, mapped = loss, lambda xs: vmap(loss)(xs).sum()
            for way, v in zip(nested, directions, strict=False):
                got, mapped = ways[way](got, v), ways[way](mapped, v.expand(2, *v.shape))
            xs = x.expand(2, *x.shape)
            of_each = vmap(got)
            for value in (got(x), of_each(xs)[1], of_each(xs)[1], mapped(xs) / 2):
                assert_same(value, number, tolerance)
    for way in (hessian, lambda f: jacfwd(jacrev(f)), lambda f: jacrev(jacfwd(f))):
        square = way(loss)(x).reshape(x.numel(), x.numel())
        assert_same(directions[0].reshape(-1) @ square @ directions[1].reshape(-1), number, SECOND)


# Where there is a kink, torch.autograd says what the derivative is.
KINKS = {
    "cdist of the same rows": (
        lambda x: torch.cdist(x, LIMIT[None], compute_mode="use_mm_for_euclid_dist"),
        LIMIT[None],
    ),
    "atan2 of zeros": (lambda x: torch.atan2(x[0], x[1]), X * 0),
    "multi_margin_loss without a margin": (
        lambda x: F.multi_margin_loss(x, torch.tensor([0, 1, 1]), margin=0.0),
        torch.ones_like(X),
    ),
    "scatter_reduce amax of equals": (lambda x: x[0].scatter_reduce(0, torch.tensor([1, 1]), x[1], "amax"), X * 0),
}


@pytest.mark.parametrize("name", KINKS)
def test_kinks(name):
    f, x = KINKS[name]
    v = normal(*x.shape, seed=1)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(leaf).sum(), leaf)
    assert_same(grad(lambda x: f(x).sum())(x), slope)
    assert_same(jvp(lambda x: f(x).sum(), (x,), (v,))[1], (slope * v).sum())
    assert_same(vmap(lambda x: jvp(lambda x: f(x).sum(), (x,), (v,))[1])(x[None])[0], (slope * v).sum())


@pytest.mark.parametrize("distance", [F.pdist, lambda x, p: torch.cdist(x[:1], x[1:], p=p)])
def test_equal_largest_differences_share(distance):
    """torch gives each of them all."""
    x, v = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=D), normal(2, 2)
    slope = torch.tensor([[-0.5, -0.5], [0.5, 0.5]], dtype=D)
    f = lambda x: distance(x, torch.inf).sum()
    assert_same(grad(f)(x), slope)
    assert_same(jvp(f, (x,), (v,))[1], (slope * v).sum())


SPARSE = {
    "to_sparse": lambda x: x.to_sparse().to_dense(),
    "sparse_coo_tensor": lambda x: torch.sparse_coo_tensor(torch.arange(3)[None], x[:, 0], (3,)).to_dense(),
    "times a captured one": lambda x: torch.sparse.sum(torch.eye(3, 2, dtype=D).to_sparse() * x),
}


@pytest.mark.parametrize("name", SPARSE)
def test_forward_mode_loses_no_tangent_in_sparse_tensors(name):
    with pytest.raises(TransformError, match="forward mode goes through strided tensors only"):
        jvp(lambda x: SPARSE[name](x).sum(), (X,), (X,))


@pytest.mark.parametrize("name", ["bessel_j1", "modified_bessel_i1", "spherical_bessel_j0"])
def test_bessel_functions_at_0(name):
    f, zero = getattr(torch.special, name), torch.zeros((), dtype=D)
    slopes = {"bessel_j1": [0.5, 0.0, -0.375], "modified_bessel_i1": [0.5, 0.0, 0.375]}
    for want in slopes.get(name, [0.0, -1 / 3, 0.0]):
        f = grad(f)
        assert_same(f(zero), torch.tensor(want, dtype=D))


@pytest.mark.parametrize("name", ["chebyshev_polynomial_t", "shifted_chebyshev_polynomial_t"])
def test_slopes_of_chebyshev_polynomials(name):
    f = lambda x: getattr(torch.special, name)(x, 3).sum()
    x, v = torch.tensor([1.0, 0.4, -0.2], dtype=D), normal(3)
    (want,) = difference(f, (x,), (v,))
    assert_same(jvp(f, (x,), (v,))[1], want, FIRST)
    assert_same((grad(f)(x) * v).sum(), want, FIRST)


UNKNOWN = {
    "airy_ai": torch.special.airy_ai,
    "legendre_polynomial_p": lambda x: torch.special.legendre_polynomial_p(x, 2),
    "chebyshev_polynomial_u": lambda x: torch.special.chebyshev_polynomial_u(x, torch.tensor(2.0)),
    "laguerre_polynomial_l": lambda x: torch.special.laguerre_polynomial_l(x, 2),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_known_derivative_raises(name):
    f = lambda x: UNKNOWN[name](x).sum()
    for run in (lambda: grad(f)(X), lambda: jvp(f, (X,), (X,)), lambda: vmap(grad(f))(X)):
        with pytest.raises(FunctionError, match=f"derivative for aten::special_{name} is not implemented"):
            run()
    assert_same(vmap(UNKNOWN[name])(X), UNKNOWN[name](X))
    degree = torch.tensor([1.0, 2.0])
    assert_same(grad(lambda n: torch.special.legendre_polynomial_p(0.5, n).sum())(degree), torch.zeros(2))
