"""Ranking examples by their gradients, and how well a ranking finds the flipped labels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lanewise.demo.model import Params
from lanewise.demo.training import norms


def gradient_norm(gradients: Params) -> Tensor:
    """The length [N] of each example's gradient: how much the example would still change the network."""
    return norms(gradients)


def share_of_mean(gradients: Params) -> Tensor:
    """The share [N] of the mean gradient that each example supplies; the shares add up to 1.

    The share is <g_i, m> / (N <m, m>) with m the mean of all g_i, so it is positive where the example agrees with m.
    """
    rows = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)
    mean = rows.mean(dim=0)
    return rows @ mean / (len(rows) * (mean @ mean))


@dataclass(frozen=True)
class Finding:
    """How many of the first `looked_at` examples of a ranking carry a flipped label."""

    looked_at: int
    found: int
    flipped: int

    @property
    def precision(self) -> float:
        return self.found / self.looked_at

    @property
    def recall(self) -> float:
        return self.found / self.flipped


def order_of(score: Tensor) -> Tensor:
    """The examples [N], the highest score first; equal scores keep their order."""
    return score.argsort(descending=True, stable=True)


def find(score: Tensor, flipped: Tensor, looked_at: int) -> Finding:
    """Look at the `looked_at` highest scores [N] and count the flipped [N] among them."""
    found = int(flipped[order_of(score)[:looked_at]].sum())
    return Finding(looked_at, found, int(flipped.sum()))
