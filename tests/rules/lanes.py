"""One function of one example against a Python loop.

Every subset of mapped arguments, every place of the lanes, nested, and with gradients taken inside and outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from lanewise import vmap
from tests.oracles import Layout, as_tuple, assert_same, loop_vmap, pack

Maker = Callable[[torch.Generator], torch.Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Maker:
    return lambda g: torch.randn(shape, generator=g, dtype=dtype)


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Maker:
    return lambda g: torch.randint(low, high, shape, generator=g).to(dtype)


def bools(*shape: int) -> Maker:
    return lambda g: torch.rand(shape, generator=g) < 0.5


def distinct(high: int, n: int) -> Maker:
    """n different whole numbers below `high`."""
    return lambda g: torch.randperm(high, generator=g)[:n]


def draw(makers: tuple[Maker, ...], count: int = 6) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(make(generator) for make in makers) for _ in range(count)]


def every_layout(lane: tuple[torch.Tensor, ...]) -> Iterator[Layout]:
    """Each subset mapped in front and at the end, and all mapped with 0, 1 and 5 lanes and each place of the first."""
    for subset in itertools.product((True, False), repeat=len(lane)):
        if any(subset):
            yield Layout(tuple(0 if on else None for on in subset), 2)
            yield Layout(tuple(t.dim() if on else None for t, on in zip(lane, subset, strict=True)), 2)
    front = tuple(0 for _ in lane)
    for lanes in (0, 1, 5):
        yield Layout(front, lanes)
    for place in range(1, lane[0].dim()):
        yield Layout((place, *front[1:]), 2)
    yield Layout(tuple(t.dim() for t in lane), 0)


def check(
    f: Callable,
    *makers: Maker,
    grad: bool = True,
    nested: bool = True,
    empty: bool = True,
    fixed: tuple[int, ...] = (),
) -> None:
    """Values (and gradients of float arguments that are not `fixed`) of `f` under vmap as in a loop.

    `empty`: also with no lanes; `nested`: also two deep.
    """
    lanes = draw(makers)
    for layout in every_layout(lanes[0]):
        if not layout.lanes and not empty:
            continue
        try:
            _values(f, lanes, layout)
            if grad and layout.lanes:
                _outside(f, lanes, layout, fixed)
                _inside(f, lanes, layout, fixed)
        except Exception as error:
            raise AssertionError(f"{layout}: {type(error).__name__}: {error}") from error
    if nested:
        for which in itertools.islice(itertools.product("bio", repeat=len(makers)), 27):
            if ("b" in which) or ("i" in which and "o" in which):
                try:
                    _nested(f, lanes, "".join(which), grad, fixed)
                except Exception as error:
                    raise AssertionError(f"nested {which}: {type(error).__name__}: {error}") from error


def _values(f, lanes, layout):
    want = loop_vmap(f, layout.in_dims, lane=lanes[0])(*pack(lanes, layout))
    assert_same(vmap(f, in_dims=layout.in_dims)(*pack(lanes, layout)), want)


def _is_float(t):
    return t.dtype.is_floating_point or t.dtype.is_complex


def _loss(out):
    """A weighted sum that weighs lane by lane alike, so that it may be taken inside or outside."""
    total = torch.zeros((), dtype=torch.float64)
    for t in as_tuple(out):
        if _is_float(t) and t.requires_grad:
            weight = torch.linspace(0.3, 1.7, t.numel(), dtype=torch.float64).reshape(t.shape)
            total = total + ((t * t.conj()).real * weight).sum() + (t.real * weight.cos()).sum()
    return total


def _gradients(f, args, fixed, leaf=lambda t: t.detach().clone().requires_grad_()):
    on = [_is_float(a) and k not in fixed for k, a in enumerate(args)]
    leaves = [leaf(a) if yes else a for a, yes in zip(args, on, strict=True)]
    wanted = [a for a, yes in zip(leaves, on, strict=True) if yes]
    total = _loss(f(*leaves))
    if not wanted or not total.requires_grad:
        return ()
    return torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)


def _outside(f, lanes, layout, fixed):
    got = _gradients(vmap(f, in_dims=layout.in_dims), pack(lanes, layout), fixed)
    want = _gradients(loop_vmap(f, layout.in_dims, lane=lanes[0]), pack(lanes, layout), fixed)
    assert_same(got, want)


def _inside(f, lanes, layout, fixed):
    if not _gradients(f, lanes[0], fixed):
        return

    def inner(*args):
        with torch.enable_grad():
            return _gradients(f, args, fixed, lambda t: t.view_as(t).requires_grad_())

    want = loop_vmap(inner, layout.in_dims)(*pack(lanes, layout))
    assert_same(vmap(inner, in_dims=layout.in_dims)(*pack(lanes, layout)), want)


def _nested(f, lanes, which, grad, fixed):
    """Outer 3 lanes, inner 2: each argument mapped by both (b), the inner alone (i) or the outer alone (o)."""
    args = []
    for k, kind in enumerate(which):
        grid = torch.stack([torch.stack([lanes[2 * i + j][k] for j in range(2)]) for i in range(3)])
        args.append(grid if kind == "b" else grid[0] if kind == "i" else grid[:, 0])
    inner = tuple(None if kind == "o" else 0 for kind in which)
    outer = tuple(None if kind == "i" else 0 for kind in which)

    def run(mapper):
        inside = mapper(f, in_dims=inner) if "b" in which or "i" in which else f
        return mapper(inside, in_dims=outer)

    assert_same(run(vmap)(*args), run(loop_vmap)(*args))
    if grad:
        assert_same(_gradients(run(vmap), args, fixed), _gradients(run(loop_vmap), args, fixed))
