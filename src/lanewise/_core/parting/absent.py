"""Lanes without a cotangent, in a backward pass around a `vmap` whose lanes part.

There, autograd records whole rows of lanes on the plane below. What some lanes leave unused has a cotangent of zeros in
their rows, and zero times an infinite derivative is no number. So where an operation has one, it is recorded as a
Function that goes back on the rows of those lanes alone that have a cotangent.

Which these are, the graph says: where rows are taken for other lanes, or put together, its nodes bear a note (in
autograd's `metadata`, which lives as long as the node). When a pass comes to a result of the `vmap`, it is followed
from there to the Functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.batch import BatchLevel
from lanewise._core.functions.formulas import pulled
from lanewise._core.level import on_plane
from lanewise._core.parting.lanes import Lanes, true_places
from lanewise._core.parting.leaks import expect_notes
from lanewise._core.parting.steep import steep
from lanewise._core.plane import detached, numbers_of, own_node, recorded, replace_tensors
from lanewise._torch_compat import (
    BATCHED_KEY,
    AccumulateGrad,
    apply_plainly,
    current_graph_task_id,
    dispatch_keys_of,
    forward_level,
    is_grad_enabled,
    next_node_number,
    node_number,
    saved_tensor_hooks,
)

_KEY = "lanewise"

# Which lanes have a cotangent: a set of lanes and for each whether it has one, or None for all.
Present = tuple[Lanes, Tensor] | None


# Stands for a tensor in the arguments of an operation that is to run again.
_HOLE = torch.empty(0)


# --- operations ------------------------------------------------------------------------------------------------------


def on_present_rows(level: Any, run: Any, args: tuple, out: Any, begun: int) -> Any:
    """What an operation gives on the plane below, of `[n, *S]`, recorded anew where a derivative is not finite.

    Args:
        level: The level whose lanes `level.lanes` have the rows.
        run: The operation, or a rule.
        args: Of a rule, `(level, args, kwargs)`; else the values below, of which those with lanes have the most dims.
        out: The result, or several, as they were recorded.
        begun: The number of the first node of that.
    """
    if level.has_absent is None or forward_level() >= 0 or saved_tensor_hooks() is not None:
        return out
    several = type(out) in (tuple, list)
    places = [
        k
        for k, each in enumerate(out if several else (out,))
        if isinstance(each, Tensor) and own_node(each) is not None
    ]
    outs = [out[k] for k in places] if several else [out][: len(places)]
    with on_plane(None):
        if not any(steep(each, begun) for each in outs):
            return out
    by_rule = bool(args) and args[0] is level
    positional, named = args[1:] if by_rule else (args, {})
    tensors: list[Tensor] = []
    mapped: list[bool] = []

    def take(tensor: Tensor) -> Tensor:
        tensors.append(level.physical(tensor))
        mapped.append(level.mapped(tensor))
        return _HOLE

    holes = replace_tensors(take, positional, named)
    if not by_rule:
        rank = max(tensor.dim() for tensor in tensors)
        mapped = [tensor.dim() == rank for tensor in tensors]
    bases = [tensor._base if tensor._is_view() else tensor for tensor in tensors]
    if any(each._is_view() and any(each._base is base for base in bases) for each in outs):
        return out  # writes to it are to reach what it is a view of
    expect_notes(level)
    operation = (level.lanes, run, holes if by_rule else holes[0], mapped, by_rule, places if several else None)
    anew = level.below(_anew, operation, outs, tensors)
    if not several:
        return anew[0]
    replaced = dict(zip(places, anew))
    return type(out)([replaced.get(k, each) for k, each in enumerate(out)])


def _anew(operation: tuple, outs: list[Tensor], tensors: list[Tensor]) -> tuple:
    # Copies: what torch's formula does not need may be written to.
    return apply_plainly(_OfPresent, operation, len(outs), *outs, *[tensor.clone() for tensor in tensors])


class _OfPresent(Function):
    """An operation on rows of lanes that goes back on those with a cotangent alone."""

    @staticmethod
    def forward(ctx: Any, operation: tuple, count: int, *tensors: Tensor) -> tuple:  # type: ignore[override]
        ctx.operation = operation
        ctx.save_for_backward(*tensors[count:])
        ctx.set_materialize_grads(False)  # a cotangent of zeros is another one than none
        ctx.count = count
        # What was found in the pass of that number, and in all passes that were recorded.
        ctx.task, ctx.found, ctx.recorded = -1, (), ()
        return tuple(map(detached, tensors[:count]))

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple:  # type: ignore[override]
        lanes, run, holes, mapped, by_rule, places = ctx.operation
        used = [k for k, cotangent in enumerate(given) if cotangent is not None]
        cotangents = tuple([cotangent for cotangent in given if cotangent is not None])
        if not used:
            return None, None, *[None] * (ctx.count + len(mapped))
        found = (*(ctx.found if ctx.task == current_graph_task_id() else ()), *ctx.recorded)
        rows = _rows(lanes, found)
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2 + ctx.count :]
        if rows is not None:
            rows = rows.to(cotangents[0].device)
            tensors = [t.index_select(0, rows) if own else t for t, own in zip(tensors, mapped)]
            cotangents = tuple([cotangent.index_select(0, rows) for cotangent in cotangents])
        size = cotangents[0].shape[0]

        def formula(*found: Tensor) -> tuple:
            values = iter(found)
            operands = [next(values) if need else tensor for tensor, need in zip(tensors, needed)]
            out = (_by_rule if by_rule else _by_values)(run, holes, operands, mapped, size)
            return (out,) if places is None else tuple([out[places[k]] for k in used])

        inputs = tuple([tensor for tensor, need in zip(tensors, needed) if need])
        grads: list[Tensor | None] = [None] * len(tensors)
        for place, grad in zip(
            [place for place, need in enumerate(needed) if need], pulled(formula, inputs, cotangents)
        ):
            grads[place] = (
                grad if grad is None or rows is None or not mapped[place] else _spread(grad, rows, lanes.size)
            )
        return None, None, *[None] * ctx.count, *grads


def _by_values(run: Any, holes: tuple, tensors: Sequence[Tensor], mapped: list[bool], size: int) -> Any:
    given = iter(tensors)
    return run(*replace_tensors(lambda _: next(given), holes, {})[0])


def _by_rule(run: Any, holes: tuple, tensors: Sequence[Tensor], mapped: list[bool], size: int) -> Any:
    given = iter(zip(tensors, mapped))
    with BatchLevel(size) as level:

        def enter(_: Tensor) -> Tensor:
            tensor, own = next(given)
            return level.wrap(tensor) if own else tensor

        return level.below(run, level, *replace_tensors(enter, *holes))


def _spread(rows: Tensor, places: Tensor, size: int) -> Tensor:
    return rows.new_zeros((size, *rows.shape[1:])).index_copy(0, places, rows)


def _rows(lanes: Lanes, found: Sequence[Present]) -> Tensor | None:
    """The rows that have a cotangent, None for all."""
    if not found or any(present is None or present[0] is not lanes for present in found):
        return None
    with on_plane(None):
        mask = torch.stack([present[1] for present in found if present is not None]).any(0)
        return None if bool(mask.all()) else true_places(mask)


# --- what lanes share ------------------------------------------------------------------------------------------------


def computed_once(level: Any, run: Any, *args: Any) -> Any:
    """What an operation gives on the plane below that is the same in all lanes that run, called as `below` is.

    Where its derivative is not finite, and none of the lanes that go on with it has a cotangent, it has none.
    """
    begun = next_node_number()
    out = level.below(run, *args)
    if level.has_absent is None or forward_level() >= 0 or saved_tensor_hooks() is not None:
        return out
    if not isinstance(out, Tensor):
        if type(out) in (tuple, list) and any(isinstance(each, Tensor) and recorded(each) for each in out):
            return type(out)([_if_present(level, each, begun) for each in out])
        return out
    return _if_present(level, out, begun) if recorded(out) else out


def _if_present(level: Any, out: Any, begun: int) -> Any:
    node = own_node(out) if isinstance(out, Tensor) and recorded(out) and not out._is_view() else None
    if node is None or node_number(node) < begun:
        return out
    with on_plane(None):
        if not steep(out, begun):
            return out
    expect_notes(level)
    return level.below(apply_plainly, _IfPresent, out)


class _IfPresent(Function):
    """A value that lanes share, with a cotangent if one of them has one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.task, ctx.found, ctx.recorded = -1, (), ()
        return detached(value)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Tensor | None:  # type: ignore[override]
        if cotangent is None:
            return None
        found = (*(ctx.found if ctx.task == current_graph_task_id() else ()), *ctx.recorded)
        if not found or any(present is None or bool(present[1].any()) for present in found):
            return cotangent
        # One that is not zero has come by a way that was not followed. (Of many at once, nothing can be asked.)
        if dispatch_keys_of(cotangent).has(BATCHED_KEY):
            return cotangent
        with on_plane(None):
            return cotangent if bool(numbers_of(cotangent).any()) else None


