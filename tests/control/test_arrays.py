"""NumPy arrays of lane values: each lane has its own, those that agree share one."""

import gc
import weakref

import numpy
import pytest
import scipy.interpolate
import scipy.optimize
import scipy.stats
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


def asarray(value):
    return [value]


def as_tensor(value):
    return {"value": value}


def tensor(value):
    yield value


SPLINE = scipy.interpolate.interp1d([0.0, 1.0, 2.0], [0.0, 2.0, 1.0])

# Functions of NumPy and of the user's that have the names of torch's, of numbers of each lane.
OF_NUMBERS = {
    "list": lambda x: float(numpy.asarray(x.tolist()).sum()),
    "number": lambda x: float(numpy.asarray(x[0].item()) * 2),
    "kind": lambda x: isinstance(numpy.asarray(x[0].item()), numpy.ndarray),
    "dtype": lambda x: float(numpy.asarray(x[0].item(), dtype=numpy.float64)),
    "dtype by place": lambda x: int(numpy.asarray([int(x[0]), 2], numpy.int32).sum()),
    "array": lambda x: float(numpy.array([x[0].item(), 2.0]).sum()),
    "any array": lambda x: float(numpy.asanyarray([x[0].item(), 2.0]).sum()),
    "shape": lambda x: numpy.asarray(x.tolist()).shape[0],
    "back": lambda x: torch.from_numpy(numpy.asarray(x.tolist())),
    "as tensor": lambda x: torch.as_tensor(numpy.asarray([x[0].item(), 2.0])),
    "torch's tensor": lambda x: torch.tensor([x[0].item(), 2.0]),
    "torch's as_tensor": lambda x: torch.as_tensor([x[0].item(), 1]),
    "torch's asarray": lambda x: torch.asarray([int(x[0]), 1]),
    "torch's scalar_tensor": lambda x: torch.scalar_tensor(int(x[0])),
    "torch's new_tensor": lambda x: x.new_tensor([int(x[0]), 1]),
    "SciPy's norm": lambda x: float(scipy.stats.norm.cdf(float(x[0]))),
    "SciPy's interpolation": lambda x: float(SPLINE(float(x[0]))),
    "SciPy's root": lambda x: float(scipy.optimize.brentq(lambda y: y**3 - float(x[0]), a=-2, b=2)),
    "SciPy's least": lambda x: float(scipy.optimize.minimize_scalar(fun=lambda y: (y - float(x[0])) ** 2).fun),
    "own asarray": lambda x: asarray(x[0].item())[0] * 2,
    "own as_tensor": lambda x: as_tensor(x[0].item())["value"] * 2,
    "own generator": lambda x: next(tensor(x[0].item())) * 2,
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_functions_with_names_of_torch_s(name):
    f = OF_NUMBERS[name]
    rows = torch.tensor([[1.5, -2.0], [0.25, 3.0], [1.5, 1.0]])
    for xs in (rows, rows[:1], rows):
        loop = torch.stack([torch.as_tensor(f(x)) for x in xs])
        result = vmap(f)(xs)
        assert result.dtype is loop.dtype
        assert torch.equal(result, loop)
        parting = vmap(lambda x: f(x) if x[1] > 0 else f(x))(xs)
        assert torch.equal(parting, loop)
