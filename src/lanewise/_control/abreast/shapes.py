"""Views and copies of lanes abreast, what puts them together, and what picks of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise._control.abreast.values import (
    FUNCTIONS,
    METHODS,
    Declined,
    Lanes,
    Spread,
    dim_below,
    dims_below,
    expanded,
    has_lanes,
    is_given,
    lane_count,
    rank_of,
    value_of,
    without_tensors,
    wrapped,
)
from lanewise._rules.batch.indexing import along
from lanewise._rules.batch.operands import kept_lane_numbers
from lanewise._rules.batch.picking import rows_at
from lanewise._rules.batch.spread import Embedding, apply


def view(*names: str) -> Callable[[Callable], Callable]:
    """Let functions of torch and methods of these names be one of a value `[B, *S]`, its rank and the options."""

    def register(call: Callable) -> Callable:
        def run(x: Any, /, *options: Any, **named: Any) -> Any:
            value = value_of(x)
            for option in options:
                if is_given(option):
                    raise Declined
            out = call(value, value.dim() - 1, *options, **named)
            return Lanes(out) if type(out) is Tensor else wrapped(out)

        for name in names:
            METHODS[name] = run
            if hasattr(torch, name):
                FUNCTIONS[getattr(torch, name)] = run
        return call

    return register


def _sizes(given: Sequence[Any]) -> Sequence[int]:
    """Sizes or dims one after the other, or in a sequence."""
    sizes = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    if not all(type(size) is int for size in sizes):
        raise Declined
    return sizes


@view("unsqueeze")
def _unsqueeze(value: Tensor, rank: int, dim: int) -> Tensor:
    return value.unsqueeze(dim_below(dim, rank + 1))


@view("squeeze")
def _squeeze(value: Tensor, rank: int, dim: Any = None) -> Tensor:
    dims = range(1, rank + 1) if dim is None else dims_below(dim, rank)
    return value.squeeze([each for each in dims if value.shape[each] == 1])


@view("transpose", "swapaxes", "swapdims")
def _transpose(value: Tensor, rank: int, dim0: int, dim1: int) -> Tensor:
    return value.transpose(dim_below(dim0, rank), dim_below(dim1, rank))


@view("permute")
def _permute(value: Tensor, rank: int, *dims: Any) -> Tensor:
    return value.permute(0, *dims_below(tuple(_sizes(dims)), rank))


@view("movedim", "moveaxis")
def _movedim(value: Tensor, rank: int, source: Any, destination: Any) -> Tensor:
    return value.movedim(dims_below(source, rank), dims_below(destination, rank))


@view("reshape")
def _reshape(value: Tensor, rank: int, *shape: Any) -> Tensor:
    return value.reshape(value.shape[0], *_sizes(shape))


@view("view")
def _view(value: Tensor, rank: int, *shape: Any) -> Tensor:
    if isinstance(shape[0], torch.dtype):
        raise Declined
    return value.view(value.shape[0], *_sizes(shape))


@view("flatten")
def _flatten(value: Tensor, rank: int, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return value.flatten(dim_below(start_dim, rank), dim_below(end_dim, rank))


@view("unflatten")
def _unflatten(value: Tensor, rank: int, dim: int, sizes: Any) -> Tensor:
    return value.unflatten(dim_below(dim, rank), sizes)


@view("expand")
def _expand(value: Tensor, rank: int, *size: Any) -> Tensor:
    sizes = _sizes(size)
    missing = len(sizes) - rank
    if missing < 0 or -1 in sizes[:missing]:
        raise Declined
    return value.view(value.shape[0], *[1] * missing, *value.shape[1:]).expand(value.shape[0], *sizes)


@view("repeat")
def _repeat(value: Tensor, rank: int, *repeats: Any) -> Tensor:
    times = _sizes(repeats)
    missing = len(times) - rank
    if missing < 0:
        raise Declined
    return value.view(value.shape[0], *[1] * missing, *value.shape[1:]).repeat(1, *times)


@view("repeat_interleave")
def _repeat_interleave(value: Tensor, rank: int, repeats: int, dim: Any = None) -> Tensor:
    if type(repeats) is not int or dim is None:
        raise Declined
    return value.repeat_interleave(repeats, dim_below(dim, rank))


@view("chunk")
def _chunk(value: Tensor, rank: int, chunks: int, dim: int = 0) -> Any:
    return value.chunk(chunks, dim_below(dim, rank))


@view("split")
def _split(value: Tensor, rank: int, split_size: Any, dim: int = 0) -> Any:
    return value.split(split_size, dim_below(dim, rank))


@view("unbind")
def _unbind(value: Tensor, rank: int, dim: int = 0) -> Any:
    return value.unbind(dim_below(dim, rank))


@view("select")
def _select(value: Tensor, rank: int, dim: int, index: int) -> Tensor:
    return value.select(dim_below(dim, rank), index)


@view("narrow")
def _narrow(value: Tensor, rank: int, dim: int, start: int, length: int) -> Tensor:
    return value.narrow(dim_below(dim, rank), start, length)


@view("diagonal")
def _diagonal(value: Tensor, rank: int, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return value.diagonal(offset, dim_below(dim1, rank), dim_below(dim2, rank))


@view("diag")
def _diag(value: Tensor, rank: int, diagonal: int = 0) -> Tensor:
    if rank not in (1, 2):
        raise Declined
    return torch.diag_embed(value, diagonal) if rank == 1 else value.diagonal(diagonal, 1, 2)


@view("diag_embed")
def _diag_embed(value: Tensor, rank: int, offset: int = 0) -> Tensor:
    return _with_dims(value, rank, 1).diag_embed(offset)


@view("tril")
def _tril(value: Tensor, rank: int, diagonal: int = 0) -> Tensor:
    return _with_dims(value, rank, 2).tril(diagonal)


@view("triu")
def _triu(value: Tensor, rank: int, diagonal: int = 0) -> Tensor:
    return _with_dims(value, rank, 2).triu(diagonal)


@view("flip")
def _flip(value: Tensor, rank: int, *dims: Any) -> Tensor:
    return value.flip(dims_below(tuple(_sizes(dims)), rank))


@view("roll")
def _roll(value: Tensor, rank: int, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None:
        raise Declined
    return value.roll(shifts, dims_below(dims, rank))


@view("t")
def _t(value: Tensor, rank: int) -> Tensor:
    if rank > 2:
        raise Declined
    return value.mT if rank == 2 else value


def _with_dims(value: Tensor, rank: int, least: int) -> Tensor:
    if rank < least:
        raise Declined
    return value


# Attributes of tensors, of a value and its rank: of each lane.
ATTRIBUTES: dict[str, Callable[[Tensor, int], Any]] = {
    "shape": lambda value, rank: value.shape[1:],
    "dtype": lambda value, rank: value.dtype,
    "device": lambda value, rank: value.device,
    "ndim": lambda value, rank: rank,
    "T": lambda value, rank: Lanes(_t(value, rank)),
    "mT": lambda value, rank: Lanes(_with_dims(value, rank, 2).mT),
}
# Methods whose result is no tensor.
_ASKED: dict[str, Callable] = {
    "size": lambda value, dim=None: value.shape[1:] if dim is None else value.shape[dim_below(dim, value.dim() - 1)],
    "dim": lambda value: value.dim() - 1,
    "ndimension": lambda value: value.dim() - 1,
    "numel": lambda value: math.prod(value.shape[1:]),
    "nelement": lambda value: math.prod(value.shape[1:]),
    "is_floating_point": lambda value: value.is_floating_point(),
    "is_complex": lambda value: value.is_complex(),
}


def _asked(call: Callable) -> Callable:
    return lambda x, *options: call(value_of(x), *options)


for _name, _call in _ASKED.items():
    METHODS[_name] = _asked(_call)
    if hasattr(torch, _name):
        FUNCTIONS[getattr(torch, _name)] = _asked(_call)


def _as_other(x: Any, other: Any) -> Lanes:
    return METHODS["expand"](x, tuple(other.value.shape[1:] if type(other) is Lanes else other.shape))


METHODS["expand_as"] = _as_other


# --- several tensors -------------------------------------------------------------------------------------------------


def _joined(call: Callable, new_dim: bool) -> Callable:
    def run(tensors: Any, dim: int = 0) -> Lanes:
        if type(tensors) not in (list, tuple):
            raise Declined
        count = lane_count(tensors)
        values = [expanded(tensor, count) for tensor in tensors]
        if any(value.dim() != values[0].dim() or value.dtype is not values[0].dtype for value in values):
            raise Declined
        return Lanes(call(values, dim_below(dim, values[0].dim() - 1 + new_dim)))

    return run


FUNCTIONS[torch.stack] = _joined(torch.stack, True)
FUNCTIONS[torch.cat] = FUNCTIONS[torch.concat] = FUNCTIONS[torch.concatenate] = _joined(torch.cat, False)


def _pad(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Lanes:
    without_tensors((value, *pad))
    if mode != "constant" or len(pad) > 2 * rank_of(x):
        raise Declined
    return Lanes(F.pad(value_of(x), pad, mode, value))


FUNCTIONS[F.pad] = _pad


# --- indices ---------------------------------------------------------------------------------------------------------


def item(x: Any, index: Any) -> Any:
    """`x[index]`, where x or a part of the index has lanes"""
    if type(index) is int and type(x) is Lanes and x.value.dim() > 1:
        return Lanes(x.value.select(1, index))
    parts = index if type(index) is tuple else (index,)
    tensors = [part for part in parts if is_given(part)]
    if not tensors:
        if any(part is not None and part is not Ellipsis and type(part) not in (int, slice) for part in parts):
            raise Declined
        taken = sum(part is not None and part is not Ellipsis for part in parts)
        value = value_of(x)
        if taken > value.dim() - 1 or parts.count(Ellipsis) > 1:
            raise IndexError
        return Lanes(value[(slice(None), *parts)])
    # Places beside each other, for the first dims; a number among them picks of its dim first.
    while parts and (parts[-1] is Ellipsis or (type(parts[-1]) is slice and parts[-1] == slice(None))):
        parts = parts[:-1]
    if len(parts) > rank_of(x) or any(type(part) is not int and not is_given(part) for part in parts):
        raise Declined
    places = [part.value if type(part) is Lanes else part for part in parts]
    numbers = [place for place in places if isinstance(place, Tensor)]
    if any(number.dtype is not torch.int64 for number in numbers):
        raise Declined
    lanes = [type(tensor) is Lanes for tensor in tensors]
    if not any(lanes):
        return Lanes(value_of(x)[(slice(None), *places)])
    if not all(lanes) or any(number.dim() != numbers[0].dim() for number in numbers):
        raise Declined
    if isinstance(x, Tensor):
        found = rows_at(x, numbers, False) if len(numbers) == len(places) else None
        return Lanes(x[tuple(places)] if found is None else found)
    value = value_of(x)
    found = rows_at(value, numbers, True) if len(numbers) == len(places) else None
    return Lanes(value[(_lane_numbers(value, numbers[0].dim()), *places)] if found is None else found)


def _lane_numbers(value: Tensor, rank: int) -> Tensor:
    return kept_lane_numbers(len(value), value.device, rank)


def _index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Lanes:
    if not all(type(each) is Lanes and each.value.dtype is torch.int64 for each in indices):
        raise Declined
    numbers = [each.value for each in indices]
    if any(number.dim() != numbers[0].dim() for number in numbers) or type(accumulate) is not bool:
        raise Declined
    if len(indices) > rank_of(x) or rank_of(values) != numbers[0].dim() - 1 + rank_of(x) - len(indices):
        raise Declined
    places = (_lane_numbers(value_of(x), numbers[0].dim()), *numbers)
    return Lanes(torch.index_put(value_of(x), places, value_of(values), accumulate))


FUNCTIONS[torch.index_put] = METHODS["index_put"] = _index_put


def _index_select(x: Any, dim: int, index: Any) -> Lanes:
    rank = rank_of(x)
    if rank_of(index) != 1:
        raise Declined
    below = dim_below(dim, rank)
    if type(index) is not Lanes:
        return Lanes(torch.index_select(value_of(x), below, index))
    value, numbers = value_of(x), index.value
    found = rows_at(value, [numbers], True, wraps=False) if below == 1 and numbers.dtype is torch.int64 else None
    if found is None:
        shape = (*value.shape[:below], numbers.shape[1], *value.shape[below + 1 :])
        found = torch.gather(value, below, along(numbers, below, shape))
    return Lanes(found)


def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Lanes:
    rank = rank_of(x)
    if rank_of(index) != 1 or rank_of(source) != rank or is_given(alpha):
        raise Declined
    below, count = dim_below(dim, rank), lane_count((x, index, source))
    values, sources = expanded(x, count), expanded(source, count)
    if type(index) is not Lanes:
        return Lanes(torch.index_add(values, below, index, sources, alpha=alpha))
    shape = (*values.shape[:below], index.value.shape[1], *values.shape[below + 1 :])
    if sources.shape != shape:
        raise Declined
    sources = sources if alpha == 1 else sources * alpha
    return Lanes(torch.scatter_add(values, below, along(index.value, below, shape), sources))


FUNCTIONS[torch.index_select] = METHODS["index_select"] = _index_select
FUNCTIONS[torch.index_add] = METHODS["index_add"] = _index_add


def _gather(x: Any, dim: int, index: Any) -> Lanes:
    rank = rank_of(x)
    if rank_of(index) != rank:
        raise Declined
    count = lane_count((x, index))
    return Lanes(torch.gather(expanded(x, count), dim_below(dim, rank), expanded(index, count)))


def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Lanes:
    rank = rank_of(x)
    if rank_of(index) != rank or rank_of(src) != rank:
        raise Declined
    count = lane_count((x, index, src))
    values = [expanded(each, count) for each in (x, index, src)]
    return Lanes(torch.scatter_add(values[0], dim_below(dim, rank), *values[1:]))


FUNCTIONS[torch.gather] = METHODS["gather"] = _gather
FUNCTIONS[torch.scatter_add] = METHODS["scatter_add"] = _scatter_add


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Lanes:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Declined
    value = value_of(input)
    if type(weight) is Spread:
        rows = weight.value.shape[1]
        padding = -1 if padding_idx is None else padding_idx % rows
        return Lanes(apply(Embedding(padding), value, weight.value))
    if has_lanes((weight,)):
        raise Declined
    return Lanes(F.embedding(value, weight, padding_idx))


FUNCTIONS[F.embedding] = _embedding


def _one_hot(tensor: Any, num_classes: int = -1) -> Lanes:
    if num_classes < 0:
        raise Declined
    return Lanes(F.one_hot(value_of(tensor), num_classes))


FUNCTIONS[F.one_hot] = _one_hot
