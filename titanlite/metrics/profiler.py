"""Profiler traces and memory snapshots of a few steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.errors import ConfigError
from titanlite.log import logger
from titanlite.settings import NotNegative, Positive

REQUEST_FILE = "dump_now"  # touch it to request a snapshot
MAX_ENTRIES = 100_000  # recorded allocations and frees, as in torchtitan


@dataclass(frozen=True)
class ProfilingConfig:
    """[profiling] Profiler traces and memory snapshots of a few steps."""

    enable_profiling: bool = False  # write a trace on every rank every profile_freq steps
    save_traces_folder: str = "profile_traces"  # folder of the traces, under job.dump_folder
    profile_freq: Positive = 10  # steps between two traces
    profiler_active: Positive = 1  # steps in a trace
    profiler_warmup: NotNegative = 3  # profiled but discarded steps before a trace
    enable_memory_snapshot: bool = False
    # write the GPU's allocation history every profile_freq steps, on running out of memory, and
    # after a step if the file `dump_now` in save_memory_snapshot_folder was touched
    save_memory_snapshot_folder: str = "memory_snapshot"
    # folder of the snapshots, under job.dump_folder


def check_profiling_config(config: ProfilingConfig) -> Iterator[ConfigError]:
    """Reject a cycle that is shorter than its warmup and trace."""
    needed = config.profiler_warmup + config.profiler_active
    if needed > config.profile_freq:
        yield ConfigError(
            f"profiling.profile_freq = {config.profile_freq}: must be at least {needed}, for"
            f" profiler_warmup = {config.profiler_warmup} and profiler_active ="
            f" {config.profiler_active} steps.",
            fix=f"Use {needed} or more, or fewer warmup or active steps.",
        )


class MemorySnapshots:
    """Writes FOLDER/iteration_N/rankR_memory_snapshot.pickle every `every` steps.

    It also writes one on running out of memory, to iteration_N_exit, and after a step if the file
    FOLDER/dump_now was touched. Each rank checks the file itself, without communication.
    torch's functions for it are documented, but private (torch 2.11 to 2.15).
    """

    def __init__(self, folder: Path, rank: int, completed_steps: int, every: int):
        self.folder, self.rank, self.every = folder, rank, every
        self.steps = completed_steps  # of the run, not only since this start
        self.requested_at = self._request_time()

    def __enter__(self) -> MemorySnapshots:
        self.folder.mkdir(parents=True, exist_ok=True)  # so that dump_now can be touched
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._write(f"iteration_{self.steps + 1}_exit")

    def step(self) -> None:
        """Count a completed step, and write a snapshot if one is due or requested."""
        self.steps += 1
        previous, self.requested_at = self.requested_at, self._request_time()
        if self.steps % self.every == 0 or self.requested_at != previous:
            self._write(f"iteration_{self.steps}")

    def _request_time(self) -> float:
        """Modification time of the request file; 0 without one."""
        try:
            return (self.folder / REQUEST_FILE).stat().st_mtime
        except OSError:
            return 0.0

    def _write(self, name: str) -> None:
        path = self.folder / name / f"rank{self.rank}_memory_snapshot.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as error:  # a full disk must not end the run, or hide the original error
            logger.warning("memory snapshot not written: %s", error)
        else:
            logger.info("memory snapshot written: %s", path)


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
        snapshots = folder / config.save_memory_snapshot_folder
        profilers["memory snapshot"] = MemorySnapshots(
            snapshots, rank, completed_steps, config.profile_freq
        )
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
        step = completed_steps + profiler.step_num
        path = traces / f"iteration_{step}" / f"rank{rank}_trace.json"
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
