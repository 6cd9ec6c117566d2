"""`vmap`: one function of one example, run for all examples at once."""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._core.again.outside import NOT_LOOKED_AT, held_before, reach_of
from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.draws.random import Generators
from lanewise._core.parting.lanes import Disagreement, machine, raise_caught
from lanewise._core.parting.unasked import Answers
from lanewise._core.plane import recorded
from lanewise._core.recording.kept_history import with_history
from lanewise._core.short.shared import class_of_level, runs_otherwise, with_wrappers
from lanewise._core.short.whole import WHOLE, mapped_whole
from lanewise._core.trees import LEAF, PrefixMismatch, Spec, flatten, flatten_with_prefix, spec_names, unflatten
from lanewise._torch_compat import is_grad_enabled, peer_engine_active
from lanewise._transforms.arguments import Call, closure_of, code_made_by, not_callable, refuse_peer
from lanewise._transforms.chunks import check_chunk_options, join_chunks, map_chunks
from lanewise._transforms.compiling import explaining, is_compiling, traced
from lanewise._transforms.dims import (
    check_out_dims,
    check_randomness,
    dynamic_lanes,
    lanes_in_object,
    mapped_leaves,
    out_dim_error,
    out_dims_mismatch,
    returned_lanes,
    unstackable,
)
from lanewise._transforms.numbers import NUMBERS, number_as_tensor
from lanewise._transforms.parting import check_lost, code_of, parted, parts, runner, starts_again
from lanewise._transforms.ragged import Apart, Ragged, by_component, result, taken_apart
from lanewise._transforms.reverse import tensors_only
from lanewise._transforms.straight import run_straight
from lanewise.errors import LanewiseError, hide_own_frames, name_lanes, note_unbatched


