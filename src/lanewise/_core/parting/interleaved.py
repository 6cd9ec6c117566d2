"""Values whose lanes lie interleaved in memory: strides there are not those that an example has in a loop.

What is computed has its lanes where the operands have them, between the dims of an example for `in_dims=1`. Then
`reshape` and `contiguous` give a copy where a loop has a view, or the tensor itself. That shows where one of the two is
written to while the other is in use: the `vmap` starts again, with lanes in front of all that is computed. So it does
where a loop has a view that interleaved lanes do not have. Arguments lie as the caller has them: their strides are
those of the examples.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.journal import Journal, memory
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.parting.aliases import Aliases
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Disagreement, Lanes, Restart, Stretch
from lanewise._core.plane import Plane
from lanewise._core.recording.tensor_hooks import HookedLevel
from lanewise._core.short.hot import PLAIN
from lanewise.errors import TransformError, at_user_line

# Code of functions that run with lanes in front of all that is computed.
lanes_in_front: set[Any] = set()


class FrontLevel(LaneLevel):
    """A level on which what is computed has its lanes in front.

    The arguments belong to lanes of their own, from which those that run have parted: views are views of the arguments,
    writes reach them, and other operations have copies, with lanes in front. For pairs of lanes, they are copies.

    Attributes:
        given: The lanes of the arguments, None for pairs.
    """

    __slots__ = ("given",)
    in_front = True

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.given = self.root if self.outer is None else None

    def leave_arguments(self) -> None:
        """Part from the lanes of the arguments."""
        if self.given is not None:
            self.root = self.lanes = Lanes(self.given, Stretch(0, self.given.size), self.given.size)

    def wrap(self, value: Tensor) -> BatchTensor:
        if self._lanes is not self.given and not in_front(value):
            value = self.below(_laid_out, value)
        return super().wrap(value)

    def alias(self, tensor: BatchTensor) -> BatchTensor:
        running, self.lanes = self._lanes, tensor.home
        try:
            return super().alias(tensor)
        finally:
            self.lanes = running


class FrontHookedLevel(FrontLevel, HookedLevel):
    """The same, for functions that set hooks on tensors which they have used."""

    __slots__ = ()


def in_front(value: Tensor) -> bool:
    """Whether the memory of each lane of `value` `[B, *S]` ends before that of the next one begins."""
    step, *strides = value.stride()
    reach = sum([(size - 1) * stride for size, stride in zip(value.shape[1:], strides)])
    return step > reach or not step or value.shape[0] < 2


def _laid_out(value: Tensor) -> Tensor:
    """A copy of `[B, *S]` with the lanes in front, and the dims of each in the order that they had."""
    strides = value.stride()
    order = [0, *sorted(range(1, value.dim()), key=lambda dim: -strides[dim])]
    back = sorted(range(value.dim()), key=order.__getitem__)
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


# --- what a loop would have ------------------------------------------------------------------------------------------


class Layout:
    """How an example lies in memory in a loop, where that is not how a lane lies here.

    Attributes:
        shape, strides: Those of the example.
        levels: Those whose lanes lie interleaved, innermost first.
    """

    __slots__ = ("shape", "strides", "levels")

    def __init__(self, shape: Sequence[int], strides: list[int], levels: list[BatchLevel]) -> None:
        self.shape = shape
        self.strides = strides
        self.levels = levels

    def is_contiguous(self, memory_format: torch.memory_format) -> bool:
        """Whether `contiguous(memory_format=...)` of the example is the example."""
        order = list(range(len(self.shape)))
        if memory_format in (torch.channels_last, torch.channels_last_3d):
            order = [0, *order[2:], 1]
        expected = 1
        for dim in reversed(order):
            if self.shape[dim] != 1:
                if self.strides[dim] != expected:
                    return False
                expected *= self.shape[dim]
        return True


def layout_in_loop(x: BatchTensor) -> Layout | None:
    """How an example of `x` lies in memory in a loop; None where that is how a lane lies here, or is not known."""
    if type(x.value) is Tensor and (steps := x.value.stride())[0] >= max(steps):
        return None
    part: Any = x
    levels: list[BatchLevel] = []
    while isinstance(part, Plane):
        if type(part) is BatchTensor and part.mapped:
            levels.append(part.level)
        part = part.value
    if not _has_memory(part) or not part.numel():
        return None
    # The lanes of the outermost level are in dim 0.
    sizes, strides = list(part.shape), list(part.stride())
    place = memory(part)
    found = []
    for level in reversed(levels):
        size, step = sizes.pop(0), strides.pop(0)
        if size > 1 and step and not _is_given(level, place):
            closer = [stride // (step * size) * step + stride % (step * size) for stride in strides]
            if any(own != old and extent > 1 for own, old, extent in zip(closer, strides, sizes)):
                found.append(level)
            strides = closer
    return Layout(sizes, strides, found[::-1]) if found else None


def _has_memory(part: Any) -> bool:
    return type(part) in PLAIN and part.layout is torch.strided and not (part.is_meta or part.is_nested)


def arguments_of(level: BatchLevel) -> list:
    """What the function of a level was given, which lies as the caller has it."""
    given = level.arguments
    if given is None:
        given = level.journal.given if isinstance(level.journal, Journal) else level.journal
    return given or []


def _is_given(level: BatchLevel, place: int) -> bool:
    """Whether memory is that of an argument."""
    for part in arguments_of(level):
        while isinstance(part, Plane):
            part = part.value
        if _has_memory(part) and memory(part) == place:
            return True
    return False


def as_in_loop(level: BatchLevel, values: Sequence[Any]) -> list:
    """Values of a level that lie as in a loop: copies, but of arguments, where their lanes lie interleaved."""
    return [
        level.wrap(level.below(_laid_out, value.value))
        if level.mapped(value) and layout_in_loop(value) is not None
        else value
        for value in values
    ]


def can_view(shape: Sequence[int], strides: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a tensor of that shape and these strides has a view of another size, as torch finds out."""
    if -1 in size:
        known = math.prod([extent for extent in size if extent != -1])
        size = [math.prod(shape) // max(known, 1) if extent == -1 else extent for extent in size]
    if not shape:
        return True
    place, base = len(size) - 1, strides[-1]
    stretch = covered = 1
    for dim in reversed(range(len(shape))):
        stretch *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == stretch * base):
            continue
        # Dims that follow one another in memory end here: so must those of the view.
        while place >= 0 and (covered < stretch or size[place] == 1):
            covered *= size[place]
            place -= 1
        if covered != stretch:
            return False
        stretch, covered, base = 1, 1, strides[dim - 1]
    return place < 0


