"""Objects from outside that a function changes and changes back: a run that is given up leaves nothing behind."""

import collections
import contextlib
import dataclasses
import functools
import heapq
import io
import operator
import types

import pytest
import torch
from torch import nn

from lanewise import grad, vmap

D = torch.float64
XS = torch.tensor([[0.5, -0.2, 0.9], [-0.7, 0.4, 0.1], [-0.3, -0.6, 1.2], [0.1, 0.2, -0.3]], dtype=D)

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")


class Stack:
    def __init__(self):
        self.items = []
        self.depth = 0

    def push(self, value):
        self.items.append(value)
        self.depth += 1

    def pop(self):
        self.depth -= 1
        return self.items.pop()


class Chain:
    def __init__(self, following):
        self.following = following
        self.value = 1

    def bump(self, step):
        self.value += step
        if self.following is not None:
            self.following.bump(step)

    def total(self):
        return self.value + (0 if self.following is None else self.following.total())


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


@dataclasses.dataclass
class Record:
    count: int = 0
    rows: list = dataclasses.field(default_factory=list)


class Held:
    def __init__(self):
        self._count = 0

    @property
    def count(self):
        return self._count

    @count.setter
    def count(self, value):
        self._count = value


class OfAll:
    count = 0

    @classmethod
    def up(cls):
        cls.count += 1

    @classmethod
    def down(cls):
        cls.count -= 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.cache = {}
        self.inner = nn.ModuleList([nn.Tanh()])

    def forward(self, x):
        self.count += 1
        self.cache["first"] = self.count
        y = self.inner[0](x) * self.count
        if x[1] > 0:
            self.count += 1
            self.cache["second"] = 1
            y = y * self.count + len(self.cache)
            self.count -= 1
            del self.cache["second"]
        self.count -= 1
        del self.cache["first"]
        return y * 3 + len(self.cache) + self.count


def counting():
    count, rows = 0, []

    def program(x):
        nonlocal count
        count += 1
        rows.append(1)
        y = x * count * len(rows)
        if x[1] > 0:
            count += 1
            rows.append(1)
            y = y * count * len(rows)
            count -= 1
            rows.pop()
        count -= 1
        rows.pop()
        return y

    return program


class Outside:
    """What the programs change, new for each run."""

    def __init__(self):
        self.row = [1.0, 2.0]
        self.table = {"a": 1}
        self.kinds = {1}
        self.queue = collections.deque([1, 2], maxlen=30)
        self.counter = collections.Counter(a=1)
        self.order = collections.OrderedDict(a=1)
        self.lists = collections.defaultdict(list)
        self.inner = [[1], [2]]
        self.stack, self.stacks = Stack(), [Stack(), Stack()]
        self.chain = Chain(Chain(Chain(None)))
        self.slotted, self.record, self.held, self.layer = Slotted(), Record(), Held(), Layer()
        self.space = types.SimpleNamespace(count=0)
        self.stream = io.StringIO()
        self.bytes = bytearray(b"ab")
        self.heap = [3, 5]
        self.counting = counting()
        self.count = 0


GLOBAL, COUNT = [], 0


def push_global(step):
    if step > 0:
        GLOBAL.append(1)
    else:
        GLOBAL.pop()


def of_a_global(o, x):
    global COUNT
    push_global(1)
    COUNT += 1
    y = x * len(GLOBAL) * COUNT
    if x[1] > 0:
        push_global(1)
        COUNT += 1
        y = y * len(GLOBAL) * COUNT
        push_global(-1)
        COUNT -= 1
    push_global(-1)
    COUNT -= 1
    return y


def of_a_default(o, x, rows=[]):  # noqa: B006
    rows.append(1)
    y = x * len(rows)
    if x[1] > 0:
        rows.append(1)
        y = y * len(rows)
        rows.pop()
    rows.pop()
    return y


