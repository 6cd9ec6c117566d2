"""Keys: made from a number, split, and joined with a number; and the words that a key stands for."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lanewise._rules.philox import philox, philox_words
from lanewise.errors import ArgumentError, at_user_line

MASK = 0xFFFFFFFF
# The third word of the counter: what a key is used for. Samplers, children and folded keys never share numbers.
DRAWS, _CHILDREN, _FOLDED = 0, 1, 2


def key(seed: int, *, device: Any = None) -> Tensor:
    """A key from a whole number.

    Args:
        seed: Any number of 64 bits, signed or not.
        device: Where the key, and the numbers drawn from it, live.

    Returns:
        `[2]`, int64: two words of 32 bits.

    Example:
        >>> from lanewise import random
        >>> random.key(7)
        tensor([7, 0])
    """
    if isinstance(seed, Tensor):
        why = f"key: seed is a whole number of 64 bits, got a tensor {list(seed.shape)} of {seed.dtype}"
        raise ArgumentError(at_user_line(why, "fold_in(key(0), i)  # i may be a tensor, and one of each lane"))
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ArgumentError(at_user_line(f"key: seed is a whole number of 64 bits, got {seed!r}", "key(0)"))
    return _words([seed & MASK, seed >> 32 & MASK], device)


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys from a key, which should then not be used any more.

    Args:
        key: `[2]`.
        num: How many.

    Returns:
        `[num, 2]`; the first keys are the same for every `num`.

    Example:
        >>> import torch
        >>> from lanewise import random, vmap
        >>> keys = random.split(random.key(0), 4)
        >>> each = vmap(lambda k: random.normal(k, (3,)))(keys)
        >>> torch.equal(each, torch.stack([random.normal(k, (3,)) for k in keys]))
        True
    """
    check_key("split", key)
    if isinstance(num, bool) or not isinstance(num, int) or num < 0:
        raise ArgumentError(at_user_line(f"split: num is how many keys to make, got {num!r}", "split(key, 2)"))
    return philox_words(key, _CHILDREN, 4 * num).unflatten(0, (num, 4))[:, :2]


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number, such as the number of a step.

    Args:
        key: `[2]`.
        data: A whole number of 64 bits, or a tensor `[]` of an integer dtype.

    Returns:
        `[2]`.

    Example:
        >>> from lanewise import random
        >>> k = random.key(0)
        >>> random.fold_in(k, 1).tolist() == random.fold_in(k, 2).tolist()
        False
    """
    check_key("fold_in", key)
    if isinstance(data, Tensor):
        if data.dim() or data.dtype.is_floating_point or data.dtype.is_complex or data.dtype is torch.bool:
            raise ArgumentError(
                at_user_line(
                    f"fold_in: data is one whole number, got {data.dtype} {list(data.shape)}",
                    "vmap(fold_in, in_dims=(None, 0))(key, numbers)  # a key for each of several numbers",
                )
            )
        number = data.to(torch.int64)
        counter = torch.stack([number & MASK, number >> 32 & MASK, torch.full_like(number, _FOLDED), number * 0])
    else:
        if isinstance(data, bool) or not isinstance(data, int):
            raise ArgumentError(at_user_line(f"fold_in: data is a whole number, got {data!r}", "fold_in(key, step)"))
        counter = _words([data & MASK, data >> 32 & MASK, _FOLDED, 0], key.device)
    return philox(key, counter)[:2]


def _words(numbers: list[int], device: Any) -> Tensor:
    """[n], int64, of numbers that may differ from lane to lane."""
    if all(type(number) is int for number in numbers):
        return torch.tensor(numbers, device=device)
    return torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in numbers])


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Random words.

    Args:
        key: `[2]`.
        shape: Of the result.

    Returns:
        `[*shape]`, int64, from 0 to `2**32 - 1`.

    Example:
        >>> from lanewise import random
        >>> random.bits(random.key(0), (4,)).shape
        torch.Size([4])
    """
    shape = checked_shape("bits", key, shape)
    return philox_words(key, DRAWS, math.prod(shape)).reshape(shape)


def check_key(api: str, key: Any) -> None:
    """Raise unless `key` is one key."""
    if not isinstance(key, Tensor) or key.dtype is not torch.int64 or key.shape != (2,):
        several = isinstance(key, Tensor) and key.dtype is torch.int64 and key.dim() > 1 and key.shape[-1] == 2
        raise ArgumentError(
            at_user_line(
                f"{api}: key is two words, int64 [2], got {described(key)}",
                f"vmap(lambda k: {api}(k, ...))(keys)  # one key for each lane" if several else "key = random.key(0)",
            )
        )


def described(value: Any) -> str:
    """A value as messages name it."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def checked_shape(api: str, key: Any, shape: Any) -> tuple[int, ...]:
    """The shape as a tuple, once the key is known to be one."""
    check_key(api, key)
    sizes: tuple = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (None,)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise ArgumentError(at_user_line(f"{api}: shape is a tuple of sizes, got {shape!r}", f"{api}(key, (3, 4))"))
    return sizes
