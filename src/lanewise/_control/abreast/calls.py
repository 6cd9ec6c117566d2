"""Calls of `vmap` whose lanes stay abreast: on plain tensors `[B, *S]`, and on no plane."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._control.abreast import networks  # noqa: F401
from lanewise._control.abreast.running import call
from lanewise._control.abreast.values import Declined, Lanes, has_lanes, state
from lanewise._control.masking.masked_derivatives import derivatives_of, differentiated
from lanewise._control.masking.masked_lanes import run_mapping, watched
from lanewise._control.masking.masks import is_recorded
from lanewise._core.short.hot import PLAIN
from lanewise._torch_compat import is_grad_enabled, saved_tensor_hooks
from lanewise._transforms.reverse import Gradient
from lanewise._transforms.vmap import mapping_of


class _Run:
    """A function in one call, as `masked_derivatives.differentiated` takes it.

    Attributes:
        func: The function.
        own: Which of its arguments are different in each lane.
        size: The number of lanes.
        form: This, which counts no gradients that were not finite: there are no sides that lanes do not take.
        failed: The error of the function itself.
    """

    straight = True
    strict = missed = 0

    def __init__(self, func: Any, own: list[bool], size: int) -> None:
        self.func = func
        self.own = own
        self.size = size
        self.form: Any = self
        self.failed: Exception | None = None

    def results(self, args: tuple, recording: bool, further: bool = False) -> tuple[tuple, bool] | None:
        """The results, lanes in front, and whether they are one; None where the call is declined."""
        if further:
            return None  # torch's formulas of second derivatives are wrong in places
        given = [Lanes(arg) if own else arg for arg, own in zip(args, self.own)]
        try:
            has_lanes(given)
            out = call(self.func, *given)
        except Declined:
            return None
        except Exception as error:
            self.failed = error
            return None
        outs = out if type(out) is tuple else (out,)
        if not outs or any(type(each) is not Lanes for each in outs):
            return None
        return tuple([each.value for each in outs]), type(out) is not tuple


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
    own = [dim is not None for dim in in_dims]
    for arg, mapped in zip(args, own):
        if isinstance(arg, Tensor):
            if type(arg) not in PLAIN or arg.is_inference() or arg.is_neg() or arg.is_conj():
                return NotImplemented
        elif mapped:
            return NotImplemented
    transforms, inner = derivatives_of(func)
    if transforms and not (len(transforms) == 1 and type(transforms[0]) is Gradient):
        return None
    run = _Run(inner, own, len(args[own.index(True)]))
    if not transforms:
        found = run.results(args, False)
        if found is None:
            return None if run.failed is None else NotImplemented
        out, one = found
        out = tuple([each.view_as(each) if any(each is arg for arg in args) else each for each in out])
        return out[0] if one else out
    if any(map(is_recorded, args)):
        return NotImplemented
    before = state.careful
    state.careful = is_grad_enabled()
    try:
        out = differentiated(run, transforms, args, len(args))  # type: ignore[arg-type]
    finally:
        state.careful = before
    return NotImplemented if out is None and run.failed is not None else out
