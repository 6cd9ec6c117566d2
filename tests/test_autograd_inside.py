"""torch.autograd inside mapped and differentiated functions, and around them: what a loop over the lanes gives."""

import functools
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.autograd import functional
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lanewise import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from tests.oracles import assert_same

XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
W = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def looped(f):
    return lambda xs, *rest: torch.stack([f(x, *rest) for x in xs])


def mapped(f):
    return lambda xs, *rest: vmap(f, in_dims=(0, *(None for _ in rest)))(xs, *rest)


def outer_gradients(run):
    """Value, requires_grad, gradients in x and w from outside, and what was left in `.grad` of w."""
    xs, w = XS.clone().requires_grad_(), W.clone().requires_grad_()
    out = run(xs, w)
    if out.requires_grad:
        by_x, by_w = torch.autograd.grad(out.sin().sum(), (xs, w), allow_unused=True, materialize_grads=True)
    else:
        by_x, by_w = torch.zeros_like(xs), torch.zeros_like(w)
    left = torch.zeros_like(w) if w.grad is None else w.grad.detach()
    return out.requires_grad, (out.detach(), by_x, by_w, left)


def grad_of_detached(x, w):
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((y * w).sin().sum(), y)
    return g * x


def grad_with_graph(x, w):
    y = x * 1.0
    y = y if y.requires_grad else y.requires_grad_()
    (g,) = torch.autograd.grad((y * w).sin().sum(), y, create_graph=True)
    return g.cos() * w


def grad_in_captured(x, w):
    (g,) = torch.autograd.grad((x * w).sin().sum(), w, retain_graph=True)
    return g * x


def grad_in_captured_with_graph(x, w):
    (g,) = torch.autograd.grad((x * w).sin().sum(), w, create_graph=True)
    return g * x


def unused_input(x, w):
    y, z = torch.ones_like(x).requires_grad_(), x.detach().requires_grad_()
    a, b = torch.autograd.grad((z * w).sum(), (y, z), allow_unused=True)
    assert a is None
    return b * x


def backward_on_own_leaf(x, w):
    y = x.detach().clone().requires_grad_()
    (y * w).sin().sum().backward()
    assert y.grad is not None
    return y.grad * x


def backward_twice_adds_up(x, w):
    y = x.detach().requires_grad_()
    for _ in range(2):
        (y * w.detach()).sin().sum().backward()
    assert y.grad is not None
    return y.grad * x


def backward_on_captured_leaf(x, w):
    (x.detach() * w).sin().sum().backward()
    return x * 2


def backward_by_function(x, w):
    a, b = (x.detach() * w).sin(), (w * w).sum()
    torch.autograd.backward([a, b], [torch.ones_like(a), None])
    return x * 2


def backward_into_chosen_inputs(x, w):
    y = x.detach().requires_grad_()
    (y * w).sin().sum().backward(inputs=[y])
    assert y.grad is not None
    return y.grad * x


def retained(x, w):
    y = x.detach().requires_grad_().sin()
    y.retain_grad()
    (y * y * w.detach()).sum().backward()
    assert y.grad is not None
    return y.grad + x


def hooked(x, w):
    y = x.sin() * w
    y.register_hook(lambda g: g * 10)
    return y * y


def cut(x, w):
    return x.detach() * x * w.detach() + x.data * w


def cut_by_function(x, w):
    return torch.detach(x) * x * torch.detach(w * x)


def cut_in_place(x, w):
    y = x * w
    y.detach_()
    return y * x


def leaf_flag(x, w):
    y = torch.zeros(3, dtype=torch.float64).requires_grad_()
    (g,) = torch.autograd.grad(((y + x.detach()) * w.detach()).sin().sum(), y)
    return g * x


def blocks(x, w):
    with torch.no_grad():
        a = x * w
    with torch.enable_grad():
        b = x.sin()
    return a * b


def saved_hooks(x, w):
    with saved_tensors_hooks(lambda t: (t * 1.0).detach(), lambda t: t):
        return (x * w).sin() * x


