"""Composable function transforms for PyTorch: write a function for one example, run and differentiate it for all."""

import lanewise._rules.batch  # noqa: F401
from lanewise._transforms.vmap import vmap

__all__ = ["vmap"]
