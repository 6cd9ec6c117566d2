"""Operators and methods that answer without the dispatcher where they can (direct.py): elementwise ones."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from lanewise._core.direct import binary_method, unary_method


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