def vmap(
    func: Callable,
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | str | None = None,
    memory_budget: int | None = None,
    progress: bool | str = False,
    axis_size: int | None = None,
) -> Callable:
    """Map `func`, a function of one example, over a dimension of its arguments.

    The result equals a loop over the examples whose results are stacked: values, derivatives, dtypes and shapes.

    Args:
        func: A function of one example: it sees tensors `[*S]` where you pass `[B, *S]`.
        in_dims: Where the lanes are: an int for all positional arguments, or a tuple, one entry for each; an entry may
            follow the structure of its argument. None: the argument is the same for all lanes, and reaches `func` as
            the very object you passed. A dict by names of parameters maps keyword arguments too; a name left out counts
            as None. An argument that is None is passed on. The components of a nested tensor of jagged layout are lanes
            along dim 0.
        out_dims: Where the lanes go in the results, likewise. None: the result is the same for all lanes. "list": a
            list with one result for each lane, of any shape. "jagged": a nested tensor of jagged layout, from results
            `[n_i, *S]` that differ in the first dim. Numbers of Python have no dims, so their lanes are in dim 0.
        randomness: `"different"` draws for each lane, `"same"` alike for all, `"error"` refuses random operations. The
            numbers do not depend on `chunk_size`, except under `"different"` where lanes take different branches.
        chunk_size: Take so many lanes at a time, to bound the memory; `"auto"` takes the largest power of two whose
            peak memory, estimated from two small chunks, fits `memory_budget`. None takes all at once.
        memory_budget: Bytes for `chunk_size="auto"`; half of the free memory if None.
        progress: Show a bar over the lanes, a string as its label; only the outermost of nested chunk loops does.
        axis_size: The number of lanes, for when no argument is mapped.

    Returns:
        A function with the signature of `func`. Tensors of its result have lanes, `[B, *S]`; a tensor that is the same
        for all lanes is repeated. A Python number is one of each lane, `[B]`, if the function has asked for values of
        lanes (`x.item()`, a branch, `len(x[mask])`), whether or not they agreed; if it has asked nothing, or `out_dims`
        is None, the number comes back as it is. So does what is neither a tensor nor a number.

    Raises:
        ValueError: `in_dims` or sizes do not fit the arguments, or the structure of `out_dims` not the results.
        IndexError: A dim of `out_dims` is out of range.
        RuntimeError: The function draws random numbers without a choice of `randomness`, or returns shapes that differ
            from lane to lane, for which there is `out_dims="list"`.

    Example:
        >>> import torch
        >>> from lanewise import vmap
        >>> xs, w = torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 10.0])
        >>> vmap(torch.dot, in_dims=(0, None))(xs, w)
        tensor([10., 32., 54.])
    """
    if not callable(func):
        raise not_callable("vmap", func)
    if is_compiling():
        return traced(
            "vmap",
            explaining(func),
            in_dims,
            out_dims,
            randomness,
            chunk_size=chunk_size,
            memory_budget=memory_budget,
            progress=progress,
            axis_size=axis_size,
        )
    check_randomness(randomness)
    check_chunk_options("vmap", chunk_size, memory_budget)
    direct = chunk_size is None and axis_size is None and not progress
    # The commonest calls take no trees apart: `front` for dim 0 of every argument, `plain` for a dim or None for each.
    short = direct and type(out_dims) is int
    front = short and type(in_dims) is int and in_dims == 0
    plain = short and type(in_dims) is tuple and all(dim is None or type(dim) is int for dim in in_dims)
    # Wherever there are lanes, for `runner.masked_plainly`.
    lanes_first = out_dims == 0 and (front or (plain and not any(in_dims)))  # type: ignore[arg-type]
    estimates: dict = {}
    whole = WHOLE.get(func) if type(func) is types.BuiltinFunctionType and (front or plain) else None
    code = code_of(func)
    reach: Any = NOT_LOOKED_AT
    looks = code not in with_wrappers
    # With and without autograd.
    may_be_straight = [lanes_first, lanes_first]

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal reach, looks
        if is_compiling():
            options = {"chunk_size": chunk_size, "axis_size": axis_size}
            return traced("vmap", explaining(func), in_dims, out_dims, randomness, **options)(*args, **kwargs)
        try:
            if peer_engine_active():
                raise refuse_peer("vmap")
            size = _lane_count(args, _IN_FRONT if front else in_dims) if front or plain else -1
            each: Any = in_dims if plain else (0,) * len(args)
            if whole is not None and size > 0 and not kwargs:
                out = mapped_whole(whole, args, each, out_dims)
                if out is not None:
                    return out
            elif may_be_straight[is_grad_enabled()] and size > 0 and not kwargs and code not in parted:
                out = run_straight(code, func, args, each)
                if out is None:
                    may_be_straight[is_grad_enabled()] = False
                elif out is not NotImplemented:
                    return out
            if size > 0 and not ((parted or machine.boundaries) and parts(code)):
                kind = class_of_level(code, args, randomness) if looks else BatchLevel
                level = kind(size, randomness)
                generators = None if randomness == "error" else Generators()
                if reach is NOT_LOOKED_AT:
                    reach = reach_of(func)
                flat = tensors_only(args)
                # Tensors hold nothing that a function changes which changes no objects.
                held = None if reach is None and not kwargs and flat else held_before(reach, (*args, *kwargs.values()))
                given = args if flat else _tensors_in(args)
                try:
                    with level:
                        if front and flat:
                            lanes = [level.wrap(arg) for arg in args]
                        else:
                            lanes = _lanes(level, in_dims, args)
                        level.restartable = True
                        level.journal = list(given)
                        out = func(*lanes, **kwargs)
                        if machine.raised:
                            raise_caught(level, Disagreement)
                        check_lost(level, code)
                        if looks:
                            looks = kind is not BatchLevel and runs_otherwise(level, code, out)
                        if type(out) is BatchTensor and out.level is level and out.mapped and out_dims == 0:
                            value = out.value
                            if not (value.is_inference() or recorded(out) or _is_one_of(value, given)):
                                return value
                        leaves, dims, spec = leave(level, out, out_dims, func, given)
                    return unflatten(leaves, spec)
                except BaseException as error:
                    if not starts_again(level, code, error, held):
                        raise
                    looks = code not in with_wrappers
                    if generators is not None:
                        generators.reseat()
            ways = parted.get(code) if lanes_first and size > 0 and not kwargs else None
            if ways is not None and size.bit_length() in ways.together:
                if tensors_only([arg for arg, dim in zip(args, each) if dim is not None]):
                    out = runner.masked_plainly(func, args, each)
                    if out is not None:
                        return out
            call = Call("vmap", func, args, kwargs, {"in_dims": in_dims, "out_dims": out_dims, "axis_size": axis_size})
            if front and size >= 0 and not kwargs and tensors_only(args):
                leaves, dims, spec = list(args), [0] * len(args), _spec_of_tensors(len(args))
            else:
                check_out_dims(call, out_dims)
                leaves, dims, spec, size = mapped_leaves(call, in_dims, axis_size)
            if direct:
                leaves, _, spec = run_lanes(call, leaves, dims, spec, out_dims, randomness, (0, size, size))
                return unflatten(leaves, spec)
            lengths: list[int] = []

            def run(start: int, length: int) -> tuple[list, list, Spec]:
                lengths.append(length)
                try:
                    return run_lanes(call, leaves, dims, spec, out_dims, randomness, (start, length, size))
                except Exception as error:
                    if length < size and not isinstance(error, LanewiseError) and not hasattr(error, "lanes"):
                        name_lanes(error, range(start, start + length))
                    raise

            results = map_chunks(
                run,
                size,
                chunk_size,
                memory_budget=memory_budget,
                progress=progress,
                label=call.name,
                randomness=randomness,
                leaves=leaves,
                estimates=estimates,
            )
            return join_chunks(call, results, leaves, lengths)
        except Exception as error:
            note_unbatched(error)
            hide_own_frames(error)
            raise

    return mapped


