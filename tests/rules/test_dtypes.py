"""Dtypes and roundings of one operation, bit for bit those of the loop: half precision, whole numbers, uint8 masks."""

import pytest
import torch
import torch.nn.functional as F

from lanewise import vmap

HALF = (torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)


def drawn(dtype, *shape):
    numbers = torch.randn(4, *shape, generator=torch.Generator().manual_seed(sum(shape))) * 3
    return (numbers.abs() if dtype is torch.uint8 else numbers).to(dtype)


def same_as_loop(f, *args, every=True, rtol=0.0):
    """Each argument mapped, and each alone, the others captured; values, dtypes and shapes."""
    choices = [[True] * len(args)]
    if every and len(args) > 1:
        choices += [[k == j for j in range(len(args))] for k in range(len(args))]
    for mapped in choices:
        given = [arg if on else arg[1] for arg, on in zip(args, mapped)]
        rows = [f(*[arg[i] if on else arg for arg, on in zip(given, mapped)]) for i in range(4)]
        got = vmap(f, in_dims=tuple(0 if on else None for on in mapped), randomness="same")(*given)
        rows, got = ([[row] for row in rows], [got]) if isinstance(got, torch.Tensor) else (rows, got)
        for column, result in zip(zip(*rows, strict=True), got, strict=True):
            torch.testing.assert_close(result, torch.stack(column), rtol=rtol, atol=0, equal_nan=True)


PRODUCTS = {
    "addmv": (torch.addmv, (6,), (6, 5), (5,)),
    "addmv of a number": (torch.addmv, (), (6, 5), (5,)),
    "addmm": (torch.addmm, (6, 4), (6, 5), (5, 4)),
    "addr": (torch.addr, (6, 5), (6,), (5,)),
    "addr of a row": (torch.addr, (5,), (6,), (5,)),
    "baddbmm": (torch.baddbmm, (3, 6, 4), (3, 6, 5), (3, 5, 4)),
    "baddbmm of a number": (torch.baddbmm, (), (3, 6, 5), (3, 5, 4)),
    "addbmm": (torch.addbmm, (6, 4), (3, 6, 5), (3, 5, 4)),
    "addbmm of a number": (torch.addbmm, (), (3, 6, 5), (3, 5, 4)),
}


@pytest.mark.parametrize("dtype", (*HALF, *WHOLE), ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_added_products(name, dtype):
    op, *shapes = PRODUCTS[name]
    args = [drawn(dtype, *shape) for shape in shapes]
    same_as_loop(op, *args)
    same_as_loop(lambda *args: op(*args, beta=2, alpha=3), *args)
    if op is not torch.addr and dtype in WHOLE:
        same_as_loop(lambda *args: op(*args, beta=0.5, alpha=1.5), *args)


def test_addr_promotes_what_it_adds_to_as_a_matrix():
    a, b, c = drawn(torch.float32), drawn(torch.int64, 2), drawn(torch.float16, 3)
    same_as_loop(torch.addr, a, b, c)
    same_as_loop(torch.addr, drawn(torch.float32, 2, 3), b, c)
    masks = [drawn(torch.float32, *shape) > 0 for shape in ((2, 3), (2,), (3,))]
    same_as_loop(torch.addr, *masks)
    same_as_loop(lambda *args: torch.addr(*args, beta=3, alpha=2), *masks)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "dot",
    [
        torch.dot,
        torch.vdot,
        torch.matmul,
        torch.inner,
        torch.linalg.vecdot,
        lambda a, b: a @ b,
        lambda a, b: a @ b if a[0] > 0 else b @ a,
    ],
)
def test_dots_round_once(dot, dtype):
    same_as_loop(dot, drawn(dtype, 20), drawn(dtype, 20))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_normal_numbers_round_as_for_one_example(dtype):
    mean, std = drawn(dtype, 20), drawn(dtype, 20).abs()
    for f in (
        lambda mean, std: torch.normal(mean, std),
        lambda mean, std: torch.normal(mean, std.float()),
        lambda mean, std: torch.normal(mean, 0.3),
        lambda mean, std: torch.normal(0.3, std),
    ):
        same_as_loop(lambda mean, std, f=f: (torch.manual_seed(0), f(mean, std))[1], mean, std, every=False)


@pytest.mark.parametrize("found", [torch.all, torch.any])
def test_truth_of_whole_numbers(found):
    numbers = torch.tensor([[0, 2], [3, 1], [0, 0], [255, 4]], dtype=torch.uint8)
    for options in ({}, {"dim": 0}, {"dim": ()}, {"dim": (), "keepdim": True}, {"dim": (0,)}):
        same_as_loop(lambda x, options=options: found(x, **options), numbers)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
