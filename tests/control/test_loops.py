"""Functions whose lanes part are tried in a loop over the examples first, which stays where it is quicker."""

import collections
import contextlib
import functools
import heapq
import operator
import re
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lanewise import debug, errors, grad, jvp, vmap
from lanewise._control.runs import loops, pacing, watches
from lanewise._control.runs.pacing import Pace
from tests.control.compositions import by_autograd, by_vmap, by_vmap_grad, examples
from tests.control.fuzz import program

pytestmark = pytest.mark.loops


class Clock:
    """Stands for the time that the thread works: it goes on by `step` whenever it is asked for."""

    def __init__(self):
        self.now, self.step = 0.0, 0.0

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", clock)
    return clock


@pytest.fixture
def ran(monkeypatch):
    """What has run: how many examples are done when a loop stops, and what all lanes together come to."""
    found = []
    go_on, apart, masked = loops._Loop.go_on, loops.run_apart, loops.runner.masked

    def go_on_noted(self, enough):
        go_on(self, enough)
        found.append("failed" if self.failed else len(self.results))

    def apart_noted(*args, **options):
        out = apart(*args, **options)
        found.append("given up" if out is None else "apart")
        return out

    def masked_noted(*args):
        out = masked(*args)
        if out is not None:
            found.append("masked")
        return out

    monkeypatch.setattr(loops._Loop, "go_on", go_on_noted)
    monkeypatch.setattr(loops, "run_apart", apart_noted)
    monkeypatch.setattr(loops.runner, "masked", masked_noted)
    return found


@pytest.fixture
def slow_together(clock, monkeypatch):
    """A loop is too long to be free, and lanes that part take longer than one."""
    clock.step = 1.0
    monkeypatch.setattr(pacing, "FREE", 1.0)
    seconds = iter(range(10**6, 10**9, 10**6))
    monkeypatch.setattr(watches.Budget, "seconds", lambda self: next(seconds))


def as_loop(f, *columns):
    return torch.stack([torch.as_tensor(f(*row)) for row in zip(*columns)])


def numbers(count=40):
    return torch.arange(1, count + 1)


def fresh():
    """A search of which nothing is known yet."""

    def found(k):
        n = int(k)
        for i in range(100):
            if i == n:
                return torch.tensor(2 * i)
        return torch.tensor(-1)

    return found


# --- which way -------------------------------------------------------------------------------------------------------


def searches(k):
    n = int(k)
    for i in range(100):
        if i == n:
            return torch.tensor(2 * i)
    return torch.tensor(-1)


def test_a_loop_that_costs_next_to_nothing_is_all_there_is(clock, ran):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(vmap(searches)(numbers()), 2 * numbers())
    assert ran == [40] * 3


def searches_again(k):
    n = int(k)
    for i in range(60):
        if i == n:
            return torch.tensor(3 * i)
    return torch.tensor(-1)


def test_lanes_that_take_longer_together_come_to_the_end_in_a_loop(slow_together, ran):
    with pytest.warns(errors.SlowPathWarning) as told:
        assert torch.equal(vmap(searches_again)(numbers()), 3 * numbers())
    assert ran == [1, "given up", 40]
    assert str(told[0].message).startswith(
        "vmap: the 40 lanes part so often that they run one by one, which takes about as long as a Python loop over "
        "them\n  they part at "
    )
    first = searches_again.__code__.co_firstlineno
    place = re.search(r"they part at (.*?):(\d+): ", str(told[0].message))
    assert place and place[1] == __file__ and first < int(place[2]) <= first + 4  # in the loop of the function
    with pytest.warns(errors.SlowPathWarning):
        assert torch.equal(vmap(searches_again)(numbers()), 3 * numbers())
    assert ran[3:] == [40]


def searches_shortly(k):
    n = int(k)
    for i in range(50):
        if i == n:
            return torch.tensor(4 * i)
    return torch.tensor(-1)


def test_what_is_worth_telling_of(slow_together, ran, clock, monkeypatch):
    with pytest.warns(errors.SlowPathWarning):
        vmap(searches_shortly)(numbers())
    clock.step = 0.0  # in next to no time, whatever it takes together
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(vmap(searches_shortly)(numbers()), 4 * numbers())
    clock.step = 1e-3
    monkeypatch.setattr(pacing, "FREE", 1e3)
    told = []
    for _ in range(60):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vmap(searches_shortly)(numbers())
        told.append(len(caught))
    # Loops of a few milliseconds, once they add up to a tenth of a second.
    every = 60 // sum(told)
    assert 10 < every <= 20 and max(told) == 1 and not any(told[: every - 5])


