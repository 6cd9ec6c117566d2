"""Custom `torch.autograd.Function`s across planes: on every plane the derivative is the one the user wrote.

A Function applied to a wrapper runs once, on the plane where it was called. On each plane from there down to plain
torch one node is recorded whose backward calls the user's: with the tensors of that plane, given lanes again for the
planes on which the lanes are an ordinary dim. An operand without lanes gets the sum of its lanes' gradients.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.distributed import is_of_dtensors, placed_as
from lanewise._core.draws.chunk_draws import own_draws
from lanewise._core.dual import DualLevel
from lanewise._core.forms import give
from lanewise._core.functions.arguments import holds, of_one_kind, with_held_tensors
from lanewise._core.functions.calls import (
    Call,
    Context,
    LaneCall,
    UserCall,
    highest_level,
    is_new_style,
    is_once_differentiable,
    say_slow,
    user_formula,
)
from lanewise._core.level import current_level, note_autograd, on_plane, record_as_outside
from lanewise._core.linear import LinearLevel
from lanewise._core.native import differentiable, double_reverse
from lanewise._core.parting.joins import restricted
from lanewise._core.parting.lane_level import LaneLevel
from lanewise._core.plane import Plane, detached, escaped, lift, own_node, recorded, sync, tracked
from lanewise._core.recording.hooks import Handles, on_lanes_of_node
from lanewise._core.user_rules import VmapInfo, wrap_by_out_dims
from lanewise._torch_compat import (
    CheckpointInputs,
    apply_plainly,
    current_graph_task_id,
    forward_level,
    is_grad_enabled,
    lead_applications,
    with_defaults,
)
from lanewise.errors import FunctionError, LanewiseError, TransformError, at_user_line


def apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`: torch's own for plain tensors, the planes in turn for wrappers."""
    level = highest_level((*args, *kwargs.values()) if kwargs else args)
    if issubclass(cls, Node) or cls is CheckpointInputs or (level is None and current_level() is None):
        return apply_plainly(cls, *args, **kwargs)
    note_autograd()
    args, kwargs = with_defaults(cls, args, kwargs)
    holding = any(map(holds, args))
    if holding:
        args = of_one_kind(args)
        level = highest_level((*args, *kwargs.values()))
    if level is not None and any(isinstance(arg, Tensor) for arg in kwargs.values()):
        raise FunctionError(
            at_user_line(
                f"{cls.__name__}: Run vmap on autograd.Function with kwarg-only Tensor args is not supported",
                f"{cls.__name__}.apply(x, y)  # pass tensors by position",
            )
        )
    if level is None and not any(isinstance(arg, Tensor) for arg in args):
        return apply_plainly(cls, *args, **kwargs)
    given = None
    if holding:
        args, given = with_held_tensors(args, has_vmap(cls))
    call = UserCall(cls, kwargs, tuple([isinstance(arg, Tensor) and tracked(arg) for arg in args]), given)
    outs = carry_out(call, args)
    call.forget()
    return outs[0] if call.single else outs


def carry_out(call: Call, args: tuple) -> tuple:
    """The outputs on the plane of the highest argument; recorded on that plane and on all below."""
    level: Any = highest_level(args)
    here = current_level()
    if isinstance(here, (BatchLevel, DualLevel, LinearLevel)) and (level is None or level.order < here.order):
        level = here  # all from outside: what comes of them belongs to the function's plane
    if level is None:
        return record(call, None, args)
    if not level.alive and current_graph_task_id() == -1:
        raise escaped(level, call.cls.__name__)
    for arg in args:
        if isinstance(arg, Plane) and arg.level is level:
            sync(arg)
    given = args
    if isinstance(level, LaneLevel):
        args = tuple([restricted(level, arg, level.lanes) if level.owns(arg) else level.here(arg) for arg in args])
    if isinstance(level, BatchLevel):
        outs = _over_lanes(call, level, args)
    elif isinstance(level, LinearLevel):
        if any(level.owns(arg) and arg.slot is not None for arg in args):
            return _of_tangents(call, level, args)
        outs = _of_constants(call, level, args)
    else:
        outs = _with_tangents(call, level, args)
    if not call.dirty or any(level.owns(arg) and (i in call.dirty or recorded(arg)) for i, arg in enumerate(args)):
        outs = record(call, outs, args)  # else what was written to is of a plane below, and recorded there
    return outs if given is args else _written_given(call, outs, args, given)


def _written_given(call: Call, outs: tuple, args: tuple, given: tuple) -> tuple:
    """The arguments to which the forward wrote, where others stood in for them on the lanes that run."""
    for i in call.dirty:
        if given[i] is not args[i]:
            given[i].copy_(args[i])
    return tuple([given[call.written[j]] if j in call.written else out for j, out in enumerate(outs)])


