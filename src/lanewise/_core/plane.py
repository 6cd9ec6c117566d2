"""What all wrappers share: the handler, lifting on write, and the meaning of a plane for `detach` and for printing."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import Level, current_level, note_writes, on_plane
from lanewise._core.operations import asked_once, makes_tensors, writes, writes_to_lists
from lanewise._core.parting.lanes import OperationFailed, machine
from lanewise._core.references import known_to_others
from lanewise._torch_compat import (
    INSIDE_KEY_SET,
    OUTSIDE_KEY,
    DispatchKey,
    ForceDispatchKeyGuard,
    current_graph_task_id,
    disabled_torch_function,
    forward_ad,
    forward_level,
    has_kernel_for_key,
    include_key,
    is_composition,
    is_grad_enabled,
    is_inference_mode_enabled,
    keys_of_autocast,
    make_dual,
    make_wrapper,
    set_grad_enabled,
    tls_exclude_set,
    tls_include_set,
    tls_is_included,
)
from lanewise.errors import CapturedWriteError, EscapedTensorError, at_user_line

aten = torch.ops.aten

_NO_KWARGS: dict[str, Any] = {}
_own_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

# The node that a tensor has on its own plane. (`tensor.grad_fn` knows of the planes below, too.)
own_node = Tensor.grad_fn.__get__  # type: ignore[attr-defined]


class Plane(Tensor):
    """A tensor of one plane. It stands for `value`, a tensor of the plane below, as its `level` says.

    torch.autograd works on a wrapper as on any tensor, so derivatives taken on this plane are recorded here, and the
    backward formulas come back to the handler as ordinary operations.

    Attributes:
        is_plane: Tells wrappers from other classes of tensors, where this class cannot be named.
        value: The tensor of the plane below.
        level: The level the wrapper belongs to.
        origin: For a view of an unlifted tensor: `(parent, func, args, kwargs, index)`, how to take the view again
            once the parent is lifted. None otherwise. On lifted tensors it counts for nothing, and is left unset but
            for `()` where the value is that of another wrapper, too.
        captured: Whether it is a leaf of a transform that is an alias of a tensor from outside the function.
        reshaped: Where it was given other shapes in place, what stands for it as it was before each, and as it is now:
            what views of each time are views of.
        array: A weak reference to the array of NumPy's in whose memory it was made.
    """

    __slots__ = ("value", "level", "origin")
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    is_plane = True
    captured = False
    reshaped: tuple | None = None
    array: Any = None
    value: Tensor
    level: Any
    origin: tuple | None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return interpret(func, args, kwargs or _NO_KWARGS)


def interpret(func: Any, args: tuple, kwargs: dict) -> Any:
    """Hand one operation to the highest level among its operands."""
    if func.is_view and is_inference_mode_enabled() and isinstance(args[0], Tensor) and not args[0].is_inference():
        return _ordinary_view(func, args, kwargs)
    operands = tensors_of(args, kwargs)
    level = None
    for operand in operands:
        if isinstance(operand, Plane) and (level is None or operand.level.order > level.order):
            level = operand.level
    assert level is not None, func
    inside = tls_is_included(OUTSIDE_KEY)
    here = current_level() if inside else None
    if here is not None and level.order < here.order and makes_tensors(func):
        return here.factory(func, args, kwargs)
    if writes(func):
        if here is not None:
            if level.order < here.order:
                here.check_write_outside(level)
            note_writes(here, func, args, kwargs)
        if writes_to_lists(func):
            _count_versions(func, args, kwargs)
    if not level.alive and (here is None or here.alive):
        lost = _kept_lanes(operands)
        if lost is None and makes_tensors(func):
            return _outlived(level, func, args, kwargs)
        if lost is not None and current_graph_task_id() == -1:
            raise escaped(lost, func)
    parting = machine.level
    if parting is not None and parting is not level and func._schema.is_mutable:
        parting.check_write_above(func, args, kwargs, operands)
    if inside:
        include_key(OUTSIDE_KEY, False)
    try:
        return level.interpret(func, args, kwargs, operands)
    except Exception as error:
        if getattr(level, "restartable", False):
            machine.raised.append((OperationFailed, level))
        failure = level.failure(error, func, args, kwargs)
        if failure is error:
            raise
        raise failure.with_traceback(None) from None
    finally:
        if inside:
            include_key(OUTSIDE_KEY, True)


def _count_versions(func: Any, args: tuple, kwargs: dict) -> None:
    """A write to tensors in a list counts as a version of each, by which autograd knows of it.

    torch leaves that to what is done to each, which is done to the values below.
    """
    for position, name in written_arguments(func):
        written = argument(args, kwargs, position, name)
        if type(written) is list:
            torch.autograd.graph.increment_version([each for each in written if not each.is_inference()])


def taken_apart(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A composition by torch's own kernel, as everywhere outside of inference mode.

    `OpOverload.decompose` puts compositions in Python first, some of which make use of other operations. What is made
    on the way belongs to the plane of the operands, though a handler of theirs runs.
    """
    if not is_composition(func):
        return func.decompose(*args, **kwargs)
    exclude = tls_exclude_set() - INSIDE_KEY_SET
    if not has_kernel_for_key(func.name(), "AutocastCPU"):
        # One that autocast does not cast itself: its parts are cast where the user's code runs under autocast.
        exclude = exclude - keys_of_autocast()
    with ForceDispatchKeyGuard(tls_include_set() | INSIDE_KEY_SET, exclude):
        return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _ordinary_view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view, in inference mode, of a tensor made outside of it: like that, no inference tensor."""
    with torch.inference_mode(False):
        set_grad_enabled(False)
        return interpret(func, args, kwargs)


def _kept_lanes(operands: list[Tensor]) -> Any:
    """The level of an operand that has lanes, or a tangent, of a transform that has ended; None if there is none."""
    for operand in operands:
        if isinstance(operand, Plane) and not operand.level.alive:
            sync(operand)
            if operand.level.lifted(operand):
                return operand.level
    return None


def _outlived(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation on tensors kept from a level that has ended: they stand for tensors of the plane below it."""

    def standing(tensor: Tensor) -> Tensor:
        return tensor.value if isinstance(tensor, Plane) and not tensor.level.alive else tensor

    args, kwargs = replace_tensors(standing, args, kwargs)
    with ForceDispatchKeyGuard(level.include, level.exclude):
        return func(*args, **kwargs)


