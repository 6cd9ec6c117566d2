"""Single layers: attention, recurrent networks and convolutions, forward and their gradients."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Params, parameters_of, random
from benchmarks.workload import BATCHED, LOOP, TORCH_FUNC, WORKLOADS, Peers, Target, Workload, transforms, workload


def lanes_of(in_dims: tuple, args: tuple, count: int) -> list[tuple]:
    """The arguments of each lane; mapped ones are tensors, or dictionaries of them, with the lanes in dim 0."""

    def pick(arg, dim, lane: int):
        if dim is None:
            return arg
        return {name: t[lane] for name, t in arg.items()} if isinstance(arg, dict) else arg[lane]

    return [tuple(pick(arg, dim, lane) for arg, dim in zip(args, in_dims, strict=True)) for lane in range(count)]


def mapped(f: Callable, in_dims: tuple, args: tuple, count: int) -> Peers:
    """vmap(f) and the loop; `f(api, *args)` returns tensors."""

    def make(api):
        one = api.vmap(partial(f, api), in_dims=in_dims)
        return lambda: one(*args)

    peers = transforms(make)
    lanes = lanes_of(in_dims, args, count)

    def loop():
        with torch.no_grad():
            rows = [f(torch.func, *lane) for lane in lanes]
        return tuple(map(torch.stack, zip(*rows))) if isinstance(rows[0], tuple) else torch.stack(rows)

    peers[LOOP] = loop
    return peers


def gradients(f: Callable, in_dims: tuple, args: tuple, count: int) -> Peers:
    """vmap(grad) of a weighted sum of f's result in its first argument, and the loop by torch.autograd."""
    lanes = lanes_of(in_dims, args, count)
    with torch.no_grad():
        weights = random(*f(torch.func, *lanes[0]).shape, seed=9)

    def make(api):
        one = api.vmap(api.grad(lambda *args: (f(api, *args) * weights).sum()), in_dims=in_dims)
        return lambda: one(*args)

    peers = transforms(make)

    def one(first, *rest):
        leaves = {k: v.detach().requires_grad_() for k, v in (first if isinstance(first, dict) else {0: first}).items()}
        value = (f(torch.func, leaves if isinstance(first, dict) else leaves[0], *rest) * weights).sum()
        return torch.autograd.grad(value, list(leaves.values()))

    def loop():
        columns = [torch.stack(column) for column in zip(*[one(*lane) for lane in lanes])]
        return dict(zip(args[0], columns)) if isinstance(args[0], dict) else columns[0]

    peers[LOOP] = loop
    return peers


# --- attention -------------------------------------------------------------------------------------------------------

LANES = 32


def _heads(seed: int = 0) -> Tensor:
    return random(LANES, 1, 4, 32, 16, seed=seed)


@workload("attention", 1.0)
def sdpa_forward() -> Peers:
    """attention of four heads, 32 sequences of 32"""
    args = (_heads(), _heads(1), _heads(2))
    return mapped(lambda api, q, k, v: F.scaled_dot_product_attention(q, k, v), (0, 0, 0), args, LANES)


@workload("attention", 1.0)
def sdpa_gradient() -> Peers:
    """gradient of causal attention in its query, 32 sequences of 32"""
    args = (_heads(), _heads(1), _heads(2))
    f = partial(F.scaled_dot_product_attention, is_causal=True)
    return gradients(lambda api, q, k, v: f(q, k, v), (0, 0, 0), args, LANES)


def _attention() -> tuple[nn.Module, Params, Tensor]:
    torch.manual_seed(0)
    net = nn.MultiheadAttention(64, 4, batch_first=True)
    return net, parameters_of(net), random(LANES, 1, 32, 64)


@workload("attention", 1.0)
def multihead_forward() -> Peers:
    """MultiheadAttention of width 64, 32 sequences of 32"""
    net, params, x = _attention()
    return mapped(_attend(net), (None, 0), (params, x), LANES)


@workload("attention", 1.0)
def multihead_gradient() -> Peers:
    """per-sample gradients of MultiheadAttention of width 64, 32 sequences of 32"""
    net, params, x = _attention()
    return gradients(_attend(net), (None, 0), (params, x), LANES)


def _attend(net: nn.Module) -> Callable:
    return lambda api, params, x: api.functional_call(net, params, (x, x, x), {"need_weights": False})[0]


# --- recurrent networks ----------------------------------------------------------------------------------------------


