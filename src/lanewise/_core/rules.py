"""Tables of rules: which function carries out an operation on a plane."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from lanewise._core.draws.random import is_random
from lanewise._core.plane import STATISTICS
from lanewise._torch_compat import OpOverload, has_kernel_for_key


class Rule:
    """How a plane carries out one operation.

    Attributes:
        run: Called as `run(level, args, kwargs)`. Unless `same_plane`, it runs in the plane below and returns values of
            that plane, which the handler wraps.
        family: Name of the property that the rule states, for reports.
        where: `file:line` of the registration.
        same_plane: The rule is a composition of other operations on this plane, run as it is.
        guarded: The dispatch state of the plane below must be restored even for plain values (views and in-place
            operations need version counters and view tracking; so do operations without an autograd kernel).
        raw: The rule returns finished results of this plane; nothing is wrapped.
        mutates: The operation writes to an operand.
        undeclared: It may write to running statistics, though its schema does not say so.
        plain: Nothing more is to be known: the rule runs below on operands given one by one, its results are wrapped.
        single: Plain, and the first argument is the only tensor operand.
    """

    __slots__ = ("run", "family", "where", "same_plane", "guarded", "raw", "mutates", "undeclared", "plain", "single")

    def __init__(
        self,
        op: OpOverload,
        run: Callable[[Any, tuple, dict], Any],
        family: str,
        *,
        same_plane: bool = False,
        guarded: bool = False,
        raw: bool = False,
    ) -> None:
        self.run = run
        self.family = family
        self.where = _registration_site()
        self.same_plane = same_plane
        self.raw = raw
        self.mutates = op._schema.is_mutable
        self.undeclared = op in STATISTICS
        self.guarded = guarded or self.mutates or op.is_view or not has_kernel_for_key(op.name(), "Autograd")
        kinds = [str(argument.type) for argument in op._schema.arguments]
        self.plain = (
            not (self.mutates or self.undeclared or raw or same_plane)
            and kinds[0] == "Tensor"
            and not any("Tensor" in kind and kind.startswith("List") for kind in kinds)
            and not is_random(op)
        )
        self.single = self.plain and not any("Tensor" in kind for kind in kinds[1:])


def _registration_site() -> str:
    frame = sys._getframe(1)
    here = frame.f_code.co_filename
    while frame is not None:
        name = frame.f_code.co_filename
        if name != here and not name.endswith("families.py"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class RuleTable(dict[OpOverload, Rule]):
    """Rules of one plane by overload. A second registration raises and names both places."""

    def add(self, op: OpOverload, rule: Rule) -> None:
        if not isinstance(op, OpOverload):
            raise TypeError(f"only overloads take rules, such as aten.sum.dim_IntList, got {op!r}")
        if op in self:
            raise ValueError(f"{op} has a rule at {self[op].where} and another at {rule.where}")
        self[op] = rule

    def families(self) -> dict[str, list[OpOverload]]:
        """The registered overloads by family."""
        by_family: dict[str, list[OpOverload]] = {}
        for op, rule in self.items():
            by_family.setdefault(rule.family, []).append(op)
        return by_family


def overloads(*ops: OpOverload | Iterable[OpOverload]) -> list[OpOverload]:
    """The overloads of a registration, nested lists flattened."""
    flat: list[OpOverload] = []
    for op in ops:
        if isinstance(op, OpOverload):
            flat.append(op)
        else:
            flat.extend(op)
    return flat
