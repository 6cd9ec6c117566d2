"""Inference mode around transforms and inside: values, derivatives, views and branches as elsewhere."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lanewise import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from tests.oracles import assert_same

XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
W = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def _newton(a):
    x = a
    while (x * x - a).abs() > 1e-6 * a:
        x = 0.5 * (x + a / x)
    return x


def _sum_of_some(a):
    total = 0.0
    for i in range(3):
        if a > i + 2.5:
            total = total + a * a * 0.5
    return total * a


IN_BRANCHES = {
    "newton": _newton,
    "sum of some": _sum_of_some,
    "expression in a branch": lambda a: a + a * 0.5 if a > 3 else a,
    "as many turns": lambda a: sum((a + i * a for i in range(int(a))), a * a),
}


@pytest.mark.parametrize("f", IN_BRANCHES.values(), ids=IN_BRANCHES)
@pytest.mark.parametrize("transform", [lambda f: f, grad, lambda f: lambda a: jvp(f, (a,), (a,))])
def test_branches_in_inference_mode(f, transform):
    numbers = torch.tensor([2.0, 9.0, 3.5])
    want = vmap(transform(f))(numbers)
    with torch.inference_mode():
        assert_same(vmap(transform(f))(numbers), want)
        assert_same(vmap(transform(f))(numbers.clone()), want)


# Of these, torch has the formula, or two reverse passes give the tangent.
TANGENTS_BY_TORCH = {
    "inv": torch.linalg.inv,
    "qr": lambda x: torch.linalg.qr(x).R,
    "solve_triangular": lambda x: torch.linalg.solve_triangular(x.tril(), x, upper=False),
    "matrix_exp": torch.linalg.matrix_exp,
    "huber_loss": lambda x: torch.nn.functional.huber_loss(x, x.T.sin()),
    "dist": lambda x: torch.dist(x, x.T.sin(), 3),
    "scatter_reduce": lambda x: x.scatter_reduce(0, torch.tensor([[0, 1, 0]]), x * 2, "prod"),
    "bessel_j0": torch.special.bessel_j0,
    "custom Function": lambda x: Cube.apply(x),
    "gradient of det": grad(torch.linalg.det),
}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


@pytest.mark.parametrize("f", TANGENTS_BY_TORCH.values(), ids=TANGENTS_BY_TORCH)
@pytest.mark.parametrize("made", ["outside", "in inference mode"])
def test_tangents_in_inference_mode(f, made):
    """Forward mode has no need of autograd's records, and gives in inference mode what it gives elsewhere."""
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(2, 4, 3, 3, dtype=torch.float64, generator=generator)
    x = x + 2 * torch.eye(3)
    runs = [
        lambda x, t: jvp(f, (x[0],), (t[0],)),
        lambda x, t: vmap(lambda x, t: jvp(f, (x,), (t,)))(x, t),
        lambda x, t: jvp(vmap(f), (x,), (t,)),
        lambda x, t: linearize(f, x[0])[1](t[0]),
        lambda x, t: jacfwd(f)(x[0]),
    ]
    for run in runs:
        want = run(x, t)
        with torch.inference_mode():
            assert_same(run(x, t) if made == "outside" else run(x.clone(), t.clone()), want)


VIEWS = {
    "view": lambda x: x.view(-1),
    "select": lambda x: x[0],
    "slice": lambda x: x[:, 1:] * x[:, :1],
    "unbind": lambda x: x.unbind()[1],
    "transpose": lambda x: x.t() @ x,
    "expand": lambda x: x[None].expand(2, 2, 3),
    "detach": lambda x: x.detach(),
    "reshape": lambda x: x.reshape(3, 2),
    "real and imaginary part": lambda x: torch.view_as_real(torch.complex(x, x.sin())),
    "written": lambda x: x.clone()[0].mul_(x[1]),
    "argument written": lambda x: x.view(-1).mul_(2.0),
    "squeezed in place": lambda x: x.clone().unsqueeze_(0).squeeze_(0),
    "branch": lambda x: x[0] * 2 if x.sum() > 0 else x[1],
    "linear": lambda x: torch.nn.functional.linear(x, W.t()),
}


