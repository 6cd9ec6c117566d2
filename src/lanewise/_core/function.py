"""Custom `torch.autograd.Function`s across planes: on every plane the derivative is the one the user wrote.

A Function applied to a wrapper runs once, on the plane where it was called. On each plane from there down to plain
torch one node is recorded whose backward calls the user's: with the tensors of that plane, given lanes again for the
planes on which the lanes are an ordinary dim. An operand without lanes gets the sum of its lanes' gradients.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.dual import DualLevel
from lanewise._core.level import on_plane, record_as_outside
from lanewise._core.native import differentiable, double_reverse
from lanewise._core.plane import Plane, detached, escaped, lift, recorded, sync, tracked
from lanewise._core.trees import flatten, unflatten
from lanewise._core.user_rules import VmapInfo, wrap_by_out_dims
from lanewise._torch_compat import (
    AnyFunction,
    ForceDispatchKeyGuard,
    apply_plainly,
    current_graph_task_id,
    forward_level,
    is_grad_enabled,
    single_level_setup_context,
    tls_exclude_set,
    tls_include_set,
)
from lanewise.errors import FunctionError, TransformError, at_user_line

_IS_ONCE_DIFFERENTIABLE = once_differentiable(lambda ctx: None).__code__
_NOT_ATTRIBUTES = frozenset(
    ("to_save", "saved_for_forward", "dirty_tensors", "non_differentiable", "materialize_grads", "needs_input_grad")
)


class Context(FunctionCtx):
    """The `ctx` that the user's functions see."""

    needs_input_grad: tuple = ()
    materialize_grads = True
    to_save: tuple = ()
    saved_for_forward: tuple = ()
    dirty_tensors: tuple = ()
    non_differentiable: tuple = ()
    _saved: tuple = ()

    @property
    def saved_tensors(self) -> tuple:
        """What was saved, on the plane where the caller stands."""
        return self._saved


class Slot:
    """One tensor that the user's forward kept: an input, an output, or a value of its own.

    Attributes:
        kind: "input", "output" or "value".
        index: Position among the inputs or outputs.
        value: The tensor itself, for "value".
        kept: Set as a plain attribute of `ctx`, so it is kept as it is, without a check for later writes.
    """

    __slots__ = ("kind", "index", "value", "kept")

    def __init__(self, kind: str, index: int, value: Any, kept: bool) -> None:
        self.kind = kind
        self.index = index
        self.value = value
        self.kept = kept

    def find(self, args: tuple, outs: tuple) -> Any:
        """The tensor on the plane of these inputs and outputs."""
        return self.value if self.kind == "value" else (args if self.kind == "input" else outs)[self.index]


class _Ref(NamedTuple):
    """Stands in an attribute of `ctx` for the tensor in a slot."""

    slot: int


class _Tree:
    """An attribute of `ctx` that holds tensors."""

    __slots__ = ("leaves", "spec")

    def __init__(self, leaves: list, spec: Any) -> None:
        self.leaves = leaves
        self.spec = spec


class Call:
    """One application of a Function, as seen on one plane.

    Attributes:
        cls: The user's Function.
        slots: The tensors kept by forward, on this plane.
        dirty, fixed: Positions of the inputs written to, and of the outputs marked as not differentiable.
        written: Which input an output is, where forward wrote to it and returned it.
        materialize: Whether missing gradients are zeros for the user's backward.
    """

    cls: Any
    slots: list[Slot]
    dirty: list[int]
    fixed: list[int]
    written: dict[int, int]
    materialize: bool

    def forward(self, args: tuple) -> tuple:
        """The outputs; runs once, with nothing recorded."""
        raise NotImplementedError

    def backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        """The inputs' gradients from the outputs', given the tensors of the slots."""
        raise NotImplementedError

    def jvp(self, kept: list, tangents: tuple) -> tuple:
        """The outputs' tangents from the inputs'."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of the tensors in the slots, once every plane that needs them has saved them."""
        for slot in self.slots:
            slot.value = None


