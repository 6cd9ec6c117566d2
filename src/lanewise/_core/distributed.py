"""DTensors on planes: a wrapper of a DTensor has its methods, and a DTensor made of a wrapper's part is a wrapper.

Planes lie outside DTensors: lanes `[B, *S]` are one DTensor, whose placements count the lanes as its first dim. torch
hands an operation with a DTensor among its operands to that class alone; while a level is open, a DTensor that meets a
wrapper becomes one first.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.draws.random import drawn_without_leave
from lanewise._core.dual import DualTensor
from lanewise._core.level import current_level, on_plane, while_open
from lanewise._core.plane import Plane, detached, map_tensors, sync
from lanewise._torch_classes import DisableTorchFunctionSubclass, DTensorNames, dtensor_names
from lanewise._torch_compat import (
    INSIDE_KEY_SET,
    ExcludeDispatchKeyGuard,
)
from lanewise.errors import TransformError, at_user_line

# Functions that draw random numbers for a DTensor.
_DRAWING = frozenset(
    "alpha_dropout bernoulli bernoulli_ dropout dropout_ feature_alpha_dropout feature_dropout native_dropout normal "
    "normal_ rand_like randint_like randn_like uniform_".split()
)


def names_below(wrapper: Any) -> DTensorNames | None:
    """What DTensors are made of, if a wrapper stands for one."""
    names = dtensor_names()
    if names is None or not isinstance(wrapper, Plane):
        return None
    while isinstance(wrapper, Plane):
        wrapper = wrapper.value
    return names if isinstance(wrapper, names.DTensor) else None


def attribute(wrapper: Any, name: str) -> Any:
    """An attribute that only DTensors have."""
    names = names_below(wrapper)
    if names is None:
        raise AttributeError(f"'{type(wrapper).__name__}' object has no attribute '{name}'")
    if name == "_local_tensor":
        return _parts(names, wrapper)[0]
    if name == "_spec":
        return _parts(names, wrapper)[1]
    return vars(names.DTensor)[name].__get__(wrapper, names.DTensor)


def _parts(names: DTensorNames, value: Any) -> tuple[Any, Any]:
    """The part of a DTensor on this process, on the plane of `value`, and how it is distributed."""
    if not isinstance(value, Plane):
        return value._local_tensor, value._spec  # type: ignore[attr-defined]
    level = value.level
    sync(value)
    if isinstance(value, DualTensor):
        local, spec = level.below(_parts, names, value.value)
        tangent = value.tangent
        if tangent is None:
            return level.adopt(local), spec
        return level.wrap(local, level.below(lambda: _parts(names, _placed(tangent, spec.placements))[0])), spec
    if not isinstance(value, BatchTensor):
        raise _not_there(value)
    if not value.mapped:
        local, spec = level.below(_parts, names, value.value)
        return level.adopt(local), spec
    local, spec = level.below(lambda: _parts(names, _lanes_on_each(names, level.here(value).value)))
    return level.wrap(local), names.moved(spec, -1, value.shape, value.stride())


def is_of_dtensors(cls: Any) -> bool:
    """Whether a Function is one of those by which DTensors are made, moved and taken apart."""
    names = dtensor_names()
    return names is not None and cls in names.functions


def placed_as(x: Any, tangent: Any) -> Any:
    """A tangent that lies on the processes as its primal does; zeros if there is none."""
    if tangent is None:
        return torch.zeros_like(x)
    return tangent if names_below(tangent) is None else _placed(tangent, x.placements)


def _placed(value: Any, placements: tuple) -> Any:
    return value if value.placements == placements else value.redistribute(placements=placements)


def _lanes_on_each(names: DTensorNames, value: Any) -> Any:
    """`[B, *S]` with all lanes on each process, as a loop over the lanes would take them out."""
    return _placed(value, tuple([names.Replicate() if p.is_shard(0) else p for p in value.placements]))


def _not_there(value: Any) -> TransformError:
    return TransformError(
        at_user_line(
            f"{value.level!r}: the part of a DTensor on this process cannot be taken out",
            "push = lambda *tangents: jvp(f, primals, tangents)[1]  # in place of linearize(f, *primals)[1]",
        )
    )


def _make(names: DTensorNames, local: Any, spec: Any) -> Any:
    """A DTensor of a part of this process: on the plane of that part."""
    if not isinstance(local, Plane):
        return names.DTensor(detached(local), spec, requires_grad=False)
    level = local.level
    sync(local)
    if isinstance(local, DualTensor):
        tangent = local.tangent
        value = level.below(_make, names, local.value, spec)
        return level.pair(value, None if tangent is None else level.below(_make, names, tangent, spec))
    if not isinstance(local, BatchTensor):
        raise _not_there(local)
    if not local.mapped:
        return level.adopt(level.below(_make, names, local.value, spec))
    local = level.here(local)
    shape = (local.value.shape[0], *spec.tensor_meta.shape)
    strides = (spec.tensor_meta.shape.numel(), *spec.tensor_meta.stride)
    return level.wrap(level.below(_make, names, local.value, names.moved(spec, 1, shape, strides)))


def _class_changes() -> list[tuple[Any, str, Any]]:
    """What DTensors do otherwise while a level is open.

    Without a process group there are none, though much in torch imports them: the changes take some 5 us.
    """
    names = dtensor_names()
    if names is None or not torch.distributed.is_initialized():
        return []
    new, from_local = names.DTensor.__new__, names.DTensor.from_local

    def made(cls: Any, local_tensor: Any, spec: Any, *, requires_grad: bool) -> Any:
        if isinstance(local_tensor, Plane):
            return _make(names, local_tensor, spec)
        return new(cls, local_tensor, spec, requires_grad=requires_grad)

    def distributed(local_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Modules ask by isinstance whether what they are given is a DTensor, which no wrapper is.
        return local_tensor if names_below(local_tensor) is not None else from_local(local_tensor, *args, **kwargs)

    return [
        (names.DTensor, "__new__", made),
        (names.DTensor, "__torch_function__", classmethod(_call)),
        (names.DTensor, "from_local", staticmethod(distributed)),
    ]


def _call(cls: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """A function of torch with a DTensor among its operands."""
    kwargs = kwargs or {}
    with DisableTorchFunctionSubclass():
        level = current_level()
        if getattr(func, "__module__", "") == "torch.autograd" or func is Tensor.backward:
            return func(*args, **kwargs)
        wrappers: list[Any] = []
        _each(lambda t: wrappers.append(t) if isinstance(t, Plane) else None, (args, kwargs))
        for wrapper in wrappers:
            if level is None or wrapper.level.order > level.order:
                level = wrapper.level
        if level is None:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _DRAWING:
            _check_drawing(level, func.__name__)
        if wrappers:

            def adopted(t: Any) -> Any:
                return _adopted(level, t) if isinstance(t, cls) else t

            return func(*_each(adopted, args), **_each(adopted, kwargs))
        with on_plane(None), ExcludeDispatchKeyGuard(INSIDE_KEY_SET):
            return func(*args, **kwargs)


def _check_drawing(level: Any, name: str) -> None:
    """Random numbers for a DTensor are drawn by all processes together, once for all lanes."""
    while level is not None:
        if isinstance(level, BatchLevel) and level.randomness == "error":
            raise drawn_without_leave(name)
        if isinstance(level, BatchLevel) and level.randomness == "different":
            raise TransformError(
                at_user_line(
                    f'vmap: {name} of a DTensor with randomness="different": its processes draw together, and for all '
                    "lanes at once",
                    'vmap(f, randomness="same")  # or draw for weight.full_tensor(), and distribute the result',
                )
            )
        level = level.parent


def _adopted(level: Any, tensor: Any) -> Any:
    """A DTensor from outside on the plane of `level`, and on all below it. Written into, it says where it is from."""
    origin = (tensor, torch.ops.aten.detach.default, (), {}, None)
    return level.adopt(tensor if level.parent is None else _adopted(level.parent, tensor), origin)


def _each(fn: Any, value: Any) -> Any:
    if type(value) is dict:
        return {key: _each(fn, item) for key, item in value.items()}
    return (
        map_tensors(fn, value) if not isinstance(value, (list, tuple)) else type(value)([_each(fn, v) for v in value])
    )


def _of_dtensors(name: str) -> property:
    return property(functools.partial(attribute, name=name))


for _name in ("_local_tensor", "_spec", "device_mesh", "placements", "to_local", "full_tensor", "redistribute"):
    setattr(Plane, _name, _of_dtensors(_name))
while_open(_class_changes)
