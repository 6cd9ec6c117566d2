"""One application of a custom `torch.autograd.Function`, as seen on one plane.

The user's forward runs once, on the plane where it was called; what it leaves on `ctx` is noted as references to its
inputs, its outputs and values of its own, so that each plane can give the user's backward a `ctx` of its own tensors.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from lanewise._core.again.around import undo_writes_around
from lanewise._core.again.holdings import ATOMS
from lanewise._core.again.journal import Journal
from lanewise._core.again.outside import held_before, reach_of
from lanewise._core.batch import BatchLevel
from lanewise._core.dual import DualLevel
from lanewise._core.forms import form_of, give, take
from lanewise._core.functions.arguments import Arguments
from lanewise._core.functions.formulas import Formula, as_function, not_twice
from lanewise._core.functions.kept import (
    ABSENT,
    NUMBERS,
    PerLane,
    Slot,
    as_many,
    attributes_of_lanes,
    look_up,
    place_of,
    refer,
)
from lanewise._core.functions.lane_values import (
    at_lane,
    each_lane,
    lane_alone,
    needing_gradients,
    stack_derivatives,
    stack_lanes,
)
from lanewise._core.functions.reopening import is_open, reopened, reseated, without_tangents
from lanewise._core.level import on_plane, record_as_outside
from lanewise._core.linear import LinearLevel
from lanewise._core.parting.interleaved import FrontLevel, arguments_of, as_in_loop
from lanewise._core.parting.lane_level import lanes_of
from lanewise._core.parting.lanes import Disagreement, Restart, arrived, lanes_together, machine, raise_caught
from lanewise._core.plane import Plane, recorded, tracked
from lanewise._torch_compat import (
    ForceDispatchKeyGuard,
    is_grad_enabled,
    single_level_setup_context,
    tls_exclude_set,
    tls_include_set,
)
from lanewise.errors import (
    LaneValueError,
    SlowPathWarning,
    TransformError,
    at_user_line,
    reads_memory,
    warn_at_user_line,
)

_IS_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__
_NOT_ATTRIBUTES = frozenset(
    "to_save saved_for_forward dirty_tensors non_differentiable materialize_grads needs_input_grad "
    "output_grad_dtypes".split()
)
_OUTPUT_ATTRIBUTES = ("fixed", "written", "materialize", "grad_dtypes")


class Context(FunctionCtx):
    """The `ctx` that the user's functions see."""

    needs_input_grad: tuple = ()
    materialize_grads = True
    to_save: tuple = ()
    saved_for_forward: tuple = ()
    dirty_tensors: tuple = ()
    non_differentiable: tuple = ()
    output_grad_dtypes: tuple | None = None  # from torch 2.14 on
    _saved: tuple = ()

    @property
    def saved_tensors(self) -> tuple:
        """What was saved, on the plane where the caller stands."""
        return self._saved


class Call:
    """One application of a Function, as seen on one plane.

    Attributes:
        cls: The user's Function.
        slots: The tensors kept by forward, on this plane.
        dirty, fixed: Positions of the inputs written to, and of the outputs marked as not differentiable.
        written: Which input an output is, where forward wrote to it and returned it.
        materialize: Whether missing gradients are zeros for the user's backward.
        grad_dtypes: The dtypes in which the user's backward gets its gradients, where it says so.
        around: The level of the lanes around, for which forward draws where its operands have none.
    """

    cls: Any
    slots: list[Slot]
    dirty: list[int]
    fixed: list[int]
    written: dict[int, int]
    materialize: bool
    grad_dtypes: tuple | None = None
    around: Any = None

    def forward(self, args: tuple) -> tuple:
        """The outputs; runs once, with nothing recorded."""
        raise NotImplementedError

    def backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        """The inputs' gradients from the outputs', given the tensors of the slots."""
        raise NotImplementedError

    def jvp(self, kept: list, tangents: tuple) -> tuple:
        """The outputs' tangents from the inputs'."""
        raise NotImplementedError

    def again(self) -> "Call":
        """The same application, to be carried out on other operands."""
        return copy.copy(self)

    def forget(self) -> None:
        """Let go of the tensors in the slots, once every plane that needs them has saved them."""
        for slot in self.slots:
            slot.value = None


