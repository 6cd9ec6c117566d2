"""Results as JSON, as a table for the terminal and as a table for the docs."""

import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.workload import BATCHED, COMPILED, JAX, LOOP, OWN, TORCH_FUNC, Workload

PEERS = (OWN, TORCH_FUNC, COMPILED, LOOP, BATCHED, JAX)


@dataclass
class Result:
    """What was measured of a workload; `error` says what went wrong instead."""

    workload: Workload
    seconds: dict[str, float]
    spread: dict[str, float]
    difference: dict[str, float]
    peak: dict[str, int]
    notes: dict[str, str]
    error: str | None = None
    extrapolated: frozenset[str] = frozenset()

    @property
    def speed(self) -> float:
        """The target peer's time over Lanewise's, or nan."""
        peer = self.workload.target.peer
        return self.seconds[peer] / self.seconds[OWN] if peer in self.seconds and OWN in self.seconds else math.nan

    @property
    def by_hand(self) -> float:
        """The time of the work written by hand for a batch over Lanewise's, or nan."""
        return self.seconds.get(BATCHED, math.nan) / self.seconds.get(OWN, math.nan)

    @property
    def memory(self) -> float | None:
        """Lanewise's peak memory over the target peer's, where it was measured."""
        peer = self.workload.target.peer
        return self.peak[OWN] / self.peak[peer] if peer in self.peak and OWN in self.peak else None

    @property
    def reached(self) -> bool:
        limit, memory = self.workload.target.memory, self.memory
        lean = limit is None or (memory is not None and memory <= limit)
        by_hand = self.workload.target.batched
        quick = by_hand is None or self.by_hand >= by_hand
        return self.error is None and self.speed >= self.workload.target.speed and lean and quick

    @property
    def verdict(self) -> str:
        if self.error is not None:
            return "FAILED"
        return "ok" if self.reached else "below"


def duration(seconds: float) -> str:
    """A time in microseconds, or in milliseconds from one on."""
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _time(result: Result, peer: str) -> str:
    """What a peer took; with a tilde where a part of the work was measured."""
    if peer not in result.seconds:
        return "-"
    return ("~" if peer in result.extrapolated else "") + duration(result.seconds[peer])


def _cells(result: Result, peers: list[str]) -> list[str]:
    target = result.workload.target
    times = [_time(result, p) for p in peers]
    ratio, goal = (
        f"{result.speed:.0f}" if result.speed > 100 else f"{result.speed:.2f}",
        f"{target.speed:.3g} x {target.peer}",
    )
    if target.batched is not None:
        ratio += f", {result.by_hand:.2f}"
        goal += f", {target.batched:.2g} x {BATCHED}"
    if target.memory is not None:
        ratio += f", memory {result.memory:.2f}" if result.memory is not None else ", memory -"
        goal += f", memory {target.memory:g}"
    return [result.workload.name, result.workload.about, *times, ratio, goal, result.verdict]


def _present(results: list[Result]) -> list[str]:
    return [p for p in PEERS if any(p in r.seconds for r in results)]


def terminal(results: list[Result]) -> str:
    """The results as an aligned table, grouped."""
    peers = _present(results)
    head = ["", *peers, "ratio", "target", ""]
    lines: list[list[str]] = []
    for group in dict.fromkeys(r.workload.group for r in results):
        lines.append([f"{group}:"] + [""] * (len(head) - 1))
        for result in results:
            if result.workload.group == group:
                cells = _cells(result, peers)
                lines.append([f"  {cells[0]}", *cells[2:]])
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    aligned = [
        "  ".join(
            cell.ljust(w) if i in (0, len(head) - 1) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        )
        for row in [head, *lines]
    ]
    notes = [f"{r.workload.name}: {r.error}" for r in results if r.error]
    notes += [f"{r.workload.name}, {peer}: left out, {note}" for r in results for peer, note in r.notes.items()]
    return "\n".join(line.rstrip() for line in aligned + notes)


def markdown(results: list[Result]) -> str:
    """The results as a table for the docs, with the machine under it."""
    peers = _present(results)
    head = ["workload", *peers, "ratio", "target", "reached"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(peers) + 1) + "---|---|"]
    for result in results:
        cells = _cells(result, peers)
        lines.append("| " + " | ".join([cells[1], *cells[2:-1], "yes" if result.reached else "no"]) + " |")
    if any(r.extrapolated for r in results):
        lines += ["", "~: measured on the first 50 examples, and multiplied up."]
    where = environment()
    lines += ["", f"torch {where['torch']}, Python {where['python']}, {where['cpu']}, one thread."]
    return "\n".join(lines) + "\n"


# Groups of single operations, which the short table leaves to the long one.
_SINGLE = ("conv", "indexing")


def summary(results: list[Result]) -> str:
    """What is measured against torch.func, as a short table: the work, and the ratio."""
    lines = ["| workload | torch.func | Lanewise | ratio |", "|---|---:|---:|---:|"]
    for result in results:
        if {OWN, TORCH_FUNC} <= result.seconds.keys() and result.workload.group not in _SINGLE:
            own, peer = result.seconds[OWN], result.seconds[TORCH_FUNC]
            cells = [result.workload.about, duration(peer), duration(own), f"{peer / own:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_json(results: list[Result]) -> str:
    """Everything that was measured."""
    rows = [
        {
            "group": r.workload.group,
            "name": r.workload.name,
            "about": r.workload.about,
            "seconds": r.seconds,
            "spread": r.spread,
            "difference": r.difference,
            "peak_bytes": r.peak,
            "target": {
                "speed": r.workload.target.speed,
                "peer": r.workload.target.peer,
                "memory": r.workload.target.memory,
            },
            "speed": r.speed,
            "memory": r.memory,
            "reached": r.reached,
            "extrapolated": sorted(r.extrapolated),
            "left_out": r.notes,
            "error": r.error,
        }
        for r in results
    ]
    return json.dumps({"environment": environment(), "results": rows}, indent=1) + "\n"


def environment() -> dict[str, object]:
    """The versions and the processor."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
