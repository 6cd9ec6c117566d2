"""An `in_dims` that would do, for the messages about one that does not."""

from typing import Any

from torch import Tensor

from lanewise._core.trees import PrefixMismatch, children_of, flatten, flatten_with_prefix, leaf_names
from lanewise._transforms.arguments import Call


def leaf_names_of(call: Call, prefix: tuple) -> list[str]:
    """Names of the leaves that `flatten_with_prefix` gives, such as `params['w']`."""
    return [name for _, _, names in _by_argument(call, prefix) for name in names]


def _by_argument(call: Call, prefix: tuple) -> list[tuple[str, Any, list[str]]]:
    """For each argument: its name, its entry in the prefix, and the names of its leaves."""
    args_prefix, kwargs_prefix = prefix
    found = []
    for position, (root, arg) in enumerate(zip(call.argument_names(), call.args, strict=True)):
        entry = args_prefix[position] if isinstance(args_prefix, (tuple, list)) else args_prefix
        found.append((root, entry, _names_under(entry, arg, root)))
    if isinstance(kwargs_prefix, dict):
        for key, arg in call.kwargs.items():
            found.append((key, kwargs_prefix[key], _names_under(kwargs_prefix[key], arg, key)))
    return found


def _names_under(entry: Any, tree: Any, root: str) -> list[str]:
    below = None if entry is None else children_of(entry)
    if below is None:
        if entry is None or all(leaf is None for leaf in flatten(tree)[0]):
            return [root]
        return leaf_names(tree, root)
    entries = dict(below)
    found = []
    for position, (step, item) in enumerate(children_of(tree) or []):
        inner = entries[step] if step in entries else below[position][1]
        found.extend(_names_under(inner, item, root + step))
    return found


def mended(call: Call, prefix: tuple) -> tuple[str, list[str]]:
    """`in_dims` with None for what does not have the size of most arguments, and what that is.

    A whole argument, such as a dict of parameters, where one entry stands for all of it.
    """
    return ways_to_mend(call, prefix)[0]


def ways_to_mend(call: Call, prefix: tuple) -> list[tuple[str, list[str]]]:
    """As `mended`, the likelier first, where sizes are those of equally many arguments."""
    leaves, dims, _ = flatten_with_prefix(prefix, (call.args, call.kwargs), whole=True)
    left = iter([_size(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])
    arguments = [
        (root, entry, [(name, next(left)) for name in names]) for root, entry, names in _by_argument(call, prefix)
    ]
    sizes = [size for *_, parts in arguments for _, size in parts if size is not None and size >= 0]
    if not sizes:
        return [(suggested(call, prefix), [])]
    given = call.options.get("axis_size")
    candidates = [given] if given in sizes else sorted(set(sizes), key=lambda n: (-sizes.count(n), sizes.index(n)))
    odd = [sum(bool(_odd(n, parts)) for *_, parts in arguments) for n in candidates]
    ways = []
    for size in [n for n, count in zip(candidates, odd) if count == min(odd)]:
        without = []
        for root, entry, parts in arguments:
            names = _odd(size, parts)
            differs = any(own not in (None, size, _UNFIT) for _, own in parts)
            whole = differs and (children_of(entry) is None or len(names) == len(parts))
            without.extend([root] if whole else names)
        ways.append((suggested(call, prefix, without), without))
    return ways


def fitted(call: Call, prefix: tuple) -> str:
    """An `in_dims` for arguments of another structure: the entries that fit theirs, 0 in place of the others."""
    args_prefix, kwargs_prefix = prefix
    entries = (*args_prefix, *([0] * len(call.args)))[: len(call.args)]
    positional = tuple([entry if _fits(entry, arg) else 0 for entry, arg in zip(entries, call.args)])
    named = isinstance(kwargs_prefix, dict)
    keyword = {key: e if _fits(e, call.kwargs[key]) else 0 for key, e in kwargs_prefix.items()} if named else None
    return mended(call, (positional, keyword))[0]


def _fits(entry: Any, arg: Any) -> bool:
    try:
        flatten_with_prefix(entry, arg, whole=True)
    except PrefixMismatch:
        return False
    return True


# In place of a size: what is to be mapped and cannot be.
_UNFIT = -1


def _size(leaf: Any, dim: Any) -> int | None:
    """The size of a leaf in its mapped dim, in dim 0 where it has no such dim; None where it is not mapped."""
    if dim is None or leaf is None:
        return None
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.is_nested:
        return _UNFIT
    return leaf.shape[dim if isinstance(dim, int) and -leaf.dim() <= dim < leaf.dim() else 0]


def _odd(size: int, parts: list) -> list[str]:
    return [name for name, own in parts if own is not None and own != size]


def suggested(call: Call, prefix: tuple | None = None, without: list[str] | None = None) -> str:
    """An `in_dims` that would do: as given where that is possible, None for what cannot be mapped and for `without`."""
    given: dict[str, Any] = {}
    if prefix is not None:
        _, dims, _ = flatten_with_prefix(prefix, (call.args, call.kwargs), whole=True)
        given = dict(zip(leaf_names_of(call, prefix), dims))

    def entry(name: str, tree: Any) -> Any:
        if without and name in without:
            return None
        children = children_of(tree)
        if isinstance(tree, Tensor) or children is None or name in given:
            possible = isinstance(tree, Tensor) and tree.dim() > 0 and not tree.is_nested
            dim = given.get(name, 0)
            if not possible or dim is None:
                return None
            return dim if type(dim) is int and -tree.dim() <= dim < tree.dim() else 0
        entries = [entry(name + step, item) for step, item in children]
        if all(e is None for e in entries):
            return None
        if all(e == entries[0] and isinstance(e, int) for e in entries):
            return entries[0]
        if isinstance(tree, dict):
            return dict(zip(tree, entries))
        return entries if isinstance(tree, list) else tuple(entries)

    entries = {name: entry(name, arg) for name, arg in zip(call.argument_names(), call.args)}
    if isinstance(call.options.get("in_dims"), dict):
        entries |= {name: entry(name, arg) for name, arg in call.kwargs.items()}
        return repr({name: e for name, e in entries.items() if e is not None})
    dims = list(entries.values())
    if dims and all(e == dims[0] and isinstance(e, int) for e in dims):
        return repr(dims[0])
    return repr(tuple(dims))


def any_mappable(call: Call) -> bool:
    """Whether a tensor with dims is among the arguments."""
    leaves, _ = flatten((call.args, call.kwargs))
    return any(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves)


def with_lanes(call: Call, name: str, leaf: Any) -> str:
    """What to write where nothing can be mapped because of `leaf`; an empty string where something can be."""
    if any_mappable(call):
        return ""
    if isinstance(leaf, Tensor):
        return f"{call.name}({call.arguments_text()})  # one example, which has no lanes"
    if isinstance(leaf, (int, float, complex)) or hasattr(leaf, "__array__"):
        roots = [root for root in [*call.argument_names(), *call.kwargs] if name.startswith(root)]
        return f"vmap({call.name})({call.arguments_text().replace(roots[0], f'torch.as_tensor({roots[0]})')})"
    return f"vmap({call.name}, in_dims=None, axis_size=3)  # three lanes, nothing mapped"