class UserCall(Call):
    """The application on the plane where the user made it."""

    def __init__(self, cls: Any, kwargs: dict, needs: tuple, given: Arguments | None = None) -> None:
        self.cls = cls
        self.kwargs = kwargs
        self.needs = needs
        self.given = given
        self.include = tls_include_set()
        self.exclude = tls_exclude_set()
        self.single = False

    def forward(self, args: tuple) -> tuple:
        held = held_before(reach_of(self.cls.forward, self.cls.setup_context), args)
        try:
            with lanes_together():
                return self._run(args)
        except LaneValueError:
            level = highest_level(args)
            if not isinstance(level, BatchLevel) or level.size == 0:
                raise
            if held is not None:
                held.put_back()
            return self._run_lanes(level, args)

    def _run(self, args: tuple) -> tuple:
        ctx = Context()
        ctx.needs_input_grad = self.of_user(self.needs)
        for arg, needed in zip(args, self.needs, strict=True):
            if needed and isinstance(arg, Plane) and not tracked(arg):
                arg.requires_grad_()
        with (
            record_as_outside(never=True),
            ForceDispatchKeyGuard(self.include, self.exclude),
            on_plane(highest_level(args) or self.around),  # (on that of plain torch, kernels in Python are off again)
        ):
            given = args if self.given is None else self.given.filled(args)
            if is_new_style(self.cls):
                out = self.cls.forward(*given, **self.kwargs)
                self.cls.setup_context(ctx, given, out)
            else:
                out = self.cls.forward(ctx, *given, **self.kwargs)
        return self.keep(ctx, args, out)

    def of_user(self, values: tuple) -> tuple:
        """Those of the arguments that the user gave, without the tensors that they hold."""
        return values if self.given is None else values[: self.given.count]

    def keep(self, ctx: Context, args: tuple, out: Any) -> tuple:
        """Note what the user's forward left on `ctx`."""
        self.single = not isinstance(out, tuple)
        outs = without_tangents((out,) if self.single else out, args)
        self.slots = []
        found: dict[int, int] = {}

        def slot(tensor: Tensor, kept: bool) -> int:
            at = found.get(id(tensor))
            if at is None:
                kind, index = place_of(tensor, args, outs)
                at = found[id(tensor)] = len(self.slots)
                value = without_tangents((tensor,), args)[0] if kind == "value" else None
                self.slots.append(Slot(kind, index, value, kept and kind != "output"))
            elif not kept:
                self.slots[at].kept = False
            return at

        self.saved = [None if t is None else slot(t, False) for t in ctx.to_save]
        self.forward_saved = [None if t is None else slot(t, True) for t in ctx.saved_for_forward]
        self.attributes = {name: refer(value, slot) for name, value in vars(ctx).items() if name not in _NOT_ATTRIBUTES}
        self.dirty = [i for i, arg in enumerate(args) if any(arg is t for t in ctx.dirty_tensors)]
        self.fixed = [j for j, t in enumerate(outs) if any(t is n for n in ctx.non_differentiable)]
        self.written = {j: i for j, t in enumerate(outs) for i in self.dirty if t is args[i]}
        self.materialize, self.grad_dtypes = ctx.materialize_grads, ctx.output_grad_dtypes
        return outs

    def _run_lanes(self, level: BatchLevel, args: tuple) -> tuple:
        """Forward asks for Python values or NumPy arrays of lane values: once per lane, and the results stacked."""
        _say_per_lane(self.cls)
        self.around = None
        lanes = [copy.copy(self) for _ in range(level.size)]
        rows = each_lane(level, lambda b: level.below(lanes[b].forward, at_lane(level, args, b)))
        first = lanes[0]
        for name in ("single", "saved", "forward_saved", "dirty", *_OUTPUT_ATTRIBUTES):
            setattr(self, name, getattr(first, name))
        slots = as_many([lane.slots for lane in lanes])
        for own in slots:
            if [(s.kind, s.index) for s in own] != [(s.kind, s.index) for s in slots[0]]:
                raise LaneValueError(
                    at_user_line(
                        f"vmap: {self.cls.__name__}: forward runs once per lane, and keeps other tensors on ctx in "
                        "some lanes than in others",
                        "ctx.save_for_backward(x, y)  # the same tensors in all lanes",
                    )
                )
        self.slots = []
        for k, slot in enumerate(slots[0]):
            value = stack_lanes(level, [own[k].value for own in slots], "the tensors it keeps on ctx have")
            self.slots.append(Slot(slot.kind, slot.index, value, slot.kept))
        self.attributes = attributes_of_lanes([lane.attributes for lane in lanes], len(self.slots))
        if any(isinstance(value, PerLane) for value in self.attributes.values()):
            self.slots.append(Slot("value", NUMBERS, level.wrap(level.below(torch.arange, level.size)), True))
        stack = stack_derivatives if self.cls is Formula else stack_lanes
        outs = [stack(level, [row[j] for row in rows]) for j in range(len(rows[0]))]
        return tuple([args[first.written[j]] if j in first.written else out for j, out in enumerate(outs)])

    def context(self, kept: list, needs: tuple, forward: bool = False) -> Context:
        """The user's `ctx` on the plane of the tensors in `kept`."""
        ctx = Context()
        for name, value in self.attributes.items():
            found = look_up(value, kept)
            if found is not ABSENT:
                setattr(ctx, name, found)
        ctx.needs_input_grad = needs
        ctx.materialize_grads = self.materialize
        saved = self.forward_saved if forward and self.forward_saved else self.saved
        ctx._saved = tuple([None if at is None else kept[at] for at in saved])
        return ctx

    def backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        formula = self._of_user(lambda kept, grads: self._backward(kept, needs, grads), self.cls.backward)
        return self._or_per_lane(formula, kept, grads)

    def _of_user(self, formula: Any, user: Any) -> Callable[[list, tuple], tuple]:
        """A formula that calls the user's says so, where that may change objects, and which it has from `ctx`."""
        objects = [value for value in self.attributes.values() if not isinstance(value, ATOMS)]
        if objects or reach_of(user) is not None:
            formula.__wrapped__ = functools.partial(user, *objects)
        return formula

    def _or_per_lane(self, formula: Callable[[list, tuple], tuple], kept: list, given: tuple) -> tuple:
        """The formula; once per lane where it asks for Python values or NumPy arrays of lane values."""
        held = held_before(reach_of(formula), ())
        try:
            with lanes_together():
                return formula(kept, given)
        except Disagreement:
            if held is not None:
                held.put_back()
            raise
        except RuntimeError as error:
            level = highest_level((*kept, *given))
            asks = isinstance(error, LaneValueError) or reads_memory(error)
            if not asks or not isinstance(level, (BatchLevel, DualLevel, LinearLevel)) or not getattr(level, "size", 1):
                raise
            if held is not None:
                held.put_back()
        _say_per_lane(self.cls)
        if isinstance(level, LinearLevel) and any(getattr(value, "slot", None) for value in (*kept, *given)):
            count = len(kept)
            return level.carry(
                lambda *values: self._or_per_lane(formula, list(values[:count]), values[count:]), (*kept, *given)
            )
        if isinstance(level, (DualLevel, LinearLevel)):
            return as_function(formula, kept, given)  # takes primals and tangents apart
        with level.lanes_of_all([*kept, *given]):
            if is_grad_enabled() and any(level.owns(value) and recorded(value) for value in (*kept, *given)):
                return as_function(formula, kept, given)
            kept, given = as_in_loop(level, kept), tuple(as_in_loop(level, given))

            def run(b: int) -> tuple:
                own = level.below(needing_gradients, kept, at_lane(level, kept, b)), at_lane(level, given, b)
                with lane_alone(level, b):
                    return at_lane(level, level.below(self._or_per_lane, formula, *own), 0)

            rows = each_lane(level, run)
            return tuple([stack_derivatives(level, [row[i] for row in rows]) for i in range(len(rows[0]))])

    def _backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        formula = user_formula(self.cls)
        own = self.of_user(needs)
        ctx = self.context(kept, own)
        boxed = getattr(self.cls, "boxed_grads_call", False)
        result = formula(ctx, list(grads)) if boxed else formula(ctx, *grads)
        if is_once_differentiable(self.cls):
            result = not_twice(result, [*grads, *kept])
        result = check_count(f"{self.cls.__name__}Backward", result, len(own))
        return (*result, *[None] * (len(needs) - len(own)))

    def jvp(self, kept: list, tangents: tuple) -> tuple:
        formula = self._of_user(lambda kept, tangents: self._jvp(kept, tangents), self.cls.jvp)
        return self._or_per_lane(formula, kept, tangents)

    def _jvp(self, kept: list, tangents: tuple) -> tuple:
        tangents = self.of_user(tangents)
        ctx = self.context(kept, tuple(t is not None for t in tangents), forward=True)
        result = self.cls.jvp(ctx, *tangents)
        return without_tangents(result if isinstance(result, tuple) else (result,), (*kept, *tangents))