class UserCall(Call):
    """The application on the plane where the user made it."""

    def __init__(self, cls: Any, kwargs: dict, needs: tuple) -> None:
        self.cls = cls
        self.kwargs = kwargs
        self.needs = needs
        self.include = tls_include_set()
        self.exclude = tls_exclude_set()
        self.single = False

    def forward(self, args: tuple) -> tuple:
        ctx = Context()
        ctx.needs_input_grad = self.needs
        for arg, needed in zip(args, self.needs, strict=True):
            if needed and isinstance(arg, Plane) and not tracked(arg):
                arg.requires_grad_()
        with (
            record_as_outside(never=True),
            on_plane(highest_level(args)),
            ForceDispatchKeyGuard(self.include, self.exclude),
        ):
            if is_new_style(self.cls):
                out = self.cls.forward(*args, **self.kwargs)
                self.cls.setup_context(ctx, args, out)
            else:
                out = self.cls.forward(ctx, *args, **self.kwargs)
        return self.keep(ctx, args, out)

    def keep(self, ctx: Context, args: tuple, out: Any) -> tuple:
        """Note what the user's forward left on `ctx`."""
        self.single = not isinstance(out, tuple)
        outs = (out,) if self.single else out
        self.slots = []
        found: dict[int, int] = {}

        def slot(tensor: Tensor, kept: bool) -> int:
            at = found.get(id(tensor))
            if at is None:
                kind, index = _place(tensor, args, outs)
                at = found[id(tensor)] = len(self.slots)
                self.slots.append(Slot(kind, index, tensor if kind == "value" else None, kept and kind != "output"))
            elif not kept:
                self.slots[at].kept = False
            return at

        self.saved = [None if t is None else slot(t, False) for t in ctx.to_save]
        self.forward_saved = [None if t is None else slot(t, True) for t in ctx.saved_for_forward]
        self.attributes = {
            name: _refer(value, slot) for name, value in vars(ctx).items() if name not in _NOT_ATTRIBUTES
        }
        self.dirty = [i for i, arg in enumerate(args) if any(arg is t for t in ctx.dirty_tensors)]
        self.fixed = [j for j, t in enumerate(outs) if any(t is n for n in ctx.non_differentiable)]
        self.written = {j: i for j, t in enumerate(outs) for i in self.dirty if t is args[i]}
        self.materialize = ctx.materialize_grads
        return outs

    def context(self, kept: list, needs: tuple, forward: bool = False) -> Context:
        """The user's `ctx` on the plane of the tensors in `kept`."""
        ctx = Context()
        for name, value in self.attributes.items():
            setattr(ctx, name, _look_up(value, kept))
        ctx.needs_input_grad = needs
        ctx.materialize_grads = self.materialize
        saved = self.forward_saved if forward and self.forward_saved else self.saved
        ctx._saved = tuple([None if at is None else kept[at] for at in saved])
        return ctx

    def backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        formula = _formula(self.cls)
        ctx = self.context(kept, needs)
        boxed = getattr(self.cls, "boxed_grads_call", False)
        result = formula(ctx, list(grads)) if boxed else formula(ctx, *grads)
        if is_once_differentiable(self.cls):
            result = _not_twice(result, [*grads, *kept])
        return check_count(f"{self.cls.__name__}Backward", result, len(needs))

    def jvp(self, kept: list, tangents: tuple) -> tuple:
        ctx = self.context(kept, tuple(t is not None for t in tangents), forward=True)
        result = self.cls.jvp(ctx, *tangents)
        return result if isinstance(result, tuple) else (result,)


