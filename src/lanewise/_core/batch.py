"""The batch plane: a tensor with lanes, and how an operation on it is carried out."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lanewise._core.again.around import note_writes_around
from lanewise._core.again.journal import Journal, keep, note_write
from lanewise._core.draws.random import is_random, note_generator
from lanewise._core.layouts import run_with_layouts
from lanewise._core.level import Level, note_writes, standing
from lanewise._core.missing import find_rule
from lanewise._core.one_lane import failure_in_one_lane
from lanewise._core.overlaps import check_written
from lanewise._core.parting.lanes import BeginAgain, Restart, machine
from lanewise._core.plane import (
    Plane,
    argument,
    interpret,
    keep_history,
    lift,
    map_tensors,
    replace_tensors,
    returns_written,
    sync,
    updates_statistics,
    wrap_unlifted,
    written_arguments,
    written_results,
    written_statistics,
)
from lanewise._core.rules import Rule, RuleTable
from lanewise._torch_compat import (
    OpOverload,
    dispatch_mode_count,
    forbid_data_pointer,
    is_any_autocast_enabled,
    make_wrapper,
)
from lanewise._torch_compat import forward_ad as _native
from lanewise.errors import CapturedWriteError, at_user_line, is_within

BATCH_RULES = RuleTable()

# Short ways of carrying out the plainest operations, by overload; see hot.py.
HOT: dict[OpOverload, Callable] = {}

_NO_KWARGS: dict[str, Any] = {}


def lazy(value: Tensor) -> bool:
    """Whether a conjugation or a sign is still due: dispatch keys that the handler runs without carry it out."""
    return value.is_conj() or value.is_neg()


def is_here(args: tuple) -> bool:
    """Whether an operand is of the plane that the operation was called on."""
    here = standing.here
    for arg in args:
        if type(arg) is BatchTensor:
            if arg.level is here:
                return True
        elif type(arg) is list and is_here(tuple(arg)):
            return True
    return False


class BatchTensor(Plane):
    """The lanes of one value.

    `value` is `[B, *S]` with the lanes in dim 0 when `mapped`, and `[*S]`, the same in all lanes, when not; the wrapper
    itself has shape `[*S]`.

    Attributes:
        home: Where lanes have parted (lane_level.py): the lanes it was made for, else None.
        gathered: The lanes it was last gathered for, its version then, the result, and whether gradients were recorded.
        cotangent: Set on results of a backward pass: zero in lanes that it does not have.
    """

    __slots__ = ("mapped", "home", "gathered", "cotangent")
    mapped: bool
    home: Any
    gathered: tuple | None
    cotangent: bool

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        try:
            return interpret(func, args, kwargs or _NO_KWARGS)
        except BeginAgain as again:
            return begin_again(again, func, args, kwargs or _NO_KWARGS)


def begin_again(again: BeginAgain, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation once more, for fewer lanes, or for pairs of lanes."""
    if again.level is not None:
        args, kwargs = replace_tensors(again.level.here, args, kwargs)
    try:
        return interpret(func, args, kwargs)
    except BeginAgain as once_more:
        return begin_again(once_more, func, args, kwargs)


