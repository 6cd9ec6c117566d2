"""Functions of plain Python values, to be run as they are and converted. Each is called with the numbers of `CALLS`."""

import contextlib
import functools

CALLS = [(-3, 2), (0, 0), (1, 5), (4, 1), (7, 3)]


def branches(x, n):
    if x < 0:
        y = "negative"
    elif x == 0:
        y = "zero"
    else:
        z = x * n
        y = f"positive {z}"
    return y


def early_returns(x, n):
    if x < 0:
        return "low"
    for i in range(n):
        if i == x:
            return i
        while i > 2:
            i -= 1
            if i == x + 1:
                return "inner", i
    return None


def falls_through(x, n):
    if x > 3:
        return x


def loops(x, n):
    total, seen = 0, []
    for i, (a, b) in enumerate(zip(range(10), range(n, n + 8))):
        if a == x:
            continue
        if b > n + 5:
            break
        total += a * b
        seen.append((i, total))
    else:
        total = "exhausted"
    return total, seen, i


def while_else(x, n):
    while x > 0:
        x -= 2
        if x == n:
            break
    else:
        return "else", x
    return "break", x


def nested_loops(x, n):
    found = []
    for i in range(5):
        for j in range(5):
            if j == n:
                break
            if (i + j) % 2:
                continue
            found.append((i, j))
        else:
            if i == x:
                break
            continue
        found.append(i)
        if i > 3:
            return found
    return tuple(found)


def loop_variables_stay(x, n):
    for i in range(n):  # noqa: B007
        pass
    for _ in ():
        unbound = 1
    try:
        return i, unbound
    except NameError as error:
        return type(error).__name__


def chains(x, n):
    calls = []

    def call(value):
        calls.append(value)
        return value

    return call(x) < call(n) <= call(5) != call(7), 0 <= x < 3, x < n < 9 < x, calls


def chains_in_places(x, n):
    return [i for i in range(5) if 0 < call_twice(i) < x + 3 < 9], {i: x <= i + 1 < n for i in range(2)}


def call_twice(i):
    return i


def boolean_operands(x, n):
    return x and n, x or n or "none", not x, not (x and n), (x > 1 and n > 1) or x == n, x and n and (x or 5)


def ternaries(x, n):
    y = x if x > n else n if n else "neither"
    return y, [a if a % 2 else -a for a in range(n)], (lambda a: a if a > x else None)(n)


def walrus(x, n):
    if (y := x * 2) > n:
        return y
    while (x := x + 1) < n:
        pass
    return x, y, [last := i for i in range(3)], last


def deletes(x, n):
    y = x
    if x > 1:
        del y
    try:
        return y
    except UnboundLocalError:
        return "deleted"


def unbound_after_branch(x, n):
    if x > n:
        y = 1
    return y


def closures(x, n):
    count = 0

    def add(amount=n, *, twice=False):
        nonlocal count
        if amount < 0:
            return count
        count += amount * (2 if twice else 1)
        return count

    for i in range(3):
        add(i if i != x else 10, twice=i == n)
    if x:
        count += 100
    return count, add()


def defaults(x, n, *args, y=3, z, **rest):
    if args or rest:
        return x, n, args, y, z, rest
    return None


def uses_defaults(x, n):
    return defaults(x, n, 1, 2, z=5, w=6), defaults(n, x, z=x), defaults(x, n, *[1] * n, **{"z": 1, "q": n})


def fibonacci(x, n=None):
    return x if x < 2 else fibonacci(x - 1) + fibonacci(x - 2)


