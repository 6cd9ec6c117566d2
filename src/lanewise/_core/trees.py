"""Containers of arguments and results: flattening, prefixes, and names for messages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lanewise._torch_compat import pytree

_LEAF = pytree.tree_structure(0)


def flatten(tree: Any) -> tuple[list, Any]:
    """Leaves and structure."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: list, spec: Any) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(leaves, spec)


def is_leaf(tree: Any) -> bool:
    """Whether `tree` is no container."""
    return isinstance(tree, Tensor) or pytree.tree_structure(tree) == _LEAF


def leaf_names(tree: Any, root: str) -> list[str]:
    """A readable path for each leaf, such as `params['w'][0]`."""
    return [root + pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def broadcast_prefix(prefix: Any, tree: Any, is_prefix_leaf: Callable[[Any], bool]) -> list | None:
    """One entry of `prefix` for each leaf of `tree`, or None where it does not fit.

    Args:
        prefix: A tree that may stop early: an entry above a subtree holds for all of its leaves.
        tree: The full tree.
        is_prefix_leaf: Whether a value of `prefix` is an entry rather than a container.
    """
    if is_prefix_leaf(prefix):
        return [prefix] * len(flatten(tree)[0])
    prefix_items, prefix_spec = pytree.tree_flatten(prefix, is_leaf=lambda node: node is not prefix)
    tree_items, tree_spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if prefix_spec != tree_spec or (not prefix_items and flatten(tree)[0]):
        same_size = (
            isinstance(prefix, (list, tuple)) and isinstance(tree, (list, tuple)) and type(tree) in (list, tuple)
        )
        if not same_size or len(prefix_items) != len(tree_items):
            return None
    entries: list = []
    for item, subtree in zip(prefix_items, tree_items, strict=True):
        below = broadcast_prefix(item, subtree, is_prefix_leaf)
        if below is None:
            return None
        entries.extend(below)
    return entries
