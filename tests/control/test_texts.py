"""The text of a lane value: that of each lane where it is used, that of all where it is shown."""

import builtins
import dataclasses
import itertools
import logging
import warnings
from typing import Any, NamedTuple

import pytest
import torch

from lanewise import jacrev, vmap
from lanewise._control.runtime import texts
from tests.control.compositions import COMPOSITIONS, SECOND, check_as_the_loop

XS = torch.tensor([1.0, 2.04, 2.01, -3.0])


class Weights(dict):
    """A number for any text."""

    def __missing__(self, key):
        return 1.0 + sum(map(ord, str(key))) % 13 / 8


TABLE = Weights()


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    value: Any


class Named:
    def __init__(self, value):
        self.value = value

    def __str__(self):
        return f"<{self.value:.1f}>"


def with_format(x, k):
    name = f"{x.detach()[0]:.1f}"
    return x * TABLE[name]


def with_a_branch(x, k):
    if f"{k:d}" in ("0", "2"):
        return x.exp()
    return x * TABLE[f"{x.detach().sum():+.0f} of {k}"]


def with_str(x, k):
    return x * TABLE[str(k)] + len(repr(x.detach()))


def with_percent(x, k):
    return x * TABLE["%s" % k] * TABLE["{:3}|{}".format(k, "a")]  # noqa: UP031


def with_join(x, k):
    return x * TABLE[", ".join(str(part) for part in x.detach())]


def with_map(x, k):
    return x * TABLE[" ".join(map(str, [k, k + 1]))[:5]]


def with_containers(x, k):
    return x * TABLE[str([k, (k,)])] * TABLE[f"{Pair(k, 1)}"] * TABLE[repr(Record(k))]


def with_numbers(x, k):
    n = k.item()
    return x * TABLE[f"{n}"] * TABLE[repr(n + 1)] * TABLE[f"{n / 4!r:>5}"] * TABLE[str([n])]


def with_a_key(x, k):
    return x * TABLE[max([k, k + 1, k - 1], key=str).item()]


def with_a_class(x, k):
    return x * TABLE[str(Named(k.double()))]


def with_a_loop(x, k):
    for _ in range(3):
        x = x.sin() * TABLE[f"{k}"]
        if f"{k}".startswith("3"):
            break
        k = k + 1
    return x


def with_a_lambda(x, k):
    key = lambda y: f"{y:5d}"
    return x * TABLE[key(k)]


def in_a_generator(x, k):
    def names():
        yield f"{k}"
        yield format(k, "d")

    return x * sum(TABLE[name] for name in names())


def in_what_prints(x, k):
    print(TABLE[f"{k}"], len(str(k)))
    seen = []
    seen.append(f"{k}")
    return x * TABLE[seen[0]]


PROGRAMS = [value for name, value in list(globals().items()) if name.startswith(("with_", "in_"))]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_the_loop(program, composition):
    check_as_the_loop(program, composition)


def count_runs(f, xs=XS):
    """The number of times that a function is called for all lanes."""
    runs = []

    def counted(x):
        runs.append(None)
        return f(x)

    out = vmap(counted)(xs)
    torch.testing.assert_close(out, xs * 2)
    return len(runs)


log = logging.getLogger(__name__)


class Shown:
    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return f"Shown({self.value})"


SHOWN = {
    "print": lambda x: print(f"{x:.1f}"),
    "print of it": lambda x: print("x is", x),
    "print of parts": lambda x: print("x is " + str(x)[:40], *[f"{y}" for y in (x, x)], sep="\n"),
    "print of a list": lambda x: print([x], (x,), {"x": repr(x)}),
    "print by format": lambda x: print("{:.2f} {}".format(x, x), "%s" % x),  # noqa: UP031, UP032
    "print of a choice": lambda x: print(f"{x}" if XS.dim() else "nothing"),
    "print of an object": lambda x: print(Shown(x), f"{Shown(x)!r:>50}"),
    "print of records": lambda x: print(Record(x), Pair(x, 1)),
    "print in an expression": lambda x: True and print(f"{x:.1f}"),
    "print over lines": lambda x: print(
        "x",
        f"{x:.1f}".rjust(30),
    ),
    "logging": lambda x: log.error(f"{x:.1f}"),
    "logging later": lambda x: log.error("%s", x),
    "error": lambda x: pytest.raises(ValueError, failing, x),
}


