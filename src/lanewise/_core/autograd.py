"""torch.autograd called inside a transformed function: where each gradient belongs.

Autograd on a plane knows what was recorded there. A tensor of a plane below that all lanes share (a captured parameter)
is on its graph too: `grad` gives it one gradient per lane, `.backward()` adds the sum over the lanes to its `.grad`, as
a loop over the lanes would. A lane of a tensor that is only tracked outside is not: it is asked for below.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.absent import left
from lanewise._core.batch import BatchLevel
from lanewise._core.graphs import lane_by_lane, node_of, order, through_arguments
from lanewise._core.joins import merge_tensors
from lanewise._core.lane_level import LaneLevel, completed
from lanewise._core.lanes import Lanes, OperationFailed, Target, machine
from lanewise._core.level import current_level, live_levels
from lanewise._core.plane import Plane, at_home, escaped, recorded, sync, tracked
from lanewise._torch_compat import (
    AccumulateGrad,
    apply_plainly,
    current_graph_task_id,
    enter_engine_through,
    is_grad_enabled,
    peer_engine_active,
    run_backward,
)
from lanewise.errors import TransformError, at_user_line


def enter_engine(outputs: Sequence[Any], cotangents: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.grad` and `backward` call: torch's engine, with a thought for the planes below."""
    level = top_level(outputs)
    here = current_level()
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
    found = []
    stack = [node_of(out) for out in outputs if not isinstance(out, Tensor) or recorded(out)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node) is AccumulateGrad:
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


class _Shown:
    """The `.grad` that a leaf of a plane below shows while a level is open: one for each lane.

    Attributes:
        leaf: The tensor that all lanes share.
        base: Its gradient before.
        added: The lanes' gradients, without the base.
        grad: What it shows, and the version of that.
    """

    __slots__ = ("leaf", "base", "added", "grad", "version")

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.base = leaf.grad
        self.added: Tensor | None = None
        self.grad: Tensor | None = None
        self.version = 0


