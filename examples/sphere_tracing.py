"""A renderer written for one pixel: march along its ray until the scene is hit or missed, and shade what was hit.

The scene is a function of a point, its distance to the nearest surface. The normal of a surface is the gradient of that
distance: `grad(distance)`.

python -m examples.sphere_tracing --size 120
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lanewise import grad, vmap

EYE = torch.tensor([0.0, 1.0, -3.5])
LIGHT = torch.tensor([2.0, 4.0, -3.0])
SKY = torch.tensor([0.55, 0.7, 0.9])
NEAR, FAR = 1e-3, 20.0


def sphere(p: Tensor) -> Tensor:
    """Distance to a ball that lies on the floor."""
    return (p - torch.tensor([-0.9, 0.6, 0.3])).norm() - 0.6


def ring(p: Tensor) -> Tensor:
    """Distance to an upright ring."""
    q = p - torch.tensor([0.8, 0.75, 0.2])
    around = q[:2].norm() - 0.55
    return torch.sqrt(around * around + q[2] * q[2]) - 0.2


def distance(p: Tensor) -> Tensor:
    """p [3] -> the distance to the nearest surface []."""
    return torch.minimum(torch.minimum(sphere(p), ring(p)), p[1])


def lit(p: Tensor) -> bool:
    """Whether the light reaches a point: march towards it."""
    way = LIGHT - p
    length = way.norm()
    way = way / length
    t = torch.full((), 0.02)
    for _ in range(40):
        d = distance(p + t * way)
        if d < NEAR:
            return False
        t = t + d
        if t > length:
            break
    return True


def colour(p: Tensor) -> Tensor:
    """p [3] -> what the surface is painted with [3]."""
    if p[1] < 2 * NEAR:
        light_tile = (p[0].floor() + p[2].floor()) % 2 == 0
        return torch.full((3,), 0.8) if light_tile else torch.full((3,), 0.35)
    return torch.tensor([0.9, 0.3, 0.25]) if sphere(p) < ring(p) else torch.tensor([0.95, 0.75, 0.3])


def shade(p: Tensor) -> Tensor:
    """p [3] on a surface -> its colour in the light [3]."""
    normal = grad(distance)(p)
    to_light = (LIGHT - p) / (LIGHT - p).norm()
    strength = torch.full((), 0.25)
    if normal @ to_light > 0 and lit(p + 4 * NEAR * normal):
        strength = strength + 0.75 * (normal @ to_light)
    return colour(p) * strength


def pixel(x: Tensor, y: Tensor) -> Tensor:
    """Where a pixel is in the picture, from -1 to 1 -> its colour [3]."""
    ray = torch.stack([x, y - 0.2, torch.full((), 1.6)])
    ray = ray / ray.norm()
    t = torch.zeros(())
    for _ in range(128):
        p = EYE + t * ray
        d = distance(p)
        if d < NEAR:
            return shade(p)
        t = t + d
        if t > FAR:
            break
    return SKY


def render(size: int) -> Tensor:
    """A picture [size * 2 // 3, size, 3]."""
    x = torch.linspace(-1, 1, size)
    y = torch.linspace(0.67, -0.67, size * 2 // 3)
    return vmap(vmap(pixel, in_dims=(0, None)), in_dims=(None, 0))(x, y)


def main(arguments: list[str] | None = None) -> None:
    """Render, and write a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=180, help="pixels in a row")
    parser.add_argument("--output", type=Path, default=Path("output/sphere_tracing.png"))
    options = parser.parse_args(arguments)
    image = render(options.size)
    figure = Figure(figsize=(6, 4), dpi=80)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(image.clamp(0, 1).numpy())
    axes.set_axis_off()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    print(f"{image.shape[0] * image.shape[1]} pixels; {options.output}")


if __name__ == "__main__":
    main()
