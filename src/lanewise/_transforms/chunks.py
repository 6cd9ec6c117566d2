"""Lanes in groups: `chunk_size`, its choice from a memory budget, progress bars, and repeatable randomness."""

import operator
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lanewise._core.draws.chunk_draws import Ends, chunk_loop
from lanewise._core.draws.random import Generators
from lanewise._core.draws.same_draws import Marks
from lanewise._core.level import live_levels
from lanewise._core.plane import Plane, tensors_of
from lanewise._core.trees import Spec, spec_names, unflatten
from lanewise._torch_compat import TorchDispatchMode
from lanewise._transforms.arguments import Call
from lanewise._transforms.dims import dynamic_lanes
from lanewise._transforms.numbers import NUMBERS, same_number
from lanewise._transforms.ragged import joined
from lanewise.errors import ArgumentError, TransformError, at_user_line

# What one chunk gives: leaves of the result, the dim of each that the chunks are joined along (None: not joined), and
# the structure.
Result = tuple[list, list, Spec]


def check_chunk_options(api: str, chunk_size: Any, memory_budget: Any) -> None:
    """Raise unless the options make sense."""
    if chunk_size is not None:
        check_chunk_size(api, "chunk_size", chunk_size, f"{api}(f, chunk_size=64)")
    if memory_budget is not None:
        if chunk_size != "auto" or not isinstance(memory_budget, int) or memory_budget <= 0:
            raise ArgumentError(
                at_user_line(
                    f'{api}: memory_budget is a number of bytes for chunk_size="auto", got '
                    f"memory_budget={memory_budget!r} with chunk_size={chunk_size!r}",
                    f'{api}(f, chunk_size="auto", memory_budget=2 * 2**30)  # 2 GiB',
                )
            )


def check_chunk_size(api: str, name: str, size: Any, instead: str) -> None:
    """Raise unless an argument says how many at once."""
    if isinstance(size, str) and size == "auto":
        return
    whole = isinstance(size, int) and not isinstance(size, bool)
    if whole and int(size) > 0:
        return
    # Each transform's phrase is the one that people search for.
    phrase = f"`{name}` should be" if api == "jacrev" else f"{name} should be None or"
    kinds = "" if whole else ', neither a whole number nor "auto"'
    why = f"{api}: {phrase} greater than 0. (got {size!r}{kinds})"
    raise ArgumentError(at_user_line(why, f'{instead}  # or {name}="auto"'))


class _Shown(threading.local):
    """Whether a chunk loop of this thread shows a bar; those inside it show none."""

    now = False


_shown = _Shown()


class Progress:
    """A bar over the lanes, for the outermost chunk loop only."""

    def __init__(self, total: int, progress: bool | str, label: str) -> None:
        self.bar: Any = None
        if progress and not _shown.now:
            # tqdm.auto looks for a notebook when it is imported, which takes time and is of use here alone.
            from tqdm.auto import tqdm  # noqa: PLC0415

            self.bar = tqdm(total=total, desc=progress if isinstance(progress, str) else label, unit="lane")

    def __enter__(self) -> "Progress":
        if self.bar is not None:
            _shown.now = True
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.bar is not None:
            _shown.now = False
            self.bar.close()

    def advance(self, lanes: int) -> None:
        """Count lanes as done."""
        if self.bar is not None:
            self.bar.update(lanes)


def map_chunks(
    run: Callable[[int, int], Result],
    size: int,
    chunk_size: int | str | None,
    *,
    memory_budget: int | None,
    progress: bool | str,
    label: str,
    randomness: str,
    leaves: list,
    estimates: dict,
) -> list[Result]:
    """Results of `run(start, length)` over all lanes; one empty chunk where there are none.

    Args:
        run: Runs the lanes `start ... start + length`.
        size: Number of all lanes.
        chunk_size: Lanes in a chunk, "auto", or None for all at once.
        memory_budget: Bytes that the tensors of one chunk may take, for "auto".
        progress, label: See `vmap`; the text of the bar.
        randomness: See `vmap`; but for "error", each chunk starts from the same state of the random generators.
        leaves: What `run` works on, for its devices and as a key to what was measured before.
        estimates: Memory measured in earlier calls.
    """
    generators = None if randomness == "error" else Generators()
    marks = None if generators is None else Marks()
    ends = Ends() if randomness == "different" else None
    planner = _Auto(memory_budget, leaves, estimates) if chunk_size == "auto" else None
    fixed = chunk_size if isinstance(chunk_size, int) else size
    results = []
    start = 0
    with Progress(size, progress, label) as shown, chunk_loop() as loop:
        while start < size or not results:
            length = min(planner.length() if planner else fixed, size - start)
            if generators is not None and marks is not None and results:
                marks.back()
                generators.reseat()
                loop.reseat()
            with planner.measure(length) if planner else nullcontext():
                results.append(run(start, length))
            if ends is not None:
                ends.note(generator for generator, _ in loop.generators.values())
            start += length
            shown.advance(length)
    if ends is not None:
        ends.go_on()
    return results


