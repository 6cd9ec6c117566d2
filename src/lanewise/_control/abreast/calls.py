"""Calls of `vmap` whose lanes stay abreast: on plain tensors `[B, *S]`, and on no plane."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._control.abreast import networks  # noqa: F401
from lanewise._control.abreast.running import call
from lanewise._control.abreast.values import Declined, Lanes, Spread, has_lanes, state, value_of
from lanewise._control.masking.masked_derivatives import derivatives_of
from lanewise._control.masking.masked_lanes import run_mapping, watched
from lanewise._core.recording.passes import run_backward
from lanewise._core.short.hot import PLAIN
from lanewise._core.trees import flatten, unflatten
from lanewise._torch_compat import is_grad_enabled, saved_tensor_hooks
from lanewise._transforms.jacobian import Jacobian
from lanewise._transforms.reverse import Gradient
from lanewise._transforms.vmap import mapping_of


def run_abreast(func: Any, args: tuple, in_dims: Sequence[int | None], names: tuple[str, ...] = ()) -> Any:
    """The result of a `vmap` over dim 0 of arguments; None where the function does not run like that.

    NotImplemented where it may at another call. `names`: of arguments that are given by name, which it does not take.
    """
    if names:
        return None
    if watched() or saved_tensor_hooks() or torch.are_deterministic_algorithms_enabled() or sys.gettrace():
        return NotImplemented
    if mapping_of(func) is not None:
        # (What is computed of repeated lanes would be computed again and again.)
        return run_mapping(run_abreast, func, args, in_dims, False)
    for arg, dim in zip(args, in_dims):
        if isinstance(arg, Tensor):
            if type(arg) not in PLAIN or arg.is_inference() or arg.is_neg() or arg.is_conj():
                return NotImplemented
        elif dim is not None:
            return NotImplemented
    transforms, inner = derivatives_of(func)
    outer = transforms[0] if transforms else None
    if len(transforms) > 1 or isinstance(outer, Jacobian):
        return None  # torch's formulas of second derivatives are wrong in places
    before = state.careful
    try:
        if outer is not None:
            return _gradient(inner, outer, args, in_dims)
        return _plain(inner, args, in_dims)
    except Declined:
        return None
    except Exception:
        return NotImplemented  # what fails may do so for some lanes only, and is to be told of as on a plane
    finally:
        state.careful = before


def _results(func: Any, args: tuple, in_dims: Sequence[int | None]) -> Any:
    """What a function gives for lanes."""
    given = [Lanes(arg) if dim is not None else arg for arg, dim in zip(args, in_dims)]
    has_lanes(given)
    return call(func, *given)


def _plain(func: Any, args: tuple, in_dims: Sequence[int | None]) -> Any:
    out = _results(func, args, in_dims)
    values = [value_of(each) for each in (out if type(out) is tuple else (out,))]
    # An argument is no result itself.
    values = [value.view_as(value) if any(value is arg for arg in args) else value for value in values]
    return tuple(values) if type(out) is tuple else values[0]


def _gradient(func: Any, transform: Gradient, args: tuple, in_dims: Sequence[int | None]) -> Any:
    """The gradients of a function for each lane, and what comes with them, as `transform` gives them."""
    size = next(len(arg) for arg, dim in zip(args, in_dims) if dim is not None)
    argnums = transform.argnums
    places = (argnums,) if type(argnums) is int else tuple(range(len(args))) if argnums is None else argnums
    inputs: list[Tensor] = []
    given, specs = list(args), []
    for place in places:
        if not -len(args) <= place < len(args) or given[place] is not args[place]:
            raise Declined
        leaves, spec = flatten(args[place])
        inner = []
        for leaf in leaves:
            if type(leaf) not in PLAIN or not leaf.is_floating_point() or leaf.requires_grad:
                raise Declined
            own = in_dims[place] is not None
            leaf = leaf.detach() if own else leaf.detach().expand(size, *leaf.shape)
            inputs.append(leaf.requires_grad_())
            inner.append(Lanes(leaf) if own or leaf.dim() < 3 else Spread(leaf))
        given[place] = unflatten(inner, spec)
        specs.append(spec)
    for place, dim in enumerate(in_dims):
        if dim is not None and given[place] is args[place]:
            if args[place].requires_grad:
                raise Declined
            given[place] = Lanes(args[place])
    state.careful = is_grad_enabled()
    with torch.enable_grad():
        has_lanes(given)
        out = call(func, *given)
    aux = None
    if transform.has_aux:
        if type(out) is not tuple or len(out) != 2:
            raise Declined
        out, aux = out
        aux = value_of(aux).detach()
    value = value_of(out)
    if value.dim() > 1 or not value.is_floating_point():
        raise Declined
    found = iter(_pulled(value, inputs))
    grads = [unflatten([next(found) for _ in range(spec.count)], spec) for spec in specs]
    result = grads[0] if type(argnums) is int else tuple(grads)
    return transform.result(result, (value.detach(), aux) if transform.has_aux else value.detach())


def _pulled(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The gradient of each number [B] in the inputs of its lane."""
    if not value.requires_grad:
        return [torch.zeros_like(each) for each in inputs]
    seeds = (torch.ones_like(value),)
    grads = run_backward((value,), seeds, False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False)
    return [torch.zeros_like(each) if grad is None else grad for grad, each in zip(grads, inputs)]