class LaneCall(Call):
    """An application seen from the plane below a batch level, where the lanes are dim 0 of its tensors."""

    def __init__(self, inner: Call, level: BatchLevel, args: tuple) -> None:
        self.inner = inner
        self.cls = inner.cls
        self.level = level
        # The lanes that run now: where lanes part, others may later.
        self.running = lanes_of(level)
        self.place = level.size, level.randomness, level.total, level.start
        self.args = [form_of(level, arg) for arg in args]
        self.shapes = [arg.shape if isinstance(arg, Tensor) else None for arg in args]

    def forward(self, args: tuple) -> tuple:
        around = self.level.parent
        while isinstance(around, BatchLevel):
            around = around.parent
        if around is None:
            return self._forward(self.level, args)
        # Primals and tangents were taken apart around it: it does not lie on the plane that the values are of.
        if is_open(self.level):
            with reseated(self.level, self.running) as level:
                outs = self._forward(level, args)
            kept = without_tangents(tuple([slot.value for slot in self.slots]), args)
            for slot, value in zip(self.slots, kept, strict=True):
                slot.value = value
            return without_tangents(outs, args)
        with self.lanes() as level:
            level.stands_for = self.level
            return self._forward(level, args)

    def _forward(self, level: BatchLevel, args: tuple) -> tuple:
        inputs = tuple([give(level, arg, form) for arg, form in zip(args, self.args, strict=True)])
        self.inner.around = level
        outs = self.inner.forward(inputs)
        self.inner.around = None
        for name in _OUTPUT_ATTRIBUTES:
            setattr(self, name, getattr(self.inner, name))
        # Outputs that are the same in all lanes stay so, unless others have lanes: then all cotangents have lanes too.
        self.uniform = "lanes" not in self.args and not any(level.mapped(out) for out in outs)
        forms = [("uniform" if self.uniform else "lanes") if isinstance(out, Tensor) else "" for out in outs]
        self.outs = forms
        self.slots = [
            Slot(s.kind, s.index, level.physical(s.value) if s.kind == "value" else None, s.kept)
            for s in self.inner.slots
        ]
        self.forms = [
            form_of(level, s.value) if s.kind == "value" else (self.args if s.kind == "input" else forms)[s.index]
            for s in self.inner.slots
        ]
        # A tensor that got lanes of its own when it was written to is no longer the one that the caller holds.
        self.dirty = [i for i in self.inner.dirty if level.physical(inputs[i]) is args[i]]
        return tuple([take(level, out, form) for out, form in zip(outs, forms, strict=True)])

    def backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        def run(level: BatchLevel, kept: list, grads: list) -> tuple:
            result = self.inner.backward(kept, needs, tuple(grads))
            fitted = [
                reduce_to(g, shape) if isinstance(g, Tensor) and shape is not None else g
                for g, shape in zip(result, self.shapes, strict=True)
            ]
            return tuple([self._gradient(level, g, form) for g, form in zip(fitted, self.args, strict=True)])

        return self._on_lanes(run, kept, grads, self.outs)

    def _on_lanes(self, run: Callable[..., tuple], kept: list, given: tuple, forms: list[str]) -> tuple:
        """`run(level, kept, given)` on the level anew."""

        def enter(level: BatchLevel) -> list[list]:
            pairs = (zip(kept, self.forms, strict=True), zip(given, forms, strict=True))
            return [[give(level, value, form) for value, form in each] for each in pairs]

        if is_open(self.level):
            with reseated(self.level, self.running) as level:
                out = run(level, *enter(level))
            return without_tangents(out, (*kept, *given))
        with reopened(self.level, self.place, self.running) as level:
            return self._on_level(level or self.lanes(), run, enter)

    def _on_level(
        self, level: BatchLevel, run: Callable[..., tuple], enter: Callable[[BatchLevel], list[list]]
    ) -> tuple:
        """`run(level, *enter(level))`; again with lanes in front, where it needs that."""
        level.restartable = True
        try:
            with level:
                out = run(level, *enter(level))
                if machine.raised:
                    raise_caught(level, Disagreement)
                return out
        except BaseException as error:
            if arrived(level, error, Disagreement) is None and arrived(level, error, Restart) is None:
                raise  # a Restart is of a level whose lanes parted, and which has no function to start again any more
            undo_writes_around(level)
        front = FrontLevel(*self.place)
        front.journal, front.arguments = Journal([]), level.arguments
        with front:
            operands = [as_in_loop(front, values) for values in enter(front)]
            front.leave_arguments()
            return run(front, *operands)

    def _gradient(self, level: BatchLevel, grad: Any, form: str) -> Any:
        if not isinstance(grad, Tensor):
            return grad
        grad = level.here(grad)
        if form == "lanes":
            return level.below(level.expanded, grad)
        if level.mapped(grad):
            total = level.below(torch.sum, grad.value, 0)
            return level.below(torch.div, total, level.size) if self.uniform else total
        value = level.physical(grad)
        return value if self.uniform else level.below(torch.mul, value, level.size)

    def jvp(self, kept: list, tangents: tuple) -> tuple:
        def run(level: BatchLevel, kept: list, tangents: list) -> tuple:
            result = self.inner.jvp(kept, tuple(tangents))
            return tuple([take(level, t, form) for t, form in zip(result, self.outs, strict=True)])

        return self._on_lanes(run, kept, tangents, self.args)

    def again(self) -> Call:
        twin: Any = copy.copy(self)
        twin.inner = self.inner.again()
        return twin

    def lanes(self) -> BatchLevel:
        """The level anew: its formula may run long after it has ended, below other levels than before."""
        level = BatchLevel(*self.place)
        level.journal, level.arguments = Journal([]), arguments_of(self.level)
        return level


