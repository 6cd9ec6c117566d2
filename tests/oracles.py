"""What results are compared with: a Python loop over lanes, plain torch.autograd per lane, central finite differences.

Nothing here knows of Lanewise. A function under test takes tensors and returns a tensor or a tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

Tensors = tuple[torch.Tensor, ...]
STEP = 1e-3  # of the five-point stencil: error near 1e-12 once, 1e-9 nested twice, for functions of order one
TOLERANCES = {  # dtype -> (relative, absolute)
    torch.float64: (1e-9, 1e-11),
    torch.complex128: (1e-9, 1e-11),
    torch.float32: (2e-5, 2e-6),
    torch.complex64: (2e-5, 2e-6),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
FIRST = (1e-6, 1e-8)  # against differences
SECOND = (1e-4, 1e-6)  # against differences of differences


class Layout(NamedTuple):
    """Where the lanes of each tensor lie (None: not mapped) and how many there are."""

    in_dims: tuple[int | None, ...]
    lanes: int

    def __str__(self) -> str:
        return f"in_dims={self.in_dims} lanes={self.lanes}"


def each_layout(
    lanes: Sequence[Tensors], check: Callable[[Layout], None], most: int | None = None, empty: bool = True
) -> None:
    """Run a check for every layout (at most so many, without lanes only if `empty`); a failure names the layout."""
    for layout in [layout for layout in layouts(lanes[0]) if empty or layout.lanes][:most]:
        try:
            check(layout)
        except Exception as error:
            raise AssertionError(f"{layout}: {type(error).__name__}: {error}") from error


def as_tuple(out: Any) -> Tensors:
    """A result as a tuple of tensors."""
    return (out,) if isinstance(out, torch.Tensor) else tuple(out)


def layouts(lane: Tensors) -> Iterator[Layout]:
    """All in front for 0, 1, 2 and 5 lanes, other positions, each tensor alone, all but the first."""
    front = tuple(0 for _ in lane)
    back = tuple(t.dim() for t in lane)
    yield Layout(front, 2)
    yield Layout(front, 0)
    if any(back):
        yield Layout(back, 2)
    yield Layout(front, 5)
    yield Layout(front, 1)
    if any(back):
        yield Layout(tuple(-1 for _ in lane), 0)
        yield Layout(tuple(min(1, t.dim()) for t in lane), 5)
    if len(lane) > 1:
        for k, tensor in enumerate(lane):
            yield Layout(tuple((tensor.dim() if n == k else None) for n in range(len(lane))), 2)
        if len(lane) > 2:
            yield Layout((None, *front[1:]), 1)


def pack(lanes: Sequence[Tensors], layout: Layout) -> Tensors:
    """The tensors to hand to vmap: lanes stacked along their in_dim, the first lane's where not mapped."""
    packed = []
    for k, dim in enumerate(layout.in_dims):
        first = lanes[0][k]
        if dim is None:
            packed.append(first.clone())
        elif layout.lanes == 0:
            place = dim % (first.dim() + 1)
            packed.append(first.new_empty((*first.shape[:place], 0, *first.shape[place:])))
        else:
            packed.append(torch.stack([lane[k] for lane in lanes[: layout.lanes]]).movedim(0, dim))
    return tuple(packed)


def grid(lanes: Sequence[Tensors], layout: Layout, rows: int) -> list[Tensors]:
    """Lanes for an outer vmap: each is the tensors of an inner one, with other numbers in every row."""
    return [pack([*lanes[i:], *lanes[:i]], layout) for i in range(max(1, rows))]


def loop_vmap(
    f: Callable, in_dims: int | tuple[int | None, ...] = 0, out_dims: int = 0, lane: Tensors | None = None
) -> Callable:
    """vmap as a Python loop. With no lanes the result has the shapes that the given `lane` leads to."""

    def mapped(*args: torch.Tensor) -> Any:
        dims = tuple(in_dims for _ in args) if isinstance(in_dims, int) else in_dims
        pairs = list(zip(args, dims, strict=True))
        size = next(arg.shape[dim] for arg, dim in pairs if dim is not None)
        if size == 0:
            assert lane is not None, "no lanes, and no lane to take shapes from"
            example = [arg if dim is None else _in_place_of(arg, dim, one) for (arg, dim), one in zip(pairs, lane)]
            return _columns([f(*example)], lambda column: _no_lanes(column[0], out_dims))
        rows = [f(*(arg if dim is None else arg.select(dim, i) for arg, dim in pairs)) for i in range(size)]
        return _columns(rows, lambda column: torch.stack(column).movedim(0, out_dims))

    return mapped


def _in_place_of(arg: torch.Tensor, dim: int, lane: torch.Tensor) -> torch.Tensor:
    """A lane for an argument that has none, tied to the argument so that gradients are zeros and not missing."""
    return lane + 0 * arg.sum(dim) if arg.dtype.is_floating_point or arg.dtype.is_complex else lane


def _no_lanes(lane: torch.Tensor, out_dim: int) -> torch.Tensor:
    return lane.expand(1, *lane.shape)[:0].movedim(0, out_dim)


