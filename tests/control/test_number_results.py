"""Python numbers that a mapped function returns: their type does not depend on what lanes happen to hold."""

import dataclasses
import math

import pytest
import torch

from lanewise import cond, grad, jacfwd, jacrev, jvp, vjp, vmap
from lanewise._control.runs import pacing
from lanewise._transforms.parting import parted
from lanewise.errors import LaneValueError

ROWS = torch.tensor([[1.0, 2.0], [1.0, 3.0], [-1.0, 2.0]])


def steps(x):
    count = 0
    while x.abs().sum() < 20:
        x, count = x * 2, count + 1
    return count


def early(x):
    for place, entry in enumerate(x):
        if entry > 1.5:
            return place
    return -1


def with_constants(x):
    if x.sum() > 2:
        x = -x
    return x, 3, 2.5, True, 1j


@dataclasses.dataclass
class Found:
    value: torch.Tensor
    place: int


def as_numpy(x):
    return x.numpy().sum()


def by_generator(x):
    return sum(entry for entry in x.tolist())


def first_with_aux(x):
    return (x * x).sum(), x.sum().item()


FUNCTIONS = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum() > 3),
    "complex": lambda x: complex(x.sum()),
    "not": lambda x: not x.sum() > 3,
    "tolist": lambda x: x.tolist(),
    "steps": steps,
    "early": early,
    "constants": with_constants,
    "len": lambda x: len(x[x > 0]),
    "shape": lambda x: tuple(x[x > 0].shape),
    "numel": lambda x: (x[x > 0].numel(), 4),
    "of a selection": lambda x: (x[x > 0].sum(), 4),
    "nonzero": lambda x: (x.clamp_min(0).nonzero().sum(), 4),
    "unique": lambda x: (x.unique().sum(), 4),
    "bincount": lambda x: (x.abs().long().bincount().sum(), 4),
    "repeats": lambda x: (x.repeat_interleave(x.abs().long()).sum(), 4),
    "equal": lambda x: torch.equal(x, x.abs()),
    "sorted": lambda x: sorted(x.tolist())[0],
    "generator": by_generator,
    "numpy": as_numpy,
    "math": lambda x: math.floor(x.sum()),
    "cond": lambda x: (cond(x.sum() > 2, torch.sin, torch.cos, (x,)), 7),
    "text": lambda x: len(f"{x.sum().item():.1f}"),
    "dataclass": lambda x: Found(x, int(x[0])),
    "dict": lambda x: {"a": x.sum().item(), "b": [1, "text", None]},
    "grad": lambda x: grad(first_with_aux, has_aux=True)(x),
    "jacrev": lambda x: jacrev(first_with_aux, has_aux=True)(x),
    "jacfwd": lambda x: jacfwd(first_with_aux, has_aux=True)(x),
    "jvp": lambda x: jvp(first_with_aux, (x,), (x,), has_aux=True),
    "vjp": lambda x: vjp(first_with_aux, x, has_aux=True)[::2],
    "distribution": lambda x: (torch.distributions.Normal(x, x.abs()).log_prob(x), 3),
}


def kinds(result):
    """What each leaf of a result is, without numbers and the number of lanes."""
    if dataclasses.is_dataclass(result):
        return kinds(vars(result))
    if isinstance(result, dict):
        return {name: kinds(part) for name, part in result.items()}
    if isinstance(result, (list, tuple)):
        return [kinds(part) for part in result]
    return (result.dtype, result.shape[1:]) if isinstance(result, torch.Tensor) else result


