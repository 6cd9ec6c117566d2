"""Python numbers that differ from lane to lane, as operands of tensors of any dtype: bit for bit as in the loop."""

import math

import pytest
import torch

from lanewise import grad, vmap

FLOATS = [1.1, 1e10, -0.37, 0.0999, 3.0000001, 65519.0, 0.5, 1e-9]
WHOLE = [3, -2, 40000, 2049, 1, 7, -1, 2**24 + 1]
LARGE = [2**53 + 1, -(2**60) + 3, 2**40 + 1, 9, 2**62, 2**31, -5, 2**63 - 1]
TRUTHS = [True, False, False, True, True, False, True, True]
XS = [1.3, 2.7, -0.37, 0.1, 3.0, 100.5, 5.5, 2048.0]
NS = [1, 2, -3, 4, 5, 3, 7, 2**24 + 1]

OPERATIONS = {
    "mul": lambda x, k: x * k,
    "rmul": lambda x, k: k * x,
    "add": lambda x, k: x + k,
    "sub": lambda x, k: x - k,
    "sub_": lambda x, k: x.clone().sub_(k),
    "torch.subtract": lambda x, k: torch.subtract(x, other=k),
    "rsub": lambda x, k: k - x,
    "div": lambda x, k: x / k,
    "rdiv": lambda x, k: k / x,
    "floordiv": lambda x, k: x // k,
    "rfloordiv": lambda x, k: k // x,
    "mod": lambda x, k: x % k,
    "rmod": lambda x, k: k % x,
    "rpow": lambda x, k: abs(k) ** x,
    "gt": lambda x, k: x > k,
    "rgt": lambda x, k: k > x,
    "eq": lambda x, k: x == k,
    "and": lambda x, k: x & k,
    "rshift": lambda x, k: x >> k,
    "torch.mul": lambda x, k: torch.mul(x, k),
    "torch.true_divide": lambda x, k: torch.true_divide(k, x),
    "floor": lambda x, k: torch.div(x, k, rounding_mode="floor"),
    "trunc": lambda x, k: torch.div(x, k, rounding_mode="trunc"),
    "alpha": lambda x, k: torch.add(x, x, alpha=k),
    "mul_": lambda x, k: x.clone().mul_(k),
    "div_": lambda x, k: x.clone().div_(k),
    "add_": lambda x, k: x.clone().add_(k),
    "fill_": lambda x, k: x.clone().fill_(k),
    "clamp": lambda x, k: torch.clamp(x, 0.5, k),
    "clamp by name": lambda x, k: x.clamp(max=k),
    "clamp_min": lambda x, k: x.clamp_min(k),
    "where": lambda x, k: torch.where(x > 0, k, x),
    "masked_fill": lambda x, k: x.masked_fill(x > 0, k),
    "full": lambda x, k: torch.full((2,), k),
    "full_like": lambda x, k: torch.full_like(x, k),
    "new_full": lambda x, k: x.new_full((2,), k),
    "fmod": lambda x, k: torch.fmod(x, k),
    "float_power of": lambda x, k: torch.float_power(k, x),
    "lerp": lambda x, k: torch.lerp(x, x * 2, k),
    "xlogy": lambda x, k: torch.xlogy(x.abs(), k),
    "maximum": lambda x, k: torch.maximum(x, k),
    "number first": lambda x, k: torch.gt(k, x),
    "sin": lambda x, k: torch.sin(k),
    "chain": lambda x, k: (x * (k * 2)).sum() + abs(k) * x,
    "entry": lambda x, k: torch.index_put(x.reshape(-1), (torch.tensor(0),), x.reshape(-1)[0] * k),
}
# Powers are the loop's but for the last digit: torch multiplies for some, and takes others with more digits.
POWERS = {
    "pow": lambda x, k: x**k,
    "torch.pow": lambda x, k: torch.pow(x, k),
    "pow_": lambda x, k: x.clone().pow_(k),
    "float_power": lambda x, k: torch.float_power(x, k),
}
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATING, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def check(f, xs, ks, rtol):
    wants, errors = [], {}
    for place, (x, k) in enumerate(zip(xs, ks)):
        try:
            wants.append(f(x, k))
        except Exception as error:
            errors[place] = type(error)
    if errors:
        with pytest.raises(tuple(set(errors.values()))) as caught:
            vmap(f)(xs, ks)
        lanes = getattr(caught.value, "lanes", range(len(ks)))
        assert all(errors.get(lane) is caught.type for lane in lanes)
        return
    got, want = vmap(f)(xs, ks), torch.stack(wants)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("dims", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_the_loop(dtype, dims):
    xs = torch.tensor(XS if dtype.is_floating_point else NS)
    if dtype.itemsize == 1:
        xs = xs.clamp(-100 if dtype.is_signed else 0, 100)
    xs = xs.to(dtype)
    if dims:
        xs = torch.stack([xs, xs + 1 if dtype is not torch.bool else ~xs], 1)
    wrong = []
    for numbers in (FLOATS, WHOLE, LARGE, TRUTHS):
        ks = torch.tensor(numbers, dtype=torch.float64 if numbers is FLOATS else None)
        for name, operation in {**OPERATIONS, **POWERS}.items():
            f = lambda x, k, operation=operation: operation(x, k.item())
            short = dtype in (torch.float16, torch.bfloat16)
            try:
                last_digit = 4e-16 if name == "float_power" else 0.0  # which has 64 bits always
                check(f, xs, ks, 3e-7 if name in POWERS and not short else last_digit)
            except BaseException as error:
                wrong.append((name, numbers[0], str(error)[:300]))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mul", "div", "rdiv", "add", "lerp"])
def test_gradients_of_short_floats(name, dtype):
    xs, ks = torch.tensor(XS, dtype=dtype), torch.tensor([1.1, 1e4, -0.37, 0.0999, 3.0000001, 655.0, 0.5, 1e-3])
    f = lambda x, k: OPERATIONS[name](x, k.item())

    def plain(x, k):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(f(leaf, k), leaf)[0]

    want = torch.stack([plain(x, k) for x, k in zip(xs, ks)])
    assert torch.equal(vmap(grad(f))(xs, ks), want)
    assert torch.equal(grad(lambda xs: vmap(f)(xs, ks).sum())(xs), want)
    both = vmap(vmap(f, (None, 0)), (0, None))(xs, ks)
    assert torch.equal(both, torch.stack([torch.stack([f(x, k) for k in ks]) for x in xs]))


def test_chosen_numbers_do_not_overflow():
    """As in `k = 1.1 if x > 0 else 1e10`: float16 does not hold the second."""
    f = lambda x: x * (1.1 if x > 0.05 else 1e10)
    xs = torch.tensor([1.0, 1e-6, 0.3, 0.0, -1e-6], dtype=torch.float16)
    assert torch.equal(vmap(f)(xs), torch.stack([f(x) for x in xs]))


OPERANDS = [torch.mul, torch.div, torch.add, torch.sub, torch.hypot, torch.fmod, torch.atan2, torch.logical_and]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", OPERANDS, ids=lambda f: f.__name__)
def test_tensors_without_dims(operation, dtype):
    """Products and quotients take a second operand of float32 without dims as it is; others round it first."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(40, 3, generator=generator).to(dtype)
    ts = torch.randn(40, generator=generator) * 10.0 ** torch.randint(-9, 3, (40,), generator=generator)
    want = torch.stack([operation(x, t) for x, t in zip(xs, ts)])
    torch.testing.assert_close(vmap(operation)(xs, ts), want, rtol=0, atol=0, equal_nan=True)


# --- numbers with numbers ---------------------------------------------------------------------------------------------

VALUES = torch.tensor([0.75, -1.5, 2.25, 0.1, -0.0, 4.0], dtype=torch.float64)
SIGNED = [
    lambda a: repr(a % 2),
    lambda a: repr(divmod(a, -2.0)),
    lambda a: repr(-0.0 % a),
    lambda a: (0.0 if a > 0 else -0.0).hex(),
    lambda a: math.atan2(0.0, 0.0 if a > 0 else -0.0),
    lambda a: round(a > 0, -1),
    lambda a: math.frexp(0.0 if a > 0 else -0.0)[0].hex(),
]


@pytest.mark.parametrize("place", range(len(SIGNED)))
def test_signs_of_zeros(place):
    f = lambda x: SIGNED[place](x.item())

    def run():
        return vmap(f, out_dims="list")(VALUES)

    want = [next(iter([f(x)])) if place != 2 or x != 0 else None for x in VALUES]
    if None in want:
        with pytest.raises(ZeroDivisionError):
            run()
        want.pop(4)
        assert vmap(f, out_dims="list")(VALUES[VALUES != 0]) == want
    else:
        assert [repr(value) for value in run()] == [repr(value) for value in want]


@pytest.mark.parametrize("shift", [lambda a: a << 2, lambda a: a >> 1, lambda a: 3 << a, lambda a: (a or 1) << 1])
def test_floats_are_not_shifted(shift):
    with pytest.raises(TypeError):
        vmap(lambda x: torch.tensor(shift(x.item() if x > -2 else 2)))(VALUES)
    with pytest.raises(TypeError):
        vmap(lambda x: torch.tensor(shift(2 if x > 0 else x.item())))(VALUES)
