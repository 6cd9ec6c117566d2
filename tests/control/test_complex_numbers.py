"""Complex numbers of lanes where Python asks for real ones: from a tensor, where that has no imaginary part."""

import math

import pytest
import torch

from lanewise import vmap

XS = torch.tensor([1.5, -0.5, 0.25, -2.0], dtype=torch.float64)


def of_tensor(x):
    z = torch.complex(x, x * 0)
    return x * float(z) if x > 0 else x - int(z)


def in_a_loop(x):
    z, n = torch.complex(x.abs(), x * 0), 0
    while float(z) > 0.3:
        z, n = z * 0.5, n + 1
    return x * n + round(float(z), 1)


def caught(x):
    z = torch.complex(x, x.clamp(min=1.0) - 1)
    try:
        return x * float(z)
    except RuntimeError:
        return x * 100


def nested(f, xs):
    return vmap(vmap(f))(xs[None])[0]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("mapped", [lambda f, xs: vmap(f)(xs), nested], ids=["vmap", "vmap of vmap"])
@pytest.mark.parametrize("lanes", [4, 400])
@pytest.mark.parametrize("f", [of_tensor, in_a_loop, caught], ids=lambda f: f.__name__)
def test_a_tensor_is_its_real_part_where_that_is_all(f, lanes, mapped):
    xs = XS.repeat(lanes // 4)
    want = torch.stack([f(x) for x in xs])
    for _ in range(3):
        got = mapped(f, xs)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


REFUSED = {
    "int": int,
    "float": float,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "<": lambda w: w < 1,
    ">=": lambda w: w >= 1j,
    "max": lambda w: max(w, 1),
    "sorted": lambda w: sorted([w, 1])[0],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_is_refused_as_by_python(name):
    def f(x):
        w = torch.complex(x, x * 0).item()
        return x * REFUSED[name](w) if x > 0 else x

    with pytest.raises(TypeError):
        f(XS[0])
    for _ in range(3):
        with pytest.raises(TypeError) as failure:
            vmap(f)(XS)
        assert failure.value.lanes == [0, 2]


def test_a_tensor_with_an_imaginary_part_raises_as_torch_does():
    def f(x):
        return x * float(torch.complex(x, x)) if x > 0 else x

    with pytest.raises(RuntimeError, match="cannot be converted to type double"):
        f(XS[0])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cannot be converted to type double"):
            vmap(f)(XS)