def highest_level(args: tuple) -> Any:
    """The level of the highest wrapper among the arguments, None if all are plain."""
    level = None
    for arg in args:
        if isinstance(arg, Plane) and (level is None or arg.level.order > level.order):
            level = arg.level
    return level


def is_new_style(cls: Any) -> bool:
    """Whether forward takes no ctx and `setup_context` is there."""
    return cls.setup_context is not single_level_setup_context


def is_once_differentiable(cls: Any) -> bool:
    """Whether the backward is marked `@once_differentiable`."""
    return getattr(user_formula(cls), "__code__", None) is _IS_ONCE_DIFFERENTIABLE


def user_formula(cls: Any) -> Any:
    return cls.vjp if cls.vjp is not Function.vjp else cls.backward


def reduce_to(grad: Tensor, shape: torch.Size) -> Tensor:
    """A gradient of the broadcast shape, summed to the operand's."""
    return grad.sum_to_size(shape) if grad.shape != shape and grad.dim() >= len(shape) else grad


def check_count(name: str, result: Any, count: int) -> tuple:
    """The gradients as a tuple, one for each operand."""
    grads: Any = result if isinstance(result, tuple) else (result,)
    while len(grads) > count and grads[-1] is None:
        grads = grads[:-1]
    if len(grads) != count:
        raise TransformError(
            at_user_line(
                f"function {name} returned an incorrect number of gradients (expected {count}, got {len(grads)})",
                "return one gradient, or None, for each argument of forward",
            )
        )
    return grads


_slow: set[tuple[str, Any]] = set()


def say_slow(api: str, cls: Any, why: str) -> None:
    """That a Function runs more often than once; once for each of them and transform."""
    if (api, cls) in _slow or cls is Formula:
        return
    _slow.add((api, cls))
    warn_at_user_line(SlowPathWarning(at_user_line(f"{api}: There is a performance drop because {why}")))


def _say_per_lane(cls: Any) -> None:
    say_slow(
        "vmap",
        cls,
        f"{cls.__name__} asks for Python values or NumPy arrays of values that differ from lane to lane: it runs once "
        "per lane",
    )
