"""Functions whose lanes go one way run, from their third call on, on no plane, and as in a loop."""

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lanewise import grad, hessian, jacfwd, jacrev, value_and_grad, vmap
from tests.control.planes import Planes
from tests.control.straight_programs import straight_program

FULL = bool(os.environ.get("LANEWISE_FULL"))

D = torch.float64
CALLS = 4


def _numbers(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _looped(f: Callable, *xs: Tensor) -> Any:
    rows = [f(*row) for row in zip(*xs)]
    return tuple(torch.stack(each) for each in zip(*rows)) if isinstance(rows[0], tuple) else torch.stack(rows)


def _same(out: Any, want: Any) -> None:
    out, want = [each if isinstance(each, tuple) else (each,) for each in (out, want)]
    assert len(out) == len(want)
    for a, b in zip(out, want):
        assert a.dtype is b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, equal_nan=True)


# --- random programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(1500 if FULL else 60))
def test_random_programs_equal_the_loop(seed: int) -> None:
    dtype = (torch.float64, torch.float32)[seed % 2]
    f, _ = straight_program(seed, dtype)
    size = (1, 2, 5)[seed % 3]
    x, y = _numbers(size, 3, seed=seed, dtype=dtype), _numbers(size, 3, seed=seed + 1, dtype=dtype)
    a = _numbers(size, seed=seed + 2, dtype=dtype)
    want = _looped(f, x, y, a)
    for _ in range(CALLS):
        _same(vmap(f)(x, y, a), want)
    for _ in range(CALLS):
        _same(vmap(f, (0, None, 0))(x, y[0], a), _looped(lambda x, a: f(x, y[0], a), x, a))
    _same(_recorded(lambda *xs: vmap(f)(*xs), x, y, a), _recorded(lambda *xs: _looped(f, *xs), x, y, a))
    if isinstance(want, tuple) or dtype is not D:
        return
    if want.dim() > 1:
        rows = [torch.autograd.functional.jacobian(lambda v, y=y, a=a: f(v, y, a), v) for v, y, a in zip(x, y, a)]
        if torch.stack(rows).isnan().any():  # type: ignore[arg-type]
            return  # zero times infinity, which forward mode may not meet
        for _ in range(CALLS):
            _same(vmap(jacrev(f))(x, y, a), torch.stack(rows))  # type: ignore[arg-type]
            _same(vmap(jacfwd(f))(x, y, a), torch.stack(rows))  # type: ignore[arg-type]
        return
    grads = [torch.autograd.functional.jacobian(f, row) for row in zip(x, y, a)]
    rows = [torch.autograd.functional.hessian(lambda v, y=y, a=a: f(v, y, a), v) for v, y, a in zip(x, y, a)]
    for _ in range(CALLS):
        _same(vmap(grad(f, argnums=(0, 1, 2)))(x, y, a), tuple(map(torch.stack, zip(*grads))))
        _same(vmap(hessian(f))(x, y, a), torch.stack(rows))  # type: ignore[arg-type]


def _recorded(f: Callable, *xs: Tensor) -> tuple:
    leaves = [x.clone().requires_grad_() for x in xs]
    out = f(*leaves)
    total = sum(each.square().sum() for each in (out if isinstance(out, tuple) else (out,)))
    if not isinstance(total, Tensor) or not total.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


# --- which functions -------------------------------------------------------------------------------------------------


def chain(x: Tensor) -> Tensor:
    return torch.tanh((x * 2 + 1).sin() * x) - x.exp()


def pendulum(y: Tensor) -> Tensor:
    return torch.stack([y[1], -torch.sin(y[0])])


def orbit(y: Tensor) -> Tensor:
    for _ in range(3):
        y = y + 0.1 * pendulum(y + 0.05 * pendulum(y))
    return y


def curve(t: Tensor) -> Tensor:
    return torch.stack([t.cos(), t.sin(), t])


def energy(y: Tensor) -> Tensor:
    angle, speed = y
    return speed * speed / 2 - torch.cos(angle)


