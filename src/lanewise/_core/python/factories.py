"""Tensors made inside a transformed function: wrapped on the innermost plane, so that its values may be written there.

Two dispatch keys are switched on while a level is open. On one, ahead of autograd, kernels see the factories. On the
other, of lower priority than the wrappers' own, they see what has no operand of any plane: its results are like a
factory's. Both are off while a backend kernel runs, which must get plain tensors from the factories that it calls.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.draws.random import is_random
from lanewise._core.functions.numbers import number_classes
from lanewise._core.level import Level, current_level, route_name, run_outside
from lanewise._core.one_lane import FAILURES
from lanewise._core.plane import Plane, tensors_of
from lanewise._core.python.arrays import in_memory_of, tensor_behind
from lanewise._core.trees import flatten, stand_for_leaves, unflatten
from lanewise._torch_compat import (
    FACTORY_KEY,
    FACTORY_KEY_NAME,
    FACTORY_KEY_SET,
    OUTSIDE_KEY_NAME,
    ExcludeDispatchKeyGuard,
    OpOverload,
    has_composite_kernel,
    never_compile,
    operator_names,
    peer_engine_active,
    tls_is_excluded,
)
from lanewise.errors import LanewiseError

# Names of overloads that are handed to a kernel of their own.
_hooked: set[str] = set()
_kernels = torch.library.Library("aten", "IMPL")
_collectives = torch.library.Library("_c10d_functional", "IMPL")


def adopt_results_of(*ops: OpOverload) -> None:
    """Route these overloads through the innermost level while one is open."""
    for op in ops:
        route(op, _factory_kernel(op))


def adopt_results_of_name(name: str) -> None:
    """The same for `torch.<name>`, whose overload must not be routed: torch.tensor and kernels write to its memory."""
    plain = getattr(torch, name)

    @functools.wraps(plain)
    def made(*args: Any, **kwargs: Any) -> Any:
        level = None if tls_is_excluded(FACTORY_KEY) else current_level()
        if level is None or (kwargs and kwargs.get("out") is not None):
            return plain(*args, **kwargs)
        for operand in tensors_of(args, kwargs):
            if _on_plane(operand, level):
                return plain(*args, **kwargs)
        leaf = kwargs.pop("requires_grad", False) if kwargs else False
        run = plain if level.parent is None else made
        out = level.below(functools.partial(run, **kwargs) if kwargs else run, *args)
        out = out if level.shares else level.adopt(out)
        return out.requires_grad_() if leaf else out

    never_compile(made)
    route_name(name, made)


def join_lists_in(name: str) -> None:
    """Let `torch.<name>`, given a nested list that holds wrappers, stack them: torch reads each as a Python number."""
    plain = getattr(torch, name)

    @functools.wraps(plain)
    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        if current_level() is None:
            return plain(data, *args, **kwargs)
        if type(data) in stand_for_leaves:
            data = stand_for_leaves[type(data)](data)
        single = not isinstance(data, (list, tuple))
        leaves = [data] if single else list(leaves_of(data))
        for leaf in leaves:
            if type(leaf) in number_classes:  # a library's code has called this: where a user's does, it knows them
                return type(leaf).__torch_function__(made, (), (data, *args), kwargs)  # type: ignore[attr-defined]
        if single:
            if name == "tensor":
                return plain(data, *args, **kwargs)
            return in_memory_of(data, plain(tensor_behind(data), *args, **kwargs))
        if any(type(leaf) in stand_for_leaves for leaf in leaves):
            return made(unflatten(*flatten(data)), *args, **kwargs)
        if not any(isinstance(leaf, Plane) for leaf in leaves):
            return plain(data, *args, **kwargs)
        dtype = args[0] if args else kwargs.get("dtype")
        device = args[1] if len(args) > 1 else kwargs.get("device")
        if dtype is None:
            for leaf in leaves:
                kind = leaf.dtype if isinstance(leaf, Tensor) else plain(leaf).dtype
                dtype = kind if dtype is None else torch.promote_types(dtype, kind)
        home = next(leaf.device for leaf in leaves if isinstance(leaf, Plane)) if device is None else device
        out = joined(data, dtype, home)
        return out.requires_grad_() if kwargs.get("requires_grad") else out

    route_name(name, made)


def leaves_of(data: Any) -> Any:
    """The entries of a nested list."""
    for entry in data:
        if isinstance(entry, (list, tuple)):
            yield from leaves_of(entry)
        else:
            yield entry


def joined(data: Any, dtype: Any, device: Any) -> Tensor:
    """A nested list of numbers and of tensors with one element as a tensor without history."""
    if isinstance(data, (list, tuple)):
        return torch.stack([joined(entry, dtype, device) for entry in data])
    if isinstance(data, Tensor):
        if data.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return data.detach().reshape(()).to(dtype=dtype, device=device)
    return torch.full((), data, dtype=dtype, device=device)


def see_operations_from_outside(views: Iterable[OpOverload]) -> None:
    """Hand all operations of torch to `run_outside` where no operand is of a plane, but for views.

    Its fallback sees those that have a kernel for each device only; the others are named here.
    """
    passed = {op.name() for op in views}
    for name in operator_names("aten::"):
        if name in passed:
            _kernels.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, OUTSIDE_KEY_NAME)
        elif not name.endswith("out") and has_composite_kernel(name):
            _kernels.impl(name.removeprefix("aten::"), _outside_kernel(name), OUTSIDE_KEY_NAME)
    for name in operator_names("_c10d_functional::"):
        if has_composite_kernel(name):
            _collectives.impl(name.removeprefix("_c10d_functional::"), _outside_kernel(name), OUTSIDE_KEY_NAME)


def _outside_kernel(name: str) -> Any:
    op: Any = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal op
        if op is None:
            op = named_overload(name)
        return run_outside(op, *args, **kwargs)

    never_compile(kernel)
    return kernel


def is_routed(name: str) -> bool:
    """Whether an overload is handed to a kernel of its own."""
    return name in _hooked


def route(op: OpOverload, kernel: Any) -> None:
    """Hand an overload to `kernel` while a level is open, whatever its operands."""
    if is_routed(op.name()):
        raise ValueError(f"{op} is routed already")
    _hooked.add(op.name())
    never_compile(kernel)
    _kernels.impl(op.name().removeprefix("aten::"), kernel, FACTORY_KEY_NAME)


def route_past(op: OpOverload, kernel: Any) -> None:
    """Hand an overload to `kernel` while a level is open; what it declines with NotImplemented goes on as it would.

    So does what fails, which may do so for some lanes only.
    """
    _hooked.add(op.name())
    never_compile(kernel)
    _pass_by(op.name(), kernel, lambda: op)


def route_past_name(name: str, kernel: Any) -> None:
    """The same for an overload by its name, which is looked up at its first call."""
    _hooked.add(name)
    never_compile(kernel)
    _pass_by(name, kernel, functools.cache(lambda: named_overload(name)))


def _pass_by(name: str, kernel: Any, overload: Callable[[], OpOverload]) -> None:
    def enter(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            out = kernel(*args, **kwargs)
        except LanewiseError:
            raise
        except FAILURES:
            out = NotImplemented
        return overload().redispatch(keys - FACTORY_KEY_SET, *args, **kwargs) if out is NotImplemented else out

    never_compile(enter)
    _kernels.impl(name.removeprefix("aten::"), enter, FACTORY_KEY_NAME, with_keyset=True)


def named_overload(name: str) -> OpOverload:
    """`aten::add.Tensor` -> the overload"""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def unrouted(op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """A call of a routed operation that does not come back to its kernel."""
    with ExcludeDispatchKeyGuard(FACTORY_KEY_SET):
        return op(*args, **kwargs)


def _on_plane(operand: Any, level: Level) -> bool:
    """Whether an operand belongs to this level, whose rules then make the result; one of a plane below does not."""
    return isinstance(operand, Plane) and operand.level.order >= level.order


def _factory_kernel(op: OpOverload) -> Any:
    call = op._op
    # Without a tensor among the arguments, nothing needs to be asked but where the code runs.
    alone = not any("Tensor" in str(argument.type) for argument in op._schema.arguments) and not is_random(op)

    def made(*args: Any, **kwargs: Any) -> Any:
        if alone and isinstance(level := current_level(), BatchLevel):
            out = level.below(functools.partial(call, **kwargs) if kwargs else call, *args)
            return out if level.shares else level.adopt(out)
        with ExcludeDispatchKeyGuard(FACTORY_KEY_SET):
            level = current_level()
            if (
                level is None
                or (args and _on_plane(args[0], level))
                or any(_on_plane(operand, level) for operand in tensors_of(args, kwargs))
            ):
                return op(*args, **kwargs)
            if args and isinstance(args[0], Tensor) and peer_engine_active():
                return op(*args, **kwargs)  # a wrapper of torch.func, which takes the operation to what it wraps
            return level.factory(op, args, kwargs)

    return made
