"""jvp: arguments and results, memory and in-place writes, nestings with itself, autograd and native forward mode."""

import pytest
import torch
import torch.autograd.forward_ad as native
import torch.nn.functional as F

from lanewise import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from lanewise._core.native import native_formulas
from lanewise.errors import ArgumentError, TransformError
from tests.oracles import FIRST, assert_same, difference

D = torch.float64


def data(*shape):
    return torch.randn(*shape, dtype=D)


def check(f, *args, order=1):
    """jvp of f against differences, `order` times along one direction."""
    tangents = tuple(torch.randn_like(a) for a in args)
    g = f
    for _ in range(order - 1):
        g = lambda *xs, g=g: jvp(g, tuple(a.clone() for a in xs), tuple(t.clone() for t in tangents))[1]
    value, tangent = jvp(g, tuple(a.clone() for a in args), tuple(t.clone() for t in tangents))
    plain = lambda *xs: g(*[x.clone() for x in xs])
    assert_same(value, plain(*args))
    want = difference(plain, args, tangents)
    assert_same(tangent, want if isinstance(tangent, tuple) else want[0], (1e-6, 1e-8))


# --- arguments and results -------------------------------------------------------------------------------------------


def test_trees_in_and_out():
    x, y, t = data(2), data(2), data(2)
    f = lambda d, pair: {"sum": d["x"] + pair[0], "more": [d["x"] * pair[1]]}
    out, pushed = jvp(f, ({"x": x}, (y, y)), ({"x": t}, (t, t)))
    assert_same(out["more"][0], x * y)
    assert_same(pushed["sum"], 2 * t)
    assert_same(pushed["more"][0], t * y + x * t)


def test_aux_comes_back_as_it_is():
    x = data(2)
    out, pushed, aux = jvp(lambda x: (x * 2, {"name": "a", "x": x, "n": 3}), (x,), (x,), has_aux=True)
    assert_same(pushed, 2 * x)
    assert aux["name"] == "a" and aux["n"] == 3
    assert_same(aux["x"], x)


def test_integer_outputs_have_zero_tangents():
    x = data(3)
    (i, m, y), (ti, tm, ty) = jvp(lambda x: (x.argmax(), x > 0, x.sin()), (x,), (x,))
    assert_same(ti, torch.zeros((), dtype=torch.int64))
    assert_same(tm, torch.zeros(3, dtype=torch.bool))
    assert_same(ty, x * x.cos())


