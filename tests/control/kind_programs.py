"""Functions of one example, `x` [n] float64 and `k` [] int64, whose variables hold things of different kinds.

None before the first, a text, a function, an object: what no tensor can hold.
"""

import enum
import functools

import torch


class Way(enum.Enum):
    UP = 1
    DOWN = 2


class Phase(enum.IntEnum):
    FIRST = 1
    LAST = 2


class Node:
    def __init__(self, place=0, bound=0.0, left=None, right=None, value=0.0):
        self.place, self.bound, self.left, self.right, self.value = place, bound, left, right, value


TREE = Node(0, 0.0, Node(1, -0.3, Node(value=1.0), Node(2, 0.0, Node(value=2.0), Node(value=3.0))), Node(value=-1.5))
GAINS = {"up": 1.0, "down": -0.5, "flat": 0.1}


# --- None until there is something -----------------------------------------------------------------------------------


def least_positive(x, k):
    best, where = None, None
    for i, v in enumerate(x):
        if v > 0 and (best is None or v < best):
            best, where = v, i
    if best is None:
        return x.sum() - 1.0
    return best * 2 + where


def chosen_by_expressions(x, k):
    best = None
    for v in x:
        best = v if v > 0 and (best is None or v < best) else best
    return x.sum() if best is None else best.exp()


def steps_between(x, k):
    before = None
    total = x.sum() * 0
    for v in x:
        if v < 0:
            continue
        if before is not None:
            total = total + (v - before).abs()
        before = v
    return total


def low_and_high(x, k):
    low = high = None
    for v in x:
        if v > 0:
            low = v if low is None else torch.minimum(low, v)
        elif v < -0.1:
            high = v if high is None else torch.maximum(high, v)
    if low is not None and high is not None:
        return low - high
    return low if low is not None else (high if high is not None else x.sum())


def score_and_value(x, k):
    best = None
    for v in x:
        if v.abs() > 0.5:
            score = v * v
            if best is None or score > best[0]:
                best = (score, v)
    return best[1] * 2 if best is not None else x.mean()


def last_place(x, k):
    last, count = None, 0
    for i, v in enumerate(x):
        if v > 0:
            if last is not None and last == i - 1:
                count += 1
            last = i
    return x.sum() + count


def default_argument(x, k, state=None):
    for v in x:
        if v > 0:
            state = v if state is None else 0.5 * state + v
    return x.sum() if state is None else state.sin()


def closed_again(x, k):
    start, total = None, x.sum() * 0
    for i, v in enumerate(x):
        if v > 0:
            if start is None:
                start = i
        elif start is not None:
            total = total + v * (i - start)
            start = None
    return total


def truth_of_none(x, k):
    best = None
    if x[0] > 0:
        best = 0.0
    elif x[1] > 0:
        best = x[1]
    chosen = best or x[2]
    if not best:
        chosen = chosen * 2
    return chosen * (3 if best else 1) + x.sum() * (best == None)  # noqa: E711


def until_none(x, k):
    n, count = x[0], 0
    while n is not None:
        n = None if n > 1 else n + 0.5
        count += 1
    return x.sum() * count


# --- functions that return None, or take it --------------------------------------------------------------------------


def first_above(x, least):
    for v in x:
        if v > least:
            return v
    return None


def better(best, v):
    if best is None or v < best:
        return v
    return best


def found_by_function(x, k):
    total = x.sum() * 0
    for i in range(3):
        found = first_above(x[i:], 0.5)
        if found is not None:
            total = total + found * (i + 1)
    return total


def kept_by_function(x, k):
    best = None
    for v in x:
        if v > -0.3:
            best = better(best, v)
    return x.sum() if best is None else best


def passed_through(x, k):
    def inner(x, least):
        return first_above(x, least)

    found = inner(x, 0.8) or inner(x, 0.2)
    return x.sum() if found is None else found * 2


def reduced(x, k):
    best = functools.reduce(better, x, first_above(x, 0.3))
    return x.sum() if best is None else best


def changed_in_between(x, k):
    best = None
    if x[0] > 0:
        best = x[1]

    def forget():
        nonlocal best
        before, best = best, None
        return x.sum() if before is None else before

    def first(a, b):
        return a if b is None else a + b

    return first(forget(), best)


def keyword(x, k):
    best = None
    if x[0] > 0:
        best = x[1]

    def scaled(x, by=None):
        return x.sum() if by is None else by * 2

    return scaled(x, by=best) + scaled(x, best)


def recursive(x, k):
    def best(i, found):
        if i == len(x):
            return found
        if x[i] > 0 and (found is None or x[i] > found):
            return best(i + 1, x[i])
        return best(i + 1, found)

    found = best(0, None)
    return x.sum() if found is None else found


# --- what None cannot do ---------------------------------------------------------------------------------------------


def none_in_arithmetic(x, k):
    best = None
    if x[0] > 0:
        best = x[1]
    try:
        return best * 2  # type: ignore[operator]
    except TypeError:
        return x.sum()


def none_has_no_method(x, k):
    best = None
    if x[0] > 0:
        best = x
    try:
        return best.sum()
    except AttributeError:
        return x[0]


def none_has_no_entries(x, k):
    best = None
    if x[0] > 0:
        best = x
    try:
        return best[1]
    except TypeError:
        return x[0]


def unbound_or_none(x, k):
    if x[0] > 0:
        best = None
    elif x[1] > 0:
        best = x[1]
    try:
        if best is not None:
            return best
    except UnboundLocalError:
        return x[2]
    return x.sum()


def kept_in_containers(x, k):
    best, kept, named = None, [], {}
    for v in x:
        if v > 0:
            best = v
        kept.append(best)
    named["best"] = best
    total = sum((v for v in kept if v is not None), x.sum())
    return total if named["best"] is None else total + named["best"]


def seen_by_closure(x, k):
    best = None

    def take(v):
        nonlocal best
        if best is None or v < best:
            best = v

    for v in x:
        if v > -0.5:
            take(v)
    return x.sum() if best is None else best


def written_in_place(x, k):
    best, y = None, x.clone()
    if x[0] > 0:
        best = y
    for i in range(2):
        if best is not None and best[i] > 0:
            best[i] = -1.0
    y[2] = y[2] * 3
    return y.sum() if best is None else best.sum()


def added_in_place(x, k):
    total = None
    for v in x:
        if total is None:
            total = v * 1
        elif v > 0:
            total += v
        else:
            total = None
    return x.sum() if total is None else total


def the_same_object(x, k):
    a, best = x[0], None
    if x[1] > 0:
        best = a
    return x.sum() if best is a else x[2]


# --- texts, functions, members of enums, objects ---------------------------------------------------------------------


def up_and_down(x, k):
    state = "up"
    total = x.sum() * 0
    for v in x:
        if state == "up":
            total = total + v
            if v > 0.5:
                state = "down"
        else:
            total = total - v
            if v < -0.5:
                state = "up"
    return total


def three_states(x, k):
    state, changes = "start", 0
    for v in x:
        if state == "start":
            state = "up" if v > 0 else "down"
        elif state == "up" and v < 0:
            state, changes = "down", changes + 1
        elif state in ("down", "none") and v > 0:
            state, changes = "up", changes + 1
    return x.sum() * changes if state != "up" else x.sum()


def looked_up(x, k):
    state = "flat"
    total = x.sum() * 0
    for v in x:
        state = "up" if v > 0.5 else "down" if v < -0.5 else state
        total = total + GAINS[state] * v
    return total


def function_of_the_lane(x, k):
    act = torch.tanh
    h = x[0]
    for v in x:
        if v > 0:
            act = torch.sin
        elif v < -0.5:
            act = torch.tanh
        h = act(h + v)
    return h


def members(x, k):
    way = Way.UP
    for v in x:
        if way is Way.UP:
            way = Way.DOWN if v > 0 else Way.UP
        elif way == Way.DOWN and v < 0:
            way = Way.UP
    return x.sum() * (1.0 if way is Way.UP else 2.0)


def whole_members(x, k):
    phase = Phase.FIRST
    for v in x:
        if phase == 1:
            phase = Phase.LAST if v > 0 else Phase.FIRST
        elif phase == Phase.LAST and v < 0:
            phase = Phase.FIRST
    return x.sum() * (1.0 if phase is Phase.FIRST else 2.0)


def down_a_tree(x, k):
    node = TREE
    while node.left is not None:
        node = node.left if x[node.place] <= node.bound else node.right
    return x.sum() * node.value


def tuples(x, k):
    state = ("s", 0)
    for v in x:
        if v > 0:
            state = ("t", 1)
        elif v < -0.7:
            state = ("s", 0)
    return x.sum() * state[1] if state[0] == "t" else x[0]


def flags(x, k):
    found = False
    for v in x:
        if found is not True and v > 0.5:
            found = True
    return x.sum() if found is True else x[0] if found is False else x[1]


def chained(x, k):
    best = 0
    if x[0] > 0:
        best = None
    total = x.sum()
    if best is not None and -1 < best < total < 9:
        total = total * 2
    return total if None is best is None else total + 1


def text_made_of_text(x, k):
    name = "a" if x[0] > 0 else "b"
    text = f"{name}!"
    return x.sum() if text == "a!" else x[0]


def lengths(x, k):
    part = x[:2] if x[0] > 0 else x[2:]
    return part.sum() + (part * 2).exp().sum()


# Programs whose lanes come together again after each condition.
TOGETHER = [
    least_positive,
    chosen_by_expressions,
    steps_between,
    low_and_high,
    score_and_value,
    last_place,
    default_argument,
    closed_again,
    until_none,
    found_by_function,
    kept_by_function,
    passed_through,
    up_and_down,
    three_states,
    looked_up,
    function_of_the_lane,
    members,
    whole_members,
    down_a_tree,
]
OTHERS = [
    truth_of_none,
    reduced,
    changed_in_between,
    flags,
    chained,
    keyword,
    recursive,
    none_in_arithmetic,
    none_has_no_method,
    none_has_no_entries,
    unbound_or_none,
    kept_in_containers,
    seen_by_closure,
    written_in_place,
    added_in_place,
    the_same_object,
    tuples,
    text_made_of_text,
    lengths,
]
