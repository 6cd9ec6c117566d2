"""Gradients in the parameters of layers, which are the same in all lanes: recorded below, each a tensor expanded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lanewise import functional_call, grad, grad_and_value, value_and_grad, vmap
from lanewise._core.batch import BatchTensor
from lanewise._core.plane import recorded
from tests.gradients_below import forget

Params = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _unknown() -> None:
    forget()


class Text(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=padding)
        self.place = nn.Parameter(torch.randn(5, 4))
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.table(tokens) + self.place).tanh().mean(0))


class Tied(nn.Module):
    """The table is the output matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.table(tokens)).tanh(), self.table.weight)


def _twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean((0, 1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


TOKENS = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(0))

# Networks, made from a seed, and their inputs for four lanes.
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)), numbers(4, 3)),
    "linear layers of rows": (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), numbers(4, 6, 3)),
    "linear layers of pages": (lambda: nn.Linear(3, 5), numbers(4, 2, 6, 3)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 3, 2)
        ),
        numbers(4, 1, 2, 8, 8),
    ),
    "several images in a lane": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, 2), nn.GroupNorm(4, 4)),
        numbers(4, 3, 2, 7, 7),
    ),
    "an image without a batch": (lambda: nn.Conv2d(2, 4, 3, padding="same", dilation=2), numbers(4, 2, 7, 7)),
    "padding that is none": (lambda: nn.Conv2d(2, 4, 3, padding="valid"), numbers(4, 1, 2, 7, 7)),
    "groups of channels": (lambda: nn.Conv2d(4, 8, 3, padding=(1, 0), groups=2, bias=False), numbers(4, 1, 4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 5, padding=2, groups=4), numbers(4, 1, 4, 9, 9)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.GELU(), nn.Conv1d(4, 2, 1)), numbers(4, 1, 3, 9)),
    "volumes": (lambda: nn.Conv3d(2, 3, 2, stride=2), numbers(4, 1, 2, 4, 5, 4)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm((3, 5)), nn.LayerNorm(5, bias=False)), numbers(4, 2, 3, 5)),
    "the norm of a vector": (lambda: nn.LayerNorm(5), numbers(4, 5)),
    "tokens": (Text, TOKENS),
    "tokens, one of padding": (lambda: Text(3), TOKENS),
    "attention": (Attends, numbers(4, 1, 3, 8)),
    "a linear layer twice": (lambda: _twice(nn.Linear(3, 3)), numbers(4, 3)),
    "a convolution twice": (lambda: _twice(nn.Conv2d(2, 2, 3)), numbers(4, 1, 2, 7, 7)),
    "norms twice": (lambda: nn.Sequential(_twice(nn.LayerNorm(5)), _twice(nn.GroupNorm(2, 4))), numbers(4, 2, 4, 5)),
    "tokens, their table twice": (Tied, TOKENS),
}
TWICE = [name for name in NETS if "twice" in name]


def made(name: str) -> tuple[nn.Module, Params, Tensor]:
    make, xs = NETS[name]
    torch.manual_seed(0)
    net = make().double()
    return net, {name: p.detach() for name, p in net.named_parameters()}, xs


def loss_of(net: nn.Module) -> Callable[[Params, Tensor], Tensor]:
    return lambda params, x: functional_call(net, params, (x,)).square().sum()


def by_loop(f: Callable, params: Params, xs: Tensor) -> Params:
    """The gradient in each example by torch.autograd."""
    rows = []
    for x in xs:
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        rows.append(torch.autograd.grad(f(leaves, x), list(leaves.values()), allow_unused=True))
    columns = zip(params.items(), zip(*rows))
    return {
        name: torch.stack([torch.zeros_like(p) if g is None else g for g in column]) for (name, p), column in columns
    }


