"""Functions of cheap elementwise operations, run for all lanes at once with masks in place of branches.

To part lanes, to gather their values and to put them together costs more than such a function does. predication.py says
which functions these are. A call is served where all its operands are plain tensors `[B]` or `[B, S]`, a number or a
vector of each lane, and nothing else looks on; for any other the lanes part.

Derivatives are torch's of the function with masks. A lane gets zero from a side that it does not take, which is not the
same as nothing: times an infinite derivative it is no number. A gradient that is finite everywhere shows that this did
not happen. Otherwise the sides are cut off from the lanes that do not take them (`strict`), at first the operands of
operations that are not defined for all numbers. Where that does not help, the lanes part.
"""

import builtins
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from lanewise._control.compiling import definition
from lanewise._control.masks import FEW, Failing, Lasting, Masks, Numbers, is_recorded
from lanewise._control.predication import Predicated, predicated
from lanewise._control.source import Unsupported, compile_definition
from lanewise._core.formulas import pulled
from lanewise._core.hot import inert
from lanewise._core.level import standing
from lanewise._torch_compat import (
    BATCHED_KEY,
    apply_plainly,
    dispatch_keys_of,
    dispatch_mode_count,
    forward_level,
    function_mode_count,
    has_module_hooks,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    run_backward,
    saved_tensor_hooks,
)
from lanewise._transforms.reverse import Gradient, gradient_of
from lanewise._transforms.vmap import run_parted

STRICTEST = 2
# So many times may the gradient of a function need that its lanes part, before nothing else is tried.
_TRIES = 3
# A function with more branches than these runs a small part of what is in it for each of its lanes.
_BRANCHES = 12

_GIVEN: dict[str, Any] = {name: getattr(builtins, name) for name in ("abs", "enumerate", "len", "range")}
_GIVEN |= {"torch": torch, "math": math}
_NUMBERS = frozenset([bool, int, float])
_FREE = _NUMBERS | {types.FunctionType}
_NO_NAME = object()


class Form:
    """A function with masks in place of branches.

    Attributes:
        code: Its code, which takes a `Masks` first.
        count: How many arguments it takes.
        free: The names that it takes from around it.
        attributes: Those of its first argument that it reads: it is a method, then.
        truths: Whether it may compute with truths.
        below: For how many lanes it is not worth it any more.
        defined: 1 where operations are to be spared operands for which they are not defined: for what is no number,
            some take ten times as long.
        strict: Up to which kind of operands its derivatives need that sides are cut off (`Masks.only`).
        missed: How many gradients were not finite even so.
    """

    __slots__ = ("code", "count", "free", "attributes", "truths", "below", "defined", "strict", "missed")

    def __init__(self, code: types.CodeType, found: Predicated) -> None:
        self.code = code
        self.count = code.co_argcount - 1
        self.free = found.free
        self.attributes = found.attributes
        self.below: float = math.inf if found.branches <= _BRANCHES else FEW
        self.truths = found.truths
        self.defined = self.strict = int(found.defined)
        self.missed = 0

    def function(self, func: types.FunctionType, dtype: torch.dtype, size: int, wide: bool) -> Callable | None:
        """The code as a function with the surroundings of `func`; None where they hold what it cannot take.

        They may hold tensors of the dtype of the arguments without dims, and the scopes around it vectors.
        """
        if wide and self.truths and dtype not in (torch.get_default_dtype(), torch.int64):
            return None  # a truth times 1.0 is of the default dtype: a vector and a number may differ, then
        own = dict(zip(func.__code__.co_freevars, func.__closure__ or ()))
        around = func.__globals__
        for name in self.free:
            if name in own:
                try:
                    value = own[name].cell_contents
                except ValueError:
                    return None
            else:
                value = func.__globals__.get(name, getattr(builtins, name, _NO_NAME))
            if name in _GIVEN:
                if _GIVEN[name] is not value:
                    return None
            elif type(value) not in _FREE:
                if not isinstance(value, Tensor) or not _plain(value, False, dtype) or not inert(value):
                    return None
                if value.dim() and (not wide or name not in own):
                    return None
                given = _with_rows(value, False, size, wide)
                if name in own:
                    own[name] = types.CellType(given)
                else:
                    around = {**around, name: given}
        cells = tuple([own[name] for name in self.code.co_freevars])
        return types.FunctionType(self.code, around, func.__name__, None, cells)

    def bound(
        self, func: types.FunctionType, args: tuple, dims: Sequence[int | None], names: tuple[str, ...], method: bool
    ) -> tuple[tuple, Sequence[int | None]] | None:
        """An argument for each parameter but that of a method's instance, and their dims; None where one is missing.

        `names`: of the last arguments.
        """
        code = func.__code__
        parameters = code.co_varnames[method : code.co_argcount]
        if not names and len(args) == len(parameters):
            return args, dims
        count = len(args) - len(names)
        named = dict(zip(names, zip(args[count:], dims[count:])))
        defaults = func.__defaults__ or ()
        pairs = [*zip(args[:count], dims)]
        for place, name in enumerate(parameters[count:], count):
            back = place - len(parameters)
            if name in named and place + method >= code.co_posonlyargcount:
                pairs.append(named.pop(name))
            elif -back <= len(defaults):
                pairs.append((defaults[back], None))
            else:
                return None
        if named or count > len(parameters):
            return None
        return tuple([arg for arg, _ in pairs]), [dim for _, dim in pairs]

    def retry(self, strict: int) -> bool:
        """A gradient was not finite: whether it may be where more sides are cut off than with `strict`."""
        self.missed += strict == STRICTEST
        self.strict = min(strict + 1, STRICTEST)
        return strict < STRICTEST


