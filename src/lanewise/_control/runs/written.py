"""What lanes have written to arguments of their `vmap` comes to these, where the lanes are not views of them.

And the level around is told of it, for its journal: all pairs of lanes run on the plane below it, so it sees none of
their operations. What a function writes to tensors that have no lanes of its own, captured ones above all, is another
matter: each operation shows it, and `_core.again.around` undoes it.
"""

from torch import Tensor

from lanewise._core.again.journal import elements, memory, note_before
from lanewise._core.batch import BatchTensor
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._transforms.ragged import Components
from lanewise._transforms.vmap import lane_rows


def give_back(level: LaneLevel, leaves: list, dims: list, lanes: list, place: tuple[int, int, int]) -> None:
    """Write to the arguments what was written to lanes that had to be copied, for all pairs with those around."""
    if level.outer is None or not level.journal.copies:
        return
    written = level.journal.written()
    for leaf, dim, lane in zip(leaves, dims, lanes, strict=True):
        if dim is not None and memory(lane.value) in written:
            rows = lane_rows(leaf, dim, place)
            if memory(rows) != memory(lane.value):
                rows.copy_(level.lowered(lane)[0])


def tell_around(level: LaneLevel, leaves: list, dims: list, lanes: list, place: tuple[int, int, int]) -> None:
    """Note in the journal of the level around what its arguments held that have been written to as views.

    Operations on pairs of lanes are none of that level, which starts again perhaps.
    """
    outer = level.outer
    if outer is None or not level.journal.copies or outer.journal is None:
        return
    for leaf, dim, lane in zip(leaves, dims, lanes, strict=True):
        if dim is None or (kept := level.journal.copies.get(elements(lane.value))) is None:
            continue
        rows = lane_rows(leaf, dim, place)
        if type(rows) is BatchTensor and rows.level is outer and memory(rows) == memory(lane.value):
            value = outer.physical(rows)
            note_before(outer, value, rows.home, outer.below(kept[2].reshape, value.shape))


def write_components(components: Components, places: Tensor, value: Tensor, rows: Tensor) -> None:
    """Write rows of `value` to the components at `places`, those of the lanes that have returned in that run."""
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        components.lanes[place].copy_(value[row])
