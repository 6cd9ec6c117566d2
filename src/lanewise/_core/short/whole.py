"""Functions of torch that `vmap` maps as they are: `vmap(torch.dot)` is one product of the tensors with their lanes.

There is no code of the user's that would have to see single examples, so no plane opens. What runs are functions of
torch on the plane where the `vmap` is called, which records and maps them like any others.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, strided

from lanewise._core.one_lane import FAILURES
from lanewise._core.plane import Plane
from lanewise._core.short.hot import PLAIN
from lanewise._torch_compat import dispatch_mode_count, function_mode_count, is_any_autocast_enabled, jit_tracing_state
from lanewise._torch_compat import forward_ad as _native

# `run(values, lanes)` for a function: its result with the lanes in dim 0, or None where that is not plain to see.
# `lanes` tells which values have theirs, in dim 0; at least one has.
WHOLE: dict[Any, Callable[[Sequence[Tensor], Sequence[bool]], Tensor | None]] = {}


def whole_pointwise(call: Callable) -> None:
    """`call` of one or two tensors is elementwise."""

    def run(values: Sequence[Tensor], lanes: Sequence[bool]) -> Tensor | None:
        first = values[0]
        for value, has_lanes in zip(values, lanes):
            if not has_lanes or value.dim() != first.dim() or value.dtype is not first.dtype:
                return None
        return call(*values)

    WHOLE[call] = run


def whole_product(function: Callable, forms: dict[tuple, Callable]) -> None:
    """`function` is a product of floating-point numbers, whose forms are as `direct.product_method` takes them."""

    def run(values: Sequence[Tensor], lanes: Sequence[bool]) -> Tensor | None:
        x, y = values
        ranks = x.dim() - lanes[0], y.dim() - lanes[1]
        form = forms.get((lanes[0], ranks[0], lanes[1], ranks[1]))
        if form is None or x.dtype is not y.dtype or not x.is_floating_point():
            return None
        return form(x, y) if x.shape[-1] == y.shape[-min(ranks[1], 2)] else None

    WHOLE[function] = run


def mapped_whole(run: Callable, args: tuple, dims: Sequence[int | None], out_dim: int) -> Tensor | None:
    """The result of `run`, of `WHOLE`, for tensors that have lanes in `dims`; None where that is not plain to see."""
    if (
        dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or _native._current_level >= 0
        or jit_tracing_state() is not None
    ):
        return None
    values, lanes = [], []
    for arg, dim in zip(args, dims):
        kind = type(arg)
        if (kind not in PLAIN and not issubclass(kind, Plane)) or arg.layout is not strided:
            return None
        values.append(arg.movedim(dim, 0) if dim else arg)
        lanes.append(dim is not None)
    try:
        out = run(values, lanes)
        return out.movedim(0, out_dim) if out_dim and out is not None else out
    except FAILURES:
        return None  # The message is of the function that was mapped.
