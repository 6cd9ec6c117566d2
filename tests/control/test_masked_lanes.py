"""Masks wherever the lanes are: other dims, chunks, names, defaults, and pairs of lanes of two `vmap`s."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lanewise import grad, value_and_grad, vmap
from lanewise._core.parting.lanes import machine
from tests.control.cheap_programs import program

D = torch.float64
XS = torch.tensor([0.5, -1.5, 2.5, 0.0, -0.25, 1.0, -1.0, 3.0], dtype=D)
YS = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.75, -0.5, 1.5, 0.25], dtype=D)
ROWS = torch.stack([XS, YS, XS - YS, XS * YS], 1)
COLUMNS = ROWS.T.contiguous()
BLOCK = torch.stack([ROWS, ROWS.flip(0) + 0.5, 1 - ROWS])


def pixel(re: Tensor, im: Tensor) -> Tensor:
    zr, zi = torch.zeros_like(re), torch.zeros_like(im)
    steps = torch.zeros(())
    for _ in range(20):
        if zr * zr + zi * zi > 4:
            break
        zr, zi = zr * zr - zi * zi + re, 2 * zr * zi + im
        steps = steps + 1
    return steps + zr


def root(a: Tensor, start: Any = 1.5, tol: float = 1e-8) -> Tensor:
    """Of 1 + a squared, by Newton's method."""
    x = start * torch.ones_like(a)
    while (x * x - 1 - a * a).abs() > tol:
        x = 0.5 * (x + (1 + a * a) / x)
    return x


def first(v: Tensor, least: Any = 0.25) -> Tensor:
    return v * v[0] if v[0] > least else v - v.sum()


