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
from torch import Tensor
from torch.autograd.function import Function

from lanewise._control.compiling import definition
from lanewise._control.masks import FEW, Lasting, Masks, Numbers, is_recorded
from lanewise._control.predication import Predicated, predicated
from lanewise._control.source import Unsupported, compile_definition
from lanewise._core.formulas import pulled
from lanewise._core.hot import inert
from lanewise._core.level import standing
from lanewise._torch_compat import (
    apply_plainly,
    dispatch_mode_count,
    forward_level,
    function_mode_count,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    run_backward,
    saved_tensor_hooks,
)
from lanewise._transforms.parting import runner
from lanewise._transforms.reverse import Gradient, gradient_of
from lanewise._transforms.vmap import run_parted

STRICTEST = 2
# So many times may the gradient of a function need that its lanes part, before nothing else is tried.
_TRIES = 3
# A function with more branches than these runs a small part of what is in it for each of its lanes.
_BRANCHES = 12

_GIVEN: dict[str, Any] = {"abs": builtins.abs, "range": builtins.range, "torch": torch, "math": math}
_FREE = frozenset([int, float, types.FunctionType])
_NO_NAME = object()


class Form:
    """A function with masks in place of branches.

    Attributes:
        code: Its code, which takes a `Masks` first.
        count: How many arguments it takes.
        free: The names that it takes from around it.
        loops: Whether it goes round a loop, which ends for those lanes that are to come there.
        below: For how many lanes it is not worth it any more.
        defined: 1 where operations are to be spared operands for which they are not defined: for what is no number,
            some take ten times as long.
        strict: Up to which kind of operands its derivatives need that sides are cut off (`Masks.only`).
        missed: How many gradients were not finite even so.
    """

    __slots__ = ("code", "count", "free", "loops", "below", "defined", "strict", "missed")

    def __init__(self, code: types.CodeType, found: Predicated) -> None:
        self.code = code
        self.count = code.co_argcount - 1
        self.free = found.free
        self.below: float = math.inf if found.branches <= _BRANCHES else FEW
        self.loops = found.loops
        self.defined = self.strict = int(found.defined)
        self.missed = 0

    def function(self, func: types.FunctionType, dtype: torch.dtype) -> Callable | None:
        """The code as a function with the surroundings of `func`; None where they hold what it cannot take.

        They may hold tensors without dims, of the dtype of the arguments.
        """
        own = dict(zip(func.__code__.co_freevars, func.__closure__ or ()))
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
            elif type(value) not in _FREE and not _shared(value, dtype):
                return None
        cells = tuple([own[name] for name in self.code.co_freevars])
        return types.FunctionType(self.code, func.__globals__, func.__name__, None, cells)

    def run(self, func: Callable, args: tuple, size: int, recording: bool) -> Any:
        """The results, tensors `[size]` or `[size, S]`; None where masks do not give them."""
        wide = any(isinstance(arg, Tensor) and arg.dim() > 1 for arg in args)
        if wide:
            args = tuple([arg[:, None] if isinstance(arg, Tensor) and arg.dim() == 1 else arg for arg in args])
        like = next(arg for arg in args if isinstance(arg, Tensor) and arg.dim())
        masks = Masks(like, wide, recording, self.strict if recording else self.defined, self._called(like.dtype))
        try:
            out = func(masks, *args)
        except Lasting:
            self.below = min(self.below, size)
            return None
        except Exception:
            # Of what fails for a lane that does not come there, the lane is to know nothing.
            self.below = 0
            return None
        results = tuple([_result(each, size, wide) for each in (out if type(out) is tuple else (out,))])
        if not results or any(each is None for each in results):
            self.below = 0
            return None
        return results if type(out) is tuple else results[0]

    def _called(self, dtype: torch.dtype) -> Callable[[Any, int], Callable | None]:
        """What finds a function that this one calls. (A loop in it would go on for lanes that do not come there.)"""

        def found(func: Any, count: int) -> Callable | None:
            form = form_of(func)
            return None if form is None or form.loops or form.count != count else form.function(func, dtype)

        return found

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


def _result(value: Any, size: int, wide: bool) -> Tensor | None:
    if type(value) is Numbers:
        values = value.values
        value = values.to(torch.get_default_dtype()) if values.is_floating_point() else values
    if not isinstance(value, Tensor) or value.dim() != 1 + wide or value.shape[0] != size:
        return None
    return value.squeeze(1).contiguous() if wide and value.shape[1] == 1 else value


