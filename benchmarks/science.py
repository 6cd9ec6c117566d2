"""What scientists write for one point, one trajectory or one filter: many small operations, and derivatives of nets."""

import torch
from torch import Tensor, nn

from benchmarks.models import mlp, parameters_of, random
from benchmarks.workload import BATCHED, LOOP, Peers, transforms, workload


def _field(width: int = 32) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    net = mlp(2, width, width, 1)
    return net, parameters_of(net), random(256, 2)


@workload("science", 1.0)
def laplacian() -> Peers:
    """Laplacian of an MLP 2-32-32-1 at each of 256 points"""
    net, params, points = _field()

    def make(api):
        def value(x: Tensor) -> Tensor:
            return api.functional_call(net, params, (x,)).squeeze()

        mapped = api.vmap(lambda x: api.hessian(value)(x).diagonal().sum())
        return lambda: mapped(points)

    def one(x: Tensor) -> Tensor:
        return torch.stack([_second(net, x, direction) for direction in torch.eye(2)]).sum()

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([one(x) for x in points])
    return peers


def _second(net: nn.Module, x: Tensor, direction: Tensor, keep: bool = False) -> Tensor:
    """The second derivative of a net at one point along a direction, by torch.autograd."""
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(net(leaf).squeeze(), leaf, create_graph=True)
    return torch.autograd.grad(first @ direction, leaf, create_graph=keep)[0] @ direction


@workload("science", 1.0, tolerance=1e-3)
def residual_gradient() -> Peers:
    """training gradient of a second derivative of an MLP 2-32-32-1, squared, over 256 points"""
    net, params, points = _field()
    direction = torch.tensor([1.0, 0.0])

    def make(api):
        def residual(params: dict[str, Tensor], x: Tensor) -> Tensor:
            def value(x: Tensor) -> Tensor:
                return api.functional_call(net, params, (x,)).squeeze()

            second = api.jvp(api.grad(value), (x,), (direction,))[1][0]
            return (second - value(x)) ** 2

        gradient = api.grad(lambda params: api.vmap(residual, in_dims=(None, 0))(params, points).mean())
        return lambda: gradient(params)

    def loop() -> dict[str, Tensor]:
        residuals = [(_second(net, x, direction, keep=True) - net(x).squeeze()) ** 2 for x in points]
        grads = torch.autograd.grad(torch.stack(residuals).mean(), list(net.parameters()))
        return dict(zip(params, grads, strict=True))

    peers = transforms(make)
    peers[LOOP] = loop
    return peers


@workload("science", 1.0)
def hessian_vector_product() -> Peers:
    """product of the Hessian of a mean loss with a vector, MLP 2-32-32-1, 256 points"""
    net, params, points = _field()
    vector = {name: torch.ones_like(p) for name, p in params.items()}

    def make(api):
        def loss(params: dict[str, Tensor]) -> Tensor:
            return api.functional_call(net, params, (points,)).square().mean()

        return lambda: api.jvp(api.grad(loss), (params,), (vector,))[1]

    def by_hand() -> dict[str, Tensor]:
        weights = list(net.parameters())
        first = torch.autograd.grad(net(points).square().mean(), weights, create_graph=True)
        products = torch.autograd.grad([g.sum() for g in first], weights)
        return dict(zip(params, products, strict=True))

    peers = transforms(make)
    peers[BATCHED] = by_hand
    return peers


def _pendulum(y: Tensor) -> Tensor:
    return torch.stack([y[1], -torch.sin(y[0])])


def _runge_kutta(y: Tensor, steps: int, h: float = 0.1) -> Tensor:
    for _ in range(steps):
        a = _pendulum(y)
        b = _pendulum(y + h / 2 * a)
        c = _pendulum(y + h / 2 * b)
        d = _pendulum(y + h * c)
        y = y + h / 6 * (a + 2 * b + 2 * c + d)
    return y