def test_unused_inputs():
    x = data(2)
    assert_same(jvp(lambda x, y: y, (x, x), (x, 2 * x))[1], 2 * x)
    assert_same(jvp(lambda x: torch.ones(2), (x,), (x,))[1], torch.zeros(2))
    assert_same(jvp(lambda x: x.detach(), (x,), (x,))[1], torch.zeros(2, dtype=D))
    with pytest.raises(TransformError, match="The output of f is independent of the inputs"):
        jvp(lambda x: (x, torch.ones(2)), (x,), (x,), strict=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_tangent_keeps_its_dtype(dtype):
    x, t = torch.randn(2), torch.randn(2, dtype=dtype)
    for f in (lambda x: x * x, lambda x: x.view(2, 1), lambda x: x.sum(), lambda x: x + 1):
        out, pushed = jvp(f, (x,), (t,))
        assert out.dtype is torch.float32
        assert pushed.dtype is dtype


def test_a_zero_dim_operand_promotes_as_in_the_primal():
    x, s = torch.randn(3), data(())
    for f in (lambda x, s: x * s, lambda x, s: x + s, lambda x, s: s / x, lambda x, s: torch.atan2(s, x)):
        out, pushed = jvp(f, (x, s), (x, s))
        assert out.dtype is pushed.dtype is torch.float32


@pytest.mark.parametrize(
    ("primals", "tangents", "error", "text"),
    [
        ([1], [1], TransformError, "Expected primals to be a tuple. E.g. it should be valid to call f(*primals)"),
        ((torch.ones(2),) * 2, (torch.ones(2),), TransformError, "have the same python structure"),
        ((torch.ones(2),), [torch.ones(2)], TransformError, "have the same python structure"),
        ((1.0,), (torch.ones(2),), TransformError, "Expected primals to only contain Tensors"),
        ((torch.ones(2),), (1.0,), TransformError, "Expected tangents to only contain Tensors"),
        (
            (torch.ones(2),),
            (torch.ones(3),),
            TransformError,
            "Trying to set a forward gradient that has a different size",
        ),
        ((torch.ones(2).int(),), (torch.ones(2),), ArgumentError, "Expected primal to be floating point or complex"),
        ((torch.ones(2),), (torch.ones(2).int(),), ArgumentError, "Expected tangent to be floating point or complex"),
        ((), (), TransformError, "Expected primals to contain at least one Tensor"),
    ],
)
def test_arguments_that_do_not_fit(primals, tangents, error, text):
    with pytest.raises(error) as caught:
        jvp(torch.sin, primals, tangents)
    assert text in str(caught.value)
    assert "test_forward.py" in str(caught.value)


@pytest.mark.parametrize("out", [(), None, 3.0])
def test_outputs_that_are_no_tensors(out):
    with pytest.raises(TransformError, match="non-empty output|only tensors"):
        jvp(lambda x: out, (torch.ones(2),), (torch.ones(2),))


@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("of_x, of_y", [(0.0, 1.0), (1.0, 1.0), (1.0, None), (None, 1.0), (1.0, -2.0)])
def test_quotients_are_infinite_where_torchs_are(of_x, of_y, dtype):
    a = torch.tensor([1.0, -1.0, 0.0, 2.0, 1.0], dtype=D)
    b = torch.tensor([0.0, 0.0, 0.0, 4.0, -0.0], dtype=dtype)
    moved = [(x, torch.full_like(x, t)) for x, t in ((a, of_x), (b, of_y)) if t is not None]
    primals, tangents = tuple(x for x, _ in moved), tuple(t for _, t in moved)

    def quotient(*xs, **options):
        first, second = xs if len(xs) == 2 else (*xs, b) if of_y is None else (a, *xs)
        return torch.div(first, second, **options)

    with native.dual_level():
        want = native.unpack_dual(quotient(*[native.make_dual(x, t) for x, t in moved])).tangent
    assert_same(jvp(quotient, primals, tangents)[1], want)
    assert_same(jvp(lambda *xs: quotient(*xs, rounding_mode=None), primals, tangents)[1], want)
    assert_same(jvp(lambda *xs: quotient(*xs)[0], primals, tangents)[1], want[0])
    if len(moved) == 2:
        assert_same(jvp(vmap(quotient), primals, tangents)[1], want)


def test_complex():
    x, t = torch.randn(3, dtype=torch.complex128), torch.randn(3, dtype=torch.complex128)
    for f in (
        torch.conj,
        torch.abs,
        torch.angle,
        lambda x: x.conj() * x,
        lambda x: x.conj().imag,
        lambda x: torch.vdot(x, x * x),
    ):
        want = difference(f, (x,), (t,))[0]
        assert_same(jvp(f, (x,), (t,))[1], want, (1e-6, 1e-8))


def test_grad_mode_and_inference_mode():
    x = data(2).requires_grad_()
    assert all(part.requires_grad for part in jvp(torch.sin, (x,), (x.detach(),)))
    with torch.no_grad():
        assert not any(part.requires_grad for part in jvp(torch.sin, (x,), (x,)))

    def quiet(x):
        with torch.no_grad():
            return x.sin()

    assert_same(jvp(quiet, (x.detach(),), (x.detach(),))[1], (x * x.cos()).detach())
    with torch.inference_mode():
        y = data(2)
        assert_same(jvp(torch.sin, (y,), (y,))[1], y * y.cos())
        assert_same(jvp(grad(lambda x: (x**3).sum()), (y,), (y,))[1], 6 * y * y)


# --- memory ----------------------------------------------------------------------------------------------------------


def _doubled(x):
    return x.mul_(2)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: jvp(_doubled, (x,), (x,)),
        lambda x: jvp(_doubled, (x,), (x.view(-1).view_as(x),)),
        lambda x: jvp(lambda x: _doubled(x["x"]), ({"x": x},), ({"x": x},)),
        lambda x: vmap(lambda x: jvp(_doubled, (x,), (x,)))(x),
        lambda x: vmap(lambda x, t: jvp(_doubled, (x,), (t,)))(x, x),
        lambda x: [part[0] for part in vmap(vmap(lambda x: jvp(_doubled, (x,), (x,))))(x[None])],
        lambda x: jvp(lambda x: jvp(_doubled, (x,), (x,))[1], (x,), (x.clone(),)),
        lambda x: jvp(lambda x, y: _doubled(x) * y, (x, torch.ones_like(x)), (x, torch.zeros_like(x))),
    ],
)
def test_a_tangent_in_the_memory_of_its_primal(run):
    """The function writes to the primal, and the tangent is what it was."""
    x = data(2)
    want = 2 * x
    for part in run(x):
        assert_same(part, want)


