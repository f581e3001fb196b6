"""Profiler traces of a few steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import warnings
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


def build_profilers(
    config: ProfilingConfig, folder: Path, rank: int, completed_steps: int = 0
) -> dict[str, Profiler]:
    """The profilers that [profiling] enables, by what they write; each must be entered.

    `completed_steps`: of the checkpoint that the run resumes from; file names continue the count.
    """
    profilers: dict[str, Profiler] = {}
    if config.enable_memory_snapshot:
        profilers["memory snapshot"] = build_memory_snapshots(config, folder, rank, completed_steps)
    if config.enable_profiling:
        profilers["trace"] = _trace_profiler(config, folder, rank, completed_steps)
    return profilers


def _trace_profiler(
    config: ProfilingConfig, folder: Path, rank: int, completed_steps: int
) -> Profiler:
    """Writes folder/save_traces_folder/iteration_N/rankR_trace.json every `profile_freq` steps."""
    traces = folder / config.save_traces_folder
    warmup, active = config.profiler_warmup, config.profiler_active
    cycle = schedule(wait=config.profile_freq - warmup - active, warmup=warmup, active=active)

    def write(profiler: profile) -> None:
        path = (
            traces / f"iteration_{completed_steps + profiler.step_num}" / f"rank{rank}_trace.json"
        )
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
        schedule=lambda step: cycle(completed_steps + step),
        on_trace_ready=write,
        record_shapes=True,
    )
