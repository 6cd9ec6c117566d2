"""`rearrange`: transposing, splitting and joining axes by their names."""

import functools
import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lanewise.errors import ArgumentError

_ELLIPSIS = "..."
_TOKEN = re.compile(r"\.\.\.|\w+|\S")

# One side of a pattern: a name (or the ellipsis) for an axis that stands alone, a tuple of names for parentheses.
_Side = tuple[str | tuple[str, ...], ...]


def rearrange(tensor: Tensor | Sequence[Tensor], pattern: str, **axes_lengths: int) -> Tensor:
    """Transpose, split and join the axes of a tensor, by a pattern that names them.

    `"b c h w -> b (h w) c"` moves `c` last and joins `h` and `w`, `h` the slower one; parentheses on the left split an
    axis; `1` or `()` is an axis of length one; `...` stands for any number of axes. The notation is that of einops
    (https://einops.rocks). The result is a view where `permute` and `reshape` give one.

    Args:
        tensor: A tensor `[*S]`, or tensors of one shape, which are stacked along a new first axis.
        pattern: `"left -> right"`, each name once on both sides.
        **axes_lengths: Lengths of axes; one axis in each pair of parentheses may be left out.

    Returns:
        The rearranged tensor.

    Raises:
        ValueError: The pattern is not well formed, or does not fit the tensor's shape or the lengths.
        TypeError: A length is not an int, or the pattern not a string.

    Example:
        >>> import torch
        >>> from lanewise import rearrange
        >>> images = torch.arange(24.0).reshape(2, 3, 4)
        >>> rearrange(images, "b h w -> b (w h)").shape
        torch.Size([2, 12])
        >>> rearrange(images, "b h (w half) -> half b h w", half=2)[1, 0, 0]
        tensor([1., 3.])
    """
    if not isinstance(tensor, Tensor):
        tensor = torch.stack(list(tensor))
    if not isinstance(pattern, str):
        raise TypeError(f"rearrange: the pattern must be a string, got {type(pattern).__name__}")
    for name, length in axes_lengths.items():
        if type(length) is not int:
            raise TypeError(f"rearrange axis lengths must be integers, got: {type(length)} for {name!r}")
        if length < 0:
            raise ArgumentError(f"rearrange: the length of axis {name!r} is negative: {length}")
    # The compiler warns of caches, and calls this once only.
    parse = _parse_pattern.__wrapped__ if torch.compiler.is_compiling() else _parse_pattern
    left, right = parse(pattern)
    unknown = sorted(axes_lengths.keys() - (set(_names(left)) - {_ELLIPSIS}))
    if unknown:
        raise ArgumentError(f"Identifiers not found in rearrange expression: {unknown}, in {pattern!r}")
    _check_rank(left, tensor, pattern)
    ellipsis = tuple(f"...{place}" for place in range(tensor.ndim - len(left) + 1))
    left_groups, right_groups = _groups(left, ellipsis), _groups(right, ellipsis)

    lengths: dict[str, int] = dict(axes_lengths)
    for dim, group in enumerate(left_groups):
        _settle_lengths(group, lengths, dim, tensor, pattern)
    names = [name for group in left_groups for name in group]
    split = tensor.reshape([lengths[name] for name in names])
    moved = split.permute([names.index(name) for group in right_groups for name in group])
    return moved.reshape([math.prod([lengths[name] for name in group]) for group in right_groups])


@functools.lru_cache(256)
def _parse_pattern(pattern: str) -> tuple[_Side, _Side]:
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ArgumentError(f"rearrange: Pattern must contain a single '->' separator, got {pattern!r}")
    left, right = (_parse_side(side, pattern) for side in sides)
    left_names, right_names = set(_names(left)), set(_names(right))
    if _ELLIPSIS in right_names - left_names:
        raise ArgumentError(f"rearrange: Ellipsis found in right side, but not left side of a pattern {pattern!r}")
    if _ELLIPSIS in left_names and _ELLIPSIS not in left:
        raise ArgumentError(f"rearrange: an ellipsis in parentheses is not allowed on the left side: {pattern!r}")
    one_sided = sorted(left_names ^ right_names)
    if one_sided:
        raise ArgumentError(
            f"Identifiers only on one side of rearrange expression (should be on both): {one_sided}, in {pattern!r}"
        )
    return left, right