def test_tangents_in_the_memory_of_other_primals():
    position, speed = data(2), data(2) + 1
    both = lambda x, v: (x.add_(v), v.mul_(2))
    want = (position + speed, 2 * speed), (speed + position, 2 * position)
    got = jvp(both, (position, speed), (speed, position))
    assert_same(got, want)


def _write_into_view(x):
    y = x * 2
    row = y[0]
    row.mul_(x[1])
    y.add_(1)
    return y, row


def _write_after_passing_on(x):
    y = x + 1  # The tangent passes on unchanged, and must not be written to with y's.
    y.mul_(3)
    return x * y


def _write_after_broadcast(x, s):
    y = torch.zeros(2, 3, dtype=D) + s
    y[0].mul_(x[0])
    return y


def _transposed_view(x):
    y = (x @ x.T).t()
    flat = y.contiguous().view(-1)
    flat[1] = x.sum()
    z = y.sin().t().reshape(-1)
    return flat * z


def _factory(x):
    y = torch.zeros(3, 3, dtype=D)
    column = y[:, 1]
    y[1] = x[1]
    column.add_(x[0])
    return y, column


def _in_place_views(x):
    y = x.clone().t_().unsqueeze_(0).squeeze_(0)
    y[0, 0] = 2
    return y.exp_()


def _out(x):
    y = torch.empty(2, dtype=D)
    return torch.mul(x[0, :2], x[1, :2], out=y * x[0, 0])


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    "f", [_write_into_view, _write_after_passing_on, _transposed_view, _factory, _in_place_views, _out]
)
def test_writes(f, order):
    check(f, data(3, 3), order=order)


def test_write_after_broadcast():
    check(_write_after_broadcast, data(2), data(()))


def test_expanded_and_permuted_tangents():
    x = data(3, 4)
    for t in (data(()).expand(3, 4), data(4, 3).t(), data(6, 4)[::2]):
        f = lambda x: x.clone().view(-1)[2:5] * x.view(12)[0]
        assert_same(jvp(f, (x,), (t,))[1], jvp(f, (x,), (t.contiguous(),))[1])


def test_one_tangent_for_two_primals_that_are_written_to():
    x, y, t = data(2), data(2), data(2)
    before = t.clone()
    f = lambda x, y: x.mul_(3) * y
    got = jvp(f, (x.clone(), y), (t, t))[1]
    assert_same(got, 3 * before * y + 3 * x * before)


def test_a_captured_tensor_cannot_take_a_tangent():
    kept = torch.zeros(2, dtype=D)
    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
        jvp(lambda x: kept.add_(x), (data(2),), (data(2),))
    assert_same(kept, torch.zeros(2, dtype=D))