def of_itself(o, x):
    of_itself.count += 1
    y = x * of_itself.count
    if x[1] > 0:
        of_itself.count += 1
        y = y * of_itself.count
        of_itself.count -= 1
    of_itself.count -= 1
    return y


of_itself.count = 0


def of_a_class(o, x):
    OfAll.count += 1
    y = x * OfAll.count
    if x[1] > 0:
        OfAll.up()
        y = y * OfAll.count
        OfAll.down()
    OfAll.count -= 1
    return y


def of_a_closure(o, x):
    return o.counting(x)


def of_a_module(o, x):
    return o.layer(x)


def of_an_attribute(o, x):
    o.count += 1
    y = x * o.count
    if x[1] > 0:
        o.count += 1
        y = y + o.count
        o.count -= 1
    o.count -= 1
    return y


def before_the_branch_only(o, x):
    o.row.append(1.0)
    y = x * len(o.row)
    y = y * 2 if x[1] > 0 else y * len(o.row)
    o.row.pop()
    return y


def under_two_names(o, x):
    row = o.row
    row += [1.0]
    y = x * len(row)
    if x[1] > 0:
        row += [2.0]
        y = y + len(o.row)
        row.pop()
    del row[-1]
    return y


def an_entry(o, x):
    o.row[0] += 1
    y = x * o.row[0]
    if x.sum().item() > 0:
        o.row[0] += 1
        y = y * o.row[0]
        o.row[0] -= 1
    o.row[0] -= 1
    return y


def a_number_counted(o, x):
    o.counter["a"] += 1
    o.counter["z"] += 1
    y = x * o.counter["a"] * len(o.counter)
    if x[1] > 0:
        o.counter["a"] += 1
        y = y * o.counter["a"]
        o.counter["a"] -= 1
    o.counter["a"] -= 1
    del o.counter["z"]
    return y


def after_an_error(o, x):
    o.count += 1
    try:
        if x[1] > 0:
            raise ValueError
        y = x * o.count
    except ValueError:
        y = -x * o.count
    finally:
        o.count -= 1
    return y


def in_a_context(o, x):
    class Deeper:
        def __enter__(self):
            o.count += 1

        def __exit__(self, *_):
            o.count -= 1

    with Deeper():
        y = x * o.count
        if x[1] > 0:
            with Deeper():
                y = y * o.count
    return y


def on_an_exit_stack(o, x):
    with contextlib.ExitStack() as stack:
        o.row.append(1)
        stack.callback(o.row.pop)
        y = x * len(o.row)
        if x[1] > 0:
            o.row.append(2)
            stack.callback(o.row.pop)
            y = y * len(o.row)
    return y


def in_a_recursion(o, x, depth=0):
    o.row.append(depth)
    y = x * len(o.row)
    if depth < 3 and x[1] + depth > 0.3:
        y = y + in_a_recursion(o, x, depth + 1)
    o.row.pop()
    return y


def in_a_generator(o, x):
    def walk():
        o.row.append(1)
        yield x * len(o.row)
        if x[1] > 0:
            o.row.append(1)
            yield x * len(o.row)
            o.row.pop()
        o.row.pop()

    return sum(walk())


def a_tensor_replaced(o, x):
    o.tensor = torch.full((3,), 2.0, dtype=D)
    y = x * o.tensor
    if x[1] > 0:
        o.tensor = o.tensor + 1
        y = y * o.tensor
    del o.tensor
    return y


PROGRAMS = [value for value in list(globals().values()) if type(value) is types.FunctionType]
PROGRAMS = {f.__name__: f for f in PROGRAMS if f.__code__.co_varnames[:2] == ("o", "x")}


def balanced(enter, leave, measure):
    """A program that does something before a branch and in it, and undoes it."""

    def program(o, x):
        enter(o)
        y = x * measure(o)
        if x[1] > 0:
            enter(o)
            y = y * measure(o)
            leave(o)
        leave(o)
        return y

    return program


