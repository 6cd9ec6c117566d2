"""Control flow as functions: `cond`, `switch`, `while_loop`, `fori_loop`.

They run on the same lane sets as plain Python: each lane takes its own branch or number of steps, a branch that it does
not take costs it nothing and contributes nothing to its derivatives.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor

from lanewise._control.functional.checks import (
    check_count,
    check_functions,
    check_predicate,
    check_state,
    fail_where,
    state_mismatch,
)
from lanewise._control.runs.naming import name_lanes
from lanewise._control.runs.results import as_tensor, put_together
from lanewise._core.batch import BatchTensor
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import decide, innermost, rows_of
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import Lanes, child, merge_target
from lanewise._core.parting.unasked import note_question
from lanewise._core.plane import Plane, sync
from lanewise._core.trees import flatten, unflatten
from lanewise.errors import ArgumentError, TransformError, at_user_line, shows_user_frames


def lane_level(value: Any) -> LaneLevel | None:
    """The level whose lanes part by `value`; None where it is no lane value, or its lanes all run together so far."""
    while isinstance(value, Plane):
        if isinstance(value, BatchTensor):
            sync(value)
            if value.mapped:
                level = innermost(value.level)
                return level if isinstance(level, LaneLevel) else None
        value = value.value
    return None


def _branch(level: LaneLevel, lanes: Lanes, run: Callable[[], Any]) -> tuple[Lanes, Any]:
    """A result for some of the lanes, and for which: fewer than asked for where lanes part further on."""
    level.lanes = lanes
    out = run()
    return level.lanes, out


def _join(level: LaneLevel, base: Lanes, parts: list[tuple[Lanes, Any]]) -> Any:
    pieces = [lanes for lanes, _ in parts]
    target = merge_target(base, pieces)
    level.lanes = target.lanes
    return put_together(level, target, pieces, [value for _, value in parts])


@shows_user_frames
def cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Sequence[Any] = ()) -> Any:
    """Call one of two functions, each lane the one that its predicate says.

    Args:
        pred: A bool, or a tensor with one element.
        true_fn: A function of `*operands`.
        false_fn: Another, whose result has the same structure, shapes and dtypes.
        operands: Arguments, any structures of tensors.

    Returns:
        What the chosen function returns. Only that one runs where all lanes agree.

    Raises:
        TypeError: `operands` is a tensor, not a sequence of arguments, or `pred` is no truth.
        TransformError: `pred` has more elements than one, or lanes take branches whose results do not match.

    Example:
        >>> import torch
        >>> from lanewise import cond, vmap
        >>> f = lambda x: cond(x > 0, torch.sqrt, torch.zeros_like, (x,))
        >>> vmap(f)(torch.tensor([4.0, -1.0, 9.0]))
        tensor([2., 0., 3.])
    """
    check_functions("cond", true_fn=true_fn, false_fn=false_fn)
    if isinstance(operands, Tensor) or not isinstance(operands, Iterable):
        kind = "a tensor, whose rows would be the arguments" if isinstance(operands, Tensor) else f"{type(operands)}"
        raise TypeError(
            at_user_line(
                f"cond: operands must be a sequence of arguments, got {kind}",
                "cond(pred, true_fn, false_fn, (x,))",
            )
        )
    check_predicate("cond: pred", pred, "cond((x > 0).all(), true_fn, false_fn, (x,))")
    level = lane_level(pred)
    way = bool(pred) if level is None else decide(level, pred)
    if way is True or way is False:
        return true_fn(*operands) if way else false_fn(*operands)
    assert level is not None
    holds, fails = way
    base = level.lanes
    parts = [
        _branch(level, child(base, holds), lambda: true_fn(*operands)),
        _branch(level, child(base, fails), lambda: false_fn(*operands)),
    ]
    return _join(level, base, parts)


@shows_user_frames
def switch(index: Any, branches: Sequence[Callable], *operands: Any) -> Any:
    """Call one of several functions, each lane the one at its index.

    Args:
        index: A whole number, or a tensor of one with one element; clamped to `0 ... len(branches) - 1`.
        branches: Functions of `*operands`. Their results have the same structure, shapes and dtypes.
        operands: Arguments.

    Returns:
        What the chosen function returns.

    Raises:
        TypeError: `index` is no number, or `branches` are no functions.
        ArgumentError: There are no branches, or `index` has more elements than one.

    Example:
        >>> import torch
        >>> from lanewise import switch, vmap
        >>> f = lambda i, x: switch(i, [torch.sin, torch.cos, torch.zeros_like], x)
        >>> vmap(f)(torch.tensor([1, 2]), torch.zeros(2))
        tensor([1., 0.])
    """
    if not (hasattr(branches, "__len__") and hasattr(branches, "__getitem__")):
        why = f"switch: branches must be a sequence of functions, got {type(branches)}"
        raise TypeError(at_user_line(why, "switch(index, [f, g], x)"))
    check_functions("switch", **{f"branches[{place}]": branch for place, branch in enumerate(branches)})
    if not isinstance(index, float) and not hasattr(index, "__index__"):
        why = f"switch: index must be a whole number, or a tensor of one, got {type(index)}"
        raise TypeError(at_user_line(why, "switch(index, [f, g], x)"))
    if isinstance(index, Tensor) and index.numel() != 1:
        why = f"switch: index must be a whole number, or a tensor of one, got a tensor {list(index.shape)}"
        raise ArgumentError(at_user_line(why, "switch(index[0], [f, g], x)  # or a vmap over the numbers"))
    if not branches:
        raise ArgumentError(at_user_line("switch: there are no branches", "switch(index, [f, g], x)"))
    last = len(branches) - 1
    level = lane_level(index)
    if level is None:
        return branches[min(max(int(index), 0), last)](*operands)
    note_question(level)
    rows = rows_of(level, _part(level, index))
    with on_plane(None):
        chosen = rows.reshape(-1).clamp(0, last)
        present = chosen.unique().tolist()
        places = [(chosen == k).nonzero().squeeze(1) for k in present]
    base = level.lanes
    if len(present) == 1:
        return branches[present[0]](*operands)
    if not present:
        return branches[0](*operands)
    parts = [
        _branch(level, child(base, where), lambda k=k: branches[k](*operands)) for k, where in zip(present, places)
    ]
    return _join(level, base, parts)


def _part(level: LaneLevel, value: Any) -> Any:
    """The tensor of the level that a tensor of planes above stands for."""
    while isinstance(value, Plane) and not level.covers(value.level):
        value = value.value
    return level.here(value)


@shows_user_frames
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init: Any,
    *,
    max_steps: int | None = None,
    mode: Literal["compact", "mask"] = "compact",
    checkpoint: bool = False,
) -> Any:
    """Repeat a function while a condition holds, in each lane as often as that lane asks for.

    Args:
        cond_fun: The state -> whether to go on: a bool, or a tensor with one element.
        body_fun: The state -> the next state, of the same structure, shapes and dtypes.
        init: The first state: any structure of tensors and numbers.
        max_steps: Raise where a lane wants to go on after so many steps. None: no bound.
        mode: `"compact"` runs the body for the lanes that go on only. `"mask"` runs it for all and keeps the old state
            of those that are done, which is quicker where the body is cheap; there the body must be defined, and have
            finite derivatives, at the final states, too.
        checkpoint: Keep only some of the states for a backward pass, about the square root of twice their number, and
            compute the others again. Works in `"mask"` mode.

    Returns:
        The state in which the condition fails.

    Raises:
        TransformError: More than `max_steps` steps, states that do not match, or a condition of more elements than one.
        TypeError: A condition that is no truth, or `max_steps` is no whole number.
        ArgumentError: An unknown `mode`, or `max_steps` is negative.

    Example:
        >>> import torch
        >>> from lanewise import vmap, while_loop
        >>> half = lambda x: while_loop(lambda x: x > 1, lambda x: x / 2, x)
        >>> vmap(half)(torch.tensor([5.0, 1.0, 3.0]))
        tensor([0.6250, 1.0000, 0.7500])
    """
    check_functions("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    _check_mode("while_loop", mode)
    if max_steps is not None:
        check_count(
            "while_loop: max_steps", max_steps, "while_loop(cond_fun, body_fun, init, max_steps=100)  # or None"
        )
    if checkpoint:
        return _checkpointed(cond_fun, body_fun, init, max_steps)
    if mode == "mask":
        state, _, _ = _masked(cond_fun, body_fun, init, None, max_steps, 0)
        return state
    return _compact(cond_fun, body_fun, init, max_steps)


def _check_mode(name: str, mode: str) -> None:
    if mode not in ("compact", "mask"):
        raise ArgumentError(
            at_user_line(f'{name}: mode is {mode!r}, not "compact" or "mask"', f'{name}(..., mode="mask")')
        )


_CONDITION = "while_loop: what cond_fun returns"
_CONDITION_INSTEAD = "while_loop(lambda state: (state < 3).all(), body_fun, init)  # or .any()"


def _compact(cond_fun: Callable, body_fun: Callable, init: Any, max_steps: int | None) -> Any:
    level: LaneLevel | None = None
    base: Any = None
    done: list[tuple[Lanes, Any]] = []
    step, state = 0, init
    try:
        while True:
            pred = cond_fun(state)
            check_predicate(_CONDITION, pred, _CONDITION_INSTEAD)
            if level is None:
                level = lane_level(pred)
                base = None if level is None else level.lanes
            way = bool(pred) if level is None else decide(level, pred)
            if way is False:
                break
            if way is not True:
                assert level is not None
                holds, fails = way
                running = level.lanes
                done.append((child(running, fails), state))
                level.lanes = child(running, holds)
            if step == max_steps:
                raise _too_many(step)
            state = body_fun(state)
            step += 1
    except Exception as error:
        check_state("while_loop", "body_fun", init, state, error)
        raise
    if not done:
        return state
    assert level is not None
    done.append((level.lanes, state))
    return _join(level, base, done)


def _too_many(steps: int) -> TransformError:
    return TransformError(
        at_user_line(
            f"while_loop: the condition still holds after max_steps={steps} steps",
            "while_loop(cond_fun, body_fun, init, max_steps=...)  # more, or a condition that fails at some time",
        )
    )


def _masked(
    cond_fun: Callable, body_fun: Callable, state: Any, going: Any, max_steps: int | None, step: int, stop: int = -1
) -> tuple[Any, Any, int]:
    """Steps for all lanes; those whose condition has failed keep their state. Up to `stop` steps if that is not -1.

    Returns the state, who goes on (None: not asked yet), and the number of steps so far.
    """
    leaves, spec = flatten(state)
    leaves = [as_tensor(leaf) for leaf in leaves]
    while step != stop:
        pred = cond_fun(unflatten(leaves, spec))
        check_predicate(_CONDITION, pred, _CONDITION_INSTEAD)
        pred = as_tensor(pred).reshape(())
        going = pred if going is None else torch.logical_and(going, pred)
        if not _any_lane(going):
            break
        if step == max_steps:
            lanes = fail_where(going)
            if lanes == []:
                break  # other lanes around go on, which are left behind
            error = _too_many(step)
            if lanes:
                name_lanes(error, lanes)
            raise error
        state = unflatten(leaves, spec)
        following = body_fun(state)
        after, after_spec = flatten(following)
        if after_spec != spec or any(leaf is None for leaf in after):
            raise state_mismatch("while_loop", "body_fun", state, following)
        leaves = [_kept_or_next(going, as_tensor(new), old) for new, old in zip(after, leaves)]
        step += 1
    return unflatten(leaves, spec), going, step


def _kept_or_next(going: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The next state of lanes that go on, and the old one of the others."""
    try:
        return torch.where(going, new, old)
    except RuntimeError:
        if new.shape == old.shape:
            raise
        why = (
            f"while_loop: body_fun returns a tensor {list(new.shape)} where the state has {list(old.shape)}, which "
            'mode="mask" and checkpoint=True cannot carry along'
        )
        instead = "return a state of the shapes of `init`\nwhile_loop(cond_fun, body_fun, init)  # which can"
        raise TransformError(at_user_line(why, instead)) from None


