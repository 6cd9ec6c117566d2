"""Containers of arguments and results: flattening, prefixes, and names for messages.

Tuples, lists, dicts, named tuples, dataclasses, and every class registered with torch's pytree are containers; anything
else is a leaf, None too.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Size, Tensor

from lanewise._torch_compat import pytree

_REGISTERED = pytree.SUPPORTED_NODES


class Spec:
    """The structure of a tree.

    Attributes:
        kind: Class of the container, None for a leaf.
        keys: Keys of a mapping, field names of a dataclass, else None.
        context: What a registered class needs to be built again.
        children: Structures of the items.
        count: Number of leaves.
    """

    __slots__ = ("kind", "keys", "context", "children", "count")

    def __init__(self, kind: type | None, keys: tuple | None, context: Any, children: list["Spec"]) -> None:
        self.kind = kind
        self.keys = keys
        self.context = context
        self.children = children
        self.count = 1 if kind is None else sum([child.count for child in children])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Spec)
            and (self.kind is other.kind or _made_anew(self.kind, other.kind))
            and self.keys == other.keys
            and self.context == other.context
            and self.children == other.children
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if self.kind is None:
            return "*"
        if self.kind is tuple:
            return f"({', '.join(map(repr, self.children))}{',' if len(self.children) == 1 else ''})"
        if self.kind is list:
            return f"[{', '.join(map(repr, self.children))}]"
        if self.kind is dict:
            return "{" + ", ".join(f"{k!r}: {c!r}" for k, c in zip(self.keys or (), self.children, strict=True)) + "}"
        names = self.keys or getattr(self.kind, "_fields", None)
        items = [f"{n}={c!r}" for n, c in zip(names, self.children)] if names else map(repr, self.children)
        return f"{self.kind.__name__}({', '.join(items)})"


LEAF = Spec(None, None, None, [])

# By class: what gives the leaf that a value stands for.
stand_for_leaves: dict[type, Callable[[Any], Any]] = {}


def flatten(tree: Any) -> tuple[list, Spec]:
    """Leaves and structure."""
    leaves: list = []
    return leaves, _walk(tree, leaves)


def _walk(tree: Any, leaves: list) -> Spec:
    kind = type(tree)
    if kind is tuple or kind is list:
        return Spec(kind, None, None, [_walk(item, leaves) for item in tree])
    if kind is dict:
        return Spec(kind, tuple(tree), None, [_walk(item, leaves) for item in tree.values()])
    if tree is None or isinstance(tree, Tensor):
        leaves.append(tree)
        return LEAF
    parts = _parts(tree, kind)
    if parts is None:
        leaves.append(tree if kind not in stand_for_leaves else stand_for_leaves[kind](tree))
        return LEAF
    items, keys, context = parts
    return Spec(kind, keys, context, [_walk(item, leaves) for item in items])


def _parts(tree: Any, kind: type) -> tuple[list, tuple | None, Any] | None:
    """Items, keys and context of a container of some other class than tuple, list or dict; None for a leaf."""
    node = _REGISTERED.get(kind)
    if node is not None:
        items, context = node.flatten_fn(tree)
        return list(items), tuple(tree) if isinstance(tree, Mapping) else None, context
    if _is_named_tuple(kind):
        return list(tree), None, None
    names = _field_names(kind)
    if names is not None:
        return [getattr(tree, name) for name in names], names, None
    return None


def _made_anew(kind: type | None, other: type | None) -> bool:
    """Whether one statement made both: a function that defines its named tuple or dataclass does so in each run."""
    if kind is None or other is None or (kind.__module__, kind.__name__) != (other.__module__, other.__name__):
        return False
    if _is_named_tuple(kind):
        return _is_named_tuple(other) and kind._fields == other._fields  # type: ignore[attr-defined]
    return _field_names(kind) is not None and _field_names(kind) == _field_names(other)


@lru_cache(256)  # of classes that functions make, too
def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


@lru_cache(256)  # of classes that functions make, too
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Field names of a dataclass, None for another class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def unflatten(leaves: list, spec: Spec) -> Any:
    """The inverse of `flatten`."""
    if spec.kind is None:
        return leaves[0]
    return _build(spec, iter(leaves))


def _build(spec: Spec, leaves: Iterator) -> Any:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    items = [_build(child, leaves) for child in spec.children]
    if kind is tuple:
        return tuple(items)
    if kind is list:
        return items
    if kind is dict:
        return dict(zip(spec.keys, items))  # type: ignore[arg-type]
    if kind is Size and all(type(item) is int for item in items):
        return Size(items)
    node = _REGISTERED.get(kind)
    if node is not None:
        return node.unflatten_fn(items, spec.context)
    if spec.keys is None:
        return kind(*items)
    # Without `__init__`, which may compute or check what holds for real values only.
    made = object.__new__(kind)
    for name, item in zip(spec.keys, items):
        object.__setattr__(made, name, item)
    return made


def is_leaf(tree: Any) -> bool:
    """Whether `tree` is no container."""
    return isinstance(tree, Tensor) or children_of(tree) is None


def children_of(tree: Any) -> list[tuple[str, Any]] | None:
    """The items of a container with the path to each, such as `[0]`, `['w']` or `.field`; None for a leaf."""
    kind = type(tree)
    if kind is dict:
        return [(f"[{key!r}]", item) for key, item in tree.items()]
    if kind is tuple or kind is list:
        return [(f"[{i}]", item) for i, item in enumerate(tree)]
    parts = None if isinstance(tree, Tensor) else _parts(tree, kind)
    if parts is None:
        return None
    items, keys, _ = parts
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", item) for key, item in zip(keys or (), items, strict=True)]
    names = keys or getattr(kind, "_fields", None)
    if names is not None and len(names) == len(items):
        return [(f".{name}", item) for name, item in zip(names, items, strict=True)]
    return [(f"[{i}]", item) for i, item in enumerate(items)]


def leaf_names(tree: Any, root: str) -> list[str]:
    """A readable path for each leaf, such as `params['w'][0]`."""
    children = children_of(tree)
    if children is None:
        return [root]
    return [name for path, item in children for name in leaf_names(item, root + path)]


def spec_names(spec: Spec, root: str) -> list[str]:
    """As `leaf_names`, from a structure."""
    if spec.kind is None:
        return [root]
    names = spec.keys or getattr(spec.kind, "_fields", None)
    if names is None or len(names) != len(spec.children):
        steps = [f"[{i}]" for i in range(len(spec.children))]
    else:
        steps = [f"[{name!r}]" if issubclass(spec.kind, Mapping) else f".{name}" for name in names]
    return [name for step, child in zip(steps, spec.children) for name in spec_names(child, root + step)]


class PrefixMismatch(Exception):
    """A prefix that does not fit: where (`[1]['w']`), and how."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why


