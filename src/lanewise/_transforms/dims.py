"""`in_dims` and `out_dims`: reading them, checking them, and saying what does not fit."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.layouts import layout_of
from lanewise._core.plane import with_memory
from lanewise._core.trees import PrefixMismatch, Spec, flatten, flatten_with_prefix, leaf_names
from lanewise._transforms.arguments import Call, function_name
from lanewise._transforms.ragged import by_component
from lanewise._transforms.suggested import (
    any_mappable,
    fitted,
    leaf_names_of,
    mended,
    suggested,
    ways_to_mend,
    with_lanes,
)
from lanewise.errors import ArgumentError, DimensionError, TransformError, at_user_line


def check_randomness(randomness: str, api: str = "vmap") -> None:
    """Raise unless `randomness` is one of the three."""
    if randomness not in ("error", "different", "same"):
        raise TransformError(
            at_user_line(
                "Only allowed values for randomness are 'error', 'different', or 'same'. "
                f"{api} got randomness={randomness!r}",
                f'{api}(f, randomness="different")  # every lane draws its own numbers',
            )
        )


def check_in_dims(call: Call, in_dims: Any, axis_size: Any) -> None:
    """Raise unless `in_dims` is an int, a tuple, or a dict of argument names; with `axis_size` it may be None."""
    if axis_size is not None and (isinstance(axis_size, bool) or not isinstance(axis_size, int) or axis_size < 0):
        raise ArgumentError(
            at_user_line(
                f"{call}: axis_size must be a number of lanes, got {axis_size!r}", f"vmap({call.name}, axis_size=3)"
            )
        )
    if isinstance(in_dims, (int, dict)) or (in_dims is None and axis_size is not None):
        return
    if not isinstance(in_dims, tuple):
        instead = f"in_dims={tuple(in_dims)}" if isinstance(in_dims, list) else "in_dims=0"
        raise ArgumentError(
            at_user_line(
                f"{call}: expected `in_dims` to be int or a (potentially nested) tuple matching the structure of "
                f"inputs, or a dict of argument names, got: {type(in_dims)}",
                f"vmap({call.name}, {instead})"
                + (
                    f"\nvmap({call.name}, in_dims=None, axis_size=3)  # three lanes, nothing mapped"
                    if in_dims is None
                    else ""
                ),
            )
        )


def check_out_dims(call: Call, out_dims: Any) -> None:
    """Raise unless `out_dims` is made of ints, None, "list" and "jagged"."""
    if type(out_dims) is int or out_dims is None:
        return
    for name, entry in zip(leaf_names(out_dims, "out_dims"), flatten(out_dims)[0], strict=True):
        whole = isinstance(entry, int) and not isinstance(entry, bool)
        if entry is not None and not whole and not (isinstance(entry, str) and entry in ("list", "jagged")):
            raise ArgumentError(
                at_user_line(
                    f"{call}: `out_dims` must be an int, None or a python collection of ints representing where in the "
                    f"outputs the vmapped dimension should appear, but {name} is {entry!r}",
                    f"vmap({call.name}, out_dims=0)" + _named_out_dims(call) * isinstance(entry, str),
                )
            )


def _named_out_dims(call: Call) -> str:
    """Those that have a name."""
    return (
        f'\nvmap({call.name}, out_dims="list")    # a list, one result for each lane'
        f'\nvmap({call.name}, out_dims="jagged")  # one nested tensor'
    )


def mapped_leaves(call: Call, in_dims: Any, axis_size: int | None) -> tuple[list, list, Spec, int]:
    """Leaves of `(args, kwargs)`, the mapped dim of each (None: not mapped), their structure, the number of lanes."""
    check_in_dims(call, in_dims, axis_size)
    if not call.args and not isinstance(in_dims, dict) and axis_size is None:
        raise ArgumentError(
            at_user_line(
                f"{call}: got no inputs. Maybe you forgot to add inputs, or you are trying to vmap over a function "
                "with no inputs. Keyword arguments are mapped only where `in_dims` is a dict that names them",
                f"vmap({call.name}, in_dims={{{', '.join(f'{name!r}: 0' for name in call.kwargs)}}})({given})"
                if (given := call.arguments_text())
                else f"vmap({call.name}, axis_size=3)()  # three lanes, no inputs",
            )
        )
    if isinstance(in_dims, dict):
        prefix = _named(call, in_dims)
    else:
        prefix = ((in_dims,) * len(call.args) if isinstance(in_dims, int) else in_dims), None
    try:
        leaves, dims, spec = flatten_with_prefix(prefix, (call.args, call.kwargs), whole=True)
    except PrefixMismatch as mismatch:
        raise _in_dims_mismatch(call, in_dims, prefix, mismatch) from None
    size = -1 if axis_size is None else axis_size
    same = True
    for position, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        if leaf is None:
            dims[position] = None
            continue
        if not isinstance(leaf, Tensor) or not isinstance(dim, int) or isinstance(dim, bool) or not leaf.dim():
            raise _not_mappable(call, prefix, position)
        if (leaf.is_nested or leaf.layout is not torch.strided) and not by_component(leaf, dim):
            raise _not_mappable(call, prefix, position)
        if not -leaf.dim() <= dim < leaf.dim():
            raise _not_mappable(call, prefix, position)
        dims[position] = dim % leaf.dim()
        leaves[position] = with_memory(leaf)
        length = leaf.size(0) if leaf.is_nested else leaf.shape[dim]
        same = same and (size < 0 or length == size)
        size = length if size < 0 else size
    if not same:
        raise _sizes_differ(call, leaves, dims, prefix, axis_size)
    if size < 0:
        raise ArgumentError(
            at_user_line(
                f"{call}: Expected at least one Tensor to vmap over: no argument is mapped",
                (f"vmap({call.name}, in_dims={suggested(call)})\n" if any_mappable(call) else "")
                + f"vmap({call.name}, in_dims=None, axis_size=3)  # three lanes, nothing mapped",
            )
        )
    return leaves, dims, spec, size


def _named(call: Call, in_dims: dict) -> tuple[Any, Any]:
    """`in_dims` by argument name -> prefixes of `args` and `kwargs`; an argument that is not named is not mapped."""
    names, rest = call.parameters()
    left = dict(in_dims)
    positional = [left.pop(name, None) for name in names]
    if rest is not None:
        extra = len(call.args) - len(names)
        entry = left.pop(rest, None)
        positional.extend(entry if isinstance(entry, tuple) and len(entry) == extra else [entry] * extra)
    keyword = {name: left.pop(name, None) for name in call.kwargs}
    unknown = [name for name in left if not call.accepts(name)]
    if unknown:
        known = [*names, *([rest] if rest else []), *call.kwargs]
        raise ArgumentError(
            at_user_line(
                f"{call}: in_dims is not compatible with the structure of `inputs`: in_dims names "
                f"{', '.join(map(repr, unknown))}, but the arguments are {', '.join(map(repr, known))}",
                f"vmap({call.name}, in_dims={{{known[0]!r}: 0}})" if known else "",
            )
        )
    return tuple(positional), keyword


def _in_dims_mismatch(call: Call, in_dims: Any, prefix: tuple, mismatch: PrefixMismatch) -> ArgumentError:
    structure = repr(flatten(call.args)[1])
    if mismatch.path == "[0]":
        names = call.argument_names()
        count = "is 1 positional argument" if len(names) == 1 else f"are {len(names)} positional arguments"
        rows = [f"in_dims {mismatch.why}: there {count} ({', '.join(names)})"]
        if call.kwargs:
            rows.append(f"an argument passed by keyword ({', '.join(call.kwargs)}) is mapped where in_dims is a dict")
    else:
        rows = [f"in_dims{_entry_path(call, in_dims, mismatch.path)} {mismatch.why}"]
    return ArgumentError(
        at_user_line(
            f"{call}: in_dims is not compatible with the structure of `inputs`. in_dims has structure "
            f"{_structure(in_dims)} but inputs has structure {structure}",
            f"vmap({call.name}, in_dims={fitted(call, prefix)})",
            rows,
        )
    )


def _entry_path(call: Call, in_dims: Any, path: str) -> str:
    """The path of an entry as `in_dims` was written, from that in the prefixes of `args` and `kwargs`."""
    where = path.removeprefix("[0]").removeprefix("[1]")
    if isinstance(in_dims, dict) and path.startswith("[0]"):
        place, rest = where[1:].split("]", 1)
        return f"[{call.argument_names()[int(place)]!r}]{rest}"
    return where


def _structure(prefix: Any) -> str:
    """A prefix as it was written."""
    return repr(prefix)


def _not_mappable(call: Call, prefix: tuple, position: int) -> ArgumentError | TransformError:
    """The error for one leaf that cannot be mapped as its entry says."""
    leaves, dims, _ = flatten_with_prefix(prefix, (call.args, call.kwargs), whole=True)
    name, leaf, dim = leaf_names_of(call, prefix)[position], leaves[position], dims[position]
    if isinstance(leaf, Module) and (isinstance(leaf, ModuleList) or name not in call.argument_names()):
        instead = (
            "params, buffers = stack_module_state(models)\nfunctional_call(models[0], (params, buffers), x)  # in f"
        )
    else:
        instead = with_lanes(call, name, leaf) or f"vmap({call.name}, in_dims={mended(call, prefix)[0]})"
    if not isinstance(dim, int) or isinstance(dim, bool):
        hint = ": 0 for the first, None for no lanes" if isinstance(dim, bool) else ""
        return ArgumentError(
            at_user_line(
                f"{call}: Got in_dim={dim!r} for {name}, but in_dim must be either an integer dimension or None{hint}",
                instead,
            )
        )
    if not isinstance(leaf, Tensor):
        return ArgumentError(
            at_user_line(
                f"{call}: Got in_dim={dim} for {name}, but it is of type {type(leaf)}. We cannot vmap over non-Tensor "
                "arguments, please use None as the respective in_dim",
                instead,
            )
        )
    if leaf.is_nested:
        return TransformError(
            at_user_line(
                f"{call}: {name} is a nested tensor (Internal error: NestedTensorImpl doesn't support sizes): its "
                f"components are lanes along dim 0, not along dim {dim}",
                f"vmap({call.name}, in_dims=0)({name})",
            )
        )
    if leaf.layout is not torch.strided and -leaf.dim() <= dim < leaf.dim():
        return TransformError(
            at_user_line(
                f"{call}: {name} {list(leaf.shape)} has the layout {layout_of(leaf)}, which has no strides: its parts "
                f"along dim {dim} cannot be lanes. A sparse matrix that is not mapped can be multiplied with lanes",
                f"vmap({call.name}, ...)({name}.to_dense())\ntorch.stack([{call.name}(part, ...) for part in {name}])",
            )
        )
    return ArgumentError(
        at_user_line(
            f"{call}: Got in_dim={dim} for {name}, which has dimensionality {leaf.dim()} (shape {list(leaf.shape)}): "
            f"expected in_dim to satisfy -{leaf.dim()} <= in_dim < {leaf.dim()}",
            instead,
        )
    )


def _sizes_differ(call: Call, leaves: list, dims: list, prefix: tuple, axis_size: int | None) -> ArgumentError:
    names = leaf_names_of(call, prefix)
    mapped = [i for i, dim in enumerate(dims) if dim is not None]
    sizes = [leaves[i].shape[dims[i]] for i in mapped]
    rows = [f"{names[i]}: shape {list(leaves[i].shape)}, dim {dims[i]} of size {n}" for i, n in zip(mapped, sizes)]
    if axis_size is not None:
        rows.insert(0, f"axis_size={axis_size}")
    if len(set(sizes)) == 1:
        instead = f"vmap({call.name}, axis_size={sizes[0]})  # or without axis_size, since there are mapped tensors"
    else:
        instead = "\n".join(
            f"vmap({call.name}, in_dims={entries})  # if {' and '.join(without)} {_is(without)} the same for all"
            for entries, without in ways_to_mend(call, prefix)
        )
    return ArgumentError(
        at_user_line(
            f"{call}: Expected all tensors to have the same size in the mapped dimension, got sizes {sizes} for the "
            "mapped dimension",
            instead,
            rows,
        )
    )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def out_dims_mismatch(func: Callable, out_dims: Any, spec: Spec, mismatch: PrefixMismatch) -> ArgumentError:
    """The error for `out_dims` that is no prefix of the result."""
    name = function_name(func)
    return ArgumentError(
        at_user_line(
            f"vmap({name}, ..., out_dims={out_dims}): out_dims is not compatible with the structure of `outputs`. "
            f"out_dims has structure {_structure(out_dims)} but outputs has structure {spec}",
            f"vmap({name}, out_dims=0)",
            [f"out_dims{mismatch.path} {mismatch.why}"],
        )
    )


def out_dim_error(func: Callable, dim: int, value: Tensor, where: str) -> DimensionError:
    """The error for an out_dim that a result does not have."""
    name, rank = function_name(func), value.dim()
    return DimensionError(
        at_user_line(
            f"vmap({name}, ..., out_dims={dim}): Dimension out of range (expected to be in range of [-{rank}, "
            f"{rank - 1}], but got {dim}): {where} {list(value.shape[1:])} has {rank} dims, its "
            f"{value.shape[0]} lanes included",
            f"vmap({name}, out_dims=0)",
        )
    )


def dynamic_lanes(func: Callable, shape: Sequence[int], where: str) -> ArgumentError:
    """The error for a result `shape` with lanes where `out_dims` is None."""
    name = function_name(func)
    return ArgumentError(
        at_user_line(
            f"vmap({name}, ...): `{name}` can not return a BatchedTensor when out_dim is None: {where} of shape "
            f"{list(shape)} differs from lane to lane, so there is no one value to return",
            f"vmap({name}, out_dims=0)",
        )
    )


def lanes_in_object(level: BatchLevel, leaf: Any) -> str | None:
    """Where an object that is no container holds lanes of this level (`.attribute`), or None."""
    if leaf is None or type(leaf) in (int, float, bool, str, complex):
        return None
    if isinstance(leaf, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return ""  # it runs once the transform has ended
    if isinstance(leaf, (set, frozenset)):
        items = [("", item) for item in leaf]
    else:
        held = getattr(leaf, "__dict__", None)
        items = [(f".{name}", item) for name, item in held.items()] if isinstance(held, dict) else []
    for where, item in items:
        if type(item) is BatchTensor and item.level is level:
            return where
    return None


def returned_lanes(func: Callable, leaf: Any, attribute: str, where: str) -> ArgumentError:
    """The error for lanes that leave inside an object vmap cannot look into."""
    name = function_name(func)
    holds = f"whose `{attribute}` has lanes" if attribute else "which holds tensors with lanes"
    return ArgumentError(
        at_user_line(
            f"vmap({name}, ...): `{name}` must only return Tensors, got type {type(leaf)} for {where}, {holds}. Did "
            "you mean to set out_dims= to None for output? vmap looks into tuples, lists, dicts, named tuples, "
            "dataclasses and classes registered with torch's pytree",
            f"return y{attribute}  # the tensors themselves" if attribute else "return list(y)",
        )
    )


def unstackable(func: Callable, value: Tensor, name: str) -> TransformError:
    """The error for a result that is the same in all lanes and has no strides to put lanes into."""
    return TransformError(
        at_user_line(
            f"vmap: `{function_name(func)}` returns a tensor of layout {layout_of(value)} as {name}, which cannot be "
            "stacked: it has no strides to put lanes into. It is the same in all lanes",
            f"vmap({function_name(func)}, out_dims=None)  # once, as it is",
        )
    )
