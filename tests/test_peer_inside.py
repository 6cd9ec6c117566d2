"""torch's own transforms, traces and exports inside ours: they work as in a loop, or say what to use in their place."""

import pytest
import torch
from torch import func as peer
from torch.autograd import functional

from lanewise import errors, grad, jvp, linearize, vmap

XS = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.2
W = torch.tensor([0.3, 0.8, 0.5], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of its traces


def s(x):
    return (x.sin() * W).sum() * x.prod()


def v(x):
    return x.sin() * x.flip(0) * W


def batched(x):
    y = x.clone().requires_grad_()
    return torch.autograd.grad(v(y), y, torch.eye(3, dtype=x.dtype), is_grads_batched=True)[0]


def make_fx(f, *args):
    return torch.fx.experimental.proxy_tensor.make_fx(f)(*args)


WORKS = {
    "vmap": lambda x: peer.vmap(torch.sin)(x[:, None] * x),
    "torch.vmap": lambda x: torch.vmap(lambda a, b: a @ b)(x[:, None] * x, x[:, None] - x),
    "grad": peer.grad(s),
    "grad of a captured lane": lambda x: peer.grad(lambda y: (y * x).sin().sum())(W),
    "grad_and_value": lambda x: torch.cat([part.reshape(-1) for part in peer.grad_and_value(s)(x)]),
    "vjp": lambda x: peer.vjp(v, x)[1](x)[0],
    "jvp": lambda x: peer.jvp(v, (x,), (W,))[1],
    "jvp along a lane": lambda x: peer.jvp(v, (W,), (x,))[1],
    "jacrev": peer.jacrev(v),
    "jacfwd": peer.jacfwd(v),
    "hessian": peer.hessian(s),
    "jacrev(jacrev)": peer.jacrev(peer.jacrev(s)),
    "jacfwd(jacfwd)": peer.jacfwd(peer.jacfwd(s)),
    "jacrev(jacfwd)": peer.jacrev(peer.jacfwd(s)),
    "grad(grad)": peer.grad(lambda x: peer.grad(s)(x).sum()),
    "vmap(grad)": lambda x: peer.vmap(peer.grad(s))(x[:, None] * x),
    "functionalize": lambda x: peer.functionalize(lambda x: x.clone().mul_(2))(x),
    "jacobian": lambda x: functional.jacobian(v, x, create_graph=True),
    "hessian of autograd": lambda x: functional.hessian(s, x, create_graph=True),
    "jacobian, vectorized": lambda x: functional.jacobian(v, x, vectorize=True, create_graph=True),
    "jacobian, forward": lambda x: functional.jacobian(v, x, vectorize=True, strategy="forward-mode"),
    "make_fx": lambda x: make_fx(v, x)(x * 2),
    "symbolic_trace": lambda x: torch.fx.symbolic_trace(v)(x),
}
# A transform of torch.func in which another runs, around tensors of two levels; one that is run for some lanes only.
REFUSED_WITHIN = {("hessian", "vmap(jvp)"), ("jacfwd(jacfwd)", "vmap(jvp)"), ("grad of a captured lane", "a branch")}

FORWARD = ("jvp", "vmap(jvp)", "linearize")
CUT = {
    "batched": ("vmap(grad)",),
    "jacobian": FORWARD,
    "jacobian, vectorized": FORWARD,
    "hessian of autograd": FORWARD,
}


def difference(f, x, t, step=1e-6):
    return (f(x + step * t) - f(x - step * t)) / (2 * step)


def sums(f):
    return lambda x: f(x).sum()


WAYS = {
    "vmap": (vmap, lambda f: f),
    "vmap(vmap)": (lambda f: lambda xs: vmap(vmap(f))(xs[None])[0], lambda f: f),
    "a branch": (
        lambda f: vmap(lambda x: f(x) if x[0] > 0.7 else f(x) * 2),
        lambda f: lambda x: f(x) * (1 + (x[0] <= 0.7)),
    ),
    "vmap(grad)": (
        lambda f: vmap(grad(sums(f))),
        lambda f: lambda x: torch.stack([difference(sums(f), x, e) for e in torch.eye(3, dtype=x.dtype)]),
    ),
    "jvp": (
        lambda f: lambda xs: torch.stack([jvp(f, (x,), (W,))[1] for x in xs]),
        lambda f: lambda x: difference(f, x, W),
    ),
    "vmap(jvp)": (lambda f: vmap(lambda x: jvp(f, (x,), (W,))[1]), lambda f: lambda x: difference(f, x, W)),
    "linearize": (
        lambda f: lambda xs: torch.stack([linearize(f, x)[1](W) for x in xs]),
        lambda f: lambda x: difference(f, x, W),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*WORKS, "batched"])
def test_as_in_a_loop(name, way):
    f = WORKS.get(name, batched)
    if way in CUT.get(name, ()):
        pytest.skip("what it gives has no derivative here, in plain torch neither")
    ours, loop = WAYS[way]
    if (name, way) in REFUSED_WITHIN:
        with pytest.raises(RuntimeError):
            ours(f)(XS)
        return
    got = ours(f)(XS)
    torch.testing.assert_close(got, torch.stack([loop(f)(x) for x in XS]), atol=1e-6, rtol=1e-6)
    assert type(got) is torch.Tensor


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "jacrev", "jacfwd", "jacrev(jacrev)", "grad(grad)"])
def test_of_a_captured_tensor(name):
    f = WORKS[name]
    torch.testing.assert_close(vmap(lambda x: x.sum() * f(W))(XS), torch.stack([x.sum() * f(W) for x in XS]))