def join_chunks(call: Call, results: list[Result], given: list, lengths: list[int]) -> Any:
    """One result from those of the chunks, of so many lanes each; other objects are those of the first."""
    leaves, dims, spec = results[0]
    if len(results) == 1:
        return unflatten(leaves, spec)
    for _, _, other in results[1:]:
        if other != spec:
            raise TransformError(
                at_user_line(f"{call}: the chunks return different structures: {spec} and {other}", "chunk_size=None")
            )
    for position, dim in enumerate(dims):
        if isinstance(dim, str):
            leaves[position] = joined([chunk[0][position] for chunk in results], dim, given)
        elif dim is not None:
            leaves[position] = _joined_leaf(call, [chunk[0][position] for chunk in results], dim, lengths)
        elif isinstance(leaves[position], NUMBERS):
            if not all(same_number(chunk[0][position], leaves[position]) for chunk in results):
                raise dynamic_lanes(call.func, [], spec_names(spec, "output")[position])
    return unflatten(leaves, spec)


def _joined_leaf(call: Call, parts: list, dim: int, lengths: list[int]) -> Any:
    """Tensors side by side; a Python value that all lanes have as it is; numbers that differ as one tensor."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(parts, dim)
    first = parts[0]
    if not tensors and all(type(part) is type(first) for part in parts):
        same = same_number if isinstance(first, NUMBERS) else operator.eq
        if not isinstance(first, (str, bytes, *NUMBERS)) or all(same(part, first) for part in parts):
            return first
    like = tensors[0] if tensors else None
    numbers = [part for part in parts if not isinstance(part, Tensor)]
    if all(isinstance(part, NUMBERS) for part in numbers):
        if like is None:
            rows = [torch.full((length,), part) for part, length in zip(parts, lengths, strict=True)]
            if len({row.dtype for row in rows}) == 1:
                return torch.cat(rows)
        elif like.dim() == 1 and all(torch.result_type(like, part) is like.dtype for part in numbers):
            return torch.cat(
                [
                    part if isinstance(part, Tensor) else like.new_full((length,), part)
                    for part, length in zip(parts, lengths, strict=True)
                ]
            )
    raise TransformError(
        at_user_line(
            f"{call}: lanes of different chunks return {first!r} and {next(p for p in parts if p is not first)!r}, "
            "which no tensor holds",
            "return torch.as_tensor(value)  # in all branches, or leave out chunk_size",
        )
    )


class _Auto:
    """Chooses chunks whose memory fits a budget.

    The first chunks, of one and of two lanes, are measured: tensors alive at the peak, in bytes, by storage. A line
    through both gives the largest power of two that fits. What was measured is kept for calls with like arguments.
    """

    def __init__(self, budget: int | None, leaves: list, estimates: dict) -> None:
        self.budget = budget
        self.device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        self.estimates = estimates
        self.key = tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves if isinstance(leaf, Tensor))
        self.peaks: dict[int, int] = dict(estimates.get(self.key, {}))
        self.chosen = 0

    def length(self) -> int:
        """How many lanes to run next."""
        for length in (1, 2):
            if length not in self.peaks:
                return length
        if not self.chosen:
            budget = free_memory(self.device) // 2 if self.budget is None else self.budget
            per_lane = max(self.peaks[2] - self.peaks[1], 1)
            lanes = (budget - self.peaks[1]) // per_lane + 1
            self.chosen = 1 << (max(lanes, 1).bit_length() - 1)
        return self.chosen

    def measure(self, length: int) -> AbstractContextManager:
        """A context to run a chunk in."""
        if length in self.peaks or length > 2:
            return nullcontext()
        return _Measured(self, length)

    def record(self, length: int, peak: int) -> None:
        self.peaks[length] = peak
        if len(self.peaks) == 2:
            self.estimates[self.key] = self.peaks


class _Measured:
    def __init__(self, auto: _Auto, length: int) -> None:
        self.auto = auto
        self.length = length
        self.memory = PeakMemory()

    def __enter__(self) -> None:
        self.memory.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.memory.__exit__(*exc)
        if exc[0] is None:
            self.auto.record(self.length, self.memory.peak)


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time.

    Planes opened inside hand each operation down to here. Those open already are not looked into: what an operation on
    them gives is counted with all its lanes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outside = {level.order for level in live_levels()}
        self.peak = 0
        self._alive = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for operand in tensors_of(args, kwargs or {}):
            if isinstance(operand, Plane) and operand.level.order not in self._outside:
                return NotImplemented
        out = func(*args, **(kwargs or {}))
        # Views and writes take memory that was there before.
        if func.is_view or func._schema.is_mutable:
            return out
        for item in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(item, Tensor):
                self._count(item)
        return out

    def _count(self, tensor: Tensor) -> None:
        while isinstance(tensor, Plane):
            tensor = tensor.value
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._counted:
            self._counted.add(key)
            size = storage.nbytes()
            self._alive += size
            self.peak = max(self.peak, self._alive)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self._alive -= size


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device: the system's and the control group's on the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    bounds = [_available_on_linux(), _left_in_control_group()]
    known = [bound for bound in bounds if bound is not None]
    # Where the system does not tell what is free (macOS, Windows), a size that fits everywhere.
    return min(known) if known else 2 * 2**30


def _available_on_linux() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            rows = dict(line.split(":", 1) for line in lines)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _left_in_control_group() -> int | None:
    base = "/sys/fs/cgroup"
    try:
        with open(os.path.join(base, "memory.max")) as limit, open(os.path.join(base, "memory.current")) as used:
            return max(int(limit.read()) - int(used.read()), 0)
    except (OSError, ValueError):
        return None
