"""The rows of a value for other lanes than it was made for."""

from typing import Any

from torch import Tensor

from lanewise._core.batch import BatchTensor
from lanewise._core.parting.absent import note
from lanewise._core.parting.lanes import Lanes, Restart, common_ancestor, machine, parting
from lanewise._core.parting.rows import gather, gather_lanes, spread_rows
from lanewise.errors import TransformError, at_user_line


def taken(level: Any, tensor: BatchTensor, home: Lanes, lanes: Lanes) -> Tensor:
    """The value below `[lanes.size, *S]` of a tensor with lanes `home`; zeros where a cotangent lacks lanes."""
    if lanes.within(home):
        value = gather_lanes(level, tensor.value, lanes, home)
        if level.has_absent:
            note(level, value, "rows", lanes, home, lanes.positions(home))
        return value
    if level.partial(tensor):
        base = lanes if home.within(lanes) else common_ancestor(home, lanes)
        places = home.positions(base)
        value = level.below(spread_rows, tensor.value, places, base.size)
        note(level, value, "spread", base, home, places)
        if base is not lanes:
            places = lanes.positions(base)
            value = gather(level, value, places)
            note(level, value, "rows", lanes, base, places)
        return value
    # Or lanes that parted, came together and parted again in the same way.
    places = lanes.places(home)
    if places is None:
        if machine.level is level and parting.is_shown(level, tensor):
            raise Restart(level)  # as written, lanes that have parted see nothing of each other's
        raise TransformError(
            at_user_line(
                f"vmap: a value {list(tensor.shape)} of lanes that took another branch is used here: it was kept "
                "in a container, an attribute or a closure, and has no number for the lanes that run",
                "return the value, or assign it to a variable in both branches",
            )
        )
    value = gather(level, tensor.value, places)
    note(level, value, "rows", lanes, home, places)
    return value