def two(v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if x > 0:
        return v + x, x
    return v * x, v.max()


def quietly(mapped: Callable, *args: Any, **kwargs: Any) -> Any:
    """The result of a call in which no lanes part, after one in which they may."""
    mapped(*args, **kwargs)
    before = machine.partings
    out = mapped(*args, **kwargs)
    assert machine.partings == before
    return out


def table(f: Callable, *sides: Tensor) -> Tensor:
    """The results for all pairs of rows of two."""
    return torch.stack([torch.stack([f(a, b) for b in sides[1]]) for a in sides[0]])


def test_a_vmap_around_that_maps_nothing() -> None:
    want = torch.stack([first(row) for row in ROWS]).expand(2, *ROWS.shape)
    for _ in range(4):
        torch.testing.assert_close(vmap(vmap(first), in_dims=None, axis_size=2)(ROWS), want)


def test_dims() -> None:
    want = torch.stack([first(row) for row in ROWS])
    torch.testing.assert_close(quietly(vmap(first, in_dims=1), COLUMNS), want)
    torch.testing.assert_close(quietly(vmap(first, in_dims=-1), COLUMNS), want)
    torch.testing.assert_close(quietly(vmap(first, in_dims=(1,), out_dims=1), COLUMNS), want.T)
    torch.testing.assert_close(quietly(vmap(first, out_dims=-1), ROWS), want.T)
    torch.testing.assert_close(quietly(vmap(first, in_dims={"v": 1}), COLUMNS), want)
    mixed = [two(v, x) for v, x in zip(ROWS, XS.abs() + 0.5)]
    got = quietly(vmap(two, (1, 0), (1, 0)), COLUMNS, XS.abs() + 0.5)
    torch.testing.assert_close(got, (torch.stack([a for a, _ in mixed], 1), torch.stack([b for _, b in mixed])))


def test_names_and_defaults() -> None:
    for start, tol in ((1.5, 1e-8), (2.0, 1e-8), (2.0, 1e-3)):
        want = torch.stack([root(x, start, tol) for x in XS])
        torch.testing.assert_close(quietly(vmap(root, (0, None, None)), XS, start, tol), want)
        torch.testing.assert_close(quietly(vmap(root, in_dims={"a": 0}), XS, tol=tol, start=start), want)
        if tol == 1e-8:
            torch.testing.assert_close(quietly(vmap(root, (0, None)), XS, start), want)
        if start == 1.5:
            torch.testing.assert_close(quietly(vmap(root), XS), want)
    starts = YS.abs() + 1
    want = torch.stack([root(x, start=start) for x, start in zip(XS, starts)])
    torch.testing.assert_close(quietly(vmap(root, in_dims={"start": 0, "a": 0}), XS, start=starts), want)
    torch.testing.assert_close(quietly(vmap(root, in_dims={"start": 0, "a": 0}), start=starts, a=XS), want)
    leaf = XS.clone().requires_grad_()
    (want,) = torch.autograd.grad(torch.stack([root(x, tol=1e-4) for x in leaf]).sum(), leaf)
    torch.testing.assert_close(
        torch.autograd.grad(quietly(vmap(root, in_dims={"a": 0}), leaf, tol=1e-4).sum(), leaf)[0], want
    )
    torch.testing.assert_close(quietly(vmap(grad(root), in_dims={"a": 0}), XS, tol=1e-4), want)
    for mapped, args in ((vmap(root, (0, None, None, None)), (XS, 1.0, 1.0, 1.0)), (vmap(two), (ROWS,))):
        for _ in range(2):
            with pytest.raises(TypeError, match="positional argument"):
                mapped(*args)
    with pytest.raises(TypeError, match="unexpected keyword"):
        vmap(root)(XS, other=2)


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_chunks(size: int) -> None:
    torch.testing.assert_close(quietly(vmap(root, chunk_size=size), XS), torch.stack([root(x) for x in XS]))
    want = torch.stack([first(row) for row in ROWS])
    torch.testing.assert_close(quietly(vmap(first, in_dims=1, out_dims=1, chunk_size=size), COLUMNS), want.T)
    got = quietly(vmap(grad(root), chunk_size=size), XS)
    torch.testing.assert_close(got, XS / (1 + XS * XS).sqrt())


def test_pairs_of_lanes() -> None:
    re, im = XS / 2, YS
    want = table(pixel, re, im)
    torch.testing.assert_close(quietly(vmap(vmap(pixel, (None, 0)), (0, None)), re, im), want)
    torch.testing.assert_close(quietly(vmap(vmap(pixel, (0, None)), (None, 0)), re, im), want.T)
    torch.testing.assert_close(quietly(vmap(vmap(pixel, (0, None)), (None, 0), out_dims=1), re, im), want)
    torch.testing.assert_close(
        quietly(vmap(vmap(pixel, (0, None), out_dims=-1), (None, 0), chunk_size=3), re, im), want.T
    )
    torch.testing.assert_close(quietly(vmap(vmap(pixel)), *torch.meshgrid(re, im, indexing="ij")), want)
    cube = torch.stack([torch.stack([torch.stack([root(x) for x in row]) for row in rows]) for rows in BLOCK])
    torch.testing.assert_close(quietly(vmap(vmap(vmap(root))), BLOCK), cube)
    torch.testing.assert_close(quietly(vmap(vmap(vmap(root), 1), -1), BLOCK), cube.permute(2, 1, 0))
    vectors = torch.stack([torch.stack([first(v) for v in rows]) for rows in BLOCK])
    torch.testing.assert_close(quietly(vmap(vmap(first)), BLOCK), vectors)
    torch.testing.assert_close(
        quietly(vmap(vmap(first, 0, 1), 1, 2), BLOCK),
        torch.stack([torch.stack([first(v) for v in rows], 1) for rows in BLOCK.movedim(1, 0)], 2),
    )
    pairs = [[two(v, x) for x in XS[2:4]] for v in ROWS]
    wants = tuple([torch.stack([torch.stack([pair[i] for pair in row]) for row in pairs]) for i in range(2)])
    torch.testing.assert_close(quietly(vmap(vmap(two, (None, 0)), (0, None)), ROWS, XS[2:4]), wants)


def test_derivatives_of_pairs() -> None:
    xs, ys = XS / 4 + 0.05, YS / 3
    leaves = [xs.clone().requires_grad_(), ys.clone().requires_grad_()]
    weights = torch.linspace(1.0, 2.0, 64, dtype=D).view(8, 8)
    wants = torch.autograd.grad((table(pixel, *leaves) * weights).sum(), leaves)
    mapped = vmap(vmap(pixel, (None, 0)), (0, None))
    out = quietly(mapped, *leaves)
    torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), leaves), wants)
    got = grad(lambda *args: (mapped(*args) * weights).sum(), (0, 1))(xs, ys)
    torch.testing.assert_close(got, wants)
    got, values = quietly(vmap(vmap(value_and_grad(pixel), (None, 0)), (0, None), out_dims=(1, 1)), xs, ys)
    single = [[torch.autograd.grad(pixel(x := a.clone().requires_grad_(), b), x)[0] for b in ys] for a in xs]
    torch.testing.assert_close(values, torch.stack([torch.stack(row) for row in single], 1))
    torch.testing.assert_close(got, table(pixel, xs, ys).T)


