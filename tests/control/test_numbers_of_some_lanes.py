"""Variables that are a tensor in some lanes and a Python number in others: each lane's own, as in the loop."""

import linecache
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lanewise import vmap
from lanewise._control.masking.masked_lanes import run_masked
from tests.control.compositions import COMPOSITIONS, SECOND, check_as_the_loop

D = torch.float64
CS, WS = [0.75, -1.5, 2.25, 0.3, -0.25, 4.0], [1.5, -2.0, 0.3, 0.7, 3.0, -0.1]
KS = torch.tensor([3, 1, 0, -2, 2, 5])

# What the variable holds: where a condition holds, and where it does not; and the dtypes of `c` and `w`.
MIXES = {
    "truths": ("c > 0", "c > 1", "True", [D]),
    "floats": ("c", "c > 0", "0.3", [D, torch.float32, torch.float16]),
    "floats of each lane": ("c", "c > 0", "float(c * 0.1)", [D, torch.float32]),
    "integers": ("k", "c > 0", "2", [D]),
    "zero": ("k", "c > 0", "0", [D]),
    "integers of each lane": ("k", "c > 0", "k.item()", [D]),
    "an integer for a float": ("c", "c > 0", "3", [D, torch.float32]),
    "a truth for a float": ("c", "c > 0", "True", [D]),
    "a large integer": ("k", "c > 0", "2**60 + 1", [D]),
    "three kinds": ("c", "c > 1", "(2 if c > -1 else 0.1)", [D, torch.float32]),
}
EXPRESSIONS = """
~a; -a; +a; not a; abs(a); a + 1; a + a; a * 2.5; a / 2; 1 / a; a // 2; 2 // a; a % 2; a ** 2; a ** -1; 2 ** a
a + w; w * a; w / a; a ** w; w > a; a > 0.1; a == 0.3; 0 < a < 2; a > 1e-30; True + a; a * True; a & 1; a ^ True
(a > 0) + 1; (a > 0) & True; -(a > 0); ~(a > 0); a == a; a != 0; a * 3 > 0.9; (a * 3 - 0.9) * 1e9; a / 3 * w
isinstance(a, torch.Tensor); isinstance(a, float); isinstance(a, (int, float)); type(a) is float; torch.is_tensor(a)
hasattr(a, "shape"); a is True; match_(a); told(a); each_of(a); math.sqrt(abs(a)); math.floor(a); round(a); int(a)
float(a); bool(a); str(a); f"{a}"; a and 3; a or 3; sum([a, 1]); min(a, 2); max(a, 1.5); a in (1, 2); [1, 2, 3][a]
torch.sin(a); torch.abs(a); torch.where(w > 0, a, w); torch.maximum(a, w); torch.clamp(w, a); torch.add(a, w)
torch.stack([a, w]); torch.full((2,), a); a.sum(); a.shape; a.real; a[None]; len(a); divmod(a, 2); w.sub(a, alpha=2)
squares(a); halved(a); twice(a, w); (lambda v: v * 2)(a); torch.relu(w - a); a < 1 and w > 0; range(3)[a]; sunk(a)
math.trunc(a); pow(a, 2, 5); isinstance(a > 1, bool); type(a + 1) is float; 1 / (a - 2)
isinstance(helper(a) if w > 0 else a, float)
torch.zeros(2) + a; w + helper(a) * 2
"""
HEAD = """
import math
import torch

def match_(a):
    match a:
        case True: return "true"
        case int(): return "int"
        case float(): return "float"
        case torch.Tensor(): return "tensor"

def told(a):
    if torch.is_tensor(a):
        return 1
    elif type(a) is float:
        return 2
    return 3

def each_of(v):
    return [isinstance(v, kind) for kind in (int, float, bool, torch.Tensor)]

def squares(a):
    if isinstance(a, torch.Tensor):
        return a * a
    return a + 1

def halved(a):
    n = 0
    while abs(a) > 0.1 and n < 5:
        a = a / 2
        n = n + 1
    return a * 1

def twice(a, w):
    b = a * 2
    d = b + 1
    return -d if d > w else ~(d > 0)

def sunk(a):
    a = a + 1
    if a > 1.5:
        a = 0.25
    return a * 3

def helper(a):
    return a if a > 0.2 else 0.1
"""


