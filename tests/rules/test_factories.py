"""Tensors made inside a mapped function: they take lane values; and lists of tensors, ranges, copies."""

import pytest
import torch

from lanewise import grad, jvp, vmap
from tests.rules.lanes import bools, check, ints, normal

aten = torch.ops.aten
MAKERS = {
    "zeros": lambda x: torch.zeros(3, dtype=x.dtype),
    "ones": lambda x: torch.ones(3, dtype=x.dtype),
    "full": lambda x: torch.full((3,), 2.0, dtype=x.dtype),
    "arange": lambda x: torch.arange(3.0, dtype=x.dtype),
    "linspace": lambda x: torch.linspace(0, 1, 3, dtype=x.dtype),
    "eye": lambda x: torch.eye(3, dtype=x.dtype)[1],
    "tensor": lambda x: torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0, 3.0], dtype=x.dtype),
    "zeros_like": lambda x: torch.zeros_like(CAPTURED),
    "ones_like": lambda x: torch.ones_like(CAPTURED),
    "full_like": lambda x: torch.full_like(CAPTURED, 4.0),
    "new_zeros": lambda x: CAPTURED.new_zeros(3),
    "new_full": lambda x: CAPTURED.new_full((3,), 5.0),
    "new_tensor": lambda x: CAPTURED.new_tensor([1.0, 2.0, 3.0]),
    "new_ones of a lane": lambda x: x.new_ones(3),
    "new_empty of a lane": lambda x: x.new_empty(3).zero_(),
    "empty_like of a lane": lambda x: torch.empty_like(x.expand(3)).zero_(),
    "clone": lambda x: CAPTURED.clone(),
    "to": lambda x: CAPTURED.float().to(x.dtype),
    "cumsum": lambda x: torch.ones(3, dtype=x.dtype).cumsum(0),
    "deepcopy": lambda x: torch.zeros(3, dtype=x.dtype).clone(),
}
CAPTURED = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)
WRITES = {
    "element": lambda t, x: t.__setitem__(1, x),
    "slice": lambda t, x: t.__setitem__(slice(1, None), x),
    "view": lambda t, x: t.view(3, 1)[2].copy_(x),
    "view before": lambda t, x: t[1:].mul_(x),
    "whole": lambda t, x: t.add_(x),
    "by index": lambda t, x: t.__setitem__(torch.tensor([0, 2]), x),
    "by mask": lambda t, x: t.__setitem__(torch.tensor([True, False, True]), x),
    "out": lambda t, x: torch.add(x, torch.ones(3, dtype=x.dtype), out=t),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", MAKERS)
def test_lane_values_written_into_what_was_made_inside(make, write):
    def f(x):
        t = MAKERS[make](x)
        early = t[1:]
        WRITES[write](t, x)
        return t * 1, early * 2

    check(f, normal(), grad=write != "out")
    assert torch.equal(CAPTURED, torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64))