class BatchLevel(Level):
    """The level of one `vmap`: `size` lanes, and what random operations may do.

    `total` and `start` place the lanes of one chunk among all lanes, so that random draws do not depend on the chunks.

    Attributes:
        journal: What would have to be undone if the function were run again (journal.py), None where it never is.
        drawn: Generators of the user's that were drawn from, with their states before, by id; None for none.
        streams: What its lanes have drawn, where others may draw from the same states (chunk_draws.py), or None.
        restartable: Whether its function can be run again, with lanes that part.
        all_lanes: The set of its lanes, once somebody asks for it.
        picked: Copies that stand for views, by their memory (picked.py), None before there are any.
        shows: Whether a write was seen to what a copy in use stands for a view of.
        by_number: Whether lanes part by the numbers that they index with, so that there are no such copies.
        copies: Copies that stand for views where lanes lie interleaved (interleaved.py), None before there are any.
        around: What undoes writes to tensors from around the function (around.py), None before there are any.
        pending: The memory of one of which it is not known yet whether it is to, and what it is a copy of.
        in_front: Whether the lanes of all that is computed are in front in memory, or are to be in another run.
        arguments: What the function was given, where the journal does not tell.
        has_absent: Whether lanes without a cotangent are to be told from others in the graph below (absent.py); None
            where they cannot be.
        zeros: Whether some of its lanes were given derivatives of zeros that they have not in a loop (leaks.py); None
            where that is of no account: they go one way to the end.
        hooked: Whether each tensor has a value of its own, for hooks that are set after its use (tensor_hooks.py).
        answers: What code is told that asks for numbers where there are no lanes (unasked.py).
        stands_for: The level whose lanes these are, where a Function runs for them on a plane of its own; or None.
        task: The backward pass inside which the function runs, where lanes part (lane_level.py); -1 for none.
    """

    __slots__ = ("size", "randomness", "total", "start", "journal", "restartable")
    task = -1
    moves = True
    drawn: Any = None
    streams: Any = None
    all_lanes: Any = None
    picked: Any = None
    shows = False
    by_number = False
    copies: Any = None
    around: Any = None
    pending: Any = None
    in_front = False
    arguments: list | None = None
    hooked = False
    has_absent: bool | None = False
    zeros: bool | None = False
    answers: Any = None
    stands_for: Any = None

    def __init__(self, size: int, randomness: str = "error", total: int | None = None, start: int = 0) -> None:
        super().__init__()
        self.size = size
        self.randomness = randomness
        self.total = size if total is None else total
        self.start = start
        self.journal: Any = None
        self.restartable = False

    def __repr__(self) -> str:
        return f"vmap level {self.order} with {self.size} lanes"

    def wrap(self, value: Tensor) -> BatchTensor:
        """`[B, *S]` in the plane below -> `[*S]` on this plane."""
        # By position, which is 0.3 us faster than by name.
        out = make_wrapper(
            BatchTensor, value.shape[1:], value.stride()[1:], None, None, value.dtype, torch.strided, value.device
        )
        out.value = value
        out.level = self
        out.mapped = True
        out.home = None
        return out

    def adopt(self, value: Tensor, origin: tuple | None = None) -> BatchTensor:
        """`[*S]`, the same in all lanes -> `[*S]` on this plane; a tensor without strides stays where it is."""
        if value.layout is not torch.strided or value.is_nested:
            return value  # type: ignore[return-value]
        out = make_wrapper(
            BatchTensor, value.shape, value.stride(), None, None, value.dtype, torch.strided, value.device
        )
        out.value = value
        out.level = self
        forbid_data_pointer(out)
        out.mapped = False
        out.home = None
        out.origin = origin
        return out

    def alias(self, tensor: BatchTensor) -> BatchTensor:
        """The same value in a new wrapper, without history on this plane."""
        if not tensor.mapped:
            return self.adopt(tensor.value, tensor.origin)
        out = self.wrap(tensor.value)
        out.origin = ()
        return out

    def owns(self, tensor: Any) -> TypeGuard[BatchTensor]:
        """Whether `tensor` is of this level (mapped or uniform)."""
        return type(tensor) is BatchTensor and tensor.level is self

    def mapped(self, tensor: Any) -> TypeGuard[BatchTensor]:
        """Whether `tensor` has lanes of this level."""
        return type(tensor) is BatchTensor and tensor.level is self and tensor.mapped

    def expanded(self, tensor: Tensor) -> Tensor:
        """The value below as `[B, *S]`, expanded where it has no lanes."""
        if type(tensor) is BatchTensor and tensor.level is self:
            return tensor.value if tensor.mapped else tensor.value.expand(self.size, *tensor.value.shape)
        return tensor.expand(self.size, *tensor.shape)

    def physical(self, tensor: Tensor) -> Tensor:
        """The value below: `[B, *S]` with lanes, `[*S]` without."""
        return tensor.value if type(tensor) is BatchTensor and tensor.level is self else tensor

    # What an operation gives, called as `below` is: nothing more is to be seen to on this kind of level.
    computed = computed_once = Level.below

    def here(self, tensor: Any) -> Any:
        """A value for the lanes that run: all of them, on this kind of level."""
        return tensor

    def lanes_of_all(self, values: list) -> Any:
        """A context in which the lanes run that all values have: all, on this kind of level."""
        return nullcontext()

    @property
    def place(self) -> tuple[int, int]:
        """The number of all lanes, those of other chunks included, and which of them is the first here."""
        return self.total, self.start

    @property
    def own_size(self) -> int:
        """The number of lanes of results."""
        return self.size

    def lowered(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """The value below of a result, and whether it has lanes."""
        if type(tensor) is not BatchTensor or tensor.level is not self:
            return tensor, False
        if not tensor.mapped:
            sync(tensor)
        return tensor.value, tensor.mapped

    def lifted(self, wrapper: BatchTensor) -> bool:
        return wrapper.mapped

    def lift(self, wrapper: BatchTensor) -> None:
        """Uniform `[*S]` -> a copy of its own for each lane `[B, *S]`."""
        part = wrapper.value
        while isinstance(part, Plane):
            if type(part) is BatchTensor:
                note_write(part.level, part)
            part = part.value
        with keep_history(wrapper.value):
            wrapper.value = self.below(_copy_for_lanes, wrapper.value, self.size)
        wrapper.mapped = True

    def copy_slots(self, wrapper: BatchTensor, like: BatchTensor) -> None:
        wrapper.value = like.value
        wrapper.mapped = like.mapped
        wrapper.gathered = None
        if not like.mapped:
            wrapper.origin = like.origin

    def check_refit(self, tensor: BatchTensor) -> None:
        """Before the metadata change in place of a tensor, or of one above it: it has one shape for all its lanes."""
        journal = self.journal
        if tensor.home is None or type(journal) is not Journal or journal.base is None:
            return
        if not tensor.home.within(self.lanes if machine.level is self else journal.base):
            raise Restart(self)
        journal.refits = True

    def interpret(self, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        rule = BATCH_RULES.get(func)
        if rule is None:
            rule = find_rule(BATCH_RULES, func)
        # Where there is a plane below, results belong to it.
        direct = not rule.guarded and self.parent is None
        for operand in operands:
            if type(operand) is BatchTensor and operand.level is self:
                if not operand.mapped:
                    return self._interpret_uniform(rule, func, args, kwargs, operands)
                operand = operand.value
            elif operand.layout is not torch.strided or operand.is_nested:
                return run_with_layouts(self, func, args, kwargs)
            if direct and (type(operand) is not Tensor or operand.requires_grad or not operand.is_cpu or lazy(operand)):
                direct = False
        return self._run(rule, func, args, kwargs, direct)

    def failure(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> Exception:
        return failure_in_one_lane(self, error, func, args, kwargs)

    def _compose(self, rule: Rule, func: Any, args: tuple, kwargs: dict) -> Any:
        """A composition of other operations on this plane.

        Operands of planes below come onto this plane first: an operation on them alone would run here, where this
        plane's autograd is done with the composition and that of the plane below is not reached.
        """
        written: list = []
        for position, name in written_arguments(func) if rule.mutates else ():
            map_tensors(written.append, argument(args, kwargs, position, name))
        written.extend(written_statistics(func, args, kwargs))

        # What has no derivative stays as it is for torch's kernels, some of which read it: sizes, lengths.
        read = rule.family == "composite"

        def enter(tensor: Tensor) -> Tensor:
            if (
                self.owns(tensor)
                or any(tensor is w for w in written)
                or (read and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex))
            ):
                return tensor
            return tensor if self.shares and not tensor.requires_grad else self.adopt(tensor)

        args, kwargs = replace_tensors(enter, args, kwargs)
        return rule.run(self, args, kwargs)

    def _run(self, rule: Rule, func: Any, args: tuple, kwargs: dict, direct: bool) -> Any:
        if rule.same_plane:
            return self._compose(rule, func, args, kwargs)
        if kwargs and kwargs.get("generator") is not None:
            note_generator(self, kwargs["generator"])
        if rule.mutates:
            if self.journal is not None:
                self._keep_written(func, args, kwargs)
            if not rule.raw:
                self._check_written(func, args, kwargs)
                check_written(func, args, kwargs)
        elif rule.undeclared and self.journal is not None:
            for statistic in written_statistics(func, args, kwargs):
                if self.owns(statistic):
                    lift(statistic)
                    keep(self, statistic.value, statistic.home, True)
        if direct and _native._current_level < 0 and not is_any_autocast_enabled() and not dispatch_mode_count():
            out = rule.run(self, args, kwargs)
        elif rule.mutates or rule.raw:
            out = self.below(rule.run, self, args, kwargs)
        else:
            out = self.computed(rule.run, self, args, kwargs)
        if rule.raw:
            return out
        if rule.mutates:
            return written_results(func, args, kwargs)
        if isinstance(out, Tensor):
            return self.wrap(out)
        return map_tensors(self.wrap, out)

    def _interpret_uniform(self, rule: Rule, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Any:
        """An operation with operands that are the same in all lanes."""
        for operand in operands:
            if self.owns(operand):
                sync(operand)  # type: ignore[arg-type]
        random = is_random(func)
        own_draws = random and self.randomness == "different"
        if rule.mutates and (own_draws or any(self.mapped(operand) for operand in operands)):
            for position, name in written_arguments(func):
                map_tensors(lambda t: lift(t) if self.owns(t) else None, argument(args, kwargs, position, name))
        if rule.undeclared and any(self.mapped(operand) for operand in operands):
            map_tensors(lambda t: lift(t) if self.owns(t) else None, written_statistics(func, args, kwargs))
        if rule.same_plane:
            return self._compose(rule, func, args, kwargs)
        if rule.raw:
            return self._run(rule, func, args, kwargs, False)
        if random or any(self.mapped(operand) for operand in operands):
            if any(operand.layout is not torch.strided or operand.is_nested for operand in operands):
                args, kwargs = replace_tensors(lambda t: t if self.mapped(t) else self.physical(t), args, kwargs)
                return run_with_layouts(self, func, args, kwargs)
            written = [argument(args, kwargs, position, name) for position, name in written_arguments(func)]
            args, kwargs = replace_tensors(
                lambda t: t.value if self.owns(t) and not t.mapped and not any(t is w for w in written) else t,
                args,
                kwargs,
            )
            return self._run(rule, func, args, kwargs, False)
        below_args, below_kwargs = replace_tensors(self.physical, args, kwargs)
        if not rule.mutates and any(operand.layout is not torch.strided for operand in operands):
            return run_with_layouts(self, func, below_args, below_kwargs)
        if rule.mutates and self.picked:
            for position, name in written_arguments(func):
                map_tensors(lambda t: note_write(self, t), argument(args, kwargs, position, name))
        out = self.computed_once(lambda: func(*below_args, **below_kwargs))
        if rule.mutates and returns_written(func):
            return written_results(func, args, kwargs)
        return wrap_unlifted(self, func, args, kwargs, out)

    def _keep_written(self, func: Any, args: tuple, kwargs: dict) -> None:
        for position, name in written_arguments(func):
            map_tensors(
                lambda t: keep(self, t.value, t.home) if self.mapped(t) else None,
                argument(args, kwargs, position, name),
            )

    def _check_written(self, func: Any, args: tuple, kwargs: dict) -> None:
        for position, name in written_arguments(func):
            target = argument(args, kwargs, position, name)
            targets = target if isinstance(target, (list, tuple)) else [target]
            for tensor in targets:
                if isinstance(tensor, Tensor) and not self.mapped(tensor):
                    if isinstance(tensor, Plane) and tensor.level is not self:
                        self.check_write_outside(tensor.level, pairs=True)
                    raise captured_write(func, name, tensor)

    def note_writes(self, op: Any, args: tuple, kwargs: dict) -> None:
        if self.journal is not None:
            note_writes_around(self, op, args, kwargs)

    def factory(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """A tensor made inside the function from no lane values: uniform until a lane value is written into it."""
        if is_random(op):
            return self._run(BATCH_RULES[op], op, args, kwargs, False)
        if updates_statistics(op):
            note_writes(self, op, args, kwargs)
        out = self.computed_once(op._op, *args) if not kwargs else self.computed_once(lambda: op(*args, **kwargs))
        return self.adopt(out) if isinstance(out, Tensor) else map_tensors(self.adopt, out)


def _copy_for_lanes(value: Tensor, size: int) -> Tensor:
    """`[*S]` -> `[size, *S]`, each lane laid out in memory as the value is, on which views of it will rely."""
    lanes = value.unsqueeze(0).expand(size, *value.shape)
    strides = value.stride()
    if value.is_contiguous() or 0 in strides:
        return lanes.clone(memory_format=torch.contiguous_format)
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides))
    if type(value) is Tensor:
        # No view of another tensor: autograd takes a view of what was written since for a leaf.
        return torch.empty_strided(lanes.shape, (extent, *strides), dtype=value.dtype, device=value.device).copy_(lanes)
    order = [0, *sorted(range(1, lanes.dim()), key=lambda dim: -strides[dim - 1])]
    if value.permute([dim - 1 for dim in order[1:]]).is_contiguous():
        back = sorted(range(lanes.dim()), key=order.__getitem__)
        return lanes.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    memory = torch.zeros(size, extent, dtype=value.dtype, device=value.device)
    return memory.as_strided(lanes.shape, (extent, *strides)).copy_(lanes)


def captured_write(func: Any, name: str, tensor: Tensor) -> CapturedWriteError:
    """The error for a lane value written into a tensor that has no lanes."""
    why = (
        f"vmap: {func._schema.name.removeprefix('aten::')}: inplace arithmetic(self, *extra_args) is not possible "
        f"because there exists a Tensor `other` in extra_args that has more elements than `self`: a value that "
        f"differs from lane to lane would be written into argument `{name}` {list(tensor.shape)}, "
        "which was made outside the mapped function and has no lanes"
    )
    instead = (
        "t = t.clone()  # inside the function; return it, and reduce over the lanes outside\n"
        "or pass the tensor as a mapped argument: vmap(f, in_dims=0)(xs, ts)"
    )
    if is_within("torch.optim."):
        why += ". An optimizer keeps it: in a loop, each example goes on from what the step of the one before has left"
        instead = (
            "optimizer.step()  # after the vmap: one step, by the gradients of all lanes, which backward() adds up\n"
            "w = w.detach().clone().requires_grad_()  # inside, and an optimizer of it: weights of each lane"
        )
    return CapturedWriteError(at_user_line(why, instead))


def has_lanes(tensor: BatchTensor) -> bool:
    """Whether a tensor has lanes, be it as a view of one that got them since."""
    sync(tensor)
    return tensor.mapped
