"""What a profiler's trace says of the pipeline: which action ran when."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file
from titanlite.plots.gantt import DrawnAction

_NAME = re.compile(r"pipeline (forward|backward|input|weight) (\d+) (\d+)")


def read_actions(trace: Path) -> list[DrawnAction]:
    """The actions of the last run of the schedule in a rank's trace, in seconds since 1970.

    Raises DataError.
    """
    try:
        found = _actions_in(parse_json(read_regular_file(trace)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{trace}: is no trace that can be read ({why}).") from None
    if not found:
        raise DataError(
            f"{trace}: has no action of a pipeline.",
            fix="Trace a run with pipeline_parallel_degree > 1 and profiling.enable_profiling.",
        )
    found.sort(key=lambda action: action.start)
    runs: list[list[DrawnAction]] = [[]]
    seen: set[tuple] = set()
    for action in found:  # a step that accumulates runs the schedule several times
        what = (action.kind, action.stage, action.microbatch)
        if what in seen:
            runs.append([])
            seen.clear()
        seen.add(what)
        runs[-1].append(action)
    return runs[-1]


def _actions_in(said: Any) -> list[DrawnAction]:
    """The actions in a trace's JSON; raises what Python raises where it is something else."""
    events = [event for event in said["traceEvents"] if {"ts", "dur", "cat"} <= event.keys()]
    begin = said.get("baseTimeNanoseconds", 0) / 1e9  # ranks begin to trace at other moments
    # A GPU works later than it is told to: where it was traced, its own times count.
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in events)
    category, found = "gpu_user_annotation" if on_gpu else "user_annotation", []
    for event in events:
        named = _NAME.fullmatch(event.get("name", ""))
        if named and event.get("ph") == "X" and event.get("cat") == category:
            start = begin + event["ts"] / 1e6
            end = start + event["dur"] / 1e6
            found.append(DrawnAction(named[1], int(named[2]), int(named[3]), start, end))
    return found
