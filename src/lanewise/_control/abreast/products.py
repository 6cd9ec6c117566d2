"""Products of lanes abreast, and what solves for matrices."""

import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.abreast.values import (
    FUNCTIONS,
    METHODS,
    Declined,
    Lanes,
    Spread,
    check_operand,
    dim_below,
    expanded,
    lane_count,
    rank_of,
    value_of,
    wrapped,
)
from lanewise._rules.batch.methods import PRODUCTS
from lanewise._rules.batch.spread import Linear, apply, is_spread
from lanewise._torch_compat import is_grad_enabled


def product(x: Any, y: Any) -> Lanes:
    """`x @ y`"""
    own, other = type(x) is Lanes, type(y) is Lanes
    a, b = x, y
    if type(y) is Spread and own and a.value.dim() > 1 and y.value.dim() == 3:
        return spread_product(x, Spread(y.value.mT), None)
    if own:
        a = x.value
    else:
        check_operand(x)
    if other:
        b = y.value
    else:
        check_operand(y)
    if a.dtype is not b.dtype or not a.is_floating_point():
        raise Declined
    ranks = a.dim() - own, b.dim() - other
    recorded = is_grad_enabled() and (a.requires_grad or b.requires_grad)
    # Of a matrix that all lanes share, these would record what is as large as a matrix of each.
    form = None if recorded and not (own and other) else PRODUCTS.get((own, ranks[0], other, ranks[1]))
    if form is not None:
        if a.shape[-1] != b.shape[-min(ranks[1], 2)]:
            raise Declined
        return Lanes(form(a, b))
    if own and not other:
        fits = ranks[0] > 0 and ranks[1] in (1, 2)
    elif other and not own:
        fits = ranks == (2, 2) or ranks in ((2, 1), (1, 1))
        if ranks[1] == 1 and fits:
            return Lanes(torch.matmul(b, a.t()))  # a row times a matrix
    else:
        fits = ranks[0] == ranks[1] > 1
    if not fits:
        raise Declined
    return Lanes(torch.matmul(a, b))


def spread_product(x: Any, weight: Spread, bias: Any) -> Lanes:
    """`F.linear` of x [*S, n] with a weight [m, n] that is differentiated for each lane, and a bias [m] or None."""
    value, own = value_of(x), weight.value
    if own.dim() != 3 or value.dim() < 2 or value.dtype is not own.dtype:
        raise Declined
    return Lanes(apply(Linear(), value, own, spread_value(bias, value)))


def spread_value(parameter: Any, like: Tensor) -> Tensor | None:
    """A parameter of a layer, None or one for all lanes, as spread.py takes it."""
    if parameter is None:
        return None
    if type(parameter) in (Lanes, Spread):
        value = parameter.value
        if not is_spread(value):
            raise Declined
    else:
        check_operand(parameter)
        if parameter.requires_grad:
            raise Declined
        value = parameter.expand(like.shape[0], *parameter.shape)
    if value.dtype is not like.dtype:
        raise Declined
    return value


def _of_ranks(left: int, right: int) -> Callable:
    def run(x: Any, y: Any) -> Lanes:
        if rank_of(x) != left or rank_of(y) != right:
            raise Declined
        return product(x, y)

    return run


FUNCTIONS[torch.matmul] = METHODS["matmul"] = product
for _name, _ranks in {"dot": (1, 1), "inner": (1, 1), "mv": (2, 1), "mm": (2, 2), "bmm": (3, 3)}.items():
    FUNCTIONS[getattr(torch, _name)] = METHODS[_name] = _of_ranks(*_ranks)


def _outer(x: Any, y: Any) -> Lanes:
    if rank_of(x) != 1 or rank_of(y) != 1:
        raise Declined
    a = x.value.unsqueeze(2) if type(x) is Lanes else x.unsqueeze(1)
    b = y.value.unsqueeze(1) if type(y) is Lanes else y
    if a.dtype is not b.dtype:
        raise Declined
    return Lanes(a * b)


FUNCTIONS[torch.outer] = METHODS["outer"] = _outer


def _einsum(equation: str, *operands: Any) -> Lanes:
    if len(operands) == 1 and type(operands[0]) in (list, tuple):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "")
    if "." in equation:
        raise Declined
    left, arrow, out = equation.partition("->")
    if not arrow:
        letters = left.replace(",", "")
        out = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    lanes = next(letter for letter in string.ascii_letters if letter not in equation)
    parts = left.split(",")
    if len(parts) != len(operands) or any(rank_of(x) != len(part) for x, part in zip(operands, parts)):
        raise Declined
    inputs = [lanes + part if type(x) is Lanes else part for x, part in zip(operands, parts)]
    values = [x.value if type(x) is Lanes else x for x in operands]
    if any(value.dtype is not values[0].dtype for value in values):
        raise Declined
    return Lanes(torch.einsum(f"{','.join(inputs)}->{lanes}{out}", *values))


FUNCTIONS[torch.einsum] = _einsum


def _matrices(*operands: Any) -> list[Tensor]:
    """Operands that are matrices, or stacks of them, of one rank."""
    if any(rank_of(x) < 2 or rank_of(x) != rank_of(operands[0]) for x in operands):
        raise Declined
    count = lane_count(operands)
    return [expanded(x, count) for x in operands]


def _of_matrix(call: Callable) -> Callable:
    def run(x: Any) -> Any:
        return wrapped(call(*_matrices(x)))

    return run


for _function in (torch.linalg.inv, torch.linalg.det, torch.linalg.slogdet, torch.logdet, torch.trace):
    FUNCTIONS[_function] = _of_matrix(_function)
FUNCTIONS[torch.det] = METHODS["det"] = _of_matrix(torch.linalg.det)
FUNCTIONS[torch.inverse] = METHODS["inverse"] = _of_matrix(torch.linalg.inv)
METHODS["logdet"] = _of_matrix(torch.logdet)


def _trace(x: Any) -> Lanes:
    if rank_of(x) != 2:
        raise Declined
    return Lanes(value_of(x).diagonal(0, 1, 2).sum(1))


FUNCTIONS[torch.trace] = METHODS["trace"] = _trace


def _cholesky(x: Any, *, upper: bool = False) -> Lanes:
    return Lanes(torch.linalg.cholesky(*_matrices(x), upper=upper))


FUNCTIONS[torch.linalg.cholesky] = _cholesky


def _solve(a: Any, b: Any, *, left: bool = True) -> Lanes:
    if rank_of(a) == 2 and rank_of(b) == 1 and left:
        a, b = _matrices(a, unsqueezed(b))
        return Lanes(torch.linalg.solve(a, b).squeeze(2))
    return Lanes(torch.linalg.solve(*_matrices(a, b), left=left))


def unsqueezed(x: Any) -> Any:
    """A vector as a column."""
    return Lanes(x.value.unsqueeze(2)) if type(x) is Lanes else x.unsqueeze(1)


FUNCTIONS[torch.linalg.solve] = _solve


def _solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Lanes:
    options = {"upper": upper, "left": left, "unitriangular": unitriangular}
    return Lanes(torch.linalg.solve_triangular(*_matrices(a, b), **options))


FUNCTIONS[torch.linalg.solve_triangular] = _solve_triangular


def _cross(x: Any, y: Any, *, dim: int = -1) -> Lanes:
    rank = rank_of(x)
    if rank_of(y) != rank:
        raise Declined
    count = lane_count((x, y))
    return Lanes(torch.linalg.cross(expanded(x, count), expanded(y, count), dim=dim_below(dim, rank)))


FUNCTIONS[torch.linalg.cross] = _cross
