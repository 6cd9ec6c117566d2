"""Plain text for the terminal: headings, explanations and aligned tables."""

import textwrap
from collections.abc import Sequence

WIDTH = 96


def title(text: str) -> None:
    """Print a heading with a double line under it."""
    print(f"{text}\n{'=' * len(text)}")


def section(text: str) -> None:
    """Print a heading with a line under it and a blank line before."""
    print(f"\n{text}\n{'-' * len(text)}")


def explain(text: str) -> None:
    """Print a paragraph, wrapped."""
    print(textwrap.fill(" ".join(text.split()), WIDTH))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a head; the first column is set left, the others right.

    One more cell than the head has names is a remark and follows the row.
    """
    columns = len(head)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(columns)]
    print()
    for row in [head, *rows]:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        print("  " + "   ".join(cells + list(row[columns:])).rstrip())


def percent(value: float) -> str:
    """A fraction as a percentage with one decimal."""
    return f"{100 * value:.1f} %"
