"""What is a tensor in some lanes and a number in others, in objects, as arguments and results: each lane's own."""

import textwrap

import pytest
import torch

from lanewise import errors, grad, jvp, vmap
from lanewise._transforms.parting import runner
from tests.control.compositions import COMPOSITIONS, SECOND, check_as_the_loop
from tests.control.test_numbers_of_some_lanes import CS, KS, WS, D, check, function

pytestmark = [
    pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning"),
    pytest.mark.filterwarnings("ignore:Bitwise inversion:DeprecationWarning"),
]

HEAD = """
import collections, copy, dataclasses, functools, itertools, operator, statistics
import numpy as np
import torch
from lanewise import cond, grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

class Box:
    def __init__(self, y=None): self.y = y
    def get(self): return self.y
    def set(self, y): self.y = y
    @property
    def half(self): return self.y / 2
    @property
    def inverse(self): return 1 / (self.y - 0.3)
    @property
    def kind(self):
        if isinstance(self.y, torch.Tensor): return 1.0
        return 2.0 if isinstance(self.y, float) else 3.0
    @property
    def case(self):
        match self.y:
            case float(): return 1.0
            case torch.Tensor(): return 2.0
            case _: return 3.0
    @property
    def large(self): return 1.0 if self.y > 0.5 else 2.0
    @property
    def greatest(self): return max(self.y, 0.4, 0.1)
    @property
    def text(self): return f"{self.y}"
    @property
    def tensor(self): return torch.as_tensor(self.y, dtype=torch.float64)
    def __bool__(self): return bool(self.y)
    def __add__(self, other): return self.y + other
    def __float__(self): return float(self.y)
    def __getitem__(self, i): return self.y * i
    def __lt__(self, other): return self.y < other.y
    def __iter__(self):
        yield self.y
        yield self.y / 2
        if isinstance(self.y, float): yield 7.0
    def __enter__(self): return self.y
    def __exit__(self, *_): return False

@dataclasses.dataclass
class Data:
    y: object
    z: int = 3

Named = collections.namedtuple("Named", "y z")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = 0.0
    def forward(self, x, y):
        self.h = y
        return x + 1 / 4 * self.h if isinstance(self.h, float) else x * self.h

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, g): return g * 2

def match_(a):
    match a:
        case True: return 1
        case int(): return 2
        case float(): return 3
        case torch.Tensor(): return 4

def same(a): return a
def first(a, *rest): return a
space = {"torch": torch}
exec("def unseen(y): return (1.0 if type(y) is float else 2.0) + y / 2", space)
unseen = space["unseen"]
"""

