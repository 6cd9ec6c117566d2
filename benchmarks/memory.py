"""Peak memory of a call, from the events that PyTorch's CPU allocator reports to the profiler."""

import json
import tempfile
from pathlib import Path

import torch

from benchmarks.measure import Call


def peak_bytes(call: Call) -> int:
    """The most bytes that were live at one time during a call, above those that were live before it.

    Every tensor counts, also those inside kernels; scratch space that the matrix libraries take themselves does not.
    """
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return peak_of([e for e in events if e.get("name") == "[memory]"])


def peak_of(events: list[dict]) -> int:
    """The highest running sum of allocator events, each with a time `ts` and a signed number of bytes."""
    live = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak
