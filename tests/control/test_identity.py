"""`flag is True`, `case True:`: comparisons by identity, with truth values and small integers of each lane."""

import operator

import pytest
import torch

from lanewise import vmap
from tests.control.compositions import COMPOSITIONS, check_as_the_loop


def of_a_tensor(x, k):
    b = bool(x[0] > 0)
    return x * 2 if b is True else x


def of_item(x, k):
    b = (x[0] > 0).item()
    return x * 2 if b is not False else x * 3


def assigned_in_a_branch(x, k):
    flag = False
    if x[0] > 0:
        flag = True
    return x * 2 if flag is True else x


def condition_of_a_loop(x, k):
    done = False
    rounds = 0
    while done is False and rounds < 5:
        rounds += 1
        x = x * 1.3
        if x.norm() > 4:
            done = True
    return x * rounds


def none_or_true(x, k):
    found = None
    for v in x:
        if v > 0:
            found = True
            break
    return x * 2 if found is True else x if found is None else x * 9


def negated(x, k):
    b = not x[0] > 0
    return x * 2 if b is True else x * (7 if b is not True else 1)


def of_two_flags(x, k):
    b, c = bool(x[0] > 0), bool(x[1] > 0)
    return x * 2 if b is c else x * 3


def by_function(x, k):
    b = bool(x[0] > 0)
    return x * 2 if operator.is_(b, True) else x * (7 if operator.is_not(b, False) else 1)


def in_a_chain(x, k):
    return x * 2 if bool(x[0] > 0) is True is True else x


def counted(x, k):
    flags = [bool(v > 0) for v in x]
    return x * sum(1 for flag in flags if flag is True)


def summed(x, k):
    b = bool(x[0] > 0)
    return x * sum([b is True, 2 * (b is False), b is None])


def in_a_closure(x, k):
    b = bool(x[0] > 0)
    asks = lambda: b is True
    return x * 2 if asks() else x


def of_an_attribute(x, k):
    class Holder:
        def __init__(self, flag):
            self.flag = flag

        def times(self, x):
            return x * 2 if self.flag is True else x

    return Holder(bool(x[0] > 0)).times(x)


def asserted(x, k):
    b = bool(x[0] > 0)
    assert b is True or b is False
    return x


def _in_a_try(flag):
    try:
        if flag is True:
            return 2.0
        return 3.0
    finally:
        pass


def given_to_what_runs_as_written(x, k):
    return x * _in_a_try(bool(x[0] > 0)) + _in_a_try(flag=bool(x[1] > 0))


def _generated(flag):
    yield 2.0 if flag is True else 3.0


def given_to_a_generator(x, k):
    return x * next(_generated(bool(x[0] > 0)))


def small_integer(x, k):
    n = int(k) % 2
    m = n
    return x * 2 if n is m else x


def truth_of_an_integer(x, k):
    n = int(x[0] > 0)
    return x * 5 if n is True else x * 2


def of_tensors(x, k):
    y = x
    if x[0] > 0:
        y = x * 2
    return y * 3 if y is x else y * 5


def of_chosen_tensors(x, k):
    y = x if x[0] > 0 else x * 2
    return y * 3 if y is not x else y * 5


def of_a_tensor_in_a_list(x, k):
    candidates = [x, x * 2, x + 1]
    best = candidates[0]
    for candidate in candidates:
        if candidate.prod() > best.prod():
            best = candidate
    return best * 3 if best is candidates[0] else best * 5


def of_a_sentinel(x, k):
    nothing = object()
    found = nothing
    for v in x:
        if v > 1:
            found = v
            break
    return x if found is nothing else x * found


def case_of_a_flag(x, k):
    match bool(x[0] > 0):
        case True:
            return x * 2
        case False:
            return x * 3


def cases_of_pairs(x, k):
    match (bool(x[0] > 0), bool(x[1] > 0)):
        case (True, True):
            return x * 2
        case (True, _):
            return x * 3
        case (False, b) if b:
            return x * 4
        case _:
            return x


def cases_of_a_dict(x, k):
    match {"a": bool(x[0] > 0), "k": int(k)}:
        case {"a": True, "k": 0 | 1}:
            return x * 2
        case {"a": False, "k": n}:
            return x * n
        case {**rest}:
            return x * len(rest)


def case_of_an_integer(x, k):
    match int(x[0] > 0):
        case True:
            return x * 5
        case 1:
            return x * 2
        case _:
            return x


PROGRAMS = [f for name, f in list(globals().items()) if getattr(f, "__module__", "") == __name__ and name[0] != "_"]


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_as_the_loop(program, composition):
    check_as_the_loop(program, composition)


@pytest.mark.parametrize("thing", [None, 1, "a", torch.ones(2), [True]])
def test_other_things_are_no_singletons(thing):
    def f(x):
        if x > 0:
            x = x * 2
        match thing:
            case True | False:
                return x * 3
            case _:
                return x

    xs = torch.tensor([1.0, -1.0])
    assert torch.equal(vmap(f)(xs), torch.tensor([2.0, -1.0]))