FROM_LANES = {
    "tensor": lambda x: torch.tensor([x[0], 1, x[1]]),
    "as_tensor": lambda x: torch.as_tensor([[x[0], 1], [2, x[1]]]),
    "asarray": lambda x: torch.asarray([x[0], x[1]]),
    "asarray of a lane": lambda x: torch.asarray(x) * 1,
    "new_tensor": lambda x: x.new_tensor([[x[0], x[1]], (1, 2)]),
    "new_tensor of another dtype": lambda x: x.new_tensor([x[0], x[1]], dtype=torch.float32),
    "new_tensor of a captured tensor": lambda x: CAPTURED.new_tensor([x[0], x[1]]),
    "numbers": lambda x: torch.tensor([x[0].item(), int(x[1])]),
    "as_tensor of numbers": lambda x: torch.as_tensor([x[0].item(), 2]),
    "as_tensor of a number": lambda x: torch.as_tensor(float(x[0]), dtype=torch.float64),
    "asarray of numbers": lambda x: torch.asarray([x[0].item(), x[1].item()]),
    "asarray of integers": lambda x: torch.asarray([int(x[0]), 2]),
    "new_tensor of numbers": lambda x: x.new_tensor([x[0].item(), int(x[1])]),
    "new_tensor of a number": lambda x: CAPTURED.new_tensor(int(x[0])),
    "scalar_tensor": lambda x: torch.scalar_tensor(x[0].item(), dtype=torch.float64),
    "scalar_tensor of an integer": lambda x: torch.scalar_tensor(int(x[0])),
    "truth": lambda x: torch.as_tensor([bool(x[0] > 0), True]),
    "tensors and numbers": lambda x: torch.tensor([[x[0].float(), 1], [x[1].item(), int(x[0])]]),
    "half and numbers": lambda x: torch.tensor([x[0].half(), int(x[0]), 1]),
    "integers and numbers": lambda x: torch.as_tensor([x[0].long(), x[1].item()]),
    "FloatTensor": lambda x: torch.FloatTensor([[x[0], 1.0], [2, x[1].item()]]),
    "FloatTensor of a list of entries": lambda x: torch.FloatTensor(list(x)),
    "FloatTensor of numbers": lambda x: torch.FloatTensor([x[0].item(), 2.0]),
    "FloatTensor of constants": lambda x: torch.FloatTensor([1.0, 2.0]).mul_(x.float()),
    "LongTensor": lambda x: torch.LongTensor((x[0].long(), 3)),
    "of the type": lambda x: x.type(torch.FloatTensor),
    "an instance": lambda x: x.float() * isinstance(x.float(), torch.FloatTensor) * (torch.FloatTensor in KINDS),
    "the dtype of the type": lambda x: x.to(torch.LongTensor.dtype),
}
KINDS = {torch.FloatTensor: 1}


@pytest.mark.parametrize("name", FROM_LANES)
def test_made_from_lane_values(name):
    f = FROM_LANES[name]
    check(f, normal(2), grad=False)
    check(lambda x: f(x * 2) if x[0] > x[1] else f(-x), normal(2), grad=False)


@pytest.mark.parametrize("make", [torch.Tensor, torch.DoubleTensor])
@pytest.mark.parametrize("transform", [vmap, lambda f: lambda x: jvp(f, (x,), (x,))])
def test_constructors_that_read_python_numbers(make, transform):
    with pytest.raises(TypeError) as caught:
        transform(lambda x: make([x[0], x[0]]))(torch.ones(2, 2))  # Tensor(
    said = str(caught.value).splitlines()
    assert said[0] == (
        "len() of a 0-d tensor: torch.Tensor and torch.DoubleTensor, unlike torch.tensor, read each entry of a list as "
        "one Python number, which a value of this transform is not"
    )
    assert said[1].endswith("transform(lambda x: make([x[0], x[0]]))(torch.ones(2, 2))  # Tensor(")
    assert said[2:] == [
        "Write instead:",
        "  torch.tensor([x[0], x[1]], dtype=torch.float32)  # in place of torch.Tensor([x[0], x[1]])",
    ]
    with pytest.raises(TypeError, match=r"^len\(\) of a 0-d tensor$"):
        vmap(lambda x: x * len(x))(torch.ones(2))


def test_a_size_of_each_lane():
    xs = torch.tensor([0.5, 1.5, 0.7])
    out = vmap(lambda x: torch.FloatTensor(2, int(x) + 1).fill_(3).sum() + x)(xs)
    assert torch.equal(out, torch.tensor([6.5, 13.5, 6.7]))


def test_numbers_of_each_lane_take_one_run():
    runs = []

    def f(x):
        runs.append(0)
        number = x[0].item() if x[0] < 9 else 0.0
        return torch.as_tensor(number) + torch.scalar_tensor(number) + torch.asarray([number]) + x.new_tensor([number])

    vmap(f)(torch.randn(16, 2))
    assert len(runs) < 4


def test_a_captured_tensor_takes_no_lane_values():
    total = torch.zeros(3)
    with pytest.raises(RuntimeError, match="inplace arithmetic") as caught:
        vmap(lambda x: total.add_(x))(torch.ones(2, 3))
    assert "t = t.clone()" in str(caught.value)
    assert not total.any()


def test_what_the_message_advises_works():
    total = torch.ones(3, requires_grad=True)
    out = vmap(lambda x: torch.zeros_like(total).copy_(total).mul_(x))(torch.arange(6.0).view(2, 3))
    (grad,) = torch.autograd.grad(out.sum(), total)
    assert torch.equal(grad, torch.tensor([3.0, 5.0, 7.0]))


