"""linearize: one run of the function; its derivative function as a function of the tangents and of the primals."""

import pytest
import torch
import torch.nn.functional as F

from lanewise import grad, jacfwd, jacrev, jvp, linearize, vmap
from tests.oracles import assert_same

D = torch.float64


def data(*shape):
    return torch.randn(*shape, dtype=D)


def smooth(x):
    return torch.tanh(x.outer(x) @ x).cumsum(0) * x


def _in_place(x):
    y = x.exp()
    z = y * x
    y.mul_(2)
    y[0] = x[1] * 3
    z.view(3, 1).add_(y[:, None])
    return z, y


def _filled(x):
    z = torch.zeros(3, dtype=D)
    z[1] = x[0]
    kept = z.clone()
    z[2] = x[2] ** 2
    return z + kept, z.argmax(), torch.ones(2)


def _network(x):
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 8), torch.nn.ReLU(inplace=True), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers).double()(x)


FUNCTIONS = {
    "smooth": smooth,
    "in place": _in_place,
    "filled": _filled,
    "network": _network,
    "branch": lambda x: x.sin() if x[0] > 0 else x.cos(),
    "gradient": grad(lambda x: (smooth(x) ** 2).sum()),
    "jvp": lambda x: jvp(smooth, (x,), (x.sin(),))[1],
    "vmap": lambda x: vmap(lambda a, b: a * b.sin(), in_dims=(0, None))(x, x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 1)] * 3),
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None] * 2),
    "inverse": lambda x: torch.linalg.inv(torch.diag(x) + 3 * torch.ones(3, 3, dtype=D)),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(torch.diag(x) + torch.ones(3, 3, dtype=D)),
    "sort": lambda x: x.sort()[0],
    "nearest": lambda x: F.interpolate(x[None, None], scale_factor=2),
    "nearest, planes": lambda x: F.interpolate((x * x[:, None])[None, None], scale_factor=1.5),
    "nearest, volumes": lambda x: F.interpolate((x * x[:, None] * x[:, None, None])[None, None], scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x[None, None], scale_factor=1.5, mode="nearest-exact"),
    "nearest-exact, planes": lambda x: F.interpolate((x * x[:, None])[None, None], size=(4, 2), mode="nearest-exact"),
    "constant": lambda x: torch.ones(2),
    "nothing at all": lambda x: x,
}


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_against_jvp(f):
    x, ts = data(3), data(4, 3)
    value, push = linearize(f, x)
    want = [jvp(f, (x,), (t,)) for t in ts]
    assert_same(value, want[0][0])
    for t, (_, pushed) in zip(ts, want, strict=True):
        assert_same(push(t), pushed)
    lanes, first = vmap(push)(ts), push(ts[0])
    for n in range(len(first) if isinstance(first, tuple) else 1):
        column = torch.stack([pushed[n] if isinstance(first, tuple) else pushed for _, pushed in want])
        assert_same(lanes[n] if isinstance(first, tuple) else lanes, column)


def test_the_function_runs_once():
    calls = []
    _, push = linearize(lambda x: calls.append(1) or smooth(x), data(3))
    push(data(3))
    push(data(3))
    assert len(calls) == 1


def test_random_numbers_are_those_of_the_run():
    x = torch.ones(100, dtype=D)
    value, push = linearize(lambda x: F.dropout(x * 2, 0.5) + torch.rand(100, dtype=D) * 0, x)
    for _ in range(2):
        assert_same(push(x), value)


def test_derivatives_of_the_derivative_function():
    x, t = data(3), data(3)
    _, push = linearize(smooth, x)
    jacobian = jacrev(smooth)(x)
    assert_same(jacrev(push)(t), jacobian)
    assert_same(jacfwd(push)(t), jacobian)
    assert_same(jvp(push, (t,), (t,))[1], push(t))


def test_derivatives_through_the_primals():
    x, t, u = data(3), data(3), data(3)
    along = lambda x: linearize(smooth, x)[1](t)
    reference = lambda x: jvp(smooth, (x,), (t,))[1]
    assert_same(grad(lambda x: linearize(torch.sin, x)[1](torch.ones(3, dtype=D)).sum())(x), -x.sin())
    assert_same(jacrev(along)(x), jacrev(reference)(x))
    assert_same(jvp(along, (x,), (u,)), jvp(reference, (x,), (u,)))
    leaf = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(along(leaf).sum(), leaf)
    assert_same(plain, jacrev(reference)(x).sum(0))


def test_mapped():
    xs, ts = data(4, 3), data(4, 3)
    want = torch.stack([jvp(smooth, (x,), (t,))[1] for x, t in zip(xs, ts, strict=True)])
    assert_same(vmap(lambda x, t: linearize(smooth, x)[1](t))(xs, ts), want)


