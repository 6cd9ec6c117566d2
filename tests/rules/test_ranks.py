"""Operands of different ranks, with as many lanes as a dim of theirs has elements."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise import grad, vmap
from tests.oracles import assert_same, loop_vmap

D = torch.float64
LANES = (2, 3)


def _positive(a: Tensor) -> Tensor:
    return a @ a.mT + 3 * torch.eye(3, dtype=D)


def _triangular(a: Tensor) -> Tensor:
    return torch.tril(a) + 3 * torch.eye(3, dtype=D)


def _indices(a: Tensor, b: Tensor) -> Tensor:
    return b.argsort(-1).expand(a.shape)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist": torch.cdist,
    "cdist, p=1": lambda a, b: torch.cdist(a, b, p=1.0),
    "cdist, p=3": lambda a, b: torch.cdist(a, b, p=3.0),
    "cdist, p=inf": lambda a, b: torch.cdist(a, b, p=float("inf")),
    "solve": lambda a, b: torch.linalg.solve(_positive(a), b),
    "solve from the right": lambda a, b: torch.linalg.solve(_positive(a), b, left=False),
    "solve_triangular": lambda a, b: torch.linalg.solve_triangular(_triangular(a), b, upper=False),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, torch.linalg.cholesky(_positive(a))),
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(_positive(a)), b),
    "lstsq": lambda a, b: torch.linalg.lstsq(_positive(a), b).solution,
    "cross": torch.linalg.cross,
    "vecdot": torch.linalg.vecdot,
    "matmul": torch.matmul,
    "matmul and add": lambda a, b: a + a @ b.mT,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, a.abs() + 1),
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "pow": lambda a, b: (a.abs() + 0.1) ** b,
    "xlogy": lambda a, b: torch.xlogy(a, b.abs() + 0.1),
    "logaddexp": torch.logaddexp,
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, -1),
    "pairwise_distance": F.pairwise_distance,
    "dist": torch.dist,
    "take_along_dim": lambda a, b: torch.take_along_dim(a, b.argsort(-1), -1),
    "tensordot": lambda a, b: torch.tensordot(a, b, ([a.dim() - 1], [b.dim() - 1])),
    "einsum": lambda a, b: torch.einsum("...ij,...kj->...ik", a, b),
    "kron": torch.kron,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, b),
    "inner": torch.inner,
    "copysign": torch.copysign,
    "binary cross entropy": lambda a, b: F.binary_cross_entropy_with_logits(*torch.broadcast_tensors(a, b.sigmoid())),
    "huber_loss": lambda a, b: F.huber_loss(*torch.broadcast_tensors(a, b)),
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(a, b, a.flip(-1)),
    "scatter_add": lambda a, b: a.scatter_add(-1, _indices(a, b), a.sin()) if b.dim() <= a.dim() else a + b,
    "gather": lambda a, b: a.gather(-1, _indices(a, b)) if b.dim() <= a.dim() else a + b,
    "linear": lambda a, b: F.linear(a, b.reshape(-1, 3)),
}
SHAPES = [((2, 3, 3), (3, 3)), ((3, 3), (2, 3, 3)), ((2, 1, 3, 3), (2, 3, 3)), ((2, 3, 3), (2, 2, 3, 3))]
IN_DIMS = [(0, 0), (0, None), (None, 0), (-1, 1)]


def _fits(f: Callable, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    try:
        f(torch.randn(a, dtype=D), torch.randn(b, dtype=D))
    except RuntimeError:
        return False
    return True


CASES = [(name, a, b) for name, f in OPERATIONS.items() for a, b in SHAPES if _fits(f, a, b)]


@pytest.mark.parametrize(("name", "a", "b"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("lanes", LANES)
def test_operands_of_different_ranks(
    name: str, a: tuple, b: tuple, in_dims: tuple[int | None, int | None], lanes: int
) -> None:
    f = OPERATIONS[name]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (f(x, y) ** 2).sum()

    def slopes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        return torch.autograd.grad(loss(x, y), (x, y), allow_unused=True, materialize_grads=True)

    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randn(shape, dtype=D, generator=generator)
        if dim is None
        else torch.randn((lanes, *shape), dtype=D, generator=generator).movedim(0, dim)
        for shape, dim in zip((a, b), in_dims, strict=True)
    ]
    assert_same(vmap(f, in_dims)(*operands), loop_vmap(f, in_dims)(*operands))
    want = loop_vmap(slopes, in_dims)(*operands)
    assert_same(vmap(grad(loss, (0, 1)), in_dims)(*operands), want)
    around = [x.clone().requires_grad_() for x in operands]
    total = vmap(loss, in_dims)(*around).sum()
    found = torch.autograd.grad(total, around, allow_unused=True, materialize_grads=True)
    for got, each, dim in zip(found, want, in_dims, strict=True):
        assert_same(got, each.sum(0) if dim is None else each.movedim(0, dim))


TOO_FEW: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "det": (torch.linalg.det, (3,), 1),
    "slogdet": (lambda x: torch.linalg.slogdet(x).logabsdet, (3,), 1),
    "matrix_exp": (torch.linalg.matrix_exp, (3,), 1),
    "pinv": (torch.linalg.pinv, (3,), 1),
    "inv": (torch.linalg.inv, (3,), 1),
    "solve_triangular": (lambda a: torch.linalg.solve_triangular(a, a, upper=True), (3,), 1),
    "cholesky_solve": (lambda a: torch.cholesky_solve(a, a), (3,), 1),
    "layer_norm": (lambda x: F.layer_norm(x, (3,)), (), 1),
    "layer_norm over two dims": (lambda x: F.layer_norm(x, (3, 3)), (3,), 1),
    "conv1d": (F.conv1d, (3, 3), 2),
}


@pytest.mark.parametrize("name", TOO_FEW)
def test_lanes_are_no_dim_of_an_example(name: str) -> None:
    """What raises for one example does so for lanes, also where their number is what the missing dim would have."""
    f, shape, count = TOO_FEW[name]
    operands = [torch.randn(3, *shape, dtype=D) for _ in range(count)]
    with pytest.raises((RuntimeError, ValueError)):
        f(*[x[0] for x in operands])
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError)):
            vmap(f)(*operands)
        with pytest.raises((RuntimeError, ValueError)):
            vmap(lambda *xs: f(*xs) * 1)(*operands)
