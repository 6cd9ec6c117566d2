"""`grad`, `vjp` and their kin: torch.autograd, run on the plane that the transform finds itself on."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.level import current_level
from lanewise._core.plane import recorded, without_history
from lanewise._core.recording.graphs import needs_graph
from lanewise._core.trees import LEAF, flatten, unflatten
from lanewise._transforms.arguments import (
    check_argnums,
    check_output_dtypes,
    check_outputs,
    check_scalar,
    closure_of,
    code_made_by,
    cotangent_mismatch,
    cotangents_mismatch,
    not_callable,
    replace,
    select,
    several_cotangents,
    split_aux,
)
from lanewise._transforms.below import differentiate_below, note_made, note_use
from lanewise._transforms.compiling import is_compiling, traced
from lanewise._transforms.recording import Recording, free_below, one, pull_back, track, untrack
from lanewise.errors import hide_own_frames


def grad(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """The gradient of a scalar function.

    Args:
        func: A function with a real 0-dim tensor as its result, or `(result, aux)` if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to, an int or a tuple of ints. Each may be any
            structure of floating-point or complex tensors.
        has_aux: Whether `func` also returns something to hand through.

    Returns:
        A function of the same arguments that returns the gradient, in the structure of the argument (a tuple of them if
        `argnums` is one), or `(gradient, aux)`. An input that was not used has a gradient of zeros.

    Raises:
        RuntimeError: The result is not a real scalar, or `argnums` does not fit.
        ValueError: An argument to differentiate with respect to is no tensor.

    Example:
        >>> import torch
        >>> from lanewise import grad
        >>> grad(lambda x: (x**2).sum())(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    if not callable(func):
        raise not_callable("grad", func)

    @functools.wraps(func)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return traced("grad", func, argnums, has_aux)(*args, **kwargs)
        try:
            return differentiate("grad", func, argnums, has_aux, args, kwargs, want_value=False)
        except Exception as error:
            hide_own_frames(error)
            raise

    return gradient


def grad_and_value(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """The gradient of a scalar function and its value, gradient first.

    Args:
        func: A function with a real 0-dim tensor as its result, or `(result, aux)` if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to, an int or a tuple of ints. Each may be any
            structure of floating-point or complex tensors.
        has_aux: Whether `func` also returns something to hand through.

    Returns:
        A function that returns `(gradient, value)`, or `(gradient, (value, aux))`.

    Raises:
        RuntimeError: The result is not a real scalar, or `argnums` does not fit.
        ValueError: An argument to differentiate with respect to is no tensor.

    Example:
        >>> import torch
        >>> from lanewise import grad_and_value
        >>> grad_and_value(lambda x: (x**2).sum())(torch.tensor([1.0, 2.0]))
        (tensor([2., 4.]), tensor(5.))
    """
    if not callable(func):
        raise not_callable("grad_and_value", func)

    @functools.wraps(func)
    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return traced("grad_and_value", func, argnums, has_aux)(*args, **kwargs)
        try:
            return differentiate("grad_and_value", func, argnums, has_aux, args, kwargs, want_value=True)
        except Exception as error:
            hide_own_frames(error)
            raise

    return gradient_and_value


def value_and_grad(func: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable:
    """The value of a scalar function and its gradient, value first.

    Args:
        func: A function with a real 0-dim tensor as its result, or `(result, aux)` if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to, an int or a tuple of ints. Each may be any
            structure of floating-point or complex tensors.
        has_aux: Whether `func` also returns something to hand through.

    Returns:
        A function that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
        RuntimeError: The result is not a real scalar, or `argnums` does not fit.
        ValueError: An argument to differentiate with respect to is no tensor.

    Example:
        >>> import torch
        >>> from lanewise import value_and_grad
        >>> value_and_grad(lambda x: (x**2).sum())(torch.tensor([1.0, 2.0]))
        (tensor(5.), tensor([2., 4.]))
    """
    if not callable(func):
        raise not_callable("value_and_grad", func)

    @functools.wraps(func)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            grads, result = traced("grad_and_value", func, argnums, has_aux)(*args, **kwargs)
            return result, grads
        try:
            grads, result = differentiate("value_and_grad", func, argnums, has_aux, args, kwargs, want_value=True)
            return result, grads
        except Exception as error:
            hide_own_frames(error)
            raise

    return value_and_gradient


class Gradient:
    """What a function does that `grad` and its kin have made.

    Attributes:
        func, argnums, has_aux: What they were given.
        result: What the function returns, from the gradient and the value, or `(value, aux)` if `has_aux`.
    """

    __slots__ = ("func", "argnums", "has_aux", "result")

    def __init__(self, function: types.FunctionType, result: Callable[[Any, Any], Any]) -> None:
        given = closure_of(function)
        self.func, self.argnums, self.has_aux = given["func"], given["argnums"], given["has_aux"]
        self.result = result


_RESULTS: dict[types.CodeType, Callable[[Any, Any], Any]] = {
    code_made_by(grad): lambda gradient, value: (gradient, value[1]) if type(value) is tuple else gradient,
    code_made_by(grad_and_value): lambda gradient, value: (gradient, value),
    code_made_by(value_and_grad): lambda gradient, value: (value, gradient),
}


def gradient_of(function: Any) -> Gradient | None:
    """What a function does, if `grad` or its kin have made it."""
    if type(function) is not types.FunctionType:
        return None
    result = _RESULTS.get(function.__code__)
    return None if result is None else Gradient(function, result)


def differentiate(
    api: str, func: Callable, argnums: Any, has_aux: bool, args: tuple, kwargs: dict, *, want_value: bool
) -> Any:
    """`grads`, `(grads, aux)`, `(grads, value)` or `(grads, (value, aux))`."""
    site = (api, func, args, kwargs, argnums)
    argnums = check_argnums(site, argnums, len(args))
    chosen = select(args, argnums)
    leaves, spec = ([chosen], None) if isinstance(chosen, Tensor) else flatten(chosen)
    level = current_level()
    watched = level is not None and level.watching
    if watched and (found := differentiate_below(level, site, (leaves, spec), has_aux, want_value)) is not None:
        return found
    with Recording(noted=watched) as recording:
        outer = recording.outer
        inputs = track(leaves, outer, site, argnums)
        args, kwargs = recording.ordinary(args, kwargs)
        out = func(*replace(args, argnums, inputs[0] if spec is None else unflatten(list(inputs), spec)), **kwargs)
        value, aux = split_aux(site, out, has_aux)
        check_scalar(site, value)
        create_graph = outer and needs_graph([value], inputs)
        if watched:
            note_use(level, inputs, value)
            if create_graph:
                note_made(level, [value])
        grads = pull_back([value], inputs, [one(value)], outer, create_graph=create_graph)
        result = grads[0] if spec is None else unflatten(grads, spec)
        if has_aux:
            aux = untrack(aux, inputs, outer)
        if not want_value:
            return (result, aux) if has_aux else result
        if not outer:
            value = untrack(value, inputs, outer)
        elif recorded(value) and not create_graph:
            value = without_history(value)
        return result, ((value, aux) if has_aux else value)


def alike(cotangent: Tensor, output: Tensor) -> bool:
    """Whether a cotangent has the components of a nested output."""
    if not cotangent.is_nested or cotangent.layout is not output.layout:
        return False
    if output.layout is torch.jagged:
        return cotangent.shape == output.shape
    return [part.shape for part in cotangent.unbind()] == [part.shape for part in output.unbind()]


def tensors_only(values: Sequence) -> bool:
    """Whether all are tensors."""
    for value in values:
        if not isinstance(value, Tensor):
            return False
    return True


def vjp(func: Callable, *primals: Any, has_aux: bool = False) -> Any:
    """The value of `func` at `primals`, and the function that takes cotangents back to the primals.

    Args:
        func: A function of tensors or structures of tensors, which returns such, or `(result, aux)` if `has_aux`.
        *primals: The arguments, floating-point or complex tensors.
        has_aux: Whether `func` also returns something to hand through.

    Returns:
        `(value, pull)`, or `(value, pull, aux)`. `pull(cotangents, retain_graph=True, create_graph=None)` takes a
        cotangent in the structure and shapes of the value, and returns a tuple, one entry for each primal.

    Raises:
        RuntimeError: The value holds something that is no tensor, or a cotangent does not fit the value.
        ValueError: A primal is no tensor.

    Example:
        >>> import torch
        >>> from lanewise import vjp
        >>> value, pull = vjp(torch.mul, torch.tensor(3.0), torch.tensor(5.0))
        >>> pull(torch.tensor(1.0))
        (tensor(5.), tensor(3.))
    """
    if not callable(func):
        raise not_callable("vjp", func)
    if is_compiling():
        return traced("vjp", func, *primals, has_aux=has_aux)
    try:
        with Recording() as recording:
            outer = recording.outer
            site = ("vjp", func, primals, {}, None)
            # A tuple of tensors, the commonest case, is not taken apart.
            leaves, spec = (list(primals), None) if tensors_only(primals) else flatten(primals)
            inputs = track(leaves, outer, site)
            out = func(*inputs) if spec is None else func(*unflatten(list(inputs), spec))
            value, aux = split_aux(site, out, has_aux)
        outputs, out_spec = flatten(value)
        check_outputs(site, value, outputs)
        check_output_dtypes(outputs, value, site)

        def back(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> tuple:
            if isinstance(retain_graph, Tensor):
                raise several_cotangents(out_spec)
            if isinstance(cotangents, Tensor) and out_spec is LEAF:
                ct_leaves = [cotangents]
            else:
                ct_leaves, ct_spec = flatten(cotangents)
                if ct_spec != out_spec:
                    raise cotangents_mismatch(ct_spec, out_spec)
            for position, (ct, out) in enumerate(zip(ct_leaves, outputs)):
                if not isinstance(ct, Tensor) or (ct.shape != out.shape if not out.is_nested else not alike(ct, out)):
                    raise cotangent_mismatch(ct, out, value, position)
            with Recording() as inner:
                record = create_graph
                if record is None:
                    record = any(kept) if outer else needs_graph(outputs, inputs)
                    record = inner.outer and (record or any(map(recorded, ct_leaves)))
                grads = pull_back(
                    outputs, inputs, ct_leaves, inner.outer, create_graph=record, retain_graph=retain_graph
                )
                if create_graph is None:
                    grads = [free_below(g, inputs) for g in grads]
            return tuple(grads) if spec is None else unflatten(grads, spec)

        # Which outputs somebody outside may differentiate: asked once, for what is shown and for each pull.
        kept = [recorded(out) and needs_graph([out], inputs) for out in outputs] if outer else []
        if outer:
            free = [out if keep or not recorded(out) else without_history(out) for out, keep in zip(outputs, kept)]
            shown = unflatten(free, out_spec)
        else:
            shown = untrack(value, inputs, outer)
        return (shown, back, untrack(aux, inputs, outer)) if has_aux else (shown, back)
    except Exception as error:
        hide_own_frames(error)
        raise
