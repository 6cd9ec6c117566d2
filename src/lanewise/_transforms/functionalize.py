"""`functionalize`: a plane on which writes become new values, so that those who look below it see no writes."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import Level
from lanewise._core.missing import functional_twin
from lanewise._core.parting.lanes import refuse_parted, running_lanes
from lanewise._core.plane import (
    Plane,
    argument,
    map_tensors,
    new_wrapper,
    replace_tensors,
    returns_written,
    written_arguments,
    written_results,
)
from lanewise._core.recording.kept_history import with_history
from lanewise._core.refits import refit
from lanewise._core.trees import flatten, unflatten
from lanewise._torch_compat import forbid_data_pointer
from lanewise._transforms.arguments import not_callable
from lanewise.errors import TransformError, at_user_line, hide_own_frames

aten = torch.ops.aten


def functionalize(func: Callable, *, remove: str = "mutations") -> Callable:
    """`func` without in-place operations: each is replaced by one that computes a new value.

    What is written into an argument is written back when `func` has returned, as one copy. The results are those of
    `func`; the difference shows to what looks at the operations, such as `make_fx` or a dispatch mode.

    Args:
        func: A function of any arguments.
        remove: "mutations", or "mutations_and_views" to have views replaced by copies (`aten.view_copy` ...) too.

    Returns:
        A function of the same arguments with the same results.

    Raises:
        RuntimeError: `remove` is something else.

    Example:
        >>> import torch
        >>> from lanewise import functionalize
        >>> def f(x):
        ...     y = x.clone()
        ...     y[0].add_(1)
        ...     return y
        >>> functionalize(f)(torch.zeros(2))
        tensor([1., 0.])
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(functionalize(f))(torch.zeros(2)).graph
        >>> any("add_" in str(node.target) for node in graph.nodes)
        False
    """
    if not callable(func):
        raise not_callable("functionalize", func)
    if remove not in ("mutations", "mutations_and_views"):
        raise TransformError(
            at_user_line(
                f"functionalize(f, remove='mutations'): received invalid argument for remove={remove!r}",
                'functionalize(f, remove="mutations_and_views")',
            )
        )

    @functools.wraps(func)
    def functional(*args: Any, **kwargs: Any) -> Any:
        try:
            leaves, spec = flatten((args, kwargs))
            with FunctionalLevel(copy_views=remove == "mutations_and_views") as level:
                entered: dict[int, FunctionalTensor] = {}
                for leaf in leaves:
                    if isinstance(leaf, Tensor) and id(leaf) not in entered:
                        entered[id(leaf)] = level.adopt(leaf)
                args, kwargs = unflatten([entered.get(id(leaf), leaf) for leaf in leaves], spec)
                outputs, out_spec = flatten(func(*args, **kwargs))
                outputs = [
                    with_history(level, leaf, level.read(leaf)) if level.owns(leaf) else leaf for leaf in outputs
                ]
                written = [
                    (leaf, level.read(entered[id(leaf)]))
                    for leaf in leaves
                    if isinstance(leaf, Tensor) and entered[id(leaf)].store.version
                ]
            for leaf, value in written:
                leaf.copy_(value)
            return unflatten(outputs, out_spec)
        except Exception as error:
            hide_own_frames(error)
            raise

    return functional


class Store:
    """The memory that some tensors of the plane share: its value, and how often it was written."""

    __slots__ = ("value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = 0


class FunctionalTensor(Plane):
    """A view of a store: `steps`, each `(func, args, kwargs, index)`, lead from the store's value to `value`.

    `seen` is the store's version that `value` was taken at.
    """

    __slots__ = ("store", "steps", "seen")
    store: Store
    steps: tuple
    seen: int

    def detach(self) -> Any:
        """Without history on any plane; the memory is shared."""
        step = (aten.detach.default, (), {}, None)
        value = self.level.below(aten.detach.default, self.level.read(self))
        return self.level.wrap(value, self.store, (*self.steps, step))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FunctionalTensor(level={self.level.order}, value={self.level.read(self)!r})"


class FunctionalLevel(Level):
    """The level of one `functionalize`."""

    __slots__ = ("copy_views", "lanes")

    def __init__(self, copy_views: bool) -> None:
        super().__init__()
        self.lanes = running_lanes()
        self.copy_views = copy_views

    def __repr__(self) -> str:
        return f"functionalize level {self.order}"

    def wrap(self, value: Tensor, store: Store, steps: tuple) -> FunctionalTensor:
        """A view of a store, on this plane."""
        out = new_wrapper(FunctionalTensor, value, value.shape, value.stride())
        forbid_data_pointer(out)
        out.value = value
        out.level = self
        out.origin = None
        out.store = store
        out.steps = steps
        out.seen = store.version
        return out

    def adopt(self, value: Tensor, origin: tuple | None = None) -> FunctionalTensor:
        """A tensor with memory of its own, on this plane."""
        return self.wrap(value, Store(value), ())

    def alias(self, tensor: FunctionalTensor) -> FunctionalTensor:
        """The same memory in a new wrapper, without history on this plane."""
        return self.wrap(self.read(tensor), tensor.store, tensor.steps)

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is of this level."""
        return type(tensor) is FunctionalTensor and tensor.level is self

    def copy_slots(self, wrapper: FunctionalTensor, like: FunctionalTensor) -> None:
        for name in ("value", "store", "steps", "seen"):
            setattr(wrapper, name, getattr(like, name))

    def read(self, tensor: FunctionalTensor) -> Tensor:
        """The value below, with all writes to the memory."""
        if tensor.seen != tensor.store.version:
            tensor.value = self.below(_follow, tensor.store.value, tensor.steps)[-1]
            tensor.seen = tensor.store.version
        return tensor.value

    def write(self, tensor: FunctionalTensor, value: Tensor) -> None:
        """Make `value` the value of `tensor`, and so of the memory that it is a view of."""
        store = tensor.store
        store.value = self.below(_written_back, store.value, tensor.steps, value)
        store.version += 1
        tensor.value = value
        tensor.seen = store.version

    def physical(self, tensor: Tensor) -> Tensor:
        """The value below."""
        return self.read(tensor) if self.owns(tensor) else tensor  # type: ignore[arg-type]

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """A tensor made inside the function."""
        out = self.below(lambda: op(*args, **kwargs))
        return out if op._schema.is_mutable else map_tensors(self.adopt, out)

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        if func is aten.detach.default:
            return self.alias(args[0])
        if func._can_decompose():
            return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            refuse_parted(self, self.lanes)
            return self._mutate(func, args, kwargs)
        if func.is_view:
            return self._view(func, args, kwargs)
        below_args, below_kwargs = replace_tensors(self.physical, args, kwargs)
        return map_tensors(self.adopt, self.below(lambda: func(*below_args, **below_kwargs)))

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        base, *rest = args
        if self.copy_views:
            func = _copying_twin(func) or func
        out = self.below(lambda: func(self.read(base), *rest, **kwargs))
        if isinstance(out, Tensor):
            return self.wrap(out, base.store, (*base.steps, (func, rest, kwargs, None)))
        return [self.wrap(item, base.store, (*base.steps, (func, rest, kwargs, i))) for i, item in enumerate(out)]

    def _mutate(self, func: Any, args: tuple, kwargs: dict) -> Any:
        written = [argument(args, kwargs, position, name) for position, name in written_arguments(func)]
        each = [t for target in written for t in (target if isinstance(target, (list, tuple)) else [target])]
        targets: list[Any] = [target for target in each if isinstance(target, Tensor)]
        out = None
        twin = _TWINS.get(func) or functional_twin(func)
        if getattr(twin, "is_view", False):
            like = self.interpret(twin, args, kwargs, [])
            return refit(args[0], like, func, args, kwargs)
        below_args, below_kwargs = replace_tensors(self.physical, args, kwargs)
        if not all(map(self.owns, targets)):
            # A tensor of the plane below is written there, since whoever made it is to see it.
            out = self.below(lambda: func(*below_args, **below_kwargs))
        elif twin is None:
            out, values = self._on_copies(func, args, kwargs, targets)
            for target, value in zip(targets, values, strict=True):
                self.write(target, value)
        else:
            is_out = func._schema.arguments[written_arguments(func)[0][0]].kwarg_only
            names = {name for _, name in written_arguments(func)} if is_out else set()
            passed = {key: value for key, value in below_kwargs.items() if key not in names}
            results = self.below(lambda: twin(*below_args, **passed))
            results = flatten(results)[0] if isinstance(results, (list, tuple)) else [results]
            for target, value in zip(targets, results, strict=True):
                self._assign(target, value, is_out)
        return written_results(func, args, kwargs) if returns_written(func) else map_tensors(self.adopt, out)

    def _assign(self, target: FunctionalTensor, value: Tensor, is_out: bool) -> None:
        if value.shape != target.shape and is_out:
            # An `out=` tensor of another shape is resized; it has new memory from here on.
            fresh = self.adopt(value)
            Tensor.data.__set__(target, fresh)  # type: ignore[attr-defined]
            self.copy_slots(target, fresh)
            return
        if value.shape != target.shape or value.dtype != target.dtype:
            value = self.below(lambda: value.to(target.dtype).expand(target.shape))
        self.write(target, value)

    def _on_copies(self, func: Any, args: tuple, kwargs: dict, targets: list) -> tuple[Any, list[Tensor]]:
        """What an operation without a functional twin gives and writes, found by letting it write into copies."""
        copies = {id(target): self.below(torch.clone, self.read(target)) for target in targets}

        def enter(tensor: Tensor) -> Tensor:
            return copies[id(tensor)] if id(tensor) in copies else self.physical(tensor)

        below_args, below_kwargs = replace_tensors(enter, args, kwargs)
        out = self.below(lambda: func(*below_args, **below_kwargs))
        return out, [copies[id(target)] for target in targets]


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What `target.copy_(source)` makes of `target`."""
    return source.to(target.device, target.dtype, non_blocking, copy=True).expand(target.shape)


# In-place operations whose functional overload in torch has no derivative.
_TWINS: dict[Any, Any] = {aten.copy_.default: _copied, aten.zero_.default: torch.zeros_like}


def _follow(value: Tensor, steps: tuple) -> list[Tensor]:
    """The values from a store's to a view's."""
    values = [value]
    for func, args, kwargs, index in steps:
        out = func(values[-1], *args, **kwargs)
        values.append(out if index is None else out[index])
    return values


def _written_back(value: Tensor, steps: tuple, new: Tensor) -> Tensor:
    """The store's value once the view at the end of `steps` has the value `new`."""
    values = _follow(value, steps[:-1])
    for base, step in zip(reversed(values), reversed(steps)):
        new = _insert(base, step, new)
    return new