class LaneCall(Call):
    """An application seen from the plane below a batch level, where the lanes are dim 0 of its tensors."""

    def __init__(self, inner: Call, level: BatchLevel, args: tuple) -> None:
        self.inner = inner
        self.cls = inner.cls
        self.level = level
        self.args = [_form(level, arg) for arg in args]
        self.shapes = [arg.shape if isinstance(arg, Tensor) else None for arg in args]

    def forward(self, args: tuple) -> tuple:
        level = self.level
        inputs = tuple([_give(level, arg, form) for arg, form in zip(args, self.args, strict=True)])
        outs = self.inner.forward(inputs)
        self.materialize, self.fixed, self.written = self.inner.materialize, self.inner.fixed, self.inner.written
        # Outputs that are the same in all lanes stay so, unless others have lanes: then all cotangents have lanes too.
        self.uniform = "lanes" not in self.args and not any(level.mapped(out) for out in outs)
        forms = [("uniform" if self.uniform else "lanes") if isinstance(out, Tensor) else "" for out in outs]
        self.outs = forms
        self.slots = [
            Slot(s.kind, s.index, level.physical(s.value) if s.kind == "value" else None, s.kept)
            for s in self.inner.slots
        ]
        self.forms = [
            _form(level, s.value) if s.kind == "value" else (self.args if s.kind == "input" else forms)[s.index]
            for s in self.inner.slots
        ]
        # A tensor that got lanes of its own when it was written to is no longer the one that the caller holds.
        self.dirty = [i for i in self.inner.dirty if level.physical(inputs[i]) is args[i]]
        return tuple([self._take(level, out, form) for out, form in zip(outs, forms, strict=True)])

    def _take(self, level: BatchLevel, out: Any, form: str) -> Any:
        if not isinstance(out, Tensor):
            return out
        return level.below(level.expanded, out) if form == "lanes" and not level.mapped(out) else level.physical(out)

    def backward(self, kept: list, needs: tuple, grads: tuple) -> tuple:
        with self._lanes() as level:
            inner_kept = [_give(level, t, form) for t, form in zip(kept, self.forms, strict=True)]
            inner_grads = [_give(level, g, form) for g, form in zip(grads, self.outs, strict=True)]
            result = self.inner.backward(inner_kept, needs, tuple(inner_grads))
            fitted = [
                _reduce_to(g, shape) if isinstance(g, Tensor) and shape is not None else g
                for g, shape in zip(result, self.shapes, strict=True)
            ]
            return tuple([self._gradient(level, g, form) for g, form in zip(fitted, self.args, strict=True)])

    def _gradient(self, level: BatchLevel, grad: Any, form: str) -> Any:
        if not isinstance(grad, Tensor):
            return grad
        if form == "lanes":
            return level.below(level.expanded, grad)
        if level.mapped(grad):
            total = level.below(torch.sum, grad.value, 0)
            return level.below(torch.div, total, level.size) if self.uniform else total
        value = level.physical(grad)
        return value if self.uniform else level.below(torch.mul, value, level.size)

    def jvp(self, kept: list, tangents: tuple) -> tuple:
        with self._lanes() as level:
            inner_kept = [_give(level, t, form) for t, form in zip(kept, self.forms, strict=True)]
            inner_tangents = [_give(level, t, form) for t, form in zip(tangents, self.args, strict=True)]
            result = self.inner.jvp(inner_kept, tuple(inner_tangents))
            return tuple([self._take(level, t, form) for t, form in zip(result, self.outs, strict=True)])

    def _lanes(self) -> BatchLevel:
        """The level anew: its formula may run long after it has ended, below other levels than before."""
        old = self.level
        return BatchLevel(old.size, old.randomness, old.total, old.start)


