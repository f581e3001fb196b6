"""Profiler traces of a few steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.log import logger
from titanlite.metrics.config import ProfilingConfig
from titanlite.metrics.memory_snapshots import build_memory_snapshots


class Profiler(Protocol):
    """A context manager whose `step` is called after every optimizer step."""

    def __enter__(self) -> Profiler: ...
    def __exit__(self, *raised) -> None: ...
    def step(self) -> None: ...


def open_profiler(
    config: ProfilingConfig, folder: Path, rank: int, first_step: int = 0
) -> Profiler:
    """The traces and memory snapshots that [profiling] enables, as one profiler.

    `first_step` is the step that the run continues from; files are named by the run's step.
    """
    profilers: list[Profiler] = []
    if config.enable_memory_snapshot:
        profilers.append(build_memory_snapshots(config, folder, rank, first_step))
    if config.enable_profiling:
        profilers.append(_trace_profiler(config, folder, rank, first_step))
    return _CombinedProfiler(profilers)


def _trace_profiler(config: ProfilingConfig, folder: Path, rank: int, first_step: int) -> Profiler:
    """Writes folder/save_traces_folder/iteration_N/rankR_trace.json every `profile_freq` steps."""
    traces = folder / config.save_traces_folder
    warmup, active = config.profiler_warmup, config.profiler_active
    cycle = schedule(wait=config.profile_freq - warmup - active, warmup=warmup, active=active)

    def write(profiler: profile) -> None:
        path = traces / f"iteration_{first_step + profiler.step_num}" / f"rank{rank}_trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info("trace written: %s", path)

    # torch warns that each trace has only the events of one cycle, which is intended
    warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=lambda step: cycle(first_step + step),
        on_trace_ready=write,
        record_shapes=True,
    )


class _CombinedProfiler:
    """Zero or more profilers as one."""

    def __init__(self, profilers: list[Profiler]):
        self.profilers, self.stack = profilers, ExitStack()

    def __enter__(self) -> Profiler:
        for profiler in self.profilers:
            self.stack.enter_context(profiler)
        return self

    def __exit__(self, *raised) -> None:
        self.stack.__exit__(*raised)

    def step(self) -> None:
        for profiler in self.profilers:
            profiler.step()