# By code object: its form, None where there is none.
_forms: dict[types.CodeType, Form | None] = {}


def form_of(func: Any) -> Form | None:
    """The form of a function with masks, None where there is none."""
    if type(func) is not types.FunctionType:
        return None
    code = func.__code__
    if code not in _forms:
        try:
            found = predicated(definition(func))
            _forms[code] = Form(compile_definition(found.node, code), found)
        except Unsupported:
            _forms[code] = None
    return _forms[code]


class _Run:
    """How a function runs with masks in one call.

    Attributes:
        form, function: What runs.
        own: Which of its arguments are different in each lane.
        size, dtype, device: The number of lanes, and of what kind these arguments are.
        wide: Whether there are vectors among the arguments.
        others: The functions that it calls.
    """

    __slots__ = ("form", "function", "own", "size", "dtype", "device", "wide", "others")

    def __init__(self, form: Form, own: list[bool], args: tuple) -> None:
        first = args[own.index(True)]
        self.form = form
        self.function: Callable | None = None
        self.own = own
        self.others: dict[types.FunctionType, Callable | None] = {}
        self.size, self.dtype, self.device = first.shape[0], first.dtype, first.device
        self.wide = any(isinstance(arg, Tensor) and arg.dim() > each for arg, each in zip(args, own))

    def takes(self, args: tuple, func: types.FunctionType, owner: Any) -> bool:
        """Whether it can be told that masks give what lanes would that part. `owner`: whose method it is, or None."""
        if not all(_has_number(owner, name) for name in self.form.attributes):
            return False
        if not all(_plain(arg, own, self.dtype) for arg, own in zip(args, self.own)):
            return False
        if self.wide:
            # A vector would not be promoted by a number, such as the sum of one of int32, which is int64.
            if any(isinstance(arg, Tensor) and arg.dtype is not self.dtype for arg in args):
                return False
            if not self.dtype.is_floating_point and self.dtype is not torch.int64:
                return False
        function = self.form.function(func, self.dtype, self.size, self.wide)
        if function is not None and owner is not None:
            self.function = lambda masks, *args: function(masks, owner, *args)
        else:
            self.function = function
        return function is not None

    def results(self, args: tuple, recording: bool) -> tuple[tuple, bool] | None:
        """The results `[size]` or `[size, S]`, and whether they are one; None where masks do not give them."""
        form = self.form
        if self.wide or not all(self.own):
            args = tuple([_with_rows(arg, own, self.size, self.wide) for arg, own in zip(args, self.own)])
        masks = Masks(
            self.size, self.device, self.wide, recording, form.strict if recording else form.defined, self.called
        )
        try:
            out = self.function(masks, *args)  # type: ignore[misc]
        except Lasting:
            form.below = min(form.below, self.size)
            return None
        except Failing:
            return None
        except Exception:
            # Of what fails for a lane that does not come there, the lane is to know nothing.
            form.below = 0
            return None
        given = out if type(out) is tuple else (out,)
        if any(type(each) in (int, float) for each in given):
            return None  # all lanes have returned this number
        found = tuple([self._result(each) for each in given])
        if not found or any(each is None for each in found):
            form.below = 0
            return None
        return found, type(out) is not tuple

    def _result(self, value: Any) -> Tensor | None:
        if type(value) is Numbers:
            values = value.values
            value = values.to(torch.get_default_dtype()) if values.is_floating_point() else values
        if not isinstance(value, Tensor) or value.dim() != 1 + self.wide or value.shape[0] != self.size:
            return None
        return value.squeeze(1).contiguous() if self.wide and value.shape[1] == 1 else value

    def called(self, func: Any, args: tuple, names: tuple[str, ...]) -> tuple[Callable, tuple] | None:
        """A function that this one calls, and an argument for each of its parameters. `names`: of the last."""
        form = form_of(func)
        if form is None or form.attributes:
            return None
        bound = form.bound(func, args, (0,) * len(args), names, False)
        if bound is None or any(dim is None and type(default) not in _NUMBERS for default, dim in zip(*bound)):
            return None
        if func not in self.others:
            self.others[func] = form.function(func, self.dtype, self.size, self.wide)
        function = self.others[func]
        return None if function is None else (function, bound[0])

    def recorded(self, args: tuple, wanted: Sequence[int]) -> tuple[list[Tensor], tuple[tuple, bool] | None]:
        """What torch records from, in the places `wanted` of the operands, and what `results` gives."""
        operands = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        leaves = [operands[place].requires_grad_() for place in wanted]
        with torch.enable_grad():
            return leaves, self.results(tuple(operands), True)


