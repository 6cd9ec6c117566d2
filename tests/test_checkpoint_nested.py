"""`checkpoint` of functions whose second pass finds what has changed since: tangents, orders, grad mode."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lanewise import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from tests.oracles import assert_same

D = torch.float64
X = torch.tensor([[0.5, -0.2, 0.9], [0.3, 0.1, -0.7]], dtype=D)
V = torch.tensor([0.3, -0.7, 0.2], dtype=D)
W = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3).requires_grad_()

BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda y: (y.sin() * y[0]).sum(),
    "product": lambda y: (y.exp() * y.prod()).sum(),
    "running product": lambda y: (y.sin() * y.cumprod(0)[-1]).sum(),
    "layer norm": lambda y: F.layer_norm(y, (3,)).sin().sum(),
    "group norm": lambda y: F.group_norm(y.view(1, 3, 1), 1).sin().sum(),
    "norm": lambda y: y.norm(),
    "determinant": lambda y: (y.outer(y) + torch.eye(3, dtype=D)).det(),
    "captured weight": lambda y: (W @ y).tanh().sum(),
}


def _along(f: Callable) -> Callable:
    return lambda x: jvp(f, (x,), (V,))[1]


NESTINGS: dict[str, Callable[[Callable], Callable]] = {
    "grad": grad,
    "hessian": hessian,
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f)),
    "jacfwd(jacrev)": lambda f: jacfwd(jacrev(f)),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(f)),
    "grad(grad)": lambda f: grad(lambda x: grad(f)(x).sum()),
    "grad(jvp)": lambda f: grad(_along(f)),
    "grad(jvp(jvp))": lambda f: grad(_along(_along(f))),
    "jvp(grad)": lambda f: _along(grad(f)),
    "grad(linearize)": lambda f: grad(lambda x: linearize(f, x)[1](V)),
    "vjp(jvp)": lambda f: lambda x: vjp(_along(f), x)[1](torch.ones((), dtype=D))[0],
    "hessian(jvp)": lambda f: hessian(_along(f)),
    "jacrev(jacfwd(jacfwd))": lambda f: jacrev(jacfwd(jacfwd(f))),
    "jacrev(jacrev(jacfwd))": lambda f: jacrev(jacrev(jacfwd(f))),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("body", BODIES)
def test_as_without_the_checkpoint(body: str, nesting: str, reentrant: bool) -> None:
    f, transform = BODIES[body], NESTINGS[nesting]
    kept = lambda y: checkpoint(f, y, use_reentrant=reentrant)
    want = torch.stack([transform(f)(x) for x in X])
    for _ in range(2):
        assert_same(torch.stack([transform(kept)(x) for x in X]), want)
        assert_same(vmap(transform(kept))(X), want)
    if nesting == "grad(jvp)":
        assert_same(grad(lambda xs: vmap(_along(kept))(xs).sum())(X), want)


def test_what_is_found_in_closures_and_modules() -> None:
    """Tangents of weights, of fewer lanes than the values, laid out anew by a view of them."""
    net = torch.nn.Linear(3, 2).double()
    weights = {name: each.detach() for name, each in net.named_parameters()}
    tangents = {name: torch.ones_like(each) for name, each in weights.items()}

    def value(keeps: bool, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        def block(y: Tensor) -> Tensor:
            return (functional_call(net, weights, (y,)).tanh() * weights["bias"].sin() * weights["weight"][0, 1]).sum()

        return checkpoint(block, x, use_reentrant=False) if keeps else block(x)

    def slope(keeps: bool) -> Callable[[Tensor], Tensor]:
        def along(x: Tensor) -> Tensor:
            moved = {name: each * x[0] for name, each in weights.items()}
            return jvp(lambda moved: value(keeps, x, moved), (moved,), (tangents,))[1]

        return grad(along)

    want = torch.stack([slope(False)(x) for x in X])
    for _ in range(2):
        assert_same(vmap(slope(True))(X), want)
        assert_same(torch.stack([slope(True)(x) for x in X]), want)