def run_masked(func: Any, args: tuple, in_dims: Sequence[int | None], size: int) -> Any:
    """The result of a `vmap` over `size` lanes, in dim 0 of arguments; None where its lanes have to part."""
    gradient = gradient_of(func)
    inner = func if gradient is None else gradient.func
    form = form_of(inner)
    if form is None or size >= form.below or len(args) != form.count or _watched():
        return None
    dtype = next((arg.dtype for arg, dim in zip(args, in_dims) if dim is not None and isinstance(arg, Tensor)), None)
    if dtype is None or not all(_plain(arg, dim, dtype) for arg, dim in zip(args, in_dims)) or not _alike(args):
        return None
    if (function := form.function(inner, dtype)) is None:
        return None
    if gradient is not None:
        return _gradient(form, function, gradient, args)
    wanted = [place for place, arg in enumerate(args) if is_recorded(arg)] if is_grad_enabled() else []
    if not wanted:
        out = form.run(function, args, size, False)
        return tuple([_apart(each, args) for each in out]) if type(out) is tuple else _apart(out, args)
    if not _records(form):
        return None
    strict = form.strict
    leaves, out = _recorded(form, function, args, wanted)
    if out is None:
        return None
    results = out if type(out) is tuple else (out,)
    recorded = tuple([each for each in results if each.requires_grad])
    shown: Any = iter(())
    if recorded:
        apart = functools.partial(run_parted, func, in_dims, size)
        shown = iter(apply_plainly(_Recorded, (form, strict, function, apart, wanted, leaves, results), *args))
    together = tuple([next(shown) if each.requires_grad else each for each in results])
    return together if type(out) is tuple else together[0]


def _watched() -> bool:
    """Whether anybody looks at operations of plain torch, or a transform is open."""
    return bool(
        standing.levels
        or dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or is_inference_mode_enabled()
        or forward_level() >= 0
    )


def _plain(arg: Any, dim: int | None, dtype: torch.dtype) -> bool:
    """Whether an argument is a number or a vector of each lane, or a number for all."""
    if dim is None:
        return type(arg) in (int, float) or _shared(arg, dtype)
    if type(arg) is not Tensor or arg.is_complex() or arg.is_neg() or arg.is_inference():
        return False
    return arg.dim() == 1 or (arg.dim() == 2 and arg.shape[1] > 1 and arg.is_contiguous())


def _shared(value: Any, dtype: torch.dtype) -> bool:
    """Whether a value is a number for all lanes that promotes theirs as one of each would."""
    return type(value) is Tensor and not value.dim() and value.dtype is dtype and inert(value)


def _alike(args: tuple) -> bool:
    """Whether numbers are promoted by vectors as they are in a lane: where there are any, all have one dtype."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    return all(arg.dim() < 2 for arg in tensors) or all(arg.dtype is tensors[0].dtype for arg in tensors)


def _apart(out: Any, args: tuple) -> Any:
    """A result that is no argument itself."""
    return out.view_as(out) if any(out is arg for arg in args) else out


def _records(form: Form) -> bool:
    return form.missed < _TRIES and saved_tensor_hooks() is None and not torch.is_anomaly_enabled()


def _recorded(form: Form, function: Callable, args: tuple, wanted: Sequence[int]) -> tuple[list[Tensor], Any]:
    """What torch records from, in the places `wanted` of the operands, and the results."""
    operands = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    leaves = [operands[place].requires_grad_() for place in wanted]
    with torch.enable_grad():
        return leaves, form.run(function, tuple(operands), len(leaves[0]), True)


def _pulled(results: tuple, cotangents: tuple, leaves: list[Tensor]) -> list[Tensor] | None:
    """The leaves' cotangents, None where they are not finite."""
    roots: tuple = ()
    seeds: tuple = ()
    for out, cotangent in zip(results, cotangents):
        if cotangent is not None and out.requires_grad:
            roots += (out,)
            seeds += (cotangent,)
    if not roots:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = run_backward(roots, seeds, True, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False)
    found = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves)]
    # A sum is finite only if all that it adds up is.
    return found if all(math.isfinite(float(grad.sum())) for grad in found) else None


def _gradient(form: Form, function: Callable, gradient: Gradient, args: tuple) -> Any:
    """The gradient of each lane, as the transform gives it."""
    place = gradient.argnums
    if type(place) is not int or not 0 <= place < len(args) or gradient.has_aux or any(map(is_recorded, args)):
        return None
    if not isinstance(args[place], Tensor) or not args[place].is_floating_point():
        return None
    while _records(form):
        strict = form.strict
        leaves, value = _recorded(form, function, args, (place,))
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 1:
            return None
        found = _pulled((value,), (torch.ones_like(value),), leaves)
        if found is not None:
            return gradient.result(found[0], value.detach())
        if not form.retry(strict):
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
        form, strict, function, apart, wanted, leaves, results = ctx.parts
        given = iter(cotangents)
        cotangents = tuple([next(given) if out.requires_grad else None for out in results])
        grads = None
        if not is_grad_enabled() and all(each is None or inert(each) for each in cotangents):
            grads = _pulled(results, cotangents, leaves)
            while grads is None and form.retry(strict):
                strict = form.strict
                leaves, out = _recorded(form, function, _with(ctx.others, ctx.saved_tensors), wanted)
                if out is not None:
                    grads = _pulled(out if type(out) is tuple else (out,), cotangents, leaves)
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


runner.masked = run_masked