def failing(x):
    raise ValueError(f"{x:.1f}")


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_parts_no_lanes(name):
    def f(x):
        SHOWN[name](x)
        return x * 2

    assert count_runs(f) == 1


def test_statements_that_show():
    def f(x):
        print(f"{x:.1f}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn(f"{x:.1f}", stacklevel=2)
        assert x is not None, f"{x}"
        f"{x}"
        return x * 2

    assert count_runs(f) == 1


def test_what_is_shown_tells_of_all_lanes(capsys):
    def f(x):
        print(f"{x:.1f}")
        if x > 0:
            print(f"positive {x:.1f}")
        return x

    vmap(f)(XS)
    vmap(f)(XS)
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["[1.0, 2.0, 2.0, -3.0]", "positive [1.0, 2.0, 2.0]"]


def test_lanes_with_one_text_stay_together():
    runs = []

    def by_text(x):
        runs.append(None)
        return x * TABLE[f"{x:.0f}"]

    xs = torch.linspace(0.0, 2.9, 40)
    got, often = vmap(by_text)(xs), len(runs)
    torch.testing.assert_close(got, torch.stack([by_text(x) for x in xs]))
    assert often < 8


NUMBERS = {
    "str": lambda x: str(x.item()),
    "repr": lambda x: repr(x.item() * 2),
    "format": lambda x: f"{x.item():.3e}",
    "repr in a format": lambda x: f"{x.item()!r:>20}",
    "int": lambda x: str(int(x > 2)),
    "bool": lambda x: f"{(x > 2).item()} {x > 2}",
    "complex": lambda x: str(complex(x)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_as_texts(name):
    f = NUMBERS[name]
    xs = torch.tensor([1.25, 1e20, float("nan"), 3.0, 1.25])
    for _ in range(2):
        assert vmap(lambda x: f(x), out_dims="list")(xs) == [f(x) for x in xs]


def test_numbers_with_one_text_stay_together():
    class Noting(Weights):
        def __missing__(self, key):
            next(asked)
            return super().__missing__(key)

    asked, table = itertools.count(), Noting()

    def by_text(x):
        return x * table[f"{x.item():.0f}"]

    xs = torch.linspace(0.0, 2.9, 40)
    got, times = vmap(by_text)(xs), next(asked)
    assert times == 4
    torch.testing.assert_close(got, torch.stack([by_text(x) for x in xs]))


def test_without_source():
    names = {"TABLE": TABLE, "print": builtins.print}
    exec("def used(x): return x * TABLE[f'{x:.1f}']\ndef shown(x):\n    print(f'{x:.1f}')\n    return x * 2", names)
    torch.testing.assert_close(vmap(names["used"])(XS), torch.stack([names["used"](x) for x in XS]))
    assert count_runs(names["shown"]) == 1


def test_where_only_the_line_is_known():
    """As before Python 3.11."""
    lines = [
        "def f(x):\n",
        "    print(\n",
        "        f'{x}')\n",
        "    if x:\n",
        "        raise ValueError(f'{x}')\n",
        "    return f'{x}'\n",
    ]
    source = texts._Source(lines)
    kinds = [type(source.on_line(line)).__name__ for line in (2, 3, 5, 6)]
    assert kinds == ["Call", "Call", "Raise", "Return"]


def test_texts_in_a_hook():
    def f(x):
        y = x.sin()
        y.register_hook(lambda g: g * len(f"{g.sum():.3f}"))
        return y * y

    leaf = XS.clone().requires_grad_()
    rows = [torch.autograd.grad(y, leaf, retain_graph=True)[0] for y in f(leaf)]
    torch.testing.assert_close(jacrev(f)(XS), torch.stack(rows))
    xs, others = XS.clone().requires_grad_(), XS.clone().requires_grad_()
    vmap(f)(xs).sum().backward()
    torch.stack([f(x) for x in others]).sum().backward()
    torch.testing.assert_close(xs.grad, others.grad)


def test_files(tmp_path):
    """What is printed to a file may be read."""

    def f(x):
        with open(tmp_path / "numbers", "w") as file:
            print(f"{x:.2f}", file=file)
        return x * float((tmp_path / "numbers").read_text())

    torch.testing.assert_close(vmap(f)(XS), torch.stack([f(x) for x in XS]))
