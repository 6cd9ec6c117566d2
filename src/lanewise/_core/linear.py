"""The linear plane: writes down what a function does to its tangents, so that it can be done again to others."""

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
    lift,
    map_tensors,
    new_wrapper,
    replace_tensors,
    returns_written,
    sync,
    taken_apart,
    wrap_unlifted,
    written_arguments,
    written_results,
)
from lanewise._core.refits import refit_in_place
from lanewise._torch_compat import forbid_data_pointer, is_composition
from lanewise.errors import TransformError, at_user_line


class Slot:
    """A value that the program computes, or is given."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Residual:
    """A value that the program needs and that does not depend on the tangents."""

    __slots__ = ("value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = value._version if not value.is_inference() else None


class Step:
    """One operation of the program; slots and residuals stand where its tensors were."""

    __slots__ = ("run", "args", "kwargs", "results", "mutates", "places", "last_uses")

    def __init__(self, run: Callable, args: tuple, kwargs: dict, results: Any, mutates: bool) -> None:
        self.run = run
        self.args: Any = args
        self.kwargs: Any = kwargs
        self.results = results
        self.mutates = mutates
        # Where the positional arguments take a value of the program; None where other arguments do, too.
        self.places: list[tuple[int, int]] | None = None
        self.last_uses: list[int] = []

    def settle(self) -> None:
        """Put the residuals in their places, and note where values are to be put."""
        self.args = [_settled(arg) for arg in self.args]
        self.kwargs = {key: _settled(arg) for key, arg in self.kwargs.items()}
        direct = [(i, arg.index) for i, arg in enumerate(self.args) if type(arg) is Slot]
        if len(direct) == len(_slots(self.args)) + len(_slots(self.kwargs)):
            self.places = direct

    def __call__(self, known: dict[int, Tensor]) -> None:
        """Add the results to the known values, and drop those that are needed no more."""
        args = self.args
        if self.places is not None:
            args = args.copy()
            for position, index in self.places:
                args[position] = known[index]
            out = self.run(*args, **self.kwargs)
        else:
            out = self.run(*_filled(args, known), **{key: _filled(arg, known) for key, arg in self.kwargs.items()})
        results = self.results
        if type(results) is Slot:
            known[results.index] = out
        elif results is not None:
            for slot, item in zip(results, out):
                if slot is not None:
                    known[slot.index] = item
        for index in self.last_uses:
            del known[index]


class LinearTensor(Plane):
    """A tangent: `value` is what comes of tangents of zero, `slot` its place in the program, None for a constant."""

    __slots__ = ("slot",)
    slot: Slot | None


class LinearLevel(Level):
    """The level of one `linearize`, below its dual level."""

    __slots__ = ("steps", "count", "residuals", "by_memory", "written", "lanes")

    def __init__(self) -> None:
        super().__init__()
        self.lanes = running_lanes()
        self.steps: list[Step] = []
        self.count = 0
        self.residuals: dict[int, Residual] = {}
        self.by_memory: dict[int, list[Residual]] = {}
        # Memory that the function writes to: from then on its values are copied as the program refers to them.
        self.written: set[int] = set()

    def __repr__(self) -> str:
        return f"linearize level {self.order}"

    def wrap(self, value: Tensor, slot: Slot | None = None) -> LinearTensor:
        """A value of the program; a new one if no slot is given."""
        if slot is None:
            slot = Slot(self.count)
            self.count += 1
        out = new_wrapper(LinearTensor, value, value.shape, value.stride())
        out.value = value
        out.slot = slot
        out.level = self
        return out

    def adopt(self, value: Tensor, origin: tuple | None = None) -> LinearTensor:
        """A constant, which may become part of the program when something is written into it."""
        out = new_wrapper(LinearTensor, value, value.shape, value.stride())
        forbid_data_pointer(out)
        out.value = value
        out.slot = None
        out.level = self
        out.origin = origin
        return out

    def alias(self, tensor: LinearTensor) -> LinearTensor:
        """The same value in a new wrapper, without history on this plane."""
        if tensor.slot is None:
            return self.adopt(tensor.value, tensor.origin)
        return self.wrap(tensor.value, tensor.slot)

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` is of this level."""
        return type(tensor) is LinearTensor and tensor.level is self

    def plain(self, tensor: Tensor) -> Tensor:
        """The value of the plane below."""
        return tensor.value if type(tensor) is LinearTensor and tensor.level is self else tensor

    def lifted(self, wrapper: LinearTensor) -> bool:
        return wrapper.slot is not None

    def lift(self, wrapper: LinearTensor) -> None:
        """A constant that is about to be written to: the program begins with a copy of it."""
        start = Residual(wrapper.value)
        wrapper.value = self.below(torch.clone, wrapper.value)
        like = self.wrap(wrapper.value)
        self.steps.append(Step(_fresh_copy, (start,), {}, like.slot, False))
        wrapper.slot = like.slot

    def copy_slots(self, wrapper: LinearTensor, like: LinearTensor) -> None:
        wrapper.value = like.value
        wrapper.slot = like.slot
        if like.slot is None:
            wrapper.origin = like.origin

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """A tensor made by a rule or by the function: a constant until a tangent is written into it."""
        out = self.below(lambda: op(*args, **kwargs))
        return out if op._schema.is_mutable else map_tensors(self.adopt, out)

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        """Run on the values below, and write down what depends on the tangents."""
        if is_composition(func):
            return taken_apart(func, *args, **kwargs)
        if func is torch.ops.aten.detach.default:
            return self.alias(args[0])
        for operand in operands:
            if self.owns(operand):
                sync(operand)  # type: ignore[arg-type]
        if func._schema.is_mutable and torch.Tag.inplace_view in func.tags and self.owns(args[0]):
            return refit_in_place(self, func, args, kwargs, functional_twin(func))
        if not any(self.owns(operand) and operand.slot is not None for operand in operands):  # type: ignore[attr-defined]
            return self._run_constant(func, args, kwargs)
        if func._schema.is_mutable:
            refuse_parted(self, self.lanes)  # the program would write to all lanes
        for position, name in written_arguments(func):
            map_tensors(lift, argument(args, kwargs, position, name))
        below_args, below_kwargs = replace_tensors(self.plain, args, kwargs)
        out = self.below(_run_unrecorded, func, below_args, below_kwargs)
        if not any("Tensor" in str(result.type) for result in func._schema.returns):
            if func._schema.returns and not isinstance(out, bool):
                raise TransformError(at_user_line(f"linearize: {func} asks for the value of a tangent"))
            return out
        recorded = replace_tensors(self._reference, args, kwargs)
        if func._schema.is_mutable:
            self.steps.append(Step(func, *recorded, None, True))
            return written_results(func, args, kwargs)
        wrapped = map_tensors(self.wrap, out)
        self.steps.append(Step(func, *recorded, map_tensors(lambda t: t.slot, wrapped), False))
        return wrapped

    def _run_constant(self, func: Any, args: tuple, kwargs: dict) -> Any:
        below_args, below_kwargs = replace_tensors(self.plain, args, kwargs)
        out = self.below(lambda: func(*below_args, **below_kwargs))
        if returns_written(func):
            return written_results(func, args, kwargs)
        return wrap_unlifted(self, func, args, kwargs, out)

    def carry(self, run: Callable[..., tuple], operands: tuple) -> tuple:
        """Run, and write down as one step, what takes tensors or None and is linear in those of the program."""
        for operand in operands:
            if self.owns(operand):
                sync(operand)
        values = tuple([None if operand is None else self.plain(operand) for operand in operands])
        found = [None if out is None else self.wrap(out) for out in self.below(_run_unrecorded, run, values, {})]
        references = tuple([None if operand is None else self._reference(operand) for operand in operands])
        self.steps.append(Step(run, references, {}, [None if out is None else out.slot for out in found], False))
        return tuple(found)

    def _reference(self, tensor: Tensor) -> Slot | Residual:
        if self.owns(tensor):
            if tensor.slot is not None:  # type: ignore[attr-defined]
                return tensor.slot  # type: ignore[attr-defined]
            tensor = tensor.value  # type: ignore[attr-defined]
        if self.written and not self.written.isdisjoint(memories(tensor)):
            return Residual(self.below(torch.clone, tensor))
        residual = self.residuals.get(id(tensor))
        if residual is None:
            residual = self.residuals[id(tensor)] = Residual(tensor)
            for memory in memories(tensor):
                self.by_memory.setdefault(memory, []).append(residual)
        return residual

    def preserve(self, target: Tensor) -> None:
        """Keep what the program needs of a primal that is about to be overwritten."""
        for memory in memories(target):
            self.written.add(memory)
            for residual in self.by_memory.pop(memory, ()):
                self.residuals.pop(id(residual.value), None)
                residual.value = self.below(torch.clone, residual.value)
                residual.version = residual.value._version

    def program(self, inputs: list[LinearTensor], outputs: list[Tensor]) -> "Program":
        """What leads from the tangents of the inputs to those of the outputs (None: zero)."""
        for residual in self.residuals.values():
            if residual.version is not None and residual.value._version != residual.version:
                raise TransformError(
                    at_user_line(
                        f"linearize: a tensor {list(residual.value.shape)} from outside the function, whose value the "
                        "derivative needs, was modified by an in-place operation in the function",
                        "t = t.clone()  # inside the function, then write to it",
                    )
                )
        starts = [tangent.slot for tangent in inputs if tangent.slot is not None]
        ends = [getattr(tangent, "slot", None) if self.owns(tangent) else None for tangent in outputs]
        return Program(self.steps, starts, ends, list(self.residuals.values()))