def on_cpu(x, w):
    with save_on_cpu():
        return (x * w).exp() * x


def checkpointed(x, w):
    return checkpoint(lambda a, b: (a * b).sin().exp() * a, x, w, use_reentrant=False)


def checkpointed_twice(x, w):
    inner = lambda a, b: checkpoint(lambda c, d: (c * d).sin(), a, b, use_reentrant=False).exp()
    return checkpoint(inner, x, w, use_reentrant=False)


def checkpointed_with_factories(x, w):
    def block(a, b):
        total = torch.zeros(3, dtype=torch.float64)
        total[0] = a[0] * b[1]
        return total + (a * b).sin()

    return checkpoint(block, x, w, use_reentrant=False)


def anomaly(x, w):
    with torch.autograd.set_detect_anomaly(True):
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((y * w).sin().sum(), y)
    return g * x


def functional_jacobian(x, w):
    return functional.jacobian(lambda y: (y * w).sin(), x, create_graph=True) @ x


def functional_hessian(x, w):
    return functional.hessian(lambda y: (y * w).sin().sum(), x) @ x


def functional_vjp(x, w):
    return functional.vjp(lambda y: (y * w).sin(), x, v=torch.ones_like(x), create_graph=True)[1]


def functional_jvp(x, w):
    return functional.jvp(lambda y: (y * w).sin(), x, v=torch.ones_like(x), create_graph=True)[1]


def functional_hvp(x, w):
    return functional.hvp(lambda y: (y * w).sin().sum(), x, v=torch.ones_like(x))[1] * x


def functional_jacobian_vectorized(x, w):
    return functional.jacobian(lambda y: (y * w).sin(), x, vectorize=True, create_graph=True) @ x


def functional_hessian_vectorized(x, w):
    return functional.hessian(lambda y: (y * w).sin().sum(), x, vectorize=True) @ x


def functional_jacobian_forward(x, w):
    return functional.jacobian(lambda y: (y * w).sin(), x, strategy="forward-mode", vectorize=True) @ x


