"""A Jacobian and a Hessian of the trained network, checked against differences of its plain outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import hessian, jacfwd, jacrev
from lanewise.demo.model import Params, logits_of, loss_of, with_parameters


@dataclass(frozen=True)
class Check:
    """A derivative and its largest deviation from central differences."""

    derivative: Tensor
    deviation: float


def check_jacobian(net: nn.Module, params: Params, image: Tensor) -> tuple[Check, Check]:
    """The Jacobian [10, 64] of the logits with respect to the pixels, in reverse and in forward mode."""
    params, pixels = _in_float64(params, image)
    logits = logits_of(net)

    def of_pixels(pixels: Tensor) -> Tensor:
        return logits(params, pixels.view_as(image))

    differences = jacobian_by_differences(_plain(net, params, image), pixels)
    reverse, forward = jacrev(of_pixels)(pixels), jacfwd(of_pixels)(pixels)
    return (
        Check(reverse, (reverse - differences).abs().max().item()),
        Check(forward, (forward - differences).abs().max().item()),
    )


def check_hessian(net: nn.Module, params: Params, image: Tensor, label: Tensor) -> Check:
    """The Hessian [64, 64] of the loss with respect to the pixels."""
    params, pixels = _in_float64(params, image)
    loss, logits = loss_of(net), _plain(net, params, image)

    def plain_losses(rows: Tensor) -> Tensor:
        return F.cross_entropy(logits(rows), label.expand(len(rows)), reduction="none")

    second = hessian(lambda pixels: loss(params, pixels.view_as(image), label))(pixels)
    differences = hessian_by_differences(plain_losses, pixels)
    return Check(second, (second - differences).abs().max().item())


def jacobian_by_differences(f: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences [M, n] at x [n] of f, which maps rows [R, n] to rows [R, M]."""
    offsets = step * torch.eye(len(x), dtype=x.dtype)
    return ((f(x + offsets) - f(x - offsets)) / (2 * step)).T


def hessian_by_differences(f: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-3) -> Tensor:
    """Second central differences [n, n] at x [n] of f, which maps rows [R, n] to values [R].

    Two step widths are combined (Richardson), so that the error is of the fourth order in the step.
    """
    n = len(x)
    row, column = torch.triu_indices(n, n)
    identity = torch.eye(n, dtype=x.dtype)
    plus, minus = identity[row] + identity[column], identity[row] - identity[column]

    def at(h: float) -> Tensor:
        return (f(x + h * plus) - f(x + h * minus) - f(x - h * minus) + f(x - h * plus)) / (4 * h * h)

    upper = torch.zeros(n, n, dtype=x.dtype)
    upper[row, column] = (4 * at(step) - at(2 * step)) / 3
    return upper + upper.triu(1).T


def _in_float64(params: Params, image: Tensor) -> tuple[Params, Tensor]:
    return {name: p.double() for name, p in params.items()}, image.double().flatten()


def _plain(net: nn.Module, params: Params, image: Tensor) -> Callable[[Tensor], Tensor]:
    """Rows [R, 64] -> logits [R, 10] by the module itself, with no transform at work."""
    own = with_parameters(net, params)

    def logits(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return own(rows.view(-1, *image.shape))

    return logits
