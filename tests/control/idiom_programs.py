"""What people write for one example: sorting, searching, counting, tables, stacks, steps that adapt.

`x` [6] float64, `i` and `j` [6] whole numbers, `ends` [2].
"""

import bisect
import heapq
import math
from collections import Counter

import torch

D = torch.float64


def hysteresis(x):
    on = False
    out = []
    for v in x:
        if on:
            on = bool(v > -0.2)
        else:
            on = bool(v > 0.4)
        out.append(v if on else v * 0)
    return torch.stack(out).sum()


def positive_of_nested_lists(x):
    return sum(v for r in x.reshape(2, 3).tolist() for v in r if v > 0) * x.sum()


def distinct(i):
    return torch.tensor(float(len(set(i.tolist()))))


def between_sorted_ends(x, ab):
    a, b = sorted(ab.tolist())
    return x[a:b].sum()


def between_least_and_largest_end(x, ab):
    a, b = min(ab.tolist()), max(ab.tolist())
    return x[a:b].sum()


def try_cholesky(x):
    try:
        L = torch.linalg.cholesky(x[:4].outer(x[:4]) + 0.3 * torch.diag(x[:4]) + torch.eye(4, dtype=D))
        return L.sum()
    except Exception:
        return x.sum()


def try_solve(x):
    A = x[:4].reshape(2, 2)
    if x[4] > 0:
        A = A * 0
    try:
        return torch.linalg.solve(A, x[4:6]).sum()
    except RuntimeError:
        return x.sum()


def non_maximum_suppression(x):
    b = torch.stack([x, x + 0.5], 1)
    keep = []
    for i in b[:, 0].argsort():
        ok = True
        for j in keep:
            if (b[i] - b[j]).abs().sum() < 1.0:
                ok = False
                break
        if ok:
            keep.append(i)
    return torch.stack([b[i].sum() for i in keep]).sum()


def suppression_by_mask(x):
    order = x.argsort(descending=True)
    dead = torch.zeros(len(x), dtype=torch.bool)
    total = x.sum() * 0
    for i in order:
        if dead[i]:
            continue
        total = total + x[i]
        dead = dead | ((x - x[i]).abs() < 0.4)
    return total


def largest_by_heap(x):
    h = []
    for v in x.tolist():
        heapq.heappush(h, v)
        if len(h) > 3:
            heapq.heappop(h)
    return torch.tensor(sum(h), dtype=D)


def most_common_by_counter(i):
    c = Counter(i.tolist())
    return torch.tensor(float(max(c.values())))


def most_common_by_dict(i):
    d = {}
    for t in i.tolist():
        d[t] = d.get(t, 0) + 1
    return torch.tensor(float(max(d.values())))


def most_common(i):
    v, c = i.unique(return_counts=True)
    return v[c.argmax()]


def two_pointers(x):
    s = x.sort().values
    lo, hi = 0, len(s) - 1
    best = s[0] + s[-1]
    while lo < hi:
        t = s[lo] + s[hi]
        if t.abs() < best.abs():
            best = t
        if t > 0:
            hi -= 1
        else:
            lo += 1
    return best


def binary_search(x):
    s = x.sort().values
    lo, hi = 0, len(s)
    while lo < hi:
        mid = (lo + hi) // 2
        if s[mid] < 0.1:
            lo = mid + 1
        else:
            hi = mid
    return s.sum() * lo


def binary_search_of_bisect(x):
    return x.sum() * bisect.bisect_left(x.sort().values.tolist(), 0.1)


def run_lengths(i):
    runs = []
    prev, n = None, 0
    for t in i.tolist():
        if t == prev:
            n += 1
        else:
            if prev is not None:
                runs.append(n)
            prev, n = t, 1
    runs.append(n)
    return torch.tensor(float(max(runs)))


def longest_run(i):
    longest = n = 0
    prev = None
    for t in i:
        if prev is not None and t == prev:
            n += 1
        else:
            n = 1
        prev = t
        longest = max(longest, n)
    return torch.tensor(longest)


