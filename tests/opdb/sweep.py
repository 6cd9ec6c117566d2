"""Sweep of torch's op_db through compositions of transforms.

    python -m tests.opdb.sweep                               every op through vmap, vmap_grad and grad_vmap
    python -m tests.opdb.sweep -k matmul -k '^linalg'        only ops whose name matches one of these patterns
    python -m tests.opdb.sweep --composition vmap_jvp        another composition (repeatable; `all` for all of them)
    python -m tests.opdb.sweep --jobs 2 --json out.json      two processes; every outcome as JSON
    python -m tests.opdb.sweep --composition all --docs      the counts into docs/coverage.md
    python -m tests.opdb.sweep --fraction 0.15 --seed 0      a seeded share of the ops
    python -m tests.opdb.sweep --failures --traceback        only what is not right, with the tracebacks of failures

Compositions: vmap, vmap_grad, grad_vmap, vmap_vmap, vmap_vmap_grad, vmap_jacrev, vmap_inplace, backward_vmap, jvp,
vmap_jvp, jvp_vmap, jvp_grad, grad_jvp, grad_grad, jvp_jvp, vmap_jvp_grad, backward_vmap_grad, vmap_grad_grad,
vmap_jvp_jvp. Mapped functions are called three times: what a call has shown lets a later one run otherwise.
One line per op and composition:

    ok      add               vmap       42 checks, worst 0
    slow    svd               vmap       42 checks, worst 2e-16 [lane loop: aten.linalg_svd.default]
    wrong   flip              vmap       3 of 42: output[0]: differs by 1.2 at (float64[4], dims=()) in_dims=(1,) ...
    error   nonzero           vmap       7 of 42: RuntimeError: ...
    crash   lu_unpack         vmap       SIGSEGV
    none    argmax            vmap_grad  nothing to check (not differentiable, random, or plain torch fails)

`gap` instead of `error` marks what `lanewise._gaps` names; `fixed` a known gap that is none any more.
Ops run in child processes that answer after each op, so a crash or a hang is the fault of one op and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from lanewise._gaps import gap_reason

from .check import COMPOSITIONS, MAIN, Outcome, check
from .samples import OPS

GOOD = ("ok", "slow", "none", "gap")


def chosen(patterns: list[str], fraction: float, seed: int) -> list[str]:
    """The op names that match a pattern, sorted, thinned to a seeded share."""
    found = [name for name in sorted(OPS) if not patterns or any(re.search(p, name) for p in patterns)]
    if fraction < 1:
        found = sorted(random.Random(seed).sample(found, round(fraction * len(found))))
    return found


def verdict(outcome: dict) -> str:
    """The outcome's status, seen against the known gaps and the lane loop."""
    status = outcome["status"]
    reason = gap_reason(outcome["name"], outcome["composition"])
    if reason is not None:
        return "gap" if status == "error" else "fixed" if status == "ok" else status
    return "slow" if status == "ok" and outcome["slow"] else status


def line(outcome: dict) -> str:
    """One line for people."""
    head = f"{verdict(outcome):7} {outcome['name']:45} {outcome['composition']:13} "
    slow = f" [lane loop: {' '.join(outcome['slow'])}]" if outcome["slow"] else ""
    if outcome["status"] == "ok":
        refused = f", {outcome['refused']} refused on purpose" if outcome["refused"] else ""
        return f"{head}{outcome['checked']} checks{refused}, worst {outcome['worst']:.1g}{slow}"
    if outcome["status"] == "none":
        return f"{head}nothing to check"
    count = f"{outcome['failed']} of {outcome['checked']}: " if outcome["checked"] else ""
    where = f" at {outcome['where']}" if outcome["where"] else ""
    return f"{head}{count}{outcome['detail']}{where}{slow}"


def totals(outcomes: list[dict]) -> str:
    """Counts per composition."""
    rows = []
    for composition in dict.fromkeys(outcome["composition"] for outcome in outcomes):
        counts = Counter(verdict(o) for o in outcomes if o["composition"] == composition)
        checked = sum(counts.values()) - counts["none"]
        passed = counts["ok"] + counts["slow"] + counts["fixed"]
        rest = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        rows.append(f"{composition}: {passed}/{checked} right ({rest})")
    return "\n".join(rows)


def table(outcomes: list[dict]) -> str:
    """Counts per composition for the docs, with the torch they hold for."""
    rows = [
        "| composition | ops to check | right | of these, once per lane | known gaps | wrong or failed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for composition in dict.fromkeys(outcome["composition"] for outcome in outcomes):
        counts = Counter(verdict(o) for o in outcomes if o["composition"] == composition)
        right = counts["ok"] + counts["slow"] + counts["fixed"]
        checked = sum(counts.values()) - counts["none"]
        cells = [composition, checked, right, counts["slow"], counts["gap"], checked - right - counts["gap"]]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*rows, "", f"torch {torch.__version__}, {len(OPS)} ops."]) + "\n"


