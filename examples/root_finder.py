"""Roots by Newton's method with a bisection for a safeguard, written for one equation.

Kepler's equation E - e sin(E) = M gives the place of a planet on its ellipse at a time. Newton's method alone jumps far
away where the ellipse is thin; a step that leaves the interval known to hold the root is replaced by its middle.

python -m examples.root_finder --size 200
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lanewise import grad, vmap

TOLERANCE = 1e-12


def kepler(anomaly: Tensor, e: Tensor, m: Tensor) -> Tensor:
    """What is zero at the root []."""
    return anomaly - e * anomaly.sin() - m


def solve(e: Tensor, m: Tensor) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """The root [], and how many steps were Newton's and how many bisections."""
    low, high = m - 1.0, m + 1.0  # |e sin(E)| < 1
    x = m
    newton = halved = 0
    value = kepler(x, e, m)
    while value.abs() > TOLERANCE:
        if value > 0:
            high = x
        else:
            low = x
        x = x - value / (1 - e * x.cos())
        if low < x < high:
            newton += 1
        else:
            x = (low + high) / 2
            halved += 1
        value = kepler(x, e, m)
    # One step more than the root needs: its derivative is that of the root, however the loop came there.
    return x - value / (1 - e * x.cos()), newton, halved


def root(e: Tensor, m: Tensor) -> Tensor:
    """The root alone []."""
    return solve(e, m)[0]


def run(size: int) -> dict[str, Tensor]:
    """Roots, steps and gradients on a grid [size, size] of eccentricities and times."""
    e = torch.linspace(0.0, 0.999, size, dtype=torch.float64)
    m = torch.linspace(0.01, 3.1, size, dtype=torch.float64)
    e, m = (x.flatten() for x in torch.meshgrid(e, m, indexing="ij"))
    x, newton, halved = vmap(solve)(e, m)
    by_e, by_m = vmap(grad(root, argnums=(0, 1)))(e, m)
    out = {"e": e, "m": m, "x": x, "newton": newton, "halved": halved, "by_e": by_e, "by_m": by_m}
    return {name: value.reshape(size, size) for name, value in out.items()}


def implicit(e: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of the root by e and by M, from the derivative of the equation."""
    return x.sin() / (1 - e * x.cos()), 1 / (1 - e * x.cos())


def main(arguments: list[str] | None = None) -> None:
    """Solve, and plot the numbers of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=120, help="eccentricities, and times")
    parser.add_argument("--output", type=Path, default=Path("output/root_finder.png"))
    options = parser.parse_args(arguments)
    out = run(options.size)
    by_e, by_m = implicit(out["e"], out["x"])
    gap = max((out["by_e"] - by_e).abs().max(), (out["by_m"] - by_m).abs().max())
    figure = Figure(figsize=(8, 3.2), dpi=80, layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("newton", "halved")):
        image = axes.imshow(out[name].numpy(), origin="lower", aspect="auto", extent=(0.01, 3.1, 0, 0.999))
        axes.set(xlabel="M", ylabel="e", title={"newton": "Newton's steps", "halved": "bisections"}[name])
        figure.colorbar(image)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    steps = out["newton"] + out["halved"]
    print(
        f"{out['x'].numel()} equations, {int(steps.min())} to {int(steps.max())} steps; "
        f"gradients are within {gap:.0e} of the implicit formula; {options.output}"
    )


if __name__ == "__main__":
    main()
