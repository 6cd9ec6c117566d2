"""Operators and methods that answer without the dispatcher where they can (direct.py), and functions that `vmap` maps
as they are (whole.py)."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from lanewise._core.short.direct import binary_method, operands_method, product_method, reducing_method, unary_method
from lanewise._core.short.whole import whole_pointwise, whole_product
from lanewise._rules.batch.matmul import dots, lanes_times_matrix, matrix_times_lanes, product_of_lanes


def _reflected(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: call(y, x)


for _name in "add sub mul truediv floordiv mod pow and or xor".split():
    _call = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    binary_method(f"__{_name}__", _call)
    if hasattr(torch.Tensor, f"__r{_name}__"):
        binary_method(f"__r{_name}__", _reflected(_call), forward=f"__{_name}__")
for _name in "lt le eq ne gt ge".split():
    binary_method(f"__{_name}__", getattr(operator, _name))
for _name in "__abs__ __invert__ __neg__".split():
    unary_method(_name, getattr(operator, _name))
for _name in (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor lgamma log log10 log1p log2 "
    "logical_not neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
).split():
    unary_method(_name, getattr(torch, _name))
    whole_pointwise(getattr(torch, _name))


def _reduced(call: Callable) -> Callable:
    def reduce(value: Any, dim: Any = None, keepdim: bool = False) -> Any:
        rank = value.dim()
        if rank == 1 or type(keepdim) is not bool:
            return None
        if dim is None:
            return call(value, list(range(1, rank)), keepdim)
        dims = [dim] if type(dim) is int else dim
        if (
            type(dims) not in (list, tuple)
            or not dims
            or any(type(each) is not int or not 1 - rank <= each < rank - 1 for each in dims)
        ):
            return None
        return call(value, [each + 1 if each >= 0 else each for each in dims], keepdim)

    return reduce


for _name in "mean sum".split():
    reducing_method(_name, _reduced(getattr(torch, _name)))
for _name in "add atan2 div maximum minimum mul pow sub".split():
    whole_pointwise(getattr(torch, _name))


def _dot(x: Any, y: Any) -> Any:
    if x.shape != y.shape:
        raise ValueError
    return dots(x, y)


# [B, ...] with lanes, [...] without. A row times a matrix takes a third of the time of a matrix times a column.
PRODUCTS = {
    (False, 1, False, 1): torch.dot,
    (False, 1, False, 2): torch.matmul,
    (False, 2, False, 1): torch.mv,
    (False, 2, False, 2): torch.mm,
    (True, 1, True, 1): _dot,
    (True, 1, True, 2): lambda x, y: torch.bmm(x.unsqueeze(1), y).squeeze(1),
    (True, 2, True, 1): lambda x, y: torch.bmm(y.unsqueeze(1), x.mT).squeeze(1),
    (True, 2, True, 2): product_of_lanes,
    (True, 2, False, 2): lanes_times_matrix,
    (False, 2, True, 2): matrix_times_lanes,
    (True, 1, False, 1): torch.mv,
    (False, 1, True, 1): lambda x, y: torch.mv(y, x),
    (True, 1, False, 2): torch.mm,
    (False, 2, True, 1): lambda x, y: torch.mm(y, x.t()),
}
for _name in "gather index_add index_select scatter_add".split():
    operands_method(_name, getattr(torch.ops.aten, _name).default)
product_method("__matmul__", PRODUCTS)
product_method("__rmatmul__", PRODUCTS, turned=True)
for _function, _ranks in ((torch.dot, (1, 1)), (torch.mv, (2, 1)), (torch.mm, (2, 2)), (torch.matmul, None)):
    _forms = {key: form for key, form in PRODUCTS.items() if _ranks in (None, (key[1], key[3]))}
    whole_product(_function, _forms)