def grads_batched(x, w):
    y = x.detach().requires_grad_()
    z = (y * w).sin()
    (g,) = torch.autograd.grad(z, y, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
    return g @ x


def native_forward(x, w):
    with forward_ad.dual_level():
        out = (forward_ad.make_dual(x, torch.ones_like(x)) * w).sin()
        return forward_ad.unpack_dual(out).tangent


INSIDE = [
    grad_of_detached,
    grad_with_graph,
    grad_in_captured,
    grad_in_captured_with_graph,
    unused_input,
    backward_on_own_leaf,
    backward_twice_adds_up,
    backward_on_captured_leaf,
    backward_by_function,
    backward_into_chosen_inputs,
    retained,
    hooked,
    cut,
    cut_by_function,
    cut_in_place,
    leaf_flag,
    blocks,
    saved_hooks,
    on_cpu,
    checkpointed,
    checkpointed_twice,
    checkpointed_with_factories,
    anomaly,
    functional_jacobian,
    functional_hessian,
    functional_vjp,
    functional_jvp,
    functional_hvp,
    functional_jacobian_vectorized,
    functional_hessian_vectorized,
    functional_jacobian_forward,
    grads_batched,
    native_forward,
]
by_name = pytest.mark.parametrize("f", INSIDE, ids=lambda f: f.__name__)


@by_name
def test_in_vmap(f):
    """Value and outer gradients; `.grad` of a captured leaf holds the sum over the lanes."""
    assert_same_outcome(outer_gradients(mapped(f)), outer_gradients(looped(f)))


@by_name
def test_in_two_vmaps(f):
    deep = lambda run: lambda xs, w: run(lambda rows, w: run(f)(rows, w))(xs.unflatten(0, (2, 2)), w)
    assert_same_outcome(outer_gradients(deep(mapped)), outer_gradients(deep(looped)))


@by_name
def test_in_vmap_of_grad(f):
    """The outer gradient of the inner one included."""
    if f in (grad_in_captured, backward_on_captured_leaf, backward_by_function):
        pytest.skip("has an effect of its own on the tensors that this test differentiates")

    def by_ours(x, w):
        return grad(lambda y: f(y, w).sin().sum())(x)

    def by_torch(x, w):
        with torch.enable_grad():
            y = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            value = f(y, w).sin().sum()
            return torch.autograd.grad(value, y, create_graph=True, allow_unused=True, materialize_grads=True)[0]

    assert_same_outcome(outer_gradients(mapped(by_ours)), outer_gradients(looped(by_torch)), flag=False)


@by_name
def test_in_jvp(f):
    """Tangents against differences; what is cut by detach has none."""
    if f in (cut, cut_by_function, cut_in_place, grad_of_detached, native_forward) or "functional" in f.__name__:
        pytest.skip("central differences do not see what is cut")
    if f in CUT_INSIDE:
        pytest.skip("central differences do not see what is cut")
    x, direction = XS[0], XS[1]
    run = lambda x: f(x, W.clone().requires_grad_())
    out, tangent = jvp(run, (x,), (direction,))
    assert_same(out.detach(), run(x).detach())
    step = 1e-5
    want = (run(x + step * direction) - run(x - step * direction)).detach() / (2 * step)
    assert_same(tangent.detach(), want, (1e-6, 1e-8))


CUT_INSIDE = (
    backward_on_own_leaf,
    backward_twice_adds_up,
    backward_into_chosen_inputs,
    unused_input,
    retained,
    leaf_flag,
    anomaly,
    grads_batched,
    blocks,
    saved_hooks,
)


def assert_same_outcome(got, want, flag=True):
    assert_same(got[1], want[1])
    if flag:
        assert got[0] == want[0], f"requires_grad is {got[0]}"


def test_captured_leaf_gets_one_sum():
    """Added to what is there; hooks of the leaf run once, after the sum."""
    w, seen = W.clone().requires_grad_(), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    w.grad = torch.ones(3, dtype=torch.float64)
    vmap(lambda x: (x * w).sum().backward())(XS)  # type: ignore[misc]
    assert_same(w.grad, 1 + XS.sum(0))
    assert len(seen) == 1
    assert type(w.grad) is torch.Tensor
    nested = W.clone().requires_grad_()
    vmap(vmap(lambda x: (x * nested).sum().backward()))(XS.reshape(2, 2, 3))
    assert_same(nested.grad, XS.sum(0))
    assert type(nested.grad) is torch.Tensor


def test_leaf_of_the_plane_between():
    """Made in the outer function, used in the inner: its gradient has the outer's lanes."""

    def f(row):
        w = torch.ones(3, dtype=torch.float64).requires_grad_()
        vmap(lambda x: (x * w).sum().backward() or x)(row)
        assert w.grad is not None
        return w.grad * row.sum()

    rows = XS.reshape(2, 2, 3)
    assert_same(vmap(f)(rows), torch.stack([row.sum(0) * row.sum() for row in rows]))


def test_module_trained_inside():
    """A whole small training step for each lane, with a module made outside."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()

    def loss(x):
        value = layer(x).sin().sum()
        value.backward()
        return value.detach()

    vmap(loss)(XS)
    got = layer.weight.grad
    assert got is not None
    layer.zero_grad()
    for x in XS:
        loss(x)
    assert layer.weight.grad is not None
    assert_same(got, layer.weight.grad)


def test_parameter_made_inside():
    def f(x):
        p = nn.Parameter(x)
        assert isinstance(p, nn.Parameter)
        assert p.is_leaf
        (p * p).sum().backward()
        assert p.grad is not None
        return p.grad

    assert_same(vmap(f)(XS), 2 * XS)


def test_optimizer_inside():
    """A few steps of gradient descent per lane."""

    def f(x):
        p = x.detach().clone().requires_grad_()
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            (p * p).sin().sum().backward()
            optimizer.step()
        return p.detach()

    assert_same(vmap(f)(XS), looped(f)(XS))


def test_module_hooks():
    layer, seen = nn.Linear(3, 2).double(), []
    layer.register_full_backward_hook(lambda module, into, out: seen.append(tuple(out[0].shape)))
    layer.register_forward_hook(lambda module, args, out: out * 2)
    got = vmap(grad(lambda x: layer(x).sum()))(XS)
    assert_same(got.detach(), (2 * layer.weight.sum(0)).detach().expand(4, 3))
    assert seen
    assert all(shape == (2,) for shape in seen)


def test_hook_inside_reaches_the_gradient_outside():
    xs = XS.clone().requires_grad_()
    f = lambda x: hooked(x, W)
    for run in (vmap(f), looped(f)):
        (g,) = torch.autograd.grad(run(xs).sum(), xs)
        assert_same(g, 20 * XS.sin() * XS.cos() * W * W)


def test_anomaly_mode_finds_the_lane():
    def f(x):
        y = x.detach().requires_grad_()
        with torch.autograd.set_detect_anomaly(True):
            return torch.autograd.grad(y.sqrt().sum() * 0, y)[0]

    xs = torch.tensor([[1.0], [0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="returned nan values"):
            vmap(f)(xs)
    assert_same(vmap(f)(xs + 1), torch.zeros(2, 1))


def _saved_by_policy(context, op, *args, **kwargs):
    kept = op in (torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _of_one_kind(x, w):
    return (x.sin() * w).cos().exp() * w.sum()


def _of_two_kinds(x, w):
    return (x.sin() * w).cos().exp() if x.sum() > 0 else (x.cos() * w).exp() * w.sum()


def _inside(f, x, w):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf, w).sum(), leaf, create_graph=True)[0]


@pytest.mark.parametrize("body", [_of_one_kind, _of_two_kinds])
def test_selective_checkpoint(body):
    """In a mapped function, around one, and with a backward of the function's own."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _saved_by_policy)
    kept = lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False, context_fn=contexts)
    f = kept(body)
    want = outer_gradients(looped(body))
    assert_same_outcome(outer_gradients(mapped(f)), want)
    assert_same_outcome(outer_gradients(kept(mapped(body))), want)
    xs, w = XS.clone(), W.clone()
    slopes = torch.stack([_inside(body, x, w) for x in xs]).detach()
    assert_same(vmap(grad(lambda x: f(x, w).sum()))(xs), slopes)
    assert_same(grad(lambda xs: mapped(f)(xs, w).sum())(xs), slopes)
    assert_same(vmap(lambda x: _inside(f, x, w))(xs), slopes)