def same(result, examples):
    """Whether a result is that of a loop over examples."""
    if dataclasses.is_dataclass(result):
        return same(vars(result), [vars(example) for example in examples])
    if isinstance(result, dict):
        return all(same(part, [example[name] for example in examples]) for name, part in result.items())
    if isinstance(result, (list, tuple)):
        return all(same(part, [example[place] for example in examples]) for place, part in enumerate(result))
    if isinstance(result, torch.Tensor):
        wanted = torch.stack([torch.as_tensor(example) for example in examples])
        return result.dtype is wanted.dtype and torch.equal(result, wanted)
    return all(result == example for example in examples)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("first", ["agreeing", "differing", "differing, in loops"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_type_does_not_depend_on_the_lanes(name, first, monkeypatch):
    monkeypatch.setattr(pacing, "FREE", 1.0 if "loops" in first else 0.0)
    f = FUNCTIONS[name]
    parted.clear()
    inputs = [ROWS[:1].repeat(3, 1), ROWS, ROWS[:2], ROWS[1:2], ROWS.repeat(5, 1)]
    wanted = kinds(vmap(f)(ROWS))
    parted.clear()
    for rows in inputs if first == "agreeing" else inputs[::-1]:
        for _ in range(2):
            result = vmap(f)(rows)
            assert kinds(result) == wanted
            assert same(result, [f(row) for row in rows])
    assert kinds(vmap(f)(ROWS[:0])) == wanted
    assert kinds(vmap(f, chunk_size=2)(ROWS)) == kinds(vmap(f, chunk_size=1)(ROWS)) == wanted
    pairs = vmap(vmap(f))(torch.stack([ROWS, ROWS]))
    assert same(pairs, [vmap(f)(ROWS)] * 2)
    pairs = vmap(vmap(f))(ROWS[:1].repeat(2, 2, 1))
    assert same(pairs, [vmap(f)(ROWS[:1].repeat(2, 1))] * 2)


def test_what_asks_nothing_gets_its_numbers_back():
    for rows in (ROWS, ROWS[:1], ROWS[:0]):
        assert vmap(lambda x: (x.sin(), 3, 2.5, True, "a", None))(rows)[1:] == (3, 2.5, True, "a", None)
        assert vmap(vmap(lambda x: (x.sin(), 3)))(rows)[1] == 3
    constant = torch.tensor(2.0)
    assert vmap(lambda x: (x if constant > 1 else -x, constant.item()))(ROWS)[1] == 2.0
    assert vmap(lambda x: (x, x.shape[0], x.dim(), len(x)))(ROWS)[1:] == (2, 1, 2)
    assert vmap(lambda x: (x, print(f"{x}", end="", file=None) or 3))(ROWS[:, :0])[1] == 3


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_numbers_of_nested_lanes(free, monkeypatch):
    monkeypatch.setattr(pacing, "FREE", free)

    def outer(x):
        n = int(x.sum())
        return vmap(lambda y: (y, 1 if n > 2 else 2))(x)[1], 5

    for rows in (ROWS, ROWS[:2], ROWS[:1].repeat(2, 1), ROWS, ROWS[:1]):
        first, second = vmap(outer)(rows)
        assert first.reshape(len(rows), -1)[:, 0].tolist() == [1 if int(x.sum()) > 2 else 2 for x in rows]
        assert second.tolist() == [5] * len(rows)
    inside = vmap(lambda x: vmap(lambda y: y.item())(x))
    for rows in (ROWS, ROWS[:1].repeat(2, 1), ROWS):
        assert inside(rows).tolist() == rows.tolist()

    def constant_inside(x):
        y = x * 2 if x.sum() > 2 else x
        doubled, count = vmap(lambda y: (y * 2, 3))(y)  # asks nothing, so that it is a number here
        return sum(doubled for _ in range(count)), count

    for rows in (ROWS, ROWS[:1].repeat(2, 1), ROWS, ROWS.repeat(9, 1)):
        total, count = vmap(constant_inside)(rows)
        assert count.tolist() == [3] * len(rows)
        torch.testing.assert_close(total, torch.stack([(x * 2 if x.sum() > 2 else x) * 6 for x in rows]))


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_out_dims_of_numbers(free, monkeypatch):
    monkeypatch.setattr(pacing, "FREE", free)
    for f in (FUNCTIONS["len"], lambda x: len(x.tolist()) + 0 * int(x[0])):
        for rows in (ROWS[:2], ROWS[:1], ROWS[:2].repeat(9, 1)):
            for chunk in (None, 1):
                number = vmap(f, out_dims=None, chunk_size=chunk)(rows)
                assert type(number) is int
                assert number == 2
        assert vmap(f, out_dims="list")(ROWS[:2]) == [2, 2]
        assert vmap(f, out_dims=0)(ROWS[:2]).tolist() == vmap(f, out_dims=-1)(ROWS[:2]).tolist() == [2, 2]
    for chunk in (None, 1):
        with pytest.raises(ValueError, match="can not return a BatchedTensor when out_dim is None"):
            vmap(FUNCTIONS["len"], out_dims=None, chunk_size=chunk)(ROWS)
    tenth = vmap(lambda x: 0.1 if x[0] > 0 else 0.1 + 0 * x[1].item(), out_dims=None)
    assert tenth(ROWS) == 0.1
    assert vmap(lambda x: math.nan * x.sum().item(), out_dims=None)(ROWS) is not None
    mixed = vmap(lambda x: (x, len(x[x > 0])), out_dims=(1, None))
    assert mixed(ROWS[:2])[0].shape == (2, 2)
    assert mixed(ROWS[:2])[1] == 2
    parts, count = vmap(lambda x: (x[x > 0], 3), out_dims="jagged")(ROWS)
    assert [part.tolist() for part in parts.unbind()] == [[1.0, 2.0], [1.0, 3.0], [2.0]]
    assert count.tolist() == [3, 3, 3]


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_none_for_numbers_of_nested_lanes(free, monkeypatch):
    monkeypatch.setattr(pacing, "FREE", free)
    rows = torch.stack([ROWS[:2], ROWS[[0, 0]] * 2, ROWS[[2, 2]]])
    count = vmap(lambda x: len(x[x > 0]), out_dims=None)
    for xs in (rows, rows[:2], rows[:1], rows):
        assert vmap(count)(xs).tolist() == [len(x[0][x[0] > 0]) for x in xs]
    assert vmap(count, out_dims=None)(rows[:2]) == 2
    with pytest.raises(ValueError, match="BatchedTensor when out_dim is None"):
        vmap(count)(ROWS.expand(2, 3, 2))
    around = vmap(lambda x: vmap(lambda y: (y, int(x[0])), out_dims=(0, None))(x)[1])
    for xs in (ROWS, ROWS[:2], ROWS):
        assert around(xs).tolist() == [int(x[0]) for x in xs]

    def both(x):
        n = vmap(lambda y: y.item() * 0 + x[0].item(), out_dims=None)(x)
        return n + 1 if n > 0 else n

    for xs in (ROWS, ROWS[:2], ROWS):
        assert vmap(both)(xs).tolist() == [2.0 if x[0] > 0 else -1.0 for x in xs]


def test_results_have_memory_of_their_own():
    out = vmap(lambda x: x.sum().item())(ROWS[:1].repeat(3, 1))
    out[0] = 0
    assert out.tolist() == [0, 3, 3]


def product(x):
    p = 1
    for i in range(1, int(x) + 1):
        p *= i
    return p


@pytest.mark.parametrize("free", [0.0, 1.0])
@pytest.mark.parametrize("counts", [[30, 3], [30, 30], [30]])
def test_ints_too_large_for_a_tensor(counts, free, monkeypatch):
    monkeypatch.setattr(pacing, "FREE", free)
    for _ in range(2):
        with pytest.raises(LaneValueError, match="output: 265252859812191058636308480000000 does not fit"):
            vmap(product)(torch.tensor(counts))
        assert vmap(product, out_dims="list")(torch.tensor(counts)) == [math.factorial(n) for n in counts]


@pytest.mark.parametrize("transform", [vmap, lambda f: lambda xs: vmap(lambda x: jvp(f, (x,), (x,)))(xs)[0]])
def test_numbers_of_the_lanes_around_from_an_inner_vmap(transform):
    def f(x):
        return vmap(lambda y: y * x[0] if y > 0 else float(x[1]))(x).double()

    xs = torch.tensor([[-1.0, -2.0], [2.0, -0.5], [-3.0, -1.0]], dtype=torch.float64)
    want = torch.tensor([[-2.0, -2.0], [4.0, -0.5], [-1.0, -1.0]], dtype=torch.float64)
    for rows in (slice(None), slice(0, 1), slice(1, None)):
        for _ in range(2):
            assert torch.equal(transform(f)(xs[rows]), want[rows])
