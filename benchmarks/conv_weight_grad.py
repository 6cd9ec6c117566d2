"""Which form of the per-sample convolution weight gradient is fastest for which shape.

Run `python -m benchmarks.conv_weight_grad [--markdown FILE]`. All forms compute, for an input [B, C, H, W] and an
output gradient [B, D, P, Q], the gradient [B, D, C/groups, K, K] of a weight that each of the B examples uses alone.

* grouped: one `convolution_backward` with the examples as groups.
* windows: the input seen as overlapping windows, copied once to [B*groups, C/groups*K*K, P*Q], and one bmm.
* slices: the same, a few examples at a time, so that the copy stays in the cache.
* correlate: a forward convolution of the input with the output gradient as its kernel.
* offsets: one bmm per kernel position, on the input shifted by that position.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import round_robin
from lanewise._rules.batch.conv import per_lane_form

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """A convolution with square kernel and image, `pad` on each side."""

    batch: int
    c_in: int
    c_out: int
    image: int
    kernel: int
    stride: int = 1
    pad: int = 0
    groups: int = 1

    def tensors(self) -> tuple[Tensor, Tensor]:
        """An input [B, C, H, W] and an output gradient [B, D, P, Q], drawn from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        out = (self.image + 2 * self.pad - self.kernel) // self.stride + 1
        x = torch.randn(self.batch, self.c_in, self.image, self.image, generator=generator)
        return x, torch.randn(self.batch, self.c_out, out, out, generator=generator)


