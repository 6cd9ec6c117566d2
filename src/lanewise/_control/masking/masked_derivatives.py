"""Derivatives of functions with masks: where autograd records outside, and of the transforms inside a `vmap`.


Derivatives are torch's of the function with masks. A lane gets zero from a side that it does not take, which is not the
same as nothing: times an infinite derivative it is no number. A gradient that is finite everywhere shows that this did
not happen. Otherwise the sides are cut off from the lanes that do not take them (`strict`), at first the operands of
operations that are not defined for all numbers. Where that does not help, the lanes part.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from lanewise._control.masking.masked_calls import Form, Run
from lanewise._control.masking.masks import is_recorded
from lanewise._control.masking.vectors import Declined
from lanewise._core.functions.formulas import pulled
from lanewise._core.level import standing
from lanewise._core.recording.passes import run_backward
from lanewise._core.short.hot import inert
from lanewise._core.trees import flatten, unflatten
from lanewise._torch_compat import (
    BATCHED_KEY,
    apply_plainly,
    dispatch_keys_of,
    is_grad_enabled,
    saved_tensor_hooks,
)
from lanewise._transforms.forward import jvp
from lanewise._transforms.jacobian import Jacobian, jacobian_of
from lanewise._transforms.orders import back_to_orders, one_order_more
from lanewise._transforms.reverse import Gradient, gradient_of
from lanewise._transforms.vmap import run_parted

# So many times may the gradient of a function need that its lanes part, before nothing else is tried.
_TRIES = 3
# So many numbers may a function have that is differentiated one by one.
_MOST_ROWS = 64

Derivative = Gradient | Jacobian


def derivatives_of(func: Any) -> tuple[list[Derivative], Any]:
    """The transforms that a function is made of, outermost first, and the function in them."""
    found: list[Derivative] = []
    while (made := gradient_of(func) or jacobian_of(func)) is not None:
        found.append(made)
        func = made.func
    return found, func


def differentiated(run: Run, transforms: list[Derivative], args: tuple, positional: int) -> Any:
    """The result of the transforms for each lane, None where masks do not give it. `positional`: so many arguments."""
    forward = [type(each) is Jacobian and each.forward for each in transforms]
    if any(map(is_recorded, args)) or any(forward) is not all(forward):
        return None
    everything = tuple(range(positional))
    places = [_places(everything if each.argnums is None else each.argnums) for each in transforms]
    chosen = {place for each in places for place in each}
    if not chosen <= {*everything} or not all(is_float(args[place]) for place in chosen):
        return None
    for place in chosen:
        if not run.own[place]:
            arg = args[place]
            if arg.dim() > 1:
                return None
            args = (*args[:place], arg.expand(run.size, *arg.shape).contiguous(), *args[place + 1 :])
            run.own[place] = True
    while records(run.form):
        strict = run.form.strict
        chain = _Chain(run, transforms, places)
        try:
            with torch.enable_grad():
                out = chain.apply(0, args)
        except (Declined, RuntimeError):
            return None
        # A sum is finite only if all that it adds up is.
        if run.straight or all(math.isfinite(float(grad.sum())) for grad in chain.found):
            leaves, spec = flatten(out)
            return unflatten([leaf.detach() for leaf in leaves], spec)
        if not run.form.retry(strict):
            break
    return None


def is_float(value: Any) -> bool:
    """Whether it is a tensor that has derivatives."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _places(argnums: Any) -> tuple:
    return (argnums,) if type(argnums) is int else argnums