def test_reentrant_checkpoint():
    """By `.backward()`: in a mapped function, around one, inside a backward of the function's own."""
    block = lambda a, w: checkpoint(lambda b, v: (b * v).sin().exp() * b, a, w, use_reentrant=True)

    def own(x, w):
        block(x, w).sum().backward()
        return x * 2

    programs = {
        "in vmap": lambda run: lambda xs, w: run(block)(xs, w).sum().backward(),
        "around vmap": lambda run: lambda xs, w: checkpoint(run(block), xs, w, use_reentrant=True).sum().backward(),
        "own backward": lambda run: lambda xs, w: run(own)(xs, w),
    }
    for name, program in programs.items():
        left = []
        for run in (mapped, looped):
            xs, w = XS.clone().requires_grad_(), W.clone().requires_grad_()
            program(run)(xs, w)
            left.append((xs.grad, w.grad))
        assert all(type(g) is torch.Tensor for g in left[0]), name
        assert_same(*left)


TRANSFORMED = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "linearize": lambda f: lambda x: linearize(f, x)[1](x),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: f(x).sum()),
    "jacfwd(jacrev)": lambda f: jacfwd(jacrev(f)),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(f)),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum())),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x.cos(),))[1]),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum()),
}


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED.keys())
def test_checkpoint_in_transforms(transform, kind):
    def block(x):
        return (x @ matrix).tanh()

    matrix = torch.randn(3, 3, dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64)
    f = lambda x: checkpoint(block, x, use_reentrant=kind == "reentrant") * x
    assert_same(transform(f)(x), transform(lambda x: block(x) * x)(x))