def looking(f: Callable, found: list[bool]) -> Callable:
    """`f`, which notes whether its parameters are leaves of the plane below."""

    def look(params: Params, *rest: Any) -> Any:
        found.append(all(type(p) is BatchTensor and not recorded(p) and p.value.requires_grad for p in params.values()))
        return f(params, *rest)

    return look


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", NETS)
def test_gradients_in_parameters_are_those_of_a_loop(name: str, lanes: int) -> None:
    net, params, xs = made(name)
    found: list[bool] = []
    mapped = vmap(grad(looking(loss_of(net), found)), in_dims=(None, 0))
    expected = by_loop(loss_of(net), params, xs[:lanes])
    for _ in range(3):
        got = mapped(params, xs[:lanes])
        torch.testing.assert_close(got, expected)
        assert not any(g.requires_grad for g in got.values())
    assert found == [False, True, True]


@pytest.mark.parametrize("kind", [grad_and_value, value_and_grad])
def test_with_the_value_and_more(kind: Callable) -> None:
    net, params, xs = made("images")

    def f(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        out = functional_call(net, params, (x,))
        return out.square().sum(), out.mean()

    mapped = vmap(kind(f, has_aux=True), in_dims=(None, 0))
    first, *later = [mapped(params, xs) for _ in range(3)]
    for each in later:
        torch.testing.assert_close(each, first)


def test_some_parameters_are_frozen() -> None:
    net, params, xs = made("images")
    frozen = {name: p for name, p in params.items() if name.endswith("weight")}
    free = {name: p for name, p in params.items() if name not in frozen}
    f = lambda free, x: functional_call(net, {**frozen, **free}, (x,)).square().sum()
    found: list[bool] = []
    mapped = vmap(grad(looking(f, found)), in_dims=(None, 0))
    for _ in range(3):
        torch.testing.assert_close(mapped(free, xs), by_loop(f, free, xs))


@pytest.mark.parametrize(
    "name", ["linear layers", "images", "norms", "tokens", "several images in a lane", "attention", *TWICE]
)
def test_captured_tensors_that_learn_get_second_derivatives(name: str) -> None:
    """The gradients are differentiated outside: by what weighs the loss, which is captured."""
    net, params, xs = made(name)
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    f = lambda params, x: (functional_call(net, params, (x,)) * weight).sin().square().sum()
    mapped = vmap(grad(f), in_dims=(None, 0))

    def outer(gradients: Params) -> Tensor:
        return torch.autograd.grad(sum(g.pow(3).sum() for g in gradients.values()), weight)[0]

    def loop() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for x in xs:
            leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
            grads = torch.autograd.grad(f(leaves, x), list(leaves.values()), create_graph=True)
            total = total + sum(g.pow(3).sum() for g in grads)
        return torch.autograd.grad(total, weight)[0]

    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel has no second derivative
        expected = loop()
    for _ in range(3):
        torch.testing.assert_close(outer(mapped(params, xs)), expected)


def _layer_norm(x: Tensor, affine: Params) -> Tensor:
    return F.layer_norm(x, (4,), affine.get("weight"), affine.get("bias"))


def _group_norm(x: Tensor, affine: Params) -> Tensor:
    return F.group_norm(x, 1, affine.get("weight"), affine.get("bias"))


def _by_hand(x: Tensor, affine: Params) -> Tensor:
    """Either of both, of rows."""
    centred = x - x.mean(-1, keepdim=True)
    out = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return out * affine.get("weight", 1) + affine.get("bias", 0)


@pytest.mark.parametrize("affine", [{}, {"weight": numbers(4), "bias": numbers(4) / 2}], ids=["bare", "affine"])
@pytest.mark.parametrize("norm", [_layer_norm, _group_norm])
def test_third_derivatives_through_norms(norm: Callable, affine: Params) -> None:
    params, xs = {"w": numbers(4, 3), **affine}, numbers(4, 2, 3)
    scale = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)

    def loss(norm: Callable) -> Callable:
        return lambda p, x: norm(F.linear(x * scale, p["w"]), {k: v for k, v in p.items() if k != "w"}).sin().sum()

    def two_more(gradients: list[Tensor]) -> Tensor:
        total = torch.stack([g.square().sum() for g in gradients]).sum()
        first = torch.autograd.grad(total, scale, create_graph=True)[0]
        return torch.autograd.grad(first, scale)[0]

    def loop() -> list[Tensor]:
        found = []
        for x in xs:
            leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
            found += torch.autograd.grad(loss(_by_hand)(leaves, x), list(leaves.values()), create_graph=True)
        return found

    expected = two_more(loop())
    mapped = vmap(grad(loss(norm)), in_dims=(None, 0))
    for _ in range(3):
        torch.testing.assert_close(two_more(list(mapped(params, xs).values())), expected)


