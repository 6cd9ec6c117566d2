"""Forward rules of pointwise operations."""

import pytest
import torch
import torch.nn.functional as F

from lanewise import jvp
from tests.oracles import assert_same
from tests.rules.tangents import check_tangents

D = torch.float64
ANY = torch.tensor([-1.7, -0.6, 0.3, 1.4], dtype=D)
POSITIVE = torch.tensor([0.4, 0.9, 1.7, 2.2], dtype=D)
UNIT = torch.tensor([-0.8, -0.2, 0.3, 0.6], dtype=D)
OTHER = torch.tensor([0.8, -1.2, 0.5, 2.1], dtype=D)
COMPLEX = torch.complex(ANY, OTHER)

ONE = {
    "abs": (torch.abs, ANY),
    "acos": (torch.acos, UNIT),
    "acosh": (torch.acosh, POSITIVE + 1),
    "asin": (torch.asin, UNIT),
    "asinh": (torch.asinh, ANY),
    "atan": (torch.atan, ANY),
    "atanh": (torch.atanh, UNIT),
    "ceil": (lambda x: x.ceil() * x, ANY),
    "celu": (lambda x: F.celu(x, 0.7), ANY),
    "clamp": (lambda x: x.clamp(-1, 1) * x + x.clamp_min(0.1) + x.clamp_max(0.5), ANY),
    "cos": (torch.cos, ANY),
    "cosh": (torch.cosh, ANY),
    "deg2rad": (lambda x: x.deg2rad() * x.rad2deg(), ANY),
    "digamma": (torch.digamma, POSITIVE),
    "elu": (lambda x: F.elu(x, 0.7) + F.selu(x), ANY),
    "erf": (torch.erf, ANY),
    "erfc": (torch.erfc, ANY),
    "erfcx": (torch.special.erfcx, ANY),
    "erfinv": (torch.erfinv, UNIT),
    "entr": (torch.special.entr, POSITIVE),
    "exp": (torch.exp, ANY),
    "exp2": (torch.exp2, ANY),
    "expm1": (torch.expm1, ANY),
    "frac": (lambda x: x.frac() * x, ANY),
    "gelu": (F.gelu, ANY),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), ANY),
    "hardshrink": (lambda x: F.hardshrink(x) * x, ANY),
    "hardsigmoid": (lambda x: F.hardsigmoid(x) * x, ANY),
    "hardswish": (F.hardswish, ANY),
    "hardtanh": (lambda x: F.hardtanh(x) * x, ANY),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1) * x, ANY),
    "lgamma": (torch.lgamma, POSITIVE),
    "log": (torch.log, POSITIVE),
    "log10": (torch.log10, POSITIVE),
    "log1p": (torch.log1p, POSITIVE),
    "log2": (torch.log2, POSITIVE),
    "logit": (torch.logit, UNIT / 2 + 0.5),
    "logsigmoid": (F.logsigmoid, ANY),
    "mish": (F.mish, ANY),
    "nan_to_num": (lambda x: torch.nan_to_num(x) * x, ANY),
    "ndtri": (torch.special.ndtri, UNIT / 2 + 0.5),
    "neg": (lambda x: -x * x, ANY),
    "pow": (lambda x: x**3 + x**2 + x**1 + x**0 + x**-2 + (x * x) ** 0.3, ANY),
    "reciprocal": (torch.reciprocal, ANY),
    "relu": (lambda x: x.relu() * x, ANY),
    "rsqrt": (torch.rsqrt, POSITIVE),
    "rsub": (lambda x: torch.rsub(x, 2, alpha=3) * x, ANY),
    "sigmoid": (torch.sigmoid, ANY),
    "silu": (F.silu, ANY),
    "sin": (torch.sin, ANY),
    "sinc": (torch.sinc, ANY),
    "sinh": (torch.sinh, ANY),
    "softplus": (lambda x: F.softplus(x, 1.5), ANY),
    "softshrink": (lambda x: F.softshrink(x) * x, ANY),
    "softsign": (F.softsign, ANY),
    "sqrt": (torch.sqrt, POSITIVE),
    "tan": (torch.tan, UNIT),
    "tanh": (torch.tanh, ANY),
    "tanhshrink": (F.tanhshrink, ANY),
    "threshold": (lambda x: F.threshold(x, 0.1, 5.0) * x, ANY),
    "where": (lambda x: torch.where(x > 0, x * x, x.exp()) + torch.where(x > 0, x, 3.0) * x, ANY),
}