def _over_lanes(call: Call, level: BatchLevel, args: tuple) -> tuple:
    below_args = tuple([level.physical(arg) if isinstance(arg, Tensor) else arg for arg in args])
    if isinstance(call, UserCall) and has_vmap(call.cls) and any(level.mapped(arg) for arg in args):
        if is_new_style(call.cls) or not records(args):
            try:
                return _by_user_rule(call, level, args, below_args)
            except Exception as error:
                if level.size or isinstance(error, LanewiseError):
                    raise
                # torch's vmap takes no empty batch: the rule may have nothing to stack.
    below = LaneCall(call, level, args)
    outs = level.below(carry_out, below, below_args)
    below.forget()
    return tuple(
        [
            _written_lanes(level, args[call.written[j]], out) if j in call.written else give(level, out, form)
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
                f"vmap: {cls.__name__}: it has both generate_vmap_rule=True and an overridden vmap staticmethod. "
                "Please set generate_vmap_rule=False or delete the overridden vmap staticmethod to avoid ambiguity"
            )
        )
    in_dims = tuple([0 if level.mapped(arg) else None for arg in args])
    given = args
    if call.given is not None:
        in_dims = call.given.filled(in_dims, blank=True)
        below_args, given = call.given.filled(below_args), call.given.filled(args)
    with own_draws(level, cls.__name__):
        result = level.below(lambda: cls.vmap(VmapInfo(level.size, level.randomness), in_dims, *below_args))
    outs, single = wrap_by_out_dims(level, cls.__name__, result)
    outs = tuple([_unaliased(level, given, below_args, out) for out in outs])
    ctx = Context()
    ctx.needs_input_grad = call.needs
    out = outs[0] if single else outs
    if is_new_style(cls):
        with record_as_outside(never=True), on_plane(level):
            cls.setup_context(ctx, given, out)
    return call.keep(ctx, args, out)


def _unaliased(level: BatchLevel, args: tuple, below_args: tuple, out: Any) -> Any:
    """The argument itself where the rule returned its value."""
    for arg, value in zip(args, below_args, strict=True):
        if level.owns(arg) and isinstance(out, BatchTensor) and out.value is value:
            return arg
    return out


def _of_constants(call: Call, level: LinearLevel, args: tuple) -> tuple:
    """What does not depend on the tangents is no part of the program that `linearize` writes down."""
    outs = level.below(carry_out, call, tuple([level.plain(arg) if isinstance(arg, Tensor) else arg for arg in args]))
    return tuple(
        [
            _written_constant(level, args[call.written[j]], out)
            if j in call.written
            else (level.adopt(out) if isinstance(out, Tensor) else out)
            for j, out in enumerate(outs)
        ]
    )


def _of_tangents(call: Call, level: LinearLevel, args: tuple) -> tuple:
    """Applied to a tangent, in a jvp or in the backward that a jvp is derived from: linear there, one step."""
    if not isinstance(call, UserCall):
        raise FunctionError(
            at_user_line(
                f"linearize: {call.cls.__name__} is applied to a tangent, in a jvp staticmethod or in a backward that "
                "is differentiated again, below a vmap",
                "push = lambda *tangents: jvp(f, primals, tangents)[1]  # in place of linearize(f, *primals)[1]",
            )
        )
    places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    rest = [None if isinstance(arg, Tensor) else arg for arg in args]

    def run(*tensors: Tensor) -> tuple:
        given = rest.copy()
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        own = tuple(given) if call.given is None else call.given.filled(tuple(given))
        out = apply(call.cls, *own, **call.kwargs)
        call.single = not isinstance(out, tuple)
        return (out,) if call.single else out

    outs = level.carry(run, tuple([args[i] for i in places]))
    call.slots, call.dirty, call.fixed, call.written = [], [], [], {}
    return outs


def _written_constant(level: LinearLevel, arg: Any, out: Tensor) -> Any:
    """The argument that forward wrote to, with its new value."""
    if level.owns(arg):
        if out is not arg.value:
            level.below(arg.value.copy_, out)
        torch.autograd.graph.increment_version(arg)
    return arg