@pytest.mark.parametrize(
    "name", ["linear layers", "linear layers of rows", "norms", "several images in a lane", "attention", *TWICE[:3]]
)
def test_slopes_in_the_input_are_differentiated_in_the_parameters(name: str) -> None:
    net, params, xs = made(name)

    def f(params: Params, x: Tensor) -> Tensor:
        out = lambda x: functional_call(net, params, (x,)).sin().sum()
        return grad(out)(x).square().sum() + out(x)

    def plain(params: Params, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = functional_call(net, params, (x,)).sin().sum()
        return torch.autograd.grad(out, x, create_graph=True)[0].square().sum() + out

    mapped = vmap(grad(f), in_dims=(None, 0))
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel has no second derivative
        expected = by_loop(plain, params, xs)
    for _ in range(3):
        torch.testing.assert_close(mapped(params, xs), expected)


# Uses of a matrix that would be done once for each lane, were it expanded.
OTHERWISE: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "a penalty": lambda p, x: F.linear(x, p["w"]).sum() + p["w"].square().sum(),
    "a product of two": lambda p, x: F.linear(x, p["w"] @ p["w"].T @ p["w"]).square().sum(),
    "a mask": lambda p, x: F.linear(x, p["w"] * (p["w"] > 0)).square().sum(),
    "transposed": lambda p, x: (x @ p["w"].T).square().sum(),
}


@pytest.mark.parametrize("use", OTHERWISE)
def test_other_uses_are_recorded_on_the_plane_of_the_lanes(use: str) -> None:
    params, xs, f = {"w": numbers(2, 3)}, numbers(4, 3), OTHERWISE[use]
    found: list[bool] = []
    mapped = vmap(grad(looking(f, found)), in_dims=(None, 0))
    for _ in range(3):
        torch.testing.assert_close(mapped(params, xs), by_loop(f, params, xs))
    assert found == [False] * 3


def test_a_parameter_that_is_not_used_has_no_slope() -> None:
    mapped = vmap(grad(lambda p, x: x.sum() * 1), in_dims=(None, 0))
    for _ in range(3):
        assert torch.equal(mapped({"w": numbers(2, 3)}, numbers(4, 3))["w"], torch.zeros(4, 2, 3, dtype=torch.float64))


def test_another_use_in_a_later_call_is_right() -> None:
    params, xs = {"w": numbers(2, 3)}, numbers(4, 3)
    use = {"kind": "linear"}

    def f(p: Params, x: Tensor) -> Tensor:
        out = F.linear(x, p["w"]) if use["kind"] == "linear" else p["w"].T.mm(p["w"]) @ x
        return out.square().sum()

    mapped = vmap(grad(f), in_dims=(None, 0))
    for use["kind"] in ("linear", "linear", "product", "linear", "product"):
        torch.testing.assert_close(mapped(params, xs), by_loop(f, params, xs))


