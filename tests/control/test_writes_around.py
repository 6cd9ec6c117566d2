"""Writes to tensors from around a function that starts again, as lanes part in it: they are done once."""

import weakref

import pytest
import torch

from lanewise import grad, jvp, vmap
from lanewise._core.again.journal import Journal, memory
from lanewise._core.batch import BatchLevel
from lanewise._core.plane import lift
from lanewise._transforms.parting import parted
from tests.oracles import assert_same

D = torch.float64
XS = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=D)
ROWS = torch.tensor([[0.5, 1.5], [-1.0, 2.0], [3.0, -0.25]], dtype=D)
STATES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=D)


@pytest.fixture(autouse=True)
def nothing_known():
    """Each test begins with a first call."""
    parted.clear()


def without_grad(c):
    with torch.no_grad():
        c.mul_(2)


def given_data(c):
    c.data = c.data * 2 + 1


def one_entry(c):
    c[0] = c[0] * 3


WRITES = {
    "in place": lambda c: c.mul_(2).add_(1),
    "an entry": one_entry,
    "a view": lambda c: c[1:].mul_(2),
    "other shape": lambda c: c.view(-1, 1).mul_(2),
    "out=": lambda c: torch.mul(c.detach(), 3, out=c.detach()),
    "through data": lambda c: c.data.mul_(3),
    "data": given_data,
    "copied": lambda c: c.copy_(c.flip(0) * 2),
    "lists": lambda c: torch._foreach_mul_([c], 2),
    "no_grad": without_grad,
    "detached": lambda c: c.detach().mul_(2),
    "shape in place": lambda c: c.unsqueeze_(0).mul_(2).squeeze_(0),
}
MADE = {
    "argument": lambda row, s: s,
    "made": lambda row, s: torch.ones(2, dtype=D),
    "computed": lambda row, s: row * s,
    "view": lambda row, s: torch.stack([s, s])[0],
    "filled": lambda row, s: torch.empty(2, dtype=D).copy_(row),
}


def branches(write, c, x, row):
    write(c)
    return (x * 2 if x > 0 else -x) * c.sum()


def by_both(write, c, x, row):
    write(c)
    return (x * 2 if x * row[0] > 0 else -x) * c.sum()


def between(write, c, x, row):
    y = x * 2 if x > 0 else -x
    write(c)
    return (y * 3 if y > 3 else y) * c.sum()


def repeated(write, c, x, row):
    write(c)
    steps = 0
    while x * row[1] < 8 and steps < 5:
        x = x * 2 if x > 0 else -x
        steps += 1
    return x * c.sum()


def by_number(write, c, x, row):
    write(c)
    return torch.as_tensor(float(x), dtype=D) * 2


def three_deep(write, c, x, row):
    write(c)
    return vmap(lambda z: z * c.sum() if z > x else -z)(XS).sum()


def interleaved(write, c, x, row):
    write(c)
    rows = torch.stack([x, x * 2, x * 3])[None] * torch.ones(2, 1, dtype=D)
    doubled = rows.t() * 2
    flat = doubled.reshape(-1)
    flat += 1
    return doubled.sum() if x > 0 else doubled.prod()


BODIES = [branches, by_both, between, repeated, by_number, three_deep, interleaved]


def around(body, write, make, mapped):
    """A function of one example, inside which others are mapped over."""

    def f(row, s):
        s = s * 1
        c = make(row, s)
        if mapped:
            y = vmap(lambda x: body(write, c, x, row) + row.sum())(XS)
        else:
            write(c)
            y = torch.stack([body(lambda c: None, c, x, row) + row.sum() for x in XS])
        return y, c * 1, s * 1

    return f


def loop(f):
    def each(*args):
        return tuple(map(torch.stack, zip(*[f(*rows) for rows in zip(*args, strict=True)], strict=True)))

    return each


def total(outs):
    return sum((out * torch.arange(1.0, out.numel() + 1, dtype=D).view(out.shape)).sum() for out in outs)


def gradients(f):
    return lambda row, s: grad(lambda row, s: total(f(row, s)), argnums=(0, 1))(row, s)


def recorded(f):
    def g(row, s):
        row, s = row.clone().requires_grad_(), s.clone().requires_grad_()
        return torch.autograd.grad(total(f(row, s)), (row, s), allow_unused=True, materialize_grads=True)

    return g


def tangents(f):
    def g(row, s):
        outs, changes = jvp(f, (row, s), (row + 1, s * 2))
        return *outs, *changes

    return g