class _Chain:
    """Transforms of a function with masks, of all lanes at once: what one gives, the next one differentiates.

    Attributes:
        places: For each, where the arguments are that it differentiates in.
        found: Derivatives. If they are finite, they have nothing of sides that lanes do not take.
    """

    def __init__(self, run: Run, transforms: list[Derivative], places: list[tuple]) -> None:
        self.run = run
        self.transforms = transforms
        self.places = places
        self.found: list[Tensor] = []

    def apply(self, number: int, args: tuple) -> Any:
        """What the transforms from a number on give, lanes in front."""
        if number == len(self.transforms):
            last = self.transforms[-1]
            given = self.run.results(args, True, number > 1 or (type(last) is Jacobian and last.forward))
            if given is None:
                raise Declined
            out, one = given
            return out[0] if one else out
        transform, places = self.transforms[number], self.places[number]
        if type(transform) is Jacobian and transform.forward:
            grads, value, aux = self._columns(number, args)
        else:
            # What is recorded for a transform around this one is differentiated for both.
            inputs = [args[place] if is_recorded(args[place]) else args[place].detach() for place in places]
            by_place = dict(zip(places, [each.requires_grad_() for each in inputs]))
            args = tuple([by_place.get(place, arg) for place, arg in enumerate(args)])
            orders = standing.orders
            try:
                one_order_more()
                value, aux = self._value(number, self.apply(number + 1, args))
                grads = self._rows(value, inputs, number > 0)
            finally:
                back_to_orders(orders)
        found = grads[0] if type(transform.argnums) is int else tuple(grads)
        if isinstance(transform, Jacobian):
            return (found, aux) if transform.has_aux else found
        if value.dim() > 1:
            raise Declined
        return transform.result(found, (value, aux) if transform.has_aux else value)

    def _value(self, number: int, out: Any) -> tuple[Tensor, Any]:
        """What a transform differentiates, and what comes with it."""
        value, aux = out, None
        if self.transforms[number].has_aux:
            if type(out) is not tuple or len(out) != 2:
                raise Declined
            value, aux = out
        if not is_float(value):
            raise Declined
        return value, aux

    def _rows(self, value: Tensor, inputs: list[Tensor], further: bool) -> list[Tensor]:
        """The derivatives of a value `[n, *S]` in each input; `further`: they are differentiated, too."""
        if value.dim() == 1:
            return self._pulled(value, torch.ones_like(value), inputs, further)
        shape, count = value.shape, value[0].numel()
        if count > _MOST_ROWS:
            raise Declined
        rows = []
        for place in range(count):
            seed = torch.zeros_like(value)
            seed.view(shape[0], count)[:, place] = 1
            rows.append(self._pulled(value, seed, inputs, further))
        return [torch.stack(each, 1).unflatten(1, shape[1:]) for each in zip(*rows)]

    def _pulled(self, value: Tensor, seed: Tensor, inputs: list[Tensor], further: bool) -> list[Tensor]:
        if not value.requires_grad:
            return [torch.zeros_like(each) for each in inputs]
        given = run_backward(
            (value,), (seed,), True, further, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
        grads = [torch.zeros_like(each) if grad is None else grad for grad, each in zip(given, inputs)]
        self.found.extend([grad.detach() for grad in grads])
        return grads

    def _columns(self, number: int, args: tuple) -> tuple[list[Tensor], Any, Any]:
        """The derivatives of a value in each input, by forward mode."""
        found: list[Tensor] = []
        value = aux = None
        for place in self.places[number]:
            x = args[place]
            if x.numel() // len(x) > _MOST_ROWS:
                raise Declined

            def of_one(x: Tensor, place: int = place) -> Any:
                given = (*args[:place], x, *args[place + 1 :])
                return self._value(number, self.apply(number + 1, given))

            columns = []
            for column in range(1 if x.dim() == 1 else x.shape[1]):
                direction = torch.zeros_like(x)
                direction.select(-1, column).fill_(1) if x.dim() > 1 else direction.fill_(1)
                value, tangent, aux = jvp(of_one, (x,), (direction,), has_aux=True)
                columns.append(tangent)
                if number == 0:  # others have tangents themselves
                    self.found.append(tangent)
            found.append(columns[0] if x.dim() == 1 else torch.stack(columns, -1))
        return found, value, aux


def recorded_call(run: Run, func: Callable, args: tuple, in_dims: Sequence[int | None], wanted: list[int]) -> Any:
    """The result where torch records the arguments in the places `wanted`, None where masks do not give it."""
    if not records(run.form):
        return None
    strict = run.form.strict
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


def records(form: Form) -> bool:
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
