"""Python control flow on lane values: ten thousand examples, each with its own way through the code."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import lanewise
from benchmarks.measure import Part
from benchmarks.workload import BATCHED, JAX, LOOP, OWN, Peers, Target, jax, workload

LANES = 10_000
SHARE = 50  # the loop over the examples is measured on so many of them
EACH_WAY = Target(speed=100, peer=LOOP, batched=1 / 3)
BY_HAND = Target(speed=1 / 3, peer=BATCHED)


def _uniform(*shape: int, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _whole(low: int, high: int) -> Tensor:
    return torch.randint(low, high, (LANES,), generator=torch.Generator().manual_seed(0))


def _peers(f: Callable, *xs: Tensor, batched: Callable, share: int = SHARE) -> Peers:
    """f is a function of one example, `batched` the same work written by hand for all."""
    mapped = lanewise.vmap(f)
    peers: Peers = {OWN: lambda: mapped(*xs)}
    some = [x[:share] for x in xs]
    peers[LOOP] = Part(lambda: torch.stack([torch.as_tensor(f(*row)) for row in zip(*some)]), share / len(xs[0]))
    peers[BATCHED] = lambda: batched(*xs)
    return peers


def _jax_while(peers: Peers, make: Callable[[Any], Callable], *xs: Tensor) -> Peers:
    """Add `jit(vmap(...))` of a function with a `lax.while_loop`, where JAX is installed."""
    if j := jax():
        peers[JAX] = j.call(j.jax.vmap(make(j)), *[j.array(x) for x in xs])
    return peers


# --- loops ----------------------------------------------------------------------------------------------------------


def _newton(a: Tensor) -> Tensor:
    x = a
    while (x * x - a).abs() > 1e-5 * a:
        x = 0.5 * (x + a / x)
    return x


def _newton_by_hand(a: Tensor) -> Tensor:
    x = a
    while (going := (x * x - a).abs() > 1e-5 * a).any():
        x = torch.where(going, 0.5 * (x + a / x), x)
    return x


@workload("control flow", EACH_WAY)
def newton() -> Peers:
    """square roots by Newton's method, `while` the error is large"""
    a = _uniform(LANES, low=1, high=100)

    def make(j):
        def f(a):
            return j.lax.while_loop(
                lambda x: j.np.abs(x * x - a) > 1e-5 * a, lambda x: j.np.float32(0.5) * (x + a / x), a
            )

        return f

    return _jax_while(_peers(_newton, a, batched=_newton_by_hand), make, a)


@workload("control flow", EACH_WAY)
def bisection() -> Peers:
    """cube roots by bisection, an `if` inside a `while`"""
    c = _uniform(LANES, low=0, high=8)

    def f(c: Tensor) -> Tensor:
        low, high = torch.zeros_like(c), torch.full_like(c, 2.0)
        while high - low > 1e-5:
            middle = (low + high) / 2
            if middle * middle * middle > c:
                high = middle
            else:
                low = middle
        return (low + high) / 2

    def by_hand(c: Tensor) -> Tensor:
        low, high = torch.zeros_like(c), torch.full_like(c, 2.0)
        while (going := high - low > 1e-5).any():
            middle = (low + high) / 2
            above = middle * middle * middle > c
            high = torch.where(going & above, middle, high)
            low = torch.where(going & ~above, middle, low)
        return (low + high) / 2

    def make(j):
        def f(c):
            def body(ends):
                low, high = ends
                middle = (low + high) / 2
                above = middle * middle * middle > c
                return j.np.where(above, low, middle), j.np.where(above, middle, high)

            low, high = j.lax.while_loop(lambda ends: ends[1] - ends[0] > 1e-5, body, (0 * c, 0 * c + 2))
            return (low + high) / 2

        return f

    return _jax_while(_peers(f, c, batched=by_hand), make, c)