SEVERAL = {
    "add": (lambda x, y: torch.add(x, y, alpha=2) * x, ANY, OTHER[:1]),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z, value=0.7), ANY, OTHER, POSITIVE),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.7), ANY, OTHER[0], POSITIVE),
    "atan2": (torch.atan2, ANY, OTHER),
    "clamp tensors": (lambda x, a, b: torch.clamp(x, a, b) * x, ANY, OTHER - 1.5, POSITIVE - 0.1),
    "clamp limits cross": (lambda x, a, b: torch.clamp(x, a, b) * x, ANY, POSITIVE, POSITIVE - 1.3),
    "copysign": (lambda x, y: torch.copysign(x, y) * x, ANY, OTHER),
    "cross": (torch.linalg.cross, ANY[:3], OTHER[:3]),
    "div": (lambda x, y: x / y + torch.div(x, y, rounding_mode="floor") * x, ANY, OTHER),
    "fmax fmin": (lambda x, y: torch.fmax(x, y) * torch.fmin(x, y) * x, ANY, OTHER),
    "fmod": (lambda x, y: torch.fmod(x, y) * x + x.fmod(0.75), ANY, OTHER),
    "hypot": (torch.hypot, ANY, OTHER),
    "ldexp": (torch.ldexp, ANY, OTHER),
    "lerp": (lambda x, y, w: torch.lerp(x, y, w) + torch.lerp(x, y, 0.3) * x, ANY, OTHER, UNIT),
    "logaddexp": (lambda x, y: torch.logaddexp(x, y) + torch.logaddexp2(x, y), ANY, OTHER),
    "masked_fill": (lambda x, v: x.masked_fill(ANY > 0, v) * x + x.masked_fill(ANY > 0, 0.3) * x, ANY, OTHER[0]),
    "maximum": (lambda x, y: torch.maximum(x, y) * torch.minimum(x, y) * x, ANY, OTHER),
    "mul": (lambda x, y: x * y * x, ANY, OTHER[:, None]),
    "polar": (lambda x, y: torch.view_as_real(torch.polar(x, y)), POSITIVE, OTHER),
    "pow": (lambda x, y: x**y + 2.0**y, POSITIVE, OTHER),
    "prelu": (lambda x, w: F.prelu(x, w), ANY, OTHER[:1]),
    "remainder": (lambda x, y: torch.remainder(x, y) * x + x % 0.75, ANY, OTHER),
    "sub": (lambda x, y: torch.sub(x, y, alpha=2) * y, ANY, OTHER[:1]),
    "where": (lambda x, y: torch.where(ANY > 0, x * y, y.exp()), ANY, OTHER[0]),
    "xlogy": (lambda x, y: torch.xlogy(x, y) + torch.special.xlog1py(x, y) + torch.xlogy(x, 2.0), ANY, POSITIVE),
}

COMPLEX_ONES = {
    "abs": torch.abs,
    "acosh": torch.acosh,
    "angle": torch.angle,
    "exp": torch.exp,
    "mul": lambda z: z * z.conj() * z,
    "parts": lambda z: z.real * z.imag + z.conj().imag,
    "pow": lambda z: z**3 + z**0.5,
    "reciprocal": lambda z: 1 / z + z.rsqrt(),
    "sgn": torch.sgn,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("case", ONE.values(), ids=ONE.keys())
def test_of_one(case):
    check_tangents(*case)


@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL.keys())
def test_of_several(case):
    check_tangents(*case)


@pytest.mark.parametrize("f", COMPLEX_ONES.values(), ids=COMPLEX_ONES.keys())
def test_complex(f):
    check_tangents(f, COMPLEX)


@pytest.mark.parametrize(
    ("f", "args", "tangents", "want"),
    [
        (torch.maximum, ([1.0, 2.0], [1.0, 1.0]), ([1.0, 1.0], [3.0, 3.0]), [2.0, 1.0]),
        (torch.fmin, ([1.0, torch.nan], [1.0, 1.0]), ([1.0, 1.0], [3.0, 3.0]), [1.0, 3.0]),
        (lambda x: x.relu(), ([0.0, 1.0],), ([1.0, 1.0],), [0.0, 1.0]),
        (lambda x: x.abs(), ([0.0, -1.0],), ([1.0, 1.0],), [0.0, -1.0]),
        (lambda x: x.clamp(0, 1), ([0.0, 1.0],), ([1.0, 1.0],), [1.0, 1.0]),
        (lambda x: x**0, ([0.0, 2.0],), ([1.0, 1.0],), [0.0, 0.0]),
        (torch.pow, ([0.0, 0.0], [0.0, 2.0]), ([1.0, 1.0], [1.0, 1.0]), [0.0, 0.0]),
        (lambda x: torch.xlogy(x, 0 * x.detach()), ([0.0, 0.0],), ([1.0, 1.0],), [0.0, 0.0]),
        (lambda x: torch.nan_to_num(x), ([torch.inf, 1.0],), ([1.0, 1.0],), [0.0, 1.0]),
    ],
)
def test_where_the_derivative_is_a_choice(f, args, tangents, want):
    tensors = [tuple(torch.tensor(a, dtype=D) for a in group) for group in (args, tangents)]
    assert_same(jvp(f, *tensors)[1], torch.tensor(want, dtype=D))


def test_limits_that_meet():
    x, limit = torch.tensor([0.0, 1.0, 2.0]), torch.ones(3)
    tangents = torch.full((3,), 2.0), torch.full((3,), 5.0)
    out, tangent = jvp(lambda x, limit: torch.clamp(x, limit, limit), (x, limit), tangents)
    assert torch.equal(out, limit)
    assert torch.equal(tangent, tangents[1])