def works(x, k):
    for _ in range(int(k) % 4):
        x = x * 2
    return x


def test_lanes_that_are_quicker_together_stay_so(clock, ran):
    xs = torch.rand(40)
    want = as_loop(works, xs, numbers())
    clock.step = 1.0
    assert torch.equal(vmap(works)(xs, numbers()), want)
    assert ran == [1, "apart"]
    for _ in range(3):
        assert torch.equal(vmap(works)(xs, numbers()), want)
    assert ran[2:] == [4, "apart", "apart", "apart"]  # some more, lest the first one took long to warm up


def test_few_lanes_that_are_timed_again_are_done_then(clock, ran):
    xs = torch.rand(4)
    clock.step = 1.0
    for _ in range(2):
        assert torch.equal(vmap(works)(xs, numbers(4)), as_loop(works, xs, numbers(4)))
    assert ran == [1, "apart", 4]


def newton(x):
    y = x
    while (y * y - x).abs() > 1e-6 * x:
        y = 0.5 * (y + x / y)
    return y


def test_masks_take_over_from_a_loop(clock, ran, monkeypatch):
    xs = torch.rand(40) + 0.5
    want = as_loop(newton, xs)
    torch.testing.assert_close(vmap(newton)(xs), want)
    assert ran == [40]
    monkeypatch.setattr(pacing, "RENT", 0.0)  # enough of loops
    torch.testing.assert_close(vmap(newton)(xs), want)
    torch.testing.assert_close(vmap(newton)(xs), want)
    assert ran == [40, "masked"]  # and then without looking on


def test_a_pace():
    pace = Pace()
    assert pace.free() == pacing.FREE and not pace.runs_alone()
    pace.note_loop(1e-5, 1e-3, True)
    assert pace.free() == pacing.FREE and not pace.runs_alone()
    pace.note_loop(1e-5, pacing.RENT, True)
    assert pace.free() < 0
    assert pace.note_together(100, 1e-4)  # ten times as fast
    assert pace.free() == 0 and not pace.runs_alone()
    assert not pace.note_together(100, 1.0) and not pace.runs_alone()  # once may be a mishap
    assert pace.note_together(100, 1e-4)
    assert not pace.note_together(100, 1.0) and not pace.note_together(100, 1.0)
    assert [pace.runs_alone() for _ in range(pacing.LATER + 2)] == [True] * pacing.LATER + [False] * 2
    pace.go_alone()
    assert sum(pace.runs_alone() for _ in range(5 * pacing.LATER)) == 2 * pacing.LATER


def test_a_pace_known_from_few_examples():
    pace = Pace()
    pace.note_loop(1e-5, 1e-4, False)
    for _ in range(2):
        assert not pace.runs_alone()
        assert not pace.note_together(100, 9e-4)  # too close to say
    assert pace.runs_alone() and pace.free() == 0 and not pace.sure
    pace.note_loop(0.5e-5, 5e-4, True)
    assert not pace.runs_alone()
    assert not pace.note_together(100, 9e-4) and not pace.note_together(100, 9e-4)
    assert pace.runs_alone()
    pace.note_loop(1.0, 100.0, False)  # the garbage was collected
    assert pace.each == pytest.approx(0.75e-5)


def test_a_pace_known_from_the_first_example():
    pace = Pace()
    pace.note_loop(1e-3, 1e-3, False, cold=True)
    assert pace.cold and pace.note_together(100, 5e-2)
    pace.note_loop(1e-4, 4e-4, False)
    assert not pace.cold and pace.each == 1e-4
    assert not pace.note_together(100, 5e-2) and not pace.note_together(100, 5e-2) and pace.runs_alone()
    pace.note_loop(1e-4, 1e-4, False, cold=True)
    assert not pace.cold  # more is known


def test_a_loop_that_takes_much_longer_than_before_is_left(slow_together, ran, clock):
    found = fresh()
    want = as_loop(found, numbers())
    with pytest.warns(errors.SlowPathWarning):
        for _ in range(2):
            assert torch.equal(vmap(found)(numbers()), want)
        clock.step = 1e4
        assert torch.equal(vmap(found)(numbers()), want)
    assert ran[:4] == [1, "given up", 40, 40] and ran[4] < 40 and ran[5] == "given up"


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("why", ["deterministic", "distributed"])
def test_no_time_decides_where_runs_are_to_be_the_same(why, clock, ran, monkeypatch):
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(3):
        assert torch.equal(vmap(fresh())(numbers()), 2 * numbers())
    assert ran == []


