"""`vmap` of a function of torch that is one operation: no plane opens, and everything is as in a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lanewise import grad, hessian, jacfwd, jacrev, jvp, vmap
from lanewise._core.batch import BatchLevel
from lanewise._core.short.whole import WHOLE

PRODUCTS = {torch.dot: [((3,), (3,))], torch.mv: [((2, 3), (3,))], torch.mm: [((2, 3), (3, 4))]}
PRODUCTS[torch.matmul] = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4)), ((2, 2, 3), (3, 4))]
PAIRS = ["add", "atan2", "div", "maximum", "minimum", "mul", "pow", "sub"]
DIMS: list[Any] = [0, (0, 0), (0, None), (None, 0), (1, 0), (-1, -1), 1]


def _numbers(shape: tuple, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5).to(dtype)


def _laid(lane: tuple, size: int, dim: int | None, seed: int, dtype: torch.dtype) -> Tensor:
    if dim is None:
        return _numbers(lane, seed, dtype)
    return _numbers((size, *lane), seed, dtype).movedim(0, dim)


def _loop(f: Callable, args: tuple, dims: tuple) -> Tensor:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None)
    rows = [f(*[arg if dim is None else arg.select(dim, lane) for arg, dim in zip(args, dims)]) for lane in range(size)]
    return torch.stack(rows)


def _check(f: Callable, lanes: tuple, in_dims: Any, size: int, dtype: torch.dtype) -> None:
    dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(lanes)
    args = tuple(_laid(lane, size, dim, seed, dtype) for seed, (lane, dim) in enumerate(zip(lanes, dims)))
    want = _loop(f, args, dims)
    for _ in range(2):
        out = vmap(f, in_dims)(*args)
        assert out.dtype is want.dtype and out.shape == want.shape
        torch.testing.assert_close(out, want, equal_nan=True)
    torch.testing.assert_close(vmap(f, in_dims, -1)(*args), want.movedim(0, -1), equal_nan=True)


@pytest.mark.parametrize("function", PRODUCTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64])
def test_products_equal_the_loop(function: Callable, dtype: torch.dtype) -> None:
    for lanes in PRODUCTS[function]:
        for in_dims in DIMS:
            for size in (1, 2, 5):
                _check(function, lanes, in_dims, size, dtype)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_pairs_equal_the_loop(name: str, dtype: torch.dtype) -> None:
    for lanes in (((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3))):
        for in_dims in DIMS:
            for size in (1, 2, 5):
                _check(getattr(torch, name), lanes, in_dims, size, dtype)


@pytest.mark.parametrize("function", [f for f in WHOLE if f.__name__ not in (*PAIRS, "dot", "mv", "mm", "matmul")])
def test_functions_of_one_tensor_equal_the_loop(function: Callable) -> None:
    dtype = torch.bool if function is torch.logical_not else torch.float64
    for in_dims in (0, (1,), (-1,)):
        for size in (1, 2, 5):
            _check(function, ((2, 3),), in_dims, size, dtype)


def _planes(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many planes of lanes a call opens."""
    count = 0
    begin = BatchLevel.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        begin(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(BatchLevel, "__init__", counted)
        run()
    return count


def test_no_plane_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = _numbers((4, 3), 0), _numbers((4, 3), 1)
    assert _planes(lambda: vmap(torch.dot)(x, y), monkeypatch) == 0
    assert _planes(lambda: vmap(torch.dot, (None, 0))(x[0], y), monkeypatch) == 0
    assert _planes(lambda: vmap(vmap(torch.dot, (None, 0)), (0, None))(x, y), monkeypatch) == 1
    assert _planes(lambda: vmap(lambda a, b: torch.dot(a, b))(x, y), monkeypatch) == 1


def test_derivatives_through_it() -> None:
    x, y = _numbers((4, 3), 0), _numbers((5, 3), 1)
    pairs = vmap(vmap(torch.dot, (None, 0)), (0, None))
    torch.testing.assert_close(pairs(x, y), x @ y.T)
    torch.testing.assert_close(grad(lambda x: pairs(x, y).sin().sum())(x), (x @ y.T).cos() @ y)
    square = vmap(torch.mul)
    torch.testing.assert_close(jacrev(lambda x: square(x, x))(x), jacfwd(lambda x: x * x)(x))
    torch.testing.assert_close(hessian(lambda x: vmap(torch.dot)(x, x).sum())(y), hessian(lambda x: (x * x).sum())(y))
    torch.testing.assert_close(jvp(vmap(torch.sin), (x,), (x,))[1], x.cos() * x)
    leaf = x.clone().requires_grad_()
    out = vmap(torch.mv, (None, 0))(torch.eye(3, dtype=x.dtype), leaf)
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * x)
    per_lane = vmap(grad(lambda row, ys: vmap(torch.dot, (None, 0))(row, ys).prod()), (0, None))(x, y)
    want = torch.stack([torch.autograd.functional.jacobian(lambda row: (y @ row).prod(), row) for row in x])
    torch.testing.assert_close(per_lane, want)


def test_lanes_that_parted_around_it() -> None:
    x, y = _numbers((4, 3), 0), _numbers((5, 3), 1)

    def f(row: Tensor) -> Tensor:
        if row[0] > 1:
            return vmap(torch.dot, (None, 0))(row, y).sum()
        return vmap(torch.mul)(y, row.expand(5, 3)).sum() * 2

    torch.testing.assert_close(vmap(f)(x), torch.stack([f(row) for row in x]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: vmap(torch.dot)(x, x[:, :2]), r"inconsistent tensor size"),
        (lambda x: vmap(torch.mv)(x, x), r"mv"),
        (lambda x: vmap(torch.dot)(x, x[:2]), r"size"),
        (lambda x: vmap(torch.sin, out_dims=3)(x), r"out_dims"),
        (lambda x: vmap(torch.dot)(x), r"dot"),
    ],
)
def test_errors_are_of_the_function(call: Callable, message: str) -> None:
    x = _numbers((4, 3), 0)
    with pytest.raises((RuntimeError, ValueError, IndexError, TypeError), match=message):
        call(x)


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_the_function_itself() -> None:
    x = _numbers((4, 3), 0)
    with Names() as names:
        vmap(torch.dot)(x, x)
    assert torch.dot in names.seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch.stack([torch.mv(a, b) for a, b in zip(x.float()[:, None], x.float())])
        assert vmap(torch.mv)(x.float()[:, None], x.float()).dtype is want.dtype
