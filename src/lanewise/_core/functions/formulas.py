"""A user's formula for derivatives as a custom Function: what is to be differentiated again, where it runs per lane."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.level import pin_grad_mode
from lanewise._core.native import ordinary, recording_again
from lanewise._core.plane import Plane, recorded, tracked
from lanewise._core.recording.graphs import note_leaf
from lanewise._torch_compat import AUTOGRAD_KEY, is_grad_enabled, tls_is_excluded
from lanewise.errors import TransformError


def as_function(formula: Callable[[list, tuple], tuple], kept: list, given: tuple) -> tuple:
    """What a formula gives, to be differentiated again by autograd."""
    count = len(kept)
    flat: Any = lambda *values: formula(list(values[:count]), values[count:])
    flat.__wrapped__ = formula
    return Formula.apply(flat, *kept, *given)


class Formula(Function):
    """A formula of tensors (or None) that gives tensors (or None); its derivative is autograd's."""

    @staticmethod
    def forward(ctx: Any, formula: Callable[..., tuple], *values: Tensor | None) -> tuple:
        ctx.formula = formula
        ctx.save_for_backward(*values)
        ctx.set_materialize_grads(False)
        return formula(*values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return None, *pulled(ctx.formula, ctx.saved_tensors, cotangents)


def pulled(formula: Callable[..., tuple], values: tuple, cotangents: tuple) -> list[Tensor | None]:
    """The values' cotangents from those of what the formula makes of them."""
    if tls_is_excluded(AUTOGRAD_KEY):
        with recording_again():
            return pulled(formula, tuple(map(ordinary, values)), tuple(map(ordinary, cotangents)))
    outer = is_grad_enabled()
    levels = [each.level for each in (*values, *cotangents) if isinstance(each, Plane)]
    highest: Any = max(levels, key=lambda level: level.order) if levels else None
    covers = getattr(highest, "covers", None)
    if covers is not None and any(isinstance(v, Plane) and v.level is not highest and covers(v.level) for v in values):
        # Cotangents of a `vmap` inside, which lies beside the level of the values, for pairs of both lanes.
        with highest.lanes_of_all(list(cotangents)):
            return pulled(formula, tuple([None if v is None else highest.here(v) for v in values]), cotangents)
    kept = outer and any(each is not None and recorded(each) for each in (*values, *cotangents))
    with torch.enable_grad():
        aliases = [_alias(highest, value) for value in values]
        live = [
            (out, cotangent)
            for out, cotangent in zip(formula(*aliases), cotangents, strict=True)
            if cotangent is not None and isinstance(out, Tensor) and recorded(out)
        ]
        inputs = [alias for alias in aliases if alias is not None and recorded(alias)]
        found: Any = [None] * len(inputs)
        if live:
            roots, given = zip(*live)
            with pin_grad_mode(outer):
                found = torch.autograd.grad(roots, inputs, given, create_graph=kept, allow_unused=True)
    grads = {id(alias): grad for alias, grad in zip(inputs, found, strict=True)}
    return [grads.get(id(alias)) for alias in aliases]


def _alias(highest: Any, value: Tensor | None) -> Tensor | None:
    """A value, differentiated on the highest plane alone: the planes below keep their history of it."""
    if value is None:
        return None
    alias = value.view_as(value) if highest is None or highest.owns(value) else highest.adopt(value)
    if recorded(alias) or not (value.is_floating_point() or value.is_complex()):
        return alias
    note_leaf(alias.requires_grad_())
    return alias


class _NotTwice(Function):
    """Aliases of gradients that cannot be differentiated again, which say so."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple:
        return tuple([None if t is None else t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TransformError("trying to differentiate twice a function that was marked with @once_differentiable")


def not_twice(result: Any, operands: list) -> Any:
    """What a formula gives, which is not to be differentiated again."""
    if not is_grad_enabled() or not any(isinstance(x, Tensor) and tracked(x) for x in operands):
        return result
    grads = result if isinstance(result, tuple) else (result,)
    return _NotTwice.apply(len(grads), *grads, *operands)
