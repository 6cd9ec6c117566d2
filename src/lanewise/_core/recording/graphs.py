"""Paths of autograd's graphs that the graph of a plane does not show: through a mapped argument, to what it came from.

The graph of a batch plane begins with the arguments of the mapped function. Where one of them was computed outside from
a tensor that the function also captures, the graph of the plane below goes on to that tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import standing
from lanewise._core.plane import Plane, own_node, recorded, without_history
from lanewise._torch_compat import AccumulateGrad, node_number
from lanewise.errors import TransformError, at_user_line


def order(tensor: Any) -> int:
    """Position of the tensor's plane; plain tensors come first."""
    return tensor.level.order if isinstance(tensor, Plane) else 0


def node_of(out: Any) -> Any:
    """The node of the graph that a tensor, or an edge of the graph, comes from."""
    return torch.autograd.graph.get_gradient_edge(out).node if isinstance(out, Tensor) else out.node


def through_arguments(level: BatchLevel, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether an input of a plane below is reached through a mapped argument that was computed from it outside.

    Such paths lead over nodes that were there before the level opened and that this plane's graph does not reach.
    """
    targets = {node_of(x) for x in inputs if isinstance(x, Tensor) and order(x) < level.order and recorded(x)}
    if not targets:
        return False
    outs = [out for out in outputs if isinstance(out, Tensor)]
    values = [level.physical(out) for out in outs]
    of_inside = reached([node_of(v) for v in values if recorded(v)], lambda node: node_number(node) >= level.begun)
    older = [node for node in of_inside if node_number(node) < level.begun]
    if not older:
        return False
    known = reached([node_of(out) for out in outs if recorded(out)])
    arguments = [node for node in older if node not in known]
    return not targets.isdisjoint(reached(arguments))


def reached(nodes: list, go_on: Callable[[Any], bool] | None = None) -> dict[Any, None]:
    """The nodes that a graph leads to from some, in order; on from those only of which `go_on` is true."""
    seen, stack = dict.fromkeys(nodes), list(nodes)
    while stack:
        node = stack.pop()
        if go_on is not None and not go_on(node):
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                stack.append(following)
    return seen


def note_leaf(leaf: Tensor) -> None:
    """A transform has made a tensor to differentiate with respect to."""
    leaf._lanewise_order = standing.orders  # type: ignore[attr-defined]


def needs_graph(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether anything besides `inputs` was recorded, so that somebody outside may differentiate the result.

    An input that is not a leaf has a history of its own. Otherwise the recorded graph is walked to its leaves; those of
    transforms inside this one, which have ended, are nobody's.
    """
    for x in inputs:
        if not x.is_leaf:
            return True
    known = set(map(id, inputs))
    return _finds(outputs, lambda leaf: _is_outside(leaf, known))


def hangs_on_made(outputs: Sequence[Tensor]) -> bool:
    """Whether a leaf of a plane was recorded that is no transform's, such as `nn.Parameter(...)` made inside."""
    return _finds(outputs, lambda leaf: isinstance(leaf, Plane) and not hasattr(leaf, "_lanewise_order"))


def _finds(outputs: Sequence[Tensor], wanted: Callable[[Tensor], bool]) -> bool:
    """Whether a leaf of what was recorded is one of these."""
    stack = [node for out in outputs if (node := own_node(out)) is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node) is AccumulateGrad:
            if wanted(node.variable):  # type: ignore[attr-defined]
                return True
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def _is_outside(leaf: Tensor, known: set[int]) -> bool:
    """Whether a leaf is neither one of these nor of a transform inside this one."""
    return id(leaf) not in known and getattr(leaf, "_lanewise_order", 0) <= standing.orders


def freed(gradients: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with respect to `inputs`, without histories that lead to nothing else, which nobody can ask for.

    That of `x.relu()` is computed from the result, and so has a history; that of `x * y` has one that leads to x where
    only x is differentiated.
    """
    for x in inputs:
        if not x.is_leaf:
            return gradients
    known = set(map(id, inputs))
    ours: set[Any] = set()
    outside: set[Any] = set()
    return [
        g if (node := own_node(g)) is None or _leads_outside(node, known, ours, outside) else without_history(g)
        for g in gradients
    ]


def _leads_outside(root: Any, known: set[int], ours: set[Any], outside: set[Any]) -> bool:
    """Whether a node leads to a leaf outside. What is found of nodes on the way is added to the last two."""
    if root in ours or root in outside:
        return root in outside
    path = [(root, iter(root.next_functions))]
    while path:
        node, edges = path[-1]
        for following, _ in edges:
            if following is None or following in ours:
                continue
            if following in outside or (type(following) is AccumulateGrad and _is_outside(following.variable, known)):
                outside.update(step for step, _ in path)
                return True
            path.append((following, iter(following.next_functions)))
            break
        else:
            ours.add(node)
            path.pop()
    return False


def lane_by_lane(
    level: BatchLevel,
    pairs: list[tuple[Tensor, Any]],
    outputs: Sequence[Any],
    cotangents: Sequence[Any],
    inputs: Sequence[Any],
    args: tuple,
    kwargs: dict,
) -> tuple:
    """Each lane's gradient in tensors of planes below, by the graph of the plane below: as many passes as lanes."""
    retain_graph, create_graph, _, *rest = args
    here = any(order(x) >= level.order for x in inputs) or not all(level.mapped(out) for out in outputs)
    if here or not pairs or (create_graph and any(cot is not None and recorded(cot) for cot in cotangents)):
        raise TransformError(
            at_user_line(
                "torch.autograd.grad: an argument of the mapped function was itself computed, outside, from a tensor "
                "whose gradient is asked for. That is possible where all outputs have lanes, all inputs are tensors "
                "from outside, and the cotangents need no gradient themselves",
                "torch.autograd.grad(out, outside, retain_graph=True)  # one call for the tensors from outside\n"
                "torch.autograd.grad(out, inside)                      # and one for those of the function",
            )
        )

    def below() -> tuple:
        with BatchLevel(level.size) as rows:
            found = torch.autograd.grad(
                [out for out, _ in pairs],
                list(inputs),
                [rows.wrap(rows.below(_own_lane, cotangent)) for _, cotangent in pairs],
                retain_graph,
                create_graph,
                allow_unused=rest[0] if rest else kwargs.get("allow_unreachable"),
            )
            return tuple([None if g is None else rows.below(rows.expanded, g) for g in found])

    return tuple([None if gradient is None else level.wrap(gradient) for gradient in level.below(below)])


def _own_lane(cotangent: Tensor) -> Tensor:
    """`[B, *S]` -> `[B, B, *S]`: in row b what lane b has, and zeros for the other lanes."""
    size = cotangent.shape[0]
    own = torch.eye(size, dtype=torch.bool, device=cotangent.device).view(size, size, *[1] * (cotangent.dim() - 1))
    return torch.where(own, cotangent, 0)