def test_copies_that_autograd_makes_stay_plain():
    """An in-place operation that overwrites what its gradient needs keeps a copy: of a captured tensor, a plain one."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    buffers = []

    def f(x):
        buffers.append((w * 2).clamp_min_(1.0))
        return (buffers[-1] * x).sum()

    out = vmap(f)(torch.ones(3, 2))
    (grad,) = torch.autograd.grad(out.sum(), w)
    assert type(grad) is torch.Tensor and torch.equal(grad, torch.full((2,), 6.0))


RANGES = {
    "linspace": (lambda a, b: torch.linspace(a, b, 5), normal(), normal()),
    "linspace one": (lambda a, b: torch.linspace(a, b, 1), normal(), normal()),
    "linspace ints": (lambda a, b: torch.linspace(a, b, 6, dtype=torch.int64), ints(-9, 0), ints(5, 19)),
    "linspace to": (lambda a: torch.linspace(a, 3.0, 4, dtype=torch.float64), normal()),
    "linspace from": (lambda b: torch.linspace(-2, b, 4, dtype=torch.float64), normal()),
    "logspace": (lambda a, b: torch.logspace(a, b, 4, 2.0, dtype=torch.float64), normal(), normal()),
    "logspace to": (lambda a: torch.logspace(a, 1.0, 3), normal()),
    "logspace from": (lambda b: torch.logspace(0.5, b, 3), normal()),
}


@pytest.mark.parametrize("name", RANGES)
def test_range(name):
    f, *makers = RANGES[name]
    check(f, *makers, grad=False)


@pytest.mark.parametrize("f", [torch.linspace, torch.logspace], ids=lambda f: f.__name__)
@pytest.mark.parametrize("from_number, to_number", [(False, False), (True, False), (False, True)])
def test_ranges_have_no_history(f, from_number, to_number):
    """As torch has it: results of tensors that are tracked are not, and have no tangent."""

    def run(a, b):
        return f(0.5 if from_number else a, 2.0 if to_number else b, 4)

    a, b = torch.rand(3), torch.rand(3) + 1
    assert not run(a[0].clone().requires_grad_(), b[0].clone().requires_grad_()).requires_grad
    assert not vmap(run)(a.clone().requires_grad_(), b.clone().requires_grad_()).requires_grad
    for got in (
        *grad(lambda a, b: vmap(run)(a, b).sum(), (0, 1))(a, b),
        *vmap(grad(lambda a, b: run(a, b).sum()))(a, b),
    ):
        assert not got.any()
    for out, tangent in (jvp(vmap(run), (a, b), (a, b)), jvp(run, (a[0], b[0]), (a[0], b[0]))):
        assert out.shape == tangent.shape and not tangent.any()
    assert torch.allclose(vmap(run)(a, b), torch.stack([run(i, j) for i, j in zip(a, b)]))


COPIES = {
    "fill": (lambda x, v: torch.fill(x, v), normal(2, 3), normal()),
    "fill_": (lambda x, v: torch.zeros_like(x).fill_(v), normal(2, 3), normal()),
    "copy": (lambda x, y: aten.copy(x, y), normal(2, 3), normal(3)),
    "fill_diagonal_": (lambda x: (x * 1).fill_diagonal_(7.0), normal(3, 4)),
    "fill_diagonal_ wrapped": (lambda x: (x * 1).fill_diagonal_(7.0, wrap=True), normal(7, 2)),
    "fill_diagonal_ cube": (lambda x: (x * 1).fill_diagonal_(7.0), normal(3, 3, 3)),
    "addmm_": (lambda x, a, b: torch.zeros_like(x).copy_(x).addmm_(a, b), normal(2, 3), normal(2, 4), normal(4, 3)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copy(name):
    f, *makers = COPIES[name]
    check(f, *makers, grad=name != "copy")


LISTS = {
    "add": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2),
    "add number": lambda x, y: torch._foreach_add([x, y], 2.0),
    "mul numbers": lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0]),
    "addcmul": lambda x, y: torch._foreach_addcmul([x, y], [y, x], [x, x], value=0.5),
    "lerp": lambda x, y: torch._foreach_lerp([x, y], [y, x], 0.3),
    "exp": lambda x, y: torch._foreach_exp([x, y]),
    "norm": lambda x, y: torch._foreach_norm([x, y], 2),
    "max": lambda x, y: torch._foreach_max([x, y]),
    "maximum": lambda x, y: torch._foreach_maximum([x, y], [y, x]),
    "pow": lambda x, y: torch._foreach_pow(2.0, [x, y]),
}


@pytest.mark.parametrize("name", LISTS)
def test_list(name):
    f = LISTS[name]
    check(lambda x, y: tuple(f(x, y)), normal(2, 3), normal(2, 3))


def test_lists_in_place():
    def f(x, y):
        a, b = torch.zeros_like(x).copy_(x), torch.zeros_like(y).copy_(y)
        torch._foreach_mul_([a, b], [y, x])
        torch._foreach_add_([a, b], 1.0)
        torch._foreach_sqrt_([a.abs_(), b.abs_()])
        return a, b

    check(f, normal(2, 3), normal(2, 3), grad=False)


def test_wheres_lerps_and_clamps():
    check(lambda x, a, b: torch.clamp(x, a, b + 1), normal(2, 3), normal(2, 3), normal())
    check(lambda x, b: torch.clamp(x, max=b), normal(2, 3), normal(3))
    check(lambda m, x: torch.where(m, x, 2.5), bools(3), normal(2, 3))
    check(lambda m, x: torch.where(m, 1.0, x), bools(2, 1), normal(3))
    check(lambda x, y, w: torch.lerp(x, y, w), normal(3), normal(2, 3), normal())
    check(lambda x, y: torch.lerp(x, y, 0.3), normal(3), normal(3))


@pytest.mark.parametrize("levels", [1, 2])
def test_blank_tensors_take_lane_values(levels):
    """torch.empty and its kin, whose names lead elsewhere while a level is open, and back when it has closed."""
    names = torch.empty, torch.empty_like, torch.empty_strided

    def f(x):
        blanks = torch.empty(2), torch.empty_like(CAPTURED), torch.empty_strided((2, 2), (2, 1))
        for blank in blanks:
            blank[:] = 1
            blank[1] = x
        return blanks

    xs = torch.arange(6.0).view(2, 3) if levels == 2 else torch.arange(3.0)
    got = vmap(vmap(f))(xs) if levels == 2 else vmap(f)(xs)
    want = [torch.stack(column) for column in zip(*[f(x) for x in xs.flatten()], strict=True)]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.flatten(0, levels - 1), b)
    assert (torch.empty, torch.empty_like, torch.empty_strided) == names
    with pytest.raises(ZeroDivisionError):
        vmap(lambda x: 1 / 0)(xs)
    assert torch.empty is names[0]


def test_blank_leaves_and_modules():
    def f(x):
        w = torch.empty(3, requires_grad=True)
        assert w.requires_grad and w.is_leaf
        torch.manual_seed(0)
        return torch.nn.Linear(2, 2)(x)

    xs = torch.randn(3, 2)
    got = vmap(f, randomness="same")(xs)
    torch.manual_seed(0)
    torch.testing.assert_close(got, torch.nn.Linear(2, 2)(xs))


TENSORS = {
    "tensor": lambda x: torch.tensor([x[0], x[1]]),
    "nested": lambda x: torch.tensor([[x[0], 1.0], [2, x[1]]]),
    "of one element": lambda x: torch.tensor([x[:1], x[1]]),
    "as_tensor": lambda x: torch.as_tensor([[x[1], x[0] + 1]]),
    "dtype": lambda x: torch.tensor((x[0], 3), dtype=torch.float32),
    "promoted": lambda x: torch.tensor([x[0].float(), 1, True]),
    "numbers": lambda x: torch.tensor([1, 2]) + x[0],
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_lane_values(name):
    def detached(x):
        return TENSORS[name](x.detach())

    check(detached, normal(2), grad=False)
    leaf = vmap(lambda x: torch.tensor([x[0], x[1]], requires_grad=True).requires_grad * x)(torch.ones(2, 2))
    assert leaf.tolist() == [[1.0, 1.0], [1.0, 1.0]]
