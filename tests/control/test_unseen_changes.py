"""Code that changes objects where no call is to be seen: it does so in the lanes that come by, and in no others."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import operator
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from lanewise import grad, vmap


class Counter:
    def __init__(self):
        self.n = 0

    def up(self, value=1, _=None):
        self.n += 1
        return value


class Special(Counter):
    """Each method counts."""

    @property
    def asked(self):
        return self.up()

    def __getattr__(self, name):
        if not name.startswith("lazy"):
            raise AttributeError(name)
        self.__dict__[name] = 3
        return self.up()

    def __getitem__(self, place):
        return self.up(place)

    def __len__(self):
        return self.up(4)

    def __bool__(self):
        return bool(self.up())

    def __contains__(self, value):
        return bool(self.up())

    def __eq__(self, other):
        return bool(self.up())

    def __hash__(self):
        return self.up()

    def __lt__(self, other):
        return bool(self.up())

    def __add__(self, other):
        return self.up() + other

    def __radd__(self, other):
        return self.up() + other

    def __neg__(self):
        return self.up()

    def __iter__(self):
        self.n += 1
        return iter([1, 2])

    def __str__(self):
        return "x" * self.up(3)

    def __format__(self, spec):
        return "x" * self.up(3)

    def __index__(self):
        return self.up()

    def __float__(self):
        return float(self.up())


class Cached(Counter):
    @functools.cached_property
    def value(self):
        return self.up(7)


class Steps(Counter):
    def steps(self):
        for value in (1, 2):
            yield self.up(value)


class Timer:
    def __init__(self, counter):
        self.counter = counter

    def __enter__(self):
        self.counter.n += 1
        return self.counter

    def __exit__(self, *error):
        self.counter.n += 10


@contextlib.contextmanager
def timed(counter):
    counter.n += 1
    yield counter
    counter.n += 10


class Asking:
    def __get__(self, owner, kind=None):
        owner.n += 1
        return 3


class Described(Counter):
    field = Asking()


class Through:
    def __init__(self, counter):
        object.__setattr__(self, "counter", counter)

    def __setattr__(self, name, value):
        setattr(self.counter, name, value)


class Made:
    def __init__(self, counter):
        counter.n += 1
        self.value = counter.n


class MadeByMethod(Made):
    def __init__(self, counter):
        self.register(counter)

    def register(self, counter):
        counter.n += 1
        self.value = counter.n


@dataclasses.dataclass
class MadeOfFields:
    counter: Counter
    value: int = 0

    def __post_init__(self):
        self.counter.n += 1
        self.value = self.counter.n


class ByNew:
    def __new__(cls, counter):
        counter.n += 1
        return object.__new__(cls)


class Meta(type):
    def __call__(cls, counter):
        return counter.up()


class OfMeta(metaclass=Meta):
    pass


class Parted:
    def __class_getitem__(cls, counter):
        return counter.up()


def enters(counter, manager):
    with manager(counter) as inside:
        return inside.n


def binds(counter):
    Through(counter).n = 5
    return counter.n


def evaluates(counter):
    exec("counter.n += 1")
    return counter.n


def by_a_generator(counter):
    def count():
        counter.n += 1
        yield counter.n

    return sum(count())


SPECIAL = [
    lambda c: c.asked,
    lambda c: c.lazy + c.lazy,
    lambda c: c[2],
    lambda c: len(c),
    lambda c: 1 if c else 2,
    lambda c: int(3 in c),
    lambda c: int(c == 3),
    lambda c: int([c] == [3]),
    lambda c: len({c: 1}),
    lambda c: int(c < 3),
    lambda c: c + 1,
    lambda c: 1 + c,
    lambda c: -c,
    lambda c: sum(c),
    lambda c: len([*c]),
    lambda c: len(str(c)),
    lambda c: len(f"{c}"),
    lambda c: [5, 6][c],
    lambda c: float(c),
    lambda c: max(c.asked, 0),
    lambda c: operator.attrgetter("asked")(c),
]
CALLING = [
    lambda c: sum(map(c.up, [1, 2])),
    lambda c: sum(itertools.accumulate([1, 2], c.up)),
    lambda c: len(list(itertools.takewhile(c.up, [1, 0]))),
    lambda c: len(list(itertools.dropwhile(c.up, [1, 0]))),
    lambda c: len(list(itertools.filterfalse(c.up, [1, 0]))),
    lambda c: sum(itertools.starmap(c.up, [(1, 2)])),
    lambda c: len(list(itertools.groupby([1, 2], c.up))),
    lambda c: defaultdict(c.up)["key"],
    lambda c: operator.methodcaller("up", 3)(c),
    evaluates,
    by_a_generator,
]
MAKING = [
    lambda c: Made(c).value,
    lambda c: [Made(c) for _ in range(2)][1].value,
    lambda c: MadeByMethod(c).value,
    lambda c: MadeOfFields(c).value,
    lambda c: dataclasses.replace(MadeOfFields(c)).value,
    lambda c: int(isinstance(ByNew(c), ByNew)),
    lambda c: OfMeta(c),
    lambda c: Parted[c],
]
TABLE = [
    *[(Special, use) for use in SPECIAL],
    *[(Counter, use) for use in (*CALLING, *MAKING, binds)],
    (Cached, lambda c: c.value),
    (Steps, lambda c: sum(c.steps())),
    (Described, lambda c: c.field),
    (Counter, functools.partial(enters, manager=Timer)),
    (Counter, functools.partial(enters, manager=timed)),
]


def in_a_branch(kind, use, x):
    counter = kind()
    first = use(counter) if x > 0 else 0
    return x * (first * 100 + use(counter) * 10 + counter.n)


def in_a_loop(kind, use, x):
    counter, total = kind(), 0
    while x < 1:
        x = x + 0.7
        total = total + use(counter)
    return x * (total * 100 + counter.n)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("lanes", [5, 60])
@pytest.mark.parametrize("around", [in_a_branch, in_a_loop])
@pytest.mark.parametrize("place", range(len(TABLE)))
def test_as_the_loop(place, around, lanes):
    f = functools.partial(around, *TABLE[place])
    xs = torch.randn(lanes, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
    want = torch.stack([f(x) for x in xs])
    leaf = xs.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(sum(f(x) for x in leaf), leaf)
    for _ in range(3):
        torch.testing.assert_close(vmap(f)(xs), want)
        torch.testing.assert_close(vmap(f, chunk_size=4)(xs), want)
        torch.testing.assert_close(vmap(grad(f))(xs), slopes)


# --- what functools.lru_cache keeps ----------------------------------------------------------------------------------


def kept_numbers(x):
    @functools.cache
    def sign(place):
        return 1 if x[place] > 0 else 0

    return x.sum() + 10 * sign(1) + 100 * sign(2) + 1000 * sign(1)


def kept_in_a_branch(x):
    @functools.lru_cache
    def scaled(place):
        return x[place] * (place + 1)

    first = scaled(2) if x[0] > 0 else scaled(1)
    return first * scaled(1) + scaled(2)


def kept_of_some_places(x):
    @functools.cache
    def best(place):
        if place >= 3:
            return 0
        return best(place + 1) + 1 if x[place] < x[place + 1] else max(best(place + 1), best(place + 2))

    return x.sum() + best(0)


def kept_by_number(x):
    @functools.cache
    def twice(number):
        return number * 2

    total = sum(twice(int(value > 0)) for value in x)
    return x.sum() * total + twice.cache_info().hits


class Rows:
    def __init__(self, x):
        self.x = x

    @functools.cache  # noqa: B019
    def at(self, place):
        return self.x[place] if place < 2 else self.at(place - 1) * 0.5 + self.at(place - 2)


def kept_by_a_method(x):
    rows = Rows(x)
    total = rows.at(int(x[1] > 0) + 1)
    if x[0] > 0:
        total = total + rows.at(3)
    return total + rows.at(2)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("lanes", [5, 60])
@pytest.mark.parametrize(
    "f",
    [kept_numbers, kept_in_a_branch, kept_of_some_places, kept_by_number, kept_by_a_method],
    ids=lambda f: f.__name__,
)
def test_what_a_cache_keeps_is_of_the_lanes_that_it_was_computed_for(f, lanes):
    xs = torch.randn(lanes, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = torch.stack([f(x) for x in xs])
    leaf = xs.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(sum(f(x) for x in leaf), leaf)
    for _ in range(3):
        torch.testing.assert_close(vmap(f)(xs), want)
        torch.testing.assert_close(vmap(grad(f))(xs), slopes)
    pairs = xs[: lanes // 2 * 2].unflatten(0, (2, -1))
    torch.testing.assert_close(vmap(vmap(f))(pairs).flatten(), want[: lanes // 2 * 2])


def test_a_context_does_not_keep_functions_from_going_on_together():
    """Nor does one that counts, where it is entered by all lanes."""
    runs = []

    @contextlib.contextmanager
    def noted():
        runs.append(1)
        yield

    def root(x):
        with noted():
            guess = x
            while (guess * guess - x).abs() > 1e-9:
                guess = 0.5 * (guess + x / guess)
        return guess

    xs = torch.linspace(1.0, 1e6, 100, dtype=torch.float64)
    torch.testing.assert_close(vmap(root)(xs), xs.sqrt())
    assert len(runs) == 1


# --- what is kept in C -----------------------------------------------------------------------------------------------


class Added(Counter):
    def __iadd__(self, other):
        self.n += other
        return self


def adds_to_an_array(array):
    array += 1
    return array[0]


def adds_to_an_object(counter):
    counter += 2
    return counter.n


def sets_a_variable(variable):
    variable.set(variable.get() + 1)
    return variable.get()


def shuffled(state):
    state[0].shuffle(state[1])
    return state[1][0]


KEPT = {
    "random": (lambda: random.Random(0), lambda o: o.random() + o.randint(0, 9)),
    "numpy.random": (lambda: np.random.default_rng(0), lambda o: o.random()),
    "RandomState": (lambda: np.random.RandomState(0), lambda o: o.rand()),
    "shuffle": (lambda: (np.random.default_rng(0), np.arange(9.0)), shuffled),
    "ContextVar": (lambda: contextvars.ContextVar("v", default=0), sets_a_variable),
    "defaultdict": (lambda: defaultdict(int), lambda o: o[len(o)] + len(o)),
    "defaultdict by text": (lambda: defaultdict(int), lambda o: o["key"] + len(o)),
    "defaultdict by number": (lambda: defaultdict(int), lambda o: o[0] + len(o)),
    "__setitem__": (lambda: [1, 2, 3], lambda o: (o.__setitem__(slice(0, 1), [4, 5]), len(o))[1]),
    "array +=": (lambda: np.zeros(3), adds_to_an_array),
    "array.fill": (lambda: np.zeros(3), lambda o: (o[1:].fill(o[1] + 2), o[1])[1]),
    "array.sort": (lambda: np.arange(3.0)[::-1].copy(), lambda o: (o.sort(), o[0])[1]),
    "out=": (lambda: np.zeros(3), lambda o: np.add(o, 1, out=o)[0]),
    "put": (lambda: np.zeros(3), lambda o: (np.put(o, [0], [5.0]), o[0])[1]),
    "copyto": (lambda: np.zeros(3), lambda o: (np.copyto(o, o + 1), o[0])[1]),
    "add.at": (lambda: np.zeros(3), lambda o: (np.add.at(o, [0, 0], 1), o[0])[1]),
    "memoryview": (lambda: memoryview(bytearray(2)), lambda o: (o.__setitem__(0, o[0] + 1), o[0])[1]),
    "+= a constant": (Added, adds_to_an_object),
}


def kept_in_a_branch_alone(kind, use, x):
    kept = kind()
    first = float(use(kept)) if x > 0 else 0.0
    return x * (first * 10 + float(use(kept)))


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("lanes", [5, 200])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_in_c_is_of_the_lanes_that_come_by(name, lanes):
    f = functools.partial(kept_in_a_branch_alone, *KEPT[name])
    xs = torch.randn(lanes, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for _ in range(4):
        want = torch.stack([f(x) for x in xs])
        torch.testing.assert_close(vmap(f, chunk_size=4)(xs), want)
        torch.testing.assert_close(vmap(f)(xs), want)
