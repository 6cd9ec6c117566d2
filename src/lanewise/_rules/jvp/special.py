"""Functions of torch.special that torch knows no derivative of, and takes for constants without a word."""

import math
from collections.abc import Callable
from typing import Any

import torch

from lanewise._rules.jvp.families import jvp_rule
from lanewise._rules.jvp.pointwise import i1_over, near_zero
from lanewise._torch_compat import OpOverload
from lanewise.errors import FunctionError, at_user_line

aten = torch.ops.aten
special = torch.special

_J1 = [(-1) ** k / (2 * 4**k * math.factorial(k) * math.factorial(k + 1)) for k in range(11)]
_J0_SLOPE = [(-1) ** (k + 1) * (2 * k + 2) / math.factorial(2 * k + 3) for k in range(11)]


def _j1_over(x):
    return near_zero(x, 1, _J1, lambda x: special.bessel_j1(x) / x)


def _spherical_slope(x):
    return x * near_zero(x, 1, _J0_SLOPE, lambda x: (x * x.cos() - x.sin()) / (x * x * x))


# The derivative in x, a function of the operation's own arguments.
SLOPES: dict[OpOverload, Callable[..., Any]] = {
    aten.special_bessel_j0.default: lambda x: -special.bessel_j1(x),
    aten.special_bessel_j1.default: lambda x: special.bessel_j0(x) - _j1_over(x),
    aten.special_bessel_y0.default: lambda x: -special.bessel_y1(x),
    aten.special_bessel_y1.default: lambda x: special.bessel_y0(x) - special.bessel_y1(x) / x,
    aten.special_modified_bessel_i0.default: special.modified_bessel_i1,
    aten.special_modified_bessel_i1.default: lambda x: special.modified_bessel_i0(x) - i1_over(x),
    aten.special_modified_bessel_k0.default: lambda x: -special.modified_bessel_k1(x),
    aten.special_modified_bessel_k1.default: lambda x: (
        -special.modified_bessel_k0(x) - special.modified_bessel_k1(x) / x
    ),
    aten.special_scaled_modified_bessel_k0.default: lambda x: (
        special.scaled_modified_bessel_k0(x) - special.scaled_modified_bessel_k1(x)
    ),
    aten.special_scaled_modified_bessel_k1.default: lambda x: (
        special.scaled_modified_bessel_k1(x) * (1 - 1 / x) - special.scaled_modified_bessel_k0(x)
    ),
    aten.special_spherical_bessel_j0.default: _spherical_slope,
}


def _polynomials(name: str, slope: Callable[..., Any]) -> None:
    packet = getattr(aten, f"special_{name}")
    for op in (packet.default, packet.n_scalar):
        SLOPES[op] = slope


def _unknown(name: str) -> Callable[..., Any]:
    def slope(*args: Any) -> Any:
        raise FunctionError(
            at_user_line(
                f"derivative for aten::special_{name} is not implemented",
                "a torch.autograd.Function with its derivative\n"
                f"torch.special.{name}(x.detach(), ...)  # where it is meant to be a constant",
            )
        )

    return slope


_polynomials("chebyshev_polynomial_t", lambda x, n: n * special.chebyshev_polynomial_u(x, n - 1))
_polynomials("hermite_polynomial_h", lambda x, n: 2 * n * special.hermite_polynomial_h(x, n - 1))
_polynomials("hermite_polynomial_he", lambda x, n: n * special.hermite_polynomial_he(x, n - 1))
_polynomials("shifted_chebyshev_polynomial_t", lambda x, n: 2 * n * special.shifted_chebyshev_polynomial_u(x, n - 1))
for _kind in "uvw":
    for _name in (f"chebyshev_polynomial_{_kind}", f"shifted_chebyshev_polynomial_{_kind}"):
        _polynomials(_name, _unknown(_name))
for _name in ("laguerre_polynomial_l", "legendre_polynomial_p"):
    _polynomials(_name, _unknown(_name))
SLOPES[aten.special_airy_ai.default] = _unknown("airy_ai")


def _register(op: OpOverload, slope: Callable[..., Any]) -> None:
    @jvp_rule(op)
    def rule(level, x, *rest):
        """t times the slope"""
        given = [level.primal(arg) for arg in (x, *rest)]
        t = level.tangent(x)
        return op(*given), None if t is None else t * slope(*given)


for _op, _slope in SLOPES.items():
    _register(_op, _slope)
