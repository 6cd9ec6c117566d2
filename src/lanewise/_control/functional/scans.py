"""Loops over the first dim of tensors: `scan`, `map`, `associative_scan`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.functional.checks import check_functions
from lanewise._control.runs.results import as_tensor
from lanewise._core.trees import flatten, unflatten
from lanewise._transforms.vmap import vmap
from lanewise.errors import ArgumentError, at_user_line, shows_user_frames


@shows_user_frames
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Carry a state along the first dim of `xs`, and stack what each step puts out.

    Args:
        f: `(carry, x)` -> `(carry, y)`.
        init: The first carry.
        xs: Any structure of tensors `[N, ...]`, or None to run `length` steps with `x` None.
        length: The number of steps, where `xs` does not say it.
        reverse: Go from the last to the first; `ys` stay in the order of `xs`.

    Returns:
        `(carry, ys)`: the last carry, and every y stacked, `[N, ...]`.

    Raises:
        ArgumentError: The tensors of `xs` differ in their first dim, or the number of steps is unknown.

    Example:
        >>> import torch
        >>> from lanewise import scan
        >>> scan(lambda c, x: (c + x, c * x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
        (tensor(6.), tensor([0., 2., 9.]))
    """
    check_functions("scan", f=f)
    leaves, spec = ([], None) if xs is None else flatten(xs)
    steps = _steps("scan(f, init, xs)", leaves, length)
    carry, rows, out_spec = init, [], None
    # All at once: the backward pass of one row fills the others with zeros, which would take steps squared.
    items = list(zip(*[leaf.unbind(0) for leaf in leaves])) if leaves else [()] * steps
    for item in reversed(items) if reverse else items:
        carry, y = f(carry, None if spec is None else unflatten(list(item), spec))
        columns, out_spec = flatten(y)
        rows.append(columns)
    if out_spec is None:
        return carry, _no_rows(f, init, leaves, spec)
    if reverse:
        rows.reverse()
    ys = [None if column[0] is None else torch.stack([as_tensor(y) for y in column]) for column in zip(*rows)]
    return carry, unflatten(ys, out_spec)


def _no_rows(f: Callable, init: Any, leaves: list, spec: Any) -> Any:
    """The ys of no steps `[0, ...]`: their shapes are those of a step on zeros."""
    blank = None if spec is None else unflatten([leaf.new_zeros(leaf.shape[1:]) for leaf in leaves], spec)
    columns, out_spec = flatten(f(init, blank)[1])
    return unflatten([None if y is None else as_tensor(y).unsqueeze(0)[:0] for y in columns], out_spec)


def _steps(call: str, leaves: list, length: int | None) -> int:
    name = call.partition("(")[0]
    sizes = [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
    if None in sizes or any(size != sizes[0] for size in sizes) or (not sizes and length is None):
        shapes = [list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
        raise ArgumentError(
            at_user_line(
                f"{name}: xs are tensors with one first dim, that of the steps; they are {shapes}"
                + (f", length={length}" if name == "scan" else ""),
                f"{call}  # xs [N, ...]" + ("\nscan(f, init, None, length=10)" if name == "scan" else ""),
            )
        )
    if sizes and length is not None and sizes[0] != length:
        raise ArgumentError(at_user_line(f"{name}: length={length}, but xs have {sizes[0]} steps", call))
    return length if not sizes else sizes[0]  # type: ignore[return-value]


@shows_user_frames
def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """Call `f` for each item of the first dim, one after the other, and stack the results.

    Args:
        f: A function of one item.
        xs: Any structure of tensors `[N, ...]`.
        batch_size: Run so many items at once, as `vmap` with this `chunk_size` does. None: one.

    Returns:
        The results stacked, `[N, ...]`.

    Raises:
        ArgumentError: The tensors of `xs` differ in their first dim.

    Example:
        >>> import torch
        >>> import lanewise
        >>> lanewise.map(torch.sum, torch.ones(2, 3))
        tensor([3., 3.])
    """
    check_functions("map", f=f)
    if batch_size is not None:
        return vmap(f, chunk_size=batch_size)(xs)
    _steps("map(f, xs)", flatten(xs)[0], None)
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


@shows_user_frames
def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """All partial results of an associative operation along a dim, in a number of steps that grows as the logarithm.

    Args:
        fn: `(a, b)` -> their combination, associative, for structures of tensors with any length along `axis`.
        elems: Any structure of tensors, of one length N along `axis`.
        reverse: Combine from the last to the first.
        axis: The dim.

    Returns:
        As `elems`: at place i the combination of the elements 0 ... i.

    Raises:
        ArgumentError: The lengths along `axis` differ.

    Example:
        >>> import torch
        >>> from lanewise import associative_scan
        >>> associative_scan(torch.mul, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([ 1.,  2.,  6., 24.])

    The recursion on pairs is that of Blelloch, "Prefix sums and their applications", 1990.
    """
    check_functions("associative_scan", fn=fn)
    leaves, spec = flatten(elems)
    if not all(isinstance(leaf, Tensor) and -leaf.dim() <= axis < leaf.dim() for leaf in leaves):
        found = [list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
        raise ArgumentError(
            at_user_line(
                f"associative_scan: elems are tensors with a dim {axis}; they are {found}",
                "associative_scan(fn, elems, axis=0)  # elems [N, ...]",
            )
        )
    lengths = {leaf.shape[axis] for leaf in leaves}
    if len(lengths) != 1:
        raise ArgumentError(
            at_user_line(
                f"associative_scan: lengths along axis {axis} differ: {[list(leaf.shape) for leaf in leaves]}",
                "associative_scan(fn, elems, axis=...)",
            )
        )
    rows = [leaf.movedim(axis, 0) for leaf in leaves]
    rows = [row.flip(0) for row in rows] if reverse else rows

    def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        moved = [unflatten([row.movedim(0, axis) for row in part], spec) for part in (a, b)]
        return [leaf.movedim(axis, 0) for leaf in flatten(fn(*moved))[0]]

    rows = _prefixes(combine, rows)
    rows = [row.flip(0) for row in rows] if reverse else rows
    return unflatten([row.movedim(0, axis) for row in rows], spec)


def _prefixes(combine: Callable, rows: list[Tensor]) -> list[Tensor]:
    """rows [N, ...] -> their prefixes: those of pairs are every second one, and give the others in one step."""
    length = rows[0].shape[0]
    if length < 2:
        return rows
    odd = _prefixes(combine, combine([row[: length - 1 : 2] for row in rows], [row[1::2] for row in rows]))
    even = combine([row[: (length - 1) // 2] for row in odd], [row[2::2] for row in rows])
    even = [torch.cat([row[:1], rest]) for row, rest in zip(rows, even)]
    out = []
    for a, b in zip(even, odd):
        paired = torch.stack([a[: b.shape[0]], b], 1).flatten(0, 1)
        out.append(torch.cat([paired, a[b.shape[0] :]]) if a.shape[0] > b.shape[0] else paired)
    return out
