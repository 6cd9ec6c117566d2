"""torch's own forward mode inside a transformed function, and code that calls it: as in a loop."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from lanewise import grad, jacfwd, jacrev, jvp, linearize, vmap

XS = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.1
Y = torch.linspace(0.2, 0.9, 5, dtype=torch.float64)

OPERATIONS = {
    "2 * d": lambda d: 2 * d,
    "d * 2.5": lambda d: d * 2.5,
    "d + 1": lambda d: d + 1,
    "d - 1": lambda d: d - 1,
    "1 - d": lambda d: 1 - d,
    "d / 2": lambda d: d / 2,
    "1 / d": lambda d: 1 / d,
    "d ** 2": lambda d: d**2,
    "2 ** d": lambda d: 2**d,
    "d * y": lambda d: d * Y,
    "y * d": lambda d: Y * d,
    "d @ y": lambda d: d @ Y,
    "sum * 2": lambda d: d.sum() * 2,
    "item": lambda d: d * float(d[0]),
    "scalar tensor": lambda d: d * torch.tensor(3.0),
    "made inside": lambda d: d * torch.arange(5.0, dtype=torch.float64),
    "where": lambda d: torch.where(Y > 0.5, d, Y),
    "cat": lambda d: torch.cat([d, Y]),
    "add, alpha": lambda d: torch.add(Y, d, alpha=2),
    "linear": lambda d: F.linear(d, torch.ones(2, 5, dtype=torch.float64), torch.ones(2, dtype=torch.float64)),
    "clamp": lambda d: d.clamp(min=0.2),
    "softmax": lambda d: (d * 2).softmax(0),
    "layer_norm": lambda d: F.layer_norm(3 * d, (5,)),
    "mul_": lambda d: d.clone().mul_(2),
    "add_": lambda d: torch.zeros((), dtype=torch.float64).add_(d.sum()),
    "copy_": lambda d: torch.zeros(5, dtype=torch.float64).copy_(d),
    "index_put": lambda d: torch.zeros(5, dtype=torch.float64).index_put((torch.tensor(1),), d[0]),
}
# Where plain torch cannot differentiate its own forward mode by its reverse mode: it raises, or is wrong.
TORCH_ERRS = {"softmax", "layer_norm"}


def pushed(operation):
    """The derivative of x -> operation(sin x) along one, at x."""

    def run(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            tangent = forward_ad.unpack_dual(operation(dual.sin())).tangent
            assert tangent is not None
            return tangent

    return run


@pytest.mark.parametrize("name", OPERATIONS)
def test_under_transforms(name):
    f = pushed(OPERATIONS[name])
    want = torch.stack([f(x) for x in XS])
    close = torch.testing.assert_close
    close(vmap(f)(XS), want)
    close(vmap(vmap(f))(XS.view(2, 2, 5)).flatten(0, 1), want)
    close(vmap(lambda x: f(x) if x[0] > 0.5 else f(x) * 2)(XS), torch.stack([f(x) * (1 + (x[0] <= 0.5)) for x in XS]))
    if name == "item":
        return  # a number, which is constant for derivatives and not for differences
    step = 1e-5
    for x in XS[:2]:
        v = torch.linspace(-1, 1, 5, dtype=torch.float64)
        slope = (f(x + step * v) - f(x - step * v)) / (2 * step)
        value, tangent = jvp(f, (x,), (v,))
        close(value, f(x))
        close(tangent, slope, atol=1e-7, rtol=1e-6)
        if name in TORCH_ERRS:
            continue
        close(grad(lambda x: f(x).sum())(x) @ v, slope.sum(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_around_vmap(name):
    def run(xs):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(xs, torch.ones_like(xs))
            return forward_ad.unpack_dual(vmap(lambda x: OPERATIONS[name](x.sin()))(dual)).tangent

    torch.testing.assert_close(run(XS), torch.stack([pushed(OPERATIONS[name])(x) for x in XS]))


def test_a_tangent_of_another_shape():
    def run(x):
        with forward_ad.dual_level():
            return forward_ad.make_dual(x, torch.ones(3, dtype=torch.float64))

    with pytest.raises(RuntimeError, match="Tensor is of size .5. while the given forward gradient is of size .3."):
        vmap(run)(XS)


CAPTURED = {
    "number": lambda c, x: c * 2 * x + 1,
    "number alone": lambda c, x: 2 - c / 3,
    "branch": lambda c, x: c * 2 * x if x.sum() > 2.5 else c * 3 + x,
    "branch without it": lambda c, x: c.sin() if x.sum() > 2.5 else x * 3,
    "loop": lambda c, x: sum((c**k * x for k in range(int(x[0] * 4))), c),
    "item": lambda c, x: c * x[0].item(),
    "written": lambda c, x: torch.zeros_like(x).copy_(c * 2) + x,
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name, recorded):
    """Also where it is tracked, and gradients go through both."""
    f = CAPTURED[name]

    def outcome(run):
        leaf = Y.clone().requires_grad_(recorded)
        with forward_ad.dual_level():
            c = forward_ad.make_dual(leaf, leaf.cos())
            value, tangent = forward_ad.unpack_dual(run(lambda x: f(c, x)))
            if not recorded:
                return value, tangent
            return value, tangent, torch.autograd.grad(value.sin().sum() + tangent.sum(), leaf)[0]

    want = outcome(lambda f: torch.stack([f(x) for x in XS]))
    for run in (lambda f: vmap(f)(XS), lambda f: vmap(vmap(f))(XS.view(2, 2, 5)).flatten(0, 1)):
        for got, each in zip(outcome(run), want, strict=True):
            torch.testing.assert_close(got, each)


@pytest.mark.parametrize("recorded", [False, True])
def test_jacobians_of_one_with_a_tangent(recorded):
    def f(x):
        return (x.sin() * Y).cumsum(0) * x.norm() + Y.exp()

    x, v = XS[0], XS[1]
    want = torch.autograd.functional.jacobian(f, x)
    turned = torch.autograd.functional.jvp(lambda x: jacrev(f)(x), x, v)[1]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(recorded), v)
        for transform in (jacfwd, jacrev, lambda f: lambda x: linearize_each(f, x)):
            value, tangent = forward_ad.unpack_dual(transform(f)(dual))
            torch.testing.assert_close(value, want)
            torch.testing.assert_close(tangent, turned)


def linearize_each(f, x):
    push = linearize(f, x)[1]
    return torch.stack([push(row) for row in torch.eye(5, dtype=torch.float64)], 1)