def _parse_side(side: str, pattern: str) -> _Side:
    items: list[str | tuple[str, ...]] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(":
            if inside is not None:
                raise ArgumentError(f"rearrange: brackets inside brackets not allowed: {pattern!r}")
            inside = []
        elif token == ")":
            if inside is None:
                raise ArgumentError(f"rearrange: Brackets are not balanced: {pattern!r}")
            items.append(tuple(inside))
            inside = None
        elif token == "1":
            if inside is None:
                items.append(())
        else:
            _check_axis(token, pattern)
            if token in _names(items) or token in (inside or ()):
                raise ArgumentError(
                    f"rearrange: Indexing expression contains duplicate dimension {token!r}: {pattern!r}"
                )
            (items if inside is None else inside).append(token)
    if inside is not None:
        raise ArgumentError(f"rearrange: Imbalanced parentheses in expression: {pattern!r}")
    return tuple(items)


def _check_axis(token: str, pattern: str) -> None:
    if token == _ELLIPSIS:
        return
    if token == ".":
        raise ArgumentError(f"rearrange: Expression may contain dots only inside ellipsis (...): {pattern!r}")
    if token.isdecimal():
        raise ArgumentError(f"rearrange only supports unnamed axes of size 1, got {token} in {pattern!r}")
    if re.fullmatch(r"\W", token):
        raise ArgumentError(f"rearrange: Unknown character {token!r} in {pattern!r}")
    if not token.isidentifier() or token.startswith("_") or token.endswith("_"):
        raise ArgumentError(
            f"rearrange: Invalid axis identifier: {token!r} in {pattern!r}. A name is a Python identifier that does "
            "not start or end with an underscore"
        )


def _names(side: Sequence[str | tuple[str, ...]]) -> Iterator[str]:
    for item in side:
        if isinstance(item, str):
            yield item
        else:
            yield from item


def _groups(side: _Side, ellipsis: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The names that make up each axis, with `...` replaced by names of the axes it stands for."""
    groups: list[tuple[str, ...]] = []
    for item in side:
        if item == _ELLIPSIS:
            groups.extend((name,) for name in ellipsis)
        elif isinstance(item, str):
            groups.append((item,))
        else:
            groups.append(tuple(name for axis in item for name in (ellipsis if axis == _ELLIPSIS else (axis,))))
    return groups


def _check_rank(left: _Side, tensor: Tensor, pattern: str) -> None:
    count = len(left)
    if _ELLIPSIS in left:
        if count - 1 > tensor.ndim:
            raise ArgumentError(
                f"rearrange: Number of dimensions in pattern ({count - 1}) must be less than or equal to the number of "
                f"dimensions in the tensor ({tensor.ndim}): {pattern!r} for {list(tensor.shape)}"
            )
    elif count != tensor.ndim:
        raise ArgumentError(
            f"rearrange: Number of dimensions in pattern ({count}) must be equal to the number of dimensions in the "
            f"tensor ({tensor.ndim}): {pattern!r} for {list(tensor.shape)}"
        )


def _settle_lengths(group: tuple[str, ...], lengths: dict[str, int], dim: int, tensor: Tensor, pattern: str) -> None:
    """Fill in the length that is left out in one axis of the tensor, and check that the lengths fit."""
    size = tensor.shape[dim]
    where = f"axis {dim} of {list(tensor.shape)} in {pattern!r}"
    open_names = [name for name in group if name not in lengths]
    known = math.prod([lengths[name] for name in group if name in lengths])
    if len(open_names) > 1:
        raise ArgumentError(f"rearrange: cannot infer the lengths of {open_names} at once, {where}; give all but one")
    if open_names:
        if known == 0 or size % known:
            raise ArgumentError(f"rearrange: the length of {open_names[0]!r} would be {size} / {known}, {where}")
        lengths[open_names[0]] = size // known
    elif known != size:
        given = " * ".join(f"{name}={lengths[name]}" for name in group) or "1"
        raise ArgumentError(f"rearrange: {given} does not match the size {size}, {where}")
