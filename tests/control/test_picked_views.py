"""`x[i]` with a number of each lane is a copy, where torch gives a view: what is written to it reaches `x`."""

import pytest
import torch

from lanewise import grad, jvp, vmap
from lanewise._core.parting.picked import by_number

D = torch.float64


@pytest.fixture(autouse=True)
def nothing_known():
    """What an earlier test has shown of functions of the same code does not help."""
    by_number.clear()


def _assigned_to_a_part(y, i, j, v):
    y[i][j] = v


def _added_to_a_part(y, i, j, v):
    y[i][j] += v


def _added(y, i, j, v):
    y[i] += v


def _added_to_one(y, i, j, v):
    y[i, j] *= v


def _in_a_slice(y, i, j, v):
    y[i][1:] = v


def _of_a_slice(y, i, j, v):
    y[i, :2][0] = v


def _column(y, i, j, v):
    y[:, j].zero_()


def _method(y, i, j, v):
    y[i].mul_(v)


def _kept(y, i, j, v):
    row = y[i]
    row += 1
    row[j] = v


def _out(y, i, j, v):
    torch.add(y[0], v, out=y[i])


def _branch(y, i, j, v):
    if v > 0:
        y[i].fill_(2)
    else:
        y[i][j] = v


def _loop(y, i, j, v):
    for _ in range(int(j) % 3):
        y[i][j] += v


def itself_in_a_branch(y, i, j, v):
    row = y[i]
    if v > 0:
        row[j] = row[j] + v
        row[0] = 3.0
    row[j] += 1


def _short_numbers(y, i, j, v):
    y[i.to(torch.int32)][j.to(torch.int8)] = v


WRITES = [
    _assigned_to_a_part,
    _added_to_a_part,
    _added,
    _added_to_one,
    _in_a_slice,
    _of_a_slice,
    _column,
    _method,
    _kept,
    _out,
    _branch,
    _loop,
    _short_numbers,
]


def _examples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, 3, dtype=D, generator=generator)
    return (
        x,
        torch.tensor([0, 3, -1, 2, -4]),
        torch.tensor([2, 0, -3, 1, 1]),
        torch.tensor([1.5, -2, 3, -0.5, 2], dtype=D),
    )


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
def test_as_the_loop(write):
    x, i, j, v = _examples()

    def f(x, i, j, v):
        y = x * 1
        write(y, i, j, v)
        return y

    want = torch.stack([f(*row) for row in zip(x, i, j, v)])
    for _ in range(2):
        assert torch.equal(vmap(f)(x, i, j, v), want)
    assert torch.equal(vmap(f, chunk_size=2)(x, i, j, v), want)
    nested = vmap(lambda x: vmap(lambda i, j, v: f(x, i, j, v))(i, j, v))(x)
    assert torch.equal(nested, torch.stack([torch.stack([f(x, *row) for row in zip(i, j, v)]) for x in x]))
    outer = vmap(lambda i, j, v: vmap(lambda x: f(x, i, j, v))(x))(i, j, v)
    assert torch.equal(outer, nested.transpose(0, 1))
    if write is _out:
        return  # torch differentiates no `out=`
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(f(*row).sin().sum() for row in zip(leaf, i, j, v)), leaf)
    torch.testing.assert_close(vmap(grad(lambda *row: f(*row).sin().sum()))(x, i, j, v), want)
    torch.testing.assert_close(grad(lambda x: vmap(f)(x, i, j, v).sin().sum())(x), want)
    tangent = jvp(lambda x: vmap(f)(x, i, j, v).sin().sum(), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, want.sum())


def test_written_in_place_to_an_argument():
    x, i, j, v = _examples()
    want = x.clone()
    for row in zip(want, i, j, v):
        _assigned_to_a_part(*row)
    vmap(lambda x, i, j, v: _assigned_to_a_part(x, i, j, v))(x, i, j, v)
    assert torch.equal(x, want)


@pytest.mark.parametrize("write", [_assigned_to_a_part, _added_to_a_part, _added, _added_to_one, _in_a_slice])
def test_assignments_run_the_function_once(write):
    runs = []

    def f(x, i, j, v):
        runs.append(1)
        y = x * 1
        write(y, i, j, v)
        return y

    vmap(f)(*_examples())
    assert len(runs) == 1


def test_a_table_that_learns():
    """Tabular Q-learning: the states and actions of each lane."""

    def learn(start):
        q, state = torch.zeros(4, 2, dtype=D), start
        for step in range(6):
            action = (q[state] + torch.tensor([0.1 * step, 0.25], dtype=D)).argmax()
            following = (state + action + 1) % 4
            q[state][action] += 0.5 * ((following == 0) + 0.9 * q[following].max() - q[state][action])
            state = following
        return q

    starts = torch.arange(4)
    assert torch.equal(vmap(learn)(starts), torch.stack([learn(start) for start in starts]))


def element(x, i, j):
    x[i][j] = x.sum()


def number_without_lanes(x, i, j):
    x[i][j] = 7.0


def added(x, i, j):
    x[i].add_(j)