def _with_owner(func: Any) -> tuple[Any, Any]:
    """The function of a method, or that a module runs, and whose it is; None for another function."""
    if isinstance(func, nn.Module) and type(func).__call__ is nn.Module.__call__ and not has_module_hooks(func):
        func = func.forward
    return (func.__func__, func.__self__) if type(func) is types.MethodType else (func, None)


def _has_number(owner: Any, name: str) -> bool:
    """Whether an attribute of an object is a number that is kept in it."""
    kept = getattr(owner, "__dict__", {})
    plain = type(owner).__getattribute__ is object.__getattribute__ and not hasattr(type(owner), name)
    return plain and type(kept.get(name)) in (int, float)


def _with_rows(arg: Any, own: bool, size: int, wide: bool) -> Any:
    """An argument as lanes have it: numbers `[B]`; where there are vectors, `[B, 1]`, and vectors `[B, S]` or `[1, S]`.

    One of all lanes has dims, too: without them, it would not promote others.
    """
    if not isinstance(arg, Tensor):
        return arg
    if not arg.dim():
        return arg.expand(size, 1) if wide else arg.expand(size)
    if not wide or arg.dim() == 2:
        return arg
    return arg[:, None] if own else arg[None]


def run_masked(func: Any, args: tuple, in_dims: Sequence[int | None], names: tuple[str, ...] = ()) -> Any:
    """The result of a `vmap` over dim 0 of arguments, None where its lanes have to part.

    `names`: of the last arguments, which are given by name.
    """
    if watched():
        return None
    gradient = gradient_of(func)
    inner, owner = _with_owner(func if gradient is None else gradient.func)
    form = form_of(inner)
    if form is None:
        return None
    count = len(args) - len(names)
    bound = form.bound(inner, args, in_dims, names, owner is not None)
    if bound is None:
        return None
    args, in_dims = bound
    if not any(dim is not None for dim in in_dims):
        return None
    run = _Run(form, [dim is not None for dim in in_dims], args)
    if run.size >= form.below or not run.takes(args, inner, owner):
        return None
    if gradient is not None:
        return _gradient(run, gradient, args, count)
    wanted = [place for place, arg in enumerate(args) if is_recorded(arg)] if is_grad_enabled() else []
    if not wanted:
        given = run.results(args, False)
        if given is None:
            return None
        out, one = given
        out = tuple([_apart(each, args) for each in out])
        return out[0] if one else out
    if not _records(form):
        return None
    strict = form.strict
    leaves, given = run.recorded(args, wanted)
    if given is None:
        return None
    results, one = given
    shown: Any = iter(())
    if any(each.requires_grad for each in results):
        apart = functools.partial(run_parted, func, in_dims, run.size)
        shown = iter(apply_plainly(_Recorded, (run, strict, apart, wanted, leaves, results), *args))
    out = tuple([next(shown) if each.requires_grad else each for each in results])
    return out[0] if one else out


def watched() -> bool:
    """Whether anybody looks at operations of plain torch, or a transform is open."""
    return bool(
        standing.levels
        or dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or is_inference_mode_enabled()
        or forward_level() >= 0
    )