def test_weights_that_are_expanded_by_the_caller() -> None:
    """[B, *S] of one tensor: the layer computes with the one, and its gradient is that of each lane."""
    xs = numbers(4, 1, 2, 6, 6)
    weight = numbers(3, 2, 3, 3).requires_grad_()
    out = vmap(lambda w, x: F.conv2d(x, w).sin())(weight.expand(4, -1, -1, -1, -1), xs)
    expected = torch.stack([F.conv2d(x, weight).sin() for x in xs])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), weight), torch.autograd.grad(expected.square().sum(), weight)
    )


EXPANDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    "complex numbers": (lambda w, x: F.linear(x, w).abs(), numbers(2, 3) * 1j + 1, numbers(4, 5, 3) + 2j),
    "a pixel, channels last": (lambda w, x: F.conv1d(x.mT, w, padding=1).sin(), numbers(2, 3, 3), numbers(4, 1, 1, 3)),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_other_weights_that_are_expanded_by_the_caller(name: str) -> None:
    """To the second order."""
    f, weight, xs = EXPANDED[name]
    weight, xs = weight.clone().requires_grad_(), xs.clone().requires_grad_()

    def slopes(run: Callable[[], Tensor]) -> list[Tensor]:
        plain = torch.autograd.grad(run().square().sum(), [weight, xs])
        first = torch.autograd.grad(run().square().sum(), [weight, xs], create_graph=True)
        second = torch.autograd.grad(sum((g.abs() ** 3).sum() for g in first), [weight, xs])
        return [*plain, *first, *second]

    mapped = lambda: vmap(f)(weight.expand(4, *weight.shape), xs)
    torch.testing.assert_close(slopes(mapped), slopes(lambda: torch.stack([f(weight, x) for x in xs])))


@pytest.mark.parametrize("name", ["norms twice", "several images in a lane", "a linear layer twice", "tokens"])
def test_parameters_that_are_views(name: str) -> None:
    net, params, xs = made(name)
    views = {name: torch.stack([p, p + 1], -1)[..., 0] for name, p in params.items()}
    mapped = vmap(grad(loss_of(net)), in_dims=(None, 0))
    for _ in range(3):
        torch.testing.assert_close(mapped(views, xs), by_loop(loss_of(net), params, xs))


def test_no_lanes_of_a_table_that_is_expanded_by_the_caller() -> None:
    table = numbers(7, 4).requires_grad_()
    assert vmap(F.embedding)(TOKENS[:0], table.expand(0, 7, 4)).shape == (0, 5, 4)


def test_no_images_in_a_lane() -> None:
    net, params, xs = made("several images in a lane")
    mapped = vmap(grad(loss_of(net)), in_dims=(None, 0))
    for _ in range(3):
        torch.testing.assert_close(mapped(params, xs[:, :0]), by_loop(loss_of(net), params, xs[:, :0]))


@pytest.mark.parametrize("name", ["linear layers of rows", "sequences", "norms"])
def test_several_cotangents_at_once(name: str) -> None:
    net, params, xs = made(name)
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    mapped = vmap(grad(lambda params, x: functional_call(net, params, (x * weight,)).sin().sum()), in_dims=(None, 0))
    for _ in range(3):
        out = next(iter(mapped(params, xs).values()))
        cotangents = numbers(2, *out.shape)
        (got,) = torch.autograd.grad(out, weight, cotangents, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(out, weight, one, retain_graph=True)[0] for one in cotangents]
        torch.testing.assert_close(got, torch.stack(each))


def test_one_kernel_serves_all_lanes() -> None:
    net, params, xs = made("images")
    mapped = vmap(grad(loss_of(net)), in_dims=(None, 0))
    for _ in range(2):
        mapped(params, xs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        mapped(params, xs)
    counts = {event.key.removeprefix("aten::"): event.count for event in profile.key_averages()}
    assert counts["_convolution"] == 2
    assert counts["native_group_norm"] == counts["native_group_norm_backward"] == 1
    assert counts["convolution_backward"] == 1  # the first layer's input needs no gradient
    assert counts["bmm"] == 2  # the gradients in the weights of both
