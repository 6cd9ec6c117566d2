"""The figure: the first suspects as images, where the flipped labels lie, and how fast a ranking finds them."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from torch import Tensor

from lanewise.demo.data import Digits
from lanewise.demo.ranking import order_of

WRONG, RIGHT, SECOND = "#c8102e", "#3b6ea8", "#e0a030"


def save(path: Path, digits: Digits, predicted: Tensor, norm: Tensor, share: Tensor) -> None:
    """Write the figure as PNG. `predicted`, `norm` and `share` are [N] over the training images."""
    figure = Figure(figsize=(14, 7.6), layout="constrained")
    figure.suptitle("Wrong labels found by the size of their gradients", fontsize=17, fontweight="bold")
    grid = figure.add_gridspec(1, 2, width_ratios=(1.5, 1))
    _suspects(figure, grid[0], digits, predicted, norm)
    right = grid[1].subgridspec(2, 1)
    _histogram(figure.add_subplot(right[0]), norm, digits.flipped)
    _found(figure.add_subplot(right[1]), {"gradient norm": norm, "share of the mean gradient": share}, digits.flipped)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _suspects(figure: Figure, place: SubplotSpec, digits: Digits, predicted: Tensor, norm: Tensor) -> None:
    rows, columns = 4, 6
    part = figure.add_subfigure(place)
    axes = part.subplots(rows, columns)
    chosen = order_of(norm)[: rows * columns].tolist()
    hits = int(digits.flipped[chosen].sum())
    part.suptitle(f"The first {len(chosen)} suspects: {hits} were flipped (red), {len(chosen) - hits} were not (blue)")
    for axis, index in zip(axes.flat, chosen):
        axis.imshow(digits.images[index, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
        colour = WRONG if digits.flipped[index] else RIGHT
        for spine in axis.spines.values():
            spine.set(edgecolor=colour, linewidth=3)
        axis.set_title(f"label {digits.given[index]}", color=colour, fontsize=12, fontweight="bold")
        axis.set_xlabel(f"network: {predicted[index]}", fontsize=11)


def _histogram(axis: Axes, norm: Tensor, flipped: Tensor) -> None:
    norm = norm.clamp(min=1e-8)  # a norm of exactly zero has no place on a log scale
    bins = np.geomspace(norm.min().item(), norm.max().item(), 45).tolist()
    axis.hist(norm[~flipped].numpy(), bins, color=RIGHT, alpha=0.75, label=f"label right ({int((~flipped).sum()):,})")
    axis.hist(norm[flipped].numpy(), bins, color=WRONG, alpha=0.85, label=f"label flipped ({int(flipped.sum())})")
    axis.set(xscale="log", xlabel="norm of the example's gradient (log scale)", ylabel="examples")
    axis.set_title("Flipped labels pull hardest")
    axis.legend(loc="upper left", frameon=False)


def _found(axis: Axes, scores: dict[str, Tensor], flipped: Tensor) -> None:
    count, total = int(flipped.sum()), len(flipped)
    shown = 3 * count
    for (name, score), colour in zip(scores.items(), (WRONG, SECOND)):
        found = flipped[order_of(score)][:shown].cumsum(0)
        axis.plot(range(1, shown + 1), found.numpy(), color=colour, linewidth=2.5, label=name)
    axis.plot(
        [0, count, shown], [0, count, count], color="black", linewidth=1, linestyle=":", label="no mistake at all"
    )
    axis.plot([0, shown], [0, shown * count / total], color="gray", linewidth=1.5, linestyle="--", label="chance")
    axis.set(xlabel="examples looked at, most suspicious first", ylabel=f"flipped labels found (of {count})")
    axis.set(xlim=(0, shown), ylim=(0, 1.06 * count))
    axis.set_title("Almost every look is a hit")
    axis.legend(loc="center right", frameon=False)
