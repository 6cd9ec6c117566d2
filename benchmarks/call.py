"""What a call costs when there is next to nothing to compute."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.workload import BATCHED, JAX, LOOP, Peers, jax, transforms, workload


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@workload("call", 2.5)
def vmap_dot() -> Peers:
    """vmap(dot) over two [64, 5]"""
    x, y = _random(64, 5), _random(64, 5, seed=1)

    def make(api):
        f = api.vmap(torch.dot)
        return lambda: f(x, y)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([torch.dot(a, b) for a, b in zip(x, y)])
    peers[BATCHED] = lambda: (x * y).sum(dim=1)
    if j := jax():
        peers[JAX] = j.call(j.jax.vmap(j.np.dot), j.array(x), j.array(y))
    return peers


@workload("call", 1.0)
def vmap_dot_inside() -> Peers:
    """vmap of a function that calls dot, over two [64, 5]"""
    x, y = _random(64, 5), _random(64, 5, seed=1)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.dot(x, y)

    def make(api):
        mapped = api.vmap(f)
        return lambda: mapped(x, y)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([f(a, b) for a, b in zip(x, y)])
    peers[BATCHED] = lambda: (x * y).sum(dim=1)
    return peers


@workload("call", 2.0)
def nested_dot() -> Peers:
    """vmap(vmap(dot)): all pairs of two [8, 5]"""
    x, y = _random(8, 5), _random(8, 5, seed=1)

    def make(api):
        f = api.vmap(api.vmap(torch.dot, in_dims=(None, 0)), in_dims=(0, None))
        return lambda: f(x, y)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([torch.stack([torch.dot(a, b) for b in y]) for a in x])
    peers[BATCHED] = lambda: x @ y.T
    if j := jax():
        nested = j.jax.vmap(j.jax.vmap(j.np.dot, in_axes=(None, 0)), in_axes=(0, None))
        peers[JAX] = j.call(nested, j.array(x), j.array(y))
    return peers


def _ten(x: Tensor, sin: Callable, exp: Callable, tanh: Callable) -> Tensor:
    y = sin(x) * 2
    y = exp(-y) + x
    y = tanh(y * x) - y
    return sin(y) * 0.5


@workload("call", 0.9)
def ten_op_chain() -> Peers:
    """vmap of ten elementwise operations on [64, 5]"""
    x = _random(64, 5)

    def f(x):
        return _ten(x, torch.sin, torch.exp, torch.tanh)

    def make(api):
        mapped = api.vmap(f)
        return lambda: mapped(x)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([f(row) for row in x])
    peers[BATCHED] = lambda: f(x)
    if j := jax():
        peers[JAX] = j.call(j.jax.vmap(lambda x: _ten(x, j.np.sin, j.np.exp, j.np.tanh)), j.array(x))
    return peers


@workload("call", 1.3)
def vmap_grad() -> Peers:
    """vmap(grad) of the squared error of a linear model, [64, 5]"""
    w, x, y = _random(5), _random(64, 5, seed=1), _random(64, seed=2)

    def loss(w, x, y):
        return (torch.dot(w, x) - y) ** 2

    def make(api):
        f = api.vmap(api.grad(loss), in_dims=(None, 0, 0))
        return lambda: f(w, x, y)

    peers = transforms(make)
    leaf = w.clone().requires_grad_()
    peers[LOOP] = lambda: torch.stack([torch.autograd.grad(loss(leaf, a, b), leaf)[0] for a, b in zip(x, y)])
    peers[BATCHED] = lambda: (2 * (x @ w - y)).unsqueeze(1) * x
    if j := jax():
        mapped = j.jax.vmap(j.jax.grad(lambda w, x, y: (j.np.dot(w, x) - y) ** 2), in_axes=(None, 0, 0))
        peers[JAX] = j.call(mapped, j.array(w), j.array(x), j.array(y))
    return peers


@workload("call", 2.0)
def grad() -> Peers:
    """grad of sin(x).sum() at [5]"""
    x = _random(5)

    def make(api):
        f = api.grad(lambda x: x.sin().sum())
        return lambda: f(x)

    peers = transforms(make)
    peers[BATCHED] = lambda: _autograd(lambda x: x.sin().sum(), x)
    if j := jax():
        peers[JAX] = j.call(j.jax.grad(lambda x: j.np.sin(x).sum()), j.array(x))
    return peers


def _autograd(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor | None = None) -> Tensor:
    """The same by plain torch.autograd, which is what one would write by hand."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf, v)[0]


