"""Which recorded operations have a derivative that is infinite, or no number, at the values they were given.

The nodes of autograd's graph bear the names of torch's formulas, and show what these have saved: that tells where a
formula would divide by zero, however many operations a rule is made of.
"""

import cmath
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import on_plane
from lanewise._core.plane import numbers_of, own_node, tangents_of
from lanewise._torch_compat import AccumulateGrad, node_number


@functools.cache
def _smallest(dtype: torch.dtype) -> float:
    """Numbers above this may be divided by four times over: enough for third derivatives."""
    return torch.finfo(dtype).tiny ** 0.25 if dtype.is_floating_point or dtype.is_complex else 0.0


def _away(value: Tensor) -> bool:
    """Whether no number is zero or close to it; NaN is."""
    if not value.numel():
        return True
    least = _smallest(value.dtype)
    return (not value.is_complex() and value.min().item() > least) or value.abs().min().item() > least


def _positive(value: Tensor) -> bool:
    """Whether all numbers are above zero, not close to it: below, a formula gives NaN. Of complex ones, `_away`."""
    if value.is_complex() or not value.numel():
        return _away(value)
    return value.min().item() > _smallest(value.dtype)


def _finite(value: Tensor) -> bool:
    """Whether all numbers are finite; if their sum is not, they count as not."""
    return cmath.isfinite(value.sum().item())


def _not_large(value: Tensor) -> bool:
    return not value.numel() or value.abs().max().item() * _smallest(value.dtype) < 1


def _inside(value: Tensor) -> bool:
    return _positive(1 - value.abs())


def _apart(value: Tensor) -> bool:
    """Whether no two numbers along the last dim are equal or close."""
    gaps = (value.unsqueeze(-1) - value.unsqueeze(-2)).abs()
    return _away(gaps + torch.eye(gaps.shape[-1], dtype=gaps.dtype, device=gaps.device))


def _regular(value: Tensor) -> bool:
    """Whether a triangular factor can be divided by."""
    return _away(value.diagonal(0, -2, -1))


# For each formula: what it has saved, and what that must be for the derivatives to be finite.
_FORMULAS: dict[str, tuple[tuple[str, Callable[[Tensor], bool]], ...]] = {
    "AcosBackward0": (("self", _inside),),
    "AcoshBackward0": (("self", lambda x: _positive(x - 1)),),
    "AddcdivBackward0": (("tensor1", _finite), ("tensor2", _away)),
    "AddcmulBackward0": (("tensor1", _finite), ("tensor2", _finite)),
    "AddmmBackward0": (("mat1", _finite), ("mat2", _finite)),
    "AsinBackward0": (("self", _inside),),
    "AtanhBackward0": (("self", _inside),),
    "BaddbmmBackward0": (("batch1", _finite), ("batch2", _finite)),
    "BmmBackward0": (("self", _finite), ("mat2", _finite)),
    "CdistBackward0": (("result", _away),),
    "ConvolutionBackward0": (("input", _finite), ("weight", _finite)),
    "CoshBackward0": (("self", lambda x: _finite(x.cosh())),),
    "CumprodBackward0": (("self", _finite), ("result", _finite)),
    "DigammaBackward0": (("self", lambda x: _finite(x.digamma())),),
    "DistBackward0": (("result", _away),),
    "DivBackward0": (("self", _finite), ("other", _away)),
    "DotBackward0": (("self", _finite), ("tensor", _finite)),
    "ErfinvBackward0": (("self", _inside),),
    "Exp2Backward0": (("result", _finite),),
    "ExpBackward0": (("result", _finite),),
    "Expm1Backward0": (("result", _finite),),
    "HypotBackward0": (("result", _away),),
    "LerpBackward1": (("self", _finite), ("end", _finite), ("weight", _finite)),
    "LgammaBackward0": (("self", lambda x: _finite(x.digamma())),),
    "LinalgCholeskyExBackward0": (("L", _regular),),
    "LinalgDetBackward0": (("LU", _regular),),
    "LinalgEigBackward0": (("eigenvalues", _apart),),
    "LinalgEighBackward0": (("eigenvalues", _apart),),
    "LinalgLuBackward0": (("U", _regular),),
    "LinalgLuFactorExBackward0": (("LU", _regular),),
    "LinalgLuSolveBackward0": (("LU", _regular), ("result", _finite)),
    "LinalgQrBackward0": (("R", _regular),),
    "LinalgSlogdetBackward0": (("LU", _regular),),
    "LinalgSolveExBackward0": (("LU", _regular), ("result", _finite)),
    "LinalgSvdBackward0": (("S", _away), ("S", _apart)),
    "LinalgVectorNormBackward0": (("result", _away),),
    "LinearBackward0": (("input", _finite), ("weight", _finite)),
    "Log10Backward0": (("self", _away),),
    "Log1PBackward0": (("self", lambda x: _away(1 + x)),),
    "Log2Backward0": (("self", _away),),
    "LogBackward0": (("self", _away),),
    "LogSoftmaxBackward0": (("result", lambda x: not bool(x.isnan().any())),),
    "LogaddexpBackward0": (("self", _finite), ("other", _finite)),
    "LogcumsumexpBackward0": (("result", _finite),),
    "LogitBackward0": (("self", lambda x: _positive(x * (1 - x))),),
    "LogsumexpBackward0": (("result", _finite),),
    "MmBackward0": (("self", _finite), ("mat2", _finite)),
    "MulBackward0": (("self", _finite), ("other", _finite)),
    "MvlgammaBackward0": (("self", lambda x: False),),  # it has a pole at every half
    "MvBackward0": (("self", _finite), ("vec", _finite)),
    "NormBackward0": (("result", _away),),
    "NormBackward1": (("result", _away),),
    "PdistBackward0": (("result", _away),),
    "PolygammaBackward0": (("self", _positive),),
    "PowBackward1": (("self", _positive), ("result", _finite)),
    "PowBackward2": (("result", _finite),),
    "ProdBackward0": (("self", _finite), ("result", _finite)),
    "ProdBackward1": (("self", _finite), ("result", _finite)),
    "ReciprocalBackward0": (("result", _not_large),),
    "RsqrtBackward0": (("result", _not_large),),
    "SinhBackward0": (("self", lambda x: _finite(x.sinh())),),
    "SoftmaxBackward0": (("result", _finite),),
    "SpecialEntrBackward0": (("self", _positive),),
    "SpecialNdtriBackward0": (("result", _finite),),
    "SpecialXlog1PyBackward0": (("self", _finite), ("other", lambda x: _positive(1 + x))),
    "SpecialZetaBackward0": (("other", _positive),),
    "SpecialZetaBackward1": (("other", _positive),),
    "SqrtBackward0": (("result", _away),),
    "StdBackward0": (("result", _away),),
    "StdMeanBackward0": (("result0", _away),),
    "TanBackward0": (("result", _not_large),),
    "XlogyBackward0": (("self", _finite), ("other", _positive)),
}


