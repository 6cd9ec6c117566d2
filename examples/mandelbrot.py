"""The Mandelbrot set, written for one pixel: a `while` that each pixel leaves after as many steps as it takes.

python -m examples.mandelbrot --size 240
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lanewise import vmap

LIMIT = 100


def pixel(x: Tensor, y: Tensor) -> Tensor | int:
    """After how many steps z = z * z + c leaves the circle of radius 2 [], `LIMIT` if it has not by then."""
    c = torch.complex(x, y)
    z = c
    steps = 0
    while steps < LIMIT:
        if z.abs() > 2:
            break
        z = z * z + c
        steps += 1
    return steps


def render(size: int) -> Tensor:
    """Steps for a picture [size * 2 // 3, size]."""
    x = torch.linspace(-2.2, 0.8, size, dtype=torch.float64)
    y = torch.linspace(-1.0, 1.0, size * 2 // 3, dtype=torch.float64)
    return vmap(vmap(pixel, in_dims=(0, None)), in_dims=(None, 0))(x, y)


def main(arguments: list[str] | None = None) -> None:
    """Render, and write a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=240, help="pixels in a row")
    parser.add_argument("--output", type=Path, default=Path("output/mandelbrot.png"))
    options = parser.parse_args(arguments)
    steps = render(options.size)
    figure = Figure(figsize=(6, 4), dpi=80)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(steps.double().add(1).log().numpy(), cmap="magma", origin="lower")
    axes.set_axis_off()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    inside = (steps == LIMIT).double().mean()
    print(f"{steps.numel()} pixels, {int(steps.sum())} steps, {inside:.1%} inside; {options.output}")


if __name__ == "__main__":
    main()