# --- what comes out --------------------------------------------------------------------------------------------------


def halvings(n):
    n, count = int(n), 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    return {"count": count, "pair": (torch.tensor(count), torch.ones(2) * count, "text", 1)}


def test_results_that_are_numbers_and_structures(clock, ran):
    want = [halvings(n) for n in numbers()]
    got = vmap(halvings, out_dims={"count": 0, "pair": (0, 1, None, None)})(numbers())
    assert got["count"].tolist() == [each["count"] for each in want] and got["count"].dtype is torch.int64
    assert torch.equal(got["pair"][0], torch.stack([each["pair"][0] for each in want]))
    assert torch.equal(got["pair"][1], torch.stack([each["pair"][1] for each in want], 1))
    assert got["pair"][2:] == ("text", 1)
    assert ran == [40]


def mixed(k):
    n = int(k)
    return 1 if n < 5 else 0.5 if n < 9 else torch.tensor(2)


def test_results_that_are_put_together_as_lanes_that_parted(clock, ran):
    want = as_loop(mixed, numbers(12)).double()
    assert torch.equal(vmap(mixed)(numbers(12)).double(), want)
    ones = lambda k: torch.ones(int(k))
    assert [row.shape[0] for row in vmap(ones, out_dims="list")(numbers(5))] == [1, 2, 3, 4, 5]
    assert vmap(lambda k: int(k) + 1, out_dims="list")(numbers(5)) == [2, 3, 4, 5, 6]
    assert vmap(ones, out_dims="jagged")(numbers(5)).offsets().tolist() == [0, 1, 3, 6, 10, 15]
    with pytest.raises(errors.TransformError, match="cannot be stacked: lane 0 gives .1., lane 1 gives .2."):
        vmap(ones)(numbers(5))
    with pytest.raises(errors.LaneValueError, match="different values"):
        vmap(lambda k: "few" if int(k) < 3 else "many")(numbers(5))
    with pytest.raises(ValueError, match="out_dims"):
        vmap(lambda k: torch.tensor(int(k)), out_dims=None)(numbers(5))


ONE = torch.ones(2)


def returns_one(k):
    for i in range(60):
        if i == int(k):
            return ONE, torch.tensor(i)
    return ONE, torch.tensor(0)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_runs_again_in_the_same_way(reentrant, clock, ran, monkeypatch):
    xs = torch.linspace(0.5, 2.0, 40)
    for _ in range(3):
        leaf = xs.clone().requires_grad_()
        out = checkpoint(lambda x: vmap(powers)(x, numbers()), leaf, use_reentrant=reentrant)
        clock.step = 1.0 - clock.step  # time passes, or does not
        out.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * xs * numbers())
    assert reentrant or ran == []


def test_an_object_that_all_lanes_return_is_that_object(clock, ran):
    same, place = vmap(returns_one, out_dims=(None, 0))(numbers())
    assert same is ONE and torch.equal(place, numbers())
    assert torch.equal(vmap(returns_one)(numbers())[0], ONE.expand(40, 2))
    assert ran == [40, 40]


def powers(x, k):
    for i in range(100):
        if i == int(k):
            return x * x * i
    return x


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("given_up", [False, True])
def test_derivatives(given_up, clock, request):
    if given_up:
        request.getfixturevalue("slow_together")
    xs = torch.linspace(0.5, 2.0, 40)
    want = 2 * xs * numbers()
    for _ in range(3):
        leaf = xs.clone().requires_grad_()
        vmap(powers)(leaf, numbers()).sum().backward()
        torch.testing.assert_close(leaf.grad, want)
        torch.testing.assert_close(grad(lambda xs: vmap(powers)(xs, numbers()).sum())(xs), want)
        torch.testing.assert_close(vmap(grad(powers))(xs, numbers()), want)
        torch.testing.assert_close(jvp(lambda xs: vmap(powers)(xs, numbers()), (xs,), (xs,))[1], want * xs)