# --- notes on the graph ----------------------------------------------------------------------------------------------

# The nodes of operations with two operands.
_NODES = {"choice": "WhereBackward0", "written": "IndexCopyBackward0", "written in part": "CopySlices"}


def note(level: Any, value: Any, kind: str, *parts: Any) -> None:
    """Say on the node of a value below what rows its operation takes, where somebody will ask.

    Kinds, with their parts:
        rows: Lanes of the result, lanes of the operand, places of the first among the second.
        spread: Lanes of the result, lanes of the operand, places of the second among the first; other rows are zero.
        choice: Lanes, and a mask of those that have the first operand's row, others the second's.
        pieces: Lanes of the result, and of the operands it is put together from, one after the other.
        written: Lanes of the result, lanes whose rows were written, their places in the result. (Of a view: on the node
            of what it is a view of, "written in part".)
        pairs: Lanes around, pairs of them with those of a `vmap` inside, of which the operand is.
    """
    if level.has_absent and recorded(value) and own_node(value) is not None:
        node = own_node(value)
        if kind == "written" and value._is_view():
            kind, node = "written in part", own_node(value._base)
        if type(node).__name__ == _NODES.get(kind, type(node).__name__):
            node.metadata[_KEY] = (kind, *parts)


def note_together(level: Any, value: Any, lanes: Lanes, pieces: list[Lanes], order: Tensor) -> None:
    """Say so of rows `[n, *S]` that were put one after the other, and then in order."""
    if level.has_absent and recorded(value) and own_node(value) is not None:
        whole = Lanes(None, None, sum(piece.size for piece in pieces))
        note(level, value, "rows", lanes, whole, order)
        own_node(value).next_functions[0][0].metadata[_KEY] = ("pieces", whole, pieces)