def recorded(tensor: Tensor) -> bool:
    """Whether autograd records the tensor on its own plane. (`tensor.requires_grad` tells of the planes below too.)"""
    return _own_requires_grad(tensor)


def tracked(tensor: Any) -> bool:
    """Whether a tensor is recorded on its plane or on one below, as a loop over the lanes would see it."""
    while isinstance(tensor, Plane):
        tangent = getattr(tensor, "tangent", None)
        if _own_requires_grad(tensor) or (tangent is not None and tracked(tangent)):
            return True
        tensor = tensor.value
    return tensor.requires_grad


def numbers_of(value: Tensor) -> Tensor:
    """The numbers of all lanes of all planes, as a plain tensor."""
    while isinstance(value, Plane):
        value = value.value
    return value.detach()


def tangents_of(value: Any) -> list[Tensor]:
    """The tangents that a value carries on all planes, and theirs."""
    found: list[Tensor] = []
    while isinstance(value, Plane):
        tangent = getattr(value, "tangent", None)
        if tangent is not None:
            found += [tangent, *tangents_of(tangent)]
        value = value.value
    return found


def detached(tensor: Tensor) -> Tensor:
    """An alias without history on the tensor's own plane; the planes below keep theirs."""
    if isinstance(tensor, Plane):
        return tensor.level.alias(tensor)
    with on_plane(None):
        return tensor.detach()


def cut(value: Tensor) -> Tensor:
    """`detached` by a user: without history on any plane."""
    return value.detach() if isinstance(value, Plane) else detached(value)


def without_history(tensor: Tensor) -> Tensor:
    """`detached`, but for the tangent of torch's own forward mode, which stays."""
    if forward_level() < 0 or isinstance(tensor, Plane):
        return detached(tensor)
    primal, tangent = forward_ad.unpack_dual(tensor, level=0)
    return detached(primal) if tangent is None else make_dual(detached(primal), detached(tangent), level=0)


def with_memory(value: Tensor) -> Tensor:
    """A value that has memory, which zeros that torch.autograd has computed may lack: kernels below a plane need it."""
    if not value._is_zerotensor():
        return value
    with on_plane(None):
        return value.clone()


