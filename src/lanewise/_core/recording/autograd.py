"""torch.autograd called inside a transformed function: where each gradient belongs.

Autograd on a plane knows what was recorded there. A tensor of a plane below that all lanes share (a captured parameter)
is on its graph too: `grad` gives it one gradient per lane, `.backward()` adds the sum over the lanes to its `.grad`, as
a loop over the lanes would. A lane of a tensor that is only tracked outside is not: it is asked for below.
"""

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.batch import BatchLevel
from lanewise._core.level import current_level, note_autograd
from lanewise._core.parting.absent import left
from lanewise._core.parting.lane_level import completed
from lanewise._core.plane import Plane, escaped, own_node, recorded, sync, tracked
from lanewise._core.recording.graphs import lane_by_lane, node_of, order, reached, through_arguments
from lanewise._core.recording.leaf_gradients import showing
from lanewise._core.recording.passes import run_backward
from lanewise._torch_compat import (
    AUTOGRAD_KEY,
    AccumulateGrad,
    apply_plainly,
    current_graph_task_id,
    enter_engine_through,
    is_grad_enabled,
    peer_engine_active,
    tls_is_excluded,
)
from lanewise.errors import TransformError, at_user_line


def enter_engine(outputs: Sequence[Any], cotangents: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.grad` and `backward` call: torch's engine, with a thought for the planes below."""
    level = top_level(outputs)
    here = current_level()
    if here is not None and here.watching:
        here.note_within()
    if level is None and here is not None and peer_engine_active():
        return run_backward(outputs, cotangents, *args, **kwargs)  # wrappers of torch.func
    if here is not None and (level is None or level.order < here.order):
        below = [_standing(here, cotangent) for cotangent in cotangents]
        if all(order(cotangent) < here.order for cotangent in below):
            # A graph of a plane below: its gradients are no tensors made here.
            return here.below(functools.partial(enter_engine, outputs, tuple(below), *args, **kwargs))
    if level is None:
        return run_backward(outputs, cotangents, *args, **kwargs)
    if not level.alive and current_graph_task_id() == -1:
        kept = tuple([_standing(level, out) for out in outputs])
        if top_level(kept) is level:
            raise escaped(level, "backward")
        return enter_engine(kept, cotangents, *args, **kwargs)
    retain_graph, create_graph, inputs = args[:3]
    if kwargs.get("accumulate_grad"):
        if inputs and isinstance(level, BatchLevel) and level.alive:
            return accumulate_per_lane(level, outputs, cotangents, args, kwargs)
        if inputs:
            return _with_lane_sums(level, outputs, cotangents, args, kwargs)
        return _accumulate(level, outputs, cotangents, args, kwargs)
    if not inputs or all(recorded(x) or not tracked(x) for x in inputs if isinstance(x, Tensor)):
        if inputs and isinstance(level, BatchLevel) and level.alive and through_arguments(level, outputs, inputs):
            pairs = _pairs_below(level, outputs, cotangents)
            return lane_by_lane(level, pairs, outputs, cotangents, inputs, args, kwargs)
        return tuple(map(completed, run_backward(outputs, cotangents, *args, **kwargs)))
    return _gradients(level, outputs, cotangents, retain_graph, create_graph, inputs, args[3:], kwargs)


def _standing(level: Any, tensor: Any) -> Any:
    """The tensor of the plane below that stands for a tensor, where one does."""
    if not level.owns(tensor):
        return tensor
    sync(tensor)
    return tensor if level.lifted(tensor) else tensor.value


# --- backward --------------------------------------------------------------------------------------------------------


def _accumulate(level: Any, outputs: Sequence[Any], cotangents: Sequence[Any], args: tuple, kwargs: dict) -> Any:
    """`.grad` of every leaf, on this plane by its own graph, on planes below by theirs."""
    retain_graph, create_graph = args[:2]
    pairs = _pairs_below(level, outputs, cotangents)
    below = frozenset([id(node.variable) for node in leaf_nodes([out for out, _ in pairs])])
    leaves = [node.variable for node in leaf_nodes(outputs)]
    if isinstance(level, BatchLevel) and level.alive and below.issubset(map(id, leaves)):
        if not through_arguments(level, outputs, [leaf for leaf in leaves if id(leaf) in below]):
            return accumulate_per_lane(level, outputs, cotangents, args, kwargs)
    here = tuple([leaf for leaf in leaves if id(leaf) not in below and leaf is not _START])
    if here:
        # Naming the inputs is left out where all are meant: a reentrant checkpoint refuses it.
        inputs = () if not below.intersection(map(id, leaves)) else here
        _with_lane_sums(level, outputs, cotangents, (retain_graph, create_graph, inputs, *args[3:]), kwargs)
    elif level in retaining and leaves:
        outs, cots = _recorded_only(level, outputs, cotangents)
        run_backward(outs, cots, True, create_graph, tuple(leaves), allow_unreachable=True, accumulate_grad=False)
    if pairs:
        level.below(
            torch.autograd.backward, [out for out, _ in pairs], [cot for _, cot in pairs], retain_graph, create_graph
        )
    return ()


# The levels on which `retain_grad` was called; elsewhere a graph without leaves of its own need not run.
retaining: weakref.WeakSet = weakref.WeakSet()


def _with_lane_sums(level: Any, outputs: Sequence[Any], cotangents: Sequence[Any], args: tuple, kwargs: dict) -> Any:
    """Run the graph of this plane; leaves of planes below get the sum over the lanes."""
    handles = [
        node.register_prehook(_before_leaf(node.variable))
        for node in leaf_nodes(outputs)
        if order(node.variable) < level.order
    ]
    try:
        outputs, cotangents = _recorded_only(level, outputs, cotangents)
        return run_backward(outputs, cotangents, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _before_leaf(variable: Tensor) -> Any:
    place = order(variable)

    def prehook(grads: tuple) -> tuple:
        return tuple([None if grad is None else reduce_to_plane(grad, place) for grad in grads])

    return prehook


def reduce_to_plane(grad: Tensor, place: int) -> Tensor:
    """A gradient summed over the lanes of all planes above `place`."""
    while order(grad) > place:
        assert isinstance(grad, Plane)
        level = grad.level
        if not isinstance(level, BatchLevel):
            grad = level.primal(grad)
        elif level.mapped(grad):
            grad = level.below(torch.sum, left(level, grad.value), 0)
        else:
            grad = level.below(torch.mul, grad.value, level.size)
    return grad


def leaf_nodes(outputs: Sequence[Any]) -> list[Any]:
    """The nodes of the graph that add to the `.grad` of a leaf."""
    roots = [node_of(out) for out in outputs if not isinstance(out, Tensor) or recorded(out)]
    return [node for node in reached(roots) if type(node) is AccumulateGrad]


def accumulate_per_lane(
    level: BatchLevel, outputs: Sequence[Any], cotangents: Sequence[Any], args: tuple, kwargs: dict
) -> Any:
    """Run the graph of this plane. Until the level ends each lane sees its own gradient in `.grad` of a shared leaf."""
    nodes = [node for node in leaf_nodes(outputs) if order(node.variable) < level.order and node.variable is not _START]
    kept = _recorded_only(None, outputs, cotangents)
    with showing(level, nodes) if nodes else nullcontext():
        return run_backward(*kept, *args, **kwargs)


# --- gradients in tensors that are tracked below only ----------------------------------------------------------------


def _gradients(
    level: Any,
    outputs: Sequence[Any],
    cotangents: Sequence[Any],
    retain_graph: Any,
    create_graph: bool,
    inputs: Sequence[Any],
    rest: tuple,
    kwargs: dict,
) -> tuple:
    """Each lane depends on its own lane of a mapped input only, so the plane below has the same gradients."""
    late = [i for i, x in enumerate(inputs) if isinstance(x, Plane) and not recorded(x) and tracked(x)]
    pairs = _pairs_below(level, outputs, cotangents)
    # Whoever differentiates the result on this plane must find there all that it depends on.
    differentiated = create_graph and (leaf_nodes(outputs) or any(recorded(c) for c in cotangents if c is not None))
    if not pairs or differentiated or not all(isinstance(level, BatchLevel) and level.mapped(inputs[i]) for i in late):
        raise TransformError(
            at_user_line(
                f"torch.autograd.grad: One of the differentiated Tensors does not require grad on this plane, "
                f"{level!r}: input {late[0]} is tracked only outside the function",
                "x = x.requires_grad_()  # first thing in the function",
            )
        )
    early = [i for i in range(len(inputs)) if i not in late]
    found: list[Any] = [None] * len(inputs)
    below = level.below(
        lambda: torch.autograd.grad(
            [out for out, _ in pairs],
            [inputs[i].value for i in late],
            [cotangent for _, cotangent in pairs],
            retain_graph,
            create_graph,
            allow_unused=rest[0] if rest else kwargs.get("allow_unreachable"),
        )
    )
    for i, gradient in zip(late, below, strict=True):
        found[i] = None if gradient is None else level.wrap(gradient)
    if early:
        outputs, cotangents = _recorded_only(level, outputs, cotangents)
        chosen = tuple([inputs[i] for i in early])
        got = run_backward(outputs, cotangents, retain_graph, create_graph, chosen, *rest, **kwargs)
        for i, gradient in zip(early, got, strict=True):
            found[i] = gradient
    return tuple(found)


def _pairs_below(level: Any, outputs: Sequence[Any], cotangents: Sequence[Any]) -> list[tuple[Tensor, Any]]:
    """Outputs and cotangents on the plane below, where it recorded any; none where a cotangent is of a plane above."""
    pairs = []
    for out, cotangent in zip(outputs, cotangents, strict=True):
        if not isinstance(out, Tensor) or (cotangent is not None and order(cotangent) > level.order):
            return []
        if isinstance(level, BatchLevel):
            cotangent = torch.ones_like(out) if cotangent is None else cotangent
            if level.mapped(out):
                cotangent = level.below(level.expanded, cotangent)
            elif level.mapped(cotangent):
                cotangent = level.below(torch.sum, cotangent.value, 0)
            else:
                cotangent = level.below(torch.mul, level.physical(cotangent), level.size)
            out = level.physical(out)
        else:
            out = level.primal(out)
            cotangent = None if cotangent is None else level.primal(cotangent)
        if tracked(out):
            pairs.append((out, cotangent))
    return pairs


def _recorded_only(level: Any, outputs: Sequence[Any], cotangents: Sequence[Any]) -> tuple[tuple, tuple]:
    """The outputs that autograd recorded, all of them if it recorded none (torch then says so).

    An output that is the same for all lanes counts once for each.
    """
    kept = []
    for out, cotangent in zip(outputs, cotangents, strict=True):
        if isinstance(out, Tensor) and not recorded(out):
            continue
        if isinstance(level, BatchLevel) and order(out) < level.order and cotangent is not None:
            cotangent = cotangent * level.size
        kept.append((out, cotangent))
    if not kept:
        return tuple(outputs), tuple(cotangents)
    return tuple([out for out, _ in kept]), tuple([cot for _, cot in kept])


def top_level(tensors: Sequence[Any]) -> Any:
    """The level of the highest wrapper, None if there is none."""
    level = None
    for tensor in tensors:
        if isinstance(tensor, Plane) and (level is None or tensor.level.order > level.order):
            level = tensor.level
    return level


class _Begin(Function):
    """Puts a tensor that is tracked below on the graph of its own plane, as no leaf and without an operation."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, start: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return None, None


_START = torch.empty(0, requires_grad=True)


def begin_history(tensor: Any) -> None:
    """Record a tensor on its own plane from here on; it is tracked on one below, and somebody asks."""
    if not is_grad_enabled() or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    note_autograd()
    base = tensor._base
    if base is None:
        apply_plainly(_Begin, tensor, _START)
    elif (
        isinstance(base, Plane)
        and base.level is tensor.level
        and tracked(base)
        and not tls_is_excluded(AUTOGRAD_KEY)  # (a rule has asked)
    ):
        apply_plainly(_Begin, base, _START)
        own_node(tensor)  # written down now: a write to it asks before autograd has looked
    else:
        tensor.requires_grad_()


# --- many cotangents at once -----------------------------------------------------------------------------------------

_grad = torch.autograd.grad


@functools.wraps(_grad)
def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`; with `is_grads_batched` on wrappers, the cotangents are lanes of a level of their own."""
    outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    if not kwargs.get("is_grads_batched") or top_level(outs) is None:
        return _grad(outputs, inputs, grad_outputs, *args, **kwargs)
    rows = (grad_outputs,) if isinstance(grad_outputs, Tensor) else tuple(grad_outputs)
    size = next(row.shape[0] for row in rows if row is not None)
    with BatchLevel(size) as level:
        cotangents = [None if row is None else level.wrap(row) for row in rows]
        found = _grad(outs, inputs, cotangents, *args, **{**kwargs, "is_grads_batched": False})
        return tuple([None if g is None else level.below(level.expanded, g) for g in found])


torch.autograd.grad = grad
enter_engine_through(enter_engine)
