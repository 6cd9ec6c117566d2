"""Jacobians and Hessians of multilayer perceptrons with respect to their input."""

import torch
from torch import Tensor, nn

from benchmarks.models import mlp, parameters_of, random
from benchmarks.workload import BATCHED, JAX, LOOP, Peers, jax, transforms, workload


def _jax_mlp(j, net: nn.Module):
    weights = [j.array(p) for p in parameters_of(net).values()]

    def f(x):
        for i in range(0, len(weights), 2):
            x = weights[i] @ x + weights[i + 1]
            x = j.np.tanh(x) if i + 2 < len(weights) else x
        return x

    return f


def _jacobian_by_hand(net: nn.Sequential, x: Tensor) -> Tensor:
    """The product of the layers' Jacobians from the input on, for rows [B, n] or one [n]."""
    with torch.no_grad():
        first, *weights = [p for p in net.parameters() if p.dim() == 2]
        x, jacobian = net[0](x), first
        for i, weight in enumerate(weights):
            x = net[2 * i + 1](x)
            jacobian = weight @ ((1 - x**2).unsqueeze(-1) * jacobian)
            x = net[2 * i + 2](x)
    return jacobian


def _rows(net: nn.Module, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    y = net(leaf)
    return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in y])


def _hessian_rows(net: nn.Module, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(net(leaf).squeeze(), leaf, create_graph=True)
    return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in first])


def _single(name: str) -> Peers:
    net, x = mlp(64, 128, 128, 32).requires_grad_(False), random(64)

    def make(api):
        jacobian = getattr(api, name)(net)
        return lambda: jacobian(x)

    peers = transforms(make)
    peers[LOOP] = lambda: _rows(net, x)
    peers[BATCHED] = lambda: _jacobian_by_hand(net, x)
    if j := jax():
        peers[JAX] = j.call(getattr(j.jax, name)(_jax_mlp(j, net)), j.array(x))
    return peers


@workload("jacobians", 1.0)
def jacrev_mlp() -> Peers:
    """jacrev of an MLP 64-128-128-32"""
    return _single("jacrev")


@workload("jacobians", 1.0)
def jacfwd_mlp() -> Peers:
    """jacfwd of an MLP 64-128-128-32"""
    return _single("jacfwd")


@workload("jacobians", 1.0)
def vmap_jacrev_mlp() -> Peers:
    """vmap(jacrev) of an MLP 64-128-128-32, 32 examples"""
    net, x = mlp(64, 128, 128, 32).requires_grad_(False), random(32, 64)

    def make(api):
        jacobian = api.vmap(api.jacrev(net))
        return lambda: jacobian(x)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([_rows(net, row) for row in x])
    peers[BATCHED] = lambda: _jacobian_by_hand(net, x)
    if j := jax():
        peers[JAX] = j.call(j.jax.vmap(j.jax.jacrev(_jax_mlp(j, net))), j.array(x))
    return peers


@workload("jacobians", 1.0)
def hessian_mlp() -> Peers:
    """hessian of an MLP 64-128-128-1"""
    net, x = mlp(64, 128, 128, 1).requires_grad_(False), random(64)

    def make(api):
        second = api.hessian(lambda x: net(x).squeeze(0))
        return lambda: second(x)

    peers = transforms(make)
    peers[LOOP] = lambda: _hessian_rows(net, x)
    if j := jax():
        f = _jax_mlp(j, net)
        peers[JAX] = j.call(j.jax.hessian(lambda x: f(x)[0]), j.array(x))
    return peers


@workload("jacobians", 1.0)
def vmap_hessian_mlp() -> Peers:
    """vmap(hessian) of an MLP 16-64-64-1, 32 examples"""
    net, x = mlp(16, 64, 64, 1).requires_grad_(False), random(32, 16)

    def make(api):
        second = api.vmap(api.hessian(lambda x: net(x).squeeze(0)))
        return lambda: second(x)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([_hessian_rows(net, row) for row in x])
    if j := jax():
        f = _jax_mlp(j, net)
        peers[JAX] = j.call(j.jax.vmap(j.jax.hessian(lambda x: f(x)[0])), j.array(x))
    return peers
