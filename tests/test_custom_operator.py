"""`torch.library.custom_op` under the transforms: its own backward and vmap rules, and tangents derived from them."""

import numpy
import pytest
import torch
from torch import Tensor

from lanewise import errors, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from tests.oracles import assert_same, loop_vmap

XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
W = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@torch.library.custom_op("lanewise_tests::numpy_mul", mutates_args=())
def numpy_mul(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(numpy.multiply(x.numpy(force=True), w.numpy(force=True)) * scale)


@numpy_mul.register_fake
def _(x, w, scale=1.0):
    return torch.empty_like(x)


def save_operands(ctx, inputs, output):
    x, w, ctx.scale = inputs
    ctx.save_for_backward(x, w)


def mul_backward(ctx, g):
    x, w = ctx.saved_tensors
    return g * w * ctx.scale, g * x * ctx.scale, None


numpy_mul.register_autograd(mul_backward, setup_context=save_operands)


@torch.library.custom_op("lanewise_tests::ranks", mutates_args=())
def ranks(x: Tensor) -> Tensor:
    return x.argsort()


@torch.library.custom_op("lanewise_tests::undifferentiable", mutates_args=())
def undifferentiable(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("lanewise_tests::sin_by_rule", mutates_args=())
def sin_by_rule(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * w, x + w


sin_by_rule.register_autograd(
    lambda ctx, g, h: (g * ctx.saved_tensors[0].cos() * ctx.saved_tensors[1] + h, g * ctx.saved_tensors[0].sin() + h),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
seen = []


@sin_by_rule.register_vmap
def _(info, in_dims, x, w):
    seen.append((info.batch_size, info.randomness, in_dims))
    x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
    w = w.movedim(in_dims[1], 0) if in_dims[1] is not None else w.expand(info.batch_size, *w.shape)
    return sin_by_rule(x.contiguous(), w.contiguous()), (0, 0)


def f(x):
    return numpy_mul(numpy_mul(x, W, 2.0), x.sin())


def f_plain(x):
    return x * W * 2.0 * x.sin()


slow = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


@slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        vmap,
        lambda f: vmap(grad(lambda x: f(x).sum())),
        lambda f: grad(lambda xs: vmap(f)(xs).sum()),
        lambda f: lambda xs: jvp(f, (xs,), (xs,))[1],
        lambda f: vmap(lambda x: jvp(f, (x,), (x,))[1]),
        lambda f: lambda xs: jvp(vmap(f), (xs,), (xs,))[1],
        lambda f: lambda xs: jacfwd(f)(xs[0]),
        lambda f: lambda xs: jacrev(f)(xs[0]),
        lambda f: lambda xs: jacfwd(jacfwd(f))(xs[0]),
        lambda f: lambda xs: hessian(lambda x: f(x).sum())(xs[0]),
        lambda f: lambda xs: vjp(vmap(f), xs)[1](xs)[0],
        lambda f: vmap(grad(lambda y: grad(lambda x: f(x).sum())(y).sum())),
        lambda f: grad(lambda xs: vmap(grad(lambda x: f(x).sum()))(xs).sum()),
        lambda f: vmap(grad(lambda y: jvp(f, (y,), (y,))[1].sum())),
    ],
)
def test_as_the_plain_function(transform):
    """No tangent is silently zero, no gradient lost."""
    assert_same(transform(f)(XS), transform(f_plain)(XS))


@slow
def test_captured_parameter():
    w = W.clone().requires_grad_()
    out = vmap(grad(lambda x: numpy_mul(x, w).sin().sum()))(XS)
    (got,) = torch.autograd.grad(out.sum(), w)
    want = W.clone().requires_grad_()
    assert_same(got, torch.autograd.grad(((XS * want).cos() * want).sum(), want)[0])


def test_users_rule():
    seen.clear()
    got = vmap(sin_by_rule, in_dims=(0, None))(XS, W)
    assert seen == [(4, "error", (0, None))]
    assert_same(got, (XS.sin() * W, XS + W))
    got = vmap(vmap(lambda x, w: sin_by_rule(x, w)[0], in_dims=(0, None)), in_dims=(1, 0), randomness="same")(
        XS.reshape(2, 2, 3), torch.stack([W, 2 * W])
    )
    want = loop_vmap(loop_vmap(lambda x, w: x.sin() * w, in_dims=(0, None)), in_dims=(1, 0))
    assert_same(got, want(XS.reshape(2, 2, 3), torch.stack([W, 2 * W])))
    got = vmap(grad(lambda x: sin_by_rule(x, W)[0].sum()))(XS)
    assert_same(got, XS.cos() * W)
    got = grad(lambda xs: vmap(lambda x: sin_by_rule(x, W)[0].sum())(xs).sum())(XS)
    assert_same(got, XS.cos() * W)
    got = jvp(vmap(lambda x: sin_by_rule(x, W)[0]), (XS,), (XS,))[1]
    assert_same(got, XS.cos() * W * XS)


@slow
def test_without_a_formula():
    assert_same(vmap(undifferentiable)(XS), XS * 2)
    assert_same(vmap(ranks)(XS), XS.argsort(1))
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad(lambda x: undifferentiable(x).sum())(XS)
    with pytest.raises((RuntimeError, errors.FunctionError), match="no autograd formula was registered"):
        jvp(undifferentiable, (XS,), (XS,))
    out, tangent = jvp(lambda x: x[ranks(x)], (XS[0],), (XS[1],))
    assert_same((out, tangent), (XS[0].sort().values, XS[1][XS[0].argsort()]))


def test_lane_loop_is_said_once():
    @torch.library.custom_op("lanewise_tests::once", mutates_args=())
    def once(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.warns(errors.SlowPathWarning, match="lanewise_tests.once"):
        assert_same(vmap(once)(XS), XS)
    assert_same(vmap(once)(XS), XS)


@torch.library.custom_op("lanewise_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
def test_what_an_operator_draws():
    """Without a vmap rule it runs once per lane, and draws as `randomness` says."""
    xs = torch.zeros(4, 3)
    assert len(vmap(noisy, randomness="different")(xs).unique(dim=0)) == 4
    torch.manual_seed(0)
    same = vmap(noisy, randomness="same")(xs)
    torch.manual_seed(0)
    assert torch.equal(same, noisy(xs[0]).expand(4, 3))
    with pytest.raises(errors.RandomnessError, match="lanewise_tests::noisy"):
        vmap(noisy)(xs)
    nested = vmap(vmap(noisy, randomness="same"), randomness="different")(xs.view(2, 2, 3))
    assert torch.equal(nested[0, 0], nested[0, 1]) and not torch.equal(nested[0], nested[1])


@torch.library.custom_op("lanewise_tests::noisy_in_place", mutates_args=("x",))
def noisy_in_place(x: Tensor) -> None:
    x.add_(torch.rand_like(x))


@torch.library.custom_op("lanewise_tests::noisy_by_rule", mutates_args=())
def noisy_by_rule(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noisy_by_rule.register_vmap
def _(info, in_dims, x):
    return x + torch.rand_like(x), 0


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x + torch.rand_like(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, x):
        return x + torch.rand_like(x), 0


def _written(x):
    y = x.clone()
    noisy_in_place(y)
    return y


def _in_a_branch(x):
    return noisy(x) if noisy(x).sum() > 1 else noisy(x) + noisy_by_rule(x)


def _run_again(x):
    return [noisy_by_rule(x), noisy(x)][int(noisy(x).sum() > 1)]


DRAWING = {
    "by lane": noisy,
    "written": _written,
    "by rule": noisy_by_rule,
    "function by rule": Noisy.apply,
    "branch": _in_a_branch,
    "run again": _run_again,
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", DRAWING)
def test_lanes_of_all_chunks_draw_their_own(name):
    f, xs = DRAWING[name], torch.zeros(6, 2)
    states = []
    for size in (None, 2, 4):
        torch.manual_seed(0)
        out = vmap(f, randomness="different", chunk_size=size)(xs)
        assert len(out.unique()) == out.numel()
        states.append((out, torch.rand(3)))
        assert not torch.isin(states[-1][1], out).any()
    if name in ("by lane", "written"):  # which lane it is decides the numbers
        for state in states:
            assert torch.equal(state[0], states[0][0]) and torch.equal(state[1], states[0][1])
    nested = vmap(vmap(f, randomness="different", chunk_size=2), randomness="different", chunk_size=1)
    assert len(nested(xs.view(2, 3, 2)).unique()) == 12


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
def test_what_draws_nothing_leaves_the_generator_alone():
    torch.manual_seed(0)
    vmap(ranks, randomness="different", chunk_size=2)(XS)
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.filterwarnings("ignore:vmap. There is a performance drop")
def test_what_writes_has_no_forward_mode():
    @torch.library.custom_op("lanewise_tests::doubled_into", mutates_args=("out",))
    def doubled_into(out: Tensor, x: Tensor) -> None:
        out.copy_(x * 2)

    def f(x):
        out = torch.zeros(3)
        doubled_into(out, x)
        return out

    xs = torch.rand(2, 3)
    assert torch.equal(vmap(f)(xs), xs * 2)
    with pytest.raises(errors.FunctionError, match="doubled_into.*writes to its operands"):
        jvp(f, (xs[0],), (xs[0],))


@torch.library.custom_op("lanewise_tests::stacked_by_rule", mutates_args=())
def stacked_by_rule(x: Tensor) -> Tensor:
    return x * 3


@stacked_by_rule.register_vmap
def _(info, in_dims, x):
    return torch.stack([stacked_by_rule(row) for row in x.unbind(in_dims[0])]), 0


stacked_by_rule.register_autograd(lambda ctx, g: g * 3)


class Stacked(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 3

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.stack([Stacked.apply(row) for row in x.unbind(in_dims[0])]), 0


@pytest.mark.parametrize("f", [stacked_by_rule, Stacked.apply], ids=["operator", "function"])
def test_a_rule_that_stacks_has_shapes_where_there_are_no_lanes(f):
    none, leaf = torch.ones(0, 3), torch.ones(0, 3, requires_grad=True)
    for _ in range(3):
        assert_same(vmap(f)(none), none)
        assert_same(vmap(vmap(f))(torch.ones(2, 0, 3)), torch.ones(2, 0, 3))
        assert_same(vmap(vmap(f))(torch.ones(0, 2, 3)), torch.ones(0, 2, 3))
        assert_same(vmap(grad(lambda x: f(x).sum()))(none), none)
        assert_same(grad(lambda x: vmap(f)(x).sum())(none), none)
        assert_same(torch.autograd.grad(vmap(f)(leaf).sum(), leaf)[0], none)
    with pytest.raises(RuntimeError, match="by a rule"):
        vmap(fails_by_rule)(torch.ones(2, 3))


@torch.library.custom_op("lanewise_tests::fails_by_rule", mutates_args=())
def fails_by_rule(x: Tensor) -> Tensor:
    return x * 3


@fails_by_rule.register_vmap
def _(info, in_dims, x):
    raise RuntimeError("by a rule")
