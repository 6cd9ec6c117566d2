"""Operators and methods that answer without the dispatcher: the same results, and not where somebody looks on."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise import grad, vmap
from lanewise._core import batch
from lanewise._core.short import hot

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "eq", "ne", "gt", "ge"]
BITS = ["and_", "or_", "xor"]
UNARY = ["abs", "neg", "sin", "exp", "sqrt", "round", "sigmoid", "logical_not"]


def _positive(*shape: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (numbers * 5 + 1).to(dtype)


def _same(f, *args: Tensor) -> None:
    out = vmap(f)(*args)
    want = torch.stack([f(*row) for row in zip(*args)])
    assert out.dtype is want.dtype and out.shape == want.shape
    torch.testing.assert_close(out, want, equal_nan=True)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.float16])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (1, 2), (0, 2)])
def test_operators_equal_the_loop(name: str, dtype: torch.dtype, shape: tuple) -> None:
    call = getattr(operator, name)
    x, y = _positive(*shape, dtype=dtype), _positive(*shape, dtype=dtype).flip(-1)
    captured = _positive(*shape[1:], dtype=dtype)
    wide = _positive(4, *shape[1:], dtype=dtype)
    if not shape[0]:
        assert vmap(call)(x, y).shape == shape
        return
    for other in (y, y.double(), y.to(torch.int32)):
        _same(call, x, other)
    for constant in (2, 2.5, captured, captured.double(), wide):
        _same(lambda a, c=constant: call(a, c), x)
        _same(lambda a, c=constant: call(c, a), x)
    _same(lambda a, b: call(a[None], b), x, y)
    _same(lambda a, b: call(a, torch.ones_like(b)), x, y)
    _same(lambda a, b: call(torch.ones_like(b), a), x, y)
    outer = vmap(lambda a: vmap(lambda b: call(a, b))(y))(x)
    torch.testing.assert_close(outer, torch.stack([torch.stack([call(a, b) for b in y]) for a in x]))


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_operators_on_bits_equal_the_loop(name: str, dtype: torch.dtype) -> None:
    call = getattr(operator, name)
    x, y = torch.tensor([[0, 1], [3, 2]]).to(dtype), torch.tensor([[1, 1], [0, 2]]).to(dtype)
    _same(call, x, y)
    _same(lambda a: call(a, y[0]), x)
    _same(lambda a: call(y[0], a), x)
    _same(lambda a: call(a, 1), x)
    _same(operator.invert, x)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_methods_equal_the_loop(name: str, dtype: torch.dtype) -> None:
    if name == "round" and dtype.is_complex:
        pytest.skip("torch has no rounding of complex numbers")
    x = torch.tensor([[1.25, -2.5], [0.0, 3.75]]).to(dtype)
    _same(lambda a: getattr(a, name)(), x)
    _same(lambda a: getattr(a.mT if a.dim() > 1 else a, name)(), torch.stack([x, x + 1]))
    if dtype.is_complex:
        _same(lambda a: getattr(a.conj(), name)(), x)


def test_rounding_to_decimals_is_torchs_own() -> None:
    _same(lambda a: a.round(decimals=1), torch.tensor([[1.26, 2.34]]))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_inside_see_the_operation() -> None:
    def f(x: Tensor) -> Tensor:
        with Seen() as seen:
            y = -(x * 2).sin()
        assert seen.ops == ["aten.mul.Tensor", "aten.sin.default", "aten.neg.default"]
        with Calls() as calls:
            z = y + 1
        assert len(calls.names) == 1
        return z

    x = torch.randn(3, 2)
    torch.testing.assert_close(vmap(f)(x), 1 - (x * 2).sin())


def test_modes_around_see_the_operation_below() -> None:
    x = torch.randn(3, 2)
    with Seen() as seen:
        vmap(lambda x: x * x)(x)
    assert seen.ops == ["aten.mul.Tensor"]


def test_autocast_inside_casts() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x) * 2

    x = torch.randn(3, 2, 2)
    assert vmap(f)(x).dtype is f(x[0]).dtype


def test_derivatives_on_every_plane() -> None:
    x, w = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return ((2 - x * w).sin() / (x * x + 1) ** 2).sum()

    want = []
    for row in x:
        leaf = w.clone().requires_grad_()
        want.append(torch.autograd.grad(f(row, leaf), leaf)[0])
    torch.testing.assert_close(vmap(grad(f, argnums=1), in_dims=(0, None))(x, w), torch.stack(want))
    torch.testing.assert_close(grad(lambda w: vmap(lambda x: f(x, w))(x).sum())(w), sum(want))
    leaf = w.clone().requires_grad_()
    vmap(lambda x: f(x, leaf))(x).sum().backward()
    torch.testing.assert_close(leaf.grad, sum(want))
    with torch.no_grad():
        assert not vmap(lambda x: leaf * x)(x).requires_grad
    assert vmap(lambda x: x * leaf)(x).requires_grad


def test_tensors_kept_from_a_transform_that_has_ended_raise() -> None:
    kept: list[Tensor] = []
    vmap(lambda x: kept.append(x) or x)(torch.randn(3))
    with pytest.raises(RuntimeError, match="may have escaped"):
        _ = kept[0] * 2
    with pytest.raises(RuntimeError, match="may have escaped"):
        vmap(lambda x: x + kept[0])(torch.randn(3))


def test_operators_do_not_pass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    # A result that came through the dispatcher was wrapped by the level, or by a path of its own: count all wrappers.
    made: list[str] = []
    for module, name in ((hot, "hot"), (batch, "level")):
        own = module.make_wrapper

        def make(*args, own=own, name=name):
            made.append(name)
            return own(*args)

        monkeypatch.setattr(module, "make_wrapper", make)

    def f(x: Tensor, y: Tensor) -> Tensor:
        del made[:]
        out = (1 - x * y) / 2 > -x.sin().abs()
        assert not made
        torch.sin(x)
        assert made == ["hot"]
        return out

    vmap(f)(torch.randn(3, 2), torch.randn(3, 2))


PLACES = torch.randint(0, 4, (3, 5, 2), generator=torch.Generator().manual_seed(1))
# Methods of x [4, 2], of places [5, 2] in it and of rows [5, 2].
AT_PLACES: dict[str, Any] = {
    "gather": lambda x, i, rows: x.gather(0, i),
    "index_add": lambda x, i, rows: x.index_add(0, i[:, 0], rows),
    "index_select": lambda x, i, rows: x.index_select(-2, i[:, 1]),
    "scatter_add": lambda x, i, rows: x.scatter_add(-2, i, rows),
}


@pytest.mark.parametrize("name", AT_PLACES)
def test_methods_at_places_do_not_pass_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested, recorded, of parted lanes and beside what has no lanes they are right, too."""
    f, op = AT_PLACES[name], getattr(torch.ops.aten, name).default
    x, rows = _positive(3, 4, 2, dtype=torch.float64), _positive(3, 5, 2, dtype=torch.float64)
    taken, path = [], batch.HOT[op]
    monkeypatch.setitem(batch.HOT, op, lambda *args: taken.append(op) or path(*args))
    _same(lambda x, i, rows: f(x, i, rows), x, PLACES, rows)
    assert taken
    taken.clear()
    _same(lambda x, i, rows: f(x, PLACES[0], rows) + f(x[:4], i, rows), x, PLACES, rows)
    _same(lambda x, i, rows: grad(lambda y: (f(y, i, rows) ** 2).sum())(x), x, PLACES, rows)
    _same(lambda x, i, rows: f(x, i, rows) if x[0, 0] > 3 else f(x * 2, i, rows), x, PLACES, rows)
    _same(lambda x, i, rows: vmap(lambda y: f(y, i, rows))(torch.stack([x, x * 2])), x, PLACES, rows)
    recorded = x.clone().requires_grad_()
    got = torch.autograd.grad(vmap(f)(recorded, PLACES, rows).sin().sum(), recorded)
    want = torch.autograd.grad(torch.stack([f(*row) for row in zip(recorded, PLACES, rows)]).sin().sum(), recorded)
    torch.testing.assert_close(got, want)