def write_docs(outcomes: list[dict]) -> None:
    """Put the table into its place in docs/coverage.md."""
    page = Path(__file__).parents[2] / "docs" / "coverage.md"
    begin, end = "<!-- table -->", "<!-- end of table -->"
    text = page.read_text()
    page.write_text(f"{text.split(begin)[0]}{begin}\n{table(outcomes)}{end}{text.split(end)[1]}")


def _worker(args: argparse.Namespace) -> None:
    """Answer on the pipe that stdout was; whatever the ops print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for task in sys.stdin:
        name, composition = json.loads(task)
        try:
            outcome = check(name, composition, args.cap, args.traceback)
        except Exception as error:
            text = f"sweep failed: {type(error).__name__}: {error}".splitlines()[0]
            outcome = Outcome(name, composition, "error", text)
            if args.traceback:
                traceback.print_exc()
        print(json.dumps(outcome.to_dict()), file=answers)


class _Child:
    """A worker process that is given one task at a time, and started again when it dies."""

    def __init__(self, cap: int, timeout: float, show: bool):
        self.command = [sys.executable, "-m", "tests.opdb.sweep", "--worker", "--cap", str(cap)]
        self.command += ["--traceback"] if show else []
        self.timeout = timeout
        self.show = show
        self.process: subprocess.Popen | None = None

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self.show else subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, name: str, composition: str, again: bool = True) -> dict:
        """The outcome of one task; `crash` or `timeout` when the process did not answer.

        A process that somebody else ended gets a second chance.
        """
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(self.timeout, stop)
        timer.start()
        try:
            process.stdin.write(json.dumps([name, composition]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        code = process.wait()
        self.close()
        if again and not expired.is_set() and code in (-signal.SIGTERM, -signal.SIGKILL):
            return self.run(name, composition, again=False)
        if expired.is_set():
            status, detail = "timeout", f"no answer in {self.timeout:g} s"
        else:
            status, detail = "crash", signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return {
            "name": name, "composition": composition, "status": status, "detail": detail, "where": "",
            "worst": 0.0, "checked": 0, "failed": 0, "refused": 0, "slow": [],
        }  # fmt: skip

    def close(self) -> None:
        """End the process and close its pipes."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def sweep(
    tasks: list[tuple[str, str]], jobs: int = 1, cap: int = 6, timeout: float = 240, show: bool = False
) -> Iterator[dict]:
    """Outcomes of (name, composition) tasks, as they come."""
    pending = iter(tasks)
    lock = threading.Lock()
    done: list[dict] = []
    arrived = threading.Condition()

    def drive() -> None:
        child = _Child(cap, timeout, show)
        try:
            while True:
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                outcome = child.run(*task)
                with arrived:
                    done.append(outcome)
                    arrived.notify()
        finally:
            child.close()

    threads = [threading.Thread(target=drive, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for count in range(len(tasks)):
        with arrived:
            arrived.wait_for(lambda count=count: len(done) > count)
            outcome = done[count]
        yield outcome


def main() -> int:
    """Command line; the exit status is 1 when anything is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.opdb.sweep", description="op_db through the transforms")
    parser.add_argument("-k", action="append", default=[], metavar="PATTERN", help="regular expression on op names")
    parser.add_argument(
        "--composition", action="append", choices=[*COMPOSITIONS, "all"], help="default: " + ", ".join(MAIN)
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--docs", action="store_true", help="put the counts into docs/coverage.md")
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the ops to run")
    parser.add_argument("--seed", type=int, default=0, help="which share")
    parser.add_argument("--cap", type=int, default=6, help="most samples per op")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one op in one composition")
    parser.add_argument("--failures", action="store_true", help="print only what is not right")
    parser.add_argument("--traceback", action="store_true", help="show the workers' stderr and tracebacks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(args)
        return 0
    picked = args.composition or list(MAIN)
    compositions = list(COMPOSITIONS) if "all" in picked else picked
    ops = chosen(args.k, args.fraction, args.seed)
    tasks = [(name, composition) for name in ops for composition in compositions]
    outcomes = []
    for outcome in sweep(tasks, args.jobs, args.cap, args.timeout, args.traceback):
        outcomes.append(outcome)
        if not args.failures or verdict(outcome) not in ("ok", "none", "slow"):
            print(line(outcome), flush=True)
    print(totals(outcomes))
    if args.docs:
        write_docs(outcomes)
    if args.json:
        Path(args.json).write_text(json.dumps(outcomes, indent=1))
    return int(any(verdict(outcome) not in GOOD for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