def edit_distance(i, j):
    d = list(range(len(j) + 1))
    for a in range(len(i)):
        prev, d[0] = d[0], a + 1
        for b in range(len(j)):
            cur = d[b + 1]
            d[b + 1] = prev if i[a] == j[b] else 1 + min(prev, d[b], d[b + 1])
            prev = cur
    return torch.tensor(d[-1]) if not isinstance(d[-1], torch.Tensor) else d[-1]


def time_warping(x):
    y = x.flip(0)
    n = len(x)
    C = [[math.inf] * (n + 1) for _ in range(n + 1)]
    C[0][0] = 0.0
    for a in range(n):
        for b in range(n):
            C[a + 1][b + 1] = (x[a] - y[b]).abs() + min(C[a][b], C[a][b + 1], C[a + 1][b])
    return C[n][n]


def depth_of_parentheses(i):
    depth = 0
    for t in i:
        if t == 0:
            depth += 1
        elif t == 1:
            depth -= 1
            if depth < 0:
                return torch.tensor(-1)
    return torch.tensor(depth)


def stack_of_parentheses(i):
    stack = []
    for p, t in enumerate(i.tolist()):
        if t == 0:
            stack.append(p)
        elif t == 1 and stack:
            stack.pop()
    return torch.tensor(len(stack))


def beam_search(x):
    beams = [(0.0, 0)]
    for v in x.tolist():
        new = []
        for s, entries in beams:
            new.append((s + v, entries + 1))
            new.append((s - 0.5 * v, entries))
        beams = sorted(new, reverse=True)[:2]
    return torch.tensor(beams[0][0], dtype=D)


def bubble_sort(x):
    entries = list(x)
    for i in range(len(entries)):
        for j in range(len(entries) - 1 - i):
            if entries[j] > entries[j + 1]:
                entries[j], entries[j + 1] = entries[j + 1], entries[j]
    return (torch.stack(entries) * torch.arange(6, dtype=D)).sum()


def insertion_sort(x):
    out = []
    for v in x:
        k = len(out)
        while k > 0 and out[k - 1] > v:
            k -= 1
        out.insert(k, v)
    return out[0] * 2 + out[-1]


def sorted_by_key(x):
    return (torch.stack(sorted(x, key=lambda v: -abs(v))) * torch.arange(6, dtype=D)).sum()


def indexed_by_list(x, i):
    return torch.stack([x[j] for j in i.tolist()]).prod()


def adaptive_steps(x):
    t, h, y, n = 0.0, 0.3, x[0], 0
    while t < 1.0 and n < 40:
        y1 = y - h * y * x[1].abs()
        y2 = y - h / 2 * y * x[1].abs()
        y2 = y2 - h / 2 * y2 * x[1].abs()
        err = (y1 - y2).abs()
        if err > 0.01:
            h = h / 2
        else:
            t += h
            y = y2
            if err < 0.001:
                h = min(h * 2, 1.0 - t) if t < 1 else h
        n += 1
    return y


def line_search(x):
    f = lambda z: (z**2).sum() + (3 * z).cos().sum()
    g = 2 * x - 3 * (3 * x).sin()
    t = 1.0
    for _ in range(10):
        if f(x - t * g) < f(x) - 0.3 * t * (g * g).sum():
            break
        t *= 0.5
    return f(x - t * g)


def until_it_converges(x):
    old = None
    y = x.abs().sum() + 0.5
    a = y
    while old is None or (y - old).abs() > 1e-8:
        old = y
        y = 0.5 * (y + a / y)
    return y


def until_padding(i, x):
    total = x.sum() * 0
    for t, v in zip(i, x):
        if t == 0:
            break
        total = total + v
    return total


def viterbi(x):
    s = [x[0], x[1]]
    back = []
    for v in x[2:]:
        a, b = s
        if a > b:
            s = [a + v, a - v]
            back.append(0)
        else:
            s = [b + v, b - v]
            back.append(1)
    return max(s) + sum(back)


