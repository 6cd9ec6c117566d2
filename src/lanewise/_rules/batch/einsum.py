"""`torch.einsum`: the lanes are one more letter, so that one call serves all of them.

Otherwise it falls apart into a dozen views on lanes around each product. Where autograd records them, operands are
brought to products of two by no more views than it takes.
"""

from collections.abc import Sequence
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel
from lanewise._core.level import current_level, route_name
from lanewise._rules.batch.operands import unwatched
from lanewise._torch_compat import never_compile

_plain = torch.einsum


def _einsum(*args: Any) -> Tensor:
    """`torch.einsum` while a level is open."""
    level = current_level()
    if isinstance(level, BatchLevel) and level.lanes is None and len(args) > 1 and type(args[0]) is str:
        operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        equation = _with_lanes(level, args[0], operands) if unwatched(level, operands) else None
        if equation is None:
            product = _as_products(args[0], *operands) if len(operands) > 1 and _has_lanes(level, operands) else None
            return _plain(*args) if product is None else product
        return level.wrap(level.below(_einsum, equation, *[level.physical(operand) for operand in operands]))
    return _plain(*args)


def _with_lanes(level: BatchLevel, equation: str, operands: Sequence[Any]) -> str | None:
    """The equation below; None where torch is to say what is wrong with this one."""
    terms, right = _parsed(equation)
    letter = next((letter for letter in ascii_letters if letter not in equation), None)
    if letter is None or len(terms) != len(operands):
        return None
    if any(c.isalpha() and not any(c in term for term in terms) for c in right):
        return None
    below = []
    for term, operand in zip(terms, operands, strict=True):
        if "." not in term and len(term) != operand.dim():
            return None
        below.append(letter + term if level.mapped(operand) else term)
    return f"{','.join(below)}->{letter}{right}"


def _parsed(equation: str) -> tuple[list[str], str]:
    """The letters of each operand and of the result: those that occur once, sorted, where none are given."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in left if c.isalpha() and left.count(c) == 1)
        right = "".join(["..." if "..." in left else "", *once])
    return left.split(","), right


def _has_lanes(level: BatchLevel, operands: Sequence[Any]) -> bool:
    return all(isinstance(operand, Tensor) for operand in operands) and any(map(level.mapped, operands))


def _as_products(equation: str, *operands: Any) -> Tensor | None:
    """Products of two at a time, from the left as torch takes them; None where one is no product of matrices."""
    (terms, right), rest = _parsed(equation), list(operands)
    if len(terms) != len(rest) or "." in equation:
        return None
    while len(terms) > 2:
        later = "".join(terms[2:]) + right
        kept = "".join(dict.fromkeys(c for c in terms[0] + terms[1] if c in later))
        first = _as_product(terms[0], terms[1], kept, rest[0], rest[1])
        if first is None:
            return None
        terms[:2], rest[:2] = [kept], [first]
    return _as_product(terms[0], terms[1], right, rest[0], rest[1])


def _as_product(first: str, second: str, right: str, x: Tensor, y: Tensor) -> Tensor | None:
    """One product of matrices; None where the letters say another, or for torch to say what is wrong with them."""
    terms = (first, second, right)
    if not all(term.isalpha() and len(set(term)) == len(term) for term in terms if term):
        return None
    extents = {**dict(zip(first, x.shape)), **dict(zip(second, y.shape))}
    if (len(first), len(second)) != (x.dim(), y.dim()) or x.dtype is not y.dtype:
        return None
    if [extents[c] for c in first] != list(x.shape) or set(right) - set(extents):
        return None
    x, first = _without(x, first, second + right)
    y, second = _without(y, second, first + right)
    batch = [c for c in first if c in second and c in right]
    inner = [c for c in first if c in second and c not in right]
    rows, columns = ([c for c in term if c not in batch and c not in inner] for term in (first, second))
    if not inner:
        return None
    a = _arranged(x, first, batch, rows, inner)
    b = _arranged(y, second, batch, inner, columns)
    out = torch.bmm(a, b) if batch else torch.mm(a, b)
    order = batch + rows + columns
    shape = [extents[c] for c in order]
    out = out if list(out.shape) == shape else out.reshape(shape)
    return out if list(right) == order else out.permute([order.index(c) for c in right])


def _without(x: Tensor, term: str, others: str) -> tuple[Tensor, str]:
    """x summed over the letters that occur nowhere else, and the letters left."""
    places = [place for place, c in enumerate(term) if c not in others]
    return (x.sum(places), "".join(c for c in term if c in others)) if places else (x, term)


def _arranged(x: Tensor, term: str, batch: list[str], rows: list[str], columns: list[str]) -> Tensor:
    """[batch, rows, columns], the letters of each as one dim, without batch where it has no letters"""
    places = [term.index(c) for c in (*batch, *rows, *columns)]
    if places != list(range(len(places))):
        x = x.permute(places)
    groups = ([batch] if batch else []) + [rows, columns]
    if all(len(group) == 1 for group in groups):
        return x
    shape, at = [], 0
    for group in groups:
        shape.append(prod(x.shape[at : at + len(group)]))
        at += len(group)
    return x.reshape(shape)


never_compile(_einsum)
route_name("einsum", _einsum)
