"""Warnings of lanes that part in code that runs as it was written name the function, why, and what to write."""

import functools
import heapq
import importlib.util
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lanewise import vmap

NUMBERS = torch.arange(24)
FILE = Path(__file__)
TENSORS = (
    "operations on tensors where Python's own numbers decide: torch.where(x > 0, a, b) for an `if`, rows[k] for "
    "table[int(k)], and x[x > 0].sum(), or sum(v for v in values if v > 0), for a list of what is picked"
)
CHANGED = "a variable that the branch binds (y = ...), and the change after it"
ARRAY = "functions of torch in place of NumPy's: torch.cumsum(x, 0) for np.cumsum(x.numpy())"
KEY = "rows[k] for table[int(k)], with a tensor of what the table holds; torch.unique(x) for a set"


def warnings_of(f, numbers=NUMBERS):
    """The texts of the warnings of a call, and of a second one."""
    want = torch.stack([f(n) for n in numbers])
    texts = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(vmap(f)(numbers), want)
        texts.append([str(warning.message) for warning in caught])
    return texts


def text_wanted(source, file, parting, function, first, what, line, instead):
    """The whole warning. `parting`, `first`, `line`: what lines of the file begin with; `line` may be None."""

    def number(text, start=0):
        return next(i + 1 for i, row in enumerate(source) if i >= start and row.strip().startswith(text))

    begins = number(first)
    parts = number(parting, begins - 1)
    where = ""
    if line is not None:
        at = number(line, begins - 1)
        where = f" (line {at}: {source[at - 1].strip()})"
    return (
        "vmap: the 24 lanes take 8 different ways and more through code that is run again for each of them, which "
        "takes about as long as a Python loop over them\n"
        f"  they part at {file}:{parts}: {source[parts - 1].strip()}\n"
        f"  {function} ({file}:{begins}) {what}{where}\n"
        f"Write instead:\n  {instead}"
    )


def generator(x):
    def walk(n):
        while n > 0:
            yield n.item()
            n = n - 1

    return x + sum(walk(x))


def asynchronous(x):
    async def count_down(n):
        while n > 0:
            n = n - 1
        return n

    try:
        count_down(x).send(None)
    except StopIteration as end:
        return end.value + x


def left_by_return(x):
    n, count = x, 0
    try:
        while True:
            if n <= 0:
                return x + count
            n, count = n - 1, count + 1
    finally:
        count = 0


def _loop_variable():
    i = 0

    def loop_of_nonlocal(x):
        nonlocal i
        i = 0
        for i in range(int(x)):  # noqa: B007
            pass
        return x + i

    return loop_of_nonlocal


loop_of_nonlocal = _loop_variable()


def walrus(x):
    n = x
    while n > 0 and (m := n - 1) >= 0:
        n = m
    return n + x


def list_changed(x):
    out = []
    while x > 0:
        out.append(x)
        x = x - 1
    return x + len(out)


class State:
    n = 0


def attribute_changed(x):
    state = State()
    while x > 0:
        state.n = state.n + 1
        x = x - 1
    return x + state.n


def nonlocal_changed(x):
    n = 0

    def step(y):
        nonlocal n
        n += 1
        return y - 1

    while x > 0:
        x = step(x)
    return x + n


def iterator_held(x):
    numbers, n = iter(range(100)), 0
    while x > n:
        n = next(numbers)
    return x + n


def library(x):
    return x + [*heapq.merge([x.item()], range(24))][3]


def letters(x, match):
    return "b" * int(steps(x, 0))


def steps(x, n):
    while x > 0:
        x, n = x - 1, n + 1
    return n


def called_by_c(x):
    return x + next(iter(functools.partial(steps, x, 0), -1))


def called_by_a_library(x):
    return x + len(re.sub("a", functools.partial(letters, x), "a"))


def number_of_python(x):
    return x + sorted((n, 0) for n in [x.item(), *range(24)])[12][0]


def text_of_a_number(x):
    return x + len(f"{'a':>{int(x) + 1}}") + len(f"{x.item():.3e}".replace("0", ""))


def entries_of_a_set(x):
    return x + len({x.item(), 3})


