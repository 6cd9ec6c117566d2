"""Texts of lane values given to streams and to libraries: those that the program can read again are each lane's own."""

import ast
import collections
import contextlib
import csv
import datetime
import decimal
import functools
import hashlib
import html
import io
import itertools
import json
import linecache
import logging
import operator
import pickle
import pprint
import re
import reprlib
import string
import sys
import tempfile
import textwrap
import types
import urllib.parse
import warnings

import pytest
import torch

from lanewise import grad, vmap

XS = torch.tensor([1.25, -2.5, 3.0, 1.25], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


def number(text):
    return 1.0 + sum((place + 1) * ord(letter) for place, letter in enumerate(str(text))) % 97 / 8


def printed(x):
    out = io.StringIO()
    print("a", file=out)
    print(x, f"{x:.1f}", x.item(), file=out, end=";")
    return out.getvalue()


def printed_by_options(x):
    options = {"file": io.StringIO()}
    print(x, **options)
    return options["file"].getvalue()


def show(value, out):
    print(value, file=out)


def printed_by_a_function(x):
    out = io.StringIO()
    show(x, out)
    return out.getvalue()


def written(x):
    out = io.StringIO()
    out.write(f"{x}")
    out.write(str(x))
    out.writelines([f"{x}", str(x)])
    return out.getvalue()


def redirected(x):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print(x)
        print(f"{x:.2f}", end="")
    return out.getvalue()


def replaced_stdout(x):
    old, sys.stdout = sys.stdout, io.StringIO()
    try:
        print("value", x)
        return sys.stdout.getvalue()
    finally:
        sys.stdout = old


def to_a_file(x):
    with tempfile.TemporaryFile("w+") as file:
        print(x, file=file)
        file.write(f"{x}")
        file.seek(0)
        return file.read()


def to_bytes(x):
    out = io.BytesIO()
    out.write(f"{x}".encode())
    return str(out.getvalue())


def logged(x):
    log, out = logging.Logger("a"), io.StringIO()
    log.addHandler(logging.StreamHandler(out))
    log.warning("later %s", x)
    log.warning(f"at once {x}")
    return out.getvalue()


def of_a_record(x):
    return logging.LogRecord("a", 1, "f", 1, "v %s", (x,), None).getMessage()


def dumped(x):
    out = io.StringIO()
    json.dump({"n": x.item()}, out)
    return out.getvalue()


def pickled(x):
    out = io.BytesIO()
    pickle.dump(x.item(), out)
    return str(out.getvalue()) + str(pickle.dumps([x.item()]))


def pretty_printed(x):
    out = io.StringIO()
    pprint.pprint(x, stream=out)
    return out.getvalue()


def rows_of_a_table(x):
    out = io.StringIO()
    csv.writer(out).writerow([x.item(), str(x), x])
    return out.getvalue()


def of_an_error(x):
    try:
        raise ValueError(f"bad {x}")
    except ValueError as error:
        return str(error)


def of_an_error_of_a_function(x):
    def check(value):
        if value <= 10:
            raise AssertionError(f"small {value}")

    try:
        check(x)
    except AssertionError as error:
        return str(error)


def of_a_missing_key(x):
    try:
        return {}[f"{x}"]
    except KeyError as error:
        return str(error)


def matched(x):
    match f"{x:.0f}":
        case "1":
            return "one"
        case _:
            return "other"


def by_a_loop(x):
    text = ""
    for part in map(str, [x, x]):
        text += part
    return text


def by_any(x):
    return "q" if any(map(operator.methodcaller("startswith", "-"), map(str, [x]))) else "r"


FUNCTIONS = [value for value in list(globals().values()) if type(value) is types.FunctionType]
TEXTS = {f.__name__: f for f in FUNCTIONS if f.__module__ == __name__ and f.__code__.co_varnames[:1] == ("x",)}
TEXTS |= {
    "length of some": lambda x: "a" * len([c for c in str(x) if c != "."]),
    "sum of some": lambda x: "a" * sum(len(str(v)) for v in x.reshape(1) if v > 1),
    "any of some": lambda x: (
        f"{any('3' in str(v) for v in x.reshape(1) if v > 1)}{max((len(f'{v}') for v in [x] if v > 0), default=0)}"
    ),
    "sum of a list": lambda x: str(sum([float(str(v.item())) for v in x.reshape(1)])),
    "lengths": lambda x: sum(map(len, map(str, [x]))),
    "joined": lambda x: " ".join(map(str, [x, x + 1])) + ",".join([str(x), f"{x.item()}"]),
    "joined by a name": lambda x: (lambda sep: sep.join([str(x), "a"]))(","),
    "mapped format": lambda x: "".join(map("{:.1f}".format, [x, x])),
    "mapped lambda": lambda x: "".join(map(lambda v: f"{v}", [x, x])),  # noqa: C417
    "tuple": lambda x: tuple(map(str, [x]))[0],
    "sorted": lambda x: sorted(map(str, [x, x * 2]))[0],
    "max": lambda x: max(map(str, [x, x * 2])),
    "set": lambda x: sorted(set(map(str, [x, x * 2])))[0],
    "dict": lambda x: dict(zip(["a"], map(str, [x]), strict=True))["a"],
    "next": lambda x: next(map(str, [x])),
    "enumerate": lambda x: [text for _, text in enumerate(map(str, [x]))][0],
    "unpacked": lambda x: "".join([*map(str, [x, x])]),
    "filter": lambda x: "".join(filter(None, map(str, [x]))),
    "chain": lambda x: "".join(itertools.chain(map(str, [x]), ["b"])),
    "starmap": lambda x: "".join(itertools.starmap("{:.1f}".format, [(x,)])),
    "accumulate": lambda x: list(itertools.accumulate(map(str, [x, x])))[-1],
    "groupby": lambda x: "".join(key for key, _ in itertools.groupby(map(str, [x, x]))),
    "reduce": lambda x: functools.reduce(operator.add, map(str, [x, x])),
    "generator": lambda x: sum(len(str(v)) for v in [x, x * 10]),
    "deque": lambda x: "".join(collections.deque(map(str, [x]))),
    "Counter": lambda x: str(collections.Counter(map(str, [x]))),
    "UserString": lambda x: str(collections.UserString(x)),
    "json": lambda x: json.dumps({"n": x.item(), "m": [int(x), bool(x > 0), [x.tolist()]]}),
    "json indented": lambda x: json.dumps({"n": x.item(), "text": str(x)}, indent=1),
    "json default": lambda x: json.dumps({"n": x}, default=lambda tensor: tensor.item()),
    "json key": lambda x: json.dumps({x.item(): 1}),
    "pformat": lambda x: pprint.pformat({"a": [x, x.item()] * 9}, width=20),
    "Template": lambda x: string.Template("$a").substitute(a=x) + string.Template("$a $b").safe_substitute(a=x.item()),
    "Formatter": lambda x: string.Formatter().format("{:.1f}", x),
    "percent": lambda x: "%s" % x + "%s %r" % (x, x) + "%.2f|%d" % (x, x) + "%(a)s" % {"a": x},  # noqa: UP031
    "format": lambda x: "{}".format(x) + format(x, ".2f") + "{a}".format_map({"a": x}),  # noqa: UP032
    "format by a name": lambda x: (lambda form: form.format(x))("{:.2f}"),
    "textwrap": lambda x: (
        textwrap.fill(f"aaa {x} bbb", 5) + textwrap.indent(str(x), "  ") + textwrap.shorten(f"h {x}", 9)
    ),
    "methods": lambda x: str(x).rjust(9) + str(x).split(".")[0] + str(x).translate({49: "b"}) + str.upper(str(x)),
    "encoded": lambda x: str(x).encode().decode() + str(bytes(str(x), "utf8")),
    "reprlib": lambda x: reprlib.repr([x]),
    "hash": lambda x: hashlib.md5(str(x).encode()).hexdigest(),
    "re": lambda x: re.sub(r"\d", "#", f"{x}") + re.sub("a", lambda match: f"{x}", "bab"),
    "decimal": lambda x: str(decimal.Decimal(x.item())) + str(decimal.Decimal(str(x.item()))),
    "timedelta": lambda x: str(datetime.timedelta(seconds=x.item())),
    "literal": lambda x: str(ast.literal_eval(str(x.item()))),
    "escaped": lambda x: html.escape(f"<{x}>") + urllib.parse.quote(f"{x} z"),
    "containers": lambda x: str([x, x.item()]) + str({"a": x}) + repr(types.SimpleNamespace(a=x.item())),
    "of an object": lambda x: str(ValueError(x)) + str(ValueError(f"{x}")),
    "partial": lambda x: functools.partial(format, x)(".1f"),
    "operators": lambda x: operator.mod("%s", x) + operator.concat("a", str(x)),
    "f strings": lambda x: f"{x=}" + f"{x:>{10}.1f}" + f"{x!r:.9}",
}


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_as_the_loop(name, parted):
    text = TEXTS[name]

    def f(x):
        if parted and x > 2:
            x = x + 1
        return x * number(text(x.detach()))

    want = torch.stack([f(x) for x in XS])
    slopes = want / torch.where(XS > 2, XS + 1, XS) if parted else want / XS
    for _ in range(2):
        torch.testing.assert_close(vmap(f)(XS), want)
        torch.testing.assert_close(vmap(vmap(f))(torch.stack([XS, XS.flip(0)])), torch.stack([want, want.flip(0)]))
        torch.testing.assert_close(vmap(grad(f))(XS), slopes)


SHOWN = {
    "file=None": lambda x: print(x, file=None),
    "stderr": lambda x: print(x, file=sys.stderr),
    "pprint": lambda x: pprint.pprint([x]),
    "pformat": lambda x: print(pprint.pformat([x])),
    "Template": lambda x: print(string.Template("$a").substitute(a=x)),
    "stdout.write": lambda x: sys.stdout.write(f"{x}\n"),
    "a caught error without a name": lambda x: silent(x),
    "the library's own error": lambda x: pytest.raises(ValueError, NORMAL(x, 1.0, validate_args=True).log_prob, "text"),
    "the library's own warning": lambda x: warned(x),
    "log": lambda x: logging.getLogger("quiet").warning("%s", x),
}


def warned(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linecache.cache["<invented>"] = (1, None, _LINES, "<invented>")
        LIBRARY["warning"](x)


# What a module of a library might do.
LIBRARY = {"__name__": "torch.invented", "warnings": warnings}
_LINES = ["def warning(x):\n", "    warnings.warn(f'{x} is odd')\n"]
exec(compile("".join(_LINES), "<invented>", "exec"), LIBRARY)


NORMAL = torch.distributions.Normal


def silent(x):
    try:
        raise ValueError(f"{x}")
    except ValueError:
        pass


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_parts_no_lanes(name):
    runs = []

    def f(x):
        runs.append(None)
        SHOWN[name](x)
        return x * 2

    torch.testing.assert_close(vmap(f)(XS), XS * 2)
    assert len(runs) == 1


def test_the_texts_of_a_stream_from_outside_are_all_there():
    out = io.StringIO()

    def f(x):
        print(f"{x:.1f}", file=out)
        return x

    vmap(f)(XS)
    assert sorted(out.getvalue().split()) == sorted({f"{x:.1f}" for x in XS})