def test_masks_of_whole_numbers():
    mask = torch.tensor([[1, 2, 0], [3, 0, 5], [255, 1, 0], [0, 7, 7]], dtype=torch.uint8)
    same_as_loop(lambda x, mask: x[mask], drawn(torch.float32, 3), mask)
    for other in (drawn(torch.float64, 3), drawn(torch.float64)):
        same_as_loop(torch.where, mask[:, 2], drawn(torch.float32, 3), other)


def test_losses_of_logits_and_targets_of_two_dtypes():
    for logits, target, weight in ((torch.float32, torch.float16, torch.float32), (HALF[1], HALF[0], HALF[1])):
        x, y, w = drawn(logits), drawn(target).sigmoid(), drawn(weight).abs()
        same_as_loop(F.binary_cross_entropy_with_logits, x, y)
        same_as_loop(lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w), x, y, w)
        same_as_loop(lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w, reduction="none"), x, y, w)


def test_blocks_promote_as_they_are():
    same_as_loop(torch.block_diag, drawn(torch.float32), drawn(torch.float16, 2, 3))
    same_as_loop(torch.block_diag, drawn(torch.int64), drawn(torch.int16, 2, 2), drawn(torch.int8, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_of_nothing(dtype):
    same_as_loop(torch.median, drawn(dtype, 0))
    same_as_loop(torch.nanmedian, drawn(dtype, 0, 3))
    if dtype.is_floating_point:
        tracked = drawn(dtype, 0, 3).requires_grad_()
        assert vmap(torch.median)(tracked).isnan().all()
    same_as_loop(lambda x: torch.searchsorted(x, 1.5), drawn(dtype, 0))
    same_as_loop(lambda x: torch.bucketize(1.5, x), drawn(dtype, 0))


def test_one_value_is_filled_in_of_whatever_dtype():
    def fill(x, mask, value):
        x = x.clone()
        x[mask] = value
        return x

    x, mask = drawn(torch.int64, 3), drawn(torch.float32, 3) > 0
    same_as_loop(fill, x, mask, drawn(torch.float32))
    same_as_loop(fill, x, mask, drawn(torch.float64, 1))
    same_as_loop(lambda x, mask, value: x.index_put((mask,), value), x, mask, drawn(torch.float32))


LISTS = {
    "add": lambda x, y, z: torch._foreach_add([x, y], [z, y]),
    "addcdiv": lambda x, y, z: torch._foreach_addcdiv([x, y], [z, z], [y, y], [2.0, 3.0]),
    "addcdiv by a tensor": lambda x, y, z: torch._foreach_addcdiv([x, y], [z, z], [y, y], torch.tensor([0.5, 2])),
    "addcmul": lambda x, y, z: torch._foreach_addcmul([x, y], [y, y], [z, z], value=3),
    "lerp": lambda x, y, z: torch._foreach_lerp([x, y], [z, z], [y, y]),
    "mul by a number": lambda x, y, z: torch._foreach_mul([x, y, z], torch.tensor(2.5)),
    "maximum": lambda x, y, z: torch._foreach_maximum([x, y], [z, y]),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_in_which_some_entries_have_no_lanes(name):
    # Four lanes, and four columns: what is not aligned broadcasts all the same.
    shapes = [((), (4,), ()), ((2, 4), (4,), (4,)), ((4,), (2, 4), ()), ((4,), (), (4,))]
    for x, y, z in shapes:
        same_as_loop(LISTS[name], *[drawn(torch.float64, *shape) for shape in (x, y, z)])
    same_as_loop(LISTS[name], drawn(torch.float16, 4), drawn(torch.float16), drawn(torch.float16, 4))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # by torch's ldexp
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["div", "atan2", "copysign", "ldexp", "xlogy", "remainder", "pow", "lt", "float_power"]
)
def test_numbers_of_a_wider_dtype(name, dtype):
    op, small = getattr(torch, name), drawn(dtype, 2).abs().clamp(min=1)
    # Without AVX-512, torch's powers of several numbers differ in the last digit from those of each.
    rtol = 4e-16 if name == "float_power" else 0.0
    for numbers in (torch.tensor([-3, 300, 5, 7]), torch.tensor([-0.9, 9.0, 1.5, 0.3], dtype=torch.float64)):
        same_as_loop(op, small, numbers, rtol=rtol)
        same_as_loop(lambda a, b: op(b, a), small, numbers, rtol=rtol)


@pytest.mark.parametrize("change", [torch._foreach_add, torch._foreach_mul, torch._foreach_div])
def test_numbers_for_lists_are_numbers(change):
    small, image = drawn(torch.bfloat16), drawn(torch.int32, 2, 3)
    for number in (drawn(torch.float64), drawn(torch.float16), drawn(torch.int64).clamp(min=1)):
        same_as_loop(lambda x, y, s: change([x, y], s)[1], small, image, number)
        same_as_loop(lambda x, s: change([x], s)[0].dtype.itemsize * torch.ones(()), small, number)
