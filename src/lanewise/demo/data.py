"""Handwritten digits, some of them with a label that was made wrong on purpose."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] with values in 0..1 and integer labels [N].

    `given` is what the training sees, `true` is what scikit-learn says, `flipped` marks where they differ.
    """

    images: Tensor
    given: Tensor
    true: Tensor
    flipped: Tensor
    test_images: Tensor
    test_labels: Tensor


def flip_labels(labels: Tensor, count: int, generator: torch.Generator, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Change `count` of the labels [N] to another class, drawn evenly; return the labels and a mask of the changed."""
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    shift = torch.randint(1, classes, (count,), generator=generator)
    changed = labels.clone()
    changed[chosen] = (labels[chosen] + shift) % classes
    return changed, changed != labels


def load(seed: int = 0, training: int = 1500, fraction: float = 0.05) -> Digits:
    """Shuffle scikit-learn's 1,797 digits, keep the first for training and flip a fraction of their labels."""
    pixels, classes = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(classes), generator=generator)
    images = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)[order]
    labels = torch.tensor(classes)[order]
    true = labels[:training]
    given, flipped = flip_labels(true, round(fraction * training), generator)
    return Digits(images[:training], given, true, flipped, images[training:], labels[training:])
