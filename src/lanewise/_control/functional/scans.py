"""Loops over the first dim of tensors: `scan`, `map`, `associative_scan`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise._control.functional.checks import check_count, check_functions, check_state, in_words
from lanewise._control.runs.results import as_tensor
from lanewise._core.trees import flatten, unflatten
from lanewise._transforms.chunks import check_chunk_size
from lanewise._transforms.vmap import vmap
from lanewise.errors import ArgumentError, TransformError, at_user_line, shows_user_frames


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
        TypeError: `f` returns no pair, or `length` is no whole number.
        TransformError: The ys differ in structure or shape, or are no tensors.

    Example:
        >>> import torch
        >>> from lanewise import scan
        >>> scan(lambda c, x: (c + x, c * x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
        (tensor(6.), tensor([0., 2., 9.]))
    """
    check_functions("scan", f=f)
    if length is not None:
        check_count("scan: length", length, "scan(f, init, None, length=10)")
    leaves, spec = ([], None) if xs is None else flatten(xs)
    steps = _steps("scan(f, init, xs)", leaves, length)
    carry, rows = init, []
    # All at once: the backward pass of one row fills the others with zeros, which would take steps squared.
    items = list(zip(*[leaf.unbind(0) for leaf in leaves])) if leaves else [()] * steps
    try:
        for item in reversed(items) if reverse else items:
            carry, y = _pair(f(carry, None if spec is None else unflatten(list(item), spec)))
            rows.append(y)
    except Exception as error:
        check_state("scan", "f", init, carry, error)
        raise
    if not rows:
        return carry, _no_rows(f, init, leaves, spec)
    if reverse:
        rows.reverse()
    return carry, _stacked("scan", "f(carry, x)[1]", rows)


def _pair(out: Any) -> Any:
    """The carry and the y that a step returns."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(
            at_user_line(
                f"scan: f must return a pair, the next carry and y, got {in_words(out)}",
                "scan(lambda carry, x: (carry + x, None), init, xs)  # None: nothing to stack",
            )
        )
    return out


def _stacked(operator: str, call: str, rows: list) -> Any:
    """What the steps give, stacked. `call`: what gives it."""
    columns, specs = zip(*[flatten(row) for row in rows])
    for place, spec in enumerate(specs):
        if spec != specs[0]:
            raise TransformError(
                at_user_line(
                    f"{operator}: what is stacked differs in structure: {call} is {specs[0]} in step 0, {spec} in step "
                    f"{place}",
                    "return the same containers, with the same keys, in every step",
                )
            )
    return unflatten([_column(operator, call, values) for values in zip(*columns)], specs[0])


def _column(operator: str, call: str, values: tuple) -> Tensor | None:
    if all(value is None for value in values):
        return None
    tensors = []
    for place, value in enumerate(values):
        try:
            tensors.append(as_tensor(value))
        except (TypeError, ValueError, RuntimeError):
            raise TransformError(
                at_user_line(
                    f"{operator}: {call} has {in_words(value)} in step {place}, which no tensor can hold",
                    "return a tensor or a number, or None in every step",
                )
            ) from None
        if tensors[place].shape != tensors[0].shape:
            first, other = list(tensors[0].shape), list(tensors[place].shape)
            raise TransformError(
                at_user_line(
                    f"{operator}: what is stacked differs in shape: {call} has {first} in step 0, {other} in step "
                    f"{place}",
                    "torch.nn.functional.pad(y, (0, n - len(y)))  # the same shape in every step",
                )
            )
    return torch.stack(tensors)


def _no_rows(f: Callable, init: Any, leaves: list, spec: Any) -> Any:
    """The ys of no steps `[0, ...]`: their shapes are those of a step on zeros."""
    blank = None if spec is None else unflatten([leaf.new_zeros(leaf.shape[1:]) for leaf in leaves], spec)
    columns, out_spec = flatten(_pair(f(init, blank))[1])
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
        ArgumentError: The tensors of `xs` differ in their first dim, or `batch_size` makes no sense.
        TransformError: The results differ in structure or shape, or are no tensors.

    Example:
        >>> import torch
        >>> import lanewise
        >>> lanewise.map(torch.sum, torch.ones(2, 3))
        tensor([3., 3.])
    """
    check_functions("map", f=f)
    if batch_size is not None:
        check_chunk_size("map", "batch_size", batch_size, "lanewise.map(f, xs, batch_size=64)")
    leaves, spec = flatten(xs)
    steps = _steps("map(f, xs)", leaves, None)
    if batch_size is not None:
        return vmap(f, chunk_size=batch_size)(xs)
    if not steps:
        return _no_rows(lambda _, x: (None, f(x)), None, leaves, spec)
    return _stacked("map", "f(x)", [f(unflatten(list(item), spec)) for item in zip(*[x.unbind(0) for x in leaves])])


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
        TypeError: `axis` is no whole number.
        TransformError: `fn` returns something of another structure or shape than its arguments.

    Example:
        >>> import torch
        >>> from lanewise import associative_scan
        >>> associative_scan(torch.mul, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([ 1.,  2.,  6., 24.])

    The recursion on pairs is that of Blelloch, "Prefix sums and their applications", 1990.
    """
    check_functions("associative_scan", fn=fn)
    if not hasattr(axis, "__index__"):
        why = f"associative_scan: axis must be a whole number, got {type(axis)}"
        raise TypeError(at_user_line(why, "associative_scan(fn, elems, axis=0)"))
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
        found, found_spec = flatten(fn(*moved))
        expected = [leaf.shape for leaf in flatten(moved[0])[0]]
        shapes = [leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in found]
        if found_spec != spec or shapes != expected:
            raise _other_shapes(found, found_spec, expected, spec)
        return [leaf.movedim(axis, 0) for leaf in found]

    rows = _prefixes(combine, rows)
    rows = [row.flip(0) for row in rows] if reverse else rows
    return unflatten([row.movedim(0, axis) for row in rows], spec)


def _other_shapes(found: list, found_spec: Any, expected: list, spec: Any) -> TransformError:
    if found_spec != spec:
        why = f"returns another structure, {found_spec}, than elems have, {spec}"
    else:
        why = f"must keep the shapes of its arguments, {[list(shape) for shape in expected]}, and returns "
        why += ", ".join([in_words(leaf) for leaf in found])
    return TransformError(
        at_user_line(
            f"associative_scan: fn {why}", "associative_scan(lambda a, b: a * b, elems)  # fn(a, b) like a and b"
        )
    )


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