def assign(path, step):
    *owners, name = path.split(".")

    def change(o):
        for owner in owners:
            o = getattr(o, owner)
        setattr(o, name, getattr(o, name) + step)

    return change


def truncate(o):
    o.stream.seek(o.stream.tell() - 1)
    o.stream.truncate()


def add_entries(o):
    for row in o.inner:
        row.append(1)


def toggle(o):
    o.layer.train(not o.layer.training)


for path in ("slotted.count", "record.count", "held.count", "space.count", "layer.count"):
    PROGRAMS[path] = balanced(assign(path, 1), assign(path, -1), operator.attrgetter(path))
PROGRAMS |= {
    "dict": balanced(lambda o: o.table.update({len(o.table): 1}), lambda o: o.table.popitem(), lambda o: len(o.table)),
    "set": balanced(
        lambda o: o.kinds.add(len(o.kinds) + 9), lambda o: o.kinds.remove(max(o.kinds)), lambda o: len(o.kinds)
    ),
    "deque": balanced(lambda o: o.queue.appendleft(1), lambda o: o.queue.popleft(), lambda o: len(o.queue)),
    "ordered": balanced(
        lambda o: o.order.setdefault(len(o.order), 1), lambda o: o.order.popitem(), lambda o: len(o.order)
    ),
    "defaultdict": balanced(
        lambda o: o.lists["a"].append(1), lambda o: o.lists["a"].pop(), lambda o: len(o.lists["a"])
    ),
    "method": balanced(
        lambda o: o.stack.push(1), lambda o: o.stack.pop(), lambda o: o.stack.depth + len(o.stack.items)
    ),
    "one of a list": balanced(lambda o: o.stacks[1].push(1), lambda o: o.stacks[1].pop(), lambda o: o.stacks[1].depth),
    "chain": balanced(lambda o: o.chain.bump(1), lambda o: o.chain.bump(-1), lambda o: o.chain.total()),
    "rows": balanced(add_entries, lambda o: [row.pop() for row in o.inner], lambda o: sum(map(len, o.inner))),
    "heap": balanced(lambda o: heapq.heappush(o.heap, 1), lambda o: heapq.heappop(o.heap), lambda o: len(o.heap)),
    "getattr": balanced(lambda o: getattr(o.row, "append")(1), lambda o: o.row.pop(), lambda o: len(o.row)),  # noqa: B009
    "unbound": balanced(lambda o: list.append(o.row, 1), lambda o: list.pop(o.row), lambda o: len(o.row)),
    "bytes": balanced(lambda o: o.bytes.append(3), lambda o: o.bytes.pop(), lambda o: len(o.bytes)),
    "stream": balanced(lambda o: o.stream.write("x"), truncate, lambda o: len(o.stream.getvalue())),
    "attributes": balanced(lambda o: vars(o).update(count=o.count + 1), assign("count", -1), lambda o: o.count),
    "training": balanced(toggle, toggle, lambda o: 1 + o.layer.inner[0].training),
}


def as_a_partial(program, o):
    return vmap(functools.partial(program, o)), loop(program)


def as_a_closure(program, o):
    return vmap(lambda x: program(o, x)), loop(program)


def as_an_argument(program, o):
    return lambda xs: vmap(program, in_dims=(None, 0))(o, xs), loop(program)


def in_chunks(program, o):
    return vmap(functools.partial(program, o), chunk_size=3), loop(program)


def of_pairs(program, o):
    return lambda xs: vmap(vmap(functools.partial(program, o)))(torch.stack([xs, -xs])), loop(program, nested=True)


def of_a_gradient(program, o):
    return vmap(grad(lambda x: (program(o, x) ** 2).sum())), gradients(program)


def in_a_gradient(program, o):
    return grad(lambda xs: (vmap(functools.partial(program, o))(xs) ** 2).sum()), gradients(program)


