"""Special methods of a class, defined inside a mapped function or outside: they take and give what Python asks for."""

import math

import pytest
import torch

from lanewise import grad, vmap

XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [0.1, 0.2, -0.3]], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


def define():
    class Vector:
        def __init__(self, v):
            self.v = v

        def __bool__(self):
            return bool(self.v.sum() > 0)

        def __float__(self):
            return float(self.v[0].detach())

        def __complex__(self):
            return complex(self.v[0].detach())

        def __int__(self):
            return int(self.v[0].detach() * 10)

        def __index__(self):
            if self.v[1] > 0:
                return 1
            return 0

        def __len__(self):
            return int(self.v[0] > 0) + 1

        def __length_hint__(self):
            return int(self.v[0] > 0) + 3

        def __hash__(self):
            return hash(float(self.v[0] > 0))

        def __eq__(self, other):
            return (self.v[0] > 0) == (other.v[0] > 0) if isinstance(other, Vector) else self.v[0] > 0

        def __lt__(self, other):
            return self.v[0] < other.v[0]

        def __contains__(self, number):
            return self.v[0] > number

        def __enter__(self):
            return self.v * 2 if self.v[0] > 0 else self.v

        def __exit__(self, *_):
            return self.v[0] > 0

        def __iter__(self):
            self.index = 0
            return self

        def __next__(self):
            self.index += 1
            if self.index > 3 or self.v[0] * self.index > 1:
                raise StopIteration
            return self.v * self.index

        def __reversed__(self):
            return iter([self.v, self.v * 2]) if self.v[0] > 0 else iter([self.v])

        def __getattr__(self, name):
            if not name.startswith("_") and self.v[0] > 0:
                return self.v * 3
            raise AttributeError(name)

        def __call__(self, y):
            if self.v[1] > 0:
                return y * 2
            return y - 1

        def __str__(self):
            return f"<{self.v[0].detach():.1f}>"

        def __repr__(self):
            return f"Vector({self.v[0].detach():.0f})" if self.v[1] > 0 else "Vector()"

        def __format__(self, spec):
            return f"{self.v[1].detach():.1f}{spec}"

        def __bytes__(self):
            return b"a" if self.v[0] > 0 else b"bc"

        def __getitem__(self, place):
            return self.v[place] if self.v[0] > 0 else -self.v[place]

        def __add__(self, other):
            return Vector(self.v + other) if self.v[0] > 0 else Vector(self.v - other)

        def __round__(self, digits=None):
            return round(float(self.v[0].detach()), digits)

        def __abs__(self):
            return self.v if self.v[0] > 0 else -self.v

        def __neg__(self):
            return -self.v if self.v[0] > 0 else self.v

        @property
        def signed(self):
            if self.v[0] > 0:
                return self.v
            return -self.v * 2

    return Vector


OUTSIDE = define()


def in_a_with(v, x):
    y = x
    with v(x) as z:
        y = z * 3
        if x[1] > 0:
            y = y + 1
    return y


def in_a_with_that_catches(v, x):
    y = x
    try:
        with v(x) as z:
            y = z * 3
            raise ValueError
    except ValueError:
        y = y * 5
    return y


def in_a_for(v, x):
    y = x
    for z in v(x):
        y = y + z
    return y


def by_next(v, x):
    entries = iter(v(x))
    return next(entries, x) + next(entries, x * 7)


def in_a_while(v, x):
    y = x
    while v(y):
        y = y - 1
    return y


def in_an_assert(v, x):
    try:
        assert v(x)
        return x * 2
    except AssertionError:
        return x - 1


def of_an_attribute(v, x):
    try:
        return v(x).other
    except AttributeError:
        return x - 3


def of_two_objects(v, x):
    a, b = v(x), v(-x)
    y = x * 1
    if a:
        y = y * 2
    if b and not a:
        y = y + float(b)
    return y


