"""Composable function transforms for PyTorch: write a function for one example, run and differentiate it for all."""

import lanewise._control
import lanewise._core.functions.function
import lanewise._core.python.legacy
import lanewise._core.python.reshaped
import lanewise._core.python.scripted
import lanewise._core.python.surface
import lanewise._core.recording.autograd
import lanewise._core.recording.nodes
import lanewise._rules.batch
import lanewise._rules.jvp
import lanewise._transforms.gradients  # noqa: F401
from lanewise import debug as debug
from lanewise import errors as errors
from lanewise import random as random
from lanewise._control.functional.checks import error_if
from lanewise._control.functional.operators import cond, fori_loop, switch, while_loop
from lanewise._control.functional.scans import associative_scan, scan
from lanewise._control.functional.scans import map as map
from lanewise._transforms.compiling import never_compile_packages
from lanewise._transforms.forward import jvp, linearize
from lanewise._transforms.functional import debug_unwrap
from lanewise._transforms.functionalize import functionalize
from lanewise._transforms.jacobian import hessian, jacfwd, jacrev
from lanewise._transforms.rearrange import rearrange
from lanewise._transforms.reverse import grad, grad_and_value, value_and_grad, vjp
from lanewise._transforms.vmap import vmap
from lanewise.nn import functional_call, replace_all_batch_norm_modules_, stack_module_state

never_compile_packages("lanewise._core.", "lanewise._control.", "lanewise._transforms.")

__version__ = "0.1.0"

# What `import *` brings: no modules, and nothing by a name of Python's own. `lanewise.map`, `lanewise.random`,
# `lanewise.errors` and `lanewise.debug` are public, too.
__all__ = [
    "associative_scan",
    "cond",
    "debug_unwrap",
    "error_if",
    "fori_loop",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "scan",
    "stack_module_state",
    "switch",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
