"""Errors of a `vmap` inside another are those of the lanes around that have them; the others go on."""

import contextlib

import pytest
import torch

from lanewise import cond, error_if, grad, jacrev, jvp, scan, vmap, while_loop

D = torch.float64
XS = torch.tensor([-1.3, 0.1, 1.4, -0.5], dtype=D)
ROWS = XS[:, None] + torch.arange(3.0, dtype=D)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


@pytest.fixture(params=["converted", "as written"])
def way(request, monkeypatch):
    """Lanes part in converted code, or functions run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)


def looped(f):
    return lambda row: torch.stack([f(t) for t in row])


class TooLarge(ValueError):
    def __init__(self, by):
        super().__init__("too large")
        self.by = by


class Replaced:
    """A context that raises another error in place of one."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and issubclass(kind, ValueError):
            raise KeyError("replaced") from error


# --- what raises ------------------------------------------------------------------------------------------------------


def branching(t):
    if t > 1.9:
        raise ValueError("too large")
    return t * t


def asking(t):
    if float(t.detach()) > 1.9:
        raise ValueError("too large")
    return t * t


def after_a_loop(t):
    n = 0
    while t < 1:
        t, n = t + 0.5, n + 1
    if n == 0:
        raise ValueError("no step")
    return t * n


def of_two_kinds(t):
    if t > 1.9:
        raise TooLarge(3)
    if t < -0.4:
        raise KeyError("too small")
    return t * t


def looked_up(t):
    return t * {-1: 2.0, 0: 1.0, 1: 3.0}[int(t.detach())]


def asserted(t):
    assert t < 1.9, "too large"
    return t * t


def checked(t):
    return error_if(t, t > 1.9, "too large") * t


def without_an_entry(t):
    return next(v for v in (t * 2, t + 1) if v > -0.1)


def factorized(t):
    return torch.linalg.cholesky((2 - t) * torch.eye(2, dtype=D)).sum()


def chosen(t):
    return cond(t > 1.9, branching, torch.sin, (t,))


def stepwise(t):
    return while_loop(lambda s: s < 1, lambda s: branching(s + 2.5) + s, t)


def scanned(t):
    return scan(lambda c, a: (branching(c + a), c), t, torch.arange(2.0, dtype=D) / 3)[0]


def differentiated(t):
    return grad(branching)(t)


def pushed_forward(t):
    return jvp(branching, (t,), (torch.ones_like(t),))[1]


def jacobian(t):
    return jacrev(branching)(t)


def of_three(t):
    return vmap(branching)(torch.stack([t - 1, t])).sum()


RAISING = [branching, asking, after_a_loop, of_two_kinds, looked_up, asserted, checked, without_an_entry, factorized]
RAISING += [chosen, stepwise, scanned, differentiated, pushed_forward, jacobian, of_three]


# --- what catches it --------------------------------------------------------------------------------------------------


def caught(inside, row):
    try:
        y = inside(row).sum()
    except (ValueError, RuntimeError):
        y = row.sum() * 0 - 1
    except Exception:
        y = row.sum() * 2
    return y + row[0]


def returned(inside, row):
    try:
        return inside(row).sum()
    except Exception:
        return row.sum() * 0 - 1


def in_a_branch(inside, row):
    y = row[1]
    if y > -0.4:
        try:
            y = inside(row).sum()
        except Exception as error:
            y = row[0] * len(str(type(error).__name__)) + getattr(error, "by", 1)
    return y


def by_all_clauses(inside, row):
    y = row[0]
    try:
        y = y + inside(row).sum()
    except (TooLarge, AssertionError):
        y = y * 3
    except (KeyError, RuntimeError, StopIteration):
        y = y * 5
    except ValueError:
        y = y * 7
    else:
        y = y * 11
    finally:
        y = y + 1
    return y


def suppressed(inside, row):
    y = row[0]
    with contextlib.suppress(Exception):
        y = y * 2
        y = y + inside(row).sum()
        y = y * 3
    return y


def replaced(inside, row):
    try:
        with Replaced():
            return inside(row).sum()
    except KeyError:
        return row[1] * 2
    except Exception:
        return row[2]


def tried_again(inside, row):
    for _ in range(6):
        try:
            return inside(row).sum()
        except Exception:
            row = row / 2
    return row[0]


def until_it_works(inside, row):
    y, n = row[0], 0
    while n < 6:
        n += 1
        try:
            y = inside(row).sum()
            break
        except Exception:
            row = row / 2
    if y > 0.5:
        return y * n
    return y - n


def raised_again(inside, row):
    try:
        try:
            return inside(row).sum()
        except ValueError as error:
            raise RuntimeError("again") from error
        except LookupError:
            raise
    except RuntimeError:
        return row[0] * 2
    except Exception:
        return row[1] * 3


CATCHING = [caught, returned, in_a_branch, by_all_clauses, suppressed, replaced, tried_again, until_it_works]
CATCHING += [raised_again]