@workload("control flow", EACH_WAY)
def collatz() -> Peers:
    """steps of the Collatz iteration, up to 261 of them"""
    n = _whole(1, 10_000)

    def f(n: Tensor) -> Tensor:
        steps = torch.zeros(())
        while n != 1:
            if n % 2 == 0:
                n = n // 2
            else:
                n = 3 * n + 1
            steps = steps + 1
        return steps

    def by_hand(n: Tensor) -> Tensor:
        steps = torch.zeros(n.shape)
        while (going := n != 1).any():
            n = torch.where(going, torch.where(n % 2 == 0, n // 2, 3 * n + 1), n)
            steps = steps + going
        return steps

    def make(j):
        def f(n):
            def body(state):
                n, steps = state
                return j.np.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

            return j.lax.while_loop(lambda state: state[0] != 1, body, (n, j.np.float32(0)))[1]

        return f

    return _jax_while(_peers(f, n, batched=by_hand), make, n)


@workload("control flow", BY_HAND)
def range_of_n() -> Peers:
    """`for i in range(int(n))`, n up to 20"""
    x, n = _normal(LANES), _whole(0, 20)

    def f(x: Tensor, n: Tensor) -> Tensor:
        total = torch.zeros(())
        for i in range(int(n)):
            total = total + x / (i + 1)
        return total

    def by_hand(x: Tensor, n: Tensor) -> Tensor:
        total = torch.zeros(x.shape)
        for i in range(int(n.max())):
            total = torch.where(i < n, total + x / (i + 1), total)
        return total

    def make(j):
        return lambda x, n: j.lax.fori_loop(0, n, lambda i, total: total + x / (i + 1), j.np.float32(0))

    return _jax_while(_peers(f, x, n, batched=by_hand), make, x, n)


@workload("control flow", BY_HAND)
def newton_gradient() -> Peers:
    """vmap(grad) of Newton's method"""
    a = _uniform(LANES, low=1, high=100)

    def by_hand(a: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        return torch.autograd.grad(_newton_by_hand(a).sum(), a)[0]

    return _peers(lanewise.grad(_newton), a, batched=by_hand)


@workload("control flow", BY_HAND)
def while_layer() -> Peers:
    """`while` over a 64 x 64 layer, 1 to 40 steps"""
    weight = 0.9 * torch.linalg.qr(_normal(64, 64))[0]
    x = _normal(LANES, 64) * torch.logspace(-1, 1, LANES)[:, None]

    def f(x: Tensor) -> Tensor:
        while x.square().sum() > 1:
            x = torch.relu(weight @ x)
        return x

    def by_hand(x: Tensor) -> Tensor:
        while (going := x.square().sum(1, keepdim=True) > 1).any():
            x = torch.where(going, torch.relu(x @ weight.T), x)
        return x

    def make(j):
        w = j.array(weight)
        return lambda x: j.lax.while_loop(lambda x: (x * x).sum() > 1, lambda x: j.nn.relu(w @ x), x)

    return _jax_while(_peers(f, x, batched=by_hand), make, x)


@workload("control flow", EACH_WAY)
def mandelbrot() -> Peers:
    """Mandelbrot by `vmap(vmap(pixel))` on a grid of 100 x 100, up to 50 steps"""
    re, im = _uniform(100, low=-2, high=1), _uniform(100, low=-1.5, high=1.5)

    def pixel(re: Tensor, im: Tensor) -> Tensor:
        x, y, steps = torch.zeros_like(re), torch.zeros_like(im), torch.zeros(())
        for _ in range(50):
            if x * x + y * y > 4:
                break
            x, y = x * x - y * y + re, 2 * x * y + im
            steps = steps + 1
        return steps

    def by_hand(re: Tensor, im: Tensor) -> Tensor:
        re, im = torch.broadcast_tensors(re, im[:, None])
        x, y, steps = torch.zeros(re.shape), torch.zeros(re.shape), torch.zeros(re.shape)
        for _ in range(50):
            going = x * x + y * y <= 4
            if not going.any():
                break
            x, y = torch.where(going, x * x - y * y + re, x), torch.where(going, 2 * x * y + im, y)
            steps = steps + going
        return steps

    mapped = lanewise.vmap(lanewise.vmap(pixel, (0, None)), (None, 0))
    return {
        OWN: lambda: mapped(re, im),
        LOOP: Part(lambda: torch.stack([torch.stack([pixel(x, y) for x in re]) for y in im[:3]]), 3 / len(im)),
        BATCHED: lambda: by_hand(re, im),
    }


@workload("control flow", BY_HAND)
def newton_forward() -> Peers:
    """vmap(jacfwd) of Newton's method"""
    a = _uniform(LANES, low=1, high=100)

    def by_hand(a: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(_newton_by_hand(forward_ad.make_dual(a, torch.ones_like(a)))).tangent

    mapped, some = lanewise.vmap(lanewise.jacfwd(_newton)), a[:SHARE]
    return {
        OWN: lambda: mapped(a),
        LOOP: Part(lambda: torch.stack([lanewise.jacfwd(_newton)(x) for x in some]), SHARE / LANES),
        BATCHED: lambda: by_hand(a),
    }


# --- branches -------------------------------------------------------------------------------------------------------


@workload("control flow", EACH_WAY)
def nested_branches() -> Peers:
    """an `if` inside an `if`, four ways"""
    x = _normal(LANES)

    def f(x: Tensor) -> Tensor:
        if x > 0:
            if x > 1:
                y = x.log()
            else:
                y = x.sin() * x
        else:
            if x < -1:
                y = x.exp()
            else:
                y = x * x
        return y + 1

    def by_hand(x: Tensor) -> Tensor:
        above = torch.where(x > 1, x.log(), x.sin() * x)
        below = torch.where(x < -1, x.exp(), x * x)
        return torch.where(x > 0, above, below) + 1

    return _peers(f, x, batched=by_hand)


@workload("control flow", EACH_WAY)
def early_return() -> Peers:
    """a `return` for half of the lanes before the work"""
    x = _normal(LANES)

    def f(x: Tensor) -> Tensor:
        if x < 0:
            return torch.zeros_like(x)
        y = x.sqrt()
        return y.sin() * y

    def by_hand(x: Tensor) -> Tensor:
        y = x.clamp(min=0).sqrt()
        return torch.where(x < 0, 0.0, y.sin() * y)

    return _peers(f, x, batched=by_hand)


@workload("control flow", BY_HAND)
def recursion() -> Peers:
    """a power by squaring, a function that calls itself up to five times"""
    x, n = _uniform(LANES, low=0, high=1.5), _whole(0, 32)

    def f(x: Tensor, n: Tensor) -> Tensor:
        if n == 0:
            return torch.ones_like(x)
        root = f(x * x, n // 2)
        return root if n % 2 == 0 else x * root

    def by_hand(x: Tensor, n: Tensor) -> Tensor:
        out = torch.ones_like(x)
        while (n > 0).any():
            out = torch.where(n % 2 == 1, out * x, out)
            x, n = x * x, n // 2
        return out

    return _peers(f, x, n, batched=by_hand)


# --- shapes ---------------------------------------------------------------------------------------------------------


@workload("control flow", BY_HAND)
def mask_sum() -> Peers:
    """`x[x > 0].sum()` over [64]"""
    x = _normal(LANES, 64)
    return _peers(lambda x: x[x > 0].sum(), x, batched=lambda x: torch.where(x > 0, x, 0.0).sum(1))


@workload("control flow", Target(speed=1, peer=LOOP))
def mask_kept() -> Peers:
    """`x[x > 0]` over [64], kept and used twice: the lanes part by how many they keep"""
    x = _normal(LANES, 64)

    def f(x: Tensor) -> Tensor:
        kept = x[x > 0]
        return (kept - kept.mean()).square().mean()

    def by_hand(x: Tensor) -> Tensor:
        mask = x > 0
        count = mask.sum(1)
        mean = torch.where(mask, x, 0.0).sum(1) / count
        return torch.where(mask, x - mean[:, None], 0.0).square().sum(1) / count

    return _peers(f, x, batched=by_hand)


# --- the worst case -------------------------------------------------------------------------------------------------


@workload("control flow", Target(speed=1 / 2, peer=LOOP))
def own_ways() -> Peers:
    """100 lanes, each with a way of its own, in code that is run again for each of them"""
    x = _normal(100)

    def steps(x: Tensor):  # a generator: not converted
        total = x
        for _ in range(10):
            total = (total * 1.5).sin() + total.item()
            yield total

    def f(x: Tensor) -> Tensor:
        return list(steps(x))[-1]

    def by_hand(x: Tensor) -> Tensor:
        total = x
        for _ in range(10):
            total = (total * 1.5).sin() + total
        return total

    peers = _peers(f, x, batched=by_hand, share=len(x))
    own = peers[OWN]

    def quietly() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lanewise.errors.SlowPathWarning)
            return own()

    return {**peers, OWN: quietly}