def _recurrent(kind: type, members: int | None = None) -> tuple[nn.Module, Params, Tensor]:
    """A layer, its parameters (of so many members), and sequences of 16 steps and width 32: [lanes, 1, 16, 32]."""
    torch.manual_seed(0)
    net = kind(32, 32, batch_first=True)
    params = parameters_of(net)
    if members is not None:
        params = {name: p + 0.1 * random(members, *p.shape, seed=1) for name, p in params.items()}
    return net, params, random(LANES, 1, 16, 32)


def _outputs(net: nn.Module) -> Callable:
    return lambda api, params, x: api.functional_call(net, params, (x,))[0]


def _lstm_or_gru(kind: type, peer: str) -> None:
    """Register the workloads of one kind; `peer` for those that torch.func refuses."""
    name = kind.__name__

    def forward() -> Peers:
        net, params, x = _recurrent(kind)
        peers = without_torch_func(mapped(_outputs(net), (None, 0), (params, x), LANES))
        peers[BATCHED] = lambda: _plain(net, x.flatten(0, 1)).unsqueeze(1)
        return peers

    def gradient() -> Peers:
        net, params, x = _recurrent(kind)
        peers = gradients(_outputs(net), (None, 0), (params, x), LANES)
        return peers if peer == TORCH_FUNC else without_torch_func(peers)

    def ensemble() -> Peers:
        net, params, x = _recurrent(kind, LANES)
        return without_torch_func(mapped(_outputs(net), (0, None), (params, x.flatten(0, 1)), LANES))

    for what, build, about, other in (
        ("forward", forward, f"{name} of width 32, 32 sequences of 16", LOOP),
        ("gradient", gradient, f"per-sample gradients of {name}, width 32, 32 sequences of 16", peer),
        ("ensemble", ensemble, f"32 {name}s of width 32 on 32 sequences of 16", LOOP),
    ):
        target = Target(1.0, other)
        WORKLOADS.append(Workload("recurrent", f"{name.lower()}_{what}", about, build, target, 1e-4))


def without_torch_func(peers: Peers) -> Peers:
    """For work that torch.func refuses."""
    return {name: call for name, call in peers.items() if name != TORCH_FUNC}


def _plain(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net(x)[0]


_lstm_or_gru(nn.LSTM, TORCH_FUNC)
_lstm_or_gru(nn.GRU, LOOP)


# --- convolutions ----------------------------------------------------------------------------------------------------

# name: channels in, out, image, kernel, stride, groups
CONVOLUTIONS = {
    "1x1": (32, 64, 16, 1, 1, 1),
    "few_channels": (3, 16, 32, 3, 1, 1),
    "many_channels": (64, 64, 8, 3, 1, 1),
    "strided": (16, 32, 16, 3, 2, 1),
    "depthwise": (32, 32, 16, 3, 1, 32),
    "small_maps": (16, 32, 4, 3, 1, 1),
}


def _convolve(shape: tuple) -> Callable:
    *_, kernel, stride, groups = shape
    return lambda api, w, x: F.conv2d(x, w, None, stride, kernel // 2, 1, groups)


def _operands(shape: tuple, *members: int) -> tuple[Tensor, Tensor]:
    c_in, c_out, image, kernel, _, groups = shape
    weight = random(*members, c_out, c_in // groups, kernel, kernel, seed=1) / (kernel * (c_in // groups) ** 0.5)
    return weight, random(LANES, 1, c_in, image, image)


def _convolution(name: str, shape: tuple) -> None:
    """Register the workloads of one shape."""
    size = "{0} to {1} channels, {2} x {2} images, {3} x {3} kernel, stride {4}, {5} groups".format(*shape)

    def forward() -> Peers:
        return mapped(_convolve(shape), (None, 0), _operands(shape), LANES)

    def gradient() -> Peers:
        return gradients(_convolve(shape), (None, 0), _operands(shape), LANES)

    def ensemble() -> Peers:
        return mapped(_convolve(shape), (0, 0), _operands(shape, LANES), LANES)

    for what, build, about in (
        ("forward", forward, f"convolution, {size}"),
        ("gradient", gradient, f"per-sample weight gradients, {size}"),
        ("ensemble", ensemble, f"convolution with weights for each lane, {size}"),
    ):
        WORKLOADS.append(Workload("conv", f"conv_{name}_{what}", about, build, Target(1.0), 1e-3))


for _name, _shape in CONVOLUTIONS.items():
    _convolution(_name, _shape)
