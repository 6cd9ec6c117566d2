"""Compositions with `out=`: the functional overload's results are written where `out=` says.

torch's own kernels of these make further tensors in C++, to be written, which no plane sees as made inside.
"""

from functools import cache
from typing import Any

from lanewise._core.missing import functional_twin, write_out
from lanewise._core.plane import Plane, recorded, tensors_of
from lanewise._core.python.factories import is_routed, named_overload, route_past_name
from lanewise._torch_compat import OpOverload, has_kernel_for_key, is_grad_enabled, operator_names

# Overloads with `out=` arguments that have names of their own.
_NAMED = ("linalg_eigh.eigvals", "linalg_svd.U", "qr.Q", "svd.U")


def write_by_twins() -> None:
    """Hand the compositions with `out=` to their functional overloads where a plane is among the operands."""
    for name in operator_names("aten::"):
        writes = "out" in name.partition(".")[2] or name.removeprefix("aten::") in _NAMED
        if writes and not is_routed(name) and has_kernel_for_key(name, "CompositeImplicitAutograd"):
            route_past_name(name, _by_twin(name))


def _by_twin(name: str) -> Any:
    @cache
    def overloads() -> tuple[OpOverload, OpOverload | None]:
        op = named_overload(name)
        return op, functional_twin(op)

    def write(*args: Any, **kwargs: Any) -> Any:
        operands = tensors_of(args, kwargs)
        if not any(isinstance(operand, Plane) for operand in operands):
            return NotImplemented
        if is_grad_enabled() and any(recorded(operand) for operand in operands):
            return NotImplemented  # torch says that it has no derivative
        op, twin = overloads()
        return NotImplemented if twin is None else write_out(op, twin, args, kwargs)

    return write
