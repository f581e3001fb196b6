"""Peak memory of a step beyond parameters and optimizer state.

python -m benchmarks.memory_probe --KEY VALUE …   runs train.py under torch's profiler, which
records every allocation of the CPU allocator (also in compiled kernels), and prints the bytes
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

    `events` are the events of a trace. At the minimum only parameters and optimizer state are
    allocated; at the maximum also all activations, or all gradients.
    """
    steps = [e for e in events if str(e.get("name", "")).startswith("Optimizer.step#")]
    steps = sorted((e for e in steps if e.get("ph") == "X"), key=lambda event: event["ts"])
    before, last = steps[-2:]
    start, end = before["ts"] + before["dur"], last["ts"]
    allocated = [
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]" and start <= event["ts"] <= end
    ]
    return max(allocated) - min(allocated)


def main(argv: list[str]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        contextlib.redirect_stdout(sys.stderr),
    ):
        code = train.main([*argv, "--job.dump_folder", folder])
    if code:
        sys.exit(code)
    handle, trace = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    profiler.export_chrome_trace(trace)
    events = json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
    os.unlink(trace)
    print(transient_bytes(events))


if __name__ == "__main__":
    main(sys.argv[1:])