@workload("science", 1.0)
def runge_kutta() -> Peers:
    """fifty Runge-Kutta steps of 1,000 pendulums: 1,650 operations on [2]"""
    starts = random(1000, 2)

    def make(api):
        mapped = api.vmap(lambda y: _runge_kutta(y, 50))
        return lambda: mapped(starts)

    peers = transforms(make)
    peers[BATCHED] = lambda: _runge_kutta(starts.T, 50).T
    return peers


@workload("science", 1.0)
def flow_jacobian() -> Peers:
    """Jacobians of ten Runge-Kutta steps of 64 pendulums in where they start"""
    starts = random(64, 2)

    def make(api):
        mapped = api.vmap(api.jacfwd(lambda y: _runge_kutta(y, 10)))
        return lambda: mapped(starts)

    def one(y: Tensor) -> Tensor:
        leaf = y.detach().requires_grad_()
        out = _runge_kutta(leaf, 10)
        return torch.stack([torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in out])

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([one(y) for y in starts])
    return peers


@workload("science", 1.0)
def kalman_filter() -> Peers:
    """Kalman filter of four states and two readings, twenty steps for 128 lanes: most operations have no lanes"""
    move, noise, readings = 0.9 * torch.eye(4), 0.1 * torch.eye(4), random(128, 20, 2)
    observe, error = random(2, 4, seed=1), torch.eye(2)

    def filtered(z: Tensor) -> Tensor:
        x, covariance = torch.zeros(4), torch.eye(4)
        for step in range(20):
            x, covariance = move @ x, move @ covariance @ move.T + noise
            innovation = observe @ covariance @ observe.T + error
            gain = torch.linalg.solve(innovation, observe @ covariance).T
            x = x + gain @ (z[step] - observe @ x)
            covariance = covariance - gain @ observe @ covariance
        return x

    def make(api):
        mapped = api.vmap(filtered)
        return lambda: mapped(readings)

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([filtered(z) for z in readings])
    return peers


@workload("science", 1.0, tolerance=1e-3)
def gaussian_process() -> Peers:
    """gradient of a Gaussian process's log likelihood in its length scale, for 16 sets of 40 points"""
    points, readings, scales = random(16, 40, 2), random(16, 40, seed=1), torch.linspace(0.5, 1.5, 16)

    def loss(scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
        distances = (x[:, None] - x[None]).square().sum(-1)
        covariance = torch.exp(-0.5 * distances / scale**2) + 0.1 * torch.eye(40)
        factor = torch.linalg.cholesky(covariance)
        whitened = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
        return 0.5 * whitened.square().sum() + factor.diagonal().log().sum()

    def make(api):
        mapped = api.vmap(api.grad(loss))
        return lambda: mapped(scales, points, readings)

    def one(scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
        leaf = scale.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf, x, y), leaf)[0]

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([one(*row) for row in zip(scales, points, readings, strict=True)])
    return peers


@workload("science", 1.0)
def optimal_transport() -> Peers:
    """gradient of a Sinkhorn distance in one of two clouds of twenty points, fifteen steps, for eight pairs"""
    first, second = random(8, 20, 2), random(8, 20, 2, seed=1)

    def distance(x: Tensor, y: Tensor) -> Tensor:
        cost = (x[:, None] - y[None]).square().sum(-1)
        f, g = torch.zeros(20), torch.zeros(20)
        for _ in range(15):
            f = -0.5 * torch.logsumexp((g[None] - cost) / 0.5, 1)
            g = -0.5 * torch.logsumexp((f[:, None] - cost) / 0.5, 0)
        return (torch.exp((f[:, None] + g[None] - cost) / 0.5) * cost).sum()

    def make(api):
        mapped = api.vmap(api.grad(distance))
        return lambda: mapped(first, second)

    def one(x: Tensor, y: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(distance(leaf, y), leaf)[0]

    peers = transforms(make)
    peers[LOOP] = lambda: torch.stack([one(*row) for row in zip(first, second, strict=True)])
    return peers
