"""`grad` and small Jacobians of lanes, recorded for all lanes at once on the lowest plane (see recorded.py)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lanewise._core.level import standing
from lanewise._core.parting.lanes import Disagreement
from lanewise._core.plane import recorded, tracked
from lanewise._core.recording.graphs import hangs_on_made, needs_graph, node_of, reached
from lanewise._core.short.recorded import (
    RecordedLevel,
    can_record,
    leaves_below,
    lowest,
    pulled_below,
    rows_below,
)
from lanewise._core.short.shared import WatchedLevel
from lanewise._core.trees import Spec, flatten, unflatten
from lanewise._transforms.arguments import check_output_dtypes, check_outputs, check_scalar, replace, split_aux
from lanewise._transforms.recording import Recording


def differentiate_below(level: Any, site: tuple, chosen: tuple[list, Spec | None], has_aux: bool, want: bool) -> Any:
    """What `differentiate` gives, or None where it is to be recorded on the plane of the lanes.

    Args:
        level: The level of that plane.
        site: The transform, the function, its arguments and which of them are chosen.
        chosen: Their leaves, and the structure if it is not one tensor.
        has_aux: Whether the function also returns something to hand through.
        want: Whether the value is wanted, too.
    """
    leaves, spec = chosen
    if not records_below(level, leaves, may_spread=True):
        return None
    _, func, args, kwargs, argnums = site
    with Recording(noted=True) as recording, level.recorded_below() as kept:
        outer = recording.outer and kept
        inputs = leaves_below(level, leaves, outer)
        out = func(*replace(args, argnums, inputs[0] if spec is None else unflatten(list(inputs), spec)), **kwargs)
        value, aux = split_aux(site, out, has_aux)
        check_scalar(site, value)
        graph = _Graph(level, outer, inputs)
        root = graph.lowest(value)
        grads = pulled_below(level, root, graph.inputs, graph.is_kept_for([root]))
        result = grads[0] if spec is None else unflatten(grads, spec)
        if has_aux:
            aux = graph.freed(aux)
        if not want:
            return (result, aux) if has_aux else result
        value = graph.freed(value)
        return result, ((value, aux) if has_aux else value)


def jacobian_below(
    level: Any, site: tuple, leaves: list, has_aux: bool, call: Callable[[list], Any]
) -> tuple[list[Tensor], list[Tensor], Spec, Any] | None:
    """What `jacrev` makes its result of, or None where it is to record on the plane of the lanes.

    `call` calls the function with other leaves. The rows `[total, *x]` for each leaf, the outputs, their structure, and
    what is handed through.
    """
    if not records_below(level, leaves):
        return None
    with Recording(noted=True) as recording, level.recorded_below() as kept:
        outer = recording.outer and kept
        inputs = leaves_below(level, leaves, outer)
        value, aux = split_aux(site, call(list(inputs)), has_aux)
        outputs, spec = flatten(value)
        check_outputs(site, value, outputs)
        check_output_dtypes(outputs, value, site)
        if not are_few(outputs):
            raise Disagreement(level)
        graph = _Graph(level, outer, inputs)
        roots = [graph.lowest(out) for out in outputs]
        columns = rows_below(level, roots, [out.numel() for out in outputs], graph.inputs, graph.is_kept_for(roots))
        return columns, [out.detach() for out in outputs], spec, graph.freed(aux)


def records_below(level: Any, leaves: list, may_spread: bool = False) -> bool:
    """Whether a transform that differentiates with respect to `leaves` records on the lowest plane.

    `may_spread`: whether it calls `note_use` for those that are parameters of layers.
    """
    if isinstance(level, WatchedLevel):
        possible = can_record(level, leaves, False)
        if not possible and may_spread and not standing.orders and can_record(level, leaves, True):
            level.spread = None
            return False
        level.note_gradient(possible)
    else:
        possible = can_record(level, leaves, level.spreads if isinstance(level, RecordedLevel) else False)
    if not isinstance(level, RecordedLevel):
        return False
    if not possible or (standing.orders and not level.recording):
        level.note_autograd()
        return False
    return True


# Nodes of operations that do as well with a matrix spread over the lanes, or cost no more than its gradient.
_LAYERS = {
    "_LinearBackward",
    "AddBackward0",
    "ConvolutionBackward0",
    "EmbeddingBackward0",
    "NativeLayerNormBackward0",
}


def note_use(level: Any, inputs: list, value: Tensor) -> None:
    """At a first call, see whether `value` hangs on large arguments without lanes through layers alone."""
    if not isinstance(level, WatchedLevel) or level.spread is not None:
        return
    level.spread = True
    matrices = {id(x) for x in inputs if x.dim() > 1 and not level.mapped(x)}
    users = (
        node.name()
        for node in reached([node_of(value)] if recorded(value) else [])
        for following, _ in node.next_functions
        if following is not None and id(getattr(following, "variable", None)) in matrices
    )
    level.note_gradient(all(name in _LAYERS for name in users))


def note_made(level: Any, outputs: list) -> None:
    """At a first call, see whether `outputs` hang on leaves made inside: their history is of the plane of the lanes."""
    if isinstance(level, WatchedLevel) and level.recordable and hangs_on_made(outputs):
        level.recordable = False


# So many rows of a Jacobian at most are passes of their own.
_MOST_ROWS = 8


def are_few(outputs: list) -> bool:
    """Whether a Jacobian of these has few rows, of real numbers."""
    return sum(out.numel() for out in outputs) <= _MOST_ROWS and not any(out.is_complex() for out in outputs)


class _Graph:
    """What a function has recorded on the lowest plane.

    Attributes:
        level: The level of the lanes.
        outer: Whether what is recorded may be differentiated outside.
        inputs: The values with respect to which it is recorded.
    """

    __slots__ = ("level", "outer", "inputs")

    def __init__(self, level: RecordedLevel, outer: bool, inputs: list) -> None:
        self.level = level
        self.outer = outer
        self.inputs = [lowest(level, x) for x in inputs]

    def lowest(self, out: Any) -> Tensor:
        """The value of a result with lanes of all levels; one that is the same in some starts again."""
        value = lowest(self.level, out)
        if value is None:
            raise Disagreement(self.level)
        return value

    def is_kept_for(self, values: list) -> bool:
        """Whether somebody outside may differentiate these."""
        return self.outer and needs_graph(values, self.inputs)

    def freed(self, tree: Any) -> Any:
        """What is handed through, without the history that nobody outside will ask for."""
        leaves, spec = flatten(tree)
        return unflatten([self._freed(leaf) for leaf in leaves], spec)

    def _freed(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not tracked(leaf):
            return leaf
        return leaf if self.is_kept_for([self.lowest(leaf)]) else leaf.detach()