def test_checkpoint_around_transforms():
    def run(xs, w):
        inner = lambda xs, w: vmap(grad(lambda x: (x * w).sin().sum()))(xs)
        return checkpoint(inner, xs, w, use_reentrant=False)

    want = outer_gradients(lambda xs, w: (xs * w).cos() * w)
    assert_same_outcome(outer_gradients(run), want)


def test_checkpoint_repeats_the_dropout_mask():
    def f(x):
        return checkpoint(lambda y: nn.functional.dropout(y, 0.5) * y, x, use_reentrant=False)

    xs = torch.rand(6, 50, dtype=torch.float64) + 1
    leaf = xs.clone().requires_grad_()
    out = vmap(f, randomness="different")(leaf)
    (g,) = torch.autograd.grad(out.sum(), leaf)
    mask = out.detach() / xs**2
    assert_same(g, 2 * mask * xs)
    assert 2 < len(mask.sum(1).unique())


def test_saved_tensor_hooks_around():
    """Hooks set around a transform see values of every plane, and give back what they got."""
    count = []
    xs = XS.clone().requires_grad_()
    with saved_tensors_hooks(lambda t: count.append(t) or t, lambda t: t):
        out = vmap(lambda x: (x * W).exp())(xs)
    (g,) = torch.autograd.grad(out.sum(), xs)
    assert_same(g, (XS * W).exp() * W)
    assert count


def test_native_forward_mode_around():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(XS, torch.ones_like(XS))
        out = vmap(lambda x: (x * W).sin())(dual)
        assert_same(forward_ad.unpack_dual(out).tangent, (XS * W).cos() * W)
        out = vmap(grad(lambda x: (x * W).sin().sum()))(dual)
        assert_same(forward_ad.unpack_dual(out).tangent, -(XS * W).sin() * W * W)
        out = vmap(lambda x: x.detach() * x)(dual)
        assert_same(forward_ad.unpack_dual(out).tangent, XS)


def test_detach_cuts_the_tangent():
    out, tangent = jvp(lambda x: x.detach() * x + x.data, (XS,), (torch.ones_like(XS),))
    assert_same((out, tangent), (XS * XS + XS, XS))
    _, tangent = jvp(vmap(lambda x: x.detach() * x), (XS,), (torch.ones_like(XS),))
    assert_same(tangent, XS)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian], ids=lambda t: t.__name__)
def test_detach_inside_every_transform(transform):
    f = lambda x: (x.detach() * x * torch.detach(x)).sum()
    want = {"hessian": torch.zeros(3, 3, dtype=torch.float64)}.get(transform.__name__, XS[0] ** 2)
    assert_same(transform(f)(XS[0]), want)


def test_detach_shares_memory():
    def f(x):
        total = torch.zeros(3, dtype=torch.float64)
        total.detach().add_(x)
        part = x * 1.0
        part.data[0] = 5.0
        return total + part

    assert_same(vmap(f)(XS), looped(f)(XS))


def test_data_set():
    def f(x):
        y = x * 1.0
        y.data = x * 2
        z = torch.zeros(3, dtype=torch.float64)
        z.data = torch.ones(2, dtype=torch.float64) * x[0]
        assert z.shape == (2,)
        return y.sum() + z.sum()

    assert_same(vmap(f)(XS), looped(f)(XS))


def _to_itself(x):
    y = torch.ones(2, dtype=torch.float64)
    y.data = y
    return y * x[0]


def _to_its_data(x):
    y = torch.ones(2, dtype=torch.float64)
    part, y.data = y[:1], y.data
    y += x[:2]
    return part * y


def _to_a_view(x):
    y = torch.ones(2, dtype=torch.float64)
    y.data = y.view(2, 1)
    y.mul_(x[0])
    return y * x[1]


def _by_a_module(x):
    norm = torch.nn.LayerNorm(3, dtype=torch.float64).double().to("cpu")
    norm.weight.data = norm.weight.data.detach()
    norm.weight.data.mul_(x)
    return norm(x)


