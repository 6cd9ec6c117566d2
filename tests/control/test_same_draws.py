"""Random numbers under `randomness="same"` where lanes part: those of a loop that begins each example with one seed."""

import pytest
import torch
import torch.nn.functional as F

from lanewise import cond, grad, vmap, while_loop

XS = torch.tensor([1.0, -1.0, 2.0, 3.0, -2.0, 0.5])
OWN = torch.Generator()


def rand():
    return torch.rand(())


def on_both_sides(x):
    u = rand()
    if x > 0:
        return u + rand() + rand() * x
    return u - rand()


def as_often_on_both_sides(x):
    if x > 0:
        y = torch.randn(2).sum() * x
    else:
        y = -torch.randn(2).sum()
    return y + rand() * x


def on_one_side(x):
    y = rand()
    if x > 0:
        y = y + torch.randn(())
    return y + rand() + x * rand()


def in_expressions(x):
    y = rand() if x > 1 else x * 2
    return y + rand() if x > 0 and rand() > 0.5 else y * rand()


def in_a_loop(x):
    while x < 4:
        x = x + rand()
    return x


def after_a_loop(x):
    while x < 4:
        x = x + rand()
    return x + rand()


def in_a_loop_with_jumps(x):
    for i in range(5):
        if x > i:
            x = x + rand()
            continue
        x = x * rand()
        if x < -1:
            break
    return x + rand()


def in_nested_branches(x):
    if x > 0:
        if x > 1:
            return x + rand()
        z = rand() * rand()
    else:
        z = rand() * x
    return z + torch.randn(3).sum()


def from_two_generators(x):
    y = torch.rand((), generator=OWN)
    if x > 0:
        y = y + torch.rand((), generator=OWN) + rand() * x
    return y - torch.rand((), generator=OWN) + rand()


def from_parameters(x):
    rate = torch.full((3,), 4.0)
    y = torch.poisson(rate, generator=OWN).sum()
    if x > 0:
        y = y + torch.poisson(rate, generator=OWN).sum() * x
    return y + torch.poisson(rate, generator=OWN).sum() + torch.bernoulli(rate / 8, generator=OWN).sum()


def written(x):
    y = torch.zeros(3)
    if x > 0:
        y.uniform_()
    else:
        y.normal_()
        y.uniform_()
    return y.sum() + x * rand()


def written_to_lanes(x):
    y = x * torch.ones(3)
    if x > 0:
        y[1:].uniform_()
    return (y + torch.rand_like(y)).sum()


def as_it_was_written(x):
    def numbers():
        yield rand()
        while x < 1:
            yield rand() * x
            break

    y = rand() + sum(numbers())
    if x > 2:
        y = y + rand()
    return y + sum(numbers()) + rand()


def by_operators(x):
    y = cond(x > 0, lambda: rand() + rand(), rand)
    z = while_loop(lambda x: x < 2, lambda x: x + rand(), x)
    return y + z + rand()


def by_operators_as_it_was_written(x):
    def numbers():
        yield x.item()
        yield by_operators(x)

    return sum(numbers()) + rand()


def by_a_number(x):
    n = int(abs(x) * rand().item() * 5)
    return x * n + sum(rand() for _ in range(n)) + rand()


def with_dropout(x):
    y = F.dropout(torch.ones(5) * x, 0.5).sum()
    return y + rand() if x > 0 else y - F.dropout(torch.ones(5), 0.5).sum() * rand()


def seeded_on_one_side(x):
    if x > 0:
        torch.manual_seed(5)
    return x * torch.randn(())


def seeded_after_a_draw(x):
    y = rand()
    if x > 0:
        torch.manual_seed(5)
        y = y + rand()
    else:
        y = y * rand()
    return x * y + torch.randn(())


def seeded_by_a_number(x):
    torch.manual_seed(int(x * 4))
    return x * rand()


def own_generator_seeded(x):
    if x > 0:
        OWN.manual_seed(5)
    return x * torch.randn((), generator=OWN)


def own_generator_put_back(x):
    y = torch.randn((), generator=OWN)
    if x > 0:
        state = OWN.get_state()
        y = y + torch.randn((), generator=OWN)
        OWN.set_state(state)
    return x * y * torch.randn((), generator=OWN)


def put_back(x):
    state = torch.get_rng_state()
    y = rand() if x > 0 else torch.rand(2).sum()
    if x > 1:
        torch.set_rng_state(state)
    return y * x + rand()


def forked(x):
    with torch.random.fork_rng(devices=[]):
        y = torch.randn(())
        if x > 0:
            y = y * torch.randn(())
    return x * y * torch.randn(())


def forked_and_left_by_a_jump(x):
    y = rand()
    for i in range(4):
        with torch.random.fork_rng(devices=[]):
            y = y + rand()
            if x > i:
                break
            y = y * rand()
    return y * x + rand()


def forked_at_several_states(x):
    y = rand() if x > 0 else x
    with torch.random.fork_rng(devices=[]):
        if x > 0.7:
            torch.manual_seed(3)
        y = y + rand()
    return y * x + rand()


def forked_on_one_side(x):
    if x > 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            y = rand()
    else:
        y = rand()
    return y * x + rand()


PROGRAMS = [
    seeded_on_one_side,
    seeded_after_a_draw,
    seeded_by_a_number,
    own_generator_seeded,
    own_generator_put_back,
    put_back,
    forked,
    forked_and_left_by_a_jump,
    forked_at_several_states,
    forked_on_one_side,
    on_both_sides,
    as_often_on_both_sides,
    on_one_side,
    in_expressions,
    in_a_loop,
    after_a_loop,
    in_a_loop_with_jumps,
    in_nested_branches,
    from_two_generators,
    from_parameters,
    written,
    written_to_lanes,
    as_it_was_written,
    by_operators,
    by_operators_as_it_was_written,
    by_a_number,
    with_dropout,
]


