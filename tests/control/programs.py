"""Functions of one example, `x` [3] float64 and `k` [] int64, whose control flow depends on their values."""

import functools
import math

import torch
from torch import nn

D = torch.float64


def sign(x, k):
    if x[0] > 0:
        y = x * 2
    elif x[1] > 0:
        y = x - 1
    else:
        y = x.exp()
    return y.sum()


def one_sided(x, k):
    y = x * 1.5
    if x.sum() > 0:
        y = y * x[0]
        y = y.sin()
    return y + x


def early_return(x, k):
    if x[0] > 1:
        return x.sum()
    y = x * x
    if y.sum() > 2:
        return y.prod()
    if k == 2:
        return y[1] - y[0]
    return y.exp().sum()


def newton(x, k):
    a = x.abs() .sum() + 0.1  # fmt: skip
    y = a
    while abs(y * y - a) > 1e-9 * a:
        y = 0.5 * (y + a / y)
    return y


def while_with_all(x, k):
    n = 0
    while n < 6:
        n += 1
        if x[0] > n - 3:
            continue
        x = x * 1.1
        if x.sum() > 2:
            break
        if x.prod() < -1:
            return x.sin() + n
    else:
        x = x - 10
    return x * n


def range_of_a_number(x, k):
    acc = x * 0
    for i in range(int(k)):
        acc = acc + x ** (i + 1)
    return acc


def nested_ranges(x, k):
    total = 0.0
    for i in range(k.item()):
        for j in range(i, int(k) + 1):
            if (i + j) % 3 == 0:
                continue
            total = total + x[j % 3] * (i + 1)
            if total > 4:
                break
        else:
            total = total * 2
    return total + x.sum()


def break_over_rows(x, k):
    s = torch.zeros((), dtype=D)
    for i, v in enumerate(x):
        if v < 0:
            break
        s = s + v * i
    else:
        s = s + 100
    return s


def ternaries(x, k):
    y = x.sum() if x[0] > 0 else x.prod() if k > 1 else x[2]
    return y * (1 if k % 2 else -1) + (x[0] if not x[1] > 0 else x[1])


def boolean_operands(x, k):
    if x[0] > 0 and x[1] > 0 or k == 1:
        return x.sum()
    if not (x[2] > 0 and 0 < k < 3):
        return -x.sum()
    return x[0] * 3


def chained(x, k):
    return x * 2 if -1 < x[0] < x[1] < 3 else x * 3


def recursion(x, k):
    def power(n):
        if n == 0:
            return x * 0 + 1
        if n % 2:
            return x * power(n - 1)
        half = power(n // 2)
        return half * half

    return power(int(k)).sum()


def helper(y, n):
    if y.sum() > n:
        return y - n, "high"
    return y + n, "low"


def calls(x, k):
    y, name = helper(x, 1)
    z, other = helper(x * 2, int(k))
    if name == "high":
        y = y * 10
    return y + z + (other == "low")


def number_arithmetic(x, k):
    n = int(k)
    m = (n + 3) * 2 - n // 2
    p = n**2 % 5 + max(n, 2) - min(1, n)
    q = float(x[0].detach()) * n / (m + 1)
    return x * m + p - q + round(q) + abs(n - 2) + (n if n > m else -m)


def number_branches(x, k):
    n = k.item()
    if n > 2:
        scale = 0.5
    elif n == 1:
        scale = 2.0
    else:
        scale = n * 1.0
    return x * scale


def python_math(x, k):
    a = math.exp(float(x[0].detach())) + math.floor(x[1].item()) + math.sqrt(abs(x[2].item()))
    return x * a + math.pi


def index_by_number(x, k):
    i = int(k) % 3
    y = x.clone()
    y[i] = x[i] * 5
    return y + x[i] + x[(i + 1) % 3]


def list_and_dict(x, k):
    table = [1.0, x.sum(), x[0] * 2, -1.0]
    scale = {0: 1.0, 1: 3.0, 2: -2.0, 3: 0.5}
    return x * table[int(k) % 4] + scale[int(k) % 4]


def dispatch(x, k):
    functions = {0: torch.sin, 1: torch.exp, 2: lambda t: t * t, 3: torch.cos}
    return functions[int(k) % 4](x)


def slices(x, k):
    return (x[: int(k) % 4] ** 2).sum() + x[int(k) % 3 :].sum()


def sizes(x, k):
    n = int(k)
    return (torch.arange(n, dtype=D) * torch.ones(n, dtype=D)).sum() * x


def masks(x, k):
    y = x.clone()
    m = x > 0
    y[m] = x[m].sqrt()
    return y.sum() + x[x < 0].sum()


def lists(x, k):
    parts = []
    for i in range(3):
        parts.append(x[i] * i if x[i] > 0 else x[i])
    return torch.stack(parts)


def ragged_list(x, k):
    parts = [x[0]]
    for i in range(3):
        if x[i] > 0:
            parts.append(x[i] * (i + 1))
    return torch.stack(parts).sum()


def in_place(x, k):
    y = x.clone()
    if x[0] > 0:
        y.mul_(2)
        y[1] += 1
    else:
        y[0] = x[1] * x[2]
    y += x
    return y


def in_place_products(x, k):
    v = x.clone()
    if x[0] > 0:
        v[1] = x[0] * x[2]
        v += x[0] * x[1]
    else:
        v.mul_(0.9)
    return (v * v).sum()


def in_place_loop(x, k):
    acc = torch.zeros(3, dtype=D)
    i = 0
    while i < k:
        acc[i % 3] += x[i % 3] * (i + 1)
        i += 1
    return acc


def views(x, k):
    y = x.clone()
    first = y[0]
    if x[1] > 0:
        first.mul_(3)
    return y + first


def strings(x, k):
    if x[0] > 0:
        mode = "sum"
    elif k > 1:
        mode = "prod"
    else:
        mode = "first"
    return {"sum": lambda: x.sum(), "prod": lambda: x.prod(), "first": lambda: x[0]}[mode]()


def closures(x, k):
    count = 0

    def add(amount):
        nonlocal count
        count = count + amount
        return count

    for i in range(3):
        if x[i] > 0:
            add(x[i])
    return count + x.sum()


def tries(x, k):
    try:
        if x[0] > 0.5:
            raise ValueError
        y = x * 2
    except ValueError:
        y = x.exp()
    finally:
        z = x + 1
    return y + z


def zero_division(x, k):
    try:
        scale = 6 // int(k)
    except ZeroDivisionError:
        scale = -1
    return x * scale


def with_blocks(x, k):
    with torch.no_grad():
        big = x.norm() > 1
        if big:
            c = x.sum()
        else:
            c = x.prod()
    with torch.enable_grad():
        if k > 1:
            return x * c
    return x + c


def matches(x, k):
    match int(k):
        case 0:
            return x
        case 1 | 2:
            y = x * 2
        case n if n > 3:
            y = x * n
        case _:
            y = -x
    return y


def generator_callee(x, k):
    def parts():
        for i in range(3):
            if x[i] > 0:
                yield x[i] * i
            else:
                yield x[i]

    return sum(parts()) + x[0]


def quantifiers(x, k):
    if any(v > 1 for v in x):
        return x.sum()
    if all(v < 0.5 for v in x):
        return x.prod() * 2
    return max(x[0], x[1]) * 3 + min(x[1], x[2], x[0]) + sum(v * 2 for v in x)


def comprehension_conditions(x, k):
    return sum([v * v for v in x if v > 0]) + x[0]


def walrus(x, k):
    if (s := x.sum()) > 0:
        return s * 2
    while (s := s + 0.5) < 1:
        x = x * 1.1
    return s * x[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=D))
        self.calls = 0

    def forward(self, x):
        if x.sum() > 0:
            return x * self.weight
        return self.__hidden(x)

    def __hidden(self, x):
        return x - self.weight if x[0] > -1 else x * 0