def test_lanes_along_any_dim_in_chunks_and_named(clock, ran):
    def f(x, k, scale):
        return x.sum() * int(k) * scale["a"] if int(k) % 2 else -x.sum()

    x = torch.rand(3, 10)
    scale = {"a": torch.rand(10)}
    want = torch.stack([f(x[:, i], i + 1, {"a": scale["a"][i]}) for i in range(10)])
    torch.testing.assert_close(vmap(f, in_dims=(1, 0, 0))(x, numbers(10), scale), want)
    torch.testing.assert_close(vmap(f, in_dims=(1, 0, 0), chunk_size=4)(x, numbers(10), scale), want)
    torch.testing.assert_close(vmap(f, in_dims={"x": 1, "k": 0, "scale": 0})(x, scale=scale, k=numbers(10)), want)
    assert ran == [10, 4, 4, 2, 10]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed, given_up, clock, request):
    if given_up:
        request.getfixturevalue("slow_together")
    f, text = program(seed, in_place=seed % 3 == 0, kinds=seed % 2 == 1)
    try:
        want = [composition(f, *examples(seed, lanes=6))[1] for composition in (by_vmap, by_vmap_grad, by_autograd)]
    except (RuntimeError, TypeError):
        return
    for _ in range(2):
        for composition, each in zip((by_vmap, by_vmap_grad, by_autograd), want):
            got = composition(f, *examples(seed, lanes=6))[0]
            assert torch.allclose(got, each, rtol=1e-8, atol=1e-8), f"{composition.__name__}\n{text}"


# --- errors and traces -----------------------------------------------------------------------------------------------


def checked(x, k):
    for i in range(int(k) % 7):
        if x > 0.5 and i > 3:
            raise ValueError("large")
        x = x + 0.01
    return x


def test_an_error_names_all_lanes_that_raise(clock, ran):
    xs = torch.linspace(0, 2, 10)
    wanted = []
    for place, (x, k) in enumerate(zip(xs, numbers(10))):
        try:
            checked(x, k)
        except ValueError:
            wanted.append(place)
    assert len(wanted) > 1
    for _ in range(2):
        with pytest.raises(ValueError, match="large") as caught:
            vmap(checked)(xs, numbers(10))
        assert caught.value.lanes == wanted
    assert "failed" in ran


def writes_in_a_library(x, k):
    y = nn.functional.relu(x, inplace=True)
    if int(k) == 5:
        raise ValueError("five")
    return y * int(k) if int(k) % 2 else y


def test_what_arguments_were_written_to_is_not_run_again(clock, ran):
    xs = torch.randn(10)
    want = torch.where(torch.arange(10) < 5, xs.relu(), xs)
    with pytest.raises(ValueError, match="five") as caught:
        vmap(writes_in_a_library)(xs, numbers(10))
    assert caught.value.lanes == [4]
    assert ran == []
    assert torch.equal(xs[:4], want[:4])


def draws(k):
    return torch.nn.functional.dropout(k * 1.0) if int(k) % 2 else k * 1.0


def test_numbers_that_are_drawn_without_leave(clock, ran):
    state = torch.get_rng_state()
    with pytest.raises(errors.RandomnessError, match="randomness error mode"):
        vmap(draws)(numbers(4) * 2 + 1)
    xs = torch.tensor([2, 4, 3, 6])
    with pytest.raises(errors.RandomnessError, match="randomness error mode"):
        vmap(draws)(xs)
    assert torch.equal(state, torch.get_rng_state())
    got = vmap(draws, randomness="different")(xs)
    assert torch.equal(got[xs % 2 == 0], xs[xs % 2 == 0] * 1.0)
    assert "apart" not in ran[1:]


def test_what_is_printed_is_for_all_lanes(clock, ran, capsys):
    def prints(x):
        print(f"{x:.1f}")
        return x + 1 if x > 0 else x - 1

    def prints_each(x):
        if x > 0:
            debug.print("{}", x)
        return x + 1 if x > 0 else x - 1

    xs = torch.tensor([1.0, -1.0, 2.0])
    vmap(prints)(xs)
    assert "[1.0, -1.0, 2.0]" in capsys.readouterr().out
    vmap(prints_each)(xs)
    assert capsys.readouterr().out == "1.0\n2.0\n"
    assert ran == []


STATE = {"calls": 0}
WEIGHT = torch.ones((), requires_grad=True)
NORM = nn.BatchNorm1d(1)
GENERATOR = torch.Generator()
LEFT = iter(range(1000))


def counts(k):
    STATE["calls"] = 0
    return k * 1.0 if int(k) % 2 else k * 2.0


