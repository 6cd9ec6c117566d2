"""Operations of lanes abreast along dims of a lane: sums and the like, choices, orders."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise._control.abreast.values import (
    FUNCTIONS,
    METHODS,
    Declined,
    Lanes,
    aligned,
    both,
    dim_below,
    dims_below,
    rank_of,
    value_of,
    wrapped,
)
from lanewise._rules.batch.ranking import greatest_of_rows, sort_rows
from lanewise._torch_compat import is_grad_enabled


def _reducing(value: Tensor, dim: Any, keepdim: bool) -> tuple[Tensor, list[int], bool]:
    """A value, its dims that are to be reduced, and whether they are to stay. A number is a vector of one."""
    rank = value.dim() - 1
    if not rank and dim in (None, 0, -1):
        return value.unsqueeze(1), [1], False
    return value, list(range(1, rank + 1)) if dim is None else dims_below(dim, rank), keepdim


def _reduced(call: Callable) -> Callable:
    def run(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lanes:
        return Lanes(call(*_reducing(value_of(x), dim, keepdim), dtype=dtype))

    return run


both("sum mean nansum", _reduced)


def _plainly_reduced(call: Callable) -> Callable:
    def run(x: Any, dim: Any = None, keepdim: bool = False) -> Lanes:
        return Lanes(call(*_reducing(value_of(x), dim, keepdim)))

    return run


both("amax amin all any", _plainly_reduced)


def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Lanes:
    value = value_of(x)
    return Lanes(torch.logsumexp(value, dims_below(dim, value.dim() - 1), keepdim))


FUNCTIONS[torch.logsumexp] = METHODS["logsumexp"] = _logsumexp


def _spread(call: Callable) -> Callable:
    def run(x: Any, dim: Any = None, *, unbiased: bool = True, correction: int | None = None, keepdim: bool = False):
        if type(dim) is bool:
            raise Declined
        value, dims, keepdim = _reducing(value_of(x), dim, keepdim)
        return Lanes(call(value, dims, correction=int(unbiased) if correction is None else correction, keepdim=keepdim))

    return run


both("var std", _spread)


def _norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Lanes:
    value, dims, keepdim = _reducing(value_of(x), dim, keepdim)
    return Lanes(torch.linalg.vector_norm(value, ord, dims, keepdim, dtype=dtype))


def _old_norm(x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False) -> Lanes:
    if p not in (2, "fro"):
        raise Declined
    return _norm(x, 2, dim, keepdim)


FUNCTIONS[torch.linalg.vector_norm] = _norm
FUNCTIONS[torch.norm] = METHODS["norm"] = _old_norm


def _linalg_norm(x: Any) -> Lanes:
    return _norm(x)


FUNCTIONS[torch.linalg.norm] = _linalg_norm


def _chosen(call: Callable) -> Callable:
    """`max` and `min` along a dim, of all elements where nobody differentiates, or of two tensors."""

    def run(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if type(dim) is Lanes or isinstance(dim, Tensor):
            return Lanes(call(*aligned((x, dim), (x, dim))))
        value = value_of(x)
        if dim is not None:
            return wrapped(call(value, dim_below(dim, value.dim() - 1), keepdim))
        if value.requires_grad or value.dim() == 1:
            raise Declined
        return Lanes(call(value.flatten(1), 1)[0])

    return run


both("max min", _chosen)


def _place(call: Callable) -> Callable:
    def run(x: Any, dim: Any = None, keepdim: bool = False) -> Lanes:
        value = value_of(x)
        if dim is not None:
            return Lanes(call(value, dim_below(dim, value.dim() - 1), keepdim))
        if keepdim or value.dim() == 1:
            raise Declined
        return Lanes(call(value.flatten(1), 1))

    return run


both("argmax argmin", _place)


def _along(call: Callable) -> Callable:
    def run(x: Any, dim: int, *, dtype: Any = None) -> Lanes:
        value = value_of(x)
        return Lanes(call(value, dim_below(dim, value.dim() - 1), dtype=dtype))

    return run


both("softmax log_softmax cumsum", _along)


def _softmax_of_layers(call: Callable) -> Callable:
    def run(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Lanes:
        value = value_of(x)
        return Lanes(call(value, dim_below(dim, value.dim() - 1), dtype=dtype))

    return run


FUNCTIONS[F.softmax] = _softmax_of_layers(torch.softmax)
FUNCTIONS[F.log_softmax] = _softmax_of_layers(torch.log_softmax)


def _unrecorded(x: Any) -> Tensor:
    value = value_of(x)
    if value.requires_grad and is_grad_enabled():
        raise Declined  # on a plane, many rows are sorted at once all the same
    return value


def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    value, below = _unrecorded(x), dim_below(dim, rank_of(x))
    found = sort_rows(value, below, descending, stable=stable)
    if found is None:
        found = torch.sort(value, dim=below, descending=descending, stable=stable)
    return torch.return_types.sort(map(Lanes, found))  # type: ignore[attr-defined]


def _argsort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    return _sort(Lanes(value_of(x).detach()), dim, descending, stable=stable)[1]


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    value, below = _unrecorded(x), dim_below(dim, rank_of(x))
    found = greatest_of_rows(value, k, below, largest, sorted)
    if found is None:
        found = torch.topk(value, k, below, largest, sorted)
    return torch.return_types.topk(map(Lanes, found))  # type: ignore[attr-defined]


FUNCTIONS[torch.sort] = METHODS["sort"] = _sort
FUNCTIONS[torch.argsort] = METHODS["argsort"] = _argsort
FUNCTIONS[torch.topk] = METHODS["topk"] = _topk


def _normalize(x: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Lanes:
    return Lanes(F.normalize(value_of(x), p, dim_below(dim, rank_of(x)), eps))


FUNCTIONS[F.normalize] = _normalize


def _loss(call: Callable) -> Callable:
    """A loss that compares tensors of one shape element by element."""

    def run(x: Any, target: Any, /, **options: Any) -> Lanes:
        reduction = options.pop("reduction", "mean")
        if reduction not in ("mean", "sum", "none") or not options.keys() <= {"beta", "delta"}:
            raise Declined
        a, b = aligned((x, target), (x, target))
        if not a.is_floating_point():
            raise Declined
        if rank_of(x) != rank_of(target) or a.shape[1 - a.dim() :] != b.shape[1 - a.dim() :] or a.dtype is not b.dtype:
            raise Declined  # torch warns
        each = call(a, b, reduction="none", **options)
        if reduction == "none" or each.dim() == 1:
            return Lanes(each)
        dims = list(range(1, each.dim()))
        return Lanes(each.mean(dims) if reduction == "mean" else each.sum(dims))

    return run


for _function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
    FUNCTIONS[_function] = _loss(_function)
