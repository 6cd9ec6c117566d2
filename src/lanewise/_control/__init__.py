"""Lanes that take different ways through ordinary Python code."""

import lanewise._control.texts
import lanewise._control.torch_names  # noqa: F401
from lanewise._control.split import run_apart
from lanewise._transforms.parting import runner

runner.run = run_apart