class Deep(Block):
    def forward(self, x):
        y = super().forward(x)
        return y.tanh() if y[0] > 0 else y


BLOCK, DEEP = Block(), nn.Sequential(Deep(), nn.Tanh(), Block())


def modules(x, k):
    return BLOCK(x) + DEEP(x)


def decorated(function):
    @functools.wraps(function)
    def wrapper(x, k):
        if x[0] > 1:
            return function(x / 2, k)
        return function(x, k)

    return wrapper


@decorated
def decorated_sign(x, k):
    return x * 3 if x[1] > 0 else x.sin()


@torch.enable_grad()
def torch_decorated(x, k):
    return x * 3 if x[1] > 0 else x.sin()


def partials(x, k):
    return functools.partial(helper, n=0)(x)[0] * functools.reduce(lambda a, b: a if a > b else b, x)


def mixed_kinds(x, k):
    scale = 0
    if k > 1:
        scale = x[0]
    if k > 2:
        scale = scale + 1.5
    return x * scale


def shadow(x, k):
    for i in range(3):
        v = x[i]
        if v > 0:
            continue
        x = x + 0.25
    return x * v + i


def unused_nan_branch(x, k):
    return x[0].sqrt() * x if x[0] > 0 else x.sum() * 0 + x


def pairs(x, k):
    a, b = x[0], x[1]
    for _ in range(3):
        if a > b:
            a, b = b, a - b
        else:
            a, b = b + 0.1, a
    return torch.stack([a, b])


def nothing_known(x, k):
    best = None
    for v in x:
        if best is None or v > best:
            best = v
    return best * x


def inner_variables(x, k):
    """What a variable of an inner loop holds once that is over is that of some lanes, and nobody reads it."""
    total = x.sum()
    for a in x:
        for b in range(2):
            if a < 0:
                break
            b = b * total
            total = total + 0.1 * b
        else:
            if total > k - 1:
                total = total * 0.9
            else:
                break
    return total


def inner_variables_of_branches(x, k):
    total = x.sum()
    for a in x:
        if a > 0:
            for b in x:
                b = b * total
                if b > a:
                    break
                total = total + b
        elif a < -1:
            for c in x[:2]:
                c = c - k
                if c > a:
                    continue
                total = total + c
        if total > 4:
            break
    return total


PROGRAMS = [
    sign, one_sided, early_return, newton, while_with_all, range_of_a_number, nested_ranges, break_over_rows, ternaries,
    boolean_operands, chained, recursion, calls, number_arithmetic, number_branches, python_math, index_by_number,
    list_and_dict, dispatch, slices, sizes, masks, lists, ragged_list, in_place,
    in_place_products, in_place_loop, views, strings,
    closures, tries, zero_division, with_blocks, matches, generator_callee, quantifiers, comprehension_conditions,
    walrus, modules, decorated_sign, torch_decorated, partials, mixed_kinds, shadow, unused_nan_branch, pairs,
    nothing_known, inner_variables, inner_variables_of_branches,
]  # fmt: skip