def list_of_its_own(x):
    values = (x + torch.zeros(2)).tolist()
    while values[-1] < 24:
        values.append(values[-1] + 1)
    return x + len(values)


def size_of_a_tensor(x):
    return x + torch.ones(int(x) + 1).numel()


def numpy_inside(x):
    return x + torch.from_numpy(np.cumsum(x.expand(2).numpy()))[1]


def numpy_changed(x):
    y = torch.zeros(24).numpy()
    if x > 4:
        y[int(x)] = 1
    return x + torch.from_numpy(y).argmax()


def dict_kept(x):
    kept = {}
    k = int(x)
    kept[k] = x * 2
    return kept[k]


def dict_counted(x):
    counts = {}
    for v in (x, x * 0 + 3):
        counts[int(v)] = counts.get(int(v), 0) + 1
    return x + max(counts.values())


KEYED = "a tensor in place of the dict, out[k] = y with a tensor k; torch.unique(x, return_counts=True) for counts"
ENTRY = "runs as it was written: it changes the entry of a dict at a number of each lane"
WHY = "runs as it was written: not all lanes come to where it changes"
CASES = [
    (dict_kept, ("k = int", "dict_kept", "def dict_kept", ENTRY, "kept[k] = x"), KEYED),
    (dict_counted, ("counts[int", "dict_counted", "def dict_counted", ENTRY, "counts[int"), KEYED),
    (
        generator,
        ("yield", "walk", "def walk", "is not converted: it is a generator", "yield"),
        "a list that the function returns, in place of what it yields",
    ),
    (
        asynchronous,
        ("while n > 0", "count_down", "async def", "is not converted: it is asynchronous", None),
        "def, in place of async def",
    ),
    (
        left_by_return,
        (
            "if n <= 0",
            "left_by_return",
            "def left_by_return",
            "is not converted: some lanes may leave a `try` that has a `finally` before others do",
            "return",
        ),
        "y = ...  # a variable, in place of the jump; and the jump after the `try`",
    ),
    (
        loop_of_nonlocal,
        (
            "for i in",
            "loop_of_nonlocal",
            "def loop_of_nonlocal",
            "is not converted: the variable of a `for` belongs to a scope around the function",
            "for i in",
        ),
        "for i in items: name = i  # with a variable of its own",
    ),
    (
        walrus,
        (
            "while n > 0 and",
            "walrus",
            "def walrus",
            "is not converted: `:=` stands in an operand that not all lanes evaluate",
            "while n > 0 and",
        ),
        "name = value  # as a statement before",
    ),
    (
        list_changed,
        (
            "while x > 0",
            "list_changed",
            "def list_changed",
            f"{WHY} a list that was there before",
            "out.append",
        ),
        f"a tensor in place of the list, out[i] = y; or {CHANGED}",
    ),
    (
        attribute_changed,
        (
            "while x > 0",
            "attribute_changed",
            "def attribute_changed",
            f"{WHY} an object (State) that was there before",
            "state.n = ",
        ),
        CHANGED,
    ),
    (
        nonlocal_changed,
        ("while x > 0", "step", "def step", f"{WHY} a variable of a scope around it", "n += 1"),
        CHANGED,
    ),
    (
        iterator_held,
        (
            "while x > n",
            "iterator_held",
            "def iterator_held",
            "runs as it was written: a variable holds an iterator, or an object that has one, where lanes part",
            "n = next",
        ),
        "a list: list(iterator)",
    ),
    (
        library,
        (
            "return x + [*heapq",
            "library",
            "def library",
            "calls heapq.merge there, which runs as it was written",
            None,
        ),
        "operations on tensors, in place of heapq.merge",
    ),
    (
        called_by_c,
        (
            "while x > 0",
            "steps",
            "def steps",
            "is called by a function written in C, which runs as it was written",
            None,
        ),
        "the call in a loop of the function's own",
    ),
    (
        called_by_a_library,
        ("while x > 0", "letters", "def letters", "is called by re.sub, which runs as it was written", None),
        "the call in a loop of the function's own",
    ),
    (
        number_of_python,
        (
            "return x + sorted",
            "number_of_python",
            "def number_of_python",
            "asks there for a number, a text or a key of Python's own",
            None,
        ),
        TENSORS,
    ),
    (
        text_of_a_number,
        (
            "return x + len",
            "text_of_a_number",
            "def text_of_a_number",
            "asks there for a number, a text or a key of Python's own",
            None,
        ),
        "the number as a result of the function, and its text made outside",
    ),
    (
        entries_of_a_set,
        (
            "return x + len",
            "entries_of_a_set",
            "def entries_of_a_set",
            "asks there for a number, a text or a key of Python's own",
            None,
        ),
        KEY,
    ),
    (
        size_of_a_tensor,
        (
            "return x + torch.ones",
            "size_of_a_tensor",
            "def size_of_a_tensor",
            "asks there for a number, a text or a key of Python's own",
            None,
        ),
        "a size that all lanes share, and a mask: torch.where(torch.arange(most) < n, x, 0) for x[:int(n)]",
    ),
    (
        numpy_inside,
        (
            "return x + torch.from",
            "numpy_inside",
            "def numpy_inside",
            "asks there for a number, a text or a key of Python's own",
            None,
        ),
        ARRAY,
    ),
    (
        list_of_its_own,
        (
            "values = ",
            "list_of_its_own",
            "def list_of_its_own",
            f"{WHY} a list that was there before",
            "values.append",
        ),
        f"a tensor in place of the list, out[i] = y; or {CHANGED}",
    ),
    (
        numpy_changed,
        (
            "y[int(x)]",
            "numpy_changed",
            "def numpy_changed",
            f"{WHY} an object (ndarray) that was there before",
            "y[int(x)]",
        ),
        "a tensor in place of the array: y = x.clone(), y[i] = v",
    ),
]


