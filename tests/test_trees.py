"""Containers: taken apart and put together, compared, named, and matched with prefixes."""

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch

from lanewise._core.trees import LEAF, PrefixMismatch, flatten, flatten_with_prefix, is_leaf, leaf_names, unflatten

Pair = namedtuple("Pair", "a b")
x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)


@dataclasses.dataclass(frozen=True)
class Point:
    u: object
    v: object = None

    def __post_init__(self):
        assert not isinstance(self.u, str), "checks hold for real values only"


class Registered:
    def __init__(self, value, note):
        self.value, self.note = value, note


torch.utils._pytree.register_pytree_node(
    Registered, lambda r: ([r.value], r.note), lambda items, note: Registered(items[0], note)
)

TREES = {
    "a leaf": (x, [x], "*"),
    "None": (None, [None], "*"),
    "an object": ("text", ["text"], "*"),
    "a tuple": ((x, (y,)), [x, y], "(*, (*,))"),
    "a list": ([x, []], [x], "[*, []]"),
    "a dict": ({"b": x, "a": [y]}, [x, y], "{'b': *, 'a': [*]}"),
    "OrderedDict": (OrderedDict(b=x, a=y), [x, y], "OrderedDict(b=*, a=*)"),
    "defaultdict": (defaultdict(list, b=x), [x], "defaultdict(b=*)"),
    "deque": (deque([x, y]), [x, y], "deque(*, *)"),
    "a named tuple": (Pair(x, (y, 3)), [x, y, 3], "Pair(a=*, b=(*, *))"),
    "a dataclass": (Point(x, {"k": y}), [x, y], "Point(u=*, v={'k': *})"),
    "a return type": (torch.max(torch.ones(2, 2), 0), None, "max(*, *)"),
    "a registered class": (Registered((x, y), "note"), [x, y], "Registered((*, *))"),
}


@pytest.mark.parametrize("name", TREES)
def test_flatten_and_unflatten(name):
    tree, leaves, text = TREES[name]
    found, spec = flatten(tree)
    assert leaves is None or all(a is b for a, b in zip(found, leaves, strict=True))
    assert repr(spec) == text and spec.count == len(found) and spec == flatten(tree)[1]
    assert is_leaf(tree) == (spec is LEAF)
    built = unflatten(found, spec)
    assert type(built) is type(tree)
    again, same = flatten(built)
    assert same == spec and all(a is b for a, b in zip(again, found, strict=True))


def test_structures_are_told_apart():
    trees = [tree for tree, _, _ in TREES.values()] + [
        (x,),
        [x],
        {"a": x, "b": [y]},
        {"b": x},
        Registered((x, y), "other"),
    ]
    specs = [flatten(tree)[1] for tree in trees]
    equal = [(i, j) for i in range(len(specs)) for j in range(i) if specs[i] == specs[j]]
    assert equal == [(1, 0), (2, 0), (2, 1)]


def test_a_dataclass_is_built_without_its_checks():
    _, spec = flatten(Point(x))
    assert unflatten(["no number", None], spec).u == "no number"


def test_names():
    tree = {"w": [x, Pair(y, None)], 3: Point(z), "r": Registered((x,), "")}
    assert leaf_names(tree, "p") == ["p['w'][0]", "p['w'][1].a", "p['w'][1].b", "p[3].u", "p[3].v", "p['r'][0][0]"]
    assert leaf_names(x, "x") == ["x"] and leaf_names((), "x") == []


def test_prefixes():
    tree = ({"a": x, "b": [y, z]}, Pair(x, None), "text")
    leaves, entries, spec = flatten_with_prefix((({"b": [1, None], "a": 0}), 2, None), tree)
    assert entries == [0, 1, None, 2, 2, None] and unflatten(leaves, spec)[1] == Pair(x, None)
    leaves, entries, spec = flatten_with_prefix(0, tree)
    assert entries == [0] * 6 and spec == flatten(tree)[1]
    # Whole: what is under None, and what holds nothing, is the very object.
    log, nothing = [x, y], {"n": None}
    leaves, entries, spec = flatten_with_prefix((None, 0, [None, 0]), (log, nothing, [log, x]), whole=True)
    assert leaves[0] is log and leaves[1] is nothing and leaves[2] is log and entries == [None, None, None, 0]
    assert unflatten(leaves, spec)[2][0] is log


@pytest.mark.parametrize(
    ("prefix", "tree", "path", "why"),
    [
        ((0, 0), (x,), "", "is a tuple of 2, but stands for a tuple of 1"),
        (((0,),), (x,), "[0]", "is a tuple, but stands for a single Tensor"),
        (({"a": 0},), ((x,),), "[0]", "is a dict, but stands for a tuple"),
        (((0,),), ({"a": x},), "[0]", "is a tuple, but stands for a dict"),
        ({"a": 0}, {"a": x, "b": y}, "", "has no entry for ['b']"),
        ({"k": {"a": 0, "c": 0}}, {"k": {"a": x}}, "['k']", "has an entry for ['c'], which is not there"),
        (Pair(0, 0), Point(x), "", "is a Pair, but stands for a Point"),
    ],
)
def test_a_prefix_that_does_not_fit(prefix, tree, path, why):
    with pytest.raises(PrefixMismatch) as caught:
        flatten_with_prefix(prefix, tree)
    assert (caught.value.path, caught.value.why) == (path, why)
