"""The short ways of plain operations: how little of the library they pass, and that nothing is lost on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise import grad, hessian, jacrev, jvp, vmap
from lanewise._core.short import hot
from tests.counts import python_calls

X = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X = X + 6 * torch.eye(4, dtype=torch.float64)
W = torch.arange(16.0, dtype=torch.float64).view(4, 4)
ROWS = torch.tensor([2, 0, 3])


def written(x: Tensor, index: Any, value: Any) -> Tensor:
    out = x.clone()
    out[index] = value
    return out


# The operation on x [4, 4] with lanes and u [4, 4] without; the most calls that it may come to.
FEW: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "select": (lambda x, u: x.select(0, 1), 6),
    "unsqueeze": (lambda x, u: x.unsqueeze(0), 7),
    "squeeze": (lambda x, u: x[:1].squeeze(0), 15),
    "expand to more dims": (lambda x, u: x.expand(2, 4, 4), 5),
    "view of what has no lanes": (lambda x, u: u.select(0, 1), 5),
    "sin": (lambda x, u: torch.sin(x), 3),
    "add": (lambda x, u: torch.add(x, x), 4),
    "clone": (lambda x, u: x.clone(), 3),
    "copy_": (lambda x, u: x.copy_(x), 9),
    "stack": (lambda x, u: torch.stack([x, u, W]), 11),
    "stack of what has no lanes": (lambda x, u: torch.stack([u, u]), 8),
    "zeros": (lambda x, u: torch.zeros(4), 4),
    "sum": (lambda x, u: x.sum(), 5),
    "one_hot": (lambda x, u: F.one_hot((x[0] > 0).long(), 2), 20),
    "rows by captured numbers": (lambda x, u: x[ROWS], 12),
    "mse_loss": (lambda x, u: F.mse_loss(x, x), 22),
    "select_backward": (lambda x, u: torch.ops.aten.select_backward(x[0], [4, 4], 0, 1), 15),
    "solve_triangular": (lambda x, u: torch.linalg.solve_triangular(x, x, upper=False), 27),
}


@pytest.mark.parametrize("name", FEW)
def test_few_calls_of_python(name: str) -> None:
    run, most = FEW[name]
    calls = []

    def f(x: Tensor) -> Tensor:
        x, u = x.clone(), torch.ones(4, 4, dtype=torch.float64)
        run(x, u)
        calls.append(python_calls(lambda: run(x, u)))
        return x

    for _ in range(2):  # the first call of a function is watched
        vmap(f)(X)
    assert calls[-1] <= most


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "stack": lambda x: torch.stack([x, W, torch.ones(4, 4, dtype=x.dtype), x * 2]),
    "stack, captured first": lambda x: torch.stack([W, x], -1),
    "stack, no lanes": lambda x: (
        torch.stack([torch.ones(2, dtype=x.dtype), torch.zeros(2, dtype=x.dtype)], 1) + x[0, 0]
    ),
    "cat": lambda x: torch.cat([torch.zeros(1, 4, dtype=x.dtype), x, W[:2]]),
    "cat, last dim": lambda x: torch.cat([x, torch.zeros(4, 1, dtype=x.dtype)], -1),
    "stack of dtypes": lambda x: torch.stack([x[0, 0], torch.tensor(1)]),
    "stack of a view": lambda x: torch.stack([x.T, torch.eye(4, dtype=x.dtype).T[:, :4], W.T]),
    "expand": lambda x: x[0].expand(2, 3, 4) * x[0, 0].expand(3, 4),
    "squeeze": lambda x: x[None].squeeze(0).squeeze(1) + x[:, :1].squeeze(-1),
    "squeeze of a number": lambda x: x[0, 0].squeeze(0),
    "solve_triangular": lambda x: torch.linalg.solve_triangular(x, W, upper=True, unitriangular=True),
    "solve_triangular, batch": lambda x: torch.linalg.solve_triangular(x, torch.stack([x, W]), upper=False),
    "solve, captured vector": lambda x: torch.linalg.solve(x, W[0]),
    "solve, captured matrix": lambda x: torch.linalg.solve(x, W[:, :2]),
    "solve, batch of matrices": lambda x: torch.linalg.solve(torch.stack([x, x + W]), W[:, :2]),
    "rows by captured numbers": lambda x: x[ROWS] * x[:, ROWS[:2]].sum(),
    "numbers in one dim of three": lambda x: torch.stack([x, 2 * x])[:, ROWS],
    "a table of numbers": lambda x: x[torch.stack([ROWS, ROWS])],
    "numbers and none": lambda x: x[None, ROWS],
    "negative numbers": lambda x: x[-ROWS],
    "rows put": lambda x: x.index_put((ROWS,), x[:3] * 2, accumulate=True),
    "columns put": lambda x: written(x, (slice(None), ROWS[:2]), x[:, :2] * 2),
    "columns put, one for all rows": lambda x: written(x, (slice(None), ROWS[:2]), x[0, :2]),
    "mse_loss": lambda x: F.mse_loss(x, x.T) + F.mse_loss(x[0], x[1], reduction="sum") + F.mse_loss(x[0], W[0]),
    "mse_loss, each": lambda x: F.mse_loss(x, x.T, reduction="none") + F.huber_loss(x[0, 0], x[1, 1]),
    "weighted loss": lambda x: F.binary_cross_entropy(x.sigmoid(), x.T.sigmoid().detach(), weight=x.cos().detach()),
    "parts put together": lambda x: x[1].sum() + x[:, 2:].prod() * x[0, 3] + x.diagonal().sin(),
    "parts by splitting": lambda x: x.split(3)[1] * x.split([1, 3], -1)[1].sum() + x.chunk(2, 1)[0].mean(),
    "ranks and views without lanes": lambda x: x[0, 0] * W.T.clone()[1:] + torch.eye(4, dtype=x.dtype)[1] * x[0, 1],
    "addcmul without lanes": lambda x: torch.addcmul(x, torch.ones(4, dtype=x.dtype), x[0]).addcdiv(W, x[0, 0] + 9),
    "where without lanes": lambda x: torch.where(x > 0, torch.eye(4, dtype=x.dtype).T, x),
    "products without lanes": lambda x: torch.eye(4, dtype=x.dtype).T @ x @ torch.ones(2, 4, dtype=x.dtype).T,
    "detached, no lanes": lambda x: torch.ones(4, dtype=x.dtype).detach() * x,
    "padded in a circle": lambda x: F.pad(x[None], (1, 2), mode="circular")[0],
    "padded in a circle, two dims": lambda x: F.pad(x[None, None], (1, 0, 4, 3), mode="circular")[0, 0],
    "padded in a circle, no batch": lambda x: F.pad(x[None], (1, 0, 4, 3), mode="circular")[0],
    "cropped in a circle": lambda x: F.pad(x[None, None], (-1, 2, 0, -1), mode="circular")[0, 0],
    "padded by nothing": lambda x: F.pad(x[None, None], (0, 0, 0, 0), mode="circular")[0, 0] * 2,
    "einsum of three": lambda x: torch.einsum("i,ij,j->", x[0], x, W[1]).expand(1),
    "einsum of four": lambda x: torch.einsum("im,mkl,k,l->i", x, torch.stack([x, W, x, W]), x[0], x[:, 1]),
    "einsum of three in one": lambda x: torch.einsum("i,i,i->i", x[0], x[1], W[1]),
    "einsum of three, batch": lambda x: torch.einsum("bi,bij,bj->b", x, torch.stack([x, W, x, W]), x.T),
    "einsum of three, implicit": lambda x: torch.einsum("ab,bc,cd", x, W, x),
    "a number written": lambda x: written(x, 0, 0.0),
    "copy_ of another dtype": lambda x: x.clone().copy_(torch.arange(4)),
    "copy_ of what has no lanes": lambda x: x.clone().copy_(torch.arange(4.0, dtype=x.dtype)[None] * 2),
    "in place with what has no lanes": lambda x: x.clone().add_(torch.ones(4, dtype=x.dtype)).mul_(W),
    "factories": lambda x: x + torch.eye(4) + torch.arange(4) + torch.full((4,), 2.5) + torch.linspace(0, 1, 4),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_to_the_loop(name: str) -> None:
    f = SAME[name]
    out, want = vmap(f)(X), torch.stack([f(x) for x in X])
    assert out.dtype is want.dtype
    torch.testing.assert_close(out, want)
    slopes = []
    for x in X:
        leaf = x.clone().requires_grad_()
        slopes.append(torch.autograd.grad((f(leaf) ** 2).sum(), leaf)[0])
    torch.testing.assert_close(vmap(grad(lambda x: (f(x) ** 2).sum()))(X), torch.stack(slopes))
    tangents = [torch.autograd.functional.jvp(f, x, x)[1] for x in X]
    torch.testing.assert_close(vmap(lambda x: jvp(f, (x,), (x,))[1])(X), torch.stack(tangents))
    curved = torch.autograd.functional.hessian(lambda x: (f(x) ** 2).sum(), X[0])
    torch.testing.assert_close(vmap(hessian(lambda x: (f(x) ** 2).sum()))(X)[0], curved)
    twice = vmap(lambda x: vmap(f)(torch.stack([x, x + 1])))(X)
    torch.testing.assert_close(twice, torch.stack([torch.stack([f(x), f(x + 1)]) for x in X]))


def test_a_view_shares_its_version_on_every_plane() -> None:
    def f(x: Tensor) -> Tensor:
        base, uniform = x.clone(), torch.zeros(4)
        for view, whole in ((base[0], base), (uniform[1:], uniform), (base.mT, base)):
            whole.add_(1)
            assert view._version == whole._version
            assert view.value._is_view() and view.value._version == whole.value._version  # type: ignore[attr-defined]
        return base

    vmap(f)(X)
    with torch.no_grad():
        vmap(f)(X)


def test_a_write_is_noticed_by_what_was_saved() -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 1
        out = (y[0] * y[0]).sum()
        y.copy_(x * 2)
        return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vmap(grad(f))(X)


def test_sizes_that_torch_refuses() -> None:
    with pytest.raises(RuntimeError):
        vmap(lambda x: x.expand(-1, 4, 4))(X)
    with pytest.raises(RuntimeError):
        vmap(lambda x: x.expand(4))(X)
    with pytest.raises(IndexError):
        vmap(lambda x: x[4])(X)
    with pytest.raises(IndexError):
        vmap(lambda x: x.squeeze(2))(X)


@pytest.mark.parametrize("number", [2, -1.5, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("index", [0, slice(1, 3), (..., 1), (None, 2), (slice(None), 0)])
def test_a_number_written(number: Any, dtype: torch.dtype, index: Any) -> None:
    x = torch.zeros(3, 4, 4, dtype=dtype)

    def f(x: Tensor) -> Tensor:
        out = x.clone()
        out[index] = number
        return out

    torch.testing.assert_close(vmap(f)(x), torch.stack([f(row) for row in x]))


def test_scripted_inside() -> None:
    def scripted(x: Tensor) -> Tensor:
        return x + torch.zeros(4) + torch.ones(4) + torch.arange(4)

    def f(x: Tensor) -> Tensor:
        return torch.jit.script(scripted)(x)

    torch.testing.assert_close(vmap(f)(X), X + torch.arange(4.0) + 1)


def test_class_values_that_torch_refuses() -> None:
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        vmap(lambda i: F.one_hot(i, 2))(torch.tensor([[0, 1], [2, 0]]))
    classes = torch.tensor([[0, 1], [1, 0]])
    torch.testing.assert_close(vmap(lambda i: F.one_hot(i, 3))(classes), F.one_hot(classes, 3))


OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "einsum of three": (lambda x: torch.einsum("i,ij,j->", x[0], x, x[1]), 28),
    "padded in a circle": (lambda x: F.pad(x[None, None], (1, 1, 1, 1), mode="circular").sum(), 30),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.T).sum(), 26),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_few_operations_with_their_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, most = OPERATIONS[name]
    passed: list[str] = []
    for key, own in list(hot._entries.items()):

        def counted(cls: type, func: Any, types: Any, args: tuple, kwargs: dict, own: Callable = own) -> Any:
            passed.append(str(func))
            return own(cls, func, types, args, kwargs)

        monkeypatch.setitem(hot._entries, key, counted)
    vmap(grad(f))(X)
    assert len(passed) <= most, passed


def test_operands_of_planes_around() -> None:
    def f(x: Tensor) -> Tensor:
        def rows(scale: Tensor) -> Tensor:
            return (x[0] * scale - scale / x) * (x[0, 0] > scale).double() + x.T * scale.sin()

        return jacrev(rows)(x[1]) + vmap(lambda y: x * y + y * x[0] + y / x - x.T)(x).sum()

    want = []
    for x in X:
        slope = torch.autograd.functional.jacobian(
            lambda s, x=x: (x[0] * s - s / x) * (x[0, 0] > s).double() + x.T * s.sin(), x[1]
        )
        want.append(slope + torch.stack([x * y + y * x[0] + y / x - x.T for y in x]).sum())
    torch.testing.assert_close(vmap(f)(X), torch.stack(want))
    whole = vmap(lambda i, x: vmap(lambda j: (i * j, j + i, x[0, 0] * j, (i > j) * x))(ROWS))(ROWS, X)
    loop = [[(i * j, j + i, x[0, 0] * j, (i > j) * x) for j in ROWS] for i, x in zip(ROWS, X)]
    for k, out in enumerate(whole):
        each = torch.stack([torch.stack([parts[k] for parts in row]) for row in loop])
        assert out.dtype is each.dtype
        torch.testing.assert_close(out, each)
