"""Peak memory of a step beyond parameters and optimizer state.

python -m benchmarks.memory_probe --KEY VALUE …   runs train.py under torch's profiler, which
records every allocation of the CPU allocator, compiled kernels included, and prints the bytes
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import train


def transient_bytes(events: list[dict]) -> int:
    """Maximum minus minimum of the allocated bytes between two optimizer steps.

    `events` are those of a trace. The minimum is what persists (parameters, optimizer state); at
    the maximum all activations, or all gradients, are allocated.
    """
    steps = [e for e in events if str(e.get("name", "")).startswith("Optimizer.step#")]
    steps = sorted((e for e in steps if e.get("ph") == "X"), key=lambda event: event["ts"])
    before, last = steps[-2:]
    start, end = before["ts"] + before["dur"], last["ts"]
    held = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and start <= event["ts"] <= end
    ]
    return max(held) - min(held)


def main(argv: list[str]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        contextlib.redirect_stdout(sys.stderr),
    ):
        code = train.main([*argv, "--job.dump_folder", folder])
    if code:
        sys.exit(code)
    handle, place = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    profiler.export_chrome_trace(place)
    events = json.loads(Path(place).read_text(encoding="utf-8"))["traceEvents"]
    os.unlink(place)
    print(transient_bytes(events))


if __name__ == "__main__":
    main(sys.argv[1:])