def kept_row(x, i, j):
    row = x[i]
    row += j


def part_of_row(x, i, j):
    part = x[i][1:]
    part.mul_(j)


def row_assigned(x, i, j):
    row = x[i]
    row[1:] = j
    row[0] = x[j].sum()


def itself(x, i, j):
    row = x[i]
    row[j] = row[j] + 1
    row[j] += j


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("write", [element, number_without_lanes, added, kept_row, part_of_row, row_assigned, itself])
def test_numbers_of_lanes_around(write):
    """A row picked by a number of an outer lane gets values of the inner lanes."""

    def f(x, i, j):
        x = x.clone()
        write(x, i, j)
        return x

    xs = torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.tensor([0, 1, 2, 1]), torch.tensor([-1, 0, 1, 2])
    out = vmap(lambda x, i: vmap(lambda j: f(x, i, j))(columns))(xs, rows)
    want = torch.stack([torch.stack([f(x, i, j) for j in columns]) for x, i in zip(xs, rows)])
    torch.testing.assert_close(out, want)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("write", [_branch, _loop, _kept, _method, itself_in_a_branch])
def test_lanes_around_part_before_they_write(write):
    """The number is of the lanes around, and so is what they part by: the inner ones run for all pairs."""
    x, i, j, v = _examples()

    def f(x, i, j, v):
        y = x * 1
        write(y, i, j, v)
        return y

    out = vmap(lambda i, j, v: vmap(lambda x: f(x, i, j, v))(x))(i, j, v)
    assert torch.equal(out, torch.stack([torch.stack([f(x, *row) for x in x]) for row in zip(i, j, v)]))


# --- what is written to x shows in x[i] ------------------------------------------------------------------------------


def _another_row(x, i, j, v):
    row = x[i]
    x[j] = v
    return row


def _whole(x, i, j, v):
    row = x[i]
    x.mul_(2)
    return row


def _whole_by_lanes(x, i, j, v):
    row = x[i]
    x.add_(v)
    return row


def _exchanged(x, i, j, v):
    a, b = x[i], x[j]
    x[i] = b
    x[j] = a
    return a - b


def _element_of_a_row(x, i, j, v):
    row = x[i]
    element = row[j]
    x[i] = v
    return row + element


def _row_itself(x, i, j, v):
    row = x[i]
    x[i] += v
    return row


def _part_of_the_row(x, i, j, v):
    row = x[i]
    x[i][0] = v
    return row


def _through_a_view(x, i, j, v):
    row = x[i]
    x[1:].zero_()
    return row


def _row_of_a_view(x, i, j, v):
    row = x[1:][i.clamp(0, 1)]
    x[j] = v
    return row


def _both(x, i, j, v):
    row = x[i]
    x[j] = v
    row[0] = 3.0
    x[j] = row * 2
    return row


def _in_a_branch(x, i, j, v):
    row = x[i]
    if v > 0:
        x[i] = v
    else:
        x[j] = -v
    return row


def _in_a_loop(x, i, j, v):
    row = x[i]
    for k in range(int(j) % 3):
        x[k] = v + k
    return row


def _view_of_the_row(x, i, j, v):
    part = x[i][1:]
    x[i] = v
    return part


def _column_of_rows(x, i, j, v):
    column = x[:, j]
    x[i] = v
    return column


def _by_an_index(x, i, j, v):
    row = x[i]
    x.index_fill_(0, i % 3, 7.0)
    return row


