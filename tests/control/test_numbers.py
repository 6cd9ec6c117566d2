"""Python numbers that differ from lane to lane, against the loop: values, dtypes and errors."""

import math

import pytest
import torch

from lanewise import vmap

XS = torch.tensor([0.3, -1.7, 2.5, 4.0, -0.2, 9.5])
KS = torch.tensor([0, 3, -2, 5, 1, 7])

FUNCTIONS = {
    "add": lambda x, k: x * (int(k) + 2),
    "mulf": lambda x, k: x * (float(k) * 0.1),
    "div": lambda x, k: x * (int(k) / 4),
    "fdiv": lambda x, k: x * (int(k) // 2),
    "mod": lambda x, k: x * (int(k) % 3),
    "modn": lambda x, k: x * (int(k) % -3),
    "powr": lambda x, k: x * int(k) ** 2,
    "pown": lambda x, k: x + 2 ** int(k),
    "powneg": lambda x, k: x + (int(k) + 10) ** (-1),
    "powf": lambda x, k: x + abs(float(x)) ** 0.5,
    "powc": lambda x, k: abs(x * 1j + float(x) ** 0.5 if x > 0 else x * 1j + 1),
    "rsub": lambda x, k: 10 - int(k) * x,
    "neg": lambda x, k: -int(k) * x,
    "inv": lambda x, k: ~int(k) * x,
    "absn": lambda x, k: abs(int(k)) * x,
    "shift": lambda x, k: x + (3 << abs(int(k))),
    "rshift": lambda x, k: x + (300 >> abs(int(k))),
    "andn": lambda x, k: x + (int(k) & 3),
    "orn": lambda x, k: x + (int(k) | 1),
    "xor": lambda x, k: x + (int(k) ^ 5),
    "cmp": lambda x, k: x + (int(k) > 1),
    "eqf": lambda x, k: x + (float(x) == float(x)),
    "boolk": lambda x, k: x + bool(k),
    "nots": lambda x, k: x + (not k),
    "roundk": lambda x, k: x + round(float(x)),
    "round2": lambda x, k: x + round(float(x), 1),
    "fl": lambda x, k: x + math.floor(x),
    "ce": lambda x, k: x + math.ceil(float(x)),
    "tr": lambda x, k: x + int(float(x)),
    "divm": lambda x, k: x + divmod(int(k), 3)[1],
    "big": lambda x, k: x + float((int(k) + 10) ** 30 % 1000),
    "fact": lambda x, k: x + math.factorial(abs(int(k))),
    "powmod": lambda x, k: x + pow(int(k) + 7, 2, 5) + pow(2, abs(int(k)), 5) + pow(3, 4, abs(int(k)) + 2),
    "powmod by name": lambda x, k: x + pow(base=int(k), exp=3, mod=7),
    "powmod inverse": lambda x, k: x + pow(int(k) * 7 + 1, -1, 7),
    "powmod floats": lambda x, k: x + pow(float(x), 2, 5),
    "gcd": lambda x, k: x + math.gcd(int(k), 6),
    "hyp": lambda x, k: x + math.hypot(float(x), int(k)),
    "logd": lambda x, k: x + math.log(float(x)),
    "zdiv": lambda x, k: x / int(k),
    "zdiv2": lambda x, k: x + 1 / int(k),
    "fmt": lambda x, k: x + len(f"{int(k)}"),
    "strk": lambda x, k: x + len(str(int(k))),
    "inn": lambda x, k: x + (int(k) in (1, 3, 5)),
    "notin": lambda x, k: x + (int(k) not in [1, 3]),
    "dct": lambda x, k: x + {0: 1, 3: 2}.get(int(k), 7),
    "maxk": lambda x, k: x * max(int(k), 1, 0),
    "sorted": lambda x, k: x * sorted([int(k), 2, -1, 4, int(k) - 3])[1] + sorted([2, int(k)])[0],
    "sortedr": lambda x, k: x * sorted((float(x), 2.0, -1.0), reverse=True)[1],
    "sortedb": lambda x, k: x + sorted([k > 1, bool(x > 0), True])[1],
    "sortedm": lambda x, k: x + sorted([int(k), 2.5, float(x)])[1],
    "sortedk": lambda x, k: x + sorted([int(k), 2, -4], key=abs)[1],
    "sortedn": lambda x, k: x + sorted([math.nan if int(k) > 2 else float(k), 1.0, 0.5])[0],
    "mint": lambda x, k: min(x, k),
    "clampk": lambda x, k: x.clamp(max=int(k)),
    "clampm": lambda x, k: torch.clamp(x, min=int(k), max=8.0),
    "where": lambda x, k: torch.where(x > 0, int(k), x),
    "addc": lambda x, k: torch.add(x, int(k)),
    "alpha": lambda x, k: torch.add(x, x, alpha=int(k)),
    "full": lambda x, k: torch.full((2,), int(k)),
    "fullf": lambda x, k: torch.full((2,), float(x)),
    "fill": lambda x, k: torch.zeros(2).fill_(int(k)),
    "tens": lambda x, k: torch.tensor([int(k), 2]),
    "tensf": lambda x, k: torch.tensor([float(x), int(k)]),
    "tensk": lambda x, k: torch.tensor(int(k)),
    "tensd": lambda x, k: torch.tensor(float(x), dtype=torch.float64),
    "isin": lambda x, k: x + isinstance(int(k), int) + isinstance(float(x), float) * 2 + isinstance(int(k), float) * 4,
    "typ": lambda x, k: x + (type(k.item()) is int),
    "sumk": lambda x, k: x + sum([int(k), 1, 2.5]),
    "alls": lambda x, k: x + all([int(k) > 0, x > 0]),
    "anys": lambda x, k: x + any(v > 2 for v in (x, k)),
    "inttens": lambda x, k: k * int(k) + int(k),
    "intf": lambda x, k: k * 0.5 * float(x),
    "kdt": lambda x, k: k + float(x),
    "half": lambda x, k: x.half() * float(k),
    "halfi": lambda x, k: x.bfloat16() * int(k),
    "f64": lambda x, k: x.double() * float(x),
    "i8": lambda x, k: k.to(torch.int8) * int(k) % 7,
    "boolt": lambda x, k: (x > 0) + int(k),
    "powt": lambda x, k: x.abs() ** int(k),
    "tpow": lambda x, k: int(k) ** x.abs() if k > 0 else x,
    "rdiv": lambda x, k: int(k) / (x + 20),
    "rpow": lambda x, k: 2.0**k,
    "cplx": lambda x, k: (complex(x) * 1j + int(k)).imag + x if True else x,
    "ret": lambda x, k: int(k),
    "retf": lambda x, k: float(x),
    "retb": lambda x, k: x > 0 and k > 0,
    "arange": lambda x, k: torch.arange(abs(int(k)) + 1).sum() * x,
    "zeros": lambda x, k: torch.zeros(abs(int(k)), 2).sum() + x,
    "rng": lambda x, k: sum(range(int(k))) + x,
    "rng2": lambda x, k: sum(i for i in range(1, int(k), 2)) + x,
    "rngneg": lambda x, k: list(range(int(k), -3, -1))[-1] + x if k > -2 else x,
    "lenr": lambda x, k: len(range(int(k))) + x,
    "inr": lambda x, k: (2 in range(int(k))) + x,
    "enum": lambda x, k: sum((i * j for i, j in enumerate(range(int(k))))) + x,
    "zipr": lambda x, k: sum((i * j for i, j in zip(range(int(k)), range(3)))) + x,
    "revr": lambda x, k: next(iter(reversed(range(int(k) + 5)))) + x,
    "lst": lambda x, k: [1, 2, 3][int(k) % 3] * x,
    "tup": lambda x, k: (x, k, x * 2)[int(k) % 3] * 1.0,
    "strs": lambda x, k: ord("abcdefgh"[int(k)]) + x,
    "neg1": lambda x, k: [x, 2.0, x * 2][-1 - int(k) % 2] + 0 * x,
    "slc": lambda x, k: sum([1, 2, 3, 4][: abs(int(k)) % 4]) + x,
    "tl": lambda x, k: x + sum(torch.stack([k, k * 2]).tolist()),
    "tl2": lambda x, k: x + torch.stack([x, x + 1]).tolist()[1],
    "is_int": lambda x, k: x + float(x).is_integer(),
    "bitl": lambda x, k: x + int(k).bit_length(),
    "nan": lambda x, k: x * (float("nan") if k > 1 else 2),
    "inf": lambda x, k: float(x) * math.inf * 0 + x,
    "cmpnum": lambda x, k: x + (1 < int(k) <= 5),
    "npf": lambda x, k: x + (int(k) or 4),
    "ands": lambda x, k: x + (int(k) and 4),
    "tern": lambda x, k: x * (int(k) if k > 0 else 2),
    "ternf": lambda x, k: x * (int(k) if k > 0 else 2.5),
    "assign": lambda x, k: (y := int(k)) * x + y,
    "hashk": lambda x, k: x + hash(int(k)),
    "sets": lambda x, k: x + len({int(k), 3}),
    "srt": lambda x, k: sorted([int(k), 2, 0])[1] + x,
    "mth": lambda x, k: x + math.sin(float(x)) + math.exp(x) + math.pow(float(x) + 3, 2) + math.atan2(x, 1),
    "sq": lambda x, k: math.sqrt(x) + x,
    "ovf": lambda x, k: math.exp(float(k) * 1000) + x,
    "isnan": lambda x, k: x + math.isnan(x),
}


def outcome(run):
    """The results, or the type of the error."""
    try:
        return torch.stack([torch.as_tensor(value) for value in run()])
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_the_loop(name):
    f = FUNCTIONS[name]
    got, want = outcome(lambda: vmap(f)(XS, KS)), outcome(lambda: [f(x, k) for x, k in zip(XS, KS)])
    if isinstance(want, type):
        assert got is want
        return
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_an_int_of_more_than_64_bits():
    got = vmap(lambda k: torch.tensor(float((int(k) + 10) ** 40 % 1009)))(KS)
    assert got.tolist() == [float((k + 10) ** 40 % 1009) for k in KS.tolist()]


def test_a_number_that_wraps_is_found_late():
    def f(k):
        n = int(k)
        for _ in range(30):
            n = n * 7 + 1
        return torch.tensor(n % 1000003)

    assert vmap(f)(KS).tolist() == [int(f(k)) for k in KS]


D = torch.float64


def of_item(x, k):
    n = x[0].item()
    x.mul_(2)
    return x.sum() * n


def of_list(x, k):
    n = x.tolist()
    x.mul_(2)
    return x.sum() * n[1]


def of_float(x, k):
    n = float(x[0])
    x[0] = 7.0
    return x.sum() * n


def of_choice(x, k):
    n = x[0].item() if k > 1 else x[1].item()
    x.zero_()
    return x.sum() + n


def of_whole_number(x, k):
    k = k.clone()
    n = k.item()
    k.add_(5)
    return x.sum() * n + k


def tensor_of(x, k):
    n = k.item()
    t = torch.tensor(n)
    t += 5
    return x.sum() * n + t


def tensor_of_float(x, k):
    n = x[0].item()
    t = torch.as_tensor(n, dtype=D)
    t.mul_(5)
    return t - n


def scalar_tensor_of(x, k):
    n = k.item()
    t = torch.scalar_tensor(n, dtype=torch.int64)
    t.add_(1)
    return t * 10 + n + x.sum()


NOT_WRITTEN = [of_item, of_list, of_float, of_choice, of_whole_number, tensor_of, tensor_of_float, scalar_tensor_of]


@pytest.mark.parametrize("f", NOT_WRITTEN, ids=lambda f: f.__name__)
def test_writes_in_place_do_not_reach_numbers(f):
    xs = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(0))

    def parted(x, k):
        x = x.clone()
        return f(x, k) if x.sum() > 0 else -f(x, k)

    want = torch.stack([parted(x, k) for x, k in zip(xs, KS)])
    for _ in range(2):
        torch.testing.assert_close(vmap(parted)(xs, KS), want)


