"""Read from a profiler trace which pipeline action ran when."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file
from titanlite.parallelize.schedule import ACTION_KINDS, ActionKind, PipelineAction
from titanlite_planner.time.simulation import TimedAction

_NAME = re.compile(rf"pipeline ({'|'.join(ACTION_KINDS)}) (\d+) (\d+)")
_KINDS: dict[str, ActionKind] = {kind: kind for kind in ACTION_KINDS}  # for the type checker


def read_actions(trace: Path) -> list[TimedAction]:
    """Actions of the last pass through the schedule in a rank's trace; times since 1970.

    Raises DataError.
    """
    try:
        actions = _parse_trace(parse_json(read_regular_file(trace)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{trace}: cannot be read as a profiler trace ({reason}).") from None
    if not actions:
        raise DataError(
            f"{trace}: has no pipeline action.",
            fix="Trace a run with parallelism.pipeline_parallel_degree above 1 and"
            " profiling.enable_profiling = true.",
        )
    actions.sort(key=lambda timed: timed.start)
    last_run: list[TimedAction] = []
    seen: set[PipelineAction] = set()
    for timed in actions:
        if timed.action in seen:  # gradient accumulation runs the schedule several times in a step
            last_run, seen = [], set()
        seen.add(timed.action)
        last_run.append(timed)
    return last_run


def _parse_trace(trace: Any) -> list[TimedAction]:
    """Pipeline actions in a trace's JSON; raises Python's errors if it has another structure."""
    events = [event for event in trace["traceEvents"] if {"ts", "dur", "cat"} <= event.keys()]
    base = trace.get("baseTimeNanoseconds", 0) / 1e9  # a rank's times are relative to its base
    # The CPU only launches kernels: if the GPU was traced, take the times on the GPU.
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in events)
    category = "gpu_user_annotation" if on_gpu else "user_annotation"
    actions = []
    for event in events:
        match = _NAME.fullmatch(event.get("name", ""))
        if match and event.get("ph") == "X" and event.get("cat") == category:
            kind, stage, microbatch = match.groups()
            start = base + event["ts"] / 1e6
            action = PipelineAction(_KINDS[kind], int(stage), int(microbatch))
            actions.append(TimedAction(action, start, start + event["dur"] / 1e6))
    return actions
