"""Infinite derivatives of what a lane leaves unused play no part, where autograd records around the lanes as well."""

import pytest
import torch
from torch.nn import functional as F

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise._core.level import live_levels

D = torch.float64
W = torch.tensor(0.7, dtype=D)


def two(x, y):
    return torch.stack([x, y])


def diagonal(x, y):
    return torch.diag(two(x, y))


def written_part(y):
    y[:1].sqrt_()
    return y


# An operation of x and w, and where a derivative of it is not finite.
STEEP = {
    "sqrt": (lambda x, w: x.sqrt(), 0.0),
    "log": (lambda x, w: x.log(), 0.0),
    "power 0.5": (lambda x, w: x**0.5, 0.0),
    "power 1.5": (lambda x, w: x**1.5, 0.0),
    "power -1": (lambda x, w: x**-1, 0.0),
    "power w": (lambda x, w: x**w, 0.0),
    "rsqrt": (lambda x, w: x.rsqrt(), 0.0),
    "reciprocal": (lambda x, w: 1 / x, 0.0),
    "quotient": (lambda x, w: x.sin() / x, 0.0),
    "asin": (lambda x, w: x.asin(), 1.0),
    "acos": (lambda x, w: x.acos(), -1.0),
    "atanh": (lambda x, w: x.atanh(), 1.0),
    "asin outside": (lambda x, w: x.asin(), 2.0),
    "acos outside": (lambda x, w: x.acos(), -2.0),
    "acosh outside": (lambda x, w: x.acosh(), -2.0),
    "erfinv outside": (lambda x, w: x.erfinv(), 2.0),
    "logit outside": (lambda x, w: x.logit(), 2.0),
    "entr outside": (lambda x, w: torch.special.entr(x), -2.0),
    "xlog1py outside": (lambda x, w: torch.special.xlog1py(x, x), -2.0),
    "xlogy outside": (lambda x, w: torch.xlogy(x, x), -2.0),
    "polygamma outside": (lambda x, w: torch.polygamma(1, x), -2.0),
    "mvlgamma outside": (lambda x, w: torch.mvlgamma(x, 2), 0.5),
    "power 1.5 outside": (lambda x, w: x**1.5, -2.0),
    "power w outside": (lambda x, w: x**w, -2.0),
    "norm": (lambda x, w: two(x, x * w).norm(), 0.0),
    "norm 3": (lambda x, w: torch.linalg.vector_norm(two(x, x), 3), 0.0),
    "atan2": (lambda x, w: torch.atan2(x, x * 2), 0.0),
    "hypot": (lambda x, w: torch.hypot(x, x * 2), 0.0),
    "std": (lambda x, w: torch.stack([x, -x, 2 * x]).std(), 0.0),
    "dist": (lambda x, w: torch.dist(two(x, x), two(x, x * 2)), 0.0),
    "logarithm in a product": (lambda x, w: x.log() * x * w, 0.0),
    "overflow": (lambda x, w: ((x - 1) * -1000).exp() * w, 0.0),
    "infinite factor": (lambda x, w: (1 / x) * w, 0.0),
    "flat again": (lambda x, w: ((1 / x) * w).tanh(), 0.0),
    "expression": (lambda x, w: torch.exp(-1 / x) * w, 0.0),
    "matrix product": (lambda x, w: (two(x.log(), x)[None] @ two(w, x)[:, None]).sum(), 0.0),
    "linear": (lambda x, w: F.linear(two(1 / x, x), two(w, w)[None]).sum(), 0.0),
    "softmax": (lambda x, w: torch.softmax(two(x.log(), x.log() * w), 0)[0], 0.0),
    "det": (lambda x, w: torch.linalg.det(two(two(x, w), two(w * 0, x))).sqrt(), 0.0),
    "svd": (lambda x, w: torch.linalg.svd(diagonal(x, x * w))[0].abs().sum(), 0.0),
    "singular values": (lambda x, w: torch.linalg.svdvals(diagonal(x * w, 1 / x)).sum(), 0.0),
    "eigh": (lambda x, w: torch.linalg.eigh(two(two(x, x), two(x, x * w)))[1].abs().sum(), 0.0),
    "qr": (lambda x, w: torch.linalg.qr(diagonal(x, x * w))[1].abs().sum(), 0.0),
    "slogdet": (lambda x, w: torch.slogdet(diagonal(x, w))[1], 0.0),
    "cholesky": (lambda x, w: torch.linalg.cholesky_ex(diagonal(x.abs(), w))[0].sum(), 0.0),
    "inverse": (lambda x, w: torch.linalg.inv_ex(diagonal(x, w))[0].sum(), 0.0),
    "solve": (lambda x, w: torch.linalg.solve_ex(diagonal(x, w), two(w, w))[0].sum(), 0.0),
    "lu": (lambda x, w: torch.linalg.lu_factor_ex(diagonal(x, w))[0].log().diagonal().sum(), 0.0),
    "layer norm": (lambda x, w: F.layer_norm(two(x, x * w), (2,), eps=0.0)[0], 0.0),
    "std and mean": (lambda x, w: torch.std_mean(torch.stack([x, -x, 2 * x]))[0], 0.0),
    "several at once": (lambda x, w: torch._foreach_log([x, w])[0], 0.0),
    "root in place": (lambda x, w: (x * 1).sqrt_(), 0.0),
    "logarithm in place": (lambda x, w: (x * w).log_(), 0.0),
    "power in place": (lambda x, w: (x * 1).pow_(w), 0.0),
    "quotient in place": (lambda x, w: x.sin().div_(x), 0.0),
    "product in place": (lambda x, w: (w * 1).mul_(1 / x), 0.0),
    "part in place": (lambda x, w: written_part(two(x, w)).sum(), 0.0),
    "complex": (lambda x, w: torch.complex(x, x).log().real, 0.0),
}


