"""Lanes that part where no code can go several ways at once: it is run again, for groups of them or for each."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise import error_if, errors, grad, vmap
from lanewise._control.runs import watches
from lanewise._core.parting.lanes import machine

D = torch.float64


def normal(*shape):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(0))


class Rows(TorchDispatchMode):
    """The number of rows that an operation gets, one entry for each time that it runs."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


# --- groups ----------------------------------------------------------------------------------------------------------


def kept(x):
    y = x[x > 0]
    return y.square().sum() + y.numel()


def test_lanes_seen_to_differ_do_not_run_together_again():
    xs = normal(200, 6)
    vmap(kept)(xs)  # sees that lanes part
    with Rows(torch.ops.aten.gt.Scalar) as seen:
        out = vmap(kept)(xs)
    torch.testing.assert_close(out, torch.stack([kept(x) for x in xs]))
    assert len(seen.rows) == 7
    assert sum(seen.rows[1:]) < 200  # all but those of the first run, once each


def test_groups_within_groups():
    def f(x):
        y = x[x > 0.5]
        z = x[x < -0.5]
        return y.sum() * len(z) + z.exp().sum() * len(y)

    xs = normal(60, 4)
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]))
    grads = [torch.autograd.grad(f(x), x)[0] for x in xs.clone().requires_grad_().unbind()]
    torch.testing.assert_close(vmap(grad(f))(xs), torch.stack(grads))


# --- one by one ------------------------------------------------------------------------------------------------------

alone = pytest.mark.filterwarnings("ignore:vmap. the .* lanes take:lanewise.errors.SlowPathWarning")


def own_way(x):
    def steps():
        y = x
        for _ in range(3):
            y = (y * 1.5).sin() + y.item()
            yield y

    return list(steps())[-1]


def test_many_ways_are_told():
    with pytest.warns(errors.SlowPathWarning, match="the 30 lanes take 8 different ways and more"):
        vmap(own_way)(normal(30))


def largest_of_list(x):
    values = x.tolist()
    return x * sorted((-v, place) for place, v in enumerate(values))[0][0]


def picked_to_list(k):
    return torch.tensor([v for v in k.tolist() if v != 0]).sum()


@pytest.mark.parametrize("f, line", [(largest_of_list, "sorted((-v, place)"), (picked_to_list, "for v in k.tolist()")])
def test_many_ways_are_told_with_the_line_and_what_to_write(f, line):
    xs = torch.randint(0, 6, (64, 6), generator=torch.Generator().manual_seed(1))
    want = torch.stack([f(x) for x in xs])
    for _ in range(2):
        with pytest.warns(errors.SlowPathWarning) as told:
            torch.testing.assert_close(vmap(f)(xs), want)
        text = str(told[0].message)
        assert "different ways" in text and "Write instead:\n  operations on tensors where Python's own numbers" in text
        assert line in text.split("they part at ")[1].splitlines()[0]


def test_many_ways_are_told_once_a_line():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            vmap(own_way)(normal(30))
    assert len(told) == 1
    assert told[0].filename == __file__


@alone
def test_the_rest_run_on_plain_tensors():
    kinds = []

    def f(x):
        kinds.append(type(x))
        return own_way(x)

    xs = normal(30)
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]))
    # The first run shows that all differ.
    assert kinds[-30 - 30] is not torch.Tensor
    assert kinds[-30 - 29 : -30] == 29 * [torch.Tensor]


def test_a_few_lanes_that_all_differ_run_on_plain_tensors():
    xs = normal(5)
    torch.testing.assert_close(vmap(own_way)(xs), torch.stack([own_way(x) for x in xs]))


@alone
def test_derivatives_one_by_one():
    xs = normal(30)
    want = torch.stack([torch.autograd.grad(own_way(x), x)[0] for x in xs.clone().requires_grad_().unbind()])
    torch.testing.assert_close(vmap(grad(own_way))(xs), want)
    torch.testing.assert_close(grad(lambda xs: vmap(own_way)(xs).sum())(xs), want)
    leaf = xs.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(vmap(own_way)(leaf).sum(), leaf)[0], want)


@alone
def test_writes_to_an_argument_one_by_one():
    def f(x):
        def steps():
            x.mul_(2)
            yield x.item()

        return x * list(steps())[0]

    for _ in range(2):
        given, same = normal(30), normal(30)
        torch.testing.assert_close(vmap(f)(given), torch.stack([f(x) for x in same]))
        torch.testing.assert_close(given, same)


