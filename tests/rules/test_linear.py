"""`linear` as one operation on lanes: values and derivatives equal those of a loop, on every plane."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import functional_call, grad, hessian, jacfwd, jacrev, vmap
from lanewise._control.abreast import layers
from lanewise._core.recording import passes
from lanewise._core.short import hot
from lanewise._rules.batch import linear

LANES, OUT, IN = 3, 4, 2


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _loss(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias).sin().sum() + F.linear(x, weight).square().sum()


@pytest.mark.parametrize("rows", [(), (5,), (2, 3), (1,), (0,), (2, 0, 3)])
@pytest.mark.parametrize("lanes_of_weight", [False, True])
@pytest.mark.parametrize("lanes_of_bias", [False, True, None])
@pytest.mark.parametrize("lanes_of_x", [False, True])
def test_as_the_loop(
    rows: tuple[int, ...], lanes_of_weight: bool, lanes_of_bias: bool | None, lanes_of_x: bool
) -> None:
    if not (lanes_of_x or lanes_of_weight or lanes_of_bias):
        return
    x = _random(*[LANES] * lanes_of_x, *rows, IN)
    weight = _random(*[LANES] * lanes_of_weight, OUT, IN, seed=1)
    bias = None if lanes_of_bias is None else _random(*[LANES] * lanes_of_bias, OUT, seed=2)
    dims = (0 if lanes_of_x else None, 0 if lanes_of_weight else None, 0 if lanes_of_bias else None)

    def of(i: int) -> tuple:
        return (x[i] if lanes_of_x else x, weight[i] if lanes_of_weight else weight, bias[i] if lanes_of_bias else bias)  # type: ignore[index]

    def check(f: Callable, plain: Callable) -> None:
        want = torch.stack([plain(*of(i)) for i in range(LANES)])
        for arguments in ((x, weight, bias), (x, nn.Parameter(weight), bias)):
            out = vmap(f, in_dims=dims)(*arguments)
            assert out.dtype is want.dtype
            torch.testing.assert_close(out, want)

    check(F.linear, F.linear)
    arguments = range(2 if bias is None else 3)
    for argnum in arguments:
        check(grad(_loss, argnums=argnum), lambda *a, k=argnum: _plain_grad(_loss, a, k))
        check(jacrev(_loss, argnums=argnum), lambda *a, k=argnum: _plain_grad(_loss, a, k))
        check(jacfwd(_loss, argnums=argnum), lambda *a, k=argnum: _plain_grad(_loss, a, k))
        if 0 not in rows:
            check(hessian(_loss, argnums=argnum), lambda *a, k=argnum: _plain_hessian(_loss, a, k))
        check(grad(lambda *a, k=argnum: grad(_loss, argnums=k)(*a).square().sum()), _plain_curved(argnum))

    def total(*leaves: Tensor) -> Tensor:
        full = (*leaves, *[None] * (3 - len(leaves)))
        return vmap(_loss, in_dims=dims)(*full).sum()

    given = [t for t in (x, weight, bias) if t is not None]
    for k, _ in enumerate(given):
        leaves = [t.clone().requires_grad_() for t in given]
        full = [*leaves, *[None] * (3 - len(leaves))]
        loop: Tensor = sum(  # type: ignore[assignment]
            _loss(
                full[0][i] if lanes_of_x else full[0],
                full[1][i] if lanes_of_weight else full[1],
                full[2][i] if lanes_of_bias else full[2],
            )  # type: ignore[index]
            for i in range(LANES)
        )
        want = torch.autograd.grad(loop, leaves[k], create_graph=True)[0]
        torch.testing.assert_close(grad(total, argnums=k)(*given), want.detach())
        again = torch.autograd.grad(want.square().sum(), leaves[k])[0]
        double = grad(lambda t, k=k: grad(total, argnums=k)(*given[:k], t, *given[k + 1 :]).square().sum())(given[k])
        torch.testing.assert_close(double, again)


def _plain_grad(f: Callable, arguments: tuple, k: int) -> Tensor:
    leaf = arguments[k].detach().requires_grad_()
    return torch.autograd.grad(f(*arguments[:k], leaf, *arguments[k + 1 :]), leaf)[0]


def _plain_hessian(f: Callable, arguments: tuple, k: int) -> Tensor:
    return torch.autograd.functional.hessian(lambda t: f(*arguments[:k], t, *arguments[k + 1 :]), arguments[k].detach())  # type: ignore[return-value]


def _plain_curved(k: int) -> Callable:
    """The gradient in x of the squared gradient in argument k."""

    def plain(*arguments: Tensor) -> Tensor:
        leaves = [None if t is None else t.detach().requires_grad_() for t in arguments]
        (first,) = torch.autograd.grad(_loss(*leaves), leaves[k], create_graph=True)  # type: ignore[arg-type]
        return torch.autograd.grad(first.square().sum(), leaves[0])[0]  # type: ignore[arg-type]

    return plain


@pytest.mark.parametrize("record_weight", [False, True])
@pytest.mark.parametrize("record_x", [False, True])
def test_captured_weights_in_two_vmaps(record_x: bool, record_weight: bool) -> None:
    x, weight, bias = _random(2, 3, IN), _random(OUT, IN, seed=1), _random(OUT, seed=2)
    x.requires_grad_(record_x)
    weight.requires_grad_(record_weight)
    out = vmap(vmap(lambda x: F.linear(x, weight, bias)))(x)
    want = F.linear(x, weight, bias)
    torch.testing.assert_close(out, want)
    assert out.requires_grad == want.requires_grad
    leaves = [t for t in (x, weight) if t.requires_grad]
    if leaves:
        for got, plain in zip(
            torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves)
        ):
            torch.testing.assert_close(got, plain)
    outer = vmap(lambda a: vmap(lambda b: F.linear(a * b.sum(), weight.detach() + a, bias))(x[0].detach()))(
        x[:, 0].detach()
    )
    loop = [[F.linear(a * b.sum(), weight.detach() + a, bias) for b in x[0].detach()] for a in x[:, 0].detach()]
    torch.testing.assert_close(outer, torch.stack([torch.stack(row) for row in loop]))


def test_views_of_weights_that_were_written_to() -> None:
    x, weight = _random(LANES, IN), _random(IN, OUT, seed=1)

    def f(x: Tensor) -> Tensor:
        own = weight.clone()
        turned = own.t()
        first = F.linear(x, turned)
        own[0] = own[0] * x[0]
        return first + F.linear(x, turned)

    torch.testing.assert_close(vmap(f)(x), torch.stack([f(row) for row in x]))


def test_gradients_inside_for_captured_weights() -> None:
    net = nn.Linear(IN, OUT).double()
    x = _random(LANES, IN)

    def f(x: Tensor) -> Tensor:
        return torch.autograd.grad(net(x).sin().sum(), net.weight)[0]

    torch.testing.assert_close(vmap(f)(x), torch.stack([f(row) for row in x]))
    params = {name: p.detach() for name, p in net.named_parameters()}
    per_lane = vmap(grad(lambda p, x: functional_call(net, p, (x,)).sin().sum()), in_dims=(None, 0))(params, x)
    torch.testing.assert_close(per_lane["weight"], torch.stack([f(row) for row in x]))


def test_autocast_and_other_dtypes_go_torchs_way() -> None:
    x, weight = _random(LANES, IN).float(), _random(OUT, IN, seed=1).float()

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight)

    assert vmap(f)(x).dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        vmap(lambda x: F.linear(x, weight.double()))(x)
    with pytest.raises(RuntimeError, match="mat1 and mat2|size mismatch|shapes"):
        vmap(lambda x: F.linear(x, weight.T))(x)


def test_complex_numbers() -> None:
    x, weight = (
        torch.complex(_random(LANES, IN), _random(LANES, IN, seed=3)),
        torch.complex(_random(OUT, IN, seed=1), _random(OUT, IN, seed=2)),
    )

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).abs().sum()

    for k in (0, 1):
        want = torch.stack([_plain_grad(f, (row, weight), k) for row in x])
        torch.testing.assert_close(vmap(grad(f, argnums=k), in_dims=(0, None))(x, weight), want)


def test_dot_keeps_the_dtype_and_refuses_what_torch_refuses() -> None:
    x = torch.tensor([[100, 100], [3, 4]], dtype=torch.int8)
    assert_same = torch.testing.assert_close
    assert_same(vmap(torch.dot)(x, x), torch.stack([row.dot(row) for row in x]))
    assert_same(vmap(torch.dot, in_dims=(0, None))(x, x[0]), torch.stack([row.dot(x[0]) for row in x]))
    for other in (torch.ones(2, 1, dtype=torch.int8), torch.ones(2, 2)):
        with pytest.raises(RuntimeError, match="inconsistent tensor size"):
            vmap(torch.dot)(x, other)


def test_one_operation_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    for key, own in list(hot._entries.items()):

        def counted(cls: type, func: object, types: object, args: tuple, kwargs: dict, own: Callable = own) -> object:
            passed.append(str(func))
            return own(cls, func, types, args, kwargs)

        monkeypatch.setitem(hot._entries, key, counted)
    net = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, OUT)).double().requires_grad_(False)
    vmap(jacrev(net))(_random(LANES, IN))
    assert not {name for name in passed if "mm" in name or name.startswith("aten.t.")}


def test_what_nobody_asks_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    for name, own in (
        ("_for_x", linear._for_x),
        ("_for_weight", linear._for_weight),
        ("_for_bias", linear._for_bias),
    ):

        def counted(*args: Tensor, name: str = name, own: Callable = own) -> Tensor:
            computed.append(name)
            return own(*args)

        monkeypatch.setattr(linear, name, counted)
    net = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, 1)).double()
    weights = tuple(net.parameters())
    rows = _random(LANES, IN)

    def slope(x: Tensor) -> Tensor:
        return grad(lambda x: net(x).squeeze())(x)

    slopes = vmap(slope)(rows)
    assert computed == ["_for_x", "_for_x"]
    torch.testing.assert_close(slopes, torch.stack([torch.autograd.functional.jacobian(net, row)[0] for row in rows]))
    # Those of captured weights, asked for inside, outside, and of the slopes.
    inside = vmap(lambda x: torch.autograd.grad(net(x).squeeze(), weights))(rows)
    plain = [torch.autograd.grad(net(row).squeeze(), weights) for row in rows]
    torch.testing.assert_close(inside, tuple(torch.stack(parts) for parts in zip(*plain)))
    some = vmap(lambda x: torch.autograd.grad(net(x).squeeze(), weights[2]))(rows)
    torch.testing.assert_close(some[0], torch.stack([parts[2] for parts in plain]))
    whole = torch.autograd.grad(slopes.square().sum(), weights[:3])

    def one(row: Tensor) -> Tensor:
        leaf = row.clone().requires_grad_()
        return torch.autograd.grad(net(leaf).squeeze(), leaf, create_graph=True)[0].square().sum()

    torch.testing.assert_close(whole, torch.autograd.grad(torch.stack([one(row) for row in rows]).sum(), weights[:3]))
    vmap(lambda x: net(x).squeeze().backward())(rows)
    torch.testing.assert_close(tuple(w.grad for w in weights), tuple(sum(parts) for parts in zip(*plain)))


def test_a_shared_input_is_one_operation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple] = []

    def counted(*args: object, own: Callable = linear.with_own_weights) -> object:
        taken.append(args)
        return own(*args)  # type: ignore[arg-type]

    for module in (linear, layers):
        monkeypatch.setattr(module, "with_own_weights", counted)
    x, weights, biases = _random(5, IN), _random(LANES, OUT, IN, seed=1), _random(LANES, OUT, seed=2)
    out = vmap(F.linear, in_dims=(None, 0, 0))(x, weights, biases)
    torch.testing.assert_close(out, torch.stack([F.linear(x, w, b) for w, b in zip(weights, biases)]))
    assert len(taken) == 1
    inside = vmap(lambda w, b: F.linear(torch.ones(5, IN, dtype=torch.float64), w, b))(weights, biases)
    torch.testing.assert_close(
        inside, torch.stack([F.linear(torch.ones_like(x), w, b) for w, b in zip(weights, biases)])
    )
    assert len(taken) == 2


def test_leaves_that_are_asked_for_are_known_without_asking_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(passes, "will_execute", lambda node, own=passes.will_execute: asked.append(node) or own(node))
    net = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, 1)).double()
    params = {name: p.detach() for name, p in net.named_parameters()}
    rows = _random(LANES, IN)
    f = grad(lambda p, x: functional_call(net, p, (x,)).squeeze())
    got = vmap(f, in_dims=(None, 0))(params, rows)
    assert [type(node).__name__ for node in asked] == ["TanhBackward0"]  # what is on the way to leaves, asked once
    for name, p in net.named_parameters():
        want = torch.stack([torch.autograd.grad(net(row).squeeze(), p)[0] for row in rows])
        torch.testing.assert_close(got[name], want)
    # A pass inside a pass, for other leaves, and one after a pass that failed.
    weight = _random(OUT, IN, seed=3)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf, own = x.detach().requires_grad_(), weight.clone().requires_grad_()
                for_x, for_own = torch.autograd.grad(F.linear(leaf, own).sum(), (leaf, own))
            assert for_own.shape == weight.shape
            return cotangent * 2 + for_x * 0

    for argnum in (0, 1):
        got = vmap(grad(lambda x, w: F.linear(Doubled.apply(x), w).sin().sum(), argnum), in_dims=(0, None))(
            rows, weight
        )
        want = [_plain_grad(lambda x, w: F.linear(x * 2, w).sin().sum(), (row, weight), argnum) for row in rows]
        torch.testing.assert_close(got, torch.stack(want))