# For each level with such leaves: the leaves by id.
_shown: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def accumulate_per_lane(
    level: BatchLevel, outputs: Sequence[Any], cotangents: Sequence[Any], args: tuple, kwargs: dict
) -> Any:
    """Run the graph of this plane. Until the level ends each lane sees its own gradient in `.grad` of a shared leaf."""
    nodes = [node for node in leaf_nodes(outputs) if order(node.variable) < level.order and node.variable is not _START]
    if not nodes:
        return run_backward(*_recorded_only(None, outputs, cotangents), *args, **kwargs)
    entries = _shown.get(level)
    if entries is None:
        entries = _shown[level] = {}
        level.closing = [*(level.closing or ()), lambda: _settle(level)]
    handles = []
    for node in nodes:
        leaf = node.variable
        entry = entries.get(id(leaf))
        if entry is None or leaf.grad is not entry.grad:
            entry = entries[id(leaf)] = _Shown(leaf)
            if entry.base is not None and not level.owns(entry.base):
                leaf.grad = level.adopt(level.below(torch.clone, entry.base))
        handles.append(node.register_prehook(_noting(level, entry)))
    try:
        return run_backward(*_recorded_only(None, outputs, cotangents), *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for entry in entries.values():
            if entry.added is None:
                entry.leaf.grad = entry.base
            else:
                entry.grad = entry.leaf.grad
                entry.version = 0 if entry.grad is None else entry.grad._version
        for key in [key for key, entry in entries.items() if entry.added is None]:
            del entries[key]


def gradient_before(leaf: Tensor) -> Tensor | None:
    """The gradient that a leaf from outside had before lanes of the innermost level that shows theirs added to it."""
    for level in reversed(live_levels()):
        entry = _shown.get(level, {}).get(id(leaf))
        if entry is not None:
            return entry.base
    return None


def _noting(level: BatchLevel, entry: _Shown) -> Any:
    def prehook(grads: tuple) -> tuple:
        shown = []
        for grad in grads:
            if grad is not None:
                grad = grad if isinstance(grad, Plane) and grad.level is level else level.adopt(grad)
                if isinstance(level, LaneLevel):
                    grad = _of_lanes(level, grad)
                entry.added = grad if entry.added is None else entry.added + grad
            shown.append(grad)
        return tuple(shown)

    return prehook


def _of_lanes(level: LaneLevel, cotangent: Any) -> Any:
    """A cotangent with lanes: of those that run, if it is the same in all of them."""
    if not level.mapped(cotangent):
        cotangent = cotangent + level.wrap(level.below(_no_change, cotangent, level.size))
    cotangent.cotangent = True
    return cotangent


def _no_change(like: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=like.dtype, device=like.device)


def shared_gradients(level: BatchLevel) -> list[tuple]:
    """What the shared leaves of a level show now: leaf, the lanes' gradients, `.grad`, whether others have set that."""
    found: list[tuple] = []
    if not _shown:
        return found
    for entry in _shown.get(level, {}).values():
        shown = entry.leaf.grad
        touched = shown is None or shown is not entry.grad or shown._version != entry.version
        with at_home(shown):
            found.append((entry.leaf, entry.added, None if shown is None else shown.clone(), touched))
    return found


def show_gradients(level: BatchLevel, state: list[tuple]) -> None:
    """Go back to what `shared_gradients` found, or on to what such were merged to."""
    entries = _shown.get(level)
    if entries is None:
        return
    for entry in entries.values():
        entry.leaf.grad = entry.base
    entries.clear()
    for leaf, added, shown, touched in state:
        entry = entries[id(leaf)] = _Shown(leaf)
        entry.added = added
        if shown is not None:
            with at_home(shown):
                leaf.grad = shown.clone()
        if not touched:
            entry.grad, entry.version = leaf.grad, leaf.grad._version  # type: ignore[union-attr]


def merge_gradients(level: LaneLevel, target: Target, pieces: list[Lanes], states: list[list[tuple]]) -> None:
    """Shared leaves show in each lane what they showed in its piece, zeros where nothing was added."""
    leaves = {id(leaf): leaf for state in states for leaf, *_ in state}
    if not leaves:
        return
    merged = []
    for key, leaf in leaves.items():
        found = [next((entry for entry in state if id(entry[0]) == key), None) for state in states]
        zeros = level.below(torch.zeros_like, leaf.detach())
        added, shown = [
            merge_tensors(level, target, pieces, [zeros if e is None or e[place] is None else e[place] for e in found])
            for place in (1, 2)
        ]
        merged.append((leaf, added, shown, any(entry is not None and entry[3] for entry in found)))
    show_gradients(level, merged)


def _settle(level: BatchLevel) -> None:
    """The level ends: what its shared leaves show becomes one gradient again, the sum over the lanes.

    Where its `vmap` is about to start again, or one around it, they show what they did before.
    """
    if any(raised is not OperationFailed and owner.order <= level.order for raised, owner, *_ in machine.raised):
        show_gradients(level, [])
    for entry in _shown.pop(level).values():
        leaf, shown = entry.leaf, entry.leaf.grad
        place = order(leaf)
        if shown is None or not level.owns(shown):
            continue
        untouched = shown is entry.grad and shown._version == entry.version
        if untouched and not (entry.base is not None and level.owns(entry.base)):
            leaf.grad, total = entry.base, _over_lanes(level, entry.added)
        elif entry.base is None or level.owns(entry.base):
            leaf.grad, total = None, _over_lanes(level, shown)
        else:
            leaf.grad, total = None, _over_lanes(level, shown) - entry.base * (level.size - 1)
        if order(total) > place:
            _show_on(total.level, leaf, total)
        elif leaf.grad is None:
            leaf.grad = total
        elif leaf.grad.requires_grad or total.requires_grad:
            leaf.grad = leaf.grad + total
        else:
            leaf.grad.add_(total)


def _show_on(level: Any, leaf: Tensor, total: Any) -> None:
    """The sum over the lanes of an inner level, shown on the level around it."""
    entries = _shown.get(level)
    if entries is None:
        entries = _shown[level] = {}
        level.closing = [*(level.closing or ()), lambda: _settle(level)]
    entry = entries.get(id(leaf))
    if entry is None or leaf.grad is not entry.grad:
        entry = entries[id(leaf)] = _Shown(leaf)
    entry.added = total if entry.added is None else entry.added + total
    leaf.grad = entry.grad = total if leaf.grad is None else leaf.grad + total
    entry.version = entry.grad._version


def _over_lanes(level: BatchLevel, grad: Any) -> Any:
    if level.mapped(grad):
        return level.below(torch.sum, left(level, grad.value), 0)
    return level.below(torch.mul, grad.value, level.size)


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
    if tensor._is_view():
        tensor.requires_grad_()
    else:
        apply_plainly(_Begin, tensor, _START)


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