# What it is, where a condition holds and where it does not.
MIXES = {
    "floats": "c if c > 0 else 0.3",
    "floats of each lane": "float(c * 0.1) if c < 1 else c",
    "integers": "k if c > 0 else 2",
    "truths": "c > 1 if c > 0 else True",
    "an integer for a float": "3 if w > 0 else c",
    "short integers": "k.to(torch.uint8) + 100 if c > 0 else 200",
    "three kinds": "c if c > 1 else 2 if c > -1 else 0.1",
    "numbers": "0.5 if c > 0 else 2",
    "a vector": "torch.stack([c, w]) if c > 0 else 0.5",
}
# How it is kept, and how it is read again.
KEPT = {
    "attribute": ("s = Box()\ns.y = {e}", "s.y"),
    "argument": ("s = Box({e})", "s.y"),
    "methods": ("s = Box()\ns.set({e})", "s.get()"),
    "list": ("s = [{e}, 1]", "s[0]"),
    "append": ("s = []\ns.append({e})", "s[-1]"),
    "entry": ("s = [0, 1]\ns[0] = {e}", "s[0]"),
    "tuple": ("s = ({e}, 1)\na, b = s", "a"),
    "dict": ("s = {{'y': {e}}}", "s['y']"),
    "defaultdict": ("s = collections.defaultdict(list)\ns['y'].append({e})", "s['y'][0]"),
    "deque": ("s = collections.deque()\ns.append({e})", "s[0]"),
    "dataclass": ("s = Data({e})", "s.y"),
    "named tuple": ("s = Named({e}, 1)", "s.y"),
    "walrus": ("s = [(a := ({e})), 1]", "a"),
    "comprehension": ("s = [{e} for i in range(2)]", "s[1]"),
    "for": ("for a in [{e}]:\n    pass", "a"),
    "operand": ("pass", "({e})"),
    "lambda": ("g = lambda: {e}", "g()"),
    "function": ("def g():\n    return {e}", "g()"),
    "variable of a function": ("def g():\n    y = {e}\n    return y", "g()"),
    "returns": ("def g(y):\n    if w > 0:\n        return y\n    return 0.25", "g({e})"),
    "passed": ("pass", "first(same({e}), 1)"),
    "partial": ("g = functools.partial(lambda i: {e}, 1)", "g()"),
    "closure": ("a = {e}\ndef g():\n    return a", "g()"),
    "map": ("s = list(map(lambda i: {e}, [1, 2]))", "s[0]"),
    "a variable's": ("a = {e}\ns = Box()\ns.y = a", "s.y"),
    "objects of both sides": ("if w > 0:\n    s = Box({e})\nelse:\n    s = Box({e})", "s.y"),
    "lists of both sides": ("if w > 0:\n    s = [{e}, 1]\nelse:\n    s = [0.25, 2]", "s[0]"),
    "a round's": ("s = Box()\nfor i in range(2):\n    s.y = {e}", "s.y"),
}
USES = """
{a} + 1; {a} * 2.5; {a} / 2; {a} + {a}; True + {a}; w * {a}; {a} / w; {a} + 200; {a} ** 2; abs({a}); {a} > 0.3; {a} == 2
isinstance({a}, float); isinstance({a}, torch.Tensor); type({a}) is float; torch.is_tensor({a}); hasattr({a}, 'shape')
{a} is True; {a} is None; [{a}][0] / 4; torch.add({a}, w); torch.where(w > 0, {a}, w); torch.full((2,), {a})
"""
OF_NUMBERS = """
match_({a}); 1 if {a} else 2; not {a}; {a} and 3; f"{{{a}!s:.4}}"; max({a}, 1.5); max({a}, 0.4, 0.1)
float({a}); int({a}); sum([{a}, {a}, True])
sorted([{a}, 1])[0] / 2; round(float({a}), 1); torch.tensor([{a}, 1]); {a} in (1, 2); bool({a})
"""
# Those that some lanes refuse.
REFUSED = [
    "1 / ({a} - 2)",
    "torch.sin({a})",
    "({a}).sum()",
    "[5, 6, 7][{a}]",
    "{a}[None]",
    "~{a}",
    "torch.stack([{a}, w])",
]


def parts(text):
    return [part.strip() for part in text.replace("\n", ";").split(";") if part.strip()]


def program(kept, mix, use):
    setup, read = KEPT[kept]
    chosen = MIXES[mix]
    body = setup.format(e=chosen) + "\nreturn " + use.format(a=read.format(e=chosen))
    return function(textwrap.indent(body, "    ") + "\n", HEAD)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("mix", MIXES)
def test_as_the_loop(mix, kept):
    columns = (torch.tensor(CS, dtype=D), KS, torch.tensor(WS, dtype=D))
    uses = [*parts(USES), *([] if mix == "a vector" else parts(OF_NUMBERS))]
    if KEPT[kept][1].count("{e}"):  # before Python 3.12, an f-string holds no quotes of its own
        uses = [use for use in uses if not use.startswith('f"')]
    # Of integers and truths, torch computes in 32 bits what is no integer.
    check(program(kept, mix, f"[{', '.join(uses)}]"), columns, 1e-6 if mix not in ("floats", "numbers") else 1e-12)


