"""The batch plane while lanes part: every value knows its lanes, and an operation runs on those that are running."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.journal import keep
from lanewise._core.batch import HOT, BatchLevel, BatchTensor, has_lanes
from lanewise._core.draws.random import is_random
from lanewise._core.level import ENDED, Level, on_plane
from lanewise._core.one_lane import FAILURES
from lanewise._core.overlaps import check_written, entries_apart
from lanewise._core.parting.absent import computed_once, left, note, on_present_rows
from lanewise._core.parting.cotangents import cotangent_lanes
from lanewise._core.parting.failing import part_by_failure
from lanewise._core.parting.lanes import EMPTY, Lanes, Restart, intersection, machine, union
from lanewise._core.parting.leaks import note_filled, note_steep_tangents
from lanewise._core.parting.rows import FUSED, PUTS, by_outer_lane, fill_rows, gather_rows, put_rows, spread_rows
from lanewise._core.parting.taking import taken
from lanewise._core.plane import (
    Plane,
    argument,
    lift,
    map_tensors,
    recorded,
    replace_tensors,
    sync,
    tensors_of,
    tracked,
    versioned,
    written_arguments,
    written_statistics,
)
from lanewise._torch_compat import (
    OUTSIDE_KEY,
    current_graph_task_id,
    include_key,
    is_grad_enabled,
    make_wrapper,
    next_node_number,
    preserve_version,
)

aten = torch.ops.aten


class LaneLevel(BatchLevel):
    """The level of a `vmap` whose lanes part.

    A tensor of this level has its `home`, the lanes it was made for. An operation gathers those that run from its
    operands; a view is taken of all, so that writes reach what it is a view of; a write goes to those that run. In a
    backward pass the cotangents say which lanes run: a lane without one has none, which is not the same as zero where a
    derivative is infinite.

    Attributes:
        writes: Number of writes in place so far.
        aliases: Tensors that stand for others in some lanes (aliases.py), None before there are any.
        root: All lanes.
        outer: The level of the `vmap` around this one whose lanes are part of the root's pairs, or None.
        whole: The number of all lanes, those of other chunks included, and which of them is the first here. Pairs of
            lanes are not counted over the chunks.
    """

    __slots__ = ("root", "outer", "writes", "aliases", "whole", "task", "_place", "_own_size", "_lanes")
    _lanes: Lanes

    def __init__(
        self,
        size: int,
        randomness: str = "error",
        total: int | None = None,
        start: int = 0,
        outer: BatchLevel | None = None,
    ) -> None:
        super().__init__(size, randomness, total, start)
        self.writes = 0
        self.aliases: Any = None
        self.task = current_graph_task_id()
        self._own_size = size
        self._place = (self.total, self.start)
        self.outer = outer
        if outer is None:
            self.root = Lanes(None, None, size)
        else:
            self._stand_in_for(outer)
            self.has_absent = outer.has_absent
            around = lanes_of(outer)
            with on_plane(None):
                index = torch.arange(around.size).repeat_interleave(size)
            self.root = Lanes(around, index, around.size * size)
            self.total, self.start = self.root.size, 0
        self.whole = (self.total, self.start)
        self.lanes = self.root

    def _stand_in_for(self, outer: Level) -> None:
        """Lie on the plane below the outer level: the values here have the lanes of both."""
        self.include = outer.include
        self.exclude = outer.exclude
        self.grad_mode = outer.grad_mode and self.grad_mode
        self.pinned = outer.pinned
        self.parent = outer.parent

    @property
    def lanes(self) -> Lanes:
        """The lanes that run."""
        return self._lanes

    @lanes.setter
    def lanes(self, lanes: Any) -> None:
        if lanes is None or lanes is ENDED:
            self._lanes = EMPTY
            return
        self._lanes = lanes
        self.size = lanes.size
        self.total, self.start = self.whole if lanes is self.root else (lanes.size, 0)

    def wrap(self, value: Tensor) -> BatchTensor:
        """`[n, *S]` in the plane below, for the lanes that run -> `[*S]` on this plane."""
        # `BatchLevel.wrap`, written out: every operation comes here.
        out = make_wrapper(
            BatchTensor, value.shape[1:], value.stride()[1:], None, None, value.dtype, torch.strided, value.device
        )
        out.value = value
        out.level = self
        out.mapped = True
        out.home = self._lanes
        return out

    def adopt(self, value: Tensor, origin: tuple | None = None) -> BatchTensor:
        """`[*S]`, the same in all lanes that run (or in all that share one around) -> `[*S]` on this plane."""
        if type(value) is BatchTensor and self.covers(value.level):
            return self.alias(self.here(value))
        out = super().adopt(value, origin)
        out.home = self._lanes
        return out

    def alias(self, tensor: BatchTensor) -> BatchTensor:
        """The same value in a new wrapper, without history on this plane."""
        out = super().alias(tensor)
        out.home = tensor.home
        return out

    def lift(self, wrapper: BatchTensor) -> None:
        """Uniform `[*S]` -> a copy of its own for each of its lanes `[n, *S]`."""
        running = self.lanes
        self.lanes = wrapper.home
        try:
            super().lift(wrapper)
        finally:
            self.lanes = running

    def copy_slots(self, wrapper: BatchTensor, like: BatchTensor) -> None:
        super().copy_slots(wrapper, like)
        wrapper.home = like.home

    @property
    def place(self) -> tuple[int, int]:
        return self._place

    @property
    def own_size(self) -> int:
        """The number of lanes of this `vmap` alone."""
        return self._own_size

    def lowered(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """The value below of a result, at all lanes; a level around this one gets its lanes back."""
        value = self.here(tensor, self.root)
        if not self.mapped(value):
            return self.physical(value), False
        rows = value.value if isinstance(self.outer, LaneLevel) else left(self, value.value)
        if self.outer is None:
            return rows, True
        assert self.root.parent is not None
        apart = self.below(by_outer_lane, rows, self.root.parent.size, self.own_size)
        note(self, apart, "pairs", self.root.parent, self.root)
        return self.outer.wrap(apart), True

    # --- which lanes -----------------------------------------------------------------------------------------------

    def here(self, tensor: Tensor, lanes: Lanes | None = None) -> Any:
        """A tensor of this level, or of a level around it, for the lanes that run (or for `lanes`)."""
        lanes = self._lanes if lanes is None else lanes
        if type(tensor) is not BatchTensor:
            return tensor
        if not tensor.mapped:
            sync(tensor)  # what was the same in all lanes may be a view of what has been lifted
        if tensor.level is self:
            if not tensor.mapped or tensor.home is lanes:
                return tensor
        else:
            if not self.covers(tensor.level):
                return tensor
            if is_grad_enabled() and recorded(tensor):
                # Its graph is on the plane between the two levels, which there is not.
                raise Restart(self, structured=True, flat=False)
            if not tensor.mapped:
                return self.adopt(tensor.value)
        home = home_of(tensor)
        kept = getattr(tensor, "gathered", None)
        # A write through a view need not change the version of what it is a view of: any write counts.
        version = (self.writes, 0 if tensor.value.is_inference() else tensor.value._version)
        grads = is_grad_enabled()
        if kept is not None and kept[0] is lanes and kept[1] == version and (kept[3] or not grads):
            return kept[2]
        out = self.wrap(taken(self, tensor, home, lanes))
        out.home = lanes
        tensor.gathered = (lanes, version, out, grads)
        return out

    def partial(self, tensor: BatchTensor) -> bool:
        """Whether a value is a cotangent, zero in lanes that it does not have."""
        return current_graph_task_id() != self.task or getattr(tensor, "cotangent", False)

    def check_write_outside(self, level: Level, pairs: bool = False) -> None:
        if (pairs or self._lanes is not self.root) and self.covers(level):
            # Which lanes of the outer level are to be written, and whether they are written the same in all lanes of
            # this `vmap`, is known where they part on their own.
            raise Restart(self, structured=True, flat=False)

    def forget_gathered(self) -> None:
        """Gather anew from here on."""
        # The count of writes is part of what gathered values are kept by.
        self.writes += 1

    @contextmanager
    def lanes_of_all(self, values: list) -> Iterator[None]:
        """Inside a backward pass, the lanes run that all values have."""
        running = self._lanes
        if current_graph_task_id() != self.task:
            self.lanes = cotangent_lanes(self, None, [value for value in values if isinstance(value, Tensor)])
        begun = self._lanes
        try:
            yield
        finally:
            self.lanes = running if self._lanes is begun else intersection(running, self._lanes)

    def covers(self, level: Any) -> bool:
        """Whether `level` is this one, or one around it whose lanes are part of the pairs here."""
        here: Any = self
        while here is not None and here is not level:
            here = getattr(here, "outer", None)
        return here is not None

    # --- operations ------------------------------------------------------------------------------------------------

    computed_once = computed_once

    def computed(self, run: Any, *args: Any) -> Any:
        """What an operation gives for the lanes that run, called as `below` is."""
        begun = next_node_number()
        out = self.below(run, *args)
        if isinstance(out, Tensor):
            if recorded(out):
                return on_present_rows(self, run, args, out, begun)
            if type(out) is not Tensor and self.has_absent is False and tracked(out):
                note_steep_tangents(self, out, begun)
            return out
        several = type(out) in (tuple, list) and any(isinstance(each, Tensor) and recorded(each) for each in out)
        return on_present_rows(self, run, args, out, begun) if several else out

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        lanes = self._lanes
        if current_graph_task_id() != self.task:
            lanes = cotangent_lanes(self, func, operands)
            if lanes is not self._lanes:
                if func in FUSED:
                    return FUSED[func](*args, **kwargs)
                return self._backward(lanes, func, args, kwargs, operands)
        for operand in operands:
            if type(operand) is BatchTensor:
                if operand.level is self:
                    if operand.home is not lanes:
                        return self._align(func, args, kwargs, operands)
                elif self.covers(operand.level):
                    return self._align(func, args, kwargs, operands)
        if is_random(func) and (base := self._drawing_base(args, kwargs)) is not lanes:
            return self._draw(base, func, args, kwargs)
        return self._run_here(func, args, kwargs, operands)

    def _run_here(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        hot = HOT.get(func)
        if hot is not None:
            try:
                if (out := hot(args, kwargs)) is not NotImplemented:
                    return out
            except FAILURES:
                pass  # for some lanes only, perhaps
        try:
            return super().interpret(func, args, kwargs, operands)
        except Exception:
            if not part_by_failure(self, super().interpret, func, args, kwargs, operands):
                raise
        return self.interpret(func, args, kwargs, operands)

    def _backward(self, lanes: Lanes, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        """An operation of a backward pass, on the lanes of its cotangents."""
        running = self._lanes
        self.lanes = lanes
        try:
            for operand in operands:
                if type(operand) is not BatchTensor:
                    continue
                if operand.home is not lanes if operand.level is self else self.covers(operand.level):
                    out = self._align(func, args, kwargs, operands)
                    break
            else:
                out = self._run_here(func, args, kwargs, operands)
        finally:
            self.lanes = running
        return out

    def _align(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        """An operation with operands of other lanes than those that run."""
        running = self._lanes
        if (func.is_view or torch.Tag.inplace_view in func.tags) and self.owns(args[0]):
            home = args[0].home
            if not func.is_view:
                self.check_refit(args[0])
            if self.partial(args[0]) or running.places(home) is not None:
                self.lanes = home
                try:
                    return self._run_here(func, args, kwargs, operands)
                finally:
                    self.lanes = running
        if is_random(func) and (base := self._drawing_base(args, kwargs)) is not running:
            return self._draw(base, func, args, kwargs)
        statistics = written_statistics(func, args, kwargs)
        if not func._schema.is_mutable and not statistics:
            args, kwargs = replace_tensors(self.here, args, kwargs)
            return self._run_here(func, args, kwargs, [self.here(operand) for operand in operands])
        return self._write(func, args, kwargs, operands, statistics)

    def check_write_above(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> None:
        """Before a write on a plane above, whose graph cannot hold that some lanes were written and others not."""

        def check(tensor: Any) -> None:
            while isinstance(tensor, Plane):
                if type(tensor) is BatchTensor and tensor.level is not self:
                    self.check_write_outside(tensor.level)
                elif self.owns(tensor) and tensor.home is not self._lanes:
                    raise Restart(self)
                tensor = tensor.value

        if is_grad_enabled() and current_graph_task_id() == self.task and any(map(recorded, operands)):
            for position, name in written_arguments(func):
                map_tensors(check, argument(args, kwargs, position, name))

    def _write(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor], statistics: list[Tensor]) -> Any:
        """A write to the lanes that run, of a tensor that has more. One to running statistics counts no new version."""
        if each := entries_apart(func, args, kwargs):
            for args, kwargs in each:
                self.interpret(func, args, kwargs, tensors_of(args, kwargs))
            return None
        check_written(func, args, kwargs)
        written: list[Tensor] = [*statistics]
        for position, name in written_arguments(func):
            map_tensors(written.append, argument(args, kwargs, position, name))
        stands: dict[int, Tensor] = {}
        for tensor in written:
            if type(tensor) is BatchTensor and tensor.level is not self:
                self.check_write_outside(tensor.level, pairs=True)
            if not self.owns(tensor) or tensor.home is self._lanes:
                continue
            recording = not statistics and is_grad_enabled() and any(recorded(operand) for operand in operands)
            if recording and (machine.level is self or sum(call.level is self for call in machine.boundaries) > 1):
                # The graph of this plane cannot hold that some lanes were written and others not, unless the tensor is
                # made anew where the others run, from the start of the function.
                raise Restart(self)
            lift(tensor)
            if self.partial(tensor):
                self._widen(tensor)
            if self.journal is not None:
                keep(self, tensor.value, tensor.home, bool(statistics))
            if tensor.home is self._lanes:
                continue
            stand = self.here(tensor)
            tensor.gathered = None
            stands[id(tensor)] = stand

        def replace(tensor: Tensor) -> Tensor:
            return stands[id(tensor)] if id(tensor) in stands else self.here(tensor)

        new_args, new_kwargs = replace_tensors(replace, args, kwargs)
        out = self._run_here(func, new_args, new_kwargs, [replace(operand) for operand in operands])
        for tensor in written:
            stand: Any = stands.get(id(tensor))
            if stand is not None:
                target: Any = tensor
                with preserve_version(*versioned(target)) if statistics else nullcontext():
                    places = self._lanes.places(target.home)
                    note_filled(self, [target.value, stand.value])
                    self.below(PUTS.get(func, put_rows), target.value, places, stand.value)
                    note(self, target.value, "written", target.home, self._lanes, places)
                self.writes += 1
        back = {id(stand): tensor for tensor in written if (stand := stands.get(id(tensor))) is not None}
        return map_tensors(lambda t: back.get(id(t), t), out)

    def _widen(self, tensor: BatchTensor) -> None:
        """Before a write to a cotangent: zeros for lanes that run and that it does not have, memory of its own."""
        if self._lanes.places(tensor.home) is None:
            lanes = union(tensor.home, self._lanes)
            tensor.value = self.below(spread_rows, tensor.value, tensor.home.places(lanes), lanes.size)
            tensor.home = lanes
            tensor.cotangent = True
        elif 0 in tensor.value.stride():
            tensor.value = self.below(torch.clone, tensor.value)

    # --- random numbers --------------------------------------------------------------------------------------------

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """A tensor made from no lane values; random numbers as in `_draw`.

        Lanes of the `vmap` around whose pairs run here are lane values.
        """
        operands = tensors_of(args, kwargs) if self.outer is not None else []
        if any(type(each) is BatchTensor and self.covers(each.level) and has_lanes(each) for each in operands):
            include_key(OUTSIDE_KEY, False)
            try:
                return self.interpret(op, args, kwargs, operands)
            finally:
                include_key(OUTSIDE_KEY, True)
        base = self._drawing_base(args, kwargs) if is_random(op) else self._lanes
        running, self.lanes = self._lanes, base
        try:
            return super().factory(op, args, kwargs)
        finally:
            self.lanes = running

    def _drawing_base(self, args: tuple, kwargs: dict) -> Lanes:
        """The lanes to draw for: where a call is run again for some lanes, each run draws for all, as the first did.

        Numbers that decide which lanes run again would otherwise be drawn anew for these lanes only. Converted code
        draws for the lanes of each branch by themselves, so it cannot be run again like that.
        """
        for boundary in reversed(machine.boundaries):
            if boundary.level is self:
                boundary.draws.begin(self, args, kwargs)
                if machine.level is not self:
                    return boundary.base
                boundary.drew = True
                if boundary.parted and self.randomness == "different":
                    raise Restart(self)
                break
        return self._lanes

    def _draw(self, base: Lanes, func: Any, args: tuple, kwargs: dict) -> Any:
        """A random operation for all lanes of `base`; lanes that do not run get the operands of the first that does."""
        running = self._lanes
        stands: dict[int, BatchTensor] = {}

        def widen(tensor: Tensor) -> Tensor:
            if not self.owns(tensor) or not tensor.mapped or tensor.home is base:
                return tensor
            here = self.here(tensor)
            places = running.positions(base)
            value = self.below(fill_rows, here.value, places, base.size)
            self._lanes = base
            stands[id(tensor)] = stand = self.wrap(value)
            self._lanes = running
            return stand

        if func._schema.is_mutable:
            for position, name in written_arguments(func):
                map_tensors(lambda t: lift(t) if self.owns(t) else None, argument(args, kwargs, position, name))
        new_args, new_kwargs = replace_tensors(widen, args, kwargs)
        self.lanes = base
        try:
            operands: list[Tensor] = []
            replace_tensors(operands.append, new_args, new_kwargs)
            out = self._run_here(func, new_args, new_kwargs, operands)
        finally:
            self.lanes = running
        if not func._schema.is_mutable:
            return out
        for position, name in written_arguments(func):
            target: Any = argument(args, kwargs, position, name)
            stand: Any = stands.get(id(target))
            if stand is not None:
                if self.journal is not None:
                    keep(self, target.value, target.home)
                drawn = self.below(gather_rows, stand.value, running.positions(base))
                self.below(put_rows, target.value, running.places(target.home), drawn)
        back = {id(stand): argument(args, kwargs, *written_arguments(func)[0]) for stand in stands.values()}
        return map_tensors(lambda t: back.get(id(t), t), out)


def home_of(tensor: BatchTensor) -> Lanes:
    """The lanes of a tensor, also of one of a level all of whose lanes run."""
    return tensor.home if isinstance(tensor.level, LaneLevel) else lanes_of(tensor.level)


def lanes_of(level: BatchLevel) -> Lanes:
    """The lanes of a level that run."""
    if isinstance(level, LaneLevel):
        return level.lanes
    if level.all_lanes is None:
        level.all_lanes = Lanes(None, None, level.size)
    return level.all_lanes


def completed(tensor: Any) -> Any:
    """A result of a backward pass, with zeros for the lanes that run and that it does not have."""
    return tensor.clone() if _marked(tensor) else tensor


def _marked(part: Any) -> bool:
    """Whether a cotangent, or the tangent of one, lacks lanes that run: it is zero there."""
    short = False
    while isinstance(part, Plane):
        if type(part) is BatchTensor and isinstance(part.level, LaneLevel) and part.mapped:
            part.cotangent = True
            short = short or part.home is not part.level.lanes
        short = _marked(getattr(part, "tangent", None)) or short
        part = part.value
    return short
