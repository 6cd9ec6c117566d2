"""Lanes come together: one tensor from the values of disjoint sets of lanes, on every plane and with derivatives."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.dual import DualLevel
from lanewise._core.level import on_plane
from lanewise._core.parting.absent import note, note_together
from lanewise._core.parting.causes import cause_here
from lanewise._core.parting.lane_level import LaneLevel, home_of, lanes_of
from lanewise._core.parting.lanes import (
    BeginAgain,
    Boundary,
    Disagreement,
    Lanes,
    Parting,
    Restart,
    Target,
    Unmergeable,
    child,
    common_ancestor,
    for_lanes,
    machine,
    parting,
    true_places,
)
from lanewise._core.parting.leaks import note_filled, note_zeros
from lanewise._core.parting.rows import choose_rows, in_order, unseen
from lanewise._core.parting.unasked import answer, note_question
from lanewise._core.plane import Plane, recorded, sync, tangents_of
from lanewise._core.short.hot import inert
from lanewise._torch_compat import (
    apply_plainly,
    current_graph_task_id,
    forward_level,
    is_fwd_grad_enabled,
    is_grad_enabled,
    set_fwd_grad_enabled,
    set_grad_enabled,
)
from lanewise.errors import LaneValueError, TransformError, at_user_line, calls_within

# --- merging ---------------------------------------------------------------------------------------------------------


def merge_tensors(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Tensor]) -> Tensor:
    """One tensor `[*S]` from a tensor `[*S]` for each piece, on the highest plane among them.

    Raises:
        Unmergeable: Shapes or dtypes differ.
    """
    first = values[0]
    for value in values:
        if value.is_nested:
            raise Unmergeable("nested tensors, which have no strides")
        if value.shape != first.shape:
            raise Unmergeable(f"shapes {' and '.join(sorted({str(list(v.shape)) for v in values}))}")
        if value.dtype != first.dtype:
            raise Unmergeable(f"dtypes {' and '.join(sorted({str(v.dtype) for v in values}))}")
        if value.layout is not torch.strided:
            raise Unmergeable(f"their layout, {value.layout}, has no strides")
    if is_grad_enabled() and any(isinstance(value, Plane) and recorded(value) for value in values):
        return apply_plainly(_Merge, level, target, pieces, *values)
    return _merged(level, target, pieces, values)


def _merged(level: LaneLevel, target: Target, pieces: list[Lanes], values: Any) -> Tensor:
    top = _above(level, values)
    if top is None:
        return _merged_here(level, target, pieces, values)
    for value in values:
        if isinstance(value, Plane) and value.level is top:
            sync(value)
    if isinstance(top, DualLevel):
        primals = [top.primal(value) for value in values]
        tangents = [top.tangent(value) for value in values]
        primal = top.below(merge_tensors, level, target, pieces, primals)
        if all(tangent is None for tangent in tangents):
            return top.adopt(primal)
        if any(tangent is None for tangent in tangents):
            note_zeros(level)
        filled = [
            for_lanes(level, piece, top.below, torch.zeros_like, part) if tangent is None else tangent
            for part, tangent, piece in zip(primals, tangents, pieces)
        ]
        return top.wrap(primal, top.below(merge_tensors, level, target, pieces, filled))
    if not isinstance(top, BatchLevel):
        # What `linearize` writes down is one program, for lanes that all go the same way.
        raise Restart(level)
    if isinstance(top, LaneLevel):
        values = [for_lanes(level, piece, top.here, value) for value, piece in zip(values, pieces)]
    if any(top.mapped(value) for value in values):
        whole = [for_lanes(level, piece, top.below, top.expanded, value) for value, piece in zip(values, pieces)]
        return top.wrap(top.below(merge_tensors, level, target, pieces, whole))
    return top.adopt(top.below(merge_tensors, level, target, pieces, [top.physical(value) for value in values]))


def _merged_here(level: LaneLevel, target: Target, pieces: list[Lanes], values: list[Tensor]) -> Tensor:
    for value in values:
        if level.owns(value):
            sync(value)
    running = level.lanes
    level.lanes = target.lanes
    try:
        if len(values) == 2 and all(level.mapped(value) and value.home is target.lanes for value in values):
            # Both are known for all lanes: a choice costs less than taking rows and putting them together.
            first, second = [value.value for value in values]  # type: ignore[attr-defined]
            mask = target.mask
            if mask is None:
                with on_plane(None):
                    mask = target.order < pieces[0].size
            note_filled(level, [first, second])
            chosen = level.below(choose_rows, mask, first, second)
            note(level, chosen, "choice", target.lanes, mask)
            return level.wrap(chosen)
        rows = [_rows(level, value, piece) for value, piece in zip(values, pieces, strict=True)]
        note_filled(level, rows)
        if len(rows) <= _FEW and target.whole and all(row.is_cpu and inert(row) for row in rows):
            return level.wrap(level.below(_placed, rows, pieces, target.lanes))
        together = level.below(_put_together, rows, target.order)
        note_together(level, together, target.lanes, pieces, target.order)
        return level.wrap(together)
    finally:
        level.lanes = running


def _rows(level: LaneLevel, value: Tensor, lanes: Lanes) -> Tensor:
    """The value below `[lanes.size, *S]`"""
    tensor = level.here(value, lanes)
    if level.mapped(tensor):
        return tensor.value
    below = level.physical(tensor)
    return level.below(below.expand, lanes.size, *below.shape)


# So many pieces are put into place one by one; more are gathered at once.
_FEW = 4


@unseen
def _placed(rows: list[Tensor], pieces: list[Lanes], lanes: Lanes) -> Tensor:
    out = in_order(lambda first: first.new_empty((lanes.size, *first.shape[1:])), rows[0])
    for row, piece in zip(rows, pieces):
        places = piece.positions(lanes)
        # Twice as fast where there is one dim.
        out = out.scatter_(0, places, row) if row.dim() == 1 else out.index_copy_(0, places, row)
    return out


@unseen
def _put_together(rows: list[Tensor], order: Tensor) -> Tensor:
    return in_order(lambda *rows: torch.cat(rows).index_select(0, order.to(rows[0].device)), *rows)


def _above(level: LaneLevel, values: Any) -> Any:
    """The highest level among the values that is above `level`, None if there is none."""
    top = None
    for value in values:
        if isinstance(value, Plane) and value.level.order > (level if top is None else top).order:
            top = value.level
    return top


class _Merge(Function):
    """On the plane of its operands; the planes below record what `_merged` does there."""

    @staticmethod
    def forward(ctx: Any, level: LaneLevel, target: Target, pieces: list[Lanes], *values: Tensor) -> Tensor:  # type: ignore[override]
        ctx.level, ctx.target, ctx.pieces = level, target, pieces
        ctx.set_materialize_grads(False)  # no lane may have a cotangent
        return _with_grad(_merged, level, target, pieces, values)

    @staticmethod
    def jvp(ctx: Any, _level: Any, _target: Any, _pieces: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
        like = next(tangent for tangent in tangents if tangent is not None)
        note_zeros(ctx.level)
        filled = [
            for_lanes(ctx.level, piece, like.new_zeros, like.shape) if tangent is None else tangent
            for tangent, piece in zip(tangents, ctx.pieces, strict=True)
        ]
        return merge_tensors(ctx.level, ctx.target, ctx.pieces, filled)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple:  # type: ignore[override]
        if is_grad_enabled() or tangents_of(cotangent):
            note_zeros(ctx.level)  # a pass through this one knows nothing of lanes that are missing in it
        parts = [
            restricted(ctx.level, cotangent, piece) if needed and cotangent is not None else None
            for piece, needed in zip(ctx.pieces, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *parts


def _with_grad(run: Any, *args: Any) -> Any:
    """Inside a Function's forward, where neither mode of torch's own is on: the planes below go on as around it."""
    before, forward_before = is_grad_enabled(), is_fwd_grad_enabled()
    set_grad_enabled(True)
    set_fwd_grad_enabled(True)
    try:
        return run(*args)
    finally:
        set_grad_enabled(before)
        set_fwd_grad_enabled(forward_before)


# --- taking apart ----------------------------------------------------------------------------------------------------


def restricted(level: LaneLevel, value: Tensor, lanes: Lanes) -> Tensor | None:
    """A cotangent for those of `lanes` that it has; None if it has none of them."""
    if is_grad_enabled() and isinstance(value, Plane) and recorded(value):
        return apply_plainly(_Restrict, level, value, lanes)
    return _restricted(level, value, lanes)


def _restricted(level: LaneLevel, value: Any, lanes: Lanes) -> Any:
    top = _above(level, [value])
    if isinstance(top, DualLevel):
        primal = top.below(restricted, level, value.value, lanes)
        if primal is None:
            return None
        tangent = None if value.tangent is None else top.below(restricted, level, value.tangent, lanes)
        return top.adopt(primal) if tangent is None else top.wrap(primal, tangent)
    if isinstance(top, LaneLevel) and top.covers(level):
        return _restricted_pairs(top, value, lanes)
    if top is not None:
        part = top.below(restricted, level, value.value, lanes)
        if part is None:
            return None
        out = top.wrap(part) if value.mapped else top.adopt(part)
        if isinstance(top, LaneLevel):
            out.home = value.home
        return out
    if not level.mapped(value):
        return for_lanes(level, lanes, _lifted, level, value)
    home = home_of(value)
    if home.within(lanes):
        return level.alias(value)
    if lanes.within(home):
        return level.here(value, lanes)
    base = common_ancestor(home, lanes)
    with on_plane(None):
        places = lanes.positions(base)
        kept = (home.inverse(base)[places] >= 0).nonzero().squeeze(1)
    if not kept.shape[0]:
        return None
    return level.here(value, child(lanes, kept))


def _restricted_pairs(level: LaneLevel, value: Any, lanes: Lanes) -> Any:
    """A cotangent of a `vmap` inside for the pairs whose outer lane is one of `lanes`; None if there are none."""
    home = home_of(value) if value.mapped else level.lanes
    base = common_ancestor(home, lanes)
    if base is lanes:
        return level.alias(value)
    with on_plane(None):
        kept = true_places(lanes.inverse(base).index_select(0, home.positions(base)) >= 0)
    if not kept.shape[0]:
        return None
    pairs = home if kept.shape[0] == home.size else child(home, kept)
    return level.here(value, pairs) if value.mapped else for_lanes(level, pairs, _lifted, level, value)


def _lifted(level: LaneLevel, value: Tensor) -> Tensor:
    return level.wrap(_rows(level, value, level.lanes))


class _Restrict(Function):
    @staticmethod
    def forward(ctx: Any, level: LaneLevel, value: Tensor, lanes: Lanes) -> Any:  # type: ignore[override]
        ctx.level, ctx.lanes = level, lanes
        ctx.set_materialize_grads(False)
        return _with_grad(_restricted, level, value, lanes)

    @staticmethod
    def jvp(ctx: Any, _level: Any, tangent: Tensor, _lanes: Any) -> Tensor | None:  # type: ignore[override]
        return restricted(ctx.level, tangent, ctx.lanes)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple:  # type: ignore[override]
        # Lanes that the result has not are missing, not zero, in what comes back.
        return None, None if cotangent is None else restricted(ctx.level, cotangent, ctx.lanes), None


# --- Python values ---------------------------------------------------------------------------------------------------

# So many ways of its lanes are many for a function: the line where they part is noted, for a warning.
MANY_WAYS = 8


def component(level: LaneLevel, value: Any) -> Any:
    """The tensor of `level`, or of a level around it with its lanes, that a tensor of planes above stands for; or None.

    None too where a plane in between has lanes of its own.
    """
    while isinstance(value, Plane):
        if level.covers(value.level):
            return value
        if isinstance(value, BatchTensor):
            sync(value)
            if value.mapped:
                return None
        value = value.value
    return None


def plainly(value: Tensor) -> Tensor:
    """The plain tensor of a value `[n, *S]`, which must be the same in all lanes of the planes it is on."""
    while isinstance(value, Plane):
        sync(value)
        if type(value) is BatchTensor and value.mapped:
            note_question(value.level)
            value = settle(value.level, value)
        else:
            value = value.value
    if not value.requires_grad and forward_level() < 0:
        return value
    with on_plane(None):
        return value.detach()


def settle(level: BatchLevel, value: BatchTensor) -> Tensor:
    """The tensor below `[*S]` that lanes agree on; where they do not, go on with the largest group of them.

    Where there are no lanes, zeros or ones.

    Raises:
        Disagreement: All lanes of the level run together, or there are none, and its function can be run again for
            that.
    """
    rows = rows_of(level, value)
    with on_plane(None):
        first = rows[:1]
        if not rows.shape[0]:
            return torch.full(rows.shape[1:], answer(level), dtype=rows.dtype, device=rows.device)
        same = rows == first
        if rows.is_floating_point() or rows.is_complex():
            same |= (rows != rows) & (first != first)
        if bool(same.all()):
            return rows[0]
        if not isinstance(level, LaneLevel):
            raise Disagreement(level) if level.restartable else _undecided(level)
        flat = (torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows).reshape(rows.shape[0], -1)
        # The values of one column are sorted several times faster than rows are.
        column, dim = (flat[:, 0], None) if flat.shape[1] == 1 else (flat, 0)
        _, which, counts = column.unique(dim=dim, return_inverse=True, return_counts=True)
        chosen = int(counts.argmax())
        kept = (which == chosen).nonzero().squeeze(1)
        out = rows[kept[0]]
    call = boundary_of(level)
    if call is not None:
        call.differ(level.lanes, which, counts.shape[0])
        if call.calls is None and counts.shape[0] >= MANY_WAYS:
            call.calls = calls_within("boundary")
    narrow(level, kept)
    return out


def _undecided(level: BatchLevel) -> LaneValueError:
    return LaneValueError(
        at_user_line(
            f"data-dependent control flow on a value that differs between the lanes of {level!r}, which cannot part: "
            "they are directions to differentiate along, or cotangents",
            "torch.where(condition, a, b)  # in place of: a if condition else b",
        )
    )


def given_to_running(gradient: Any) -> bool:
    """Whether the lanes that run have been given a gradient. Lanes that have go apart from those that have not."""
    part = gradient
    while isinstance(part, Plane) and not (isinstance(part.level, LaneLevel) and part.mapped):  # type: ignore[attr-defined]
        part = part.value
    if not isinstance(part, BatchTensor):
        return True
    level: Any = part.level
    if current_graph_task_id() != level.task or not can_settle(level):
        return True
    lanes, home = level.lanes, home_of(part)
    if not lanes.size or lanes.places(home) is not None:
        return True
    base = common_ancestor(lanes, home)
    with on_plane(None):
        has = home.inverse(base).index_select(0, lanes.positions(base)) >= 0
    return bool(settle(level, level.wrap(has)))


def share_no_attribute(tensor: Any) -> None:
    """Before an attribute of a tensor is set: it has one for all its lanes, so those that run must be all of them."""
    level = machine.level
    if level is None:
        return
    part = component(level, tensor)
    if part is not None and part.level is level and not home_of(part).within(level.lanes):
        raise Restart(
            level,
            cause=cause_here(
                "not all lanes come to where it sets an attribute of a tensor that was there before",
                "y = x.view_as(x)  # in the branch",
            ),
        )


def rows_of(level: BatchLevel, value: BatchTensor) -> Tensor:
    """The plain rows `[n, *S]` of a value for the lanes that run."""
    here: Any = level.here(value) if isinstance(level, LaneLevel) else value
    return plainly(here.value)


def can_settle(level: Any) -> bool:
    """Whether lanes of the level may take paths of their own."""
    if machine.together or not level.alive:
        return False
    return isinstance(level, LaneLevel) or (isinstance(level, BatchLevel) and level.restartable)


def part_by(level: BatchLevel, numbers: Tensor) -> None:
    """Lanes that differ in a number of theirs, numbers [B], go apart, and the operation begins again. If they can."""
    if can_settle(level):
        inner = innermost(level)
        if inner is not level:
            raise BeginAgain(inner)
        settle(level, level.wrap(numbers))
        raise BeginAgain


parting.by = part_by


def narrow(level: LaneLevel, positions: Tensor) -> None:
    """Go on with the lanes at `positions` [n] of those that run; the innermost boundary runs the others again."""
    machine.parted()
    call = boundary_of(level)
    if call is not None:
        call.narrowings += 1
        if call.calls is None and call.narrowings == MANY_WAYS:
            call.calls = calls_within("boundary")
    if call is not None and machine.level is level:
        call.parted = True
        if call.drew and level.randomness == "different":
            raise Restart(level)
    level.lanes = child(level.lanes, positions)


def boundary_of(level: LaneLevel) -> Boundary | None:
    """The innermost boundary of the level's lanes."""
    for call in reversed(machine.boundaries):
        if call.level is level:
            return call
    return None