def _by_a_parameter(x):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    weight.data = weight.data.to(torch.float64)
    return weight * x


@pytest.mark.parametrize("f", [_to_itself, _to_its_data, _to_a_view, _by_a_module, _by_a_parameter])
def test_data_set_to_the_tensor_itself(f):
    branched = lambda x: f(x) if x[0] > 0 else f(-x)
    for g in (f, branched):
        assert_same(vmap(g)(XS).detach(), looped(g)(XS).detach())
        assert_same(vmap(vmap(g))(XS[None])[0].detach(), looped(g)(XS).detach())


def test_backward_outside_after_the_levels_ended():
    xs, w = XS.clone().requires_grad_(), W.clone().requires_grad_()
    _, back = vjp(lambda xs: vmap(lambda x: (x * w).sin())(xs), xs)
    (g,) = back(torch.ones_like(XS))
    g.sum().backward()
    want = W.clone().requires_grad_()
    (want * (XS * want).cos()).sum().backward()
    assert_same(w.grad, want.grad)


def test_requires_grad_on_an_argument():
    """A lane is a fresh leaf to the function; the caller's tensor is left as it was."""

    def f(x):
        x = x.requires_grad_()
        (x * x).sum().backward()
        return x.grad

    xs = XS.clone()
    assert_same(vmap(f)(xs), 2 * XS)
    assert not xs.requires_grad
    assert xs.grad is None


def test_leaf_made_inside_from_a_captured_tensor():
    """One leaf for each lane, as in a loop, whatever it was made from."""

    def f(x, w):
        v = w.detach().requires_grad_()
        (x * v).sin().sum().backward()
        return v.grad * x

    assert_same(mapped(f)(XS, W), looped(f)(XS, W))
    assert_same(mapped(f)(XS, W.clone().requires_grad_()), looped(f)(XS, W))


def test_writing_through_detach_of_a_captured_tensor():
    total = torch.zeros(3, dtype=torch.float64)
    vmap(lambda x: total.detach().add_(1) + x)(XS)
    assert_same(total, torch.ones(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="inplace arithmetic"):
        vmap(lambda x: total.detach()[:2].add_(x[:2]))(XS)
    assert_same(total, torch.ones(3, dtype=torch.float64))


def per_sample_gradients(x, w):
    """What a loop over examples is often written for."""
    w.grad = None
    (x.detach() * w).sin().sum().backward()
    return w.grad.clone()


def test_grad_of_a_shared_leaf_read_inside():
    """Each lane reads its own gradient; afterwards there is one, the sum, as if nothing had been cleared."""
    w = W.clone().requires_grad_()
    got = vmap(lambda x: per_sample_gradients(x, w))(XS)
    assert_same(got, torch.stack([per_sample_gradients(x, W.clone().requires_grad_()) for x in XS]))
    assert type(w.grad) is torch.Tensor
    assert_same(w.grad, got.sum(0))
    nested = vmap(vmap(lambda x: per_sample_gradients(x, w)))(XS.reshape(2, 2, 3))
    assert_same(nested, got.reshape(2, 2, 3))
    assert_same(w.grad, got.sum(0))


def test_per_sample_gradients_of_a_module():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def f(x):
        layer.zero_grad()
        layer(x).square().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    got = vmap(f)(XS)
    want = [torch.stack(rows) for rows in zip(*[f(x) for x in XS], strict=True)]
    assert_same(got, want)


def test_grad_of_a_shared_leaf_changed_inside():
    """Clipped in place, added to twice, with something there before."""

    def f(x, w, clear):
        if clear:
            w.grad = torch.zeros(3, dtype=torch.float64)
        for _ in range(2):
            (x.detach() * w).sin().sum().backward()
        w.grad.mul_(1 / w.grad.norm().clamp(min=1.0))
        return w.grad + 0

    w = W.clone().requires_grad_()
    got = vmap(lambda x: f(x, w, clear=True))(XS)
    want = torch.stack([f(x, W.clone().requires_grad_(), clear=True) for x in XS])
    assert_same(got, want)
    assert type(w.grad) is torch.Tensor
    assert_same(w.grad, want.sum(0))
    before = w.grad.clone()
    with pytest.raises(ZeroDivisionError):
        vmap(lambda x: ((x * w).sum().backward(), 1 / 0)[1])(XS)
    assert type(w.grad) is torch.Tensor
    assert_same(w.grad, before + XS.sum(0))


def test_optimizer_step_on_a_shared_leaf_is_refused():
    """A loop would take one step after another, each from where the last one led."""
    w = W.clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1, foreach=False)

    def f(x):
        optimizer.zero_grad()
        (x * w).sum().backward()
        optimizer.step()
        return x

    with pytest.raises(RuntimeError, match="inplace arithmetic"):
        vmap(f)(XS)
    assert type(w.grad) is torch.Tensor
    assert_same(w.detach(), W)


