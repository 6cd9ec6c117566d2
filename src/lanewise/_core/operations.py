"""What is known of an operation, whatever it is called with."""

import functools
from collections.abc import Callable
from typing import Any


def asked_once(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A question to an operation, whose answer is kept: by its id, as torch's hash of it takes longer than the rest."""
    known: dict[int, tuple[Any, bool]] = {}

    @functools.wraps(ask)
    def answer(op: Any) -> bool:
        found = known.get(id(op))
        if found is None:
            found = known[id(op)] = (op, ask(op))  # with the operation, so that no other one gets its id
        return found[1]

    return answer


@asked_once
def writes(op: Any) -> bool:
    """Whether an operation writes to arguments, as its schema says."""
    return op._schema.is_mutable


@asked_once
def writes_to_lists(op: Any) -> bool:
    """Whether an operation writes to tensors in lists: `torch._foreach_add_`."""
    return op._schema.is_mutable and any(
        arg.alias_info is not None and arg.alias_info.is_write and "List" in str(arg.type)
        for arg in op._schema.arguments
    )


@asked_once
def makes_tensors(op: Any) -> bool:
    """Whether the results of an operation are new tensors."""
    if op._schema.is_mutable or op.is_view:
        return False
    return any("Tensor" in str(result.type) for result in op._schema.returns)