def before(op, at, x, w):
    y = op(x, w)
    z = y * w + x
    if x != at:
        return z.sin()
    return x.cos()


def in_one_branch(op, at, x, w):
    y = op(x, w)
    u = x * w
    if x != at:
        r = y
    else:
        r = u
    return r * u


def later(op, at, x, w):
    y = op(x, w)
    if w * x > 0.3:
        a = x * 2
    else:
        a = x * 3
    if x != at:
        return a + y
    return a


def in_a_loop(op, at, x, w):
    y, steps = op(x, w), 0
    while x != at and steps < 2:
        y = y * w
        steps = steps + 1
    if steps > 0:
        return y
    return x * w


def twice(op, at, x, w):
    y = op(x, w)
    if x != at:
        z = op(y * y * 0.1 + 0.3, w)
    else:
        z = op(x * 0 + 0.5, w)
    return z * x


def overwritten(op, at, x, w):
    y = op(x, w) * 1.0
    if x == at:
        y.copy_(x * w)
    return y * w


def written_in_part(op, at, x, w):
    y = two(op(x, w), x.sin()).clone()
    if x > 0.5:
        y[0] = x * x
    if x == at:
        return x * w
    return (y * w).sum()


PROGRAMS = [before, in_one_branch, later, in_a_loop, twice, overwritten, written_in_part]


@pytest.fixture(params=["converted", "as written"])
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)
    yield
    assert not live_levels()


def summed(rows):
    """The gradients of all lanes in x, and their sum in w."""
    return torch.stack([a for a, _ in rows]), sum(b for _, b in rows)


def first_order(f, xs, w):
    """By plain torch, lane by lane."""
    rows = []
    for x in xs:
        x, w = x.clone().requires_grad_(), w.detach().clone().requires_grad_()
        rows.append(torch.autograd.grad(f(x, w).sum(), (x, w), materialize_grads=True))
    return summed(rows)


def second_order(f, xs, w):
    rows = []
    for x in xs:
        x, w = x.clone().requires_grad_(), w.detach().clone().requires_grad_()
        a, b = torch.autograd.grad(f(x, w).sum(), (x, w), create_graph=True, materialize_grads=True)
        rows.append(torch.autograd.grad(1.3 * a + 0.7 * b + 0 * w + 0 * x, (x, w)))
    return summed(rows)


def total(f):
    return lambda xs, w: vmap(f, (0, None))(xs, w).sum()


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", STEEP)
def test_first_and_second_derivatives(name, program, way):
    if program is overwritten and name in ("singular values", "slogdet", "solve"):
        pytest.skip("of a cotangent of zeros, torch's formulas make something else for one matrix than for several")
    if program is overwritten and name == "entr outside":
        pytest.skip("the first derivative of one example is NaN there, and a derivative of that says nothing")
    op, at = STEEP[name]

    def f(x, w):
        return program(op, at, x, w)

    def gradients(xs, w):
        return grad(total(f), (0, 1))(xs, w)

    def turned(xs, w):
        a, b = gradients(xs, w)
        return (1.3 * a).sum() + 0.7 * b

    xs = torch.tensor([at, 0.3, at, 0.8, at], dtype=D)
    once = first_order(f, xs, W)
    same(gradients(xs, W), once)
    a, b = vmap(grad(f, (0, 1)), (0, None))(xs, W)
    same((a, b.sum(0)), once)
    along = torch.full_like(xs, 1.3), torch.full_like(W, 0.7)
    pushed = summed([jvp(grad(f, (0, 1)), (x, W), (t, along[1]))[1] for x, t in zip(xs, along[0])])
    same(jvp(gradients, (xs, W), along)[1], pushed)
    written = f
    if program is overwritten and name in ("norm", "dist"):
        # Of a norm at zero, whose cotangent is zero, torch's second derivative is NaN: what overwrites it, alone.
        written = lambda x, w: x * w * w if x == at else f(x, w)
    same(grad(turned, (0, 1))(xs, W), second_order(written, xs, W))