# --- one application, plane by plane -------------------------------------------------------------------------------------


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`: torch's own for plain tensors, the planes in turn for wrappers."""
    if any(isinstance(arg, Tensor) for arg in kwargs.values()) and highest_level((*args, *kwargs.values())):
        raise FunctionError(
            at_user_line(
                f"{cls.__name__}: Run vmap on autograd.Function with kwarg-only Tensor args is not supported",
                f"{cls.__name__}.apply(x, y)  # pass tensors by position",
            )
        )
    if highest_level(args) is None or issubclass(cls, Node):
        return apply_plainly(cls, *args, **kwargs)
    call = UserCall(cls, kwargs, tuple([isinstance(arg, Tensor) and tracked(arg) for arg in args]))
    outs = carry_out(call, args)
    call.forget()
    return outs[0] if call.single else outs


def carry_out(call: Call, args: tuple) -> tuple:
    """The outputs on the plane of the highest argument; recorded on that plane and on all below."""
    level = highest_level(args)
    if level is None:
        return record(call, None, args)
    if not level.alive and current_graph_task_id() == -1:
        raise escaped(level, call.cls.__name__)
    for arg in args:
        if isinstance(arg, Plane) and arg.level is level:
            sync(arg)
    if isinstance(level, BatchLevel):
        outs = _over_lanes(call, level, args)
    else:
        outs = _with_tangents(call, level, args)
    return record(call, outs, args)


def _over_lanes(call: Call, level: BatchLevel, args: tuple) -> tuple:
    below_args = tuple([level.physical(arg) if isinstance(arg, Tensor) else arg for arg in args])
    if isinstance(call, UserCall) and has_vmap(call.cls) and any(level.mapped(arg) for arg in args):
        if is_new_style(call.cls) or not records(args):
            return _by_user_rule(call, level, args, below_args)
    below = LaneCall(call, level, args)
    outs = level.below(carry_out, below, below_args)
    below.forget()
    return tuple(
        [
            _written_lanes(level, args[call.written[j]], out) if j in call.written else _give(level, out, form)
            for j, (out, form) in enumerate(zip(outs, below.outs, strict=True))
        ]
    )


def _written_lanes(level: BatchLevel, arg: Any, out: Tensor) -> Any:
    """The argument that forward wrote to, with its new value."""
    if level.owns(arg):
        if out is not arg.value:
            lift(arg)
            level.below(arg.value.copy_, out)
        torch.autograd.graph.increment_version(arg)
    return arg


def _by_user_rule(call: UserCall, level: BatchLevel, args: tuple, below_args: tuple) -> tuple:
    """The user's `vmap` staticmethod says what happens below; `setup_context` gives this plane its `ctx`."""
    cls = call.cls
    if cls.generate_vmap_rule:
        raise TransformError(
            at_user_line(
                f"vmap: {cls.__name__}: it has both generate_vmap_rule=True and an overridden vmap staticmethod. Please "
                "set generate_vmap_rule=False or delete the overridden vmap staticmethod to avoid ambiguity"
            )
        )
    in_dims = tuple([0 if level.mapped(arg) else None for arg in args])
    result = level.below(lambda: cls.vmap(VmapInfo(level.size, level.randomness), in_dims, *below_args))
    outs, single = wrap_by_out_dims(level, cls.__name__, result)
    outs = tuple([_unaliased(level, args, below_args, out) for out in outs])
    ctx = Context()
    ctx.needs_input_grad = call.needs
    out = outs[0] if single else outs
    if is_new_style(cls):
        with record_as_outside(never=True), on_plane(level):
            cls.setup_context(ctx, args, out)
    return call.keep(ctx, args, out)


def _unaliased(level: BatchLevel, args: tuple, below_args: tuple, out: Any) -> Any:
    """The argument itself where the rule returned its value."""
    for arg, value in zip(args, below_args, strict=True):
        if level.owns(arg) and isinstance(out, BatchTensor) and out.value is value:
            return arg
    return out


def _with_tangents(call: Call, level: DualLevel, args: tuple) -> tuple:
    primals = tuple([level.primal(arg) if isinstance(arg, Tensor) else arg for arg in args])
    tangents = tuple([level.tangent(arg) for arg in args])
    if all(tangent is None for tangent in tangents):
        outs, pushed = level.below(carry_out, call, primals), ()
    elif call.cls.jvp is not Function.jvp:
        outs, pushed = level.below(_push, call, primals, tangents)
    else:
        if is_once_differentiable(call.cls) or not has_backward(call.cls):
            raise missing_jvp(call.cls)

        # Copies: forward may write to its operands, and the derived tangents are recorded in terms of what was there.
        def run(*aliases: Any) -> tuple:
            return carry_out(call, tuple([_copy(alias) for alias in aliases]))

        outs, pushed = level.below(double_reverse, run, args, {}, level.primal, lambda x: _copy(level.tangent(x)))
    pushed = tuple(pushed) if pushed else (None,) * len(outs)
    return tuple(
        [
            _written_dual(level, args[call.written[j]], out, tangent) if j in call.written else level.pair(out, tangent)
            for j, (out, tangent) in enumerate(zip(outs, pushed, strict=True))
        ]
    )


def _push(call: Call, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    """Outputs, and tangents by the user's `jvp`. Called in the plane below."""
    outs = carry_out(call, primals)
    given = tangents
    if call.materialize:
        given = tuple(
            [
                torch.zeros_like(x) if t is None and isinstance(x, Tensor) and differentiable(x) else t
                for x, t in zip(primals, tangents, strict=True)
            ]
        )
    pushed = call.jvp([slot.find(primals, outs) for slot in call.slots], given)
    if len(pushed) != len(outs):
        raise TransformError(
            at_user_line(f"{call.cls.__name__}: jvp returned {len(pushed)} tangents for {len(outs)} outputs")
        )
    # A tangent handed on as it came in must be a tensor of its own: either may be written to.
    own = [
        t.clone() if j not in call.written and any(t is x for x in given) and t is not None else t
        for j, t in enumerate(pushed)
    ]
    fitting = [
        t if isinstance(out, Tensor) and differentiable(out) and j not in call.fixed else None
        for j, (out, t) in enumerate(zip(outs, own, strict=True))
    ]
    return outs, tuple(fitting)


def _written_dual(level: DualLevel, arg: Any, out: Tensor, tangent: Tensor | None) -> Any:
    """The argument that forward wrote to, with its new value and tangent."""
    if level.owns(arg):
        if out is not arg.value:
            level.below(arg.value.copy_, out)
        if tangent is not None and tangent is not arg.tangent:
            lift(arg)
            level.below(arg.tangent.copy_, tangent)
        torch.autograd.graph.increment_version(arg)
    return arg


def record(call: Call, outs: tuple | None, args: tuple) -> tuple:
    """Record on the plane of `args`: the outputs, or where they are not known yet, what forward gives."""
    if outs is not None and forward_level() < 0 and not records(args):
        return tuple([_fresh(call, j, out, args) for j, out in enumerate(outs)])
    return apply_plainly(node_class(call.cls), *args, call, outs)


def _fresh(call: Call, position: int, out: Any, args: tuple) -> Any:
    """An input returned as it came is an alias, as torch makes it."""
    if isinstance(out, Tensor) and position not in call.written and any(out is arg for arg in args):
        return out.view_as(out)
    return out


class Node(Function):
    """What torch.autograd records on one plane. Its last two operands are the `Call` and the outputs."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple:
        *args, call, outs = operands
        if outs is None:
            outs = call.forward(tuple(args))
        ctx.call = call
        ctx.mark_dirty(*[args[i] for i in call.dirty])
        ctx.mark_non_differentiable(*[outs[j] for j in call.fixed])
        ctx.set_materialize_grads(call.materialize)
        kept = [slot.find(args, outs) for slot in call.slots]
        ctx.loose = [tensor if slot.kept else None for slot, tensor in zip(call.slots, kept, strict=True)]
        ctx.save_for_backward(*[None if slot.kept else tensor for slot, tensor in zip(call.slots, kept, strict=True)])
        ctx.pushes = kept if forward_level() >= 0 else None
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        kept = [loose if tensor is None else tensor for tensor, loose in zip(ctx.saved_tensors, ctx.loose, strict=True)]
        with record_as_outside() as switched:
            result = ctx.call.backward(kept, ctx.needs_input_grad[:-2], grads)
            if switched:
                result = tuple([_cut(grad) for grad in result])
        return (*result, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple:
        kept, ctx.pushes = ctx.pushes, None
        if ctx.call.cls.jvp is Function.jvp:
            raise missing_jvp(ctx.call.cls)
        return ctx.call.jvp(kept, tangents[:-2])


_node_classes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def node_class(cls: Any) -> Any:
    """The `Node` that bears the name of the user's Function."""
    node = _node_classes.get(cls)
    if node is None:
        node = _node_classes[cls] = type(cls.__name__, (Node,), {})
    return node


class _NotTwice(Function):
    """Aliases of gradients that cannot be differentiated again, which say so."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple:
        return tuple([None if t is None else t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TransformError("trying to differentiate twice a function that was marked with @once_differentiable")


def _not_twice(result: Any, operands: list) -> Any:
    if not is_grad_enabled() or not any(isinstance(x, Tensor) and tracked(x) for x in operands):
        return result
    grads = result if isinstance(result, tuple) else (result,)
    return _NotTwice.apply(len(grads), *grads, *operands)


# --- small questions -----------------------------------------------------------------------------------------------------


def highest_level(args: tuple) -> Any:
    """The level of the highest wrapper among the arguments, None if all are plain."""
    level = None
    for arg in args:
        if isinstance(arg, Plane) and (level is None or arg.level.order > level.order):
            level = arg.level
    return level


def records(args: tuple) -> bool:
    """Whether autograd records an application to these arguments on their plane."""
    return is_grad_enabled() and any(isinstance(arg, Tensor) and recorded(arg) for arg in args)


def is_new_style(cls: Any) -> bool:
    """Whether forward takes no ctx and `setup_context` is there."""
    return cls.setup_context is not single_level_setup_context


def is_once_differentiable(cls: Any) -> bool:
    """Whether the backward is marked `@once_differentiable`."""
    return getattr(_formula(cls), "__code__", None) is _IS_ONCE_DIFFERENTIABLE


def has_backward(cls: Any) -> bool:
    """Whether the user wrote a backward (or vjp)."""
    return _formula(cls) is not Function.backward


def has_vmap(cls: Any) -> bool:
    """Whether the user wrote a `vmap` staticmethod."""
    return cls.vmap is not Function.vmap


def missing_jvp(cls: Any) -> FunctionError:
    """The error where forward mode cannot go through a Function."""
    return FunctionError(
        at_user_line(
            f"{cls.__name__}: You must implement the jvp function for custom autograd.Function to use it with forward "
            "mode AD: its backward cannot be differentiated, so no jvp can be derived from it",
            "@staticmethod\ndef jvp(ctx, *tangents): ...",
        )
    )


def _formula(cls: Any) -> Any:
    return cls.vjp if cls.vjp is not Function.vjp else cls.backward


def _place(tensor: Tensor, args: tuple, outs: tuple) -> tuple[str, int]:
    for kind, tensors in (("input", args), ("output", outs)):
        for index, other in enumerate(tensors):
            if other is tensor:
                return kind, index
    return "value", -1


def _refer(value: Any, slot: Callable[[Tensor, bool], int]) -> Any:
    """An attribute of `ctx` with references in place of its tensors; untouched where it holds none."""
    leaves, spec = flatten(value)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return value
    return _Tree([_Ref(slot(leaf, True)) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _look_up(value: Any, kept: list) -> Any:
    if not isinstance(value, _Tree):
        return value
    return unflatten([kept[leaf.slot] if isinstance(leaf, _Ref) else leaf for leaf in value.leaves], value.spec)


def _form(level: BatchLevel, value: Any) -> str:
    if not isinstance(value, Tensor):
        return ""
    if level.owns(value):
        return "lanes" if level.mapped(value) else "uniform"
    return "plain"


def _give(level: BatchLevel, value: Any, form: str) -> Any:
    """A value of the plane below on the plane of `level`."""
    if value is None or form in ("", "plain"):
        return value
    return level.wrap(value) if form == "lanes" else level.adopt(value)


def _reduce_to(grad: Tensor, shape: torch.Size) -> Tensor:
    """A gradient of the broadcast shape, summed to the operand's."""
    return grad.sum_to_size(shape) if grad.shape != shape and grad.dim() >= len(shape) else grad


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _cut(value: Any) -> Any:
    """Without history on its own plane."""
    if not isinstance(value, Tensor) or not recorded(value):
        return value
    return detached(value)


def check_count(name: str, result: Any, count: int) -> tuple:
    """The gradients as a tuple, one for each operand."""
    grads = result if isinstance(result, tuple) else (result,)
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


AnyFunction.apply = classmethod(apply)
