"""Samplers: functions of a key, differentiable in their parameters where the numbers are."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._rules.philox import philox_words
from lanewise.errors import ArgumentError, at_user_line
from lanewise.random.keys import DRAWS, MASK, check_key, checked_shape, described

Shape = Sequence[int]
Number = float | Tensor

# Random bits that a number of each dtype can hold.
_BITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def uniform(
    key: Tensor, shape: Shape | None = None, low: Number = 0.0, high: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers from `low` to `high`, `high` left out but for rounding. Differentiable in both.

    Args:
        key: `[2]`.
        shape: Of the result; what the bounds broadcast to if None.
        low: A number, or a tensor that broadcasts to the shape.
        high: Likewise.
        dtype: A floating dtype; that of the bounds, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> from lanewise import random
        >>> x = random.uniform(random.key(0), (1000,), -1.0, 1.0)
        >>> bool((x >= -1).all()), bool((x < 1).all())
        (True, True)
    """
    shape, dtype = _plan("uniform", key, shape, dtype, low, high)
    return (_fraction(key, shape, dtype) * (high - low) + low).to(dtype)


def normal(
    key: Tensor, shape: Shape | None = None, mean: Number = 0.0, std: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Normal numbers. Differentiable in `mean` and `std`.

    Args:
        key: `[2]`.
        shape: Of the result; what `mean` and `std` broadcast to if None.
        mean: A number, or a tensor that broadcasts to the shape.
        std: Likewise.
        dtype: A floating dtype; that of the parameters, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> import torch
        >>> from lanewise import grad, random
        >>> k = random.key(0)
        >>> z = random.normal(k)
        >>> torch.equal(grad(lambda s: random.normal(k, std=s))(torch.tensor(2.0)), z)
        True
    """
    shape, dtype = _plan("normal", key, shape, dtype, mean, std)
    return (torch.erfinv(_symmetric(key, shape, _wide(dtype))) * math.sqrt(2) * std + mean).to(dtype)


def truncated_normal(
    key: Tensor, lower: Number, upper: Number, shape: Shape | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Standard normal numbers given that they lie between two bounds. Differentiable in both.

    Args:
        key: `[2]`.
        lower: A number, or a tensor that broadcasts to the shape.
        upper: Likewise.
        shape: Of the result; what the bounds broadcast to if None.
        dtype: A floating dtype; that of the bounds, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> from lanewise import random
        >>> x = random.truncated_normal(random.key(0), -1.0, 2.0, (1000,))
        >>> bool((x >= -1).all()), bool((x <= 2).all())
        (True, True)
    """
    shape, dtype = _plan("truncated_normal", key, shape, dtype, lower, upper)
    wide = _wide(dtype)
    low, high = (torch.as_tensor(bound, dtype=wide, device=key.device) for bound in (lower, upper))
    below, above = torch.erf(low / math.sqrt(2)), torch.erf(high / math.sqrt(2))
    inside = torch.erfinv(below + _inner(key, shape, wide) * (above - below)) * math.sqrt(2)
    return torch.minimum(torch.maximum(inside, low), high).to(dtype)


def exponential(
    key: Tensor, shape: Shape | None = None, rate: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Exponential numbers, of mean `1 / rate`. Differentiable in the rate.

    Args:
        key: `[2]`.
        shape: Of the result; that of `rate` if None.
        rate: A number, or a tensor that broadcasts to the shape.
        dtype: A floating dtype; that of the rate, or the default dtype, if None.

    Returns:
        `[*shape]`, not negative.

    Example:
        >>> from lanewise import random
        >>> bool((random.exponential(random.key(0), (1000,)) >= 0).all())
        True
    """
    shape, dtype = _plan("exponential", key, shape, dtype, rate)
    return (-torch.log1p(-_fraction(key, shape, dtype)) / rate).to(dtype)


def gumbel(
    key: Tensor, shape: Shape | None = None, loc: Number = 0.0, scale: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Gumbel numbers: `argmax(logits + gumbel)` is a draw from the logits. Differentiable in `loc` and `scale`.

    Args:
        key: `[2]`.
        shape: Of the result; what `loc` and `scale` broadcast to if None.
        loc: A number, or a tensor that broadcasts to the shape.
        scale: Likewise.
        dtype: A floating dtype; that of the parameters, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> from lanewise import random
        >>> random.gumbel(random.key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    shape, dtype = _plan("gumbel", key, shape, dtype, loc, scale)
    return (-torch.log(-torch.log(_inner(key, shape, dtype))) * scale + loc).to(dtype)


def laplace(
    key: Tensor, shape: Shape | None = None, loc: Number = 0.0, scale: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Laplace numbers. Differentiable in `loc` and `scale`.

    Args:
        key: `[2]`.
        shape: Of the result; what `loc` and `scale` broadcast to if None.
        loc: A number, or a tensor that broadcasts to the shape.
        scale: Likewise.
        dtype: A floating dtype; that of the parameters, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> from lanewise import random
        >>> random.laplace(random.key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    shape, dtype = _plan("laplace", key, shape, dtype, loc, scale)
    u = _symmetric(key, shape, dtype)
    return (-torch.sign(u) * torch.log1p(-torch.abs(u)) * scale + loc).to(dtype)


def logistic(
    key: Tensor, shape: Shape | None = None, loc: Number = 0.0, scale: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Logistic numbers. Differentiable in `loc` and `scale`.

    Args:
        key: `[2]`.
        shape: Of the result; what `loc` and `scale` broadcast to if None.
        loc: A number, or a tensor that broadcasts to the shape.
        scale: Likewise.
        dtype: A floating dtype; that of the parameters, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> from lanewise import random
        >>> random.logistic(random.key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    shape, dtype = _plan("logistic", key, shape, dtype, loc, scale)
    u = _inner(key, shape, dtype)
    return ((torch.log(u) - torch.log1p(-u)) * scale + loc).to(dtype)


def cauchy(
    key: Tensor, shape: Shape | None = None, loc: Number = 0.0, scale: Number = 1.0, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Cauchy numbers. Differentiable in `loc` and `scale`.

    Args:
        key: `[2]`.
        shape: Of the result; what `loc` and `scale` broadcast to if None.
        loc: A number, or a tensor that broadcasts to the shape.
        scale: Likewise.
        dtype: A floating dtype; that of the parameters, or the default dtype, if None.

    Returns:
        `[*shape]`.

    Example:
        >>> from lanewise import random
        >>> random.cauchy(random.key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    shape, dtype = _plan("cauchy", key, shape, dtype, loc, scale)
    return (torch.tan(_symmetric(key, shape, dtype) * (math.pi / 2)) * scale + loc).to(dtype)


def bernoulli(key: Tensor, p: Number = 0.5, shape: Shape | None = None) -> Tensor:
    """Trials that succeed with probability `p`.

    Args:
        key: `[2]`.
        p: A number, or a tensor that broadcasts to the shape.
        shape: Of the result; that of `p` if None.

    Returns:
        `[*shape]`, bool.

    Example:
        >>> from lanewise import random
        >>> random.bernoulli(random.key(0), 1.0, (3,))
        tensor([True, True, True])
    """
    shape, dtype = _plan("bernoulli", key, shape, None, p)
    return _fraction(key, shape, _wide(dtype)) < p


def randint(
    key: Tensor, shape: Shape | None, low: int | Tensor, high: int | Tensor, *, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Whole numbers from `low` to `high - 1`.

    Args:
        key: `[2]`.
        shape: Of the result; what the bounds broadcast to if None.
        low: A whole number, or an integer tensor that broadcasts to the shape.
        high: Likewise, at most `2**32` above `low`.
        dtype: Of the result.

    Returns:
        `[*shape]`.

    Raises:
        ValueError: `high` is not above `low`, or too far. (Bounds that are tensors are not looked at.)

    Example:
        >>> from lanewise import random
        >>> x = random.randint(random.key(0), (1000,), 1, 7)
        >>> x.unique()
        tensor([1, 2, 3, 4, 5, 6])
    """
    for name, bound in (("low", low), ("high", high)):
        whole = not (bound.dtype.is_floating_point or bound.dtype.is_complex) if isinstance(bound, Tensor) else None
        if whole is False or (whole is None and (isinstance(bound, bool) or not isinstance(bound, int))):
            raise ArgumentError(
                at_user_line(f"randint: {name} is a whole number, got {bound!r}", "randint(key, shape, 0, 10)")
            )
    if isinstance(low, int) and isinstance(high, int) and not 0 < high - low <= 2**32:
        raise ArgumentError(
            at_user_line(
                f"randint: high must be above low, and at most 2**32 above it, got low={low} and high={high}",
                "randint(key, shape, 0, 10)  # numbers from 0 to 9",
            )
        )
    shape, _ = _plan("randint", key, shape, torch.float32, low, high)
    size = math.prod(shape)
    words = philox_words(key, DRAWS, 2 * size).reshape(*shape, 2)
    span = high - low
    # The high word of a product of 64 random bits with the span. Products wrap around, but keep their bits.
    carry = words[..., 1] * span >> 32 & MASK
    return ((words[..., 0] * span + carry >> 32 & MASK) + low).to(dtype)


def permutation(key: Tensor, x: int | Tensor, dim: int = 0) -> Tensor:
    """A random order of the numbers below `x`, or of the entries of a tensor along a dim.

    Args:
        key: `[2]`.
        x: A whole number, or a tensor `[*S]`.
        dim: The dim of `x` along which it is put in a new order, the same everywhere.

    Returns:
        `[x]`, int64, or `[*S]`.

    Example:
        >>> from lanewise import random
        >>> random.permutation(random.key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    check_key("permutation", key)
    if not isinstance(x, Tensor) and (isinstance(x, bool) or not isinstance(x, int) or x < 0):
        raise ArgumentError(
            at_user_line(f"permutation: x is a tensor, or how many numbers to order, got {x!r}", "permutation(key, 5)")
        )
    if isinstance(x, Tensor) and x.dim() == 0:
        raise ArgumentError(at_user_line("permutation: x has no dim to order along", "permutation(key, x[None])"))
    size = x.shape[dim] if isinstance(x, Tensor) else x
    words = philox_words(key, DRAWS, 2 * size).reshape(size, 2)
    order = (words[:, 0] << 31 ^ words[:, 1]).argsort(stable=True)
    return x.index_select(dim, order) if isinstance(x, Tensor) else order


def categorical(key: Tensor, logits: Tensor, dim: int = -1, shape: Shape = ()) -> Tensor:
    """Places along a dim, drawn with probabilities `softmax(logits, dim)`.

    Args:
        key: `[2]`.
        logits: `[*S]`, floating; -inf for what never comes.
        dim: The dim of `logits` that holds the alternatives.
        shape: How many draws.

    Returns:
        `[*shape, *S]` without the dim, int64.

    Example:
        >>> import torch
        >>> from lanewise import random
        >>> random.categorical(random.key(0), torch.tensor([0.0, -torch.inf]), shape=(3,))
        tensor([0, 0, 0])
    """
    if not isinstance(logits, Tensor) or not logits.dtype.is_floating_point or logits.dim() == 0:
        raise ArgumentError(
            at_user_line(
                f"categorical: logits is a floating tensor with a dim for the alternatives, got {described(logits)}",
                "categorical(key, torch.log(probabilities))",
            )
        )
    if not -logits.dim() <= dim < logits.dim():
        raise ArgumentError(at_user_line(f"categorical: logits {list(logits.shape)} has no dim {dim}", "dim=-1"))
    shape = checked_shape("categorical", key, shape)
    wide = _wide(logits.dtype)
    noise = -torch.log(-torch.log(_inner(key, (*shape, *logits.shape), wide)))
    return (logits.detach().to(wide) + noise).argmax(dim - logits.dim() if dim >= 0 else dim)


def _plan(
    api: str, key: Any, shape: Any, dtype: torch.dtype | None, *parameters: Any
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the draws."""
    tensors = [x for x in parameters if isinstance(x, Tensor)]
    if shape is None:
        shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    sizes = checked_shape(api, key, shape)
    for x in tensors:
        try:
            fits = torch.broadcast_shapes(x.shape, sizes) == sizes
        except RuntimeError:
            fits = False
        if not fits:
            raise ArgumentError(
                at_user_line(
                    f"{api}: a parameter {list(x.shape)} does not broadcast to shape {list(sizes)}",
                    f"{api}(key, {tuple(x.shape)}, ...)",
                )
            )
    if dtype is None:
        kinds = [x.dtype for x in tensors if x.dtype.is_floating_point]
        dtype = kinds[0] if kinds else torch.get_default_dtype()
        for kind in kinds[1:]:
            dtype = torch.promote_types(dtype, kind)
    if dtype not in _BITS:
        raise ArgumentError(at_user_line(f"{api}: dtype is a floating one, got {dtype}", "dtype=torch.float32"))
    return sizes, dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least single precision."""
    return torch.promote_types(dtype, torch.float32)


def _whole(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Whole numbers `[*shape]` of as many random bits as the dtype holds, and how many those are."""
    wanted, size = _BITS[dtype], math.prod(shape)
    if wanted <= 32:
        return (philox_words(key, DRAWS, size) >> 32 - wanted).reshape(shape), wanted
    words = philox_words(key, DRAWS, 2 * size).reshape(*shape, 2)
    return words[..., 0] >> 5 << 26 | words[..., 1] >> 6, wanted


def _fraction(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """From 0, 1 left out."""
    whole, wanted = _whole(key, shape, dtype)
    return whole.to(dtype) * 0.5**wanted


def _inner(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Between 0 and 1, both left out: odd multiples of the smallest step."""
    whole, wanted = _whole(key, shape, dtype)
    return (whole | 1).to(dtype) * 0.5**wanted


def _symmetric(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Between -1 and 1, both left out and 0 too: as many and the same numbers on either side."""
    whole, wanted = _whole(key, shape, dtype)
    half = 1 << (wanted - 1)
    return ((whole | 1) - half).to(dtype) * 0.5 ** (wanted - 1)