def seed():
    torch.manual_seed(3)
    OWN.manual_seed(4)


def loop(f, xs):
    out = []
    for x in xs:
        seed()
        out.append(f(x))
    return torch.stack(out)


each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
slowly = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


@slowly
@each_program
def test_as_the_loop(program):
    for chunk_size in (None, None, 4, 1):
        seed()
        torch.testing.assert_close(vmap(program, randomness="same", chunk_size=chunk_size)(XS), loop(program, XS))


@slowly
@each_program
def test_two_vmaps(program):
    xs = torch.stack([XS, XS + 1.5])
    seed()
    got = vmap(vmap(program, randomness="same"), randomness="same")(xs)
    torch.testing.assert_close(got, torch.stack([loop(program, row) for row in xs]))


def drawn_in_a_branch(x):
    return rand() if x > 1 else torch.rand(2).sum()


def drawn_by_parameter(x):
    return torch.poisson(x.abs())


def drawn_from_its_own(x):
    return torch.poisson(x.abs(), OWN) + torch.rand((), generator=OWN)


def not_drawn_in_a_branch(x):
    return rand() * x if x > 0 else x


LEAVING_STATES = [drawn_in_a_branch, drawn_by_parameter, drawn_from_its_own, not_drawn_in_a_branch]


def after_one(inside, row):
    inner = vmap(inside, randomness="same")(row)
    return torch.stack([inner.sum(), rand(), torch.rand((), generator=OWN)])


def between_two(inside, row):
    inner = rand() + vmap(inside, randomness="same")(row)
    return torch.stack([inner.sum(), rand() + vmap(inside, randomness="same")(row.flip(0)).sum(), rand()])


def after_one_in_a_branch(inside, row):
    inner = vmap(inside, randomness="same")(row) if row[0] > 0 else row
    return torch.stack([inner.sum(), rand(), torch.rand((), generator=OWN)])


def after_a_branch(inside, row):
    first = rand() if row[0] > 0 else torch.rand(3).sum()
    return torch.stack(
        [vmap(inside, randomness="same")(row).sum() + first, rand(), vmap(inside, randomness="same")(row)[1]]
    )


def after_two_inside(inside, row):
    inner = vmap(lambda r: after_one(inside, r), randomness="same")(row.view(3, 2))
    return torch.stack([inner.sum(), rand(), torch.rand((), generator=OWN)])


@slowly
@pytest.mark.parametrize("inside", LEAVING_STATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "around",
    [after_one, between_two, after_one_in_a_branch, after_a_branch, after_two_inside],
    ids=lambda f: f.__name__,
)
def test_what_is_drawn_after_a_vmap_inside(around, inside):
    rows = torch.stack([XS, XS + 1.5, -XS * 20, XS.flip(0)])
    want = loop(lambda row: around(inside, row), rows)
    for chunk_size in (None, None, 1, 2, 3):
        seed()
        got = vmap(lambda row: around(inside, row), randomness="same", chunk_size=chunk_size)(rows)
        torch.testing.assert_close(got, want)


def in_chunks(size):
    """A function of a row whose numbers are taken so many at a time, inside and between other draws."""

    def around(inside, row):
        first = rand() if row[0] > 0 else torch.rand(3).sum()
        inner = vmap(inside, randomness="same", chunk_size=size)(row)
        return torch.cat([first + inner, rand().view(1), torch.rand(1, generator=OWN)])

    return around


@slowly
@pytest.mark.parametrize("inside", LEAVING_STATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_vmap_inside_in_chunks(inside, size):
    rows = torch.stack([XS, XS + 1.5, -XS * 20, XS.flip(0)])
    want = loop(lambda row: in_chunks(None)(inside, row), rows)
    torch.testing.assert_close(loop(lambda row: in_chunks(size)(inside, row), rows), want)
    for chunk_size in (None, None, 1, 3):
        seed()
        got = vmap(lambda row: in_chunks(size)(inside, row), randomness="same", chunk_size=chunk_size)(rows)
        torch.testing.assert_close(got, want)


@slowly
@pytest.mark.parametrize("inside", LEAVING_STATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_what_is_drawn_after_the_call_is_what_follows_the_last_lane(inside, chunk_size):
    for xs in (XS, XS.flip(0)):
        seed()
        inside(xs[-1])
        want = rand(), torch.rand((), generator=OWN)
        seed()
        vmap(inside, randomness="same", chunk_size=chunk_size)(xs)
        assert (rand(), torch.rand((), generator=OWN)) == want


@slowly
@each_program
def test_gradients(program):
    def derivative(x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(program(x) + 0 * x, x)
        return g

    seed()
    got = vmap(grad(lambda x: program(x) + 0 * x), randomness="same")(XS)
    torch.testing.assert_close(got, loop(derivative, XS))


def test_what_follows_even_branches_runs_once():
    runs = []

    def f(x):
        if x > 0:
            y = rand() * x
        else:
            y = -rand()
        runs.append(None)
        return y * rand()

    vmap(f, randomness="same")(XS)
    runs.clear()
    seed()
    got = vmap(f, randomness="same")(XS)
    assert len(runs) == 1
    torch.testing.assert_close(got, loop(f, XS))
