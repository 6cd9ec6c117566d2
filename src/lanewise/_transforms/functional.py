"""`debug_unwrap`: what a tensor inside a transform stands for."""

from torch import Tensor

from lanewise._core.plane import Plane


def debug_unwrap(tensor: Tensor, *, recurse: bool = True) -> Tensor:
    """The tensor that a tensor inside a transformed function stands for, to look at while debugging.

    Do not compute with it inside the function: the transform does not see what happens to it.

    Args:
        tensor: Any tensor.
        recurse: Whether to go on to the plain tensor below all transforms, or one transform down only.

    Returns:
        The value below: `[B, *S]` for a tensor with lanes, the primal for one with a tangent; a plain tensor as it is.

    Example:
        >>> import torch
        >>> from lanewise import debug_unwrap, vmap
        >>> def f(x):
        ...     print(x.shape, debug_unwrap(x).shape)
        ...     return x
        >>> _ = vmap(f)(torch.ones(3, 2))
        torch.Size([2]) torch.Size([3, 2])
    """
    while isinstance(tensor, Plane):
        tensor = tensor.value
        if not recurse:
            break
    return tensor