def _insert(base: Tensor, step: tuple, new: Tensor) -> Tensor:
    """`base` with the value `new` in the place that the view `step` shows."""
    func, args, kwargs, index = step
    name = func._schema.name.removeprefix("aten::").removesuffix("_copy")
    if name in _SCATTER:
        return _SCATTER[name](base, new, *args, **kwargs)
    if name in ("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "alias", "detach", "lift_fresh"):
        return new.reshape(base.shape) if new.dtype == base.dtype else new.contiguous().view(base.dtype)
    if name in _INVERSE:
        return _INVERSE[name](new, *args)
    # Any view that picks elements: let it pick their numbers.
    numbers = torch.arange(base.numel(), device=base.device).reshape(base.shape)
    places = func(numbers, *args, **kwargs)
    places = places if index is None else places[index]
    return base.reshape(-1).scatter(0, places.reshape(-1), new.reshape(-1)).reshape(base.shape)


_SCATTER = {
    "select": torch.select_scatter,
    "slice": torch.slice_scatter,
    "diagonal": torch.diagonal_scatter,
    "as_strided": torch.as_strided_scatter,
}
_INVERSE = {
    "t": lambda new: new.t(),
    "transpose": lambda new, a, b: new.transpose(a, b),
    "permute": lambda new, dims: new.permute([[d % len(dims) for d in dims].index(i) for i in range(len(dims))]),
    "view_as_real": lambda new: torch.view_as_complex(new.contiguous()),
    "view_as_complex": lambda new: torch.view_as_real(new),
    "_conj": lambda new: new.conj(),
    "_neg_view": lambda new: new.neg(),
}


def _copying_twin(func: Any) -> Any:
    """The overload that copies what a view shows, such as `aten.select_copy.int`, or None."""
    packet = getattr(aten, func._schema.name.removeprefix("aten::") + "_copy", None)
    return getattr(packet, func._overloadname, None) if packet is not None else None