@alone
def test_pairs_one_by_one():
    def f(x, y):
        return next(iter([own_way(x * y)])) + x

    xs, ys = normal(8), normal(5) + 1
    want = torch.stack([torch.stack([f(x, y) for y in ys]) for x in xs])
    torch.testing.assert_close(vmap(vmap(f, in_dims=(None, 0)), in_dims=(0, None))(xs, ys), want)
    torch.testing.assert_close(vmap(lambda x: vmap(lambda y: f(x, y))(ys))(xs), want)


@alone
def test_components_of_a_nested_tensor_one_by_one():
    rows = [normal(3) + i for i in range(30)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    out = vmap(lambda x: own_way(x.sum()))(nested)
    torch.testing.assert_close(out, torch.stack([own_way(x.sum()) for x in rows]))


@alone
def test_gradients_of_a_captured_tensor_one_by_one():
    weight = torch.tensor(2.0, dtype=D, requires_grad=True)

    def f(x):
        y = x.clone().requires_grad_()
        (y * weight * own_way(x).detach()).backward()
        return y.grad + 0

    xs = normal(30)
    for _ in range(2):
        weight.grad = None
        got = vmap(f)(xs)
        total, weight.grad = weight.grad, None
        torch.testing.assert_close(got, torch.stack([f(x) for x in xs]))
        torch.testing.assert_close(total, weight.grad)


@alone
def test_results_of_all_kinds_one_by_one():
    def f(x):
        return {"n": own_way(x).item(), "pair": (x * 2, torch.zeros(2)), "same": "text", "none": None}

    xs = normal(30)
    for _ in range(2):
        out = vmap(f)(xs)
        torch.testing.assert_close(out["n"], torch.tensor([f(x)["n"] for x in xs]))
        torch.testing.assert_close(out["pair"][0], xs * 2)
        assert out["pair"][1].shape == (30, 2)
        assert out["same"] == "text" and out["none"] is None


def test_numbers_and_dtypes_of_groups():
    def f(x):
        y = x[x > 0]
        n = len(y)
        return (x[0] * n).item(), y.float().sum() if n > 2 else y.sum(), n if n > 1 else float(n)

    xs = normal(30, 4)
    first, second, third = vmap(f)(xs)
    torch.testing.assert_close(first, torch.tensor([f(x)[0] for x in xs]))
    torch.testing.assert_close(second, torch.stack([f(x)[1].double() for x in xs]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(third, torch.tensor([float(f(x)[2]) for x in xs]))


@alone
@pytest.mark.parametrize("lane", [3, 28])
def test_an_error_names_its_lane(lane):
    xs = normal(30)

    def f(x):
        y = own_way(x)
        if next(iter([x.item()])) == xs[lane].item():
            raise ValueError("no")
        return y

    def g(x):
        own_way(x)
        return error_if(x, x == xs[lane], "no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no") as failure:
            vmap(f)(xs)
        assert failure.value.lanes == [lane]
        torch.testing.assert_close(vmap(own_way)(xs), torch.stack([own_way(x) for x in xs]))
    with pytest.raises(errors.CheckError, match="no") as failure:
        vmap(g)(xs)
    assert failure.value.lanes == [lane]


@alone
def test_later_calls_begin_one_by_one():
    kinds = []

    def f(x):
        kinds.append(type(x))
        return own_way(x), x * 2

    xs = normal(30)
    vmap(f)(xs)
    for count in (30, 20):
        want = [torch.stack(column) for column in zip(*[f(x) for x in xs[:count]])]
        kinds.clear()
        torch.testing.assert_close(vmap(f)(xs[:count]), tuple(want))
        assert kinds == count * [torch.Tensor]
    more = normal(60)
    kinds.clear()
    torch.testing.assert_close(vmap(f)(more)[0], torch.stack([own_way(x) for x in more]))
    assert kinds[0] is not torch.Tensor  # more lanes than were seen to differ


@alone
def test_numbers_in_python_one_by_one():
    """What is done by Python alone takes a few times as long as in a loop, not fifty times."""

    def most_common(x):
        counts = {}
        for token in x.tolist():
            counts[token] = counts.get(token, 0) + 1
        return x * max(counts.values()), float(len(counts))

    xs = torch.randint(0, 9, (40, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        got = vmap(most_common)(xs)
        torch.testing.assert_close(got[0], torch.stack([most_common(x)[0] for x in xs]))
        torch.testing.assert_close(got[1], torch.tensor([most_common(x)[1] for x in xs]))
    before = machine.partings
    vmap(most_common)(xs)
    assert machine.partings == before


@alone
@pytest.mark.parametrize("name", ["no grad", "no history", "views", "shapes"])
def test_results_stacked_one_by_one(name):
    def f(x):
        y = own_way(x)
        if name == "no grad":
            return y.detach()
        if name == "no history":
            return y if next(iter([y.item()])) > 0 else torch.ones((), dtype=D)
        return x.expand(3) if name == "views" else x.repeat(int(abs(y.item()) * 3) + 1)

    xs = normal(30).requires_grad_()
    want = [f(x) for x in xs]
    for _ in range(2):
        got = vmap(f, out_dims="list")(xs) if name == "shapes" else vmap(f)(xs)
        assert [y.tolist() for y in got] == [y.tolist() for y in want]
        if name not in ("no grad", "shapes"):
            grads = [torch.autograd.grad(sum(y.sum() for y in out), xs, retain_graph=True)[0] for out in (got, want)]
            torch.testing.assert_close(*grads)
        elif name == "no grad":
            assert not got.requires_grad


# --- random numbers --------------------------------------------------------------------------------------------------


def number_decides(x):
    u = torch.rand(3)
    return u.mean() + 0 * x[u.square() > 0.5].sum()


def number_in_a_branch_decides(x):
    if x[0] > 0:
        u = torch.rand(3)
    else:
        u = torch.rand(3)
    return u.mean() + 0 * x[u.square() > 0.5].sum()


def drawn_after_lanes_part(x):
    y = x[x > 0].sum()
    return torch.rand(3).mean() + 0 * y


@pytest.mark.parametrize("f", [number_decides, number_in_a_branch_decides, drawn_after_lanes_part])
def test_random_numbers_of_lanes_that_run_again(f):
    torch.manual_seed(0)
    for _ in range(2):  # the second call knows that lanes part
        out = vmap(f, randomness="different")(torch.ones(3000, 3) * torch.linspace(-1, 1, 3000)[:, None])
        assert out.unique().numel() > 2900
        # The mean of three uniform numbers is above 2/3 with probability 1/6.
        assert abs((out > 2 / 3).double().mean() - 1 / 6) < 0.03
        assert abs(out.mean() - 0.5) < 0.02


# --- selections that are only reduced --------------------------------------------------------------------------------

REDUCED = {
    "sum": lambda x: x[x > 0].sum(),
    "sum_dim": lambda x: x[x > 0].sum(0),
    "sum_other": lambda x: (x * x)[x > 0].sum(dim=0),
    "mean": lambda x: x[x > 0].mean(),
    "prod": lambda x: x[x > 0].prod(),
    "any": lambda x: x[x > 0].any(),
    "all": lambda x: (x > 1)[x > 0].all(),
    "numel": lambda x: x * x[x > 0].numel(),
    "count": lambda x: x[x > 0].numel(),
    "bools": lambda x: (x > 1)[x > 0].sum(),
    "rows": lambda x: torch.stack([x, x], 1)[x > 0].sum(),
    "rows_numel": lambda x: torch.stack([x, x], 1)[x > 0].numel(),
    "rows_dim": lambda x: torch.stack([x, x], 1)[x > 0].sum(0),
    "half": lambda x: x.half()[x > 0].mean(),
    "not_finite": lambda x: (1 / x.relu())[x > 0].sum(),
    "none": lambda x: x[x > 10].sum() + x[x > x.max()].prod() + x[x > 0.5].sum(),
    "nested": lambda x: x[x > x[x > -1].mean()].sum(),
    "range": lambda x: x[1:3].sum() + x[x > 0].sum(),
    "of_numbers": lambda x: x[: x[x > 0].numel()].sum(),
    "rows_mean": lambda x: torch.stack([x, x], 1)[x > 0].mean(dim=0),
    "rows_other_dim": lambda x: torch.stack([x, x], 1)[x > 0].sum(1).exp().sum(),
    "from": lambda x: x[int((x > 0).sum()) :].sum(),
    "up_to": lambda x: x[: int((x > 0).sum())].mean(),
    "up_to_tensor": lambda x: x[: (x > 0).sum()].prod(),
    "between": lambda x: x[int((x > 0).sum()) - 2 : int((x > 1).sum()) + 2].sum(),
    "from_the_end": lambda x: x[-int((x > 0).sum()) : 3].sum() + x[: -int((x > 1).sum())].sum(),
    "far_out": lambda x: x[int(x[0] * 9) : int(x[1] * 9)].sum(),
    "step": lambda x: x[:: int((x > 0).sum()) + 1].sum(),
    "every_other": lambda x: x[: int((x > 0).sum()) : 2].sum(),
    "up_to_rows": lambda x: torch.stack([x, x], 1)[: int((x > 0).sum())].mean(0),
    "up_to_rows_all": lambda x: torch.stack([x, x], 1)[: int((x > 0).sum())].sum(),
    "up_to_rows_last": lambda x: torch.stack([x, x], 1)[: int((x > 0).sum())].sum(-1).sum(),
    "up_to_numel": lambda x: x * torch.stack([x, x], 1)[: int((x > 0).sum())].numel(),
    "up_to_any": lambda x: (x > 1)[: int((x > 0).sum())].any(),
    "up_to_not_finite": lambda x: (1 / x.relu().sort(descending=True).values)[: int((x > 0).sum())].sum(),
    "up_to_bool": lambda x: x[: bool(x[0] > 0)].sum(),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reduced_selections(name):
    f = REDUCED[name]
    xs = normal(20, 4)
    for _ in range(2):
        out = vmap(f)(xs)
    want = [torch.as_tensor(f(x)) for x in xs]
    torch.testing.assert_close(out, torch.stack(want), equal_nan=True)
    if not out.is_floating_point():
        return
    leaves = xs.clone().requires_grad_().unbind()
    losses = [f(x).double().sum() for x in leaves]
    grads = torch.stack([torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, leaves)])
    torch.testing.assert_close(vmap(grad(lambda x: f(x).double().sum()))(xs), grads, equal_nan=True)
    torch.testing.assert_close(grad(lambda xs: vmap(f)(xs).double().sum())(xs), grads, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["sum", "rows_dim", "rows_mean", "from", "up_to", "between", "up_to_rows", "up_to_tensor"]
)
def test_a_reduced_selection_runs_once_for_all_lanes(name):
    xs = normal(200, 6)
    vmap(REDUCED[name])(xs)  # sees that lanes part
    with Rows(torch.ops.aten.gt.Scalar) as seen:
        vmap(REDUCED[name])(xs)
    assert set(seen.rows) == {200}


@alone
def test_a_lane_that_runs_alone_may_not_draw_without_leave():
    def f(x):
        y = own_way(x)
        return y if next(iter([x.item()])) < 5 else torch.rand((), dtype=D)

    for _ in range(2):
        with pytest.raises(errors.RandomnessError, match="randomness error mode"):
            vmap(f)(torch.arange(10, dtype=D))


def test_a_warning_where_lanes_part_more_often_than_there_are_of_them(monkeypatch):
    def halvings(n):
        n, count = int(n), 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        return torch.tensor(count)

    numbers = torch.arange(1, 41)
    want = torch.stack([halvings(n) for n in numbers])
    monkeypatch.setattr(watches, "_LITTLE", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(vmap(halvings)(numbers), want)
    monkeypatch.setattr(watches, "_LITTLE", 1.0)
    with pytest.warns(errors.SlowPathWarning, match=r"the 40 lanes have parted more than 60 times") as told:
        assert torch.equal(vmap(halvings)(numbers), want)
    assert len(told) == 1
    first = halvings.__code__.co_firstlineno
    assert first < told[0].lineno <= first + 4  # in the loop of the function
    many = numbers.repeat(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(vmap(halvings)(many), want.repeat(20))


# Functions without source run as they are written, for one set of lanes after another; one with a source calls them.
_WITHOUT_SOURCE: dict = {}
exec(
    """
def written_before_they_part(x, i):
    x.mul_(2); n = int(i); return x * n

def a_row_written_before_they_part(x, i):
    x[0].copy_(x.sum()); n = int(i); x[n] = 2.0; return x

def written_by_some(x, i):
    n = int(i); x.mul_(n + 1); return x

def a_row_written_by_some(x, i):
    x[i].copy_(x.sum()); return x

def made_inside(x, i):
    y = x * 2; y.mul_(3); n = int(i); y[n] = y.sum(); return y

def two_ways(x, i):
    n = int(i); x[n].fill_(x.sum()); m = int((x.sum() > 1) * 1); x[m] += x.sum(); return x
""",
    _WITHOUT_SOURCE,
)


@pytest.mark.parametrize("name", [name for name in _WITHOUT_SOURCE if not name.startswith("__")])
def test_writes_to_what_a_caller_has_made(name):
    callee = _WITHOUT_SOURCE[name]
    xs = torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    numbers = torch.tensor([2, 0, 1, 0])

    def f(x, i):
        return callee(x * 1, i)

    def loss(x, i):
        return f(x, i).square().sum()

    want = torch.stack([f(x, i) for x, i in zip(xs, numbers)])
    leaf = xs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sum(loss(x, i) for x, i in zip(leaf, numbers)), leaf)
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(xs, numbers), want)
        torch.testing.assert_close(vmap(grad(loss))(xs, numbers), gradient)
        torch.testing.assert_close(grad(lambda xs: vmap(loss)(xs, numbers).sum())(xs), gradient)