def test_captured_values_are_differentiated():
    def f(a):
        return linearize(lambda x: a * x.sin(), a)[1](torch.ones(3, dtype=D))

    x = data(3)
    assert_same(jacfwd(f)(x), torch.diag(x.cos() - x * x.sin()))
    assert_same(jacrev(f)(x), jacfwd(f)(x))


def test_tangents_of_other_strides_are_not_written_to():
    x, t = data(3, 2), data(2, 3).t()
    before = t.clone()
    f = lambda x: x.mul_(2).view(-1) * 3
    assert_same(linearize(f, x.clone())[1](t), 6 * before.reshape(-1))
    assert_same(t, before)


def test_trees():
    x, t = data(2), data(2)
    value, push = linearize(lambda d, y: {"a": d["x"] * y[0]}, {"x": x}, [x])
    assert_same(value["a"], x * x)
    assert_same(push({"x": t}, [t])["a"], 2 * x * t)


@pytest.mark.parametrize(
    ("tangents", "text"),
    [
        ((torch.ones(2), torch.ones(2)), "to have the same argspec as the primals"),
        ((torch.ones(3),), "tangent:0 with shape torch.Size([3]) in flattened pytree doesn't match the shape"),
        ((torch.ones(2, dtype=D),), "tangent:0 with dtype torch.float64 in flattened pytree doesn't match the dtype"),
        ((torch.ones(2, device="meta"),), "tangent:0 with device meta in flattened pytree doesn't match the device"),
    ],
)
def test_tangents_that_do_not_match(tangents, text):
    _, push = linearize(torch.sin, torch.ones(2))
    with pytest.raises(RuntimeError) as caught:
        push(*tangents)
    assert text in str(caught.value)


def test_a_captured_tensor_that_the_derivative_needs_was_changed():
    kept = torch.ones(2, dtype=D)

    def f(x):
        y = x * kept
        kept.mul_(2)
        return y

    with pytest.raises(RuntimeError, match="was modified by an in-place operation"):
        linearize(f, data(2))


def _scaled_twice(x):
    y = x.sin()
    y *= x
    y *= 2
    return y


def _product_then_sum(x):
    y = x * 1.0
    y.mul_(x.clone())
    y.add_(1.0)
    return y


def _written_through_a_view(x):
    y = x.clone()
    y[1:].mul_(x[1:])
    y.sin_()
    return y


def _square_in_place(x):
    y = x * 1.0
    y.mul_(x)
    return y


@pytest.mark.parametrize("f", [_scaled_twice, _product_then_sum, _written_through_a_view, _square_in_place])
def test_values_overwritten_more_than_once(f):
    x, t = data(3), data(3)
    _, push = linearize(f, x)
    alias = x.clone().requires_grad_()
    ((pushed,),) = [torch.autograd.functional.jvp(lambda x: (f(x),), alias, t)[1]]
    assert_same(push(t), pushed.detach())


def test_a_primal_changed_after_the_function_had_run():
    x = data(3)
    _, push = linearize(lambda x: x * x, x)
    x.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an in-place operation after the function had run"):
        push(data(3))


REFITTED = {
    "vector times matrix": lambda g, w: g @ w,
    "squeeze_": lambda g, w: (g[None] @ w).squeeze_(0),
    "squeeze_ of all": lambda g, w: (g[None] @ w).squeeze_(),
    "unsqueeze_": lambda g, w: g.clone().unsqueeze_(0).mm(w)[0],
    "t_": lambda g, w: (w.t() @ g[:, None]).t_()[0],
    "transpose_": lambda g, w: (w.t() @ g[:, None]).transpose_(0, 1)[0],
    "as_strided_": lambda g, w: (g[None] @ w).as_strided_((4,), (1,)),
    "of a view, then a write": lambda g, w: _doubled_through_a_view((g[None] @ w) / 2),
}


def _doubled_through_a_view(x):
    y = x[:, :]
    y.squeeze_(0).mul_(2)
    return x[0]


@pytest.mark.parametrize("with_lanes", [False, True], ids=["alone", "over vmap"])
@pytest.mark.parametrize("formula", REFITTED.values(), ids=REFITTED.keys())
def test_shapes_changed_in_place_in_a_backward(formula, with_lanes):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return w @ x

        @staticmethod
        def backward(ctx, g):  # type: ignore[override]
            x, w = ctx.saved_tensors
            return formula(g, w), g[:, None] * x

    x, w, t, s = data(3, 4), data(3, 2, 4), data(3, 4), data(3, 2, 4)
    want = (w @ t[..., None] + s @ x[..., None])[..., 0]
    if with_lanes:
        assert_same(linearize(vmap(Product.apply), x, w)[1](t, s), want)
        assert_same(vmap(lambda x, w, t, s: linearize(Product.apply, x, w)[1](t, s))(x, w, t, s), want)
    else:
        assert_same(linearize(Product.apply, x[0], w[0])[1](t[0], s[0]), want[0])
