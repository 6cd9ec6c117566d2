"""Which form of a convolution is fastest where each example has a weight of its own, for which shape.

Run `python -m benchmarks.conv_per_lane [--markdown FILE]`. All forms compute, for an input [B, C, H, W] and weights
[B, D, C/groups, K, K], the output [B, D, P, Q].

* grouped: one convolution with the examples as groups.
* windows: the input seen as overlapping windows, copied to [B*groups, C/groups*K*K, P*Q] a few examples at a time, so
  that the copy stays in a cache, and one bmm for each part.
* loop: one convolution for each example.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.conv_weight_grad import SHAPES as WEIGHT_GRADIENTS
from benchmarks.conv_weight_grad import Shape, table
from lanewise._rules.batch.conv import convolve_windows, forward_form


def grouped(x: Tensor, w: Tensor, s: Shape) -> Tensor:
    """One convolution in which each example's channels are groups of their own."""
    out = F.conv2d(x.flatten(0, 1)[None], w.flatten(0, 1), None, s.stride, s.pad, 1, s.batch * s.groups)
    return out.view(s.batch, s.c_out, *out.shape[2:])


def windows(x: Tensor, w: Tensor, s: Shape) -> Tensor:
    """A strided view of all windows, copied part by part, and a bmm over examples and groups."""
    return convolve_windows(x[:, None], w, ([s.stride] * 2, [s.pad] * 2, [1, 1]), s.groups).squeeze(1)


def loop(x: Tensor, w: Tensor, s: Shape) -> Tensor:
    """One convolution for each example."""
    pairs = zip(x.unbind(), w.unbind(), strict=True)
    return torch.cat([F.conv2d(image[None], weight, None, s.stride, s.pad, 1, s.groups) for image, weight in pairs])


def operands(s: Shape) -> tuple[Tensor, Tensor]:
    """An input [B, C, H, W] and weights [B, D, C/groups, K, K], drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    shape = (s.batch, s.c_out, s.c_in // s.groups, s.kernel, s.kernel)
    return s.tensors()[0], torch.randn(shape, generator=generator) / s.kernel


def rule(s: Shape) -> str:
    """The form that the package uses, by the name it has here."""
    if s.kernel == s.stride == s.groups == 1:
        return "windows"  # of one tap: the image itself
    positions = ((s.image + 2 * s.pad - s.kernel) // s.stride + 1) ** 2
    form = forward_form(s.c_out // s.groups, s.c_in // s.groups, s.kernel**2, positions)
    return "loop" if form == "alone" else form


FORMS = {"grouped": grouped, "windows": windows, "loop": loop}

SHAPES = [
    Shape(64, 1, 4, 28, 3, pad=1),
    Shape(256, 1, 8, 8, 3, pad=1),
    Shape(32, 3, 8, 16, 3, pad=1),
    Shape(32, 3, 16, 32, 3, pad=1),
    Shape(32, 3, 64, 32, 3, pad=1),
    Shape(32, 2, 16, 64, 5, pad=2),
    Shape(32, 4, 16, 32, 3, pad=1),
    Shape(32, 5, 7, 16, 3, pad=1),
    Shape(32, 6, 16, 32, 5),
    Shape(32, 16, 32, 16, 3, stride=2, pad=1),
    *WEIGHT_GRADIENTS,
]


if __name__ == "__main__":
    table(FORMS, SHAPES, operands, rule, __doc__)