def decide(level: LaneLevel, value: Any) -> Any:
    """What a condition says: True or False where lanes agree, else the sides for which it holds or not.

    Args:
        level: The level whose lanes may part.
        value: Anything: a tensor with one element of this level or a plane above it, or what has a truth value.

    Returns:
        True, False, or `(holds, fails)`, positions among the lanes that run.
    """
    part = component(level, value)
    if part is None or (part.level is level and not part.mapped):
        return bool(value)
    note_question(part.level)
    if part.numel() != 1:
        raise TransformError(
            at_user_line(
                f"Boolean value of Tensor with more than one value is ambiguous: its shape in one lane is "
                f"{list(part.shape)}",
                "if (x > 0).all():  # or .any()",
            )
        )
    here = level.here(part)
    if not here.mapped:
        return bool(value)
    rows = plainly(here.value)
    with on_plane(None):
        flags = rows if rows.dim() == 1 else rows.reshape(-1)
        # A copy: which lanes went where is asked later, and the value may be written to until then.
        flags = flags.clone() if flags.dtype is torch.bool else flags != 0
        count = int(flags.count_nonzero())
        if count == 0 or count == flags.shape[0]:
            return bool(count)
        return Parting(flags, count).sides()


def innermost(level: Any) -> Any:
    """The level whose lanes part where a value of `level` differs from lane to lane: the one run for all its pairs."""
    here = machine.level
    if here is not None and here.covers(level):
        return here
    for boundary in reversed(machine.boundaries):
        if boundary.level.covers(level):
            return boundary.level
    return level


def on_home(level: LaneLevel, value: Tensor) -> bool:
    """Whether a value may be used as it is by the lanes that run."""
    part = component(level, value)
    return part is None or level.lanes.within(home_of(part))


def everything(level: BatchLevel) -> Lanes:
    """All lanes of a level."""
    return level.root if isinstance(level, LaneLevel) else lanes_of(level)