def _any_lane(going: Tensor) -> bool:
    """Whether any lane goes on."""
    value: Any = going
    while isinstance(value, Plane):
        if isinstance(value, BatchTensor):
            sync(value)
            if isinstance(value.level, LaneLevel) and value.level.alive:
                value = value.level.here(value)
        value = value.value
    with on_plane(None):
        return bool(value.detach().any())


def _checkpointed(cond_fun: Callable, body_fun: Callable, state: Any, max_steps: int | None) -> Any:
    """Segments of one more step each time: as many are kept as the longest is long.

    A segment's states are computed again when its gradient is (Griewank, "Achieving logarithmic growth of temporal and
    spatial complexity in reverse automatic differentiation", 1992, in its simplest form).
    """
    leaves, spec = flatten(state)
    leaves = [as_tensor(leaf) for leaf in leaves]
    step, length = 0, 1
    while True:

        def segment(*given: Tensor, first: int = step, stop: int = step + length) -> tuple:
            out, going, count = _masked(cond_fun, body_fun, unflatten(list(given), spec), None, max_steps, first, stop)
            return (*flatten(out)[0], going, count)

        *leaves, going, count = torch.utils.checkpoint.checkpoint(segment, *leaves, use_reentrant=False)  # type: ignore[misc]
        if count < step + length or not _any_lane(going):
            return unflatten(list(leaves), spec)
        step, length = count, length + 1