SHOWN = [
    _another_row,
    _whole,
    _whole_by_lanes,
    _exchanged,
    _element_of_a_row,
    _row_itself,
    _part_of_the_row,
    _through_a_view,
    _row_of_a_view,
    _both,
    _in_a_branch,
    _in_a_loop,
    _view_of_the_row,
    _column_of_rows,
    _by_an_index,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("uniform", [False, True], ids=["lanes", "same in all"])
@pytest.mark.parametrize("program", SHOWN, ids=lambda p: p.__name__)
def test_writes_to_the_source_show(program, uniform):
    """In values and derivatives, where `x` has lanes and where it gets them by the write."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(5, 3, 3, dtype=D, generator=generator)
    i, j = torch.tensor([0, 1, -1, 0, 1]), torch.tensor([1, 1, 0, 2, -2])
    vs = torch.tensor([1.5, -2, 3, -0.5, 2], dtype=D)

    def f(x, i, j, v):
        x = torch.arange(9.0, dtype=D).view(3, 3).clone() if uniform else x * 1
        return program(x, i, j, v) * 1 + x.sum() * v

    want = torch.stack([f(*row) for row in zip(xs, i, j, vs)])
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(xs, i, j, vs), want)
    torch.testing.assert_close(vmap(f, chunk_size=2)(xs, i, j, vs), want)
    torch.testing.assert_close(vmap(vmap(f))(xs[None], i[None], j[None], vs[None])[0], want)

    def total(x, i, j, v):
        return f(x, i, j, v).sin().sum()

    leaves = xs.clone().requires_grad_(), vs.clone().requires_grad_()
    whole = sum(total(*row) for row in zip(leaves[0], i, j, leaves[1]))
    want = torch.autograd.grad(whole, leaves, materialize_grads=True)
    torch.testing.assert_close(vmap(grad(total, (0, 3)))(xs, i, j, vs), want)
    torch.testing.assert_close(grad(lambda x, v: vmap(total)(x, i, j, v).sum(), (0, 1))(xs, vs), want)
    pushed = vmap(lambda x, i, j, v: jvp(lambda x, v: total(x, i, j, v), (x, v), (x, v))[1])(xs, i, j, vs)
    torch.testing.assert_close(pushed.sum(), sum((slope * x).sum() for slope, x in zip(want, (xs, vs))))


def test_assignments_while_a_row_is_in_use_run_the_function_once():
    runs = []

    def f(x, i, v):
        runs.append(1)
        y = x * 1
        for _ in range(3):
            row = y[i]
            y[i] = row + v
        return y

    x, i, _, v = _examples()
    torch.testing.assert_close(vmap(f)(x, i, v), torch.stack([f(*row) for row in zip(x, i, v)]))
    assert len(runs) == 1 + len(x)


def whole(y, i, j):
    y.mul_(3)


def without_lanes(y, i, j):
    y.add_(1)


def another_row(y, i, j):
    y[j] = 5.0


def the_same_row(y, i, j):
    y[i] = 5.0


def from_the_end(y, i, j):
    y[i - len(y)] = 5.0


def by_a_view(y, i, j):
    y[1:].zero_()


def by_a_mask(y, i, j):
    y[y > 0] = 0.5


def of_some_lanes(y, i, j):
    if j > 1:
        y += y.sum()


def row_after_row(y, i, j):
    for k in range(len(y)):
        y[k] = y[i] * 2


def swapped(y, i, j):
    kept = y[i]
    y[i] = y[j]
    y[j] = kept


WRITES_TO_THE_SOURCE = [
    whole,
    without_lanes,
    another_row,
    the_same_row,
    from_the_end,
    by_a_view,
    by_a_mask,
    of_some_lanes,
    row_after_row,
    swapped,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("number", [lambda i: i, int, lambda i: i.item()], ids=["tensor", "int", "item"])
@pytest.mark.parametrize("made", [lambda x: x * 1, lambda x: x.new_ones(4, 3).cumsum(0)], ids=["of lanes", "of none"])
@pytest.mark.parametrize("write", WRITES_TO_THE_SOURCE, ids=lambda w: w.__name__)
def test_what_is_written_to_the_source_shows(write, made, number):
    x, i, j, _ = _examples()
    i, j = i % 4, j % 4

    def f(x, i, j):
        y = made(x)
        i, j = number(i), number(j)
        row = y[i]
        part = y[:, 1:][i]
        write(y, i, j)
        return row.sin() * part.sum() + y.sum()

    want = torch.stack([f(*row) for row in zip(x, i, j)])
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(x, i, j), want)
    nested = vmap(lambda x: vmap(lambda i, j: f(x, i, j))(i, j))(x)
    torch.testing.assert_close(nested, torch.stack([torch.stack([f(x, *row) for row in zip(i, j)]) for x in x]))


def test_a_table_filled_row_by_row_runs_once():
    """A row in use does not keep others from being written."""
    runs = []

    def f(x, k):
        runs.append(1)
        y = torch.zeros(6, dtype=D)
        place, last = k, x
        for _ in range(3):
            y[place] = last + 1
            last = y[place] * 1
            before = y[place]
            place = place + 1
            y[place] = before.sin()
        return y

    x, k = torch.randn(5, dtype=D), torch.tensor([0, 2, 1, 2, 0])
    want = torch.stack([f(*row) for row in zip(x, k)])
    runs.clear()
    torch.testing.assert_close(vmap(f)(x, k), want)
    assert len(runs) == 1


@pytest.mark.parametrize("number", [int, lambda i: i.item()], ids=["int", "item"])
def test_lanes_do_not_part_by_whole_numbers(number):
    runs = []

    def f(x, i):
        runs.append(1)
        if i > 1:
            x = x * 2
        return x[number(i)] * x[number(i) - 1]

    x, i = torch.randn(20, 6, dtype=D), torch.arange(20) % 6
    want = torch.stack([f(*row) for row in zip(x, i)])
    vmap(f)(x, i)
    runs.clear()
    torch.testing.assert_close(vmap(f)(x, i), want)
    assert len(runs) == 1


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("inner", [0, 3])
def test_a_write_of_what_was_picked_without_lanes(lanes, inner):
    """What has no elements is all at one place; the function ran again and again."""

    def f(x):
        i = x.argmax()
        marked = torch.zeros(3)
        marked[i] = x[i]
        return marked * x

    xs = torch.rand(lanes, inner, 3)
    want = (
        torch.stack([torch.stack([f(x) for x in row]) for row in xs])
        if lanes and inner
        else torch.zeros(lanes, inner, 3)
    )
    assert torch.equal(vmap(vmap(f))(xs), want)
    assert torch.equal(vmap(f)(xs.flatten(0, 1)), want.flatten(0, 1))