def pulls_back(k):
    (WEIGHT * int(k)).backward()
    return k * 1.0


def normalizes(k):
    return NORM(k.expand(2, 1) * 1.0).sum() if int(k) % 2 else k * 1.0


def draws_from_its_own(k):
    return k * 1.0 if int(k) % 2 else k + torch.randn((), generator=GENERATOR) * 0


def takes_the_next(k):
    return k * 1.0 if int(k) % 2 else k + next(LEFT) * 0


def writes(k):
    k.add_(0)
    return k * 1.0 if int(k) % 2 else k * 2.0


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self, k):
        self.calls += 1
        return k * 1.0 if int(k) % 2 else k * 2.0


class Printer:
    def show(self, k):
        print(k)
        return k * 1.0


PRINTER = Printer()


def prints_by_a_method(k):
    return PRINTER.show(k) if int(k) % 2 else k * 2.0


KEPT = []


def keeps_one_of_two(k):
    kept = KEPT if int(k) else []
    kept.append(1)
    return k * 1.0 if int(k) % 2 else k * 2.0


def keeps_the_first(k):
    kept, rest = KEPT, []
    rest.append(1)
    kept.append(1)
    return k * 1.0 if int(k) % 2 else k * 2.0


def keeps_in_a_function(k):
    kept = []

    def keep():
        nonlocal kept
        kept = KEPT
        kept.append(1)

    keep()
    return k * 1.0 if int(k) % 2 else k * 2.0


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize(
    "f",
    [
        counts,
        keeps_one_of_two,
        keeps_the_first,
        keeps_in_a_function,
        pulls_back,
        normalizes,
        draws_from_its_own,
        takes_the_next,
        writes,
        Counter(),
        prints_by_a_method,
        lambda k: counts(k) + 1,
    ],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_what_leaves_traces_runs_together(f, clock, ran):
    WEIGHT.grad = None
    xs = numbers(10)
    for _ in range(2):
        try:
            vmap(f)(xs)
        except errors.RandomnessError:
            assert f is draws_from_its_own
    assert ran == [] or set(ran) == {"masked"}


def adds_to_memory(x):
    array = x.numpy()
    array += 1 if x[0] > 0 else 2
    return torch.from_numpy(array)


@pytest.mark.parametrize("f", [lambda x: x.numpy().sort(), adds_to_memory], ids=["sort", "add"])
def test_the_memory_of_an_argument_is_not_written_to_unseen(f, clock, ran):
    xs = torch.tensor([[2.0, 1.0], [-4.0, -5.0]])
    before = xs.clone()
    with pytest.raises(ValueError, match="read-only"):
        vmap(f)(xs)
    assert torch.equal(xs, before) and ran == []


def heaps(k):
    items = []
    for i in range(6):
        heapq.heappush(items, (i * int(k)) % 7)
    return heapq.heappop(items) + heapq.heappop(items)


def counts_in_a_pair(k):
    count, total = 0, k * 0
    while total < 9:
        count += 1
        total = total + int(k)
    return count


def counts_in_a_function(k):
    count, low, memo = 0, [], {}

    def up(n):
        nonlocal count
        count += 1
        memo[n] = n * n if n < 2 else memo[n - 1] + n
        return memo[n]

    for n in range(int(k) % 5):
        if up(n) % 2:
            low.append(n)
    return count + sum(low) + sum(memo[n] for n in range(int(k) % 5))


def changes_copies(k):
    rest, seen, queue = list(range(6)), set(), collections.deque([int(k) % 6])
    kinds = collections.defaultdict(int)
    while queue:
        n = queue.popleft()
        rest[n] = 0
        if n not in seen:
            seen.add(n)
            kinds[n % 2] = n
            queue.append((n + 2) % 6)
    del rest[:1]
    return sum(rest) + kinds[0] * 10 + len(seen)


@pytest.mark.parametrize("f", [heaps, counts_in_a_pair, counts_in_a_function, changes_copies])
def test_objects_made_inside_are_no_traces(f, clock, ran):
    assert vmap(f)(numbers(20)).tolist() == [f(k) for k in numbers(20)]
    assert ran == [20]


def fills(k):
    n = int(k) % 5
    rows, squares = torch.zeros(5, 2, dtype=torch.long), torch.zeros(5)
    path = torch.full((5,), -1)
    path[n - 1] = k
    path[: n + 1] += 2
    path[0].add_(k)
    table = k.new_zeros(3, 3).clone()
    table[0, n % 3] = 5
    table[n % 3][1:].mul_(k)
    return path.sum() + table.sum() + rows.sum() + squares.sum()


def test_tensors_made_inside_are_written_to_in_a_loop(clock, ran):
    for _ in range(2):
        assert torch.equal(vmap(fills)(numbers(20)), as_loop(fills, numbers(20)))
    assert ran == [20, 20]


TABLE = torch.zeros(5)


def viewed(k):
    part = TABLE.view(5)
    part[int(k) % 5 - 1] = 0
    return k * 1.0


def set_to_another(k):
    part = torch.zeros(5)
    part.set_(TABLE)
    part[int(k) % 5 - 1] = 0
    return k * 1.0


def either(k):
    part = torch.zeros(5) if int(k) % 2 else TABLE
    part[0, ...] = 0
    return k * 1.0


def item_of_one(k):
    part = torch.zeros(5)[: int(k) % 2]
    part[:1] += 1
    return k * 1.0


@pytest.mark.parametrize("f", [viewed, set_to_another, either, item_of_one], ids=lambda f: f.__name__)
def test_what_may_be_a_tensor_from_outside_is_not_written_to_in_a_loop(f, clock, ran):
    assert torch.equal(vmap(f)(numbers(6)), as_loop(f, numbers(6)))
    assert 6 not in ran


def test_a_vmap_inside_another_is_no_loop(clock, ran):
    def inner(x, k):
        return x * int(k) if int(k) % 2 else -x

    xs = torch.rand(3, 4)
    ks = torch.arange(12).reshape(3, 4)
    want = torch.stack([as_loop(inner, x, k) for x, k in zip(xs, ks)])
    assert torch.equal(vmap(vmap(inner))(xs, ks), want)
    assert all(found not in (3, 4) for found in ran)


@pytest.mark.parametrize("where", ["vmap of vmap", "in a function"])
@pytest.mark.parametrize("other", [lambda y, i: y * i, lambda y, i: 2.5], ids=["tensors", "numbers"])
def test_numbers_that_a_vmap_inside_returns_have_its_lanes(other, where, ran):
    def f(k, y):
        n = int(k)
        for i in range(100):
            if i == n:
                return 0.5 if i % 2 else other(y, i)
        return 1.0

    ys = torch.tensor([1.0, 2.0, 3.0])
    want = torch.stack([as_loop(lambda y, k=k: f(k, y), ys) for k in numbers()])
    over = vmap(vmap(f, (None, 0)), (0, None)) if where == "vmap of vmap" else None
    for _ in range(4):
        found = over(numbers(), ys) if over else vmap(lambda k: vmap(lambda y: f(k, y))(ys))(numbers())
        assert torch.equal(found, want)
    assert 40 not in ran


def test_a_model_that_trains_after_it_was_evaluated(monkeypatch):
    model = nn.BatchNorm1d(3).double().eval()

    def f(x):
        s = x.sum()
        for _ in range(int(s.abs() * 3)):
            s = s * 0.9
        return model(x[None] * torch.arange(4.0, dtype=torch.float64)[:, None]).sum() + s

    xs = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vmap(f)(xs[:5])
    model.train()
    monkeypatch.setattr(pacing, "FREE", 1e-6)  # a loop would be left after some examples
    vmap(f)(xs)
    found = model.num_batches_tracked.item(), model.running_mean.clone()
    model.reset_running_stats()
    for x in xs:
        f(x)
    assert found[0] == model.num_batches_tracked == 60
    torch.testing.assert_close(found[1], model.running_mean)


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_running_statistics_of_functions(norm, monkeypatch):
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def f(x):
        s = x.sum()
        for _ in range(int(s.abs() * 3)):
            s = s * 0.9
        images = x[None, :, None] * torch.arange(4.0, dtype=torch.float64)
        if norm == "batch_norm":
            return torch.nn.functional.batch_norm(images, mean, var, training=True).sum() + s
        return torch.nn.functional.instance_norm(images, mean, var).sum() + s

    xs = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(pacing, "FREE", 1e-6)
    for _ in range(3):
        mean.zero_()
        var.fill_(1.0)
        vmap(f)(xs)
        found = mean.clone()
        mean.zero_()
        var.fill_(1.0)
        for x in xs:
            f(x)
        torch.testing.assert_close(found, mean)


def test_attributes_set_past_a_class(monkeypatch):
    class Frozen:
        pass

    count = Frozen()
    object.__setattr__(count, "n", 0)

    def f(x):
        object.__setattr__(count, "n", count.n + 1)
        result = x * int(x[0] * 3) * count.n
        object.__setattr__(count, "n", count.n - 1)
        return result

    xs = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(pacing, "FREE", 1e-6)
    for _ in range(4):
        vmap(f)(xs[:5])
        assert torch.equal(vmap(f)(xs), torch.stack([f(x) for x in xs])) and count.n == 0


def test_a_loop_that_has_written_to_a_tensor_from_outside_goes_on_to_its_end(monkeypatch):
    total = torch.zeros(3)

    def shared():
        return total

    def f(x):
        row = shared()
        if x.sum() > 0:
            return x * int(x[0])
        row += x  # which the code does not tell from a number
        return x

    xs = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(pacing, "FREE", 1e-6)
    vmap(f)(xs)
    found = total.clone()
    total.zero_()
    for x in xs:
        f(x)
    torch.testing.assert_close(found, total)


def test_what_is_written_by_out_is_no_loops_business(ran):
    total = torch.zeros(3)

    def f(x):
        if x.sum() > 0:
            torch.mul(x, 2, out=total)
        return x * 2

    with pytest.raises(errors.CapturedWriteError):
        vmap(f)(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))
    assert not total.any()


