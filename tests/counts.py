"""How much of the package a call passes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lanewise

PACKAGE = str(Path(lanewise.__file__).parent)


def python_calls(run: Callable[[], Any]) -> int:
    """How many functions of the package a call comes to. (torch's own depend on what else the process has run.)"""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