USES = {
    "vmap": lambda f, each: each(f),
    "chunks": lambda f, each: vmap(f, chunk_size=2) if each is vmap else each(f),
    "grad around": lambda f, each: gradients(each(f)),
    "recorded": lambda f, each: recorded(each(f)),
    "grad inside": lambda f, each: each(gradients(f)),
    "jvp around": lambda f, each: tangents(each(f)),
    "jvp inside": lambda f, each: each(tangents(f)),
    "two deep": lambda f, each: lambda row, s: each(each(f))(torch.stack([row, row + 1]), torch.stack([s, s * 2])),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_what_has_lanes_around(write, made, use):
    for body in BODIES if use in ("vmap", "grad inside") else BODIES[:2]:
        fit = [around(body, WRITES[write], MADE[made], mapped) for mapped in (True, False)]
        want = USES[use](fit[1], loop)(ROWS.clone(), STATES.clone())
        run = USES[use](fit[0], vmap)
        for _ in range(2):
            assert_same(run(ROWS.clone(), STATES.clone()), want)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_arguments_are_written_to_once(body, write):
    def f(row, s, mapped):
        if mapped:
            return vmap(lambda x: body(WRITES[write], s, x, row))(XS)
        WRITES[write](s)
        return torch.stack([body(lambda c: None, s, x, row) for x in XS])

    if write == "data":
        return  # of an argument: the lanes keep what they are given
    one, other = STATES.clone(), STATES.clone()
    for _ in range(2):
        got = vmap(lambda row, s: f(row, s, True))(ROWS, one)
        want = torch.stack([f(row, s, False) for row, s in zip(ROWS, other, strict=True)])
        assert_same((got, one), (want, other))


PLAIN = {
    **WRITES,
    "turned": lambda c: c.t_(),
    "a dim more": lambda c: c.unsqueeze_(0),
    "resized": lambda c: c.resize_(3, c.shape[0]).fill_(1),
    "longer": lambda c: setattr(c, "data", torch.cat([c.data, c.data])),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_from_outside(name):
    def f(x):
        PLAIN[name](c)
        return x * c.sum() if x > 0 else -x

    for shape in [(2, 2), (2, 700)] if name in WRITES else [(2, 2)]:
        values = torch.arange(torch.Size(shape).numel(), dtype=D).view(shape)
        for _ in range(2):
            c = values.clone()
            got, written = vmap(f)(XS), c
            c = values.clone()
            PLAIN[name](c)
            assert_same(written, c)
            assert_same(got, torch.stack([x * c.sum() if x > 0 else -x for x in XS]))


def test_a_large_plain_tensor_in_a_function_that_computes_much_without_lanes():
    """Which would run on plain tensors from the second call on."""

    def f(x):
        scale = sum((w * 2).sum() for w in weights)
        c.add_(1)
        return x * scale if x > 0 else -x

    weights, c = [torch.ones(3, dtype=D) for _ in range(10)], torch.zeros(3000)
    for k in range(3):
        vmap(f)(XS if k == 2 else XS.abs())
        assert_same(c, torch.full((3000,), k + 1.0))


@pytest.mark.parametrize("view", [False, True])
def test_the_history_of_a_plain_tensor_has_the_write_once(view):
    def f(x):
        c.mul_(2)
        return x * c.sum() if x > 0 else -x

    for _ in range(2):
        w = torch.tensor([2.0, 3.0], dtype=D, requires_grad=True)
        c = (w * 1)[1:] if view else w * 1
        vmap(f)(XS).sum().backward()
        assert_same(c.detach(), w.detach()[view:] * 2)
        assert_same(w.grad, torch.tensor([0.0 if view else 8.0, 8.0], dtype=D))


def test_a_branch_that_writes():
    """In as many lanes around as come there, once in each."""

    def f(row, s):
        def g(x):
            if x * row[0] > 0:
                s.add_(1)
                return x * 2
            return -x

        return vmap(g)(XS)

    for _ in range(3):
        states = STATES.clone()
        out = vmap(f)(ROWS, states)
        assert_same(states, STATES + 1)
        assert_same(out, torch.stack([torch.stack([x * 2 if x * row[0] > 0 else -x for x in XS]) for row in ROWS]))


OF_ONE = {
    "flip": lambda c: c.flip(0),
    "roll": lambda c: c.roll(1),
    "outer": lambda c: torch.outer(c, c).sum(0),
    "einsum": lambda c: torch.einsum("i,j->ij", c, c)[0],
    "diag": lambda c: torch.diag(c)[1],
    "pad": lambda c: torch.nn.functional.pad(c, (1, 1))[1:3],
    "sum": lambda c: c.sum(0),
    "itself": lambda c: c,
}


@pytest.mark.parametrize("name", OF_ONE)
def test_what_is_made_around_is_the_same_in_all_lanes(name):
    def f(row):
        c = torch.arange(1.0, 3.0, dtype=D)
        return vmap(lambda x: x * OF_ONE[name](c) if x > 0 else -x * OF_ONE[name](c))(XS)

    for _ in range(2):
        out = vmap(f)(ROWS)
        assert type(out) is torch.Tensor
        one = torch.stack([x.abs() * OF_ONE[name](torch.arange(1.0, 3.0, dtype=D)) for x in XS])
        assert_same(out, torch.stack([one] * len(ROWS)))


def test_memory_by_which_something_is_kept_goes_to_nobody_else() -> None:
    with BatchLevel(3) as level:
        kept, journal = torch.zeros(5), Journal(None)
        value = weakref.ref(kept.value)  # type: ignore[attr-defined]
        journal.keep_own(level, kept, None)  # type: ignore[arg-type]
        lift(kept)  # type: ignore[arg-type]  # it is in other memory from now on
        assert value() is not None and memory(value()) in journal.written()