@pytest.mark.parametrize("kept", ["attribute", "entry", "operand", "function", "passed", "lists of both sides"])
@pytest.mark.parametrize("mix", MIXES)
def test_errors_are_those_of_the_loop(mix, kept):
    columns = (torch.tensor(CS, dtype=D), KS, torch.tensor(WS, dtype=D))
    for use in REFUSED if mix != "a vector" else REFUSED[:3]:
        check(program(kept, mix, use), columns, 1e-6)


# --- code that runs as it was written, libraries, transforms inside ---------------------------------------------------

WRITTEN = """
s.half; s.kind; s.case; s.large; s.greatest; s.text; s.tensor; bool(s); s + 1; s + w; float(s); s[2]; s < Box(w)
list(s); sum(s); unseen(s.y); statistics.mean([float(s.y), 1.0]); list(itertools.accumulate([s.y, 1, 2]))
operator.truediv(1, s.y + 7); functools.reduce(lambda a, b: a * b, [s.y, s.y, 2]); copy.copy(s.y) / 2
copy.deepcopy(s).half; s.y.__class__ is float; getattr(s, "y") / 2; vars(s)["y"] / 2; [*[s.y]][0] / 2
(lambda **kw: kw["y"] / 2)(y=s.y); dict(y=s.y)["y"] / 2; Net()(w, s.y); torch.nn.ReLU()(w * s.y)
torch.nn.functional.pad(w[None], (1, 1), value=s.y); w[None].clamp(min=s.y)
checkpoint(lambda q, y: q * y, w, s.y, use_reentrant=False); Doubled.apply(w * s.y)
cond(s.y > 0.6, lambda: w * 2, lambda: w); grad(lambda q: q * q * s.y)(w)
grad(lambda q: q * (2 if isinstance(s.y, float) else q))(w); jacrev(lambda q: q * s.y)(w)
jvp(lambda q: q * s.y, (w,), (w,))[1]; vjp(lambda q: q * s.y, w)[1](w)[0]
grad(lambda q: (q * 2, s.y), has_aux=True)(w)[1]
grad(lambda q: (q * 2, [q if c > 0 else 0.5, s.y]), has_aux=True)(w)[1][0]
vmap(lambda q: q * s.y)(torch.stack([w, c]))
vmap(lambda q: q * 2 if isinstance(s.y, float) else q)(torch.stack([w, c]))
vmap(lambda q: 1 / (s.y + 7) + q)(w[None])
vmap(lambda q: Box(q if q > 0 else 0.5).kind + s.kind)(torch.stack([w, c])); with_(s); last(s)
vmap(lambda q: s.y / 2 + q, out_dims="list")(torch.stack([w, c]))
vmap(lambda q: chosen(q, s), out_dims="list")(torch.stack([w, c])); vmap(lambda q: chosen(q, s))(torch.stack([w, c]))
grad(lambda vs: vmap(lambda q: chosen(q, s))(vs).sum())(torch.stack([w, c])); np.asarray(s.y) / 2
"""
REFUSING = ["s.inverse", "Doubled.apply(s.y)", "grad(lambda q: q * q)(s.y)"]
SMALL = """
def chosen(q, s):
    y = s.y
    if q > 0:
        y = q
    return Box(1 if q > 2 else y).half + y

def with_(s):
    with s as y:
        return y / 2

def last(s):
    for y in s:
        out = y / 3
    return out
"""


@pytest.mark.parametrize("mix", ["floats", "integers", "an integer for a float", "three kinds", "numbers"])
def test_code_that_is_not_converted(mix):
    columns = (torch.tensor(CS, dtype=D), KS, torch.tensor(WS, dtype=D))
    for use in [*parts(WRITTEN), *REFUSING]:
        check(function(f"    s = Box({MIXES[mix]})\n    return {use}\n", HEAD + SMALL), columns, 1e-6)


# --- statements ------------------------------------------------------------------------------------------------------


class Box:
    def __init__(self, y):
        self.y = y