@pytest.mark.parametrize("inner", [lambda f: f, lambda f: grad(lambda x: f(x).sum())], ids=["vmap", "vmap of grad"])
def test_module_hooks_change_gradients_from_outside(inner):
    torch.manual_seed(0)
    layer, seen = nn.Linear(3, 2).double(), []

    def scale(module, into, out):
        seen.append(tuple(out[0].shape))
        return tuple(None if g is None else g * 10 for g in into)

    layer.register_full_backward_hook(scale)
    layer.register_full_backward_pre_hook(lambda module, out: tuple(g * 3 for g in out))
    f = inner(lambda x: layer(x).sin())
    results = []
    for run in (vmap(f), looped(f)):
        xs = XS.clone().requires_grad_()
        out = run(xs)
        results.append((out.detach(), *torch.autograd.grad(out.cos().sum(), (xs, layer.weight))))
    assert_same(*results)
    assert set(seen) == {(2,)}


ARGUMENTS = {
    "stacked": lambda w: torch.stack([w * 2, w**2, w.exp()]),
    "expanded": lambda w: w.expand(3, -1) * torch.arange(1.0, 4.0, dtype=torch.float64).unsqueeze(1),
    "of another": lambda w: XS[:3].clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_gradients_through_arguments_computed_from_the_input_outside(arguments):
    def gradient(x, w, factor):
        out = (x.sin() * w).sum() * x[0] * factor.sum()
        return torch.autograd.grad(out, (w, factor), create_graph=True)

    def total(x, w, factor):
        ((x.sin() * w).sum() * factor.sum()).backward(retain_graph=True)
        return x

    results = []
    for run in (mapped, looped):
        w = W.clone().requires_grad_()
        factor = w * 3
        xs = arguments(w)
        found = run(lambda x, w, factor=factor: torch.cat(gradient(x, w, factor)))(xs, w)
        second = torch.autograd.grad(found.sin().sum(), w, retain_graph=True)
        run(lambda x, w, factor=factor: total(x, w, factor))(xs, w)
        results.append((found.detach(), *second, w.grad))
    assert_same(*results)


def test_gradients_through_arguments_and_inside_at_once_are_refused():
    w = W.clone().requires_grad_()

    def f(x):
        y = x.detach().requires_grad_()
        return torch.autograd.grad((x * w * y).sum(), (w, y))[0]

    with pytest.raises(RuntimeError, match="was itself computed, outside, from a tensor"):
        vmap(f)(torch.stack([w, w * 2]))


def test_checkpoints_in_a_chain_are_recomputed_as_far_as_they_are_needed():
    """A recomputation ends by an exception, from inside the operation whose operands it was for."""

    def step(x, k):
        return x + 0.1 * torch.sin(x * (k + 1)) * x.sum()

    def f(x, keep):
        for k in range(4):
            x = step(x, k) if keep else checkpoint(step, x, k, use_reentrant=False)
        return x.sum()

    def second(keep):
        return grad(lambda xs: vmap(grad(lambda x: f(x, keep)))(xs).square().sum())(xs)

    xs = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(second(keep=False), second(keep=True))