@pytest.mark.parametrize("f", VIEWS.values(), ids=VIEWS)
def test_views_in_inference_mode_inside(f):
    """Of tensors that were made before it, as in a function that evaluates a model."""
    xs = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def quiet(x):
        with torch.inference_mode():
            return f(x)

    want = torch.stack([f(x) for x in xs.clone()])
    for run in (
        vmap(quiet),
        lambda xs: vmap(vmap(quiet))(xs[None])[0],
        lambda xs: torch.stack([jvp(quiet, (x,), (x.clone(),))[0] for x in xs]),
    ):
        assert_same(run(xs.clone()), want)
    leaves = [x.clone().requires_grad_() for x in xs]
    losses = [(x * quiet(x.detach().clone()).sum()).sum() for x in leaves]
    known = torch.stack([torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, leaves, strict=True)])
    assert_same(vmap(grad(lambda x: (x * quiet(x.detach().clone()).sum()).sum()))(xs.clone()), known)


class Chosen(torch.autograd.Function):
    """Its formula asks which way a lane goes, so that it runs for each lane."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0.1)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 2 * x if x.sum() > 0 else cotangent * (x > 0.1) * x


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize(
    "run",
    [
        lambda x: vmap(lambda x: jvp(Chosen.apply, (x,), (x,))[1])(x),
        lambda x: jvp(vmap(Chosen.apply), (x,), (x,))[1],
        lambda x: vmap(jacfwd(Chosen.apply))(x),
        lambda x: vmap(hessian(lambda x: (Chosen.apply(x) ** 2).sum()))(x),
        lambda x: vmap(grad(lambda x: grad(lambda x: Chosen.apply(x).sum())(x).sum()))(x),
    ],
)
def test_formulas_for_each_lane_in_inference_mode(run):
    want = run(XS)
    with torch.inference_mode():
        assert_same(run(XS), want)


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layers_in_inference_mode(layer, dtype):
    """Compositions there come to the planes as they are, and go the way of torch's own kernels all the same."""
    torch.manual_seed(0)
    module, x = layer(3, 2).to(dtype), torch.randn(2, 4, 2, 3, dtype=dtype)
    plain = lambda x: module(x)[0]
    packed = lambda x: pad_packed_sequence(module(pack_padded_sequence(x, torch.tensor([4, 2])))[0], total_length=5)[0]
    for f in (
        lambda x, t: vmap(lambda x, t: jvp(plain, (x,), (t,)))(x, t),
        lambda x, t: jvp(plain, (x[0],), (t[0],)),
        lambda x, t: jvp(packed, (x[0],), (t[0],)),
        lambda x, t: vmap(vmap(packed))(x[None]),
    ):
        want = f(x, x.cos())
        want = want if isinstance(want, tuple) else (want,)
        with torch.inference_mode():
            got = f(x, x.cos())
        assert_same(got if isinstance(got, tuple) else (got,), tuple(part.detach() for part in want))


def _written(x, i):
    i.add_(1)
    return (x[i] ** 2).sum()


WITH_AN_INDEX = {
    "index": lambda x, i: (x[i] ** 2).sum(),
    "gather": lambda x, i: (x.gather(0, i) ** 3).sum(),
    "scatter": lambda x, i: (torch.zeros_like(x).scatter_add(0, i, x[:2].sin()) ** 2).sum(),
    "cross entropy": lambda x, i: torch.nn.functional.cross_entropy(x, i[0]),
    "weights": lambda x, i: (x * i.sum() * x.sin()).sum(),
    "index that it writes to": _written,
}
AT = {
    "grad": lambda f: lambda xs, at: grad(f)(xs[0], at[0]),
    "grad, by name": lambda f: lambda xs, at: grad(lambda x, *, i: f(x, i))(xs[0], i=at[0]),
    "vmap(grad)": lambda f: vmap(grad(f)),
    "vmap(jacrev)": lambda f: vmap(jacrev(f)),
    "vmap(hessian)": lambda f: vmap(hessian(f)),
    "grad(vmap)": lambda f: grad(lambda xs, at: vmap(f)(xs, at).sum()),
    "vmap(vmap(grad))": lambda f: lambda xs, at: vmap(vmap(grad(f)))(xs[None], at[None]),
}


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("transform", AT.values(), ids=AT)
@pytest.mark.parametrize("f", WITH_AN_INDEX.values(), ids=WITH_AN_INDEX)
def test_arguments_that_are_not_differentiated(f, transform, made_inside):
    at = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]])
    left = at.clone()
    want = transform(f)(XS, left)
    with torch.inference_mode():
        given = at.clone() if made_inside else at
        got = transform(f)(XS.clone() if made_inside else XS, given)
        assert_same(got, want)
        assert_same(given, left)