def test_errors_are_those_of_lanes_that_part() -> None:
    mapped = vmap(vmap(pixel))
    mapped(BLOCK[0], BLOCK[1])
    for _ in range(2):
        with pytest.raises(ValueError, match="size"):
            mapped(BLOCK[0], BLOCK[1, :, :2])
        with pytest.raises(IndexError, match="out of range"):
            vmap(root, out_dims=3)(XS)
        with pytest.raises(ValueError, match="out_dims"):
            vmap(root, out_dims=(0, 0))(XS)


# --- random programs -------------------------------------------------------------------------------------------------


VARIANTS: dict[str, Callable] = {
    "last": lambda f, x, y: vmap(f, (-1, 0))(x.movedim(0, -1), y),
    "out last": lambda f, x, y: vmap(f, out_dims=-1)(x, y).movedim(-1, 0),
    "chunks": lambda f, x, y: vmap(f, chunk_size=3)(x, y),
    "names": lambda f, x, y: vmap(f, in_dims={"x": 0, "y": 0})(y=y, x=x),
    "pairs": lambda f, x, y: vmap(vmap(f))(x.unflatten(0, (2, 4)), y.unflatten(0, (2, 4))).flatten(0, 1),
    "pairs in chunks": lambda f, x, y: vmap(vmap(f), chunk_size=1)(
        x.unflatten(0, (2, 4)), y.unflatten(0, (2, 4))
    ).flatten(0, 1),
    "crossed": lambda f, x, y: vmap(vmap(f), 1, 1)(x.unflatten(0, (2, 4)), y.unflatten(0, (2, 4))).flatten(0, 1),
}


@pytest.mark.parametrize("wide", [False, True], ids=["numbers", "vectors"])
def test_random_programs(wide: bool) -> None:
    xs = ROWS[:, :3] if wide else XS
    served = 0
    for seed in range(100):
        f, text = program(seed, wide)
        try:
            leaves = [xs.clone().requires_grad_(), YS.clone().requires_grad_()]
            results = [f(*row) for row in zip(*leaves)]
        except (TypeError, AttributeError):
            continue  # it asks a Python number for a method of tensors
        if not any(isinstance(result, Tensor) for result in results):
            continue
        want = torch.stack([torch.as_tensor(result, dtype=D) for result in results])
        name = random.Random(seed).choice([*VARIANTS])
        call = VARIANTS[name]
        call(f, xs, YS)
        before = machine.partings
        got = call(f, xs, YS)
        served += machine.partings == before
        torch.testing.assert_close(got.to(D), want.detach(), equal_nan=True, msg=f"{name}\n{text}")
        if not want.requires_grad:
            continue
        weights = torch.linspace(1.0, 2.0, want.numel(), dtype=D).reshape(want.shape)
        wants = torch.autograd.grad((want * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        if all(each.abs().max() < 1e6 for each in wants):
            grads = torch.autograd.grad(
                (call(f, *leaves) * weights).sum(), leaves, allow_unused=True, materialize_grads=True
            )
            torch.testing.assert_close(grads, wants, msg=f"{name}\n{text}")
    assert served > 65


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_pairs_of_lanes_of_nothing(shape):
    def f(x, y):
        return x * y.item() if y > 0 else x - 1

    images, numbers = torch.zeros(2, 3, *shape), torch.arange(-2.0, 4.0).reshape(2, 3)
    assert vmap(vmap(f))(images, numbers).shape == images.shape
    assert vmap(vmap(f, (0, None)), (None, 0))(images[0], numbers[0]).shape == (3, 3, *shape)
