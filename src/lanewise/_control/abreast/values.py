"""Values of functions whose lanes stay abreast, and what is asked of the operands of an operation."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, strided

from lanewise._control.masking.vectors import Declined
from lanewise._core.short.hot import PLAIN


def _declined(*_: Any) -> Any:
    raise Declined


class Spread:
    """A matrix, or more, that all lanes share and that is differentiated for each: only layers and products take it.

    It is no tensor and has no methods: code that is not written for it (written.py) fails, and the call takes a plane.

    Attributes:
        value: The tensor, repeated for the lanes without a copy, `[B, *S]`.
    """

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    __bool__ = __eq__ = __ne__ = __hash__ = __repr__ = __format__ = __reduce_ex__ = _declined  # type: ignore[assignment]
    __getattr__ = __iter__ = __len__ = _declined


class Lanes:
    """A tensor `[*S]` of each lane, which is no tensor either.

    Attributes:
        value: The tensors of all lanes, `[B, *S]`.
    """

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __iter__(self) -> Iterator["Lanes"]:
        if self.value.dim() == 1:
            raise Declined
        return map(Lanes, self.value.unbind(1))

    def __len__(self) -> int:
        if self.value.dim() == 1:
            raise Declined
        return self.value.shape[1]

    __bool__ = __eq__ = __ne__ = __hash__ = __repr__ = __format__ = __reduce_ex__ = _declined  # type: ignore[assignment]


NUMBERS = frozenset([bool, int, float, complex])


class _State(threading.local):
    """Attributes:
    careful: Whether to decline what depends on recorded tensors from outside: derivatives inside do not keep track of
        these.
    """

    careful = False


state = _State()


def check_shared(tensor: Tensor) -> None:
    """Decline a tensor of all lanes that is not plain, or that autograd may be asked about later."""
    if type(tensor) not in PLAIN or tensor.layout is not strided or (state.careful and tensor.requires_grad):
        raise Declined


def check_operand(x: Any) -> None:
    """Decline what is no plain tensor."""
    if not isinstance(x, Tensor):
        raise Declined
    check_shared(x)


def has_lanes(things: Iterable[Any]) -> bool:
    """Whether there are lanes among operands, or in lists of them. All others have to be plain."""
    found = False
    for thing in things:
        kind = type(thing)
        if kind is Lanes or kind is Spread:
            found = True
        elif kind is list or kind is tuple:
            found = has_lanes(thing) or found
        elif kind is dict:
            found = has_lanes(thing.values()) or found
        elif isinstance(thing, Tensor):
            check_shared(thing)
    return found


def is_given(thing: Any) -> bool:
    """Whether it is a tensor, of each lane or of all."""
    return type(thing) is Lanes or isinstance(thing, Tensor)


def value_of(x: Any) -> Tensor:
    """[B, *S] of lanes; all else is declined"""
    if type(x) is not Lanes:
        raise Declined
    return x.value


def rank_of(x: Any) -> int:
    """The number of dims in each lane."""
    return x.value.dim() - 1 if type(x) is Lanes else x.dim()


def lane_count(things: Iterable[Any]) -> int:
    """The number of lanes of the first of them that has some."""
    return next(len(thing.value) for thing in things if type(thing) is Lanes)


def expanded(x: Any, count: int) -> Tensor:
    """[B, *S] of lanes, or of what they share"""
    return x.value if type(x) is Lanes else x.expand(count, *x.shape)


def without_tensors(options: Iterable[Any]) -> None:
    """Decline options that are tensors."""
    for option in options:
        if is_given(option) or type(option) is list:
            raise Declined


def aligned(operands: Sequence[Any], promoting: Sequence[Any]) -> list[Any]:
    """Operands that broadcast with their lanes in front as they do in each lane.

    `promoting`: those that the dtype of the result depends on. One without dims is weaker there than one with dims;
    with lanes, both would have some.
    """
    rank = 0
    for x in operands:
        if type(x) is Lanes:
            rank = max(rank, x.value.dim() - 1)
        elif isinstance(x, Tensor):
            rank = max(rank, x.dim())
        elif type(x) not in NUMBERS:
            raise Declined
    dtypes = {(x.value if type(x) is Lanes else x).dtype for x in promoting if is_given(x)}
    if len(dtypes) > 1 and any(is_given(x) and not rank_of(x) for x in promoting):
        raise Declined
    out = []
    for x in operands:
        if type(x) is Lanes:
            x = x.value
            missing = rank + 1 - x.dim()
            if missing:
                x = x.view(x.shape[0], *[1] * missing, *x.shape[1:])
        out.append(x)
    return out


def dim_below(dim: Any, rank: int) -> int:
    """A dim of `[*S]`, with so many dims, as one of `[B, *S]`."""
    if type(dim) is not int or not -rank <= dim < rank:
        raise Declined
    return dim + 1 if dim >= 0 else dim + rank + 1


def dims_below(dims: Any, rank: int) -> list[int]:
    """The same for one dim or several."""
    if type(dims) is int:
        return [dim_below(dims, rank)]
    if type(dims) not in (tuple, list) or not dims:
        raise Declined  # of no dims, some operations take all
    return [dim_below(dim, rank) for dim in dims]


def wrapped(out: Any) -> Any:
    """Lanes of a tensor, or of each in a tuple of any kind."""
    if isinstance(out, Tensor):
        return Lanes(out)
    parts = [Lanes(part) for part in out]
    return tuple(parts) if type(out) in (tuple, list) else type(out)(parts)


# What computes for each function, and for each method by its name, where there are lanes among the operands. They take
# the arguments as given; what they are not sure of they decline.
FUNCTIONS: dict[Any, Callable] = {}
METHODS: dict[str, Callable] = {}
# For modules by their class (layers.py).
LAYERS: dict[type, Any] = {}


def both(names: str, run: Callable[[Callable], Callable]) -> None:
    """`run(call)` computes the functions of torch and the methods of these names, `call` being torch's own."""
    for name in names.split():
        if hasattr(torch, name):
            FUNCTIONS[getattr(torch, name)] = run(getattr(torch, name))
        if hasattr(Tensor, name):
            METHODS[name] = run(getattr(Tensor, name))
