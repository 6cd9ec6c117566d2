"""`grad` of lanes, recorded for all of them at once on the plane below (see recorded.py)."""

from typing import Any

from torch import Tensor

from lanewise._core.level import standing
from lanewise._core.parting.lanes import Disagreement
from lanewise._core.plane import tracked
from lanewise._core.recording.graphs import needs_graph
from lanewise._core.short.recorded import RecordedLevel, can_record, leaves_below, lowest, pulled_below
from lanewise._core.short.shared import WatchedLevel
from lanewise._core.trees import Spec, flatten, unflatten
from lanewise._transforms.arguments import check_scalar, replace, split_aux
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
    possible = can_record(level, leaves)
    if isinstance(level, WatchedLevel):
        level.note_gradient(possible)
    if not isinstance(level, RecordedLevel):
        return None
    if not possible or (standing.orders and not level.recording):
        level.note_autograd()
        return None
    _, func, args, kwargs, argnums = site
    with Recording(noted=True) as recording, level.recorded_below() as recorded:
        outer = recording.outer and recorded
        inputs = leaves_below(level, leaves, outer)
        out = func(*replace(args, argnums, inputs[0] if spec is None else unflatten(list(inputs), spec)), **kwargs)
        value, aux = split_aux(site, out, has_aux)
        check_scalar(site, value)
        below = [lowest(level, x) for x in inputs]
        root = lowest(level, value)
        if root is None:
            raise Disagreement(level)

        def free(leaf: Any) -> Any:
            """What is handed through, without the history that nobody outside will ask for."""
            if not isinstance(leaf, Tensor) or not tracked(leaf):
                return leaf
            of_leaf = lowest(level, leaf)
            if of_leaf is None:
                raise Disagreement(level)
            return leaf if outer and needs_graph([of_leaf], below) else leaf.detach()

        grads = pulled_below(level, root, below, outer and needs_graph([root], below))
        result = grads[0] if spec is None else unflatten(grads, spec)
        if has_aux:
            given, of_aux = flatten(aux)
            aux = unflatten([free(leaf) for leaf in given], of_aux)
        if not want:
            return (result, aux) if has_aux else result
        value = free(value)
        return result, ((value, aux) if has_aux else value)