# --- copies that stand for views -------------------------------------------------------------------------------------


class Copies(Aliases):
    """Copies that stand for views, and what they are of: a write to one would be missing in the other."""

    __slots__ = ()

    def check(self, level: Any, place: int) -> None:
        if self.is_shared(place):
            begin_in_front(level)


def copied(x: Any, copy: Any, memory_format: torch.memory_format) -> None:
    """`copy` is `x.clone(memory_format=...)`: the whole of `contiguous`, or what `reshape` begins with."""
    if type(x) is not BatchTensor or not x.mapped or type(copy) is not BatchTensor:
        return
    layout = layout_in_loop(x)
    if layout is None:
        return
    if layout.is_contiguous(memory_format):
        stand_for_view(copy, x, layout)
    elif memory_format is torch.contiguous_format:
        copy.level.pending = memory(copy), weakref.ref(x)


def reshaped(copy: BatchTensor, size: Sequence[int]) -> None:
    """A copy takes another size while one is pending: the second step of a `reshape`."""
    place, pending = copy.level.pending
    source = pending()
    if source is None or place != memory(copy):
        return
    copy.level.pending = None
    layout = layout_in_loop(source)
    if layout is not None and can_view(layout.shape, layout.strides, size):
        stand_for_view(copy, source, layout)


def stand_for_view(copy: BatchTensor, source: BatchTensor, layout: Layout) -> None:
    """Remember that `copy` would be a view of `source` in a loop."""
    watching = [level for level in layout.levels if level.journal is not None]
    if watching:
        level = next((level for level in reversed(watching) if _can_begin_again(level)), watching[-1])
        if level.copies is None:
            level.copies = Copies()
        level.copies.join(copy, [source])


def begin_in_front_of(x: BatchTensor) -> None:
    """`x` has no view of some kind as its lanes lie: begin again with lanes in front, where an example may have it."""
    layout = layout_in_loop(x)
    for level in reversed(layout.levels) if layout is not None else ():
        if _can_begin_again(level):
            begin_in_front(level)


def _can_begin_again(level: BatchLevel) -> bool:
    if level.in_front or not level.alive:
        return False
    return isinstance(level, LaneLevel) or level.restartable


def begin_in_front(level: BatchLevel) -> None:
    """Start the `vmap` again, with lanes in front."""
    if not _can_begin_again(level):
        raise TransformError(
            at_user_line(
                "vmap: a write in place to a tensor whose lanes lie interleaved in memory, or to a copy of it that "
                "`reshape` or `contiguous` has made, while the other is in use: in a loop, that copy is a view",
                "x = x.clone(memory_format=torch.contiguous_format)  # before it is reshaped",
            )
        )
    level.in_front = True
    raise Restart(level, structured=True) if isinstance(level, LaneLevel) else Disagreement(level)