USES = {
    "if": lambda v, x: x * 2 if v(x) else x - 1,
    "bool": lambda v, x: x * (3 + bool(v(x))),
    "not": lambda v, x: x * 2 if not v(x) else x - 1,
    "and": lambda v, x: (v(x) and v(x - 1) or v(x * 3)).v,
    "any": lambda v, x: x * 2 if any([v(x), v(x - 1)]) else x,
    "all": lambda v, x: x * 2 if all([v(x), v(x + 1)]) else x,
    "filter": lambda v, x: x + sum(each.v for each in filter(None, [v(x), v(x - 0.5)])),
    "type of a bool": lambda v, x: x * 2 if isinstance(bool(v(x)), bool) else x,
    "float": lambda v, x: x * float(v(x)),
    "math": lambda v, x: x * math.exp(v(x)),
    "map": lambda v, x: x * sum(map(float, [v(x), v(-x)])),
    "key": lambda v, x: x * max([1, 2], key=lambda k: float(v(x * k))),
    "types": lambda v, x: x * (type(float(v(x))) is float) * (type(len(v(x))) is int),
    "tensor": lambda v, x: torch.tensor([float(v(x)), 1.0, 2.0], dtype=x.dtype) * x,
    "full": lambda v, x: torch.full((3,), float(v(x)), dtype=x.dtype) * x,
    "complex": lambda v, x: x * complex(v(x)).real,
    "int": lambda v, x: x * int(v(x)),
    "index": lambda v, x: x * [3.0, 5.0][v(x)],
    "range": lambda v, x: x * sum(range(v(x))) + sum(1 for _ in range(v(x))),
    "len": lambda v, x: x * len(v(x)),
    "len in a branch": lambda v, x: x * 2 if len(v(x)) > 1 else x,
    "hash": lambda v, x: x * (2 if hash(v(x)) == hash(1.0) else 3),
    "dict": lambda v, x: x * {v(x): 2.0}[v(x)] * len({v(x), v(-x), v(x)}),
    "eq": lambda v, x: x * 2 if v(x) == 1 else x,
    "eq in a list": lambda v, x: x * 2 if 3 in [v(x)] else x,
    "place in a list": lambda v, x: x * [v(-x), v(x), v(x * 0 + 1)].index(v(x * 0 + 1)),
    "count in a list": lambda v, x: x * [v(-x), v(x)].count(v(x * 0 + 1)),
    "lt": lambda v, x: x * 2 if v(x) < v(x * 0 + 0.2) else x,
    "sorted": lambda v, x: sorted([v(x), v(x * 0 + 0.2)])[0].v * x,
    "min": lambda v, x: min([v(x), v(x * 0 + 0.2)]).v * x,
    "contains": lambda v, x: x * 2 if 0.2 in v(x) else x,
    "list": lambda v, x: x * len(list(v(x))) + sum(v(x)),
    "unpacked": lambda v, x: x + sum([*v(x)]),
    "comprehension": lambda v, x: x + sum([z * 2 for z in v(x)]),
    "reversed": lambda v, x: sum(reversed(v(x))),
    "hasattr": lambda v, x: x * 2 if hasattr(v(x), "other") else x,
    "getattr": lambda v, x: getattr(v(x), "other", x - 1),
    "call": lambda v, x: v(x)(x),
    "call by map": lambda v, x: sum(map(v(x), [x, x * 2])),
    "str": lambda v, x: x * len(str(v(x))) + ord(str(v(x))[1]),
    "repr": lambda v, x: x * len(repr(v(x))),
    "format": lambda v, x: x * ord(f"{v(x):z}"[0]) + len(f"{v(x)}") + len(f"{v(x)!r:>3}"),
    "percent": lambda v, x: x * len("%s %r" % (v(x), v(x))),  # noqa: UP031
    "bytes": lambda v, x: x * len(bytes(v(x))),
    "getitem": lambda v, x: x * v(x)[1],
    "add": lambda v, x: (v(x) + 1).v * x,
    "round": lambda v, x: x * round(v(x)),
    "abs": lambda v, x: abs(v(x)) - v(x).signed,
    "neg": lambda v, x: -v(x),
    **{f.__name__: f for f in (in_a_with, in_a_with_that_catches, in_a_for, by_next, in_a_while, in_an_assert)},
    **{f.__name__: f for f in (of_an_attribute, of_two_objects)},
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", USES)
def test_as_the_loop(name, inside):
    use = USES[name]

    def f(x):
        return use(define() if inside else OUTSIDE, x)

    def scalar(x):
        return (f(x) ** 2).sum()

    leaf = XS.clone().requires_grad_()
    want = torch.stack([f(x) for x in leaf])
    gradient = torch.autograd.grad((want**2).sum(), leaf)[0]
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(XS), want.detach())
        torch.testing.assert_close(vmap(vmap(f))(torch.stack([XS, XS])), torch.stack([want, want]).detach())
        torch.testing.assert_close(vmap(grad(scalar))(XS), gradient)
        torch.testing.assert_close(grad(lambda xs: (vmap(f)(xs) ** 2).sum())(XS), gradient)
