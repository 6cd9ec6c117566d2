"""Lanes that take different ways through ordinary Python code."""

import lanewise._control.functional.torch_names
import lanewise._control.runtime.texts  # noqa: F401
from lanewise._control.abreast.calls import run_abreast
from lanewise._control.masking.masked_lanes import run_masked, run_masked_lanes, run_straight
from lanewise._control.runs.loops import run_looped
from lanewise._control.runs.split import run_apart
from lanewise._control.runtime.hooks import run_hook
from lanewise._control.runtime.merging import Mixed
from lanewise._control.runtime.numbers import LaneNumber, as_tensor
from lanewise._core.functions.numbers import mixed_classes, number_classes
from lanewise._core.recording.hooks import runner as hook_runner
from lanewise._transforms.parting import runner

runner.run = run_apart
runner.looped = run_looped
runner.masked = run_masked_lanes
runner.masked_plainly = run_masked
runner.straight = run_straight
runner.abreast = run_abreast
runner.number_as_tensor = as_tensor
hook_runner.run = run_hook
number_classes.add(LaneNumber)
mixed_classes.add(Mixed)
