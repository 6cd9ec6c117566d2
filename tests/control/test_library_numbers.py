"""Numbers of lanes given to functions of Python's library that take none but its own; and kept beyond their `vmap`."""

import array
import collections
import datetime
import decimal
import fractions
import itertools
import json
import random
import re
import statistics
import struct
import time

import pytest
import torch
from torch.utils._pytree import tree_map

from lanewise import debug, jacfwd, jacrev, vmap
from lanewise.errors import EscapedTensorError

XS = torch.tensor([1.0, 3.0, 2.0, 3.0])

CALLS = {
    "sleep": lambda x: time.sleep(float(x) / 1e4) or x,
    "gmtime": lambda x: time.gmtime(float(x) * 86400).tm_mday,
    "ctime": lambda x: len(time.ctime(float(x))),
    "strftime": lambda x: int(time.strftime("%d", time.gmtime(int(x) * 86400))),
    "fromtimestamp": lambda x: datetime.datetime.fromtimestamp(float(x) * 86400, datetime.timezone.utc).day,
    "timedelta": lambda x: datetime.timedelta(days=float(x)).days,
    "times": lambda x: (datetime.timedelta(days=1) * int(x)).days,
    "times, in front": lambda x: (float(x) * datetime.timedelta(days=1)).days,
    "of days": lambda x: (datetime.timedelta(days=6) / int(x)).days,
    "date": lambda x: datetime.date(2020, int(x), 1).month,
    "decimal": lambda x: float(decimal.Decimal(2) * int(x)),
    "to decimal": lambda x: float(int(x) + decimal.Decimal(2)),
    "fraction": lambda x: float(fractions.Fraction(int(x), 3) * int(x)),
    "mean": lambda x: statistics.mean([float(x), 2.0]),
    "pstdev": lambda x: statistics.pstdev([float(x), 2.0]),
    "variance": lambda x: statistics.variance([1.0, float(x), 2.0]),
    "harmonic mean": lambda x: statistics.harmonic_mean([1.0, float(x)]),
    "median": lambda x: statistics.median([1.5, float(x), 2.0]),
    "struct": lambda x: struct.unpack("di", struct.pack("di", float(x), int(x)))[0],
    "array": lambda x: array.array("d", [float(x), 1.0])[0],
    "random": lambda x: random.Random(int(x)).random(),
    "choices": lambda x: random.Random(1).choices([1, 2, 3], k=int(x))[-1],
    "islice": lambda x: sum(itertools.islice([1, 2, 3], int(x))),
    "counter": lambda x: collections.Counter([int(x), 1])[1],
    "sub": lambda x: re.sub("a", "b", "aaa", count=int(x)).count("b"),
    "format": lambda x: float(f"{float(x):.2f}") + float("%.1f" % float(x)),  # noqa: UP031
    "json": lambda x: json.loads(json.dumps({"a": [float(x)]}))["a"][0],
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_the_library(name):
    call = CALLS[name]
    assert vmap(call, out_dims="list")(XS) == [call(x) for x in XS]
    assert vmap(lambda x: call(x) if x > 2 else call(x) * 2, out_dims="list")(XS) == [
        call(x) if x > 2 else call(x) * 2 for x in XS
    ]


def test_a_shape_is_shown_as_one(capsys):
    vmap(lambda x: debug.print("{} {} {}", x.shape, x.size(), x.numel()))(torch.ones(2, 3))
    assert capsys.readouterr().out == "torch.Size([3]) torch.Size([3]) 3\n" * 2


USES = {
    "add": lambda n: n + 1,
    "reflected": lambda n: 1 - n,
    "negative": lambda n: -n,
    "compare": lambda n: n > 1,
    "equal": lambda n: n == 1,
    "float": float,
    "int": int,
    "bool": bool,
    "text": str,
    "format": lambda n: f"{n:.2f}",
    "hash": hash,
    "method": lambda n: n.is_integer(),
    "round": round,
    "sum": lambda n: sum([n, 1]),
    "max": lambda n: max(n, 2),
    "tensor": lambda n: torch.ones(2) * n,
    "full": lambda n: torch.full((2,), n),
    "later": lambda n: vmap(lambda x: x * n)(XS),
    "print": lambda n: debug.print("{}", n),
}


@pytest.fixture
def kept():
    total = 0.0

    def f(x):
        nonlocal total
        total += x.item()
        return x * 2 if x > 1 else x

    vmap(f)(XS)
    return total


@pytest.mark.parametrize("name", USES)
def test_numbers_that_have_escaped(name, kept):
    with pytest.raises(EscapedTensorError, match="escaped"):
        USES[name](kept)


def test_json_of_one_that_has_escaped(kept):
    assert not isinstance(kept, float)
    with pytest.raises(TypeError, match="EscapedNumber is not JSON serializable"):
        json.dumps({"total": kept})


def _wide(n):
    return torch.tensor(n), torch.tensor([n, 1]), torch.as_tensor(n)


@pytest.mark.parametrize("transform", [lambda f: f, jacfwd, jacrev])
def test_torch_tensor_of_a_number_in_a_function_that_a_library_calls(transform):
    def f(x):
        alone, pair, same = tree_map(_wide, int(x * 10))
        (direct,) = tree_map(torch.tensor, (int(x * 10),))
        return x * (alone + pair.sum() + same + direct)

    xs = torch.tensor([0.5, 1.5, 3.0])
    for _ in range(3):
        assert torch.equal(vmap(transform(f))(xs), torch.stack([transform(f)(x) for x in xs]))
