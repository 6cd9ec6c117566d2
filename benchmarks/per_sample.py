"""The gradient of every example with respect to all parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Call
from benchmarks.models import Params, block, cnn, labels, mlp, parameters_of, random
from benchmarks.workload import BATCHED, JAX, LOOP, Peers, jax, transforms, workload


def _peers(net: nn.Module, params: Params, x: Tensor, y: Tensor) -> Peers:
    def make(api) -> Call:
        def loss(params, x, y):
            return F.cross_entropy(api.functional_call(net, params, (x.unsqueeze(0),)), y.unsqueeze(0))

        gradients = api.vmap(api.grad(loss), in_dims=(None, 0, 0))
        return lambda: gradients(params, x, y)

    leaves = list(net.parameters())

    def loop() -> Params:
        rows = [torch.autograd.grad(F.cross_entropy(net(a.unsqueeze(0)), b.unsqueeze(0)), leaves) for a, b in zip(x, y)]
        return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}

    peers = transforms(make)
    peers[LOOP] = loop
    return peers


def _expanded(params: Params, count: int) -> Params:
    """A copy of each parameter for each example, [*S] -> [B, *S], so that autograd gives per-sample gradients."""
    return {name: p.expand(count, *p.shape).detach().requires_grad_() for name, p in params.items()}


def _gradients(loss: Tensor, params: Params) -> Params:
    return dict(zip(params, torch.autograd.grad(loss, list(params.values()))))


@workload("per_sample", 1.0)
def per_sample_mlp() -> Peers:
    """per-sample gradients, MLP 784-256-10, 256 examples"""
    net = mlp(784, 256, 10, activation=nn.ReLU)
    params, x, y = parameters_of(net), random(256, 784), labels(256)
    w1, b1, w2, b2 = params.values()

    def by_hand() -> Params:
        hidden = F.relu(F.linear(x, w1, b1))
        back2 = F.linear(hidden, w2, b2).softmax(dim=1) - F.one_hot(y, 10)
        back1 = (back2 @ w2) * (hidden > 0)
        grads = (back1[:, :, None] * x[:, None], back1, back2[:, :, None] * hidden[:, None], back2)
        return dict(zip(params, grads))

    peers = _peers(net, params, x, y)
    peers[BATCHED] = by_hand
    if j := jax():

        def loss(p, x, y):
            logits = p["2.weight"] @ j.nn.relu(p["0.weight"] @ x + p["0.bias"]) + p["2.bias"]
            return -j.nn.log_softmax(logits)[y]

        mapped = j.jax.vmap(j.jax.grad(loss), in_axes=(None, 0, 0))
        peers[JAX] = j.call(mapped, {k: j.array(v) for k, v in params.items()}, j.array(x), j.array(y))
    return peers


@workload("per_sample", 1.2, tolerance=1e-3)
def per_sample_cnn() -> Peers:
    """per-sample gradients, CNN with GroupNorm, 64 images of 28 x 28"""
    net = cnn()
    params, x, y = parameters_of(net), random(64, 1, 28, 28), labels(64)

    def layer(x: Tensor, p: Params, conv: str, norm: str) -> Tensor:
        batch, weight, channels = len(x), p[f"{conv}.weight"], p[f"{conv}.bias"].shape[1]
        out = F.conv2d(x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1), None, padding=1, groups=batch)
        out = out.view(batch, channels, *x.shape[2:]) + p[f"{conv}.bias"][:, :, None, None]
        out = F.group_norm(out, 4) * p[f"{norm}.weight"][:, :, None, None] + p[f"{norm}.bias"][:, :, None, None]
        return F.max_pool2d(F.relu(out), 2)

    def by_hand() -> Params:
        p = _expanded(params, len(x))
        hidden = layer(layer(x, p, "0", "1"), p, "4", "5").flatten(1)
        logits = torch.einsum("bh,bch->bc", hidden, p["9.weight"]) + p["9.bias"]
        return _gradients(F.cross_entropy(logits, y, reduction="sum"), p)

    peers = _peers(net, params, x, y)
    peers[BATCHED] = by_hand
    if j := jax():

        def jax_layer(x, p, conv, norm):
            window = {"window_strides": (1, 1), "padding": "SAME"}
            out = (
                j.lax.conv_general_dilated(x[None], p[f"{conv}.weight"], **window)[0] + p[f"{conv}.bias"][:, None, None]
            )
            groups = out.reshape(4, -1)
            mean, var = groups.mean(axis=1, keepdims=True), groups.var(axis=1, keepdims=True)
            out = ((groups - mean) * j.lax.rsqrt(var + 1e-5)).reshape(out.shape)
            out = j.nn.relu(out * p[f"{norm}.weight"][:, None, None] + p[f"{norm}.bias"][:, None, None])
            return out.reshape(out.shape[0], out.shape[1] // 2, 2, out.shape[2] // 2, 2).max(axis=(2, 4))

        def loss(p, x, y):
            hidden = jax_layer(jax_layer(x, p, "0", "1"), p, "4", "5").reshape(-1)
            return -j.nn.log_softmax(p["9.weight"] @ hidden + p["9.bias"])[y]

        mapped = j.jax.vmap(j.jax.grad(loss), in_axes=(None, 0, 0))
        peers[JAX] = j.call(mapped, {k: j.array(v) for k, v in params.items()}, j.array(x), j.array(y))
    return peers


@workload("per_sample", 1.1)
def per_sample_transformer() -> Peers:
    """per-sample gradients, transformer block of width 64, 32 sequences of 32"""
    net = block()
    params, x, y = parameters_of(net), random(32, 32, 64), labels(32)

    def linear(x: Tensor, p: Params, name: str) -> Tensor:
        return torch.baddbmm(p[f"{name}.bias"].unsqueeze(1), x, p[f"{name}.weight"].mT)

    def norm(x: Tensor, p: Params, name: str) -> Tensor:
        normal = F.layer_norm(x, x.shape[-1:])
        return normal * p[f"{name}.weight"].unsqueeze(1) + p[f"{name}.bias"].unsqueeze(1)

    def by_hand() -> Params:
        p = _expanded(params, len(x))
        q, k, v = linear(norm(x, p, "norm1"), p, "qkv").unflatten(-1, (3, net.heads, -1)).permute(2, 0, 3, 1, 4)
        h = x + linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), p, "out")
        h = h + linear(F.gelu(linear(norm(h, p, "norm2"), p, "up")), p, "down")
        logits = linear(h.mean(dim=1, keepdim=True), p, "readout").squeeze(1)
        return _gradients(F.cross_entropy(logits, y, reduction="sum"), p)

    peers = _peers(net, params, x, y)
    peers[BATCHED] = by_hand
    if j := jax():

        def jax_linear(x, p, name):
            return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

        def jax_norm(x, p, name):
            normal = (x - x.mean(-1, keepdims=True)) * j.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
            return normal * p[f"{name}.weight"] + p[f"{name}.bias"]

        def loss(p, x, y):
            length, width = x.shape
            heads = jax_linear(jax_norm(x, p, "norm1"), p, "qkv").reshape(length, 3, net.heads, -1)
            q, k, v = heads.transpose(1, 2, 0, 3)
            scores = j.nn.softmax(q @ k.swapaxes(-1, -2) / (width // net.heads) ** 0.5, axis=-1)
            x = x + jax_linear((scores @ v).swapaxes(0, 1).reshape(length, width), p, "out")
            up = j.nn.gelu(jax_linear(jax_norm(x, p, "norm2"), p, "up"), approximate=False)
            x = x + jax_linear(up, p, "down")
            return -j.nn.log_softmax(jax_linear(x.mean(axis=0), p, "readout"))[y]

        mapped = j.jax.vmap(j.jax.grad(loss), in_axes=(None, 0, 0))
        peers[JAX] = j.call(mapped, {k: j.array(v) for k, v in params.items()}, j.array(x), j.array(y))
    return peers
