"""Calls of `vmap` in the form that masks serve: the lanes of each argument in front, in one dim.

The lanes of a `vmap` of a `vmap` are the pairs of both: what the one maps and the other does not is repeated.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._control.masking.masked_calls import Run, form_of, with_owner
from lanewise._control.masking.masked_derivatives import derivatives_of, differentiated, recorded_call
from lanewise._control.masking.masks import is_recorded
from lanewise._core.level import standing
from lanewise._core.trees import PrefixMismatch, Spec, flatten, flatten_with_prefix, unflatten
from lanewise._torch_compat import (
    dispatch_mode_count,
    forward_level,
    function_mode_count,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    jit_tracing_state,
    saved_tensor_hooks,
)
from lanewise._transforms.vmap import lane_rows, mapping_of


class _Argument:
    """An argument on its way through one `vmap` after the other, outermost first.

    Attributes:
        value: A tensor with the dims of its lanes in front, or what all lanes share.
        has: For each `vmap` whether it has lanes there.
    """

    __slots__ = ("value", "has")

    def __init__(self, value: Any, mapped: bool) -> None:
        self.value = value
        self.has = [mapped]

    def _place(self, dim: int | None) -> int | None:
        """Where a dim of an example is in the value, if there is such a dim."""
        before = sum(self.has)
        rank = self.value.dim() - before if _is_plain(self.value) else 0
        return None if dim is None or not -rank <= dim < rank else before + dim % rank

    def size(self, dim: int | None) -> int | None:
        """The size of a dim of an example."""
        place = self._place(dim)
        return None if place is None else self.value.shape[place]

    def map(self, dim: int | None, size: int) -> bool:
        """Take a dim of an example as the lanes of a further `vmap`, if it has so many."""
        if dim is not None:
            place, before = self._place(dim), sum(self.has)
            if place is None or self.value.shape[place] != size:
                return False
            if place != before:
                self.value = self.value.movedim(place, before)
        self.has.append(dim is not None)
        return True

    def flat(self, sizes: list[int]) -> Any:
        """The value for all lanes, or what they share."""
        if not any(self.has):
            return self.value
        value = self.value
        if len(sizes) > 1:
            for place, has in enumerate(self.has):
                if not has:
                    value = value.unsqueeze(place)
            rest = value.shape[len(sizes) :]
            value = value.expand(*sizes, *rest).flatten(0, len(sizes) - 1)
        return value.contiguous()


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def run_masked_lanes(
    func: Any, leaves: list, dims: list, spec: Spec, out_dims: Any, place: tuple[int, int, int]
) -> tuple[list, list, Spec] | None:
    """The leaves of a result, lanes at their dims; the dims and the structure. None where the lanes have to part."""
    return None if watched() else _run_lanes(run_masked, func, leaves, dims, spec, out_dims, place)


def _run_lanes(
    run: Callable,
    func: Any,
    leaves: list,
    dims: list,
    spec: Spec,
    out_dims: Any,
    place: tuple[int, int, int],
    repeats: bool = True,
) -> Any:
    """The same by `run_masked` or another, and what else that gives.

    `repeats`: also where what one `vmap` maps and the other does not is to be repeated.
    """
    args, kwargs = unflatten(leaves, spec)
    in_dims, named = unflatten(dims, spec)
    # (Where nothing is mapped, the dims have no structure.)
    in_dims, named = in_dims or (None,) * len(args), named or dict.fromkeys(kwargs)
    sizes: list[int] = [place[1]]
    outs: list[Any] = []
    given: list[_Argument] = []
    for arg, dim in zip((*args, *kwargs.values()), (*in_dims, *named.values())):
        if dim is not None:
            if type(dim) is not int or not _is_plain(arg):
                return None
            arg = lane_rows(arg, dim, place)
        given.append(_Argument(arg, dim is not None))
    while (inner := mapping_of(func)) is not None:
        entries = None if kwargs else inner.dims_of(len(given))
        size = None if entries is None else next(filter(None, map(_Argument.size, given, entries)), None)
        if entries is None or size is None or not all(each.map(dim, size) for each, dim in zip(given, entries)):
            return None
        sizes.append(size)
        outs.append(inner.out_dims)
        func = inner.func
    if not repeats and any(any(each.has) and not all(each.has) for each in given):
        return None
    lanes = [0 if any(each.has) else None for each in given]
    out = run(func, tuple([each.flat(sizes) for each in given]), lanes, tuple(kwargs))
    return out if out is None or out is NotImplemented else _put_back(out, sizes, [out_dims, *outs])


def _put_back(out: Any, sizes: list[int], out_dims: list[Any]) -> tuple[list, list, Spec] | None:
    """Results whose lanes are in front, in one dim -> the lanes of each `vmap` where its `out_dims` say."""
    try:
        leaves, dims, spec = flatten_with_prefix(out_dims[0], out)
    except PrefixMismatch:
        return None
    for position, dim in enumerate(dims):
        value = leaves[position]
        if not isinstance(value, Tensor):
            return None  # one `out_dims` for several things
        if len(sizes) > 1:
            value = value.unflatten(0, sizes)
        for place, to in reversed([*enumerate([dim, *out_dims[1:]])]):
            rank = value.dim() - place
            if type(to) is not int or not -rank <= to < rank:
                return None
            value = value.movedim(place, place + to % rank) if to else value
        leaves[position] = value
    return leaves, dims, spec


def run_masked(func: Any, args: tuple, in_dims: Sequence[int | None], names: tuple[str, ...] = ()) -> Any:
    """The result of a `vmap` over dim 0 of arguments, None where its lanes have to part.

    `names`: of the last arguments, which are given by name.
    """
    if watched():
        return None
    transforms, inner = derivatives_of(func)
    inner, owner = with_owner(inner)
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
    run = Run(form, [dim is not None for dim in in_dims], args)
    if run.size >= form.below or not run.takes(args, inner, owner):
        return None
    if transforms:
        return differentiated(run, transforms, args, count)
    wanted = [place for place, arg in enumerate(args) if is_recorded(arg)] if is_grad_enabled() else []
    if not wanted:
        given = run.results(args, False)
        if given is None:
            return None
        out, one = given
        out = tuple([_apart(each, args) for each in out])
        return out[0] if one else out
    return recorded_call(run, func, args, in_dims, wanted)


def run_straight(func: Any, args: tuple, in_dims: Sequence[int | None], names: tuple[str, ...] = ()) -> Any:
    """The same for a function that goes one way in all lanes, on no plane: None where it is not known to.

    NotImplemented where it may be known at another call. There are no sides for derivatives to leak from, so what torch
    records of plain tensors will do.
    """
    # A checkpoint expects the operations of the call before, deterministic algorithms its last digits, and a debugger
    # stops in the function itself.
    if watched() or saved_tensor_hooks() or torch.are_deterministic_algorithms_enabled() or sys.gettrace():
        return NotImplemented
    if mapping_of(func) is not None:
        return run_mapping(run_straight, func, args, in_dims, True)
    transforms, inner = derivatives_of(func)
    inner, owner = with_owner(inner)
    form = form_of(inner)
    if form is None:
        return None
    bound = form.bound(inner, args, in_dims, names, owner is not None)
    if bound is None:
        return None
    given, in_dims = bound
    own = [dim is not None for dim in in_dims]
    given = tuple([arg.contiguous() if mapped else arg for arg, mapped in zip(given, own)])
    run = Run(form, own, given, True)
    if not run.takes(given, inner, owner):
        return None
    if transforms:
        return differentiated(run, transforms, given, len(args))
    narrow = not run.wide
    found = run.results(given, False)
    if found is None:
        return NotImplemented if narrow and form.vectors else None
    out, one = found
    out = tuple([_apart(each, given) for each in out])
    return out[0] if one else out


def run_mapping(run: Callable, func: Any, args: tuple, in_dims: Sequence[int | None], repeats: bool) -> Any:
    """What `run`, like `run_straight`, gives for a `vmap` of a `vmap`."""
    size = next(arg.shape[0] for arg, dim in zip(args, in_dims) if dim is not None)
    _, spec = flatten(((None,) * len(args), {}))  # a structure without lanes goes along as it is
    found = _run_lanes(run, func, list(args), list(in_dims), spec, 0, (0, size, size), repeats)
    return found if found is None or found is NotImplemented else unflatten(found[0], found[2])


def watched() -> bool:
    """Whether anybody looks at operations of plain torch, or a transform is open."""
    return bool(
        standing.levels
        or dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or is_inference_mode_enabled()
        or forward_level() >= 0
        or jit_tracing_state() is not None
    )


def _apart(out: Any, args: tuple) -> Any:
    """A result that is no argument itself."""
    return out.view_as(out) if any(out is arg for arg in args) else out