@pytest.mark.parametrize("f, cause, instead", CASES, ids=[case[0].__name__ for case in CASES])
def test_the_cause_is_told(f, cause, instead):
    wanted = text_wanted(FILE.read_text().splitlines(), FILE, *cause, instead)
    assert warnings_of(f) == [[wanted], [wanted]]


COUNTING = """
def count(x):
    while x > 0:
        x = x - 1
    return x
"""


def test_the_cause_is_told_of_code_without_a_source():
    names = {}
    exec(COUNTING, names)
    wanted = text_wanted(
        COUNTING.splitlines(),
        "<string>",
        "while x > 0",
        "count",
        "def count",
        "is not converted: it has no source: <string> cannot be read",
        None,
        "the function in a file of its own, imported from there",
    ).replace(": while x > 0:", "")
    assert warnings_of(names["count"]) == [[wanted], [wanted]]


@pytest.mark.parametrize(
    "before, after, why",
    [
        (
            "y - 1",
            "y - 2",
            "its source is not that of the code: the file has changed, or a tool has rewritten the code",
        ),
        (
            "def count",
            "def tally",
            "the source does not hold its definition: the file has changed, or it was made by exec",
        ),
    ],
)
def test_the_cause_is_told_of_a_file_that_has_changed(tmp_path, before, after, why):
    file = tmp_path / "counting.py"
    source = COUNTING.replace("x", "y" if before == "y - 1" else "z")  # else the code is the same in all files
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("counting", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changed = source.replace(before, after)
    file.write_text(changed)
    wanted = text_wanted(
        changed.splitlines(),
        file,
        "while",
        "count",
        after if after.startswith("def") else "def count",
        f"is not converted: {why}",
        None,
        "importlib.reload(module), or start Python again, once the file has changed",
    )
    assert warnings_of(module.count) == [[wanted], [wanted]]


def test_a_table_is_told_of_where_lanes_part_by_its_keys(monkeypatch):
    table = {n: 2 * n for n in range(100)}

    def looked_up(n):
        return n + table[table[int(n)] // 2]

    monkeypatch.setattr("lanewise._control.runs.watches._LITTLE", 1.0)
    numbers = torch.arange(40)
    (told,), _ = warnings_of(looked_up, numbers)
    assert "parted more than 60 times" in told and "rows[k] for table[int(k)]" in told and "branch" not in told