class Module(torch.nn.Module):
    def forward(self, x):
        return x.sin() * 2


PEER = (
    "a transform of torch.func is called here on tensors of this transform, in a way in which the two engines cannot "
    "be nested"
)
SAME_NAME = "from lanewise import vmap, grad, vjp, jvp, jacrev, jacfwd, hessian, linearize  # that of the same name"
TRACE = (
    "torch.jit.trace records a function here, with tensors of this transform, whose values and lanes would become "
    "constants"
)
REFUSED = {
    "vmap over captured lanes": (
        lambda: vmap(lambda x: peer.vmap(lambda a: a * x)(W))(XS),
        PEER,
        SAME_NAME,
    ),
    "hessian of a captured tensor": (lambda: vmap(lambda x: x * peer.hessian(s)(W))(XS), PEER, SAME_NAME),
    "linearize": (
        lambda: vmap(lambda x: peer.linearize(v, x)[1](W))(XS),
        f"torch.func.linearize: {PEER}",
        "from lanewise import linearize  # with the same arguments",
    ),
    "linearize in jvp": (
        lambda: jvp(lambda x: peer.linearize(v, x)[1](W), (W,), (W,)),
        f"torch.func.linearize: {PEER}",
        "from lanewise import linearize  # with the same arguments",
    ),
    "jit.trace": (
        lambda: vmap(lambda x: torch.jit.trace(v, x)(x))(XS),
        TRACE,
        "f(x)  # call the function itself, or one that was traced outside",
    ),
    "jit.trace of a captured tensor": (
        lambda: vmap(lambda x: torch.jit.trace(lambda w: w * x, W)(x))(XS),
        TRACE,
        "f(x)  # call the function itself, or one that was traced outside",
    ),
    "export": (
        lambda: vmap(lambda x: torch.export.export(Module(), (x,)).module()(x))(XS),
        "torch.export records a function here, with tensors of this transform, which have no memory that it could "
        "describe",
        "f(x)  # call the function itself, or the module of a program that was exported outside",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, text, instead = REFUSED[name]
    with pytest.raises(errors.TransformError) as caught:
        call()
    first, line, write, code = str(caught.value).split("\n")
    assert first.endswith(text) and line.startswith(f"  at {__file__}:")
    assert (write, code) == ("Write instead:", f"  {instead}")


def test_a_mistake_of_the_user_inside_is_not_the_engines():
    """The error of an operation passes through torch.func's frames as it is."""
    with pytest.raises(RuntimeError, match="size of tensor a .3. must match the size of tensor b .2.") as caught:
        vmap(peer.grad(lambda x: (x * torch.ones(2)).sum()))(XS)
    assert not isinstance(caught.value, errors.LanewiseError)
    with pytest.raises(KeyError):
        vmap(peer.grad(lambda x: {}[x.shape]))(XS)