def layers(w: Tensor, b: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(v @ torch.tanh(w @ x + b))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(3.0, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.factor)


class Named:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def apply(self, x: Tensor) -> Tensor:
        return (x * self.rate).cos()


STRAIGHT: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "a chain": (chain, (4, 3)),
    "of numbers": (chain, (4,)),
    "a loop that calls others": (orbit, (4, 2)),
    "vectors of numbers": (curve, (4,)),
    "unpacked": (energy, (4, 2)),
    "a lambda": (lambda x: x[1:] * x[:-1] + x[0], (4, 3)),
    "activations and norms": (lambda x: F.softplus(x).sum(dim=-1) * torch.linalg.norm(F.silu(x)), (4, 3)),
    "a module": (Scaled(), (4, 3)),
    "a method": (Named(0.5).apply, (4, 3)),
    "a gradient": (grad(energy), (4, 2)),
    "a value and its gradient": (value_and_grad(energy), (4, 2)),
    "a Hessian": (hessian(energy), (4, 2)),
    "a Jacobian": (jacrev(orbit), (4, 2)),
    "a Jacobian by columns": (jacfwd(curve), (4,)),
    "rows apart in memory": (chain, (4, 6)),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_no_plane_opens_from_the_third_call_on(name: str, planes: Planes) -> None:
    f, shape = STRAIGHT[name]
    x = _numbers(*shape)
    x = x[:, ::2] if name == "rows apart in memory" else x
    first = vmap(f)(x)
    for _ in range(CALLS):
        _same(vmap(f)(x), first)
    assert planes.of(lambda: vmap(f)(x)) == 0


def test_matrices_that_lanes_share(planes: Planes) -> None:
    w, b, v, x = _numbers(5, 3), _numbers(5), _numbers(5, seed=1), _numbers(4, 3)
    want = torch.stack([layers(w, b, v, row) for row in x])
    for _ in range(CALLS):
        _same(vmap(layers, (None, None, None, 0))(w, b, v, x), want)
    assert planes.of(lambda: vmap(layers, (None, None, None, 0))(w, b, v, x)) == 0
    slopes = vmap(grad(layers, argnums=3), (None, None, None, 0))
    rows = [torch.autograd.functional.jacobian(lambda row: layers(w, b, v, row), row) for row in x]
    for _ in range(CALLS):
        _same(slopes(w, b, v, x), torch.stack(rows))  # type: ignore[arg-type]
    assert planes.of(lambda: slopes(w, b, v, x)) == 0
    own = [torch.autograd.functional.jacobian(lambda w, row=row: layers(w, b, v, row), w) for row in x]
    leaf = w.clone().requires_grad_()
    for _ in range(CALLS):
        _same(vmap(grad(layers), (None, None, None, 0))(w, b, v, x), torch.stack(own))  # type: ignore[arg-type]
        (found,) = torch.autograd.grad(vmap(layers, (None, None, None, 0))(leaf, b, v, x).sum(), leaf)
        _same(found, sum(own))


def settles(x: Tensor) -> Tensor:
    steps = 0
    while x.norm() > 0.4 and steps < 8:
        x = torch.tanh(MIXING @ x) * 0.8 if x[0] > 0 else F.linear(x, MIXING.T, SHIFT) * 0.6
        steps += 1
    return x.sum()


MIXING, SHIFT = _numbers(3, 3, seed=5), _numbers(3, seed=6) / 10


def test_matrices_in_branches() -> None:
    x = _numbers(7, 3)
    want = torch.stack([settles(row) for row in x])
    rows = [torch.autograd.functional.jacobian(settles, row) for row in x]
    for _ in range(CALLS):
        _same(vmap(settles)(x), want)
        _same(vmap(grad(settles))(x), torch.stack(rows))  # type: ignore[arg-type]
        _same(_recorded(vmap(settles), x)[0], _recorded(lambda x: _looped(settles, x), x)[0])


def _multiplies_matrices(x: Tensor) -> Tensor:
    return (SQUARE * x).sum(0) @ x


def _rows_of_a_matrix(x: Tensor) -> Tensor:
    return SQUARE[0] * x


SQUARE = torch.arange(9.0, dtype=D).view(3, 3)


@pytest.mark.parametrize("f", [_multiplies_matrices, _rows_of_a_matrix])
def test_what_else_is_done_with_matrices_is_as_ever(f: Callable) -> None:
    x = _numbers(3, 3)
    for _ in range(CALLS):
        _same(vmap(f)(x), _looped(f, x))


def test_pairs_of_lanes_open_no_plane(planes: Planes) -> None:
    def pixel(x: Tensor, y: Tensor) -> Tensor:
        return torch.cos(x + 2 * y) * x

    xs, ys = _numbers(4), _numbers(5, seed=1)
    grid = vmap(vmap(pixel, (None, 0)), (0, None))
    for _ in range(CALLS):
        _same(grid(xs, ys), torch.stack([torch.stack([pixel(x, y) for y in ys]) for x in xs]))
    assert planes.of(lambda: grid(xs, ys)) == 0


def test_pairs_of_lanes_with_a_structure_that_all_share() -> None:
    f = lambda p, x: torch.sin(p["a"] * x) + p["b"]
    p, xs = {"a": _numbers(3), "b": _numbers(3, seed=1)}, _numbers(4, seed=2)
    grid = vmap(vmap(f, (0, None)), (None, 0))
    for _ in range(CALLS):
        _same(grid(p, xs), torch.stack([torch.sin(p["a"] * x) + p["b"] for x in xs]))


def _writes(x: Tensor) -> Tensor:
    y = x * 1
    y[0] = 5
    return y


def _writes_to_argument(x: Tensor) -> Tensor:
    x *= 2
    return x + 1


def _draws(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


_seen: list[int] = []


def _has_effects(x: Tensor) -> Tensor:
    _seen.append(1)
    return x * 2


@pytest.mark.parametrize("f", [_writes, _writes_to_argument, _has_effects])
def test_others_are_as_ever(f: Callable, planes: Planes) -> None:
    for _ in range(CALLS):
        x, other = _numbers(4, 3), _numbers(4, 3)
        _same(vmap(f)(x), _looped(f, other))
        _same(x, other)
    assert planes.of(lambda: vmap(f)(_numbers(4, 3))) > 0


def test_branches_part_the_lanes() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sin(x) * 2 if x.sum() > 0 else x - 1

    x = _numbers(1, 3).abs()
    for sign in (1, 1, 1, 1, -1):
        _same(vmap(f)(x * sign), _looped(f, x * sign))
    _same(vmap(f)(_numbers(4, 3)), _looped(f, _numbers(4, 3)))


def test_random_ones_need_a_choice_each_time() -> None:
    for _ in range(CALLS):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(_draws)(_numbers(4, 3))


# --- names for the same memory ---------------------------------------------------------------------------------------


def _itself(v: Tensor) -> Tensor:
    return v


def _entry_kept(x: Tensor) -> Tensor:
    y = x * 2
    first = y[0]
    y += 1
    return first + y.sum()


def _entries_kept(x: Tensor) -> Tensor:
    y = x * 2
    first, rest = y[0], y[1:]
    y += 1
    return first * rest


def _entry_of_choice(x: Tensor) -> Tensor:
    y = x * 2
    first = y[0] if _rate else y[1]
    y += 1
    return first


def _given_by_name(x: Tensor) -> Tensor:
    y = x * 2
    z = _itself(v=y)
    y += 1
    return z + y


def _entry_given(x: Tensor) -> Tensor:
    y = x * 2
    z = _itself(y[0])
    y += 1
    return z


def _writes_to_entries(x: Tensor) -> Tensor:
    y = x * 1
    for v in y:
        v += 1
    return y


def _writes_to_entries_of_argument(x: Tensor) -> Tensor:
    for v in x:
        v += 1
    return x * 2


def _writes_to_counted_entries(x: Tensor) -> Tensor:
    y = x * 1
    for i, v in enumerate(y):
        v *= i + 1
    return y


def _writes_while_it_goes(x: Tensor) -> Tensor:
    y = x * 1
    total = x[0] * 0
    for v in y:
        y += 1
        total = total + v
    return total


def _writes_by_keyword(x: Tensor) -> Tensor:
    z = torch.clamp(x + 1, max=5.0, out=x)
    return z + x[:1].sum()


SHARED = [_entry_kept, _entries_kept, _entry_of_choice, _given_by_name, _entry_given, _writes_to_entries]
SHARED += [_writes_to_entries_of_argument, _writes_to_counted_entries, _writes_while_it_goes, _writes_by_keyword]


@pytest.mark.parametrize("f", SHARED)
@pytest.mark.parametrize("parts", [False, True])
def test_writes_are_seen_by_other_names(f: Callable, parts: bool) -> None:
    def chosen(x: Tensor) -> Tensor:
        return f(x) if x.sum() > 0 else f(x) * 2

    for _ in range(CALLS):
        x, other = _numbers(4, 3), _numbers(4, 3)
        _same(vmap(chosen if parts else f)(x), _looped(chosen if parts else f, other))
        _same(x, other)


def _reads_what_it_writes(x: Tensor) -> Tensor:
    y = x * 2
    y += y[0]
    return y


def test_writes_to_what_is_read_raise_each_time() -> None:
    for _ in range(CALLS):
        with pytest.raises(RuntimeError, match="single memory location"):
            vmap(_reads_what_it_writes)(_numbers(4, 3))


class Other:
    """A namespace with functions of the names of torch's."""

    sum = staticmethod(lambda x: x[0])
    mean = staticmethod(lambda x: x[1])
    dot = staticmethod(lambda x, y: x.sum() * y)
    stack = cat = staticmethod(lambda xs: xs[0])
    zeros = tensor = staticmethod(lambda _: 5.0)


def _of_namespace(torch: Any) -> list[Callable]:
    return [
        lambda x: torch.sum(x),
        lambda x: torch.mean(x),
        lambda x: torch.dot(x, x),
        lambda x: torch.stack([x[0], x[1]]),
        lambda x: torch.cat([x, x]),
        lambda x: x.sum() + torch.zeros(()),
        lambda x: x.sum() + torch.tensor(2.0),
    ]


def test_other_things_named_torch() -> None:
    x = _numbers(4, 3)
    for other, own in zip(_of_namespace(Other), _of_namespace(torch)):
        for _ in range(CALLS):
            _same(vmap(own)(x), _looped(own, x))
            _same(vmap(other)(x), _looped(other, x))


# --- what they read, and who looks on --------------------------------------------------------------------------------

_rate = 2.0


def _by_global(x: Tensor) -> Tensor:
    return x * _rate


def test_globals_and_closures_are_read_at_each_call() -> None:
    global _rate
    x, weight = _numbers(4, 3), _numbers(3, seed=1)

    def by_closure(x: Tensor) -> Tensor:
        return (x * weight).sum() + shift

    for call in range(CALLS):
        _rate, shift = float(call), call / 2
        _same(vmap(_by_global)(x), x * call)
        _same(vmap(by_closure)(x), (x * weight).sum(1) + shift)
        weight = weight + 1
    weight = weight[:2]
    with pytest.raises(RuntimeError, match="size"):
        vmap(by_closure)(x)


def test_weights_that_record_get_gradients() -> None:
    x, weight = _numbers(4, 3), _numbers(3, seed=1).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return torch.sin(x * weight)

    for _ in range(CALLS):
        (found,) = torch.autograd.grad(vmap(f)(x).sum(), weight)
        _same(found, (torch.cos(x * weight) * x).sum(0).detach())
        with torch.no_grad():
            assert not vmap(f)(x).requires_grad


def test_kinds_change_between_calls() -> None:
    for x in (_numbers(4, 3), _numbers(4), _numbers(4, 3, 2), _numbers(4, 3, dtype=torch.float32), _numbers(1, 3)):
        for _ in range(CALLS):
            _same(vmap(chain)(x), _looped(chain, x))
    for f, x in ((lambda x: x / 2, torch.arange(4)), (lambda x: x * 0.5, torch.arange(6).reshape(2, 3))):
        for _ in range(CALLS):
            _same(vmap(f)(x), _looped(f, x))


def test_a_result_is_no_argument() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2

    x = _numbers(4, 3)
    for _ in range(CALLS):
        same, _ = vmap(f)(x)
        assert same is not x
        _same(same, x)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.shapes |= {tuple(arg.shape) for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


def test_inside_of_other_transforms_and_modes(planes: Planes) -> None:
    x = _numbers(4, 3)
    for _ in range(CALLS):
        vmap(chain)(x)
    with Seen() as seen:
        assert planes.of(lambda: vmap(chain)(x)) == 1
    assert seen.shapes
    _same(grad(lambda x: vmap(chain)(x).sum())(x), _recorded_sum(x))
    assert planes.of(lambda: vmap(chain)(x)) == 0


@pytest.mark.parametrize("f", [chain, orbit])
def test_checkpoints_see_the_same_operations(f: Callable) -> None:
    want = None
    for _ in range(CALLS):
        leaf = _numbers(4, 2).requires_grad_()
        out = checkpoint(lambda x: vmap(f)(x), leaf, use_reentrant=False)
        (found,) = torch.autograd.grad(out.sum(), leaf)  # type: ignore[union-attr]
        want = found if want is None else want
        _same(found, want)


def test_deterministic_algorithms_give_the_same_digits() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sum() * x

    x = _numbers(33, 40, dtype=torch.float32).T
    torch.use_deterministic_algorithms(True)
    try:
        first = vmap(f)(x)
        for _ in range(CALLS):
            assert torch.equal(vmap(f)(x), first)
    finally:
        torch.use_deterministic_algorithms(False)


def _recorded_sum(x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(_looped(chain, leaf).sum(), leaf)[0]


def test_a_debugger_stops_in_the_function() -> None:
    x = _numbers(4, 3)
    lines = set()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is pendulum.__code__:
            lines.add(event)
        return trace

    for _ in range(CALLS):
        vmap(pendulum)(x)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        vmap(pendulum)(x)
    finally:
        sys.settrace(before)
    assert "line" in lines


def test_infinite_derivatives_stay() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * x).sum().sqrt() * math.e

    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=D)
    want = torch.stack([torch.autograd.functional.jacobian(f, row) for row in x])  # type: ignore[arg-type]
    for _ in range(CALLS):
        _same(vmap(grad(f))(x), want)


@pytest.mark.parametrize("f", [lambda x: x.max().sqrt(), lambda x: x.min().sqrt(), lambda x: (x * x).max().log()])
def test_what_is_not_chosen_has_no_part_in_an_infinite_derivative(f: Callable) -> None:
    x = torch.tensor([[0.0, -1.0, -1.0], [0.0, 0.0, -2.0], [4.0, 0.0, 4.0], [1.0, math.nan, 2.0]], dtype=D)
    want = torch.stack([torch.autograd.functional.jacobian(f, row) for row in x])  # type: ignore[arg-type]
    second = torch.stack([torch.autograd.functional.hessian(f, row) for row in x[2:3]])
    for _ in range(CALLS):
        _same(vmap(grad(f))(x), want)
        _same(_slopes(lambda x: vmap(f)(x), x), want)
        _same(vmap(hessian(f))(x[2:3]), second)


SECOND = {
    "norm": lambda x: (x * 2).norm() * x.sum(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "equal limits": lambda x: (x.clamp(0.5, 0.5) * x).sum(),
    "in a branch": lambda x: (x * 2 if x[0] > 0.5 else x * 3).norm(),
    "dist": lambda x: torch.dist(x, x * 2),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_those_of_one_example_in_each_call(name: str) -> None:
    f = SECOND[name]
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0], [0.5, 0.5, 0.0]], dtype=D)
    for transform in (hessian, lambda f: jacrev(grad(f)), lambda f: jacrev(jacrev(f))):
        want = torch.stack([transform(f)(row) for row in x])
        for _ in range(CALLS):
            _same(vmap(transform(f))(x), want)


def _slopes(run: Callable, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(run(x).sum(), x)[0]
