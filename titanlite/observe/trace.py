"""What a profiler's trace says of the pipeline: which action ran when."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from titanlite.errors import DataError

_NAME = re.compile(r"pipeline (forward|backward|input|weight) (\d+) (\d+)")


class TracedAction(NamedTuple):
    """One micro-batch through one stage."""

    kind: str  # forward, backward, or its halves: input, weight
    stage: int
    microbatch: int
    start: float  # seconds, on the clock of the machine
    end: float


def action_name(kind: str, stage: int, microbatch: int) -> str:
    """What an action is called in a trace."""
    return f"pipeline {kind} {stage} {microbatch}"


def read_actions(trace: Path) -> list[TracedAction]:
    """The actions of the last run of the schedule in a rank's trace; raises DataError."""
    try:
        said = json.loads(trace.read_text(encoding="utf-8"))
        events = said["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{trace}: is no trace that can be read ({why}).") from None
    begin = said.get("baseTimeNanoseconds", 0) / 1e9  # ranks begin to trace at other moments
    found = []
    for event in events:
        named = _NAME.fullmatch(event.get("name", ""))
        if named and event.get("ph") == "X" and event.get("cat") == "user_annotation":
            start = begin + event["ts"] / 1e6
            kind, stage, microbatch = named[1], int(named[2]), int(named[3])
            found.append(TracedAction(kind, stage, microbatch, start, start + event["dur"] / 1e6))
    if not found:
        raise DataError(
            f"{trace}: has no action of a pipeline.",
            fix="Trace a run with pipeline_parallel_degree > 1 and profiling.enable_profiling.",
        )
    found.sort(key=lambda action: action.start)
    runs: list[list[TracedAction]] = [[]]
    for action in found:  # a step that accumulates runs the schedule several times
        if any(action[:3] == other[:3] for other in runs[-1]):
            runs.append([])
        runs[-1].append(action)
    return runs[-1]