def loop(program, nested=False):
    def run(xs):
        o = Outside()
        each = [torch.stack([program(o, x) for x in rows]) for rows in ((xs, -xs) if nested else (xs,))]
        return torch.stack(each) if nested else each[0]

    return run


def gradients(program):
    def run(xs):
        xs = xs.clone().requires_grad_()
        return torch.autograd.grad((loop(program)(xs) ** 2).sum(), xs)[0]

    return run


WAYS = [as_a_partial, as_a_closure, as_an_argument, in_chunks, of_pairs, of_a_gradient, in_a_gradient]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_loop(name, way):
    f, loop = way(PROGRAMS[name], o := Outside())
    held = repr([o.row, o.table, o.count, o.counter, GLOBAL, COUNT, OfAll.count, o.stream.getvalue()])
    # One way through the code for all lanes, then two, one of them that of fewer lanes.
    for xs in (XS.abs(), XS, -XS, -XS.abs(), XS):
        torch.testing.assert_close(f(xs), loop(xs))
    assert repr([o.row, o.table, o.count, o.counter, GLOBAL, COUNT, OfAll.count, o.stream.getvalue()]) == held


def test_what_is_not_changed_back_is_changed_once_a_run():
    seen = []

    def noted(x):
        seen.append(1)
        return x * 2 if x > 0 else -x

    vmap(noted)(torch.tensor([1.0, -1.0, 2.0]))
    assert len(seen) == 1


def kept_or_new(x, keep=True):
    kept = GLOBAL if keep else []
    kept.append(1)
    return x * 2 if x > 0 else -x


def kept_in_a_pair(x):
    kept, _ = [GLOBAL, 1]
    kept.append(1)
    return x * 2 if x > 0 else -x


ROWS = [1, GLOBAL, 2]


def kept_in_a_copied_list(x):
    _, kept, *_ = list(ROWS)
    kept.append(1)
    return x * 2 if x > 0 else -x


@pytest.mark.parametrize("f", [kept_or_new, kept_in_a_pair, kept_in_a_copied_list])
def test_what_a_variable_may_stand_for_is_changed_once_a_run(f):
    try:
        for runs in (1, 2, 3):
            vmap(f)(torch.tensor([1.0, -1.0, 2.0]))
            assert len(GLOBAL) == runs
    finally:
        GLOBAL.clear()


def test_an_error_of_the_function_leaves_what_it_did():
    seen = []

    def failing(x):
        seen.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        vmap(failing)(XS)
    assert seen == [1]


def test_the_nearest_objects_are_put_back_where_there_are_too_many():
    rows = [[[index]] for index in range(20_000)]
    count = {"runs": 0}

    def program(x):
        count["runs"] += 1
        y = x * count["runs"] * len(rows[0])
        y = y * 2 if x > 0 else -y
        count["runs"] -= 1
        return y

    xs = torch.tensor([1.0, -1.0, 2.0])
    torch.testing.assert_close(vmap(program)(xs), torch.tensor([2.0, 1.0, 4.0]))
    assert count == {"runs": 0}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 2,
        lambda x: torch.stack([row * 2 for row in x]),
        nn.Sequential(nn.Linear(3, 2, dtype=D), nn.Tanh()),
    ],
    ids=["expression", "list", "module"],
)
def test_nothing_is_looked_at_where_nothing_is_changed(f, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("objects were looked at")

    vmap(f)(XS)
    monkeypatch.setattr("lanewise._core.again.outside.look", refuse)
    vmap(f)(XS)


def test_containers_made_inside_are_not_looked_for(monkeypatch):
    kept = {"scale": [2.0]}

    def program(x):
        rows, table, count = [], {}, 0
        for index in range(3):
            rows.append(x * index)
            table[index] = x
            count += 1
        return sum(rows) * count * kept["scale"][0] + table[0]

    monkeypatch.setattr("lanewise._core.again.outside.look", None)
    torch.testing.assert_close(vmap(program)(XS), torch.stack([program(x) for x in XS]))