def _with_tangents(call: Call, level: DualLevel, args: tuple) -> tuple:
    primals = tuple([level.primal(arg) if isinstance(arg, Tensor) else arg for arg in args])
    tangents = tuple([level.tangent(arg) for arg in args])
    if all(tangent is None for tangent in tangents):
        outs, pushed = level.below(carry_out, call, primals), ()
    elif call.cls.jvp is not Function.jvp:
        outs, pushed = level.below(_push, call, primals, tangents)
    elif is_of_dtensors(call.cls):
        outs, pushed = level.below(_push_alike, call, primals, tangents)
    else:
        if is_once_differentiable(call.cls) or not has_backward(call.cls):
            raise missing_jvp(call.cls)

        # Copies: forward may write to its operands, and the derived tangents are recorded in terms of what was there.
        def run(*aliases: Any) -> tuple:
            return carry_out(call, tuple([_copy(alias) for alias in aliases]))

        outs, pushed = level.below(
            double_reverse,
            run,
            args,
            {},
            level.primal,
            lambda x: _copy(level.tangent(x)),
            lambda: _say_per_number(call.cls),
        )
    pushed = tuple(pushed) if pushed else (None,) * len(outs)
    return tuple(
        [
            _written_dual(level, args[call.written[j]], out, tangent) if j in call.written else level.pair(out, tangent)
            for j, (out, tangent) in enumerate(zip(outs, pushed, strict=True))
        ]
    )


def _say_per_number(cls: Any) -> None:
    say_slow(
        "jvp",
        cls,
        f"the backward of {cls.__name__} does not tell autograd how it depends on the cotangent: it runs once for each "
        "number in the result. Define a jvp staticmethod",
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


def _push_alike(call: Call, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    """Outputs, and tangents that go the same way: the Function is linear. Called in the plane below."""
    again = call.again()
    outs = carry_out(call, primals)
    along = [placed_as(x, t) if isinstance(x, Tensor) else x for x, t in zip(primals, tangents, strict=True)]
    pushed = carry_out(again, tuple(along))
    again.forget()
    return outs, pushed


def _written_dual(level: DualLevel, arg: Any, out: Tensor, tangent: Tensor | None) -> Any:
    """The argument that forward wrote to, with its new value and tangent."""
    if level.owns(arg):
        if out is not arg.value:
            level.below(arg.value.copy_, _on_plane_of(arg.value, out))
        if tangent is not None and tangent is not arg.tangent:
            lift(arg)
            level.below(arg.tangent.copy_, tangent)
        torch.autograd.graph.increment_version(arg)
    return arg


def _on_plane_of(target: Tensor, out: Tensor) -> Tensor:
    """What `out` stands for on the plane of `target`, where it came of planes above that gave it nothing: its history
    is there."""
    while isinstance(out, Plane) and not (isinstance(target, Plane) and target.level.order >= out.level.order):
        sync(out)
        if out.level.lifted(out):
            break
        out = out.value
    return out


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
        if call.grad_dtypes is not None:
            ctx.set_output_grad_dtype(*call.grad_dtypes)
        kept = [slot.find(args, outs) for slot in call.slots]
        ctx.loose = [tensor if slot.kept else None for slot, tensor in zip(call.slots, kept, strict=True)]
        ctx.save_for_backward(*[None if slot.kept else tensor for slot, tensor in zip(call.slots, kept, strict=True)])
        ctx.pushes = kept if forward_level() >= 0 else None
        values = [out.value for out in outs if isinstance(out, BatchTensor)]
        ctx.below = next((node for value in values if (node := own_node(value)) is not None), None)
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
        for name in ("register_hook", "register_prehook"):
            setattr(node._backward_cls, name, _registering(node._backward_cls, name))
    return node


def _registering(kind: Any, name: str) -> Callable:
    """Hooks of a node (a module's backward hooks are that) go to the nodes of the planes below, too."""

    def register(node: Any, hook: Callable) -> Handles:
        handles = [getattr(super(kind, node), name)(hook)]
        call = getattr(node.below, "call", None)
        if isinstance(call, LaneCall):
            forms = [form for form in call.args if form], call.outs
            handles.append(getattr(node.below, name)(on_lanes_of_node(call.level, call.running, forms, hook)))
        return Handles(handles)

    return register


def records(args: tuple) -> bool:
    """Whether autograd records an application to these arguments on their plane."""
    return is_grad_enabled() and any(isinstance(arg, Tensor) and recorded(arg) for arg in args)


def has_backward(cls: Any) -> bool:
    """Whether the user wrote a backward (or vjp)."""
    return user_formula(cls) is not Function.backward


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


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _cut(value: Any) -> Any:
    """Without history on its own plane."""
    if not isinstance(value, Tensor) or not recorded(value):
        return value
    return detached(value)


def passed_by(cls: Any) -> None:
    """Refuse an application that goes past `apply`, where there is a plane to miss it."""
    if current_level() is not None:
        name = cls.__name__
        raise FunctionError(
            at_user_line(
                f"{name}: its apply was taken before lanewise was imported, and in this torch {torch.__version__} such "
                "an apply goes past every transform",
                f"import lanewise  # before {name}.apply is kept under another name\n"
                f"{name}.apply(x)  # or look it up where it is called",
            )
        )


lead_applications(apply, passed_by)
