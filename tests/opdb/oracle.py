"""Lanes of data, the loop over them, and what a transform is held to: values and derivatives of each lane.

Values of the oracle come from calling the op once per lane; gradients from `torch.autograd.grad` per lane; tangents
from differentiating the lane's vector-Jacobian product in its cotangent (central differences where torch cannot).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .samples import LaneSample

Tensors = tuple[torch.Tensor, ...]
_TOLERANCES = {  # dtype of the result -> (relative, absolute)
    torch.float64: (1e-7, 1e-9),
    torch.complex128: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (2e-2, 2e-3),
    torch.bfloat16: (5e-2, 2e-2),
}
STEP = 1e-6


class Mismatch(Exception):
    """A result that differs from the oracle's. `size` is the largest difference, infinite where that says nothing."""

    def __init__(self, text: str, size: float = float("inf")):
        super().__init__(text)
        self.size = size


class NoOracle(Exception):
    """Plain torch cannot do this either, so there is nothing to compare with."""


@dataclass(frozen=True)
class Layout:
    """Where the lanes of each tensor lie (None: not mapped) and how many there are."""

    in_dims: tuple[int | None, ...]
    lanes: int


def layouts(lane: Tensors, full: bool = True) -> Iterator[Layout]:
    """All tensors mapped in front (3, 1 and no lanes) and at the end, then each alone."""
    front = tuple(0 for _ in lane)
    back = tuple(t.dim() for t in lane)
    yield Layout(front, 3)
    yield Layout(back, 2)
    if len(lane) > 1:
        for k, tensor in enumerate(lane[:3]):
            yield Layout(tuple((min(1, tensor.dim()) if n == k else None) for n in range(len(lane))), 2)
    if full:
        yield Layout(front, 1)
        yield Layout(back, 0)


def pack(values: list[Tensors], layout: Layout) -> Tensors:
    """The tensors to hand to the transform: lanes stacked along their in_dim."""
    packed = []
    for k, dim in enumerate(layout.in_dims):
        if dim is None:
            packed.append(values[0][k].clone())
        elif layout.lanes == 0:
            first = values[0][k]
            packed.append(first.new_empty((*first.shape[:dim], 0, *first.shape[dim:])))
        else:
            packed.append(torch.stack([v[k] for v in values[: layout.lanes]]).movedim(0, dim))
    return tuple(packed)


def lane(values: list[Tensors], layout: Layout, index: int) -> Tensors:
    """What one lane sees."""
    return tuple(values[0 if dim is None else index][k].clone() for k, dim in enumerate(layout.in_dims))


def unseen(f: Callable, computed: tuple[int, ...] = ()) -> Callable:
    """`f` as a function that nothing is known of yet, and that makes tensors which are the same in all lanes.

    So many that it is worth while to run it otherwise in later calls (lanewise/_core/short/shared.py). The arguments at
    `computed` are such, too: they reach `f` as clones.
    """

    def run(*args: torch.Tensor) -> Tensors:
        for _ in range(8):
            torch.ones(())
        return f(*(t.clone() if n in computed else t for n, t in enumerate(args)))

    run.__code__ = run.__code__.replace(co_name=f"run_{next(_numbers)}")
    return run


_numbers = itertools.count()
# The first call, the next, which knows what the first has shown, and one that begins where that has led.
CALLS = 3


def in_each_call(run: Callable[[], Any], judge: Callable[[Any], float], calls: int = CALLS) -> float:
    """The largest difference that `judge` finds in the results of several calls."""
    worst = 0.0
    for call in range(calls):
        later = f", in call {call + 1}" if call else ""
        try:
            got = run()
        except Exception as error:
            error.args = (f"{error}{later}", *error.args[1:])
            raise
        try:
            worst = max(worst, judge(got))
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch}{later}", mismatch.size) from None
    return worst


def stack(results: list[Tensors], lanes: int) -> Tensors:
    """The loop's results as one tensor per output; with no lanes, only shape and dtype count."""
    if lanes == 0:
        return tuple(t.new_empty((0, *t.shape)) for t in results[0])
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