def test_what_a_vmap_inside_returns_is_no_exception_of_the_users(ran):
    def f(x):
        try:
            number = vmap(lambda a: 3)(torch.ones(2))
        except:  # noqa: E722
            number = 7
        return x * number if x > 0 else -x * number

    for _ in range(3):
        assert torch.equal(vmap(f)(numbers() - 20.5), as_loop(f, numbers() - 20.5))
    assert ran[0] == "failed" and 40 not in ran


def shrunk(x):
    s = x.sum()
    for _ in range(int(s.abs() * 3)):
        s = s * 0.9
    return s


SEEN, MEMORY = [], torch.zeros(1)
APPEND = SEEN.append
COUNTED = collections.defaultdict(int)
HOOKED = nn.Identity()
HOOKED.register_forward_hook(lambda *args: SEEN.append(1))


@contextlib.contextmanager
def counting():
    SEEN.append(1)
    yield


def counted(func):
    @functools.wraps(func)
    def wrapper(x):
        SEEN.append(1)
        return func(x)

    return wrapper


def in_context(x):
    with counting():
        return shrunk(x)


def by_name_of_a_method(x):
    APPEND(1)
    return shrunk(x)


def by_operator(x):
    operator.iadd(MEMORY, 1)
    return shrunk(x)


def by_name(x):
    MEMORY.add_(1)
    return shrunk(x)


