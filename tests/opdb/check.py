"""One op of op_db through one composition of transforms, over its samples, in_dims and numbers of lanes."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise._core.missing import lane_loops
from lanewise._gaps import REFUSALS

from . import first, second
from .oracle import Layout, Mismatch, NoOracle, layouts
from .samples import OPS, UNINITIALISED, LaneSample, choose_dtype, lane_samples

COMPOSITIONS = first.COMPOSITIONS | second.COMPOSITIONS
MAIN = ("vmap", "vmap_grad", "grad_vmap")
_WITHOUT_GRAD = ("vmap", "vmap_vmap", "vmap_inplace")


@dataclass
class Outcome:
    """What became of one op in one composition."""

    name: str
    composition: str
    status: str = "none"  # ok, wrong, error, none (nothing to check), crash, timeout
    detail: str = ""
    where: str = ""  # sample, in_dims and number of lanes of the failure
    worst: float = 0.0
    checked: int = 0
    failed: int = 0
    refused: int = 0  # layouts that are refused on purpose (lanewise._gaps.REFUSALS)
    slow: list[str] = field(default_factory=list)  # ops that went through the loop over lanes

    def to_dict(self) -> dict:
        """The fields as plain data, for JSON."""
        return asdict(self)


def _seeded(f: Callable) -> Callable:
    def g(*args):
        torch.manual_seed(0)
        return f(*args)

    return g


class _Tags(TorchDispatchMode):
    """Gathers the tags of the ops that go by."""

    def __init__(self):
        super().__init__()
        self.found: set[torch.Tag] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.update(func.tags)
        return func(*args, **(kwargs or {}))


def tags(sample: LaneSample) -> set[torch.Tag]:
    """The tags of the ops that the sample runs through."""
    with _Tags() as mode:
        sample.f(*(t.clone() for t in sample.lanes[0]))
    return mode.found


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def check(name: str, composition: str, cap: int = 6, show: bool = False) -> Outcome:
    """One op of op_db through one composition, over samples, in_dims and lanes; `show` prints tracebacks."""
    op = OPS[name]
    outcome = Outcome(name, composition)
    if not op.supported_dtypes("cpu"):
        return outcome
    with_grad = composition not in _WITHOUT_GRAD
    if with_grad and not (choose_dtype(op).is_floating_point or choose_dtype(op).is_complex):
        return outcome
    inplace = composition == "vmap_inplace"
    if (with_grad and not op.supports_autograd) or (inplace and op.inplace_variant is None):
        return outcome
    run = COMPOSITIONS[composition]
    loops = dict(lane_loops)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in lane_samples(op, with_grad, cap, inplace):
            if not sample.lanes[0]:
                continue
            try:
                found = tags(sample)
            except Exception:
                continue  # plain torch refuses the sample
            random = torch.Tag.nondeterministic_seeded in found
            if random:
                sample.f = _seeded(sample.f)
            for layout in layouts(sample.lanes[0]):
                if layout.lanes == 0 and (
                    name == "tensor_split" or found & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
                ):
                    continue  # no lane says how large the result would be
                _one(outcome, run, sample, layout, random, show)
    if outcome.refused and not outcome.checked:
        outcome.status, outcome.detail = "error", "refused throughout"
    outcome.slow = sorted(op for op, count in lane_loops.items() if count != loops.get(op))
    return outcome


_RANK = {"none": 0, "ok": 1, "error": 2, "wrong": 3}


def _one(outcome: Outcome, run: Callable, sample: LaneSample, layout: Layout, random: bool, show: bool) -> None:
    status, detail, trace = "ok", "", []
    try:
        outcome.worst = max(outcome.worst, run(sample, layout, random, outcome.name not in UNINITIALISED))
    except NoOracle:
        return
    except Mismatch as mismatch:
        status, detail = "wrong", str(mismatch)
        outcome.worst = max(outcome.worst, mismatch.size)
    except Exception as error:
        if any(phrase in str(error) for phrase in REFUSALS):
            outcome.refused += 1
            return
        status, detail, trace = "error", _first_line(error), traceback.format_exception(error)
    outcome.checked += 1
    outcome.failed += status != "ok"
    if _RANK[status] > _RANK[outcome.status]:
        outcome.status, outcome.detail = status, detail
        if detail:
            outcome.where = f"({sample.text}) in_dims={layout.in_dims} lanes={layout.lanes}"
            if show:
                print(outcome.name, outcome.where, *trace, sep="\n", file=sys.stderr)