def union_find(i):
    parent = list(range(6))

    def find(a):
        while parent[a] != a:
            a = parent[a]
        return a

    entries = i.tolist()
    for a, b in zip(entries, entries[1:]):
        ra, rb = find(a), find(b)
        if ra != rb:
            parent[ra] = rb
    return torch.tensor(float(sum(parent[a] == a for a in range(6))))


def largest_and_where(x):
    arg, top = -1, -math.inf
    for i, v in enumerate(x.tolist()):
        if v > top:
            arg, top = i, v
    return x[arg] * 2


def largest_two(x):
    a = b = -math.inf
    for v in x:
        if v > a:
            a, b = v, a
        elif v > b:
            b = v
    return a - b


def largest_sum(x):
    best = cur = x[0]
    for v in x[1:]:
        cur = max(cur + v, v)
        best = max(best, cur)
    return best


def crossings(x):
    n = 0
    for a, b in zip(x[:-1], x[1:]):
        if a * b < 0:
            n += 1
    return x.sum() * n


def until_low(x):
    h, out = x[0], []
    for _ in range(8):
        h = torch.sin(h * 3 + x[1])
        out.append(h)
        if h < -0.7:
            break
    return torch.stack(out).sum()


def spans(x):
    out, start = [], None
    for i, v in enumerate(x):
        if v > 0:
            if start is None:
                start = i
        elif start is not None:
            out.append((start, i))
            start = None
    if start is not None:
        out.append((start, len(x)))
    return x.sum() * len(out) + sum((x[a:b].max() for a, b in out), x.sum() * 0)


def without_zeros(i):
    return torch.tensor([t for t in i.tolist() if t != 0]).sum()


def text_of_tokens(i):
    s = "".join("()x"[t % 3] for t in i.tolist())
    return torch.tensor(float(s.count("(")))


def memo(i):
    memo = {}

    def fib(n):
        if n < 2:
            return n
        if n not in memo:
            memo[n] = fib(n - 1) + fib(n - 2)
        return memo[n]

    return torch.tensor(float(fib(int(i[0]) + 3)))


def gcd(i):
    a, b = int(i[0]) + 1, int(i[1]) + 1
    while b:
        a, b = b, a % b
    return torch.tensor(a)


def first_that_is_large(x):
    while any((found := v).abs() > 1.0 for v in x):
        x = x * 0.5 + found * 0.1
        if x.sum().abs() > 3:
            break
    return x.sum() + found


def last_asked_of_all(x):
    if all((drop := b - a) < 0.9 for a, b in zip(x, x[1:])):
        return x.sum()
    return drop * x.prod()


def last_of_a_generator(x):
    last, seen = None, {}

    def large():
        nonlocal last
        for place, value in enumerate(x):
            last = value
            seen[place] = value
            yield value > 0.5

    return last * 2 + len(seen) if any(large()) else sum(seen.values())


def before_a_gap(x):
    total = 0.0
    for value in ((last := v) * 2 for v in x):
        if value < -1:
            break
        total = total + value
    return total + last


# By the arguments that they take.
PROGRAMS = {
    "x": [
        hysteresis,
        positive_of_nested_lists,
        try_cholesky,
        try_solve,
        non_maximum_suppression,
        suppression_by_mask,
        largest_by_heap,
        two_pointers,
        binary_search,
        binary_search_of_bisect,
        time_warping,
        beam_search,
        bubble_sort,
        insertion_sort,
        sorted_by_key,
        adaptive_steps,
        line_search,
        until_it_converges,
        viterbi,
        largest_and_where,
        largest_two,
        largest_sum,
        crossings,
        until_low,
        spans,
        first_that_is_large,
        last_asked_of_all,
        before_a_gap,
        last_of_a_generator,
    ],
    "i": [
        distinct,
        most_common_by_counter,
        most_common_by_dict,
        most_common,
        run_lengths,
        longest_run,
        depth_of_parentheses,
        stack_of_parentheses,
        union_find,
        without_zeros,
        text_of_tokens,
        memo,
        gcd,
    ],
    "xi": [indexed_by_list],
    "xe": [between_sorted_ends, between_least_and_largest_end],
    "ij": [edit_distance],
    "ix": [until_padding],
}
