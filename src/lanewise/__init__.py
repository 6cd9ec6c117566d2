"""Composable function transforms for PyTorch: write a function for one example, run and differentiate it for all."""

import lanewise._rules.batch  # noqa: F401
from lanewise._transforms.rearrange import rearrange
from lanewise._transforms.vmap import vmap
from lanewise.nn import functional_call, replace_all_batch_norm_modules_, stack_module_state

__all__ = ["functional_call", "rearrange", "replace_all_batch_norm_modules_", "stack_module_state", "vmap"]
