"""A solver of differential equations that chooses its steps, written for one equation.

Van der Pol's oscillator, x'' = mu (1 - x^2) x' - x, turns sharp corners for some mu, which take three times the steps.
Each example accepts and rejects steps of its own; the gradient of where it ends goes through the steps it took.

python -m examples.adaptive_ode --size 40
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lanewise import grad, vmap

END = 6.0
TOLERANCE = 1e-6

# Dormand and Prince, "A family of embedded Runge-Kutta formulae", 1980: stages, and the weights of order five and four.
STAGES = [
    [1 / 5],
    [3 / 40, 9 / 40],
    [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
]
FOURTH = [5179 / 57600, 0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40]


def slope(y: Tensor, mu: Tensor) -> Tensor:
    """The state y [2] -> its derivative in time [2]."""
    return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


def step(y: Tensor, h: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """One step of length h: the state after it [2], and how far it may be off, in units of the tolerance []."""
    slopes = [slope(y, mu)]
    after = y
    for weights in STAGES:
        after = y + h * sum(w * k for w, k in zip(weights, slopes))
        slopes.append(slope(after, mu))
    less = y + h * sum(w * k for w, k in zip(FOURTH, slopes))
    return after, ((after - less) / TOLERANCE).norm()


def solve(mu: Tensor) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """The state at the end [2], and the numbers of steps accepted and rejected."""
    y = torch.tensor([2.0, 0.0], dtype=mu.dtype)
    t = torch.zeros_like(mu)
    h = torch.full_like(mu, 0.05)
    accepted = rejected = 0
    while t < END:
        h = torch.minimum(h, END - t)
        after, error = step(y, h, mu)
        if error <= 1:
            t, y = t + h, after
            accepted += 1
        else:
            rejected += 1
        h = h * (0.9 * error ** (-1 / 5)).clamp(0.2, 5.0)
    return y, accepted, rejected


def position(mu: Tensor) -> Tensor:
    """Where the oscillator is at the end []."""
    return solve(mu)[0][0]


def run(size: int) -> dict[str, Tensor]:
    """Solutions, numbers of steps and gradients for `size` oscillators."""
    mu = torch.linspace(0.1, 12.0, size, dtype=torch.float64)
    y, accepted, rejected = vmap(solve)(mu)
    return {"mu": mu, "y": y, "accepted": accepted, "rejected": rejected, "grad": vmap(grad(position))(mu)}


def main(arguments: list[str] | None = None) -> None:
    """Solve, and plot the numbers of steps and the gradients, with finite differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=60, help="oscillators")
    parser.add_argument("--output", type=Path, default=Path("output/adaptive_ode.png"))
    options = parser.parse_args(arguments)
    out = run(options.size)
    mu, shift = out["mu"], 1e-6
    differences = (vmap(position)(mu + shift) - vmap(position)(mu - shift)) / (2 * shift)
    shown = {name: value.numpy() for name, value in out.items()}
    figure = Figure(figsize=(8, 3.2), dpi=80, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(shown["mu"], shown["accepted"], width=0.15, label="accepted")
    left.bar(shown["mu"], shown["rejected"], width=0.15, bottom=shown["accepted"], label="rejected")
    left.set(xlabel="mu", ylabel="steps of each example")
    left.legend()
    right.plot(shown["mu"], shown["grad"], label="gradient of the position")
    right.plot(shown["mu"], differences.numpy(), ".", label="finite differences")
    right.set(xlabel="mu")
    right.legend()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    low, high = int(out["accepted"].min()), int(out["accepted"].max())
    gap = (out["grad"] - differences).abs().median()
    print(
        f"{options.size} examples, {low} to {high} steps; "
        f"gradients and differences are {gap:.0e} apart; {options.output}"
    )


if __name__ == "__main__":
    main()
