"""Operations on lists of tensors (`torch._foreach_add_`), entry by entry."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._torch_compat import OpOverload, operator_names

aten = torch.ops.aten

# What has no method of that name, or one that takes other arguments.
_SINGLE: dict[str, Callable[..., Any]] = {
    "clone": lambda x, memory_format=None: x.clone(),
    "copy": aten.copy.default,
    "max": torch.max,
    "mm": torch.mm,
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: x.abs().pow(ord).sum(dtype=dtype),
    "zero": torch.zeros_like,
}
_OF_NUMBERS = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
_WRITTEN = {"maximum_": torch.maximum, "minimum_": torch.minimum}


def operations_on_lists() -> list[OpOverload]:
    """All of them but those that write to `out=`."""
    found = []
    for name in operator_names("aten::_foreach_"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if "out" not in overload:
            found.append(getattr(getattr(aten, packet), overload or "default"))
    return found


def name_of(op: OpOverload) -> str:
    """`add_` of `aten::_foreach_add_.List`."""
    return op._schema.name.removeprefix("aten::_foreach_")


def takes_numbers_of_tensor(op: OpOverload) -> bool:
    """Whether a tensor holds the numbers for the entries: torch reads them as Python numbers."""
    return op._schema.overload_name == "Tensor" and name_of(op).startswith("addc")


def entry_by_entry(op: OpOverload) -> Callable[..., list[Tensor] | None]:
    """The operation as one for each entry of the lists."""
    schema = op._schema
    single, mutates = _single(op), schema.is_mutable
    listed = [str(arg.type).startswith("List") for arg in schema.arguments]
    values = name_of(op).startswith("addc")  # whose number is a keyword of the single operation
    numbers_at = len(schema.arguments) - 1 if takes_numbers_of_tensor(op) else None
    if numbers_at is not None:
        listed[numbers_at] = True

    def run(*args: Any, **options: Any) -> list[Tensor] | None:
        count = len(next(arg for arg, each in zip(args, listed, strict=False) if each))
        if numbers_at is not None:
            args = (*args[:numbers_at], args[numbers_at].tolist())
        outs = []
        for i in range(count):
            entry = [arg[i] if each else arg for arg, each in zip(args, listed, strict=False)]
            named = {"value": entry.pop()} if values and len(entry) == 4 else {}
            named.update((_KEYWORDS.get(key, key), value) for key, value in options.items())
            outs.append(single(*entry, **named))
        return None if mutates else outs

    return run


_KEYWORDS = {"scalars": "value"}


def _single(op: OpOverload) -> Callable[..., Any]:
    name = name_of(op)
    bare = name.removesuffix("_")
    of_numbers = op._schema.overload_name.startswith("Scalar")
    if bare in _OF_NUMBERS and of_numbers:
        single = _OF_NUMBERS[bare]
    elif name == "pow" and op._schema.overload_name == "ScalarAndTensor":
        return torch.pow
    elif name in _WRITTEN:
        single = _WRITTEN[name]
    else:
        return _SINGLE.get(name) or getattr(Tensor, name)
    return (lambda x, *rest: x.copy_(single(x.clone(), *rest))) if op._schema.is_mutable else single