def by_a_look(x):
    return shrunk(x) + COUNTED[len(COUNTED)]


def by_a_hook(x):
    return shrunk(HOOKED(x))


class Noted:
    def __init__(self):
        SEEN.append(1)


def by_making(x):
    Noted()
    return shrunk(x)


TRACES = [
    counted(lambda x: shrunk(x)), in_context, by_name_of_a_method, by_operator, by_name, by_a_look, by_a_hook, by_making
]  # fmt: skip


@pytest.mark.parametrize("func", TRACES, ids=lambda func: func.__name__)
def test_no_loop_is_left_whose_examples_have_left_something(func, ran, monkeypatch):
    """The function runs as often as without loops, whatever time they take."""
    xs = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))

    def effects():
        SEEN.clear()
        MEMORY.zero_()
        COUNTED.clear()
        vmap(func)(xs)
        return len(SEEN), MEMORY.item(), len(COUNTED)

    effects()
    monkeypatch.setattr(pacing, "FREE", 0.0)
    want = effects()
    for free in (1e-6, 3e-3):
        monkeypatch.setattr(pacing, "FREE", free)
        for _ in range(3):
            assert effects() == want
    assert not [each for each in ran if each not in ("apart", "masked")]


def test_numbers_that_are_equal_and_yet_two(ran):
    xs = numbers() - 20.5
    found = vmap(lambda x: 0.0 if x > 0 else -0.0)(xs)
    assert torch.equal(found.signbit(), xs < 0) and not found.any()
    found = vmap(lambda x: complex(float("nan"), float(x)))(xs)
    assert torch.equal(found.imag, xs)
    assert ran
