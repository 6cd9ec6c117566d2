"""`error_if`, a check of lane values that names the lanes it fails for, and checks of what operators are given."""

from typing import Any

from torch import Tensor

from lanewise._control.runs.naming import lane_names
from lanewise._core.batch import BatchTensor
from lanewise._core.level import on_plane
from lanewise._core.parting.joins import can_settle, innermost, narrow, rows_of
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.parting.lanes import OperationFailed, child, machine
from lanewise._core.plane import Plane, sync
from lanewise._core.trees import flatten
from lanewise.errors import ArgumentError, CheckError, TransformError, at_user_line, lanes_in_words


def error_if(x: Any, pred: Any, msg: str) -> Any:
    """Return `x`, or raise if `pred` holds in any lane.

    Args:
        x: Anything; handed through.
        pred: A bool, or a tensor of bools of any shape.
        msg: What is wrong.

    Returns:
        `x` itself.

    Raises:
        CheckError: `pred` holds somewhere; its `lanes` are the lanes concerned, pairs of numbers in nested `vmap`s.
            Code of the function that catches it does so in these lanes; the others go on.

    Example:
        >>> import torch
        >>> from lanewise import error_if, vmap
        >>> f = lambda x: error_if(x, x < 0, "negative").sqrt()
        >>> vmap(f)(torch.tensor([4.0, 9.0]))
        tensor([2., 3.])
        >>> vmap(f)(torch.tensor([4.0, -9.0, -1.0]))
        Traceback (most recent call last):
        lanewise.errors.CheckError: negative (lanes 1, 2)...
    """
    failing = fail_where(pred)
    if failing:
        raise CheckError(at_user_line(f"{msg} ({lanes_in_words(failing)})"), failing)
    if failing is None:
        raise CheckError(at_user_line(msg), [])
    return x


def fail_where(pred: Any) -> list | None:
    """Before an error of the lanes in which any element holds: they go on, and are returned as errors name them.

    None where it has no lanes and holds.
    """
    value: Any = pred
    while isinstance(value, Plane):
        if isinstance(value, BatchTensor):
            sync(value)
            if value.mapped:
                break
        value = value.value
    if not isinstance(value, BatchTensor):
        return None if bool(value.any() if isinstance(value, Tensor) else value) else []
    level: Any = innermost(value.level)
    rows = rows_of(level, value)
    with on_plane(None):
        holds = (rows.reshape(rows.shape[0], -1) != 0).any(1)
        places = holds.nonzero().squeeze(1)
    if not places.shape[0]:
        return []
    if not isinstance(level, LaneLevel):
        if level.restartable and places.shape[0] < level.size:
            # Outside of all, it is raised at once: lanes that part run slower, also in later calls.
            machine.raised.append((OperationFailed, level, True) if level.parent else (OperationFailed, level))
        return [level.start + place for place in places.tolist()]
    names = lane_names(level, child(level.lanes, places))
    if places.shape[0] < level.lanes.size and can_settle(level):
        narrow(level, places)
    return names


def check_functions(api: str, **functions: Any) -> None:
    """Refuse something else in place of a function, by the name of the argument."""
    for name, function in functions.items():
        if not callable(function):
            why = f"{api}: {name} must be a function, got {type(function)}"
            raise TypeError(
                at_user_line(why, f"{api}(..., {name}=f, ...)" if name.isidentifier() else f"{api}(index, [f, g], x)")
            )


def check_predicate(what: str, pred: Any, instead: str) -> None:
    """Refuse what is no truth of one thing. `what`: the operator and the argument that says whether to go on."""
    if isinstance(pred, Tensor):
        if pred.numel() != 1:
            raise TransformError(
                at_user_line(
                    f"{what} is a bool, or a tensor with one element. Boolean value of Tensor with more than one value "
                    f"is ambiguous: its shape is {list(pred.shape)}",
                    instead,
                )
            )
    elif pred is None or isinstance(pred, (str, bytes)) or callable(pred):
        raise TypeError(at_user_line(f"{what} is a bool, or a tensor with one element, got {type(pred)}", instead))


def check_count(what: str, count: Any, instead: str) -> None:
    """Refuse what is no number of steps."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(at_user_line(f"{what} must be a whole number, got {count!r}", instead))
    if count < 0:
        raise ArgumentError(at_user_line(f"{what} must be 0 or more, got {count!r}", instead))


def check_state(operator: str, function: str, init: Any, state: Any, error: Exception) -> None:
    """After an error in a step: raise another where the state no longer has the structure of the first one.

    An error that the user's code raises by a name of its own stays.
    """
    if type(error) not in (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return
    expected, found = flatten(init), flatten(state)
    if expected[1] != found[1] or any(new is None and old is not None for new, old in zip(found[0], expected[0])):
        raise state_mismatch(operator, function, init, state) from error


def state_mismatch(operator: str, function: str, init: Any, state: Any) -> TransformError:
    expected, found = flatten(init)[1], flatten(state)[1]
    if expected == found:
        why = f"{operator}: {function} returns {in_words(state)} where `init` is {in_words(init)}"
    else:
        why = f"{operator}: {function} returns a state of another structure, {found}, than `init` has, {expected}"
    return TransformError(at_user_line(why, "return a state of the structure of `init`"))


def in_words(value: Any) -> str:
    """What a function has returned, in short."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{type(value)}"