GRID = torch.tensor([[0.0, 0.3, 0.0, 0.8], [0.4, 0.0, 0.15, 0.0], [0.0, 0.2, 0.4, 0.9]], dtype=D)


def each(g, xs, run, *more):
    return vmap(g)(xs, *more) if run == "vmap" else torch.stack([g(*row) for row in zip(xs, *more)])


def branch_outside(row, w, run):
    s = row.log() * w

    def inside(x):
        y = x.sqrt()
        if x != 0:
            return (y * w + x).sin()
        return x.cos() * w

    found = each(inside, row, run)
    if row[0] == 0:
        return found * w
    return found + s * row


def value_of_outside(row, w, run):
    q = row.sum().sqrt()

    def inside(x):
        r = q * x / x
        if x > 0:
            return r
        return x * w

    found = each(inside, row, run)
    if row[0] == 0:
        return found
    return found * row


def made_outside(row, w, run):
    y = row.sqrt()
    if row[0] == 0:
        row = row + 1

    def inside(x, y, i):
        if i > 1:
            return y * x
        return x * w

    return each(inside, row, run, y.flip(0), torch.arange(4))


@pytest.mark.parametrize("f", [branch_outside, value_of_outside, made_outside])
def test_nested(f, way):
    want = first_order(lambda row, w: f(row, w, "loop"), GRID, W)

    def g(row, w):
        return f(row, w, "vmap")

    same(grad(total(g), (0, 1))(GRID, W), want)
    a, b = vmap(grad(lambda row, w: g(row, w).sum(), (0, 1)), (0, None))(GRID, W)
    same((a, b.sum(0)), want)
    rows, w = GRID.clone().requires_grad_(), W.clone().requires_grad_()
    vmap(g, (0, None))(rows, w).sum().backward()
    same((rows.grad, w.grad), want)


def steep(x, w=W):
    y = x.sqrt()
    z = y * w + x
    if x != 0:
        return z.sin()
    return x.cos()


def test_other_transforms():
    xs = GRID[0]
    want = first_order(steep, xs, W)[0]
    mapped = vmap(steep)
    same([jacrev(mapped)(xs).diagonal(), jacfwd(mapped)(xs).diagonal()], [want, want])
    same([vmap(jacrev(steep))(xs), vmap(grad(lambda row: mapped(row).sum()))(GRID)[0]], [want, want])
    second = [hessian(steep)(x) for x in xs]
    same([hessian(lambda xs: mapped(xs).sum())(xs).diagonal()], [torch.stack(second)])
    same([vmap(hessian(steep))(xs)], [torch.stack(second)])


def test_a_pass_for_one_of_two_results():
    """What one of them leaves unused, the other may use."""

    def f(x):
        y = x.sqrt()
        if x != 0:
            a = y
        else:
            a = x * W
        return a, y

    xs = GRID[0].clone().requires_grad_()
    a, y = vmap(f)(xs)
    of_sqrt = 0.5 / xs.detach().sqrt()
    of_a = torch.where(xs == 0, W, of_sqrt).detach()
    for outs, want in ((a, of_a), (y, of_sqrt), (a, of_a), (a + y, of_a + of_sqrt), (a, of_a)):
        same(torch.autograd.grad(outs.sum(), xs, retain_graph=True), [want])
    first = torch.autograd.grad(a.sum(), xs, create_graph=True)[0]
    same(torch.autograd.grad(first.sum(), xs), [torch.where(xs == 0, 0.0, -0.25 * xs.detach() ** -1.5)])


def multiplied(x):
    y = x.sqrt()
    if x <= 0:
        return y * 0
    return x


def chosen(x):
    y = x.sqrt()
    if x > 0.5:
        return y
    return torch.where(x > 0, y, x)


@pytest.mark.parametrize("f", [multiplied, chosen])
def test_zero_is_not_absent(f):
    """A cotangent of zero times an infinite derivative is no number, as it is in a loop."""
    want = first_order(lambda x, w: f(x), GRID[0], W)[0]
    assert want.isnan().any()
    same([grad(lambda xs: vmap(f)(xs).sum())(GRID[0])], [want])