def tensors_of(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors among an operation's arguments, lists of tensors included."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif type(arg) is list or type(arg) is tuple:
            found.extend([item for item in arg if isinstance(item, Tensor)])
    if kwargs:
        for arg in kwargs.values():
            if isinstance(arg, Tensor):
                found.append(arg)
            elif type(arg) is list or type(arg) is tuple:
                found.extend([item for item in arg if isinstance(item, Tensor)])
    return found


def map_tensors(fn: Any, value: Any) -> Any:
    """Apply `fn` to each tensor of an argument or a result, keeping lists and tuples."""
    if isinstance(value, Tensor):
        return fn(value)
    kind = type(value)
    if kind is list or kind is tuple:
        # Looked at here, which spares a call for each of them.
        return kind([fn(item) if isinstance(item, Tensor) else map_tensors(fn, item) for item in value])
    if isinstance(value, tuple):
        return kind(*[map_tensors(fn, item) for item in value])
    return value


def replace_tensors(fn: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """`args` and `kwargs` with `fn` applied to each tensor."""
    return tuple([map_tensors(fn, arg) for arg in args]), {key: map_tensors(fn, arg) for key, arg in kwargs.items()}


def escaped(level: Level, func: Any) -> EscapedTensorError:
    """The error for an operation on a wrapper whose transform has ended."""
    done = "vmapped" if repr(level).startswith("vmap") else "transformed"
    return EscapedTensorError(
        at_user_line(
            f"{func}: your tensor may have escaped from inside a function being {done}: it belongs to "
            f"{level!r}, which has ended. It was kept in a list, an attribute or a closure.",
            "return the tensor from the function, and use what the transform returns",
        )
    )


def new_wrapper(kind: type, value: Tensor, shape: Any, strides: Any) -> Any:
    """A bare wrapper of class `kind` with the dtype and device of `value`."""
    return make_wrapper(kind, shape, strides, None, None, value.dtype, torch.strided, value.device)


# In place of an index in `origin`: a view without the history that its parent has on the planes below.
CUT = object()


def sync(wrapper: Plane) -> None:
    """Bring an unlifted view up to date: if its parent was lifted since, the view is taken again."""
    level = wrapper.level
    if level.lifted(wrapper):
        return
    origin = wrapper.origin
    if origin is None:
        return
    parent, func, args, kwargs, index = origin
    if not isinstance(parent, Plane):
        return
    if parent.reshaped is not None:
        parent = parent.reshaped[0]
    if hasattr(parent, "replaced"):
        parent = _of_its_memory(wrapper, parent)
    sync(parent)
    if level.lifted(parent):
        with at_home(parent), keep_history(wrapper.value):
            view = level.interpret(func, (parent, *args), kwargs, [parent])
            if index is CUT:
                view.value = level.below(cut, view.value)
        level.copy_slots(wrapper, view if index is None or index is CUT else view[index])


def _of_its_memory(wrapper: Any, parent: Any) -> Any:
    """What an unlifted view is a view of: where `parent` was given other data since, what stands for it as it was."""
    for before in parent.replaced:
        if _memory(before) == _memory(wrapper):
            wrapper.origin = (before, *wrapper.origin[1:])
            return before
    return parent


def _memory(tensor: Any) -> int:
    while isinstance(tensor, Plane):
        tensor = tensor.value
    return tensor.untyped_storage().data_ptr()


class at_home:
    """All lanes that a value was made for run inside, where some have parted: what is made is to stand beside it."""

    __slots__ = ("value", "running")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.running: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        part = self.value
        while isinstance(part, Plane):
            level, home = part.level, getattr(part, "home", None)
            if home is not None and level.alive and level.lanes is not home:
                self._run(level, home)
            for call in machine.boundaries:
                pairs = call.level
                if pairs is not level and pairs.lanes is not pairs.root and pairs.covers(level):
                    self._run(pairs, pairs.root)  # it has the lanes of a `vmap` around theirs
            part = part.value

    def _run(self, level: Any, lanes: Any) -> None:
        self.running.append((level, level.lanes))
        level.lanes = lanes

    def __exit__(self, *exc: object) -> None:
        for level, lanes in reversed(self.running):
            level.lanes = lanes


@contextmanager
def keep_history(value: Tensor) -> Iterator[None]:
    """What stands for a value from here on is recorded as that is, though the user's code does not record now."""
    if is_grad_enabled() or not tracked(value):
        yield
        return
    set_grad_enabled(True)
    try:
        yield
    finally:
        set_grad_enabled(False)


def lift(wrapper: Plane, writes: bool = True) -> None:
    """Give an unlifted tensor lanes (or a tangent) of its own, and the tensor it is a view of: to write, or not to."""
    sync(wrapper)
    if wrapper.level.lifted(wrapper):
        return
    origin = wrapper.origin
    if origin is None and not (writes and wrapper.level.moves and wrapper.captured):
        if writes and wrapper.array is not None and hasattr(wrapper, "mapped"):
            _check_array(wrapper)
        with at_home(wrapper.value):
            wrapper.level.lift(wrapper)
    elif origin is not None and isinstance(origin[0], Plane):
        lift(origin[0])
        sync(wrapper)
    else:
        through = "the argument of a gradient" if origin is None else "its `detach()`"
        why = (
            f"{wrapper.level!r}: inplace arithmetic(self, *extra_args) is not possible because there exists a Tensor "
            f"`other` in extra_args that has more elements than `self`: a value of this level would be written into "
            f"{list(wrapper.shape)}, the memory of a tensor from outside the function (through {through})"
        )
        raise CapturedWriteError(at_user_line(why, "t = t.detach().clone()  # inside the function"))


def _check_array(wrapper: Plane) -> None:
    if known_to_others(wrapper.array):
        why = (
            f"{wrapper.level!r}: a value that differs from lane to lane would be written into {list(wrapper.shape)}, "
            "the memory of a NumPy array, which has no lanes"
        )
        raise CapturedWriteError(at_user_line(why, "t = torch.tensor(array)  # a copy: each lane has its own"))


def wrap_unlifted(level: Any, func: Any, args: tuple, kwargs: dict, out: Any) -> Any:
    """Wrap the results of an operation on unlifted tensors; views remember how they were taken."""
    if func.is_view and getattr(args[0], "reshaped", None) is not None:
        args = (args[0].reshaped[-1], *args[1:])
    if isinstance(out, Tensor):
        origin = (args[0], func, args[1:], kwargs, None) if func.is_view else None
        return level.adopt(out, origin)
    if isinstance(out, (list, tuple)) and any(isinstance(item, Tensor) for item in out):
        wrapped = [
            level.adopt(item, (args[0], func, args[1:], kwargs, i) if func.is_view else None)
            if isinstance(item, Tensor)
            else item
            for i, item in enumerate(out)
        ]
        return type(out)(wrapped) if type(out) in (list, tuple) else type(out)(*wrapped)
    return out


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    return tuple(
        (i, arg.name)
        for i, arg in enumerate(func._schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    )


@cache
def returns_written(func: Any) -> bool:
    """Whether an operation writes, and what it returns are the arguments that it wrote to, not new tensors."""
    return func._schema.is_mutable and all(result.alias_info is not None for result in func._schema.returns)


# Running statistics that operations write to, though their schemas do not say so: the places of the arguments, and of
# the one that tells whether it is done.
STATISTICS: dict[Any, tuple[tuple[int, int], int | None]] = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.batch_norm.default: ((3, 4), 5),  # in inference mode, compositions come as they are
    aten._batch_norm_impl_index.default: ((3, 4), 5),
    aten.instance_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
    aten.batch_norm_update_stats.default: ((1, 2), None),
    aten.batch_norm_gather_stats.default: ((3, 4), None),
    aten.batch_norm_gather_stats_with_counts.default: ((3, 4), None),
}


def is_lazy_conjugate(tensor: Any) -> bool:
    """Whether the plain tensor at the bottom is one."""
    while isinstance(tensor, Plane):
        sync(tensor)
        tensor = tensor.value
    return tensor.is_conj()


def written_statistics(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The running statistics that an operation writes to, though its schema does not say so."""
    found = STATISTICS.get(func)
    if found is None:
        return []
    places, flag = found
    names = [arg.name for arg in func._schema.arguments]
    if flag is not None and not argument(args, kwargs, flag, names[flag]):
        return []
    given = [argument(args, kwargs, place, names[place]) for place in places]
    return [statistic for statistic in given if statistic is not None]


@asked_once
def updates_statistics(func: Any) -> bool:
    """Whether an operation may write to running statistics."""
    return func in STATISTICS


def versioned(tensor: Tensor) -> list[Tensor]:
    """A tensor and those below it that count their versions."""
    chain = [tensor]
    while isinstance(chain[-1], Plane):
        chain.append(chain[-1].value)
    return [each for each in chain if not each.is_inference()]


def argument(args: tuple, kwargs: dict, position: int, name: str) -> Any:
    """The argument of that position and name, or None where the default stands."""
    return args[position] if position < len(args) else kwargs.get(name)


def written_results(func: Any, args: tuple, kwargs: dict) -> Any:
    """What an in-place operation returns: the arguments that it wrote to."""
    returns = func._schema.returns
    if not returns:
        return None
    written = [argument(args, kwargs, position, name) for position, name in written_arguments(func)]
    return written[0] if len(returns) == 1 else tuple(written)
