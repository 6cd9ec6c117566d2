"""Scripted and traced code inside transforms, also after torch.jit has made something of its own of it."""

import pytest
import torch
from torch import nn

from lanewise import grad, hessian, jacrev, jvp, vmap
from tests.oracles import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
XS = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])

    def forward(self, x, times: int = 2):
        y = self.drop(self.first(x).tanh())
        for layer in self.rest:
            y = layer(y)
        for i in range(times):
            y = y * y.sin() + i
        return y

    @torch.jit.export
    def both(self, x, scale: float = 2.0):
        return {"first": self.first(x).sin() * scale, "sum": x.sum()}


def product(x, w):
    y = x * w
    return y.tanh() * x


torch.manual_seed(0)
NET = Net().double().eval()


def scripted():
    """Names, what runs scripted and the same in Python, and the parameters of each."""
    module, function = torch.jit.script(NET), torch.jit.script(product)
    traced = torch.jit.trace(NET, XS)
    known = list(NET.parameters())
    return {
        "module": (module, NET, known),
        "default replaced": (lambda x: module(x, times=3), lambda x: NET(x, times=3), known),
        "method": (lambda x: module.both(x, scale=1.5)["first"], lambda x: NET.both(x, scale=1.5)["first"], known),
        "traced": (traced, NET, known),
        "function": (lambda x: function(x, W), lambda x: product(x, W), [W]),
    }


@pytest.mark.parametrize("name", ["module", "default replaced", "method", "traced", "function"])
def test_derivatives_of_scripted_code(name):
    f, plain, parameters = scripted()[name]
    with_sum = lambda f: lambda x: f(x).sum()
    for _ in range(3):  # It is optimized at the second call.
        for run in (
            lambda f: vmap(f)(XS),
            lambda f: vmap(grad(with_sum(f)))(XS),
            lambda f: grad(lambda x: vmap(f)(x).sum())(XS),
            lambda f: vmap(jacrev(f))(XS),
            lambda f: vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(XS),
            lambda f: jvp(f, (XS[0],), (XS[1],))[1],
            lambda f: hessian(with_sum(f))(XS[0]),
            lambda f: torch.autograd.grad(vmap(f)(XS).sum(), parameters, allow_unused=True, materialize_grads=True),
        ):
            assert_same(run(f), run(plain), grad=True)
        f(XS[0].clone().requires_grad_()).sum().backward()
        W.grad = None


def test_arguments_that_scripted_code_does_not_take():
    module = torch.jit.script(NET)
    with pytest.raises(TypeError, match="times"):
        vmap(lambda x: module(x, twice=1))(XS)
    with pytest.raises(TypeError, match="missing a value for the argument 'w'"):
        vmap(torch.jit.script(product))(XS)
