"""Functions of captured tensors that learn, which nobody differentiates inside: recorded below the lanes alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lanewise import grad, jvp, vjp, vmap
from lanewise._core.plane import recorded
from lanewise._core.short.shared import _unrecorded
from tests.gradients_below import forget


@pytest.fixture(autouse=True)
def _unknown() -> None:
    forget()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.scale = nn.LayerNorm(6), nn.Linear(6, 12), nn.Parameter(numbers(6))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.up(self.norm(x)).chunk(2, -1)
        return x * self.scale + F.scaled_dot_product_attention(q, k, x)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), numbers(4, 6, 3)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 3, 2)
        ),
        numbers(4, 3, 2, 8, 8),
    ),
    "an image without a batch": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.MaxPool2d(3, 1)), numbers(4, 4, 7, 7)),
    "padded": (lambda: nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect"), numbers(4, 1, 2, 7, 7)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.GELU(), nn.MaxPool1d(2)), numbers(4, 1, 3, 9)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.MaxPool3d(2)), numbers(4, 1, 2, 4, 5, 4)),
    "a norm with statistics": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval(),
        numbers(4, 1, 2, 7, 7),
    ),
    "a transformer": (lambda: nn.Sequential(Block(), Block()), numbers(4, 5, 6)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    make, xs = NETS[name]
    torch.manual_seed(0)
    return make().double(), xs


def slopes(net: nn.Module, out: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), list(net.parameters()))


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("name", NETS)
def test_values_and_training_gradients_are_those_of_a_loop(name: str, lanes: int) -> None:
    net, xs = made(name)
    xs = xs[:lanes]
    mapped = vmap(lambda x: net(x))
    expected = torch.stack([net(x) for x in xs])
    for _ in range(3):
        out = mapped(xs)
        assert out.requires_grad
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(slopes(net, out), slopes(net, torch.stack([net(x) for x in xs])))
        with torch.no_grad():
            assert not mapped(xs).requires_grad
            torch.testing.assert_close(mapped(xs), expected)


def test_nothing_is_recorded_on_the_plane_of_the_lanes_from_the_second_call_on() -> None:
    net, xs = made("images")
    found = []

    def f(x: Tensor) -> Tensor:
        out = net(x)
        found.append(recorded(out))
        return out

    mapped = vmap(f)
    for _ in range(3):
        mapped(xs)
    assert found == [True, False, False]


def test_each_layer_is_one_kernel_for_all_lanes() -> None:
    net, xs = made("images")
    mapped = vmap(lambda x: net(x))
    for _ in range(2):
        mapped(xs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        mapped(xs)
    counts = {event.key.removeprefix("aten::"): event.count for event in profile.key_averages()}
    assert counts["_convolution"] == 2
    assert counts["native_group_norm"] == counts["max_pool2d_with_indices"] == 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * cotangent


LINEAR = nn.Linear(3, 2).double()


def _inner(x: Tensor) -> Tensor:
    out = LINEAR(x).sin().sum()
    return torch.autograd.grad(out, LINEAR.weight, create_graph=True)[0].sum(0)


def _backward(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    LINEAR(x).sin().sum().backward(inputs=[x])
    assert x.grad is not None
    return x.grad * 1


def _hooked(x: Tensor) -> Tensor:
    hidden = LINEAR(x)
    hidden.register_hook(lambda slope: slope * 2)
    return hidden.sin()


# What asks for a record on the plane of the lanes, if only in a later call.
ASKS: dict[str, Callable[[Tensor], Any]] = {
    "torch.autograd.grad": _inner,
    "backward": _backward,
    "a hook": _hooked,
    "requires_grad": lambda x: LINEAR(x) * (2 if LINEAR(x).requires_grad else 3),
    "grad_fn": lambda x: LINEAR(x) * (3 if LINEAR(x).grad_fn is None else 2),
    "is_leaf": lambda x: LINEAR(x) * (3 if LINEAR(x).is_leaf else 2),
    "detach": lambda x: LINEAR(x).detach() * LINEAR(x),
    "grad": lambda x: grad(lambda x: LINEAR(x).sin().sum())(x),
    "vjp": lambda x: vjp(lambda x: LINEAR(x).sin(), x)[1](torch.ones(2, dtype=x.dtype))[0],
    "jvp": lambda x: jvp(lambda x: LINEAR(x).sin(), (x,), (x,))[1],
    "vmap": lambda x: vmap(lambda y: LINEAR(x * y).sin())(torch.arange(3, dtype=x.dtype)).sum(0),
    "a custom Function": lambda x: Doubled.apply(LINEAR(x)),
    "checkpoint": lambda x: checkpoint(lambda x: LINEAR(x).sin(), x, use_reentrant=False),
    "no_grad": lambda x: LINEAR(x).sin() * torch.no_grad()(LINEAR)(x),
    "a branch": lambda x: LINEAR(x) * 2 if LINEAR(x).sum() > 0 else LINEAR(x).sin(),
    "in place": lambda x: LINEAR(x).mul_(2).add_(LINEAR(x)[0]).sin(),
    "written into what is made inside": lambda x: torch.zeros(2, dtype=x.dtype).copy_(LINEAR(x)).exp(),
}


def _by_loop(f: Callable, xs: Tensor) -> Tensor:
    """grad, vjp, jvp and vmap of one example, by this library: these have tests of their own."""
    return torch.stack([f(x) for x in xs])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ASKS)
def test_who_asks_for_the_record_gets_it(name: str, first: bool) -> None:
    """From the first call on, or when another way of running is known already."""
    xs = numbers(4, 3)
    asks = {"now": first}

    def f(x: Tensor) -> Any:
        return ASKS[name](x) if asks["now"] else LINEAR(x).tanh()

    mapped = vmap(f)
    for asks["now"] in (first, first, True, True, False, True):
        out, expected = mapped(xs), _by_loop(f, xs)
        torch.testing.assert_close(out, expected)
        assert out.requires_grad == expected.requires_grad
        if out.requires_grad:
            got, wanted = (torch.autograd.grad(y.square().sum(), LINEAR.weight) for y in (out, expected))
            torch.testing.assert_close(got, wanted)


FROZEN, SCALE = numbers(2, 3), numbers(3).requires_grad_()
LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "a factory": lambda x: F.linear(x * torch.ones(3, dtype=x.dtype, requires_grad=True), FROZEN),
    "a Parameter": lambda x: F.layer_norm(x * nn.Parameter(torch.ones_like(x[:1])), (3,)),
    "requires_grad_": lambda x: F.linear((x * 1).requires_grad_(), FROZEN),
    "a view of one": lambda x: F.linear((x * 1).requires_grad_().view(1, 3).squeeze(0), FROZEN),
    "beside a captured one": lambda x: F.linear(x * SCALE, FROZEN) * torch.ones(2, dtype=x.dtype, requires_grad=True),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_hangs_on_leaves_made_inside_requires_grad(name: str) -> None:
    xs, f = numbers(4, 3), LEAVES[name]
    mapped = vmap(f)
    for _ in range(3):
        out = mapped(xs)
        torch.testing.assert_close(out, torch.stack([f(x) for x in xs]))
        assert out.requires_grad


def test_captured_factors_are_not_recorded_on_the_plane_of_the_lanes() -> None:
    found, xs = [], numbers(4, 3)

    def f(x: Tensor) -> Tensor:
        out = (x * SCALE + SCALE[0]) / SCALE
        found.append(recorded(out))
        return F.linear(out, FROZEN)

    mapped = vmap(f)
    for _ in range(3):
        out, expected = mapped(xs), torch.stack([f(x) for x in xs])
        torch.testing.assert_close(out, expected)
        got, wanted = (torch.autograd.grad(y.sin().sum(), SCALE) for y in (out, expected))
        torch.testing.assert_close(got, wanted)
    assert [found[0], *found[5::5]] == [True, False, False]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda x: x.flatten(),
    "flatten some": lambda x: x.flatten(1, -1),
    "flatten a transposed": lambda x: x.transpose(0, 1).flatten(),
    "permute": lambda x: x.permute(2, 0, -2),
    "permute by a tuple": lambda x: x.permute((1, 0, 2)),
    "reshape": lambda x: x.reshape(-1, 2),
    "reshape by a size": lambda x: x.reshape(torch.Size([4, 3])),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze a dim": lambda x: x[:, :1].squeeze(-2),
    "squeeze what is longer": lambda x: x.squeeze(0),
    "squeeze dims": lambda x: x[:1, :1].squeeze((0, 1)),
    "transpose": lambda x: x.transpose(-1, 0),
    "unbind": lambda x: x.unbind(1)[1],
    "unpack": lambda x: (lambda a, b: a - b)(*x),
    "unflatten": lambda x: x.unflatten(-1, (2, 1)),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "view": lambda x: x.view(3, 4),
    "view by a tuple": lambda x: x.view((-1,)),
    "view of bits": lambda x: x.detach().view(torch.int64) * LINEAR.bias[0],
    "sum": lambda x: x.sum(),
    "sum of dims": lambda x: x.sum((0, -1), keepdim=True),
    "sum of no dims": lambda x: x.sum(()),
    "sum of a dim by name": lambda x: x.sum(dim=1),
    "sum in another dtype": lambda x: x.sum(dtype=torch.float32),
    "sum of numbers": lambda x: (x > 0).sum() * LINEAR.bias[0],
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(-1),
    "written": lambda x: _written(x),
}


def _written(x: Tensor) -> Tensor:
    """A write to a view is one to what it is a view of."""
    hidden = x * 1
    hidden.transpose(0, 1).unsqueeze(0).mul_(2)
    hidden.view(-1)[:2].add_(1)
    return hidden


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", VIEWS)
def test_views_and_sums_of_values_that_are_recorded_below(name: str, dim: int) -> None:
    xs = numbers(2, 3, 2, 5).movedim(-1, dim)
    scale = numbers(1)[0].requires_grad_()
    f = lambda x: VIEWS[name](x * scale)
    mapped = vmap(f, in_dims=dim)
    for _ in range(3):
        out, expected = mapped(xs), torch.stack([f(x) for x in xs.unbind(dim)])
        torch.testing.assert_close(out, expected)
        assert out.requires_grad == expected.requires_grad
        if out.requires_grad:
            got, wanted = (torch.autograd.grad(y.sin().sum(), scale, allow_unused=True) for y in (out, expected))
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("wrong", [lambda x: x.view(5), lambda x: x.transpose(0, 3), lambda x: x.sum(4)])
def test_views_that_there_are_not(wrong: Callable) -> None:
    mapped = vmap(lambda x: wrong(x * SCALE[0]) if fails["now"] else x * SCALE[0])
    fails = {"now": False}
    for fails["now"] in (False, False, True):
        if fails["now"]:
            with pytest.raises((RuntimeError, IndexError), match="invalid for input of size 12|Dimension out of range"):
                mapped(numbers(4, 2, 3, 2))
        else:
            mapped(numbers(4, 2, 3, 2))


def test_an_error_leaves_nothing_behind() -> None:
    net, xs = made("linear layers")
    fails = {"now": False}

    def f(x: Tensor) -> Tensor:
        out = net(x)
        if fails["now"]:
            raise ValueError("of the user's")
        return out

    mapped = vmap(f)
    for fails["now"] in (False, False, True, False):
        if fails["now"]:
            with pytest.raises(ValueError, match="of the user's"):
                mapped(xs)
        else:
            torch.testing.assert_close(mapped(xs), torch.stack([net(x) for x in xs]))


def test_it_is_remembered_apart_with_gradients_and_without() -> None:
    net, xs = made("linear layers")
    mapped = vmap(lambda x: net(x))
    with torch.no_grad():
        mapped(xs)
    assert not _unrecorded[False]
    mapped(xs)
    assert len(_unrecorded[True]) <= 1


@pytest.mark.parametrize("name", ["linear", "scaled_dot_product_attention"])
def test_what_is_put_in_place_of_a_layer_is_called_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, weight, xs = getattr(F, name), numbers(3, 3), numbers(4, 2, 3)
    monkeypatch.setattr(F, name, lambda *args: own(*args) * 2)

    def f(w: Tensor, x: Tensor) -> Tensor:
        rows = F.linear(x, w)
        return F.scaled_dot_product_attention(rows, rows, x)

    loss = lambda w, x: f(w, x).square().sum()
    mapped, slopes = vmap(f, in_dims=(None, 0)), vmap(grad(loss), in_dims=(None, 0))
    leaves = [weight.clone().requires_grad_() for _ in xs]
    expected = torch.stack([torch.autograd.grad(loss(w, x), w)[0] for w, x in zip(leaves, xs)])
    for _ in range(3):
        torch.testing.assert_close(mapped(weight, xs), torch.stack([f(weight, x) for x in xs]))
        torch.testing.assert_close(slopes(weight, xs), expected)


LAYERS = [(F, name) for name in ("linear", "conv2d", "gelu", "relu", "layer_norm", "scaled_dot_product_attention")]
LAYERS += [(torch, name) for name in ("relu", "conv2d", "layer_norm", "group_norm", "batch_norm", "max_pool2d", "tanh")]


def test_names_of_layers_lead_to_the_same_functions_inside() -> None:
    outside = [getattr(module, name) for module, name in LAYERS]

    def f(x: Tensor) -> Tensor:
        assert all(getattr(module, name) is layer for (module, name), layer in zip(LAYERS, outside, strict=True))
        return LINEAR(x)

    for transformed in (vmap(f), vmap(grad(lambda x: f(x).sum()))):
        for _ in range(3):
            transformed(numbers(4, 3))


# --- max pooling -----------------------------------------------------------------------------------------------------

POOLS: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda x: F.max_pool2d(x, 2),
    "overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
    "dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True),
    "with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
}


@pytest.mark.parametrize("shape", [(4, 2, 5, 7, 7), (4, 5, 8, 8), (4, 2, 3, 7, 7)])
@pytest.mark.parametrize("name", POOLS)
def test_pooling_of_values_that_are_recorded(name: str, shape: tuple[int, ...]) -> None:
    """To the second order, and with ties."""
    f = POOLS[name]
    xs = (numbers(*shape) * 2).round().requires_grad_()

    def second(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run().sin().sum(), xs, create_graph=True)[0]
        return first, torch.autograd.grad(first.pow(3).sum(), xs)[0]

    mapped = vmap(lambda x: f(x * 1))
    for _ in range(3):
        torch.testing.assert_close(mapped(xs), torch.stack([f(x) for x in xs]))
        torch.testing.assert_close(second(lambda: mapped(xs)), second(lambda: torch.stack([f(x) for x in xs])))


def test_what_is_pooled_may_not_change_before_the_backward_pass() -> None:
    weight = torch.ones(4, 1, 1, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        hidden = x * weight
        out = F.max_pool2d(hidden, 2)
        hidden.mul_(2)
        return out

    mapped = vmap(f)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            mapped(numbers(3, 4, 6, 6)).sum().backward()