def test_torchs_own_forward_mode_inside() -> None:
    def pushed(f):
        def g(x: Tensor) -> Any:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                return forward_ad.unpack_dual(f(dual)).tangent

        return g

    x = torch.rand(3, 4, dtype=torch.float64)
    for f in (lambda x: x * x, lambda x: x**3 + x[0], lambda x: x.exp(), lambda x: x + x, lambda x: x.sin()):
        torch.testing.assert_close(vmap(pushed(f))(x), torch.stack([pushed(f)(row) for row in x]))


SHAPES = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3, 4)),
    ((2, 1), (1, 4)),
    ((5, 2, 3), (3, 2)),
    ((0,), (0,)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_products_equal_the_loop(left: tuple, right: tuple, dtype: torch.dtype) -> None:
    x, y = _positive(3, *left, dtype=dtype), _positive(3, *right, dtype=dtype)
    if dtype.is_complex:
        x, y = x * 1j + 1, y - 2j
    _same(operator.matmul, x, y)
    _same(lambda a: a @ y[0], x)
    _same(lambda b: x[0] @ b, y)
    _same(lambda a: a @ (y[0] * torch.ones_like(y[0])), x)
    _same(lambda b: (x[0] * torch.ones_like(x[0])) @ b, y)
    _same(lambda b: ((x[0] * torch.ones_like(x[0])) @ y[0]) + b.sum(), y)
    outer = vmap(lambda a: vmap(lambda b: a @ b)(y))(x)
    torch.testing.assert_close(outer, torch.stack([torch.stack([a @ b for b in y]) for a in x]))
    if dtype is torch.float64:
        got = vmap(grad(lambda a, b: (a @ b).sin().sum(), argnums=(0, 1)))(x, y)
        for lane in range(3):
            leaves = x[lane].clone().requires_grad_(), y[lane].clone().requires_grad_()
            want = torch.autograd.grad((leaves[0] @ leaves[1]).sin().sum(), leaves)
            torch.testing.assert_close(tuple(g[lane] for g in got), want)


@pytest.mark.parametrize(
    "shapes", [((3,), (1,)), ((1,), (3,)), ((2, 3), (2,)), ((3,), (2, 3)), ((2, 3), (2, 3)), ((), (3,))]
)
def test_products_that_do_not_fit(shapes: tuple) -> None:
    x, y = torch.ones(4, *shapes[0]), torch.ones(4, *shapes[1])
    for f, args in (
        (operator.matmul, (x, y)),
        (lambda a: a @ y[0], (x,)),
        (lambda b: x[0] @ b, (y,)),
        (lambda a: a @ (y[0] * torch.ones(())), (x,)),
    ):
        with pytest.raises(RuntimeError):
            vmap(f)(*args)


def test_products_of_two_dtypes_raise() -> None:
    with pytest.raises(RuntimeError):
        vmap(operator.matmul)(torch.ones(2, 3), torch.ones(2, 3).double())
    with pytest.raises(TypeError):
        vmap(lambda a: a @ 2)(torch.ones(2, 3))  # type: ignore[operator]


def test_operators_on_what_is_the_same_in_all_lanes() -> None:
    """It may be written to later, and what was computed from it stays."""

    def f(x: Tensor) -> Tensor:
        constant = torch.ones(2)
        doubled = constant * 2 + constant
        sine = doubled.sin()
        constant[0] = x
        return torch.cat([constant, doubled, sine, constant * doubled])

    _same(f, torch.tensor([3.0, -1.0]))


def test_views_of_what_is_the_same_in_all_lanes_take_lane_values() -> None:
    def f(x: Tensor) -> Tensor:
        constant = torch.zeros(2, 3)
        column, row, turned = constant[:, 0], constant[1], constant.T[2:]
        column[0] = x
        row += x * 2
        turned.mul_(5)
        return torch.cat([constant.flatten(), column, row, turned.flatten()])

    _same(f, torch.tensor([3.0, -1.0]))


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_joins_equal_the_loop(join: Any) -> None:
    x, y = torch.rand(3, 2, 4), torch.rand(3, 2, 4)
    for dim in (0, 1, -1, -2):
        _same(lambda a, b, dim=dim: join([a, b], dim), x, y)
        _same(lambda a, b, dim=dim: join([a, y[0], b], dim), x, y)
        _same(lambda a, b, dim=dim: join([a, b.double()], dim) if join is torch.cat else join([a, b], dim), x, y)
        got = vmap(grad(lambda a, b, dim=dim: join([a, b], dim).sin().sum()))(x, y)
        torch.testing.assert_close(got, x.cos())
    for dim in (3, -4):
        with pytest.raises(IndexError):
            vmap(lambda a, b, dim=dim: join([a, b], dim))(x, y)
    _same(lambda a, b: join([a, b]), x[:, :0], y[:, :0])
    if join is torch.cat:
        _same(lambda a, b: join([a, torch.empty(0), b]), x, y)
        with pytest.raises(RuntimeError, match="zero-dimensional"):
            vmap(lambda a: join([a, a]))(torch.rand(3))
    else:
        _same(lambda a, b: join([a, b], -1), x[:, 0, 0], y[:, 0, 0])
