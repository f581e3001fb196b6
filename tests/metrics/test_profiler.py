"""A trace is of the step in its name, and is written when profiling is enabled."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import torch

from titanlite.metrics import ProfilingConfig, build_profilers, check_profiling_config


def write_traces(folder, steps: int, completed_steps: int = 0, **config) -> dict[int, dict]:
    """The traces of `steps` steps, by the step in their path."""
    config = ProfilingConfig(profile_freq=4, profiler_warmup=1, **config)
    with ExitStack() as stack:
        profilers = build_profilers(
            config, folder, rank=3, completed_steps=completed_steps
        ).values()
        for profiler in profilers:
            stack.enter_context(profiler)
        for step in range(completed_steps + 1, completed_steps + steps + 1):
            with torch.profiler.record_function(f"learning step {step}"):
                torch.ones(8) + 1
            for profiler in profilers:
                profiler.step()
    paths = folder.glob("profile_traces/iteration_*/rank3_trace.json")
    return {int(p.parent.name.split("_")[1]): json.loads(p.read_text()) for p in paths}


def steps_in(trace: dict) -> set[str]:
    names = {event.get("name", "") for event in trace["traceEvents"]}
    return {name for name in names if name.startswith("learning step")}


def test_a_trace_contains_the_step_in_its_name(tmp_path):
    traces = write_traces(tmp_path, 9, enable_profiling=True)
    assert {number: steps_in(trace) for number, trace in traces.items()} == {
        4: {"learning step 4"},
        8: {"learning step 8"},
    }


def test_a_resumed_run_does_not_overwrite_earlier_traces(tmp_path):
    write_traces(tmp_path, 6, enable_profiling=True)
    traces = write_traces(tmp_path, 7, completed_steps=6, enable_profiling=True)
    assert {number: steps_in(trace) for number, trace in traces.items()} == {
        4: {"learning step 4"},
        8: {"learning step 8"},
        12: {"learning step 12"},
    }


def test_disabled_profiling_writes_nothing(tmp_path):
    assert write_traces(tmp_path, 9) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("warmup", "active", "fits"), [(3, 1, True), (3, 2, False), (4, 1, False)])
def test_a_cycle_shorter_than_its_trace_is_refused(warmup, active, fits):
    config = ProfilingConfig(profile_freq=4, profiler_warmup=warmup, profiler_active=active)
    assert [problem.message for problem in check_profiling_config(config)] == (
        []
        if fits
        else [
            "profiling.profile_freq = 4: must be at least 5, for profiler_warmup ="
            f" {warmup} and profiler_active = {active} steps."
        ]
    )
