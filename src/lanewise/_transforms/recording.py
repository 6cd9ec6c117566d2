"""Recording on the plane that a transform finds itself on, and the backward passes through what was recorded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.level import current_level, note_autograd, pin_grad_mode, standing
from lanewise._core.parting.lane_level import completed
from lanewise._core.parting.lanes import machine
from lanewise._core.parting.leaks import check_derivatives
from lanewise._core.plane import Plane, recorded, with_memory, without_history
from lanewise._core.plane import tracked as tracked_on_any
from lanewise._core.recording.graphs import freed, needs_graph, note_leaf
from lanewise._core.recording.passes import run_backward
from lanewise._core.trees import flatten, unflatten
from lanewise._torch_compat import (
    forward_level,
    is_grad_enabled,
    peer_engine_active,
    set_grad_enabled,
)
from lanewise._transforms.arguments import Site, check_differentiable, check_tensors, refuse_peer
from lanewise._transforms.orders import back_to_orders, one_order_more


class Recording:
    """Switches recording on for the function, inside `inference_mode` too; knows the grad mode outside."""

    __slots__ = ("outer", "_grad_mode", "_inference", "_orders")

    def __init__(self, noted: bool = False) -> None:
        for level in standing.levels:
            level.note_recording()
        if standing.orders and not noted:
            note_autograd()  # it records on a plane where another does, perhaps below

    def __enter__(self) -> "Recording":
        self.outer = self._grad_mode = is_grad_enabled()
        self._inference = None
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
            self.outer = False
        self._orders = standing.orders
        try:
            set_grad_enabled(True)
            one_order_more()
        except BaseException:
            self._leave()  # an interrupt
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            self._leave()
        except BaseException:
            self._leave()  # an interrupt: whatever was done before is done again
            raise
        if self._inference is not None:
            self._inference.__exit__(*exc)
            set_grad_enabled(self._grad_mode)

    def _leave(self) -> None:
        back_to_orders(self._orders)
        set_grad_enabled(self._grad_mode)

    def ordinary(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments as the function may keep them for the backward pass, which tensors of inference mode may not be."""
        if self._inference is None:
            return args, kwargs
        leaves, spec = flatten((args, kwargs))
        return unflatten([_ordinary(leaf) for leaf in leaves], spec)


def _ordinary(leaf: Any) -> Any:
    """An ordinary tensor on the memory of one made in inference mode; what else it may be, as it is."""
    if not isinstance(leaf, Tensor) or not leaf.is_inference():
        return leaf
    if isinstance(leaf, Plane):
        alias = leaf.level.alias(leaf)
        alias.value = leaf.level.below(_ordinary, alias.value)
        return alias
    return leaf.new_empty(0).set_(leaf) if leaf.layout is torch.strided else leaf.clone()  # type: ignore[arg-type]


def tracked(x: Tensor, outer: bool) -> Tensor:
    """A fresh alias of `x` to differentiate with respect to. It keeps the history that `x` has outside."""
    alias = _tracked(x, outer)
    if standing.orders > 1 or standing.levels:  # of others, nobody asks
        note_leaf(alias)
    return alias


def _tracked(x: Tensor, outer: bool) -> Tensor:
    if x.is_inference():
        x = x.clone()
    here = current_level()
    if here is not None and not here.owns(x):
        # A leaf of this plane alone. Were the tensor of the plane below the leaf, all that is done with it would be
        # recorded there as well.
        leaf = here.adopt(x if outer or not recorded(x) else without_history(x)).requires_grad_()
        leaf.captured = True  # type: ignore[attr-defined]
        return leaf
    if recorded(x):
        if outer and x.is_nested:
            return x.clone()  # it has no view of its own shape
        return x.view_as(x) if outer else without_history(x).requires_grad_()
    if type(x) is BatchTensor and x.mapped:
        return x.level.alias(x).requires_grad_()
    if isinstance(x, Plane) or forward_level() >= 0:
        return x.view_as(x).requires_grad_()
    return without_history(x).requires_grad_()


def track(leaves: list, outer: bool, site: Site, argnums: int | tuple[int, ...] | None = None) -> list[Tensor]:
    """Aliases of the inputs to differentiate with respect to; the errors name the one that cannot be."""
    check_tensors(leaves, site, argnums)
    try:
        return [tracked(leaf, outer) for leaf in leaves]
    except RuntimeError:
        if peer_engine_active():
            raise refuse_peer(site if isinstance(site, str) else site[0]) from None
        check_differentiable(leaves, site, argnums)
        raise


def pull_back(
    outputs: list[Tensor],
    inputs: list[Tensor],
    cotangents: list[Tensor],
    outer: bool,
    *,
    create_graph: bool,
    retain_graph: bool = False,
) -> list[Tensor]:
    """Gradients of `outputs` with respect to `inputs`; zeros where an input was not used."""
    roots: tuple = ()
    seeds: tuple = ()
    for out, cotangent in zip(outputs, cotangents):
        if recorded(out):
            roots += (out,)
            seeds += (cotangent,)
    if not roots:
        return [torch.zeros_like(x) for x in inputs]
    # Some of torch's formulas (solve, det) take a way that cannot be differentiated again where grad mode is off.
    for_outside = not create_graph and differentiated_outside(roots)
    with pin_grad_mode(outer):
        grads = run_backward(
            roots,
            seeds,
            retain_graph or create_graph,
            create_graph or for_outside,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    if for_outside:
        grads = [g if g is None or not recorded(g) else without_history(g) for g in grads]
    if machine.boundaries:
        check_derivatives(grads)
    grads = [
        torch.zeros_like(x) if g is None else with_memory(completed(g)) for g, x in zip(grads, inputs, strict=True)
    ]
    return freed(grads, inputs) if create_graph else grads


def differentiated_outside(outputs: Sequence[Tensor]) -> bool:
    """Whether a tensor of this plane carries a tangent, or a history or tangents on a plane below."""
    if forward_level() >= 0:
        return True
    for x in outputs:
        while isinstance(x, Plane):
            if getattr(x, "tangent", None) is not None:
                return True
            x = x.value
            if recorded(x):
                return True
    return False


def one(value: Tensor) -> Tensor:
    """The cotangent 1 of a scalar. Each lane gets its own, so that all cotangents on a batch plane have lanes."""
    if type(value) is BatchTensor and value.mapped:
        level = value.level
        return level.wrap(level.below(torch.ones_like, level.here(value).value))
    return torch.ones_like(value)


def untrack(tree: Any, inputs: list[Tensor], outer: bool) -> Any:
    """Values that leave the transform: detached on this plane unless they have history of their own outside.

    Where grad mode is off outside they leave without history on any plane.
    """
    leaves, spec = flatten(tree)

    def free(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not outer:
            return leaf.detach() if tracked_on_any(leaf) else leaf
        if not recorded(leaf) or needs_graph([leaf], inputs):
            return leaf
        return without_history(leaf)

    return unflatten([free(leaf) for leaf in leaves], spec)


def free_below(x: Tensor, inputs: list[Tensor]) -> Tensor:
    """A gradient on a plane above that of `inputs`, where nobody but them was recorded: without that history."""
    if not isinstance(x, Plane) or recorded(x):
        return x
    value = x.value
    if recorded(value) and not needs_graph([value], inputs):
        x.value = without_history(value)
    return x