def _plain(arg: Any, own: bool, dtype: torch.dtype) -> bool:
    """Whether an argument is a number or a vector, of each lane or for all: that one promotes as one of each would."""
    if type(arg) is not Tensor or (not own and arg.dtype is not dtype):
        return not own and type(arg) in _NUMBERS
    if arg.is_complex() or arg.is_neg() or arg.is_inference():
        return False
    return arg.dim() == own or (arg.dim() == own + 1 and arg.shape[-1] > 1 and arg.is_contiguous())


def _apart(out: Any, args: tuple) -> Any:
    """A result that is no argument itself."""
    return out.view_as(out) if any(out is arg for arg in args) else out


def _records(form: Form) -> bool:
    return form.missed < _TRIES and saved_tensor_hooks() is None and not torch.is_anomaly_enabled()


def _pulled(results: tuple, cotangents: tuple, leaves: list[Tensor]) -> list[Tensor] | None:
    """The leaves' cotangents, None where they are not finite, or a side has none, such as `x // 2`."""
    roots: tuple = ()
    seeds: tuple = ()
    for out, cotangent in zip(results, cotangents):
        if cotangent is not None and out.requires_grad:
            roots += (out,)
            seeds += (cotangent,)
    if not roots:
        return [torch.zeros_like(leaf) for leaf in leaves]
    try:
        grads = run_backward(roots, seeds, True, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False)
    except RuntimeError:
        return None
    found = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves)]
    if any(dispatch_keys_of(seed).has(BATCHED_KEY) for seed in seeds):
        # Those of `is_grads_batched` cannot be asked for numbers: derivatives are finite where those of ones are.
        ones = tuple([torch.ones_like(out) for out in results])
        return None if _pulled(results, ones, leaves) is None else found
    # A sum is finite only if all that it adds up is.
    return found if all(math.isfinite(float(grad.sum())) for grad in found) else None


def _gradient(run: _Run, gradient: Gradient, args: tuple, positional: int) -> Any:
    """The gradient of each lane, as the transform gives it."""
    place = gradient.argnums
    if type(place) is not int or not 0 <= place < positional or gradient.has_aux or any(map(is_recorded, args)):
        return None
    arg = args[place]
    if not isinstance(arg, Tensor) or not arg.is_floating_point():
        return None
    if not run.own[place]:
        args = (*args[:place], arg.expand(run.size, *arg.shape).contiguous(), *args[place + 1 :])
        run.own[place] = True
    while _records(run.form):
        strict = run.form.strict
        leaves, given = run.recorded(args, (place,))
        if given is None:
            return None
        (value, *others), one = given
        if others or not one or not value.is_floating_point() or value.dim() > 1:
            return None
        found = _pulled((value,), (torch.ones_like(value),), leaves)
        if found is not None:
            return gradient.result(found[0], value.detach())
        if not run.form.retry(strict):
            break
    return None


class _Recorded(Function):
    """A function with masks as one operation of plain torch, which has recorded its parts."""

    @staticmethod
    def forward(ctx: Any, parts: tuple, *args: Any) -> tuple:  # type: ignore[override]
        # In a tuple, where autograd does not see what was recorded.
        ctx.parts = parts
        ctx.set_materialize_grads(False)  # what nobody has used
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*[arg for arg in args if isinstance(arg, Tensor)])
        return tuple([out.detach() for out in parts[-1] if out.requires_grad])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:  # type: ignore[override]
        run, strict, apart, wanted, leaves, results = ctx.parts
        found = iter(cotangents)
        cotangents = tuple([next(found) if out.requires_grad else None for out in results])
        grads = None
        if not is_grad_enabled() and all(each is None or inert(each) for each in cotangents):
            grads = _pulled(results, cotangents, leaves)
            while grads is None and run.form.retry(strict):
                strict = run.form.strict
                leaves, given = run.recorded(_with(ctx.others, ctx.saved_tensors), wanted)
                if given is not None:
                    grads = _pulled(given[0], cotangents, leaves)
        if grads is None:

            def parting(*tensors: Tensor) -> tuple:
                out = apart(_with(ctx.others, tensors))
                return out if type(out) is tuple else (out,)

            found = iter(pulled(parting, ctx.saved_tensors, cotangents))
            return None, *[next(found) if other is None else None for other in ctx.others]
        by_place = dict(zip(wanted, grads))
        return None, *[by_place.get(place) for place in range(len(ctx.others))]


def _with(others: list[Any], tensors: Sequence[Tensor]) -> tuple:
    """Arguments from tensors and what stands between them."""
    given = iter(tensors)
    return tuple([next(given) if other is None else other for other in others])
