"""Which code is that of a library, and which the user's."""

import sys
import types
from typing import Any

# Packages whose functions run as they are: they do not branch on lane values, or answer for it themselves.
LIBRARIES = frozenset({"torch", "numpy", "lanewise", "tqdm", "typing_extensions", *sys.stdlib_module_names}) - {
    "__main__",
    "this",
    "antigravity",
}


def of_library(module: Any) -> bool:
    """Whether a module, by its name, is one of a library."""
    return str(module).partition(".")[0] in LIBRARIES


def is_library(func: types.FunctionType) -> bool:
    """Whether a function belongs to a library whose functions run as they are."""
    return of_library(func.__globals__.get("__name__", ""))