def tries(x, n):
    log = []
    for i in range(3):
        try:
            if i == 1:
                raise ValueError(i)
            log.append(10 // (x - i))
        except ZeroDivisionError as error:
            log.append(str(error))
        except (ValueError, TypeError):
            log.append("value")
        else:
            log.append("else")
        finally:
            log.append("finally")
    return log


def returns_in_finally(x, n):
    log = []
    try:
        log.append(x)
        return log
    finally:
        log.append("done")


def bare_except(x, n):
    try:
        return 1 // n
    except:  # noqa: E722
        return "caught"


def withs(x, n):
    log = []

    @contextlib.contextmanager
    def noted(name):
        log.append(f"enter {name}")
        yield name
        log.append(f"exit {name}")

    with noted("a") as a, noted("b"):
        for i in range(n):
            with contextlib.suppress(ValueError):
                if i == x:
                    raise ValueError
                log.append(i)
            if i == 2:
                return a, log
    return log


def matches(x, n):
    match (x, n):
        case (0, _):
            y = "zero"
        case (a, b) if a > b:
            y = a
            if b:
                return "guarded", a, b
        case [_, *rest]:
            y = rest
        case _:
            y = None
    return y


def comprehensions(x, n):
    pairs = {(i, j) for i in range(n) for j in range(i) if i != x}
    return (
        sorted(pairs),
        sum(i for i in range(n) if i % 2),
        any(i == x for i in range(5)),
        {i: [i] * i for i in range(n)},
    )


def places(x, n):
    table = [[1, 2, 3], [4, 5, 6]]
    named = {"a": 1}
    table[x % 2][n % 3] += 10
    named["a"] -= x
    named[n] = table[-1][:2]
    (table[0][0], named["b"]), *rest = (x, n), 1, 2
    del table[0][1]
    return table, named, rest, "text"[n % 4], (1, 2, 3)[0:n]


class Thing:
    scale = 2

    def __init__(self, x):
        self.__x = x
        self.calls = 0

    def value(self, n):
        self.calls += 1
        if self.__x > n:
            return self.__hidden(n)
        return self.__x if n else -self.__x

    def __hidden(self, n):
        return [self.__x + i for i in range(n) if i != self.__x]

    @property
    def double(self):
        return self.__x * self.scale if self.__x > 0 else 0

    @classmethod
    def make(cls, x):
        return cls(x) if x > 0 else cls(-x)

    @staticmethod
    def apply(f, x):
        return f(x) if x else None

    def __call__(self, n):
        return self.value(n) or "nothing"


class SubThing(Thing):
    def value(self, n):
        above = super().value(n) if n else None
        if above is None:
            return super().value(1)
        return [super(SubThing, self).value(i) for i in range(2)] + [above]


def methods(x, n):
    thing = SubThing.make(x)
    return thing.value(n), thing(n), thing.double, Thing.apply(lambda a: a + 1, n), thing.calls


def local_class(x, n):
    class Local(Thing):
        offset = 1 if x > 0 else 2

        def value(self, n):
            return super().value(n) if n > 1 else self.offset

    return Local(x).value(n)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if not args:
            return None
        return "wrapped", function(*args, **kwargs)

    return wrapper


@decorated
def with_decorator(x, n):
    """A docstring."""
    if x > n:
        return x
    return n


def partials(x, n):
    return functools.partial(ternaries, n=x)(n), functools.reduce(lambda a, b: a if a > b else b, [x, n, 2])


def generators(x, n):
    def count(limit):
        for i in range(limit):
            if i != x:
                yield i

    return list(count(n)), max(count(9)), sum(i for i in count(5) if i)


def docstring(x, n):
    """The first statement stays the first."""
    return 1 if x else docstring.__doc__


def asserts(x, n):
    assert x >= 0, f"negative: {x}"
    assert n
    return x


def raises(x, n):
    try:
        if x > n:
            raise ValueError("inner")
        [].pop()
    except ValueError as error:
        raise KeyError(n) from error


def annotated(x: int, n: int = 0) -> "tuple":
    y: int = x
    z: str
    if n:
        z = "n"
    else:
        z = str(y)
    return y, z


def iterators(x, n):
    numbers = iter(range(9))
    for a in numbers:
        if a == n:
            break
    rest = next(numbers, None)
    for b in numbers:
        if b > 6:
            return a, rest, b
    return "end", a, rest


def starred(x, n):
    first, *rest = [*range(x), *(n, x)]
    print_like = "{} {}".format(*[first, rest])
    return print_like, f"{x if x else 'none':>4} {n!r}"


COUNT = 0


def globals_too(x, n):
    global COUNT
    COUNT = 0
    for i in range(n):
        if i != x:
            COUNT += i
    return COUNT


maximum = lambda a, b: a if a > b else b
first, second = (lambda x, n: x if n else "first"), (lambda x, n: n if x else "second")


PROGRAMS = [
    branches, early_returns, falls_through, loops, while_else, nested_loops, loop_variables_stay, chains,
    chains_in_places, boolean_operands, ternaries, walrus, deletes, unbound_after_branch, closures, uses_defaults,
    fibonacci, tries, returns_in_finally, bare_except, withs, matches, comprehensions, places, methods, local_class,
    with_decorator, partials, generators, docstring, asserts, raises, annotated, iterators, starred, globals_too,
    maximum, first, second,
]  # fmt: skip