def bound_in_a_branch(x, k):
    z = x * k
    if k != 3:
        z = int(k)
    return z


def of_a_function(x, k):
    def which(t):
        return 1 if t > 0 else 2

    if k == 3:
        return x * k
    return which(k)


def in_a_tuple(x, k):
    if k == 3:
        return x * k, k
    return int(k), k


def in_a_list(x, k):
    z = [x * k]
    if k != 3:
        z = [int(k) + 1]
    return z[0]


def of_the_same_dtype(x, k):
    if k > 0:
        return k, x
    return int(k), x


SIZES = {
    "reshape": lambda x: x.reshape(int(x[0]) * 0 + 2, -1),
    "view": lambda x: x.view(2 - (int(x[0]) - int(x[0])), 2),
    "zeros": lambda x: torch.zeros(-(-2 + int(x[0].item() * 0))) + x[0],
    "slice": lambda x: x[: int(x[0]) * 0 + 3],
    "expand": lambda x: x.expand(int(abs(float(x[0])) * 0.0) + 2, 4),
    "repeat": lambda x: x.repeat(int(x[0]) // 10**6 + 2),
    "at least": lambda x: x.new_zeros(max(int(x[0]) % 2, 2)) * x[0],
    "at most": lambda x: x.new_zeros(2 + min(int(x[0]) ** 2, 0)) * x[0],
    "a quotient": lambda x: x[: 4 - int(0 / (int(x[0]) + 1))],
    "a length": lambda x: torch.zeros(len([0] * (int(x[0]) * 0 + 2))) * x[0],
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_depend_on_a_number_of_no_lanes(name):
    f = SIZES[name]
    xs = torch.rand(3, 4) + 1
    want = torch.stack([f(x) for x in xs])
    torch.testing.assert_close(vmap(f)(xs), want)
    assert vmap(f)(xs[:0]).shape == (0, *want.shape[1:])
    assert vmap(vmap(f))(xs[None, :0]).shape == (1, 0, *want.shape[1:])


def test_a_long_sum_of_no_lanes():
    def f(x):
        n = int(x[0])
        for _ in range(2000):
            n = n + 1
        return x.new_zeros(n * 0 + 2)

    assert vmap(f)(torch.ones(3, 4)).shape == (3, 2)
    assert vmap(f)(torch.ones(0, 4)).shape[0] == 0


@pytest.mark.parametrize("f", [bound_in_a_branch, of_a_function, in_a_tuple, in_a_list, of_the_same_dtype])
def test_numbers_of_some_lanes_and_tensors_of_others(f):
    def of(place):
        parts = [out[place] if isinstance(out, tuple) else out for out in map(f, XS, KS)]
        dtype = next(part.dtype for part in parts if isinstance(part, torch.Tensor))
        return torch.stack([torch.as_tensor(part, dtype=dtype) for part in parts])

    for _ in range(2):
        out = vmap(f)(XS, KS)
        if isinstance(out, tuple):
            torch.testing.assert_close(out, (of(0), of(1)))
        else:
            torch.testing.assert_close(out, of(0))
