"""Programs at the edges of what a branch can do: containers, objects, iterators, errors. `x` [3], `k` [] int64."""

import collections
import contextlib
import dataclasses

import torch


def lists1(x, k):
    out = []
    for i in range(3):
        if x[i] > 0:
            out.append(x[i])
        else:
            out.insert(0, x[i] * 2)
    return torch.stack(out)


def lists2(x, k):
    a = [x[0]]
    b = [x[1]]
    c = a if x[0] > 0 else b
    c.append(x[2])
    return sum(a) * 1.0 + sum(b) * 2.0


def lists3(x, k):
    a = [x[0]]
    b = [x[1]]
    if x[0] > 0:
        c = a
    else:
        c = b
    c[0] = x[2] * 5
    return a[0] + b[0] * 2


def lists4(x, k):
    if x[0] > 0:
        return x.sum()
    out = []
    for i in range(3):
        out.append(x[i] * i)
    return sum(out)


def dicts(x, k):
    d = {"a": x[0], "b": x[1]}
    if x[2] > 0:
        d["a"] = x[1]
    else:
        d["c"] = x[2]
    return sum(d.values())


def dict2(x, k):
    if x[2] > 0:
        d = {"a": x[1], "b": 1.0}
    else:
        d = {"a": x[0], "b": 2.0}
    return d["a"] * d["b"]


def tensor_alias(x, k):
    a = x.clone()
    b = x * 2
    c = a if x[0] > 0 else b
    c.add_(1)
    return a.sum() + b.sum() * 3


def tensor_alias2(x, k):
    a = x.clone()
    b = x * 2
    c = a if x[0] > 0 else b
    a.add_(1)
    return c.sum()


def tensor_alias3(x, k):
    a = x.clone()
    b = x * 2
    r = a[0]
    if x[0] > 0:
        a = b
    r.add_(1)
    return a.sum()


def tensor_alias4(x, k):
    y = x.clone()
    if x[0] > 0:
        z = y[:2]
    else:
        z = y[1:]
    z.mul_(3)
    return y


def views_of_what_a_branch_made(x, k):
    if x[0] > 0:
        y = x.clone()
        row = y[:2]
    else:
        y = x * 2
        row = y[1:]
    y.add_(1)
    return row.sum() + y.sum() * 3


def views_of_what_a_branch_made_written(x, k):
    if x[0] > 0:
        y = x.clone()
        row = y[:2]
    else:
        y = x * 2
        row = y[1:]
    row.mul_(3)
    return y


def words_that_change(x, k):
    if x[0] > 0:
        word = "a"
    else:
        word = "b"
    if x[1] > 0:
        word = "c"
    if k > 4:
        word = "d"
    return x.sum() * {"a": 1, "b": 2, "c": 3, "d": 4}[word]


class Counter:
    def __init__(self):
        self.n = 0
        self.v = None

    def add(self, v):
        self.n += 1
        self.v = v
        return self


def objects(x, k):
    c = Counter()
    if x[0] > 0:
        c.add(x[0])
    c.add(x[1])
    return c.n * c.v


def objects2(x, k):
    if x[0] > 0:
        c = Counter().add(x[0])
    else:
        c = Counter().add(x[1]).add(x[2])
    return c.n * c.v


@dataclasses.dataclass
class P:
    a: object
    b: object


def dataclass(x, k):
    if x[0] > 0:
        p = P(x[0], 1)
    else:
        p = P(x[1], 2)
    return p.a * p.b


NT = collections.namedtuple("NT", "a b")


def ntuple(x, k):
    p = NT(x[0], x[1]) if x[0] > 0 else NT(x[1], x[2])
    return p.a - p.b


G = 0


def globs(x, k):
    global G
    G = 0
    if x[0] > 0:
        G = x[1]
    return x.sum() + G


def nonloc(x, k):
    c = 0

    def inc():
        nonlocal c
        c += 1

    if x[0] > 0:
        inc()
    if x[1] > 0:
        inc()
    return x.sum() * c


def defarg(x, k):

    def f(a, acc=[]):  # noqa: B006
        acc.append(a)
        return sum(acc)

    if x[0] > 0:
        f(x[0])
    return f(x[1])


def iters(x, k):
    it = iter([x[0], x[1], x[2]])
    for v in it:
        if v > 0:
            break
    r = next(it, None)
    return x.sum() if r is None else r


def iters2(x, k):
    it = iter(range(10))
    for i in it:
        if i > k:
            break
    for j in it:
        return x.sum() + j
    return x.sum()


def gen(x, k):

    def g():
        for i in range(3):
            yield (x[i] * i)

    s = 0
    for v in g():
        if v > 0:
            break
        s = s + v
    return s + x[0] * 0


def unbound(x, k):
    if x[0] > 0:
        y = x[1]
    return y


def unbound2(x, k):
    if x[0] > 0:
        y = x[1]
    if x[0] > 0:
        return y
    return x[2]


def strings(x, k):
    s = "a" if x[0] > 0 else "b"
    s += "c"
    return x.sum() * {"ac": 1, "bc": 2}[s]


def shapes(x, k):
    y = x[:2] if x[0] > 0 else x
    return y.sum()


def dtypes(x, k):
    y = x if x[0] > 0 else x.double()
    return (y * 2).float()


def nones(x, k):
    y = None
    if x[0] > 0:
        y = x[1]
    return x[2] if y is None else y


