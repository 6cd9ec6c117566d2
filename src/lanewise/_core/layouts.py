"""Operands that are not strided: captured sparse tensors, which few operations on lanes take."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import current_level, on_plane
from lanewise._core.parting.lanes import parting
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import Plane, map_tensors, replace_tensors, sync, taken_apart, tensors_of
from lanewise._torch_classes import NestedTensor
from lanewise._torch_compat import OpOverload
from lanewise.errors import TransformError, at_user_line

# `rule(level, *args, **kwargs)` by overload, on logical operands; runs in the plane below, results are wrapped.
LAYOUT_RULES: dict[OpOverload, Callable[..., Any]] = {}


def run_with_layouts(level: Any, func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """An operation on values of `level` and a tensor without strides."""
    if func not in LAYOUT_RULES and func._can_decompose():
        # Only in inference mode; elsewhere torch takes it apart before it comes here.
        return taken_apart(func, *args, **kwargs)

    def enter(tensor: Any) -> Any:
        if level.owns(tensor) and not level.lifted(tensor):
            sync(tensor)
            return tensor if level.lifted(tensor) else tensor.value
        return of_plain_parts(tensor)

    def run() -> tuple[Any, bool]:
        own_args, own_kwargs = replace_tensors(enter, args, kwargs)
        if not any(level.mapped(operand) for operand in tensors_of(own_args, own_kwargs)):
            return func(*own_args, **own_kwargs), False
        rule = LAYOUT_RULES.get(func)
        if rule is None and not func._schema.is_mutable and any(t.is_nested for t in tensors_of(args, kwargs)):
            return alone(level, func, own_args, own_kwargs), False
        if rule is None:
            raise _no_rule(func, args, kwargs)
        return rule(level, *own_args, **own_kwargs), True

    out, lanes = level.below(run)
    return map_tensors(level.wrap if lanes else level.adopt, out)


def alone(level: Any, func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """An operation on or to a nested tensor, which has no place for lanes: of one lane, the others go apart.

    Called in the plane below; the result is the same in all lanes that run, for there is one.
    """
    note_question(level)
    if level.size > 1:
        with on_plane(None):
            parting.by(level, torch.arange(level.size))
        raise TransformError(
            at_user_line(
                f"vmap: {func}: nested tensors cannot have lanes",
                "torch.nn.utils.rnn.pad_sequence(parts)  # and a mask of what is there",
            )
        )

    def one(tensor: Any) -> Tensor:
        if not level.mapped(tensor):
            return tensor
        # Where there are no lanes, shapes are all that is asked for.
        return tensor.value.select(0, 0) if level.size else tensor.value.new_ones(tensor.shape)

    args, kwargs = replace_tensors(one, args, kwargs)
    return func(*args, **kwargs)


def of_plain_parts(tensor: Tensor) -> Tensor:
    """A sparse tensor that a kernel has made inside a transform: its indices and values are those of the plane below.

    They are wrappers, the same in all lanes, since the kernel made them where the tensors of its own belong to a plane.
    """
    if tensor.layout is torch.sparse_coo:
        indices, values = tensor._indices(), tensor._values()
        if isinstance(indices, Plane) or isinstance(values, Plane):
            parts = _plain(indices), _plain(values)
            return torch.sparse_coo_tensor(
                *parts, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
            )
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc):
        by_row = tensor.layout is torch.sparse_csr
        starts, places = (
            (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
        )
        parts = starts, places, tensor.values()
        if any(isinstance(part, Plane) for part in parts):
            starts, places, values = [_plain(part) for part in parts]
            return torch.sparse_compressed_tensor(
                starts, places, values, tensor.shape, layout=tensor.layout, check_invariants=False
            )
    return tensor


def _plain(part: Tensor) -> Tensor:
    while isinstance(part, Plane) and not part.level.lifted(part):
        sync(part)
        part = part.value
    return part


def product_of_layouts(op: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """A product in which one operand is sparse. Where all are plain, what the kernel makes must be plain, too."""
    here = current_level()
    if here is None or any(isinstance(operand, Plane) for operand in operands):
        return op(*operands)
    return here.adopt(here.below(product_of_layouts, op, *operands))


def layout_of(tensor: Tensor) -> str:
    """A layout as messages name it: `sparse_csr`, `nested`."""
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").removeprefix("_")


def _no_rule(func: OpOverload, args: tuple, kwargs: dict) -> TransformError:
    operand = next(t for t in tensors_of(args, kwargs) if t.layout is not torch.strided or t.is_nested)
    if "nested" in func.name():
        return TransformError(
            at_user_line(
                "vmap: nested tensors cannot have lanes",
                "torch.nn.utils.rnn.pad_sequence(parts)  # and a mask of what is there",
            )
        )
    taken = "" if operand.is_nested or operand.dim() != 2 else "; products with matrices and vectors take it"
    shape = "" if operand.is_nested else f" {list(operand.shape)}"
    return TransformError(
        at_user_line(
            f"vmap: {func}: a captured tensor of layout {layout_of(operand)}{shape} and a value that differs from lane "
            f"to lane: the result would have lanes, and no strides to put them into{taken}",
            "for part in nested.unbind(): ...  # one component at a time" if operand.is_nested else "sparse.to_dense()",
        )
    )


def nested_with_tangent() -> TransformError:
    """The error where a nested tensor would have a tangent."""
    return TransformError(
        at_user_line(
            "jvp: a nested tensor and a value that has a tangent: forward mode goes through strided tensors only",
            "[part * scale for part in nested.unbind()]  # a list of tensors in place of it\n"
            "or grad, vjp and jacrev, which take nested tensors inside",
        )
    )


def sparse_with_tangent(out: Tensor) -> TransformError:
    """The error where a sparse tensor would have a tangent."""
    return TransformError(
        at_user_line(
            f"jvp: a tensor of layout {layout_of(out)} made of values that have a tangent: forward mode goes through "
            "strided tensors only",
            "torch.zeros(shape).index_put(indices, values)  # a strided tensor\n"
            "or grad, vjp and jacrev, which take sparse tensors inside",
        )
    )


_new_nested = NestedTensor.__new__


def _with_values(cls: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    """A nested tensor; its methods would drop the tangent of its values."""
    part = values
    while isinstance(part, Plane):
        if getattr(part, "tangent", None) is not None:
            raise nested_with_tangent()
        part = part.value
    return _new_nested(cls, values, *args, **kwargs)


NestedTensor.__new__ = _with_values  # type: ignore[method-assign]
