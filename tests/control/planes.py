"""How many planes of lanes open."""

from collections.abc import Callable
from typing import Any


class Planes:
    """Counts the planes of lanes that open."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, run: Callable[[], Any]) -> int:
        before = self.count
        run()
        return self.count - before
