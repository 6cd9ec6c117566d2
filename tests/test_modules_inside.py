"""Parametrizations, tied weights and buffers, optimisers and torch.autograd.functional inside transforms."""

import pytest
import torch
import torch.autograd.functional as functional
from torch import nn
from torch.nn.utils import parametrizations

from lanewise import functional_call, grad, jacfwd, jacrev, jvp, vmap

F64 = torch.float64


@pytest.fixture
def xs():
    return torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count = self.count + 1
        return self.linear(x) + self.count


MODULES = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "tied": Tied,
}


@pytest.mark.parametrize("name", MODULES)
def test_per_sample_gradients(name, xs):
    torch.manual_seed(0)
    module = MODULES[name]().to(F64).eval()
    params = {key: value.detach() for key, value in module.named_parameters()}
    buffers = {key: value.detach() for key, value in module.named_buffers()}

    def loss(params, x):
        return functional_call(module, (params, buffers), (x,)).pow(2).sum()

    got = vmap(grad(loss), (None, 0))(params, xs)
    for i, x in enumerate(xs):
        leaves = {key: value.clone().requires_grad_() for key, value in params.items()}
        want = torch.autograd.grad(loss(leaves, x), list(leaves.values()))
        for row, gradient in zip(got.values(), want, strict=True):
            torch.testing.assert_close(row[i], gradient)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_captured_parameters(name, xs):
    torch.manual_seed(0)
    module = MODULES[name]().to(F64).eval()
    params = list(module.parameters())
    got = torch.autograd.grad(vmap(module)(xs).pow(2).sum(), params)
    want = torch.autograd.grad(torch.stack([module(x) for x in xs]).pow(2).sum(), params)
    torch.testing.assert_close(got, want)


def test_a_buffer_bound_anew_is_put_back(xs):
    module = Counting().to(F64)
    before = module.count
    out = vmap(lambda x: functional_call(module, dict(module.named_buffers()), (x,)))(xs)
    assert module.count is before
    torch.testing.assert_close(out, torch.stack([module.linear(x) + 1 for x in xs]))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "LBFGS"])
def test_an_optimiser_of_each_lane(name, xs):
    def fitted(x):
        w = torch.zeros(4, dtype=F64, requires_grad=True)
        optimiser = getattr(torch.optim, name)([w], lr=0.1)

        def closure():
            optimiser.zero_grad()
            loss = ((w - x) ** 2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimiser.step(closure)
        return w.detach()

    torch.testing.assert_close(vmap(fitted)(xs), torch.stack([fitted(x) for x in xs]))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: functional.jacobian(torch.sin, x),
        lambda x: functional.hessian(lambda t: (t**3).sum(), x),
        lambda x: functional.vjp(torch.sin, x, x)[1],
        lambda x: functional.jvp(torch.sin, x, x)[1],
        lambda x: functional.hvp(lambda t: (t**3).sum(), x, x)[1],
        lambda x: functional.vhp(lambda t: (t**3).sum(), x, x)[1],
    ],
    ids=["jacobian", "hessian", "vjp", "jvp", "hvp", "vhp"],
)
def test_torch_autograd_functional(f, xs):
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11 and 2.12, at each use
def test_under_the_profiler(xs):
    with torch.profiler.profile() as profile:
        out = vmap(grad(lambda x: x.sin().sum()))(xs)
    torch.testing.assert_close(out, xs.cos())
    assert any(event.key == "aten::cos" for event in profile.key_averages())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: functional.jacobian(lambda t: t.sin() * t.sum(), x, create_graph=True).sum(0),
        lambda x: functional.hessian(lambda t: (t**3).sum() * t.prod(), x, create_graph=True)[0],
        lambda x: functional.vjp(lambda t: t.sin() * t.sum(), x, torch.ones_like(x), create_graph=True)[1],
        lambda x: functional.jvp(lambda t: t.sin() * t.sum(), x, x, create_graph=True)[1],
        lambda x: functional.hvp(lambda t: (t**3).sum() * t.prod(), x, torch.ones_like(x), create_graph=True)[1],
        lambda x: functional.vhp(lambda t: (t**3).sum() * t.prod(), x, x, create_graph=True)[1],
    ],
    ids=["jacobian", "hessian", "vjp", "jvp", "hvp", "vhp"],
)
def test_torch_autograd_functional_differentiated(f, xs):
    """Forward mode goes through what `create_graph` makes differentiable, as reverse mode does."""
    xs, vs = xs.double(), xs.double().cos()
    want = torch.stack([functional.jacobian(f, x) for x in xs])
    tangents = torch.einsum("bij,bj->bi", want, vs)
    for got in (vmap(jacrev(f))(xs), vmap(jacfwd(f))(xs), torch.stack([jacfwd(f)(x) for x in xs])):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(jvp(vmap(f), (xs,), (vs,))[1], tangents)
    torch.testing.assert_close(vmap(lambda x, v: jvp(f, (x,), (v,))[1])(xs, vs), tangents)
    plain = functional.jacobian(f, xs[0])
    torch.testing.assert_close(plain, want[0])