class Mapping:
    """What a function does that `vmap` has made, without options but for the dims.

    Attributes:
        func, in_dims, out_dims: What `vmap` was given.
    """

    __slots__ = ("func", "in_dims", "out_dims")

    def __init__(self, given: dict[str, Any]) -> None:
        self.func, self.in_dims, self.out_dims = given["func"], given["in_dims"], given["out_dims"]

    def dims_of(self, count: int) -> tuple[int | None, ...] | None:
        """The dim of each of so many arguments; None where that is not plain to see."""
        dims = (self.in_dims,) * count if type(self.in_dims) is int else self.in_dims
        if type(dims) is not tuple or len(dims) != count:
            return None
        return dims if all(dim is None or type(dim) is int for dim in dims) else None


_MAPPED = code_made_by(vmap)


def mapping_of(function: Any) -> Mapping | None:
    """What a function does, if `vmap` has made it and takes all lanes at once."""
    if type(function) is not types.FunctionType or function.__code__ is not _MAPPED:
        return None
    given = closure_of(function)
    return Mapping(given) if given["direct"] else None


def _leaves(arg: Any) -> Sequence:
    """The values of a dict that holds some; of another argument than a tensor, None."""
    return tuple(arg.values()) if type(arg) is dict and arg else (None,)


def _tensors_in(args: tuple) -> list[Tensor]:
    """Arguments that are tensors, and those in dicts."""
    return [
        leaf
        for arg in args
        for leaf in ((arg,) if isinstance(arg, Tensor) else _leaves(arg))
        if isinstance(leaf, Tensor)
    ]


@functools.cache
def _spec_of_tensors(count: int) -> Spec:
    """The structure of `(args, kwargs)` where the arguments are so many tensors, and none are named."""
    return flatten(((None,) * count, {}))[1]


def _is_one_of(value: Tensor, args: Sequence) -> bool:
    """Whether `value` is an argument itself."""
    for arg in args:
        if value is arg:
            return True
    return False


# For so many arguments as there are.
_IN_FRONT = itertools.repeat(0)


def _lane_count(args: tuple, in_dims: Any) -> int:
    """The number of lanes if all mapped arguments are tensors with as many in their dims, or dicts of such, else -1."""
    if in_dims is not _IN_FRONT and len(in_dims) != len(args):
        return -1
    size = -1
    for arg, dim in zip(args, in_dims):
        if dim is None:
            continue
        for leaf in (arg,) if isinstance(arg, Tensor) else _leaves(arg):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
                return -1
            if leaf._is_zerotensor():
                return -1
            try:
                found = leaf.shape[dim]
            except IndexError:
                return -1
            if found != size >= 0:
                return -1
            size = found
    return size


def _lanes(level: BatchLevel, in_dims: Any, args: tuple) -> list:
    """The arguments as the function sees them."""
    lanes = []
    for arg, dim in zip(args, (in_dims,) * len(args) if type(in_dims) is int else in_dims):
        if dim is None:
            lanes.append(arg)
        elif isinstance(arg, Tensor):
            lanes.append(level.wrap(arg.movedim(dim, 0) if dim else arg))
        else:
            lanes.append({key: level.wrap(leaf.movedim(dim, 0) if dim else leaf) for key, leaf in arg.items()})
    return lanes


def run_parted(func: Callable, in_dims: Sequence[int | None], size: int, args: tuple) -> Any:
    """`vmap(func, tuple(in_dims))(*args)` where lanes part, `size` of them in dim 0 of arguments."""
    call = Call("vmap", func, args, {}, {"in_dims": in_dims})
    spec = _spec_of_tensors(len(args))
    leaves, _, spec = runner.run(call, list(args), list(in_dims), spec, 0, "error", (0, size, size))
    return unflatten(leaves, spec)


