"""What a step holds at most beyond what stays: python -m benchmarks.memory_probe --KEY VALUE …

Runs train.py under torch's profiler, which sees every block the CPU allocator gives and takes
back, those of compiled kernels too, and prints the bytes.
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


def comes_and_goes(events: list[dict]) -> int:
    """Bytes between the least and the most that is held from one optimizer step to the next.

    `events` are a trace's; the least is what stays (weights, moments), the most is when the
    activations, or the last gradients, are all there.
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
    print(comes_and_goes(events))


if __name__ == "__main__":
    main(sys.argv[1:])