def function(body: str, head: str = HEAD) -> Any:
    """`def f(c, k, w)` with a body."""
    text = f"{head}\ndef f(c, k, w):\n{body}"
    name = f"<numbers of some lanes {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "numbers_of_some_lanes"}
    exec(compile(text, name, "exec"), space)
    return space["f"]


def ways(mix: tuple, expression: str) -> list[Any]:
    there, condition, elsewhere, _ = mix
    chosen = f"    a = {there} if {condition} else {elsewhere}\n    return {expression}\n"
    bound = f"    if {condition}:\n        a = {there}\n    else:\n        a = {elsewhere}\n    out = {expression}\n"
    return [function(chosen), function(f"{bound}    return out\n")]


def shown(value: Any) -> Any:
    """A result of a lane. A tensor without dims is a number: which it is shows where the function asks."""
    if isinstance(value, (list, tuple)):
        return [shown(part) for part in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value


def close(got: Any, want: Any, rtol: float) -> bool:
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(close(a, b, rtol) for a, b in zip(got, want))
    if isinstance(want, str) or isinstance(got, str):
        return got == want
    return bool(got == want) or math.isclose(got, want, rel_tol=rtol) or (got != got and want != want)


def check(f: Callable, columns: tuple, rtol: float) -> None:
    """Values and errors, and the lanes that these name, are those of the loop."""
    wants: list[Any] = []
    errors: dict[int, type] = {}
    for place, row in enumerate(zip(*[column.clone() for column in columns])):
        try:
            wants.append(shown(f(*row)))
        except Exception as error:
            errors[place] = type(error)
    if errors:
        with pytest.raises(tuple(set(errors.values()))) as caught:
            vmap(f, out_dims="list")(*columns)
        lanes = getattr(caught.value, "lanes", range(len(KS)))
        assert all(errors.get(lane) is caught.type for lane in lanes)
        return
    for _ in range(2):
        got = shown(vmap(f, out_dims="list")(*columns))
        assert close(got, wants, rtol), (got, wants)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")
@pytest.mark.parametrize("mix", MIXES)
def test_as_the_loop(mix):
    wrong = []
    for expression in [part.strip() for part in EXPRESSIONS.replace("\n", ";").split(";") if part]:
        if mix == "a large integer" and expression == "2 ** a":
            continue  # Python would take its time
        for f in ways(MIXES[mix], expression):
            for dtype in MIXES[mix][3]:
                # Where torch takes a number to a power, it multiplies; of a tensor's it does not. What torch divides
                # an integer by is of 32 bits, and so is a result that holds both.
                exact = dtype is D and "**" not in expression and MIXES[mix][0] != "k"
                rtol = 0.0 if exact else 2 * torch.finfo(torch.float32 if dtype is D else dtype).eps
                try:
                    check(f, (torch.tensor(CS, dtype=dtype), KS, torch.tensor(WS, dtype=dtype)), rtol)
                except BaseException as error:
                    wrong.append((expression, dtype, str(error)[:300]))
    assert not wrong, "\n".join(map(str, wrong))


# --- derivatives, nestings --------------------------------------------------------------------------------------------


def kind_asked(x, k):
    a = x[0] if k > 1 else 0.5
    return x.sum() * (2 if isinstance(a, float) else a)


def sum_of_truths(x, k):
    a = x[0] > 0 if k > 1 else True
    return x * (a + a) + (~a if k > 2 else 0)


def scaled(x, k):
    a = 0.1
    if x[1] > 0:
        a = x[1] * 2
    b = a * 3
    return x.sin() * (b if b > 0.3 else -b)


def accumulated(x, k):
    total = 0.0
    for v in x:
        if v > 0:
            total = total + v * v
    return x * (total * 0.1 + 1)


def of_a_function(x, k):
    def least(v):
        return v if v > 0.2 else 0.2

    a = least(x[0])
    return x * a + (x[1] if type(a) is float else a * a)


def started_with_a_number(x, k):
    best = -1
    for v in x:
        if v > best:
            best = v
    return x * (best if isinstance(best, int) else best.exp())


def added_to(x, k):
    total = 0
    for v in x:
        if v > 0.2:
            total += v
    try:
        return x * (100 if isinstance(total, int) else 1 / total) + 1 / total
    except ZeroDivisionError:
        return x * 7


def changed_in_place(x, k):
    first = x.clone()
    part = first[0] if x[1] > 0 else 2
    part += 1  # `first` has it, where it is a tensor
    if isinstance(part, int):
        part **= 3
    return first.sum() * 3 + x * part


def chosen_within(x, k):
    y = (x[0] if x[0] > 0 else 3) * 2
    z = -(2 if x[1] > 0 else x[1])
    return x * (y if isinstance(y, int) else y.sin()) + isinstance(z, int)


def greatest_and_least(x, k):
    y, z = max(x[0], 0), 1
    z = min(x[1], z)
    w = abs(x[2] if x[2] > 0 else -2)
    return x * (10 if type(y) is int else y) + isinstance(z, int) + isinstance(w, int) * w


def grown_argument(s, k):
    n, s = 1, s.sum()
    while s < 2:
        s = s + 0.5
        n = n * s
    return s / (n if isinstance(n, int) else 2.0)


PROGRAMS = [
    kind_asked, sum_of_truths, scaled, accumulated, of_a_function, started_with_a_number, added_to, changed_in_place,
    chosen_within, greatest_and_least, grown_argument,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_compositions(program, composition):
    check_as_the_loop(program, composition)


# --- statements, scopes, calls ----------------------------------------------------------------------------------------


def fails_above(x):
    if x > 2:
        raise ValueError("large")
    return x * 1


def asked_no_further(x):
    a = x if x > 0 else 0.1
    return 1 if 0 < a < 2 < fails_above(x) + 3 else 2


def written_to(x):
    y = x * 1
    a = y if x > 0 else 0.5
    if x < 3:
        a += 1
    return y + a


def written_by_kind(x):
    y = x * 1
    a = y if x > 0 else 0.5
    if isinstance(a, float):
        a += 1
    else:
        a.add_(2)
    return y + a


def seen_by_a_function(x):
    a = x if x > 0 else 0.25

    def g():
        return a * 3

    return g() + (1 if isinstance(a, float) else 0)


def seen_by_a_generator(x):
    a = 0.25
    if x > 0:
        a = x
    return sum(v * a for v in range(3)) + (0 if isinstance(a, float) else 1)


def given_by_default(x, eps=None):
    eps = 0.1 if eps is None else eps
    if x > 1:
        eps = x * 0.01
    return x + eps * 2


def caught(x):
    a = x if x > 0 else 0.0
    try:
        return 1 / a
    except ZeroDivisionError:
        return x * 5


def grown(x):
    t = 1
    while t < 5:
        t = t + x.abs() if x > 0 else t * 2
    return t


def annotated(x):
    a: float = 0.1
    if x > 0:
        a = x
    return 1 if isinstance(a, float) else a


def unpacked(x):
    a, b = (x, 1) if x > 0 else (0.1, x)
    return a * 3 + b


def of_several_returns(x):
    if x > 3:
        return 0.0
    if x < 0:
        return x
    return 1


def by_type_of_result(x):
    v = of_several_returns(x)
    if type(v) is int:
        return x * 10
    return v * 2


def positive(x):
    return x > 0 if x < 2 else True


def by_calls_in_expressions(x):
    if isinstance(of_several_returns(x), float):
        return x
    return (~positive(x)) * 1.0 + 7 // (of_several_returns(x) + 2)


def divided_by_a_call(x):
    try:
        return 1 / of_several_returns(x)
    except ZeroDivisionError:
        return x


def left_a_loop(x):
    a = 0.1
    for i in range(3):
        if x > i:
            a = x * i
            continue
        if x < -1:
            break
    else:
        a = a * 2
    return [isinstance(a, float), a * 1]


def bound_again(x):
    n = 1
    while x < 2:
        x = x + 0.5
        n = n * x
    return [isinstance(n, int), n / (n if isinstance(n, int) else 2.0), x]


def divided_by_a_choice(x):
    try:
        return 1 / (0 if x > 0 else x)
    except ZeroDivisionError:
        return [x, 0]


def divided_by_the_greatest(x):
    try:
        return 1 / max(x, 0)
    except ZeroDivisionError:
        return [x, 0]


def shifted(x):
    n = 0
    for v in (x, x * 2, -x):
        n |= 1 if v > 0 else 2
        n <<= 1
    t = 0.1
    t -= x if x > 0 else 0.2
    return [n, t, isinstance(t, float)]


def seen_after_a_change(x):
    total = 0

    def add(v):
        nonlocal total
        if v > 0:
            total += v
        elif v < -1:
            total += 1

    add(x)
    add(x - 1)
    return [isinstance(total, int), total * 2]


def printed(x):
    s = 0.0
    if x > 0:
        s = x
    print(s, end="")
    return s * 2


STATEMENTS = [
    asked_no_further,
    written_to,
    written_by_kind,
    seen_by_a_function,
    seen_by_a_generator,
    given_by_default,
    caught,
    grown,
    annotated,
    unpacked,
    by_type_of_result,
    by_calls_in_expressions,
    divided_by_a_call,
    left_a_loop,
    bound_again,
    divided_by_a_choice,
    divided_by_the_greatest,
    shifted,
    seen_after_a_change,
    printed,
]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning")
@pytest.mark.parametrize("f", STATEMENTS, ids=lambda f: f.__name__)
def test_statements(f):
    check(f, (torch.tensor(CS, dtype=D),), 0.0)
    check(f, (torch.tensor(CS),), 2 * torch.finfo(torch.float32).eps)


# --- where a tensor stands for both -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["0.0", "-1.0", "0.5"])
def test_a_tensor_stands_for_numbers_that_do_not_show(start):
    text = f"    s = {start}\n    if c > 0:\n        s = c\n    if s < w:\n        s = s * w + 1\n    return s - w\n"
    f = function(text)
    cs, ws = torch.tensor(CS), torch.tensor(WS)
    want = torch.stack([torch.as_tensor(f(*row)) for row in zip(cs, KS, ws)])
    torch.testing.assert_close(run_masked(f, (cs, KS, ws), (0, 0, 0)), want, rtol=0, atol=0)


@pytest.mark.parametrize("use", ["1 / s", "s ** -1", "s // w", "~(s > 0)", "s % 0.3"])
def test_masks_leave_numbers_that_show(use):
    f = function(f"    s = c if c > 0 else 0.1\n    return {use} + w\n")
    assert run_masked(f, (torch.tensor(CS), KS, torch.tensor(WS)), (0, 0, 0)) is None


@pytest.mark.parametrize("use", ["1 / max(c, 0)", "2 ** (c if c > 0 else 3)", "(0 if c > 0 else c) // w"])
def test_masks_leave_operands_that_show(use):
    f = function(f"    w = w * 2 if c > 0 else w\n    return {use} + w\n")
    assert run_masked(f, (torch.tensor(CS), KS, torch.tensor(WS)), (0, 0, 0)) is None


def test_several_results_of_masks_as_a_list():
    def f(x):
        n = 0
        while x > 0:
            x = x - 1
            n += 1
        return x, n

    xs = torch.tensor(CS)
    for _ in range(2):
        assert vmap(f, out_dims="list")(xs) == [f(x) for x in xs]


def _fourth_power(x):
    v = 63.875
    if x > 0:
        v = x
    w = v * v
    w = w * w
    return (w - 16646526.0) + x


def _grown(x):
    n = 7.0
    if x > 0:
        n = x
    for _ in range(12):
        n = n * 7.0
    if n > 96889010406.5:
        return x + 1
    return x - 1


def _square(x):
    v = 8.125
    if x > 0:
        v = x
    return (v * v - 64.0) + x


def _product_of_four(x):
    v = 7.0
    if x > 0:
        v = x
    return (v * v * v * v - 2400.0) + x


@pytest.mark.parametrize("f", [_fourth_power, _grown, _square, _product_of_four])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("times", [1, 100])
def test_digits_of_products_of_few_digits(f, dtype, times):
    xs = torch.tensor([-1.626, -0.126, 0.5, 0.25, -0.11], dtype=torch.float64).to(dtype)
    want = torch.stack([torch.as_tensor(f(x)) for x in xs]).repeat(times)
    for _ in range(3):
        assert torch.equal(vmap(f)(xs.repeat(times)), want)