def _columns(rows: list, join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    if isinstance(rows[0], torch.Tensor):
        return join(rows)
    return tuple(_columns(list(column), join) for column in zip(*rows, strict=True))


def floats(out: Any) -> Tensors:
    """The outputs that can carry a derivative."""
    return tuple(t for t in as_tuple(out) if t.dtype.is_floating_point or t.dtype.is_complex)


def weights(like: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of the given tensor's shape and dtype."""
    count = like.numel()
    return (torch.arange(count, dtype=torch.float64) * 0.7 + 0.3).cos().reshape(like.shape).to(like.dtype)


def loss(out: Any) -> torch.Tensor:
    """A weighted sum of all float outputs, real, 0-dim."""
    terms = [inner(weights(t), t) for t in floats(out)]
    return torch.stack([term.to(torch.float64) for term in terms]).sum()


def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The real inner product under which torch's gradients are gradients."""
    return (a.conj() * b).sum().real


def differentiable(args: Tensors) -> tuple[int, ...]:
    """Positions of the float arguments."""
    return tuple(n for n, t in enumerate(args) if t.dtype.is_floating_point or t.dtype.is_complex)


def tracked(args: Tensors) -> Tensors:
    """The arguments as leaves that require grad where they can."""
    return tuple(t.detach().clone().requires_grad_(n in differentiable(args)) for n, t in enumerate(args))


def gradients(value: torch.Tensor, args: Tensors, create_graph: bool = False) -> Tensors:
    """Plain torch.autograd, zeros for what does not matter."""
    leaves = [args[n] for n in differentiable(args)]
    if not value.requires_grad:
        return tuple(torch.zeros_like(t) for t in leaves)
    return torch.autograd.grad(
        value, leaves, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def autograd_grad(f: Callable, create_graph: bool = False) -> Callable[..., Tensors]:
    """Gradients of `loss(f(*args))` in the float arguments, by plain autograd."""

    def g(*args: torch.Tensor) -> Tensors:
        with torch.enable_grad():
            if not create_graph:
                args = tracked(args)
            else:
                args = tuple(
                    (t.view_as(t) if t.requires_grad else t.detach().clone().requires_grad_())
                    if n in differentiable(args)
                    else t
                    for n, t in enumerate(args)
                )
            return gradients(loss(f(*args)), args, create_graph)

    return g


def directions(args: Tensors, seed: int = 7) -> Tensors:
    """A random direction for every float argument."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(args[n].shape, dtype=args[n].dtype, generator=generator) / max(1, args[n].numel()) ** 0.5
        for n in differentiable(args)
    )


def filled(args: Tensors, new: Tensors) -> Tensors:
    """The arguments with the float ones replaced."""
    full = list(args)
    for n, tensor in zip(differentiable(args), new, strict=True):
        full[n] = tensor
    return tuple(full)


def of_floats(f: Callable, args: Tensors) -> tuple[Callable[..., Tensors], Tensors]:
    """The function of the float arguments alone, giving the float outputs, and those arguments."""
    return lambda *new: floats(f(*filled(args, new))), tuple(args[n] for n in differentiable(args))


def moved(args: Tensors, direction: Tensors, step: float) -> Tensors:
    """The arguments, `step` along the direction."""
    return filled(args, tuple(args[n] + step * d for n, d in zip(differentiable(args), direction, strict=True)))


def difference(f: Callable, args: Tensors, direction: Tensors) -> Tensors:
    """The derivative of the float outputs along a direction, by the five-point stencil."""
    near = [floats(f(*moved(args, direction, step))) for step in (STEP, -STEP)]
    far = [floats(f(*moved(args, direction, step))) for step in (2 * STEP, -2 * STEP)]
    return tuple(
        (8 * (a - b) - (c - d)) / (12 * STEP) for a, b, c, d in zip(*near, *far, strict=True)
    )  # fmt: skip


def second_difference(f: Callable, args: Tensors, first: Tensors, second: Tensors) -> Tensors:
    """The second derivative along two directions, by differences of differences."""
    return difference(lambda *xs: difference(f, xs, first), args, second)


def along(gradient: Tensors, direction: Tensors) -> torch.Tensor:
    """The derivative along a direction that a gradient states."""
    terms = [inner(g, d).to(torch.float64) for g, d in zip(gradient, direction, strict=True)]
    return torch.stack(terms).sum()


def assert_same(got: Any, want: Any, tolerance: tuple[float, float] | None = None, grad: bool = False) -> None:
    """Same structure, shapes, dtypes and values up to rounding; `grad` also compares requires_grad."""
    if not isinstance(want, torch.Tensor):
        assert not isinstance(got, torch.Tensor), f"a tensor instead of {type(want).__name__}"
        assert len(got) == len(want), f"{len(got)} results instead of {len(want)}"
        for a, b in zip(got, want, strict=True):
            assert_same(a, b, tolerance, grad)
        return
    assert type(got) is torch.Tensor, f"{type(got)} came out"
    assert got.dtype == want.dtype, f"{got.dtype} instead of {want.dtype}"
    assert got.shape == want.shape, f"{list(got.shape)} instead of {list(want.shape)}"
    if grad:
        assert got.requires_grad == want.requires_grad, f"requires_grad is {got.requires_grad}"
    rtol, atol = tolerance or TOLERANCES.get(want.dtype, (0.0, 0.0))
    torch.testing.assert_close(got.detach(), want.detach(), rtol=rtol, atol=atol, equal_nan=True)
