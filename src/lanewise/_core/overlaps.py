"""Writes to memory of which another operand of the same operation reads a part: what it reads then hangs on the order.

torch refuses them where it sees them. With lanes around, it does not see them.
"""

from typing import Any

from torch import Tensor

from lanewise._core.again.journal import memory
from lanewise._core.operations import writes_to_lists
from lanewise._core.plane import Plane, argument, tensors_of, written_arguments
from lanewise.errors import TransformError, at_user_line


def check_written(func: Any, args: tuple, kwargs: dict) -> None:
    """The operands of an operation in place, each against those that it writes to."""
    if "fill" in func._schema.name:
        return  # with the number that a 0-dim tensor held before
    for position, name in written_arguments(func):
        target = argument(args, kwargs, position, name)
        if isinstance(target, (list, tuple)):
            lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (list, tuple)) and arg is not target]
            for entry, *others in zip(target, *lists):
                for other in tensors_of(tuple(others), {}):
                    check_overlap(entry, other)
        else:
            for other in tensors_of(args, kwargs):
                if other is not target:
                    check_overlap(target, other)


def check_overlap(written: Tensor, read: Tensor) -> None:
    """Raise where a lane of one tensor shares a part of its memory with the same lane of the other."""
    a: Any = written
    b: Any = read
    lanes = other = 0
    while isinstance(a, Plane):
        lanes += getattr(a, "mapped", False)
        a = a.value
    while isinstance(b, Plane):
        other += getattr(b, "mapped", False)
        b = b.value
    if not lanes or lanes != other or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return
    if not a.numel() or not b.numel():
        return
    for _ in range(lanes):
        a, b = a.select(0, 0), b.select(0, 0)
    if not _is_dense(a) or not _is_dense(b):
        return
    start, begin = a.storage_offset() * a.element_size(), b.storage_offset() * b.element_size()
    end, stop = start + a.numel() * a.element_size(), begin + b.numel() * b.element_size()
    whole = (start, end) == (begin, stop)
    if a.stride() != b.stride() if whole else (start < stop and begin < end):
        raise TransformError(
            at_user_line(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation.",
                "x[1:] += x[:-1].clone()",
            )
        )


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether values may lie in one memory; of planes, that is not known yet."""
    return type(a) is not Tensor or type(b) is not Tensor or a.untyped_storage()._cdata == b.untyped_storage()._cdata


def entries_apart(func: Any, args: tuple, kwargs: dict) -> list[tuple[tuple, dict]]:
    """What an operation on lists does to each entry, where different ones of one memory are written to; else nothing.

    The later ones of these read what has been written to the ones before.
    """
    if not writes_to_lists(func):
        return []
    written = [entry for position, name in written_arguments(func) for entry in argument(args, kwargs, position, name)]
    if len({memory(entry) for entry in written}) == len({id(entry) for entry in written}):
        return []

    def at(number: int, arg: Any) -> Any:
        return arg[number : number + 1] if isinstance(arg, (list, tuple)) else arg

    return [
        (tuple([at(k, arg) for arg in args]), {key: at(k, arg) for key, arg in kwargs.items()})
        for k in range(len(args[0]))
    ]


def _is_dense(tensor: Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True