def flatten_with_prefix(prefix: Any, tree: Any, whole: bool = False) -> tuple[list, list, Spec]:
    """Leaves of `tree`, the entry of `prefix` for each, and the structure; PrefixMismatch where it does not fit.

    Args:
        prefix: A tree that may stop early: an entry above a subtree holds for all its leaves. Under the entry "list"
            a subtree counts as one leaf.
        tree: The full tree.
        whole: Whether a subtree under the entry None counts as one leaf, and so is not built anew by `unflatten`; a
            subtree without anything in it likewise.
    """
    leaves: list = []
    entries: list = []
    return leaves, entries, _walk_prefix(prefix, tree, leaves, entries, "", whole)


def _walk_prefix(prefix: Any, tree: Any, leaves: list, entries: list, path: str, whole: bool) -> Spec:
    # Most entries are ints or None; no container is.
    wanted = None if prefix is None or type(prefix) is int else children_of(prefix)
    if wanted is None:
        mark = len(leaves)
        if prefix == "list":
            leaves.append(tree)
            entries.append(prefix)
            return LEAF
        spec = LEAF if whole and prefix is None else _walk(tree, leaves)
        if whole and all(leaf is None for leaf in leaves[mark:]):
            leaves[mark:] = [tree]
            entries.append(None)
            return LEAF
        entries.extend([prefix] * (len(leaves) - mark))
        return spec
    kind = type(tree)
    items = children_of(tree)
    if items is None:
        single = "Tensor" if isinstance(tree, Tensor) else kind.__name__
        raise PrefixMismatch(path, f"is a {type(prefix).__name__}, but stands for a single {single}")
    ordered = _in_order(prefix, wanted, tree, items, path)
    children = []
    for (step, item), entry in zip(items, ordered, strict=True):
        children.append(_walk_prefix(entry, item, leaves, entries, path + step, whole))
    if kind is tuple or kind is list:
        return Spec(kind, None, None, children)
    if kind is dict:
        return Spec(kind, tuple(tree), None, children)
    parts = _parts(tree, kind)
    assert parts is not None
    return Spec(kind, parts[1], parts[2], children)


def _in_order(prefix: Any, wanted: list, tree: Any, items: list, path: str) -> list:
    """The entries of a prefix container in the order of the tree's items."""
    by_name = dict(wanted)
    if isinstance(prefix, Mapping) or isinstance(tree, Mapping):
        if not isinstance(prefix, Mapping) or not isinstance(tree, Mapping):
            raise PrefixMismatch(path, f"is a {type(prefix).__name__}, but stands for a {type(tree).__name__}")
        missing = [step for step, _ in items if step not in by_name]
        unknown = [step for step, _ in wanted if step not in dict(items)]
        if missing or unknown:
            why = [f"has no entry for {', '.join(missing)}"] if missing else []
            why += [f"has an entry for {', '.join(unknown)}, which is not there"] if unknown else []
            raise PrefixMismatch(path, " and ".join(why))
        return [by_name[step] for step, _ in items]
    if len(wanted) != len(items):
        raise PrefixMismatch(
            path,
            f"is a {type(prefix).__name__} of {len(wanted)}, but stands for a {type(tree).__name__} of {len(items)}",
        )
    if type(prefix) is not type(tree) and not (type(prefix) in (tuple, list) and isinstance(tree, (tuple, list))):
        raise PrefixMismatch(path, f"is a {type(prefix).__name__}, but stands for a {type(tree).__name__}")
    return [entry for _, entry in wanted]