def compare(got, want: Tensors, what: str, values: bool = True) -> float:
    """The largest difference, or Mismatch."""
    worst = 0.0
    if len(got) != len(want):
        raise Mismatch(f"{what}: {len(got)} results instead of {len(want)}")
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        label = f"{what}[{n}]"
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Mismatch(f"{label}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        check_plain(a, b, label)
        if not values or not b.numel():
            continue
        rtol, atol = _TOLERANCES.get(b.dtype, (0, 0))
        a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
        if b.dtype.is_floating_point and b.dtype.itemsize == 1:
            a, b = a.float(), b.float()  # torch subtracts no float8
        if b.dtype.is_floating_point or b.dtype.is_complex:
            both_nan = a.isnan() & b.isnan()
            difference = torch.nan_to_num((a - b).abs().double(), nan=float("inf")).masked_fill(both_nan | (a == b), 0)
        else:
            difference = (a.to(torch.float64) - b.to(torch.float64)).abs()
        size = difference.max().item()
        worst = max(worst, size)
        if not torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            raise Mismatch(f"{label}: differs by {size:.3g} (largest value {b.abs().max().item():.3g})", size)
    return worst


def check_plain(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    """Nobody outside is to see what the result was computed with."""
    if type(got) is not type(want) or got._is_zerotensor() or got.requires_grad != want.requires_grad:
        kind = f"{type(got).__name__}, requires_grad={got.requires_grad}, without memory={got._is_zerotensor()}"
        raise Mismatch(f"{label}: {kind} instead of {type(want).__name__}, requires_grad={want.requires_grad}")


def floats(out: Tensors) -> Tensors:
    return tuple(t for t in out if t.dtype.is_floating_point or t.dtype.is_complex)


def _weights(out: torch.Tensor, shape) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).cos() + 0.5).reshape(shape).to(out.dtype)


def loss(out: Tensors, lead: int = 0) -> torch.Tensor:
    """A weighted sum of all float outputs; weights are the same in all lanes, which fill the first `lead` dims."""
    terms = [(t * _weights(t, t.shape[lead:])).sum() for t in floats(out)]
    return sum((term.real for term in terms), torch.zeros((), dtype=torch.float64))


def lane_grad(f: Callable, args: Tensors, diff: tuple[int, ...]) -> Tensors:
    """Gradients of `loss(f(*args))` by plain autograd."""
    args = tuple(t.requires_grad_() if n in diff else t for n, t in enumerate(args))
    value = loss(f(*args))
    if not value.requires_grad:
        raise NoOracle("not differentiable")
    return torch.autograd.grad(value, [args[n] for n in diff], allow_unused=True, materialize_grads=True)


def filled(args: Tensors, diff: tuple[int, ...], new: Tensors) -> Tensors:
    full = list(args)
    for n, tensor in zip(diff, new, strict=True):
        full[n] = tensor
    return tuple(full)


def lane_jvp(f: Callable, args: Tensors, diff: tuple[int, ...], tangents: Tensors) -> Tensors:
    """Tangents of the float outputs: the derivative of the vjp in its cotangent, else central differences."""
    primals = [args[n].requires_grad_() for n in diff]
    out = floats(f(*filled(args, diff, tuple(primals))))
    tracked = [t for t in out if t.requires_grad]
    if not tracked:
        raise NoOracle("not differentiable")
    try:
        if any(t.dtype.is_complex for t in (*primals, *tracked)):
            raise RuntimeError("conjugates")
        cotangents = [torch.zeros_like(t, requires_grad=True) for t in tracked]
        grads = torch.autograd.grad(
            tracked, primals, cotangents, create_graph=True, allow_unused=True, materialize_grads=True
        )
        if not any(g.requires_grad for g in grads):
            return tuple(torch.zeros_like(t) for t in out)
        found = iter(torch.autograd.grad(grads, cotangents, tangents, allow_unused=True, materialize_grads=True))
    except (RuntimeError, NotImplementedError):
        return central_difference(f, args, diff, tangents)
    return tuple(next(found) if t.requires_grad else torch.zeros_like(t) for t in out)


def central_difference(f: Callable, args: Tensors, diff: tuple[int, ...], tangents: Tensors) -> Tensors:
    """Tangents of the float outputs by (f(x + ht) - f(x - ht)) / 2h."""
    primals = [args[n].detach() for n in diff]
    ends = []
    for step in (STEP, -STEP):
        moved = tuple(p + step * t for p, t in zip(primals, tangents, strict=True))
        ends.append(floats(f(*(t.detach() for t in filled(args, diff, moved)))))
    if any(t.dtype not in (torch.float64, torch.complex128) for t in ends[0]):
        raise NoOracle("differences need double precision")
    return tuple((a - b) / (2 * STEP) for a, b in zip(*ends, strict=True))


def directions_of(sample: LaneSample) -> list[Tensors]:
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randn(lane[n].shape, dtype=lane[n].dtype, generator=generator) for n in sample.diff)
        for lane in sample.lanes
    ]


def loop_over(each: Callable[[int], Tensors], layout: Layout) -> Tensors:
    """Oracle: `each` on every lane, stacked."""
    try:
        results = [each(i) for i in range(max(1, layout.lanes))]
    except NoOracle:
        raise
    except Exception as error:
        raise NoOracle(f"{type(error).__name__}: {error}") from error
    try:
        return stack(results, layout.lanes)
    except RuntimeError as error:
        raise NoOracle("results of different shapes in different lanes") from error


def wants_grad(sample: LaneSample) -> None:
    if not sample.diff:
        raise NoOracle("no differentiable argument")
