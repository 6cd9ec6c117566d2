"""Entry of `python -m benchmarks`."""

import argparse
import ctypes
import os
import sys
import time
import traceback
from pathlib import Path

# Before torch and JAX are loaded: one thread each, so that like is compared with like.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch

from benchmarks import (  # noqa: F401  (they register workloads)
    call,
    control,
    ensemble,
    indexing,
    jacobians,
    layers,
    per_sample,
    science,
    training,
)
from benchmarks.compare import compare, first_line
from benchmarks.measure import round_robin, share_of
from benchmarks.memory import peak_bytes
from benchmarks.report import Result, as_json, markdown, summary, terminal
from benchmarks.workload import COMPILED, JAX, OWN, TORCH_FUNC, WORKLOADS, Workload

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; return 1 if a result was wrong or a call failed, whatever the times."""
    options = _options(arguments)
    torch.set_num_threads(1)
    _keep_freed_memory()
    chosen = [w for w in WORKLOADS if not options.only or {w.group, w.name} & set(options.only)]
    if not chosen:
        names = sorted({w.group for w in WORKLOADS}) + [w.name for w in WORKLOADS]
        print(f"Nothing is called {' or '.join(options.only)}. There are: {', '.join(names)}.", file=sys.stderr)
        return 2
    results = []
    for workload in chosen:
        print(f"{workload.group}: {workload.name}", end=" ", file=sys.stderr, flush=True)
        results.append(_measure(workload, options))
        print(f"{results[-1].speed:.2f} {results[-1].verdict}", file=sys.stderr, flush=True)
    print(terminal(results))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(as_json(results))
    table = markdown(results)
    if options.markdown:
        options.markdown.write_text(table)
    if options.docs:
        apart = [result for result in results if result.workload.group == "control flow"]
        _put(markdown([result for result in results if result not in apart]), ROOT / "docs" / "benchmarks.md")
        _put(markdown(apart), ROOT / "docs" / "benchmarks.md", "control flow")
        _put(summary(results), ROOT / "README.md")
    reached = sum(r.reached for r in results)
    print(f"\n{reached} of {len(results)} targets reached; all numbers in {options.json}")
    return 1 if any(r.error for r in results) else 0


def _keep_freed_memory() -> None:
    """Keep glibc from giving freed memory back to the kernel.

    It does when the end of the heap is free, as after a call that leaves nothing behind. The next call then pays for
    fresh pages, up to a third of its time, by luck and not by merit: not if garbage of a peer lies at the end.
    """
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, 1 << 30)
        mallopt(mmap_threshold, 1 << 25)


def _put(table: str, page: Path, of: str = "") -> None:
    """Write the table, of a group if named, into its place on a page."""
    begin, end = (mark.replace("table", f"table of {of}") if of else mark for mark in (BEGIN, END))
    text = page.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}\n{table}{end}{after}")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Lanewise against its peers.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="groups or workloads to measure")
    parser.add_argument("--quick", action="store_true", help="five short rounds instead of fifteen")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of torch.func (slow to start)")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"))
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/benchmarks.md and README.md")
    options = parser.parse_args(arguments)
    if options.docs and (options.only or options.quick):
        parser.error("--docs takes a full run: leave --only and --quick out")
    return options


def _measure(workload: Workload, options: argparse.Namespace) -> Result:
    result = Result(workload, {}, {}, {}, {}, {})
    try:
        peers = workload.build()
        result.extrapolated = frozenset(name for name, call in peers.items() if share_of(call) < 1)
        if options.compile:
            peers[COMPILED] = torch.compile(peers[TORCH_FUNC])
        result.difference, result.notes = compare(peers, workload.tolerance)
        rounds, block = (5, 0.004) if options.quick else (15, 0.02)
        clocks = {JAX: time.process_time}  # XLA works in threads of its own
        for name, timing in round_robin(peers, rounds=rounds, block=block, clocks=clocks).items():
            result.seconds[name], result.spread[name] = timing.median, timing.spread
        if workload.target.memory is not None:
            measured = {OWN, TORCH_FUNC, workload.target.peer} & set(peers)
            result.peak.update({name: peak_bytes(peers[name]) for name in sorted(measured)})
    except Exception as error:
        traceback.print_exc()
        result.error = first_line(error)
    return result


if __name__ == "__main__":
    sys.exit(main())