@workload("call", 2.0)
def vjp() -> Peers:
    """vjp of sin at [5]: the value and one product"""
    x, v = _random(5), _random(5, seed=1)

    def make(api):
        def run():
            _, pull = api.vjp(torch.sin, x)
            return pull(v)[0]

        return run

    peers = transforms(make)
    peers[BATCHED] = lambda: _autograd(torch.sin, x, v)
    if j := jax():
        peers[JAX] = j.call(lambda x, v: j.jax.vjp(j.np.sin, x)[1](v)[0], j.array(x), j.array(v))
    return peers


@workload("call", 2.0)
def jvp() -> Peers:
    """jvp of sin at [5]: the value and one product"""
    x, t = _random(5), _random(5, seed=1)
    peers = transforms(lambda api: lambda: api.jvp(torch.sin, (x,), (t,)))
    peers[BATCHED] = lambda: (x.sin(), x.cos() * t)
    if j := jax():
        peers[JAX] = j.call(lambda x, t: j.jax.jvp(j.np.sin, (x,), (t,)), j.array(x), j.array(t))
    return peers


@workload("call", 2.0)
def jvp_constant() -> Peers:
    """jvp of sin(c * x) + c at [5], where c carries no tangent"""
    x, t, c = _random(5), _random(5, seed=1), _random(5, seed=2)
    peers = transforms(lambda api: lambda: api.jvp(lambda x: torch.sin(c * x) + c, (x,), (t,)))
    peers[BATCHED] = lambda: ((c * x).sin() + c, (c * x).cos() * (c * t))
    if j := jax():
        k = j.array(c)
        peers[JAX] = j.call(lambda x, t: j.jax.jvp(lambda x: j.np.sin(k * x) + k, (x,), (t,)), j.array(x), j.array(t))
    return peers


def _jacobian_peers(name: str) -> Peers:
    x, w = _random(5), _random(5, 5, seed=1)

    def make(api):
        f = getattr(api, name)(lambda x: torch.tanh(w @ x))
        return lambda: f(x)

    def rows() -> Tensor:
        leaf = x.detach().requires_grad_()
        y = torch.tanh(w @ leaf)
        return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in y])

    peers = transforms(make)
    peers[LOOP] = rows
    peers[BATCHED] = lambda: (1 - torch.tanh(w @ x) ** 2).unsqueeze(1) * w
    if j := jax():
        k = j.array(w)
        peers[JAX] = j.call(getattr(j.jax, name)(lambda x: j.np.tanh(k @ x)), j.array(x))
    return peers


@workload("call", 1.5)
def jacrev() -> Peers:
    """jacrev of tanh(W x), 5 to 5"""
    return _jacobian_peers("jacrev")


@workload("call", 2.0)
def jacfwd() -> Peers:
    """jacfwd of tanh(W x), 5 to 5"""
    return _jacobian_peers("jacfwd")


@workload("call", 2.0)
def hessian() -> Peers:
    """hessian of tanh(W x).sum() at [5]"""
    x, w = _random(5), _random(5, 5, seed=1)

    def f(x):
        return torch.tanh(w @ x).sum()

    def make(api):
        second = api.hessian(f)
        return lambda: second(x)

    def rows() -> Tensor:
        leaf = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in first])

    def by_hand() -> Tensor:
        y = torch.tanh(w @ x)
        return w.T @ ((-2 * y * (1 - y**2)).unsqueeze(1) * w)

    peers = transforms(make)
    peers[LOOP] = rows
    peers[BATCHED] = by_hand
    if j := jax():
        k = j.array(w)
        peers[JAX] = j.call(j.jax.hessian(lambda x: j.np.tanh(k @ x).sum()), j.array(x))
    return peers