def a_total(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    s = Box(0.0)
    for x in v:
        s.y = s.y + (x if x > 0 else 0.1)
    return [s.y * 3, isinstance(s.y, float)]


def a_counter(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    s = Box(0.0)
    for x in v:
        if x > 0:
            s.y = s.y + x
    return [s.y / 3, isinstance(s.y, float)]


def a_state(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    h = [0.0, 0.0]
    for x in v:
        h = [h[1], x * 2 if x > 0 else h[0]]
    return h[0] + h[1] * 2


def a_tuple(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    t = (0.0, 1)
    for x in v:
        if x > t[0]:
            t = (x, t[1] + 1)
    return [t[0] / 2, isinstance(t[0], float)]


def a_best(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    d = {"best": 0}
    for x in v:
        d["best"] = max(d["best"], x)
    return d["best"] / 2


def of_a_variable_outside(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    t = 0.0

    def add(x):
        nonlocal t
        t = t + x if x > 0 else t

    for x in v:
        add(x)
    return t / 2


def a_while(c, k, w):
    s = Box(1.0)
    n = 0
    while s.y < 5:
        s.y = s.y * 2 if w > 0 else s.y + c.abs()
        n += 1
    return [s.y * 1.0, n]


def recursion(c, k, w):
    def q(y, n):
        return y if n == 0 else q(y / 2 if w > 0 else 1, n - 1)

    return q(c if c > 0 else 3, 2) / 4


def a_try(c, k, w):
    s = Box(c if c > 0 else 0)
    try:
        return 1 / s.y
    except ZeroDivisionError:
        return 7.0


def no_attribute(c, k, w):
    s = Box(c if c > 0 else 0)
    try:
        return s.y.sin()
    except AttributeError:
        return 7.0


def truths(c, k, w):
    v = torch.stack([w, c, w + c, c - 1])
    f = [x > 0 if x > -1 else True for x in v]
    return [sum(f), any(f), all(f), f[0] + f[1]]


def in_place(c, k, w):
    t = c * 1
    s = Box(t if c > 0 else 0.5)
    q = s.y * w
    t += 3
    return [s.y * w, q, t]


def in_place_in_some(c, k, w):
    t = c * 1
    s = Box(t if c > 0 else 0.5)
    q = s.y * w
    if w > 0:
        t.mul_(3)
    return [s.y * w, q]


def augmented(c, k, w):
    t = c * 1
    s = Box(t if c > 0 else 0.5)
    a = s.y
    s.y += 1
    return [a * w, s.y * w, t]


def a_large_integer(c, k, w):
    s = Box(k if c > 0 else 2**70)
    return float(s.y)


def a_short_float(c, k, w):
    s = Box(c.half() if c > 0 else 0.1)
    return s.y * w


def several(c, k, w):
    s = Box(c if c > 0.5 else 0.25 if c > -1 else 3)
    t = Box(s.y if w > 0 else k)
    return [t.y / 2, type(t.y) is int]


def a_pattern(c, k, w):
    s = Box(c if c > 0 else 0.5)
    match [s.y, 1]:
        case [float(), 1]:
            return 1.0
        case _:
            return 2.0


STATEMENTS = [
    a_total,
    a_counter,
    a_state,
    a_tuple,
    a_best,
    of_a_variable_outside,
    a_while,
    recursion,
    a_try,
    no_attribute,
    truths,
    in_place,
    in_place_in_some,
    augmented,
    a_large_integer,
    a_short_float,
    several,
    a_pattern,
]


@pytest.mark.parametrize("f", STATEMENTS, ids=lambda f: f.__name__)
def test_statements(f):
    check(f, (torch.tensor(CS, dtype=D), KS, torch.tensor(WS, dtype=D)), 1e-6)


# --- derivatives, nestings --------------------------------------------------------------------------------------------


def asked(x, k):
    s = Box(x[0] if k > 1 else 0.5)
    return x.sum() * (2 if isinstance(s.y, float) else s.y)


def added_up(x, k):
    s = Box(0.0)
    for v in x:
        s.y = s.y + (v if v > 0 else 0.1)
    return x * s.y / 3


def of_a_call(x, k):
    def part(v):
        return v * 2 if v > 0 else 0.25

    return x.sin() * (part(x[0]) / 2 + part(x[1]) * part(x[2]) + 1 / (part(x[0]) + 1))


def in_lists(x, k):
    kept = [v if v > 0 else 0.5 for v in x]
    return x * (kept[0] + kept[0]) / (kept[1] + 2) + sum(kept)


def of_the_greatest(x, k):
    s = Box(max(x[0], 0.3, x[1]))
    return x * s.y + s.y**2 / 3


def of_truths(x, k):
    s = Box(x[0] > 0 if k > 1 else True)
    return x * (s.y + s.y)


@pytest.mark.parametrize("composition", COMPOSITIONS + SECOND, ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "program", [asked, added_up, of_a_call, in_lists, of_the_greatest, of_truths], ids=lambda p: p.__name__
)
def test_compositions(program, composition):
    check_as_the_loop(program, composition)


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_hold_tensors():
    """As what a function returns, in containers too, it is a tensor, and lanes need not part for that."""
    xs = torch.tensor([1.0, -1.0, 2.0])
    runs = []

    def f(x):
        runs.append(None)
        s = Box(x if x > 0 else 0.5)
        return s.y, [s.y], {"y": s.y}

    first, (second,), third = vmap(f)(xs)
    for got in (first, second, third["y"]):
        torch.testing.assert_close(got, torch.tensor([1.0, 0.5, 2.0]))
    before = len(runs)
    vmap(f)(xs)
    assert len(runs) - before == 1


@pytest.mark.parametrize("masks", [False, True])
def test_a_gradient_of_a_number_is_zero(masks, monkeypatch):
    if not masks:
        for name in ("masked", "masked_plainly"):
            monkeypatch.setattr(runner, name, lambda *_: None)
    xs = torch.tensor([1.0, -1.0, 2.0])
    assert vmap(grad(lambda x: x * x if x > 0 else 0.0))(xs).tolist() == [2.0, 0.0, 4.0]
    assert vmap(lambda x: jvp(lambda x: x * x if x > 0 else 0.0, (x,), (x,))[1])(xs).tolist() == [2.0, 0.0, 8.0]


HELPERS = """
def part(v):
    return v if v > 0 else 0.0

def added(v, w):
    t = 0.0
    if v > 0:
        t = t + v
    if w > 0:
        t = t + w
    return t

def inverse(v):
    if v > 1:
        return 2 / v
    return 1 / v

def power(v, w):
    return v**-1 if w < 0 else w
"""


@pytest.mark.parametrize(
    "body",
    [
        "return 1 / part(c) + w",
        "return part(c) ** -1 * w",
        "return 1 / added(c, w)",
        "return inverse(part(c)) * w",
        "q = part(c)\nreturn 1 / q + w",
        "return power(part(c), w) * 2",
    ],
)
def test_functions_with_masks_leave_numbers_that_show(body):
    xs = torch.tensor([0.75, -1.5, 2.25, 0.3, -0.25, 4.0] * 3)
    f = function(textwrap.indent(body, "    ") + "\n", HELPERS)
    with pytest.raises(ZeroDivisionError) as failure:
        vmap(lambda c, w: f(c, None, w))(xs, xs.flip(0) - 5)
    with pytest.raises(ZeroDivisionError):
        vmap(f, in_dims=(0, None, 0))(xs, None, xs.flip(0) - 5)
    assert 1 in failure.value.lanes


def test_what_is_kept_after_the_call_says_so():
    kept = []

    def f(x):
        kept.append(Box(x if x > 0 else 0.5))
        return x

    vmap(f)(torch.tensor([1.0, -1.0, 2.0]))
    y = kept[-1].y
    for use in (lambda: y + 1, lambda: torch.sin(y), lambda: float(y), lambda: isinstance(y, float), lambda: y.shape):
        with pytest.raises(errors.EscapedTensorError):
            use()