def run_lanes(
    call: Call, leaves: list, dims: list, spec: Spec, out_dims: Any, randomness: str, place: tuple[int, int, int]
) -> tuple[list, list, Spec]:
    """Run the function for the lanes `start ... start + length` out of `total`."""
    start, length, total = place
    code = code_of(call.func)
    whole = not any(dim is not None and by_component(leaf, dim) for leaf, dim in zip(leaves, dims))
    answers = None if length else Answers()
    while whole and (answers is not None or not parts(code)):
        if answers is not None and not answers.parting and (answers.asks or parts(code)):
            answers.parting = True
            with contextlib.suppress(Exception):
                return runner.run(call, leaves, dims, spec, out_dims, randomness, place)
        lanes = list(leaves)
        level = BatchLevel(length, randomness, total, start)
        level.answers = answers
        generators = None if randomness == "error" else Generators()
        held = held_before(reach_of(call.func), lanes)
        try:
            with level:
                level.restartable = True
                level.journal = [leaf for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
                for position, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
                    if dim is not None:
                        lanes[position] = level.wrap(lane_rows(leaf, dim, place))
                args, kwargs = unflatten(lanes, spec)
                out = call.func(*args, **kwargs)
                if machine.raised:
                    raise_caught(level, Disagreement)
                check_lost(level, code)
                return leave(level, out, out_dims, call.func, leaves)
        except BaseException as error:
            if not starts_again(level, code, error, held):
                raise
            if generators is not None:
                generators.reseat()
    if length and whole:
        found = runner.looped(call, leaves, dims, spec, out_dims, randomness, place)
        if found is None:
            found = runner.masked(call.func, leaves, dims, spec, out_dims, place)
        if found is not None:
            return found
    return runner.run(call, leaves, dims, spec, out_dims, randomness, place)


def lane_rows(leaf: Tensor, dim: int, place: tuple[int, int, int]) -> Tensor:
    """An argument with the lanes of one chunk in front."""
    start, length, total = place
    value = leaf.movedim(dim, 0) if dim else leaf
    return value if length == total else value.narrow(0, start, length)


def leave(level: BatchLevel, out: Any, out_dims: Any, func: Callable, given: Sequence) -> tuple[list, list, Spec]:
    """The leaves of a result on the plane below, lanes at their dims; the dims, and the structure.

    An argument that is returned comes back as an alias: what is done to the result's metadata is not done to it.
    """
    own = {id(leaf) for leaf in given}
    if isinstance(out, Tensor) and isinstance(out_dims, tuple) and len(out_dims) == 1:
        out_dims = out_dims[0]
    if isinstance(out, Tensor) and type(out_dims) is int:
        leaves, dims, spec = [out], [out_dims], LEAF
    else:
        try:
            leaves, dims, spec = flatten_with_prefix(out_dims, out)
        except PrefixMismatch as mismatch:
            raise out_dims_mismatch(func, out_dims, flatten(out)[1], mismatch) from None
    for position, (leaf, dim) in enumerate(zip(leaves, dims)):
        value = leave_leaf(level, leaf, dim, (func, spec, position), given)
        alias = dim is not None and isinstance(value, Tensor) and id(value) in own
        leaves[position] = value.view_as(value) if alias else value
    return leaves, dims, spec


def leave_leaf(level: BatchLevel, leaf: Any, dim: Any, place: tuple[Callable, Spec, int], given: Sequence = ()) -> Any:
    """One leaf of a result: lanes moved to `dim`, or the leaf as it is where it is no tensor.

    `place` says whose result it is, and which leaf of it, for messages; `given` are the leaves of the arguments.
    """
    if isinstance(dim, str):
        leaf = taken_apart(level, leaf, dim, output_name(place))
        if type(leaf) in (Apart, Ragged):
            return result(leaf, output_name(place), given)
        dim = 0
    if isinstance(leaf, Tensor):
        value, lanes = level.lowered(leaf)
        value = with_history(level, leaf, value)
    elif isinstance(leaf, NUMBERS):
        if dim is None or not level.asked:
            if machine.alone is not None and dim is not None:
                machine.alone()
            return leaf
        if issubclass(type(leaf), NUMBERS):
            value, lanes = number_as_tensor(level, leaf, lambda: output_name(place)), True
        else:
            value, lanes = level.lowered(runner.number_as_tensor(leaf))
    else:
        attribute = lanes_in_object(level, leaf)
        if attribute is not None:
            raise returned_lanes(place[0], leaf, attribute, output_name(place))
        return leaf
    if value.is_inference() and not torch.is_inference_mode_enabled():
        # As stacking would: what was made under inference_mode inside is an ordinary tensor outside.
        value = level.below(torch.clone, value)
    if dim is None:
        if lanes:
            raise dynamic_lanes(place[0], leaf.shape, output_name(place))
        return value
    if not lanes:
        if value.is_nested or value.layout is not torch.strided:
            raise unstackable(place[0], value, output_name(place))
        value = value.expand(level.own_size, *value.shape)
    if dim == 0:
        return value
    if not -value.dim() <= dim < value.dim():
        raise out_dim_error(place[0], dim, value, output_name(place))
    return value.movedim(0, dim)


def output_name(place: tuple[Callable, Spec, int]) -> str:
    """A leaf of a result as messages name it: `output['loss']`."""
    _, spec, position = place
    return spec_names(spec, "output")[position]