def test_running_statistics_follow_the_primal():
    norm, x = torch.nn.BatchNorm1d(2).double(), data(5, 2)
    twin = torch.nn.BatchNorm1d(2).double()
    twin(x)
    jvp(norm, (x,), (x,))
    assert_same(norm.running_mean, twin.running_mean)
    assert_same(norm.running_var, twin.running_var)


# --- nestings --------------------------------------------------------------------------------------------------------


def test_perturbations_are_not_confused():
    x = data(())
    inner = lambda y: jvp(lambda x: x * y, (torch.ones((), dtype=D),), (torch.ones((), dtype=D),))[1]
    assert_same(jvp(lambda x: x * inner(x), (x,), (torch.ones((), dtype=D),))[1], 2 * x)


@pytest.mark.parametrize("order", [2, 3])
def test_jvp_of_jvp(order):
    check(lambda x: (x.sin() * x.exp()).cumsum(0) / (1 + x * x), data(3), order=order)


def test_native_forward_mode_outside_and_inside():
    x, t, u = data(3), data(3), data(3)
    f = lambda x: (x.sin() * x).cumsum(0)
    want = jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (u,))
    with native.dual_level():
        pair = native.unpack_dual(jvp(f, (native.make_dual(x, u),), (t,))[1])
        assert_same(pair.primal, want[0])
        assert_same(pair.tangent, want[1])

    def inside(x):
        with native.dual_level():
            return native.unpack_dual(f(native.make_dual(x, t))).tangent

    got = jvp(inside, (x,), (u,))
    assert_same(got, want)


_CUBES = lambda x: (x**3).cumsum(0).sin().sum()


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        grad(_CUBES),
        hessian(_CUBES),
        jacrev(lambda x: x**2 * x.flip(0)),
        lambda x: grad_and_value(_CUBES)(x)[1] * x,
        lambda x: vjp(lambda x: x**3, x)[1](x)[0],
        lambda x: vjp(lambda x: x**3, x)[0],
        lambda x: vmap(grad(_CUBES))(x[None])[0],
        lambda x: grad(lambda s: _CUBES(s * x))(torch.ones((), dtype=D)),
    ],
)
def test_transforms_of_tensors_with_native_tangents(f, tracked):
    """What comes out has the tangent that it has in a loop of differences."""
    x, t = data(3), data(3) + 0.5
    want = difference(f, (x,), (t,))[0]
    with native.dual_level():
        out = f(native.make_dual(x.clone().requires_grad_(tracked), t))
        assert_same(native.unpack_dual(out).tangent.detach(), want, FIRST)


def test_autograd_around_and_inside():
    x, t = data(3).requires_grad_(), data(3)
    f = lambda x: (x**3).sum()
    (outside,) = torch.autograd.grad(jvp(f, (x,), (t,))[1], x)
    plain = x.detach()
    inside = jvp(lambda x: torch.autograd.grad(f(x.requires_grad_()), x)[0], (plain,), (t,))[1]
    assert_same(outside, 6 * plain * t)
    assert_same(jvp(grad(f), (plain,), (t,))[1], 6 * plain * t)
    assert_same(inside.detach(), 6 * plain * t)
    _, pull = vjp(lambda x: jvp(f, (x,), (t,))[1], plain)
    assert_same(pull(torch.ones((), dtype=D))[0], 6 * plain * t)


def test_lanes_in_the_tangents_alone_or_in_the_primals_alone():
    x, ts = data(3), data(4, 3)
    f = lambda x: torch.cat([x.sin(), x.prod(0, keepdim=True), F.softmax(x, 0)])
    want = torch.stack([jvp(f, (x,), (t,))[1] for t in ts])
    assert_same(vmap(lambda t: jvp(f, (x,), (t,))[1])(ts), want)
    want = torch.stack([jvp(f, (t,), (x,))[1] for t in ts])
    assert_same(vmap(lambda t: jvp(f, (t,), (x,))[1])(ts), want)
    assert_same(jacfwd(f)(x), jacrev(f)(x))


