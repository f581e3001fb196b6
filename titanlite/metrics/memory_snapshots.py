"""Snapshots of a GPU's allocation history, for https://pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from titanlite.log import logger
from titanlite.metrics.config import ProfilingConfig

REQUEST_FILE = "dump_now"  # touch it to request a snapshot
MAX_ENTRIES = 100_000  # recorded allocations and frees, as in torchtitan


class AllocationRecorder(Protocol):
    """Records allocations and writes them to a file."""

    def start(self) -> None: ...
    def write(self, path: Path) -> None: ...


class CudaAllocationRecorder:
    """torch's recorder; its functions are documented, but private (torch 2.11 to 2.15)."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)

    def write(self, path: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(path))


class MemorySnapshots:
    """Writes FOLDER/iteration_N/rankR_memory_snapshot.pickle every `every` steps.

    It also writes one on running out of memory, to iteration_N_exit, and after a step if the file
    FOLDER/dump_now was touched. Each rank checks the file itself, without communication.
    """

    def __init__(
        self,
        recorder: AllocationRecorder,
        folder: Path,
        rank: int,
        completed_steps: int,
        every: int,
    ):
        self.recorder, self.folder, self.rank, self.every = recorder, folder, rank, every
        self.steps = completed_steps  # of the run, not only since this start
        self.requested_at = self._request_time()

    def __enter__(self) -> MemorySnapshots:
        self.folder.mkdir(parents=True, exist_ok=True)  # so that dump_now can be touched
        self.recorder.start()
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
            self.recorder.write(path)
        except OSError as error:  # a full disk must not end the run, or hide the original error
            logger.warning("memory snapshot not written: %s", error)
        else:
            logger.info("memory snapshot written: %s", path)


def build_memory_snapshots(
    config: ProfilingConfig, folder: Path, rank: int, completed_steps: int
) -> MemorySnapshots:
    """The snapshots that [profiling] enables, of a CUDA device."""
    folder = folder / config.save_memory_snapshot_folder
    return MemorySnapshots(
        CudaAllocationRecorder(), folder, rank, completed_steps, config.profile_freq
    )