@shows_user_frames
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init: Any,
    *,
    mode: Literal["compact", "mask"] = "compact",
    checkpoint: bool = False,
) -> Any:
    """Call `state = body_fun(i, state)` for i from `lower` to `upper - 1`, bounds of each lane's own.

    Args:
        lower: A whole number, or a tensor of one with one element.
        upper: Likewise.
        body_fun: `(i, state)` -> the next state, of the same structure, shapes and dtypes.
        init: The first state.
        mode: As for `while_loop`, where the bounds are tensors or `checkpoint` is set.
        checkpoint: As for `while_loop`.

    Returns:
        The last state.

    Raises:
        ArgumentError: An unknown `mode`.

    Example:
        >>> import torch
        >>> from lanewise import fori_loop, vmap
        >>> power = lambda x, n: fori_loop(0, n, lambda i, y: y * x, torch.ones(()))
        >>> vmap(power)(torch.tensor([2.0, 3.0]), torch.tensor([3, 2]))
        tensor([8., 9.])
    """
    check_functions("fori_loop", body_fun=body_fun)
    for name, bound in (("lower", lower), ("upper", upper)):
        if not hasattr(bound, "__index__"):
            why = f"fori_loop: {name} must be a whole number, or a tensor of one, got {type(bound)}"
            raise TypeError(at_user_line(why, "fori_loop(0, n, body_fun, init)"))
    _check_mode("fori_loop", mode)
    if not (isinstance(lower, Tensor) or isinstance(upper, Tensor) or checkpoint):
        state = init
        try:
            for i in range(lower, upper):
                state = body_fun(i, state)
        except Exception as error:
            check_state("fori_loop", "body_fun", init, state, error)
            raise
        return state

    def step(state: tuple) -> tuple:
        i, inner = state
        return i + 1, body_fun(i, inner)

    start = lower if isinstance(lower, Tensor) else torch.tensor(lower)
    return while_loop(lambda state: state[0] < upper, step, (start, init), mode=mode, checkpoint=checkpoint)[1]
