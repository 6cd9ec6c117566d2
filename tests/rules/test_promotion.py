"""Dtypes and precision of operands without dims, and shapes without lanes, against the loop."""

import pytest
import torch

from lanewise import vmap


def _loop(f, in_dims, *inputs):
    lanes = next(x.shape[0] for x, dim in zip(inputs, in_dims) if dim == 0)
    return torch.stack([f(*[x[i] if dim == 0 else x for x, dim in zip(inputs, in_dims)]) for i in range(lanes)])


small = torch.full((2, 2), 1e-3)
factors = torch.tensor([1e5, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("f", [torch.mul, torch.div, torch.maximum, lambda a, b: b * a])
def test_a_double_of_no_dims_is_not_rounded_to_half(f, half):
    inputs = small.to(half), factors
    got, want = vmap(f)(*inputs), _loop(f, (0, 0), *inputs)
    assert got.dtype == want.dtype == half
    torch.testing.assert_close(got, want, rtol=0, atol=0)


WRITES = {
    **{name: getattr(torch.Tensor, name) for name in ("add_", "sub_", "mul_", "div_", "fmod_", "remainder_", "pow_")},
    **{name: getattr(torch.Tensor, name) for name in ("floor_divide_", "atan2_", "hypot_", "xlogy_", "nextafter_")},
    "scaled": lambda x, s: x.add_(s, alpha=3),
    "in three": lambda x, s: x.addcmul_(s, x, value=0.7),
    "divided in three": lambda x, s: x.addcdiv_(x * 1.5, s),
    "between": lambda x, s: x.lerp_(x * 2, s),
    "rounded down": lambda x, s: x.div_(s, rounding_mode="floor"),
    "of a list": lambda x, s: torch._foreach_add_([x], [s])[0],
    "product of a list": lambda x, s: torch._foreach_mul_([x], [s])[0],
    "quotient of a list": lambda x, s: torch._foreach_div_([x], [s])[0],
    "made of lists": lambda x, s: torch._foreach_mul([x, x.float()], [s, s])[0] + torch._foreach_div([x], [s])[0],
}


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_half_round_as_the_loop(name, half, wide):
    g = torch.Generator().manual_seed(0)
    xs = (torch.rand(4, 50, generator=g) * 3).to(half)
    numbers = (torch.rand(4, generator=g) * 7 + 1.1).to(wide)
    for in_dims in ((0, 0), (None, 0)):
        given = xs if in_dims[0] == 0 else xs[0], numbers
        write = lambda x, s: WRITES[name](x.clone(), s)
        torch.testing.assert_close(
            vmap(write, in_dims)(*given), _loop(write, in_dims, *given), rtol=0, atol=0, equal_nan=True
        )


COMPARED = {name: getattr(torch.Tensor, name) for name in ("eq_", "ne_", "lt_", "ge_")}


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*WRITES, *COMPARED])
def test_one_number_of_half_that_a_wider_one_is_written_to(name, half, wide):
    g = torch.Generator().manual_seed(0)
    xs = (torch.rand(200, generator=g) * 3 + 1.1).to(half)
    # Near to one of them, so that remainders tell how it is rounded.
    numbers = (xs[:3].double() * 1.0001).to(wide)
    write = lambda x, s: {**WRITES, **COMPARED}[name](x.clone(), s)
    for number in numbers:
        want = _loop(write, (0, None), xs, number)
        for got in (vmap(write, (0, None))(xs, number), vmap(lambda x, n=number: write(x, n.clone()))(xs)):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    got = vmap(vmap(write, (None, 0)), (0, None))(xs, numbers)
    want = torch.stack([torch.stack([write(x, number) for number in numbers]) for x in xs])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("f", "in_dims", "inputs"),
    [
        (lambda a, b: torch.where(b > 0, a, b), (0, 0), (torch.tensor([5, 6]), torch.ones(2, 2, dtype=torch.int8))),
        (lambda a, b: torch.where(b > 0, a, b), (0, 0), (factors, torch.ones(2, 2, dtype=torch.int32))),
        (lambda a, b: a.clamp(min=b), (None, 0), (torch.tensor(1.0, dtype=torch.float64), small.half())),
        (lambda a, b: a.clamp(min=b), (0, 0), (factors, small)),
    ],
)
def test_dtypes_of_three_operands(f, in_dims, inputs):
    got, want = vmap(f, in_dims=in_dims)(*inputs), _loop(f, in_dims, *inputs)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("layer", "one"),
    [
        (torch.nn.Conv2d(1, 2, 2), (1, 3, 4)),
        (torch.nn.Conv1d(1, 2, 2), (3, 1, 4)),
        (torch.nn.ConvTranspose2d(1, 2, 2), (1, 3, 4)),
        (torch.nn.AdaptiveAvgPool2d(2), (1, 4, 4)),
        (torch.nn.MaxPool2d(2), (5, 1, 4, 4)),
    ],
    ids=str,
)
def test_images_without_lanes(layer, one):
    want = layer(torch.zeros(one))
    images = torch.zeros(0, *one, requires_grad=True)
    got = vmap(layer)(images)
    assert got.shape == (0, *want.shape) and got.requires_grad


_MASK = torch.tensor([True, False, True])
SEVERAL = {
    "mask": (lambda x, m: x.masked_fill(m > 0, 2.5), (2, 3), (2, 3)),
    "mask of lower rank": (lambda x, m: x.masked_fill(m > 0, 2.5), (2, 3), (3,)),
    "mask of no dims": (lambda x, m: x.masked_fill(m > 0, 2.5), (2, 3), ()),
    "mask of higher rank": (lambda x, m: x.masked_fill(m > 0, 2.5), (3,), (2, 3)),
    "captured mask": (lambda x, m: (x * m).masked_fill(_MASK, 2.5), (2, 3), (3,)),
    "in place": (lambda x, m: (x * 2).masked_fill_(m > 0, 2.5), (2, 3), (3,)),
    "in place, captured": (lambda x, m: (x * m).masked_fill_(_MASK, 2.5), (2, 3), (3,)),
    "scaled sum": (lambda x, m: torch.add(x, m, alpha=3), (2, 3), (3,)),
    "scaled sum of no dims": (lambda x, m: torch.add(x, m, alpha=3), (2, 3), ()),
    "scaled sum of bools": (lambda x, m: torch.sub(x, m > 0, alpha=3) if m.dim() else x, (), ()),
    "three": (lambda x, m: torch.addcmul(x, m, x, value=2), (2, 3), (3,)),
    "three of which one is captured": (lambda x, m: torch.lerp(x, m, torch.ones(3, dtype=x.dtype)), (2, 3), (3,)),
    "limits": (lambda x, m: x.clamp(-0.5, 0.5) + torch.clamp(m, min=0.1), (2, 3), (3,)),
    "option": (lambda x, m: torch.nn.functional.gelu(x, approximate="tanh") * m, (2, 3), (3,)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_operands_and_options(name, dtype):
    f, *shapes = SEVERAL[name]
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(4, *shape, generator=g).mul(4).to(dtype) for shape in shapes]
    for in_dims in ((0, 0), (0, None), (None, 0)):
        given = [x if dim == 0 else x[1] for x, dim in zip(args, in_dims)]
        lanes = [[x[k] if dim == 0 else x for x, dim in zip(given, in_dims)] for k in range(4)]
        try:
            want = torch.stack([f(*lane) for lane in lanes])
        except RuntimeError:
            with pytest.raises((RuntimeError, IndexError)):
                vmap(f, in_dims)(*given)
            continue
        got = vmap(f, in_dims)(*given)
        assert got.dtype is want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want)