def test_products_at_zeros():
    x = torch.tensor([2.0, 0.0, 3.0, 0.0], dtype=D)
    t = torch.ones(4, dtype=D)
    for f in (torch.prod, lambda x: x.cumprod(0), lambda x: x.view(2, 2).prod(1)):
        check(f, x)
        check(f, x, order=2)
    assert_same(jvp(lambda x: jvp(torch.prod, (x,), (t,))[1], (x,), (t,))[1], torch.tensor(12.0, dtype=D))


def test_determinant_of_a_singular_matrix():
    a = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=D)
    t = data(2, 2)
    want = t[0, 0] * 4 + t[1, 1] - 2 * (t[0, 1] + t[1, 0])
    assert_same(jvp(torch.linalg.det, (a,), (t,))[1], want, (1e-6, 1e-6))


def test_symmetric_matrices_as_reverse_mode_sees_them():
    a = data(3, 3)
    a = a @ a.T + torch.eye(3, dtype=D)
    for f in (torch.linalg.cholesky, torch.linalg.eigvalsh, lambda a: torch.linalg.cholesky(a, upper=True)):
        assert_same(jacfwd(f)(a), jacrev(f)(a), (1e-7, 1e-9))


# --- torch's own formulas are not needed on hot paths ----------------------------------------------------------------


class Block(torch.nn.Module):
    """Convolution, normalisations, attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 4, 3, padding=1)
        self.batch = torch.nn.BatchNorm1d(4)
        self.group = torch.nn.GroupNorm(2, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.attend = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.wide = torch.nn.Linear(4, 8)
        self.narrow = torch.nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.group(self.batch(self.conv(x))))
        x = F.max_pool1d(x, 2).transpose(1, 2)
        x = x + self.attend(self.norm(x), x, x)[0]
        x = F.dropout(F.gelu(self.wide(x)) + F.silu(self.wide(x)), 0.0)
        return self.narrow(x).mean(1)


def test_hot_paths_have_rules():
    net = Block().double()
    x, target = data(2, 2, 8), torch.tensor([0, 2])
    weights = {name: p.detach() for name, p in net.named_parameters()}
    loss = lambda w: F.cross_entropy(functional_call(net, w, (x,)), target)
    before = dict(native_formulas)
    jvp(loss, (weights,), (weights,))
    _, pushed = jvp(grad(loss), (weights,), (weights,))
    after = {name: n - before.get(name, 0) for name, n in native_formulas.items() if n != before.get(name, 0)}
    assert after == {}
    eps = 1e-6
    moved = [grad(loss)({k: w * (1 + s * eps) for k, w in weights.items()}) for s in (1, -1)]
    for name, value in pushed.items():
        assert_same(value, (moved[0][name] - moved[1][name]) / (2 * eps), (1e-4, 1e-6))


def test_hessian_of_a_network():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    x = data(3)
    f = lambda x: net(x).sum()
    assert_same(hessian(f)(x), jacfwd(jacfwd(f))(x))
    assert_same(jacfwd(jacrev(f))(x), torch.autograd.functional.hessian(f, x))


def test_lists_of_tensors_written_in_place():
    """As many tensors as each has rows: the results of all are not to be taken for rows of the first."""

    def f(x):
        x = x * 1
        parts = [x[0], x[1]]
        torch._foreach_mul_(parts, [3.0, 4.0])
        torch._foreach_add_(parts, [2 * part for part in parts[::-1]])
        torch._foreach_sin_(parts)
        return x * 1

    xs, ts = torch.rand(3, 2, 2, dtype=torch.float64), torch.rand(3, 2, 2, dtype=torch.float64)
    pushed = [(torch.autograd.functional.jacobian(f, x) * t).sum((2, 3)) for x, t in zip(xs, ts, strict=True)]
    value, tangent = jvp(f, (xs[0],), (ts[0],))
    assert torch.allclose(value, f(xs[0])) and torch.allclose(tangent, pushed[0])
    assert torch.allclose(vmap(lambda x, t: jvp(f, (x,), (t,))[1])(xs, ts), torch.stack(pushed))