def _passed(noted: tuple | None, present: Present, count: int) -> list[Present]:
    """Which lanes of the operands of a node have a cotangent, as the lanes of its result do."""
    if noted is None:
        return [present] * count
    kind, lanes, *parts = noted
    has = torch.ones(lanes.size, dtype=torch.bool) if present is None or present[0] is not lanes else present[1]
    if kind == "rows":
        operand, places = parts
        mask = torch.zeros(operand.size, dtype=torch.bool)
        mask[places[has].cpu()] = True
        return [(operand, mask)] * count
    if kind == "spread":
        operand, places = parts
        return [(operand, has[places.cpu()])] * count
    if kind == "choice":
        mask = parts[0].cpu()
        return [(lanes, has & mask), (lanes, has & ~mask)]
    if kind == "pieces":
        return list(zip(parts[0], has.split([piece.size for piece in parts[0]])))
    if kind.startswith("written"):
        source, places = parts
        places = places.cpu()
        rest = has if kind == "written in part" else has.index_fill(0, places, False)
        return [(lanes, rest), (source, has[places])]
    pairs: Lanes = parts[0]
    return [(pairs, has[pairs.index.cpu()])] * count


# The nodes that ask which lanes have a cotangent.
_TOLD = (_OfPresent._backward_cls, _IfPresent._backward_cls)  # type: ignore[attr-defined]


# --- passes ----------------------------------------------------------------------------------------------------------


def left(level: Any, value: Tensor) -> Tensor:
    """A result `[B, *S]` on the plane below; where a pass comes to it, lanes with a cotangent are found from there.

    Whatever leaves a level with its history is to leave by here: lanes not found are without a cotangent.
    """
    if not level.has_absent or not recorded(value):
        return value
    # A node of its own, which holds those below it and which none of them holds.
    value = level.below(_alias, value)
    node: Any = own_node(value)
    following = [node for node, _ in node.next_functions]
    begun = level.begun
    node.register_prehook(lambda cotangents: _follow(following, begun))
    return value


def _alias(value: Tensor) -> Tensor:
    with torch.enable_grad():
        return value.view_as(value)


def _follow(nodes: list, begun: int) -> None:
    """Tell the Functions that a graph leads to from some nodes which lanes have a cotangent."""
    with on_plane(None):
        present: dict[Any, Present] = dict.fromkeys(nodes)
        for node in _in_order(nodes, begun):
            of_node = present[node]
            if isinstance(node, _TOLD):
                _tell(node, of_node)
            edges = node.next_functions
            passed = _passed(node.metadata.get(_KEY), of_node, len(edges))
            for (following, _), of_following in zip(edges, passed):
                if following is not None:
                    before = present.get(following, _UNKNOWN)
                    present[following] = of_following if before is _UNKNOWN else _either(before, of_following)


_UNKNOWN: Any = object()


def _tell(node: Any, present: Present) -> None:
    task = current_graph_task_id()
    if node.task != task:
        node.task, node.found = task, ()
    node.found = (*node.found, present)
    if is_grad_enabled():
        node.recorded = (*node.recorded, present)


def _either(a: Present, b: Present) -> Present:
    if a is b:
        return a
    if a is None or b is None:
        return None
    if a[0] is b[0]:
        return a[0], a[1] | b[1]
    if not bool(a[1].any()):
        return b
    return None if bool(b[1].any()) else a


def _in_order(nodes: list, begun: int) -> list:
    """The nodes from number `begun` on that a graph leads to, each after all that lead to it."""
    done: list = []
    seen: set = set()
    stack = [(node, False) for node in nodes]
    while stack:
        node, left_again = stack.pop()
        if left_again:
            done.append(node)
            continue
        if node is None or node in seen or type(node) is AccumulateGrad or node_number(node) < begun:
            continue
        seen.add(node)
        stack.append((node, True))
        stack += [(following, False) for following, _ in node.next_functions]
    return done[::-1]
