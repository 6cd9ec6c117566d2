"""Thirty-two networks at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import Params, labels, mlp, random
from benchmarks.workload import BATCHED, JAX, LOOP, Peers, jax, transforms, workload

MEMBERS = 32


def _stacked() -> tuple[list, Params, Tensor]:
    nets = [mlp(64, 128, 10, seed=seed) for seed in range(MEMBERS)]
    params = {
        name: torch.stack([dict(net.named_parameters())[name].detach() for net in nets])
        for name in nets[0].state_dict()
    }
    return nets, params, random(64, 64)


def _batched(params: Params, x: Tensor) -> Tensor:
    w1, b1, w2, b2 = params.values()
    hidden = torch.tanh(torch.baddbmm(b1.unsqueeze(1), x.expand(MEMBERS, *x.shape), w1.mT))
    return torch.baddbmm(b2.unsqueeze(1), hidden, w2.mT)


@workload("ensemble", 1.0)
def ensemble_forward() -> Peers:
    """outputs of 32 MLPs 64-128-10 on 64 examples"""
    nets, params, x = _stacked()

    def make(api):
        f = api.vmap(lambda params, x: api.functional_call(nets[0], params, (x,)), in_dims=(0, None))
        return lambda: f(params, x)

    def loop() -> Tensor:
        with torch.no_grad():
            return torch.stack([net(x) for net in nets])

    peers = transforms(make)
    peers[LOOP] = loop
    peers[BATCHED] = lambda: _batched(params, x)
    if j := jax():
        peers[JAX] = j.call(j.jax.vmap(_jax_outputs(j), in_axes=(0, None)), _to_jax(j, params), j.array(x))
    return peers


@workload("ensemble", 1.0)
def ensemble_gradient() -> Peers:
    """training gradients of 32 MLPs 64-128-10 on 64 examples"""
    nets, params, x = _stacked()
    y = labels(len(x))

    def make(api):
        def loss(params, x, y):
            return F.cross_entropy(api.functional_call(nets[0], params, (x,)), y)

        f = api.vmap(api.grad(loss), in_dims=(0, None, None))
        return lambda: f(params, x, y)

    def loop() -> Params:
        rows = [torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters())) for net in nets]
        return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}

    def by_hand() -> Params:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(_batched(leaves, x).flatten(0, 1), y.repeat(MEMBERS), reduction="sum") / len(x)
        return dict(zip(params, torch.autograd.grad(loss, list(leaves.values()))))

    peers = transforms(make)
    peers[LOOP] = loop
    peers[BATCHED] = by_hand
    if j := jax():
        outputs = _jax_outputs(j)

        def jax_loss(p, x, y):
            return -j.np.take_along_axis(j.nn.log_softmax(outputs(p, x)), y[:, None], axis=1).mean()

        mapped = j.jax.vmap(j.jax.grad(jax_loss), in_axes=(0, None, None))
        peers[JAX] = j.call(mapped, _to_jax(j, params), j.array(x), j.array(y))
    return peers


def _to_jax(j, params: Params) -> dict:
    return {name: j.array(p) for name, p in params.items()}


def _jax_outputs(j):
    def outputs(p, x):
        return j.np.tanh(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]

    return outputs
