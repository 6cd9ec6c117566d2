"""NumPy arrays of lane values: each lane has its own, those that agree share one."""

import gc
import weakref

import numpy
import pytest
import torch

from lanewise import errors, vmap
from lanewise._core.python import arrays
from tests.control.compositions import COMPOSITIONS, SECOND, check_as_the_loop

XS = torch.tensor([[1.0, 2.0], [3.0, -1.0], [1.0, 2.0]])


def and_back(x, k):
    return x * torch.from_numpy(x.detach().numpy())


def by_function(x, k):
    return x * torch.from_numpy(numpy.sin(x.detach().numpy()))


def by_ufunc(x, k):
    return x * numpy.multiply(x.detach().numpy(), 2.0).sum() + torch.as_tensor(x.detach().numpy() * 2)


def by_number(x, k):
    return x * int(numpy.argmax(x.detach().numpy())) + float(numpy.asarray(x.detach()).std())


def by_index(x, k):
    order = numpy.argsort(x.detach().numpy())
    return x[torch.from_numpy(order)] * torch.tensor(k.numpy() + order)


def by_branch(x, k):
    if (x.detach().numpy() > 0).all() or k.numpy() == 2:
        return x.exp()
    return x * float(numpy.array(k.numpy(), dtype=numpy.float64))


def in_a_loop(x, k):
    while numpy.abs(x.detach().numpy()).max() > 0.5:
        x = x / 2
    return x


def by_view(x, k):
    y = x.detach().clone()
    torch.from_numpy(y.numpy()).mul_(3.0)
    torch.as_tensor(y.numpy())[0] = 1.0
    return x * y


PROGRAMS = [and_back, by_function, by_ufunc, by_number, by_index, by_branch, in_a_loop, by_view]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program, composition):
    check_as_the_loop(program, composition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool])
def test_what_comes_back(dtype):
    xs = XS.to(dtype)
    for f in (
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.as_tensor(x.numpy()),
        lambda x: torch.tensor(x.numpy()),
        lambda x: torch.from_numpy(numpy.asarray(x) + numpy.asarray(x)),
    ):
        got, want = vmap(f)(xs), torch.stack([f(x) for x in xs])
        assert got.dtype == want.dtype and got.equal(want)


def test_lanes_that_agree_share_an_array():
    seen = []
    vmap(lambda x: seen.append(x.numpy().tolist()) or x)(XS)
    assert seen == [[1.0, 2.0], [3.0, -1.0]]


def test_no_lanes():
    assert vmap(lambda x: torch.from_numpy(numpy.sin(x.numpy())))(torch.zeros(0, 3)).shape == (0, 3)


def test_arrays_are_not_written_to():
    """The lanes would not see it."""

    def f(x):
        x.numpy()[0] = 5.0
        return x

    with pytest.raises(ValueError, match="read-only"):
        vmap(f)(XS)


def test_what_has_no_lanes_is_its_memory():
    table = torch.zeros(2)

    def f(x):
        table.numpy()[0] = 1.0
        return x + table

    assert vmap(f)(XS).equal(XS + torch.tensor([1.0, 0.0]))


def test_what_is_differentiated_has_none():
    with pytest.raises(errors.TransformError, match="Can't call numpy.. on Tensor that requires grad"):
        vmap(lambda x: torch.from_numpy(x.numpy()))(XS.clone().requires_grad_())


def test_an_array_keeps_its_tensor_and_no_longer():
    kept, tensors = [], []
    vmap(lambda x: kept.append(x.numpy()) or tensors.append(weakref.ref(x)) or x)(XS)
    assert arrays._tensors and tensors[0]() is not None
    kept.clear()
    gc.collect()
    assert all(tensor() is None for tensor in tensors)
    assert not arrays._tensors


def test_arrays_that_outlive_the_lanes():
    kept = []
    vmap(lambda x: kept.append(x.numpy()) or x)(XS)
    assert kept[1].tolist() == [3.0, -1.0]
    assert torch.tensor(kept[1]).tolist() == [3.0, -1.0]