class Program:
    """The linear function of the tangents."""

    def __init__(
        self, steps: list[Step], inputs: list[Slot], outputs: list[Slot | None], shared: list[Residual]
    ) -> None:
        self.shared = [residual for residual in shared if residual.version is not None]
        self.inputs = inputs
        self.outputs = outputs
        self.mutates = any(step.mutates for step in steps)
        self.steps = steps if self.mutates else _needed(steps, outputs)
        _mark_last_uses(self.steps, outputs)
        for step in self.steps:
            step.settle()

    def __call__(self, tangents: list[Tensor]) -> list[Tensor | None]:
        """The tangents of the outputs."""
        for residual in self.shared:
            if residual.value._version != residual.version:
                raise TransformError(
                    at_user_line(
                        f"linearize: a tensor {list(residual.value.shape)} whose value the derivative needs was "
                        "modified by an in-place operation after the function had run",
                        "linearize(f, x.clone())  # or write to a copy",
                    )
                )
        # An operation in place must not reach the caller's tensors, nor find other strides than when it was recorded.
        known: dict[int, Tensor] = {
            slot.index: t.clone(memory_format=torch.contiguous_format) if self.mutates else t.contiguous()
            for slot, t in zip(self.inputs, tangents)
        }
        for step in self.steps:
            step(known)
        return [None if slot is None else known[slot.index] for slot in self.outputs]


