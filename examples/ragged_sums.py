"""Rows of different lengths, padded to one, and code for one row: `x[:n]`, `range(int(n))`, `x[mask]`.

Each row is a sentence; each word has a weight. A row's score is read off its own words only, and so is its gradient.

python -m examples.ragged_sums
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lanewise import grad, vmap

SENTENCES = [
    "rain",
    "the river is high today",
    "after the long rain the river has left its bed",
    "a bridge holds",
    "nobody crosses it before the water has gone down again in the evening",
    "then the children come back",
]


def padded(sentences: list[str]) -> tuple[Tensor, Tensor, list[str]]:
    """Numbers of words [B, L], lengths [B] and the vocabulary."""
    words = sorted({word for sentence in sentences for word in sentence.split()})
    numbers = [[words.index(word) for word in sentence.split()] for sentence in sentences]
    lengths = torch.tensor([len(row) for row in numbers])
    width = int(lengths.max())
    return torch.tensor([row + [0] * (width - len(row)) for row in numbers]), lengths, words


def mean(x: Tensor, n: Tensor) -> Tensor:
    """The mean weight of the words [], x [L]"""
    return x[: int(n)].mean()


def fading(x: Tensor, n: Tensor) -> Tensor:
    """A sum in which a word counts half of the one after it []."""
    total = torch.zeros(())
    for i in range(int(n)):
        total = 0.5 * total + x[i]
    return total


def positive(x: Tensor, n: Tensor) -> Tensor:
    """The sum of the weights above zero []."""
    words = x[: int(n)]
    return words[words > 0].sum()


def longest_rise(x: Tensor, n: Tensor) -> Tensor | int:
    """How many words in a row have rising weights []."""
    best = length = 1
    for i in range(1, int(n)):
        length = length + 1 if x[i] > x[i - 1] else 1
        best = max(best, length)
    return best


FUNCTIONS = [mean, fading, positive, longest_rise]


def run(sentences: list[str], seed: int = 0) -> dict[str, Tensor]:
    """The weights of all words [B, L], the lengths, each function of all rows, and the gradient of `fading`."""
    numbers, lengths, words = padded(sentences)
    table = torch.randn(len(words), generator=torch.Generator().manual_seed(seed))
    x = table[numbers]
    out = {f.__name__: vmap(f)(x, lengths) for f in FUNCTIONS}
    return {"x": x, "lengths": lengths, **out, "grad": vmap(grad(fading))(x, lengths)}


def main(arguments: list[str] | None = None) -> None:
    """Score, and plot the gradients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=len(SENTENCES), help="rows, the sentences again and again")
    parser.add_argument("--output", type=Path, default=Path("output/ragged_sums.png"))
    options = parser.parse_args(arguments)
    sentences = [SENTENCES[i % len(SENTENCES)] for i in range(options.size)]
    out = run(sentences)
    figure = Figure(figsize=(8, 2.6), dpi=80, layout="constrained")
    axes = figure.subplots()
    axes.imshow(out["grad"][: len(SENTENCES)].numpy(), cmap="Greens", vmax=2, aspect="auto")
    for row, sentence in enumerate(sentences[: len(SENTENCES)]):
        for place, word in enumerate(sentence.split()):
            axes.text(place, row, word, ha="center", va="center", fontsize=7)
    axes.set(xticks=[], yticks=[], title="the gradient of `fading` by each word's weight")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output)
    print(f"{options.size} rows of {int(out['lengths'].min())} to {int(out['lengths'].max())} words; {options.output}")


if __name__ == "__main__":
    main()