def nested(x, k):
    out = x.sum()
    for i in range(3):
        for j in range(3):
            for l in range(2):
                if x[i] > x[j] + l:
                    break
                if x[j] < -1:
                    return out * 100
                out = out + x[l]
            else:
                continue
            if out > 5:
                break
        else:
            out = out + 1
    return out


def deep(x, k):
    if k == 0:
        r = 1
    elif k == 1:
        r = 2
    elif k == 2:
        r = 3
    elif k == 3:
        r = 4
    elif k == 4:
        r = 5
    elif k == 5:
        r = 6
    elif k == 6:
        r = 7
    elif k == 7:
        r = 8
    elif k == 8:
        r = 9
    elif k == 9:
        r = 10
    elif k == 10:
        r = 11
    elif k == 11:
        r = 1
    elif k == 12:
        r = 1
    elif k == 13:
        r = 1
    elif k == 14:
        r = 1
    elif k == 15:
        r = 1
    elif k == 16:
        r = 1
    elif k == 17:
        r = 1
    elif k == 18:
        r = 1
    elif k == 19:
        r = 1
    elif k == 20:
        r = 1
    elif k == 21:
        r = 1
    else:
        r = 0
    return x.sum() * r


def tryf(x, k):
    try:
        if x[0] > 0:
            raise KeyError
        if x[1] > 0:
            return x.sum()
        y = x[0]
    except KeyError:
        y = x[2]
    finally:
        z = x.prod()
    return y + z


def tryloop(x, k):
    s = 0
    for i in range(3):
        try:
            if x[i] > 0:
                continue
            if x[i] < -1.5:
                break
            s = s + x[i]
        except ValueError:
            pass
    return s + x[0] * 0


def bare(x, k):
    try:
        if x[0] > 0:
            raise ValueError
        return x[1]
    except:  # noqa: E722
        return x[2]


def baseexc(x, k):
    try:
        y = x[x > 0].sum()
        z = int(k)
    except BaseException:
        return x[2] * 0
    return y * z


def suppressed(x, k):
    with contextlib.suppress(ValueError):
        if x[0] > 0:
            raise ValueError
        x = x * 2
    return x


def raising(x, k):
    if x[0] > 1:
        raise RuntimeError("boom")
    return x


def asserting(x, k):
    assert x[0] < 1, "too big"
    return x


def bad_index(x, k):
    return [1, 2][int(k)] * x


def keyerr(x, k):
    return {0: 1}[int(k)] * x


def lam_default(x, k):
    fs = [lambda a, i=i: a * i if a > 0 else -a for i in range(3)]
    return sum((f(x[i]) for i, f in enumerate(fs)))


def kwcall(x, k):

    def f(a, *, b=2, **kw):
        return a * b + sum(kw.values()) if a > 0 else a

    return f(x[0], b=x[1], c=x[2]) + f(*[x[1]], **{"b": 3})


def mapf(x, k):
    return sum(map(lambda v: v if v > 0 else v * 3, x)) + sum(filter(lambda v: v > 0, x))  # noqa: C417


def sortk(x, k):
    return sorted([x[0], x[1], x[2]], key=lambda v: v if v > 0 else -v)[0]


def lenmask(x, k):
    return x * len(x[x > 0])


def shapecond(x, k):
    y = x[x > 0]
    if y.numel() == 0:
        return x.sum() * 0
    if y.shape[0] > 1:
        return y[1]
    return y[0]


def whileone(x, k):
    n = 0
    while True:
        x = x * 1.3 + 0.1
        n += 1
        if x.abs().max() > 5 or n > 20:
            break
    return x * n


def chainassign(x, k):
    a = b = x.clone()
    if x[0] > 0:
        a = a * 2
    b[0] = 7.0
    return a + b


def augattr(x, k):

    class C:
        pass

    c = C()
    c.v = x[0]
    for i in range(3):
        if x[i] > 0:
            c.v += x[i]
    return c.v


def starred(x, k):
    a, *b = (x[0], x[1], x[2]) if x[0] > 0 else (x[2], x[0])
    return a + sum(b)


def int_tensor_loop(x, k):
    n = k.abs()
    while n > 0:
        x = x + n
        n = n - 2
    return x


def float32_num(x, k):
    s = 0.1
    if x[0] > 0:
        s = 0.3
    return x * s


def cond_import(x, k):
    if x[0] > 0:
        import math as m  # noqa: PLC0415

        return x * m.pi
    return x


def rnd(x, k):
    s = 0
    for v in x.tolist():
        if v > 0:
            s += v
        else:
            s -= 1
    return torch.tensor(s)


PROGRAMS = [
    views_of_what_a_branch_made,
    views_of_what_a_branch_made_written,
    words_that_change,
    lists1,
    lists2,
    lists3,
    lists4,
    dicts,
    dict2,
    tensor_alias,
    tensor_alias2,
    tensor_alias3,
    tensor_alias4,
    objects,
    objects2,
    dataclass,
    ntuple,
    globs,
    nonloc,
    defarg,
    iters,
    iters2,
    gen,
    unbound,
    unbound2,
    strings,
    shapes,
    dtypes,
    nones,
    nested,
    deep,
    tryf,
    tryloop,
    bare,
    baseexc,
    suppressed,
    raising,
    asserting,
    bad_index,
    keyerr,
    lam_default,
    kwcall,
    mapf,
    sortk,
    lenmask,
    shapecond,
    whileone,
    chainassign,
    augattr,
    starred,
    int_tensor_loop,
    float32_num,
    cond_import,
    rnd,
]