def test_results_in_parts():
    """Where results leave lane by lane, no lane is taken for absent that is not."""

    def f(x):
        y = x.sqrt()
        if x > 0:
            return y[None], x
        return two(x, x), y

    xs = GRID[0].clone().requires_grad_()
    parts, y = vmap(f, out_dims=("list", 0))(xs)
    of_sqrt = 0.5 / xs.detach().sqrt()
    of_parts = torch.where(xs == 0, 2.0, of_sqrt).detach()
    of_y = torch.where(xs == 0, torch.inf, torch.ones_like(xs)).detach()
    parts = sum(part.sum() for part in parts)
    for out, want in ((parts, of_parts), (y.sum(), of_y), (parts + y.sum(), of_parts + of_y)):
        same(torch.autograd.grad(out, xs, retain_graph=True), [want])


# Derivatives of results that nobody uses are infinite, or no number, where numbers repeat or a matrix is singular.
OF_SEVERAL = {
    "svdvals": lambda a: torch.linalg.svdvals(a).sum(),
    "svd": lambda a: torch.linalg.svd(a)[1].prod(),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a).sum(),
    "eigh": lambda a: torch.linalg.eigh(a)[0].sum(),
    "eigvals": lambda a: torch.linalg.eigvals(a).real.sum(),
    "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
    "spectral norm": lambda a: torch.linalg.matrix_norm(a + torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=D), 2),
    "cond": lambda a: torch.linalg.cond(a),
    "det": lambda a: a.det(),
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "qr": lambda a: torch.linalg.qr(a)[1].abs().sum(),
}


@pytest.mark.parametrize("name", OF_SEVERAL)
@pytest.mark.parametrize("where", ["in a branch", "before one", "after one"])
def test_results_that_nobody_uses(name, where):
    operation = OF_SEVERAL[name]

    def in_a_branch(a):
        return operation(a) * 2 if a[0, 0] > 1.5 else operation(a) * 3

    def before_one(a):
        out = operation(a)
        return out * 2 if a[0, 0] > 1.5 else out * 3

    def after_one(a):
        a = a * 2 if a[0, 0] > 1.5 else a * 3
        return operation(a)

    f = {"in a branch": in_a_branch, "before one": before_one, "after one": after_one}[where]
    matrices = torch.stack(
        [torch.eye(2, dtype=D), 2 * torch.eye(2, dtype=D), torch.tensor([[3.0, 1], [1, 1]], dtype=D)]
    )
    if name == "det":
        matrices = torch.cat([matrices, torch.tensor([[[1.0, 0], [0, 0]], [[2, 2], [2, 2]]], dtype=D)])
    want = torch.stack([grad(f)(a) for a in matrices])
    assert want.isfinite().all()
    torch.testing.assert_close(grad(lambda xs: vmap(f)(xs).sum())(matrices), want)
    torch.testing.assert_close(vmap(grad(f))(matrices), want)
    leaf = matrices.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(vmap(f)(leaf).sum(), leaf)[0], want)


def shared_and_merged(op, p, x):
    u = p[1] * 2
    if x > 0:
        u = op(p[0], p[1])
    if x <= 0:
        return u * x
    return x * p[2]


def shared_in_a_product(op, p, x):
    u = p[1] * 2
    if x > 0:
        u = op(p[0], p[1]) * x
    if x <= 0:
        return u * x
    return x * p[2]


def shared_before(op, p, x):
    u = op(p[0], p[1])
    t = x * p[1]
    if x > 0:
        t = t + u * x
    if x > 0:
        return p[2] * x
    return t


def shared_in_a_loop(op, p, x):
    u, steps = op(p[0] * 1, p[1]), 0
    while steps < 2 and x > 0:
        u = u * x + steps
        steps += 1
    if x > 0:
        return p[2] * x
    return p[1] + x


@pytest.mark.parametrize("program", [shared_and_merged, shared_in_a_product, shared_before, shared_in_a_loop])
@pytest.mark.parametrize("name", ["sqrt", "log", "power 1.5", "reciprocal", "asin outside", "norm", "std and mean"])
def test_what_all_lanes_share(name, program, way):
    """A parameter's gradient has no part of what is computed from it for lanes that leave it unused."""
    op, at = STEEP[name]
    xs = torch.tensor([1.0, -1.0, 0.3, -2.0], dtype=D)
    p = torch.tensor([at, 0.7, 0.5], dtype=D)

    def f(p, x):
        return program(op, p, x)

    def alone(p, xs):
        return torch.stack([f(p, x) for x in xs])

    def together(p, xs):
        return vmap(f, (None, 0))(p, xs)

    def found(run):
        leaf = p.clone().requires_grad_()
        (once,) = torch.autograd.grad(run(leaf, xs).sum(), leaf)
        twice = grad(lambda p: grad(lambda p: (run(p, xs) ** 2).sum())(p).sum())(p)
        return once, grad(lambda p: run(p, xs).sum())(p), jacrev(run)(p, xs), twice

    same(found(together), found(alone))