def _settled(reference: Any) -> Any:
    if type(reference) is Residual:
        return reference.value
    return [_settled(item) for item in reference] if type(reference) in (list, tuple) else reference


def _filled(reference: Any, known: dict[int, Tensor]) -> Any:
    if type(reference) is Slot:
        return known[reference.index]
    return [_filled(item, known) for item in reference] if type(reference) is list else reference


def _run_unrecorded(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The values that come of tangents of zero are nobody's to differentiate."""
    with torch.no_grad():
        return func(*args, **kwargs)


def _fresh_copy(value: Tensor) -> Tensor:
    # Made by a factory, so that inside a vmap the tangents of lanes can be written into it.
    return torch.zeros_like(value).copy_(value)


def memories(tensor: Tensor) -> list[int]:
    """Identities of the memory that a tensor stands for, through all planes."""
    found, pending = [], [tensor]
    while pending:
        tensor = pending.pop()
        if isinstance(tensor, Plane):
            pending.append(tensor.value)
            tangent = getattr(tensor, "tangent", None)
            if tangent is not None:
                pending.append(tangent)
        elif tensor.layout is torch.strided:
            found.append(tensor.untyped_storage()._cdata)
    return found


def _slots(references: Any) -> list[int]:
    if type(references) is Slot:
        return [references.index]
    if isinstance(references, dict):
        references = list(references.values())
    if isinstance(references, (list, tuple)):
        return [index for item in references for index in _slots(item)]
    return []


def _needed(steps: list[Step], outputs: list[Any]) -> list[Step]:
    wanted = set(_slots(outputs))
    kept = []
    for step in reversed(steps):
        if wanted.intersection(_slots(step.results)):
            wanted.update(_slots(step.args), _slots(step.kwargs))
            kept.append(step)
    return kept[::-1]


def _mark_last_uses(steps: list[Step], outputs: list[Any]) -> None:
    seen = set(_slots(outputs))
    for step in reversed(steps):
        step.last_uses = []
        for index in {*_slots(step.args), *_slots(step.kwargs), *_slots(step.results)}:
            if index not in seen:
                seen.add(index)
                step.last_uses.append(index)