def grouped(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """One `convolution_backward` in which each example's channels are groups of their own."""
    weight = x.new_empty(s.batch * s.c_out, s.c_in // s.groups, s.kernel, s.kernel)
    _, grad, _ = aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight,
        None,
        [s.stride] * 2,
        [s.pad] * 2,
        [1, 1],
        False,
        [0, 0],
        s.batch * s.groups,
        [False, True, False],
    )
    return grad.view(s.batch, s.c_out, s.c_in // s.groups, s.kernel, s.kernel)


def windows(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """A strided view of all windows, one copy, one bmm over examples and groups."""
    x = F.pad(x, [s.pad] * 4) if s.pad else x
    view = x.unfold(2, s.kernel, s.stride).unfold(3, s.kernel, s.stride)[:, :, : g.shape[2], : g.shape[3]]
    inner = s.c_in // s.groups * s.kernel**2
    columns = view.permute(0, 1, 4, 5, 2, 3).reshape(s.batch * s.groups, inner, -1)
    rows = g.reshape(s.batch * s.groups, s.c_out // s.groups, -1)
    return torch.bmm(rows, columns.mT).view(s.batch, s.c_out, s.c_in // s.groups, s.kernel, s.kernel)


def slices(x: Tensor, g: Tensor, s: Shape, cache: int = 1 << 20) -> Tensor:
    """As `windows`, a few examples at a time, so that the copy of their windows stays in a cache of that many bytes."""
    inner = s.c_in // s.groups * s.kernel**2
    count = max(1, cache // (s.groups * inner * g.shape[2] * g.shape[3] * x.element_size()))
    if count >= s.batch:
        return windows(x, g, s)
    x = F.pad(x, [s.pad] * 4) if s.pad else x
    view = x.unfold(2, s.kernel, s.stride).unfold(3, s.kernel, s.stride)[:, :, : g.shape[2], : g.shape[3]]
    view = view.permute(0, 1, 4, 5, 2, 3)
    rows = g.reshape(s.batch, s.groups, s.c_out // s.groups, -1)
    out = x.new_empty(s.batch, s.groups, s.c_out // s.groups, inner)
    for start in range(0, s.batch, count):
        part = slice(start, start + count)
        columns = view[part].reshape(-1, inner, rows.shape[-1])
        torch.bmm(rows[part].flatten(0, 1), columns.mT, out=out[part].flatten(0, 1))
    return out.view(s.batch, s.c_out, s.c_in // s.groups, s.kernel, s.kernel)


def correlate(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """A forward convolution of the input with the output gradient as its kernel, examples as groups."""
    per = s.c_in // s.groups
    images = x.view(s.batch * s.groups, per, *x.shape[2:]).transpose(0, 1)
    kernels = g.reshape(s.batch * s.c_out, 1, *g.shape[2:])
    out = F.conv2d(images, kernels, padding=s.pad, dilation=s.stride, groups=s.batch * s.groups)
    out = out[:, :, : s.kernel, : s.kernel].reshape(per, s.batch, s.c_out, s.kernel, s.kernel)
    return out.permute(1, 2, 0, 3, 4)


def offsets(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """One bmm per kernel position."""
    x = F.pad(x, [s.pad] * 4) if s.pad else x
    rows = g.reshape(s.batch * s.groups, s.c_out // s.groups, -1)
    height, width = ((n - 1) * s.stride + 1 for n in g.shape[2:])
    parts = []
    for i in range(s.kernel):
        for j in range(s.kernel):
            shifted = x[:, :, i : i + height : s.stride, j : j + width : s.stride]
            parts.append(torch.bmm(rows, shifted.reshape(s.batch * s.groups, s.c_in // s.groups, -1).mT))
    stacked = torch.stack(parts, dim=-1)
    return stacked.view(s.batch, s.c_out, s.c_in // s.groups, s.kernel, s.kernel)


def loop(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """One `convolution_backward` per example: the measure of what batching brings."""
    weight = x.new_zeros(s.c_out, s.c_in // s.groups, s.kernel, s.kernel)
    fixed = ([s.stride] * 2, [s.pad] * 2, [1, 1], False, [0, 0], s.groups, [False, True, False])
    return torch.stack(
        [aten.convolution_backward(g[i : i + 1], x[i : i + 1], weight, None, *fixed)[1] for i in range(s.batch)]
    )


def rule(s: Shape) -> str:
    """The form that the package uses, by the name it has here."""
    positions = ((s.image + 2 * s.pad - s.kernel) // s.stride + 1) ** 2
    form = per_lane_form(s.batch * s.groups, s.c_out // s.groups, s.c_in // s.groups, s.kernel**2, positions)
    if form == "alone":
        return "loop"
    return form if form == "grouped" or (form == "correlate" and s.groups > 1) else "slices"


FORMS: dict[str, Callable[[Tensor, Tensor, Shape], Tensor]] = {
    "grouped": grouped,
    "windows": windows,
    "slices": slices,
    "correlate": correlate,
    "offsets": offsets,
    "loop": loop,
}

SHAPES = [
    Shape(64, 1, 16, 8, 3, pad=1),
    Shape(64, 16, 32, 4, 3, pad=1),
    Shape(32, 16, 32, 4, 3, pad=1),
    Shape(32, 8, 16, 6, 5, pad=2),
    Shape(128, 1, 32, 28, 3),
    Shape(64, 3, 16, 32, 5, pad=2),
    Shape(64, 3, 64, 64, 7, stride=2, pad=3),
    Shape(16, 3, 16, 128, 3, pad=1),
    Shape(64, 1, 8, 64, 3, pad=1),
    Shape(64, 3, 32, 32, 3, pad=1),
    Shape(64, 4, 8, 16, 3, pad=1),
    Shape(64, 8, 16, 16, 3, pad=1),
    Shape(64, 6, 16, 14, 5),
    Shape(64, 12, 20, 14, 3),
    Shape(32, 16, 16, 32, 3, pad=1),
    Shape(32, 32, 64, 14, 3, pad=1),
    Shape(32, 64, 64, 8, 3, pad=1),
    Shape(16, 64, 64, 32, 3, pad=1),
    Shape(32, 64, 64, 16, 1),
    Shape(32, 64, 128, 16, 1, stride=2),
    Shape(16, 32, 32, 16, 7, pad=3),
    Shape(16, 64, 64, 16, 3, pad=1, groups=8),
    Shape(32, 32, 32, 16, 3, pad=1, groups=32),
    Shape(16, 64, 64, 32, 5, pad=2, groups=64),
    Shape(16, 64, 64, 32, 3, pad=1, groups=64),
    Shape(32, 32, 32, 16, 5, pad=2, groups=32),
    Shape(32, 32, 64, 16, 3, pad=1, groups=32),
    Shape(32, 32, 32, 32, 3, stride=2, pad=1, groups=32),
    Shape(32, 24, 24, 16, 3, pad=1, groups=6),
]


def table(
    forms: dict[str, Callable[[Tensor, Tensor, Shape], Tensor]],
    shapes: list[Shape],
    operands: Callable[[Shape], tuple[Tensor, Tensor]],
    rule: Callable[[Shape], str],
    about: str | None,
) -> None:
    """Check that the forms agree, time them in turn, and print the table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| B | C | D | image | K | stride | groups | "
        + " | ".join(f"{name} ms" for name in forms)
        + " | rule | its loss |",
        "|---" * (7 + len(forms) + 2) + "|",
    ]
    print(*lines, sep="\n")
    for s in shapes:
        x, y = operands(s)
        expected = forms["loop"](x.double(), y.double(), s)
        for name, form in forms.items():
            torch.testing.assert_close(form(x, y, s).double(), expected, rtol=1e-4, atol=1e-3, msg=f"{name} {s}")
        calls = {name: partial(form, x, y, s) for name, form in forms.items()}
        times = {name: timing.median for name, timing in round_robin(calls, rounds=options.rounds).items()}
        chosen = rule(s)
        loss = times[chosen] / min(times.values()) - 1
        shape = [s.batch, s.c_in, s.c_out, s.image, s.kernel, s.stride, s.groups]
        cells = [f"{1e3 * times[name]:.2f}" for name in forms]
        lines.append(f"| {' | '.join(map(str, shape))} | {' | '.join(cells)} | {chosen} | {100 * loss:.0f} % |")
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    table(FORMS, SHAPES, Shape.tensors, rule, __doc__)