@pytest.mark.parametrize("f", RAISING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("around", CATCHING, ids=lambda f: f.__name__)
def test_as_the_loop(around, f, way):
    outer = lambda row: around(looped(f), row)
    want = torch.stack([outer(row) for row in ROWS])
    slopes = torch.stack([torch.autograd.functional.jacobian(outer, row) for row in ROWS])
    inner = lambda row: around(vmap(f), row)
    for chunk_size in (None, None, None, 3):
        mapped = lambda g, size=chunk_size: vmap(g, chunk_size=size)
        torch.testing.assert_close(mapped(inner)(ROWS), want)
        torch.testing.assert_close(mapped(grad(inner))(ROWS), slopes)
    torch.testing.assert_close(vmap(lambda row: around(vmap(f, chunk_size=2), row))(ROWS), want)
    torch.testing.assert_close(grad(lambda rows: vmap(inner)(rows).sum())(ROWS), slopes)
    ones = torch.ones_like(ROWS)
    torch.testing.assert_close(jvp(vmap(inner), (ROWS,), (ones,))[1], slopes.sum(1))
    torch.testing.assert_close(vmap(lambda row: jvp(inner, (row,), (ones[0],))[1])(ROWS), slopes.sum(1))


@pytest.mark.parametrize("f", [branching, of_two_kinds, checked, factorized], ids=lambda f: f.__name__)
@pytest.mark.parametrize("around", [caught, by_all_clauses, until_it_works], ids=lambda f: f.__name__)
def test_three_vmaps(around, f, way):
    def outermost(mapping, table):
        try:
            return mapping(lambda row: around(mapping(f), row))(table).sum()
        except Exception:
            return table.sum()

    def outermost_alone(mapping, table):
        try:
            y = mapping(lambda row: mapping(f)(row).sum())(table).sum()
        except LookupError:
            y = table.sum()
        except Exception:
            y = -table.sum()
        return y

    tables = torch.stack([ROWS, ROWS.flip(1) - 1, ROWS / 3])
    for g in (outermost, outermost_alone):
        want = torch.stack([g(looped, table) for table in tables])
        slopes = torch.stack(
            [torch.autograd.functional.jacobian(lambda t, g=g: g(looped, t), table) for table in tables]
        )
        for _ in range(2):
            torch.testing.assert_close(vmap(lambda table, g=g: g(vmap, table))(tables), want)
            torch.testing.assert_close(vmap(grad(lambda table, g=g: g(vmap, table)))(tables), slopes)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_other_ways_to_draw(randomness, way):
    for around in CATCHING:
        want = torch.stack([around(looped(of_two_kinds), row) for row in ROWS])
        inner = vmap(of_two_kinds, randomness=randomness)
        for _ in range(2):
            mapped = vmap(lambda row, around=around: around(inner, row), randomness=randomness)  # noqa: B023
            torch.testing.assert_close(mapped(ROWS), want)


@pytest.mark.parametrize("f", [of_two_kinds, looked_up], ids=lambda f: f.__name__)
def test_the_first_error_of_a_loop_comes_out(f, way):
    for row in ROWS.repeat(2, 1):
        with pytest.raises(Exception) as want:
            looped(f)(row * 2)
        with pytest.raises(want.type) as found:
            vmap(f)(row * 2)
        assert type(found.value) is want.type


def test_what_nobody_catches_is_raised():
    with pytest.raises(ValueError, match="too large") as caught:
        vmap(lambda row: vmap(branching)(row))(ROWS)
    assert caught.value.lanes == [(1, 2), (2, 1), (2, 2)]  # type: ignore[attr-defined]


# --- what was done before it ------------------------------------------------------------------------------------------


def writing_first(t):
    t.add_(10)
    if t > 11.9:
        raise ValueError
    t.mul_(2)
    return t * 1


def writing_in_a_branch(t):
    if t > 0.5:
        t.add_(100)
        if t > 101.2:
            raise ValueError
    t.add_(1)
    return t * 1


def writing_before_two_kinds(t):
    t.add_(1)
    if float(t) > 1.9:
        t.sub_(5)
        raise KeyError
    if float(t) < 0.6:
        t.zero_()
        raise ValueError
    return t * 1


WRITING = [writing_first, writing_in_a_branch, writing_before_two_kinds]


@pytest.mark.parametrize("f", WRITING, ids=lambda f: f.__name__)
def test_writes_are_those_of_a_loop(f, way):
    for row in ROWS.repeat(2, 1):
        want, found = row.clone(), row.clone()
        with contextlib.suppress(ValueError, KeyError):
            looped(f)(want)
        with contextlib.suppress(ValueError, KeyError):
            vmap(f)(found)
        assert torch.equal(found, want)


@pytest.mark.parametrize("chunks", [(None, None), (None, 2), (3, None)])
@pytest.mark.parametrize("around", [caught, by_all_clauses, tried_again], ids=lambda f: f.__name__)
@pytest.mark.parametrize("f", WRITING, ids=lambda f: f.__name__)
def test_writes_of_pairs(f, around, chunks, way):
    written = ROWS.clone()
    want = torch.stack([around(looped(f), row) for row in written])
    outer, inner = chunks
    for _ in range(2):
        rows, columns = ROWS.clone(), ROWS.T.contiguous()
        g = lambda row: around(vmap(f, chunk_size=inner), row)
        torch.testing.assert_close(vmap(g, chunk_size=outer)(rows), want)
        torch.testing.assert_close(rows, written)
        torch.testing.assert_close(vmap(g, chunk_size=outer, in_dims=1)(columns), want)
        torch.testing.assert_close(columns, written.T)


def test_writes_of_pairs_before_lanes_around_part(way):
    def doubled(t):
        t.add_(10)
        if t > 11.9:
            return t * 3
        t.mul_(2)
        return t * 1

    def around(mapping, row):
        y = mapping(doubled)(row).sum()
        y = y + min(3.0, float(y))
        return y + row[0] * 2 + row[1] * 3

    written = ROWS.clone()
    want = torch.stack([around(looped, row) for row in written])
    for _ in range(3):
        rows = ROWS.clone()
        torch.testing.assert_close(vmap(lambda row: around(vmap, row))(rows), want)
        torch.testing.assert_close(rows, written)


# --- random numbers ---------------------------------------------------------------------------------------------------


def seeded_loop(f):
    def each(row):
        begun, out = torch.get_rng_state(), []
        for t in row:
            torch.set_rng_state(begun)
            out.append(f(t))
        return torch.stack(out)

    return each


def drawing_first(t):
    u = torch.rand((), dtype=D)
    if t > 1.9:
        raise ValueError
    return t * u


def drawing_on(t):
    u = torch.rand((), dtype=D)
    if t * u > 0.4:
        raise ValueError
    u = u + torch.rand((), dtype=D)
    if t < -0.4:
        u = u + torch.rand((), dtype=D)
        raise KeyError
    return t * u


def drawing_in_branches(t):
    if t > 0.5:
        u = torch.rand((), dtype=D)
        if t * u > 1:
            raise KeyError
        return u
    u = torch.rand(2, dtype=D).sum()
    if t * u < -0.3:
        raise ValueError
    return u + torch.rand((), dtype=D)


def drawing_around(inside, row):
    y = torch.rand((), dtype=D) if row[0] > 0 else row[0]
    for i in range(2):
        try:
            y = y + inside(row + i * 0.3).sum()
        except ValueError:
            y = y + row.sum() * torch.rand((), dtype=D)
        except KeyError:
            y = y + 1
    return y + torch.rand((), dtype=D)


@pytest.mark.parametrize("f", [drawing_first, drawing_on, drawing_in_branches], ids=lambda f: f.__name__)
def test_the_same_numbers_go_on_after_an_error(f, way):
    inner = vmap(f, randomness="same")
    for seed in range(4):
        torch.manual_seed(seed)
        want = seeded_loop(lambda row: drawing_around(seeded_loop(f), row))(ROWS)
        last = torch.rand(())
        for chunk_size in (None, None, 3):
            torch.manual_seed(seed)
            outer = vmap(lambda row: drawing_around(inner, row), randomness="same", chunk_size=chunk_size)
            torch.testing.assert_close(outer(ROWS), want)
            assert torch.rand(()) == last
        for row in ROWS:
            torch.manual_seed(seed)
            want_alone = drawing_around(seeded_loop(f), row)
            torch.manual_seed(seed)
            torch.testing.assert_close(drawing_around(inner, row), want_alone)


def failing_by_chance(t):
    u = torch.rand(())
    if u > 0.8:
        raise ValueError
    return u


def pairs_by_chance(row):
    try:
        return vmap(failing_by_chance, randomness="different")(row).sum()
    except ValueError:
        return torch.rand(()) - 2


def pairs_in_a_branch(row):
    if row[0] > 0.5:
        return pairs_by_chance(row)
    y = torch.rand(())
    try:
        y = vmap(failing_by_chance, randomness="different")(row).mean()
    except ValueError:
        y = y - 1
    return y


def one_by_chance(row):
    u = torch.rand(())
    try:
        if u > 0.488:
            raise ValueError
        return u
    except ValueError:
        return torch.rand(()) - 2


def after_pairs(row):
    y = vmap(lambda t: torch.rand(()), randomness="different")(row).sum()
    try:
        if y > 1.5176:
            raise ValueError
        return y
    except ValueError:
        return torch.rand(()) - 2


def asked_after_pairs(row):
    y = vmap(lambda t: torch.rand(()), randomness="different")(row).sum()
    return y if min(1.5176, float(y)) < 1.5176 else torch.rand(()) - 2


CHANCES = [pairs_by_chance, pairs_in_a_branch, one_by_chance, after_pairs, asked_after_pairs]


@pytest.mark.parametrize("f", CHANCES, ids=lambda f: f.__name__)
def test_how_many_fail_by_chance(f, way):
    rows = torch.rand(400, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    for _ in range(2):
        out = vmap(f, randomness="different")(rows)
        failed = out[out < 0]
        assert abs(failed.numel() / 400 - 0.488) < 0.1  # four standard deviations
        assert out.unique().numel() > 395