# An operand that is infinite, or NaN, makes the result of these so; of a quotient only what is divided.
_PRODUCTS = frozenset(f"{name}Backward0" for name in "Addmm Baddbmm Bmm Div Dot Mm Mul Mv".split())
_SHOWING = _PRODUCTS | frozenset("AddBackward0 NegBackward0 RsubBackward1 SubBackward0 ViewBackward0".split())


# Operations that may be, by name.
STEEP = frozenset(
    "acos acosh addcdiv addcmul asin atan2 atanh cosh digamma div erfinv exp exp2 expm1 hypot lgamma log log10 log1p "
    "log2 logit mul pow reciprocal rsqrt sinh sqrt tan xlogy".split()
)
# Those that are where their last operand is zero, and nowhere else.
_INVERSES = frozenset("addcdiv div log log10 log2 reciprocal rsqrt sqrt".split())


def gentle(name: str, operands: list[Tensor]) -> bool:
    """Whether the numbers that an operation of that name is given show that its derivatives are finite."""
    if name == "mul" and len(operands) < 2:
        return True  # by a Python number
    with on_plane(None):
        values = [numbers_of(operand) for operand in operands]
        if not all(map(_finite, values)):
            return False
        if name in ("mul", "addcmul"):
            return True
        return name in _INVERSES and _away(values[-1])


def steep(out: Tensor, begun: int) -> bool:
    """Whether a derivative of `out` is infinite by one of the nodes from number `begun` on that it comes from.

    Where it carries tangents, so do the cotangents: then no tangent may be infinite either.
    """
    if not all(map(_finite, map(numbers_of, tangents_of(out)))):
        return True
    # Whether `out` is finite, once that is known; for each node, whether it would show there that its result is not.
    finite: bool | None = None
    stack: list[tuple[Any, bool]] = [(own_node(out), True)]
    while stack:
        node, shown = stack.pop()
        name = type(node).__name__
        if shown and name in _PRODUCTS:
            if finite is None:
                finite = _finite(numbers_of(out))
            flat = finite and (name != "DivBackward0" or _flat(node, "other", _away))
        elif name == "CppFunction":  # of several tensors at once, and silent about what it has saved
            flat = False
        elif name == "PowBackward0":
            flat = _power(node)
        elif name == "Atan2Backward0":
            flat = _away(torch.hypot(numbers_of(node._saved_self), numbers_of(node._saved_other)))
        else:
            flat = all(_flat(node, attribute, check) for attribute, check in _checks(type(node), name))
        if not flat:
            return True
        for place, (following, _) in enumerate(node.next_functions):
            if following is not None and begun <= node_number(following) and type(following) is not AccumulateGrad:
                stack.append((following, shown and name in _SHOWING and (place == 0 or name != "DivBackward0")))
    return False


@functools.cache
def _checks(kind: type, name: str) -> tuple[tuple[str, Callable[[Tensor], bool]], ...]:
    """What a formula has saved, and what that must be; of one that is not listed, all that it may multiply by."""
    saved = [attribute.removeprefix("_saved_") for attribute in dir(kind) if attribute.startswith("_saved_")]
    return _FORMULAS.get(name) or tuple([(attribute, _finite) for attribute in saved])


def _flat(node: Any, attribute: str, check: Callable[[Tensor], bool]) -> bool:
    saved = getattr(node, f"_saved_{attribute}", None)
    return not isinstance(saved, Tensor) or saved.dtype in _INTEGERS or check(numbers_of(saved))


_INTEGERS = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])


def _power(node: Any) -> bool:
    base, exponent = numbers_of(node._saved_self), node._saved_exponent
    if exponent in (0, 1, 2, 3, 4):
        return _finite(base)
    whole = not isinstance(exponent, complex) and float(exponent).is_integer()
    return _finite(base) and (_away(base) if whole else _positive(base))
