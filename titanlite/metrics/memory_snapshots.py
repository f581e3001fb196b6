"""Which allocations of a GPU are alive, and since when, for https://pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from titanlite.log import logger
from titanlite.metrics.config import ProfilingConfig

EVENTS = 100_000  # allocations remembered, as torchtitan has it


class AllocationRecorder(Protocol):
    """Remembers allocations, and writes them down."""

    def start(self) -> None: ...
    def write(self, place: Path) -> None: ...


class CudaAllocationRecorder:
    """torch's own. What it needs has no public name yet (torch 2.11 to 2.15), though its
    documentation tells everyone to use it."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=EVENTS)

    def write(self, place: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(place))


class MemorySnapshots:
    """Writes FOLDER/iteration_N/rankR_memory_snapshot.pickle every `every` steps.

    So it does when memory runs out, into iteration_N_exit, and after a step before which the file
    FOLDER/please was touched: each rank looks by itself, so that nobody need agree.
    """

    def __init__(
        self, recorder: AllocationRecorder, folder: Path, rank: int, first_step: int, every: int
    ):
        self.recorder, self.folder, self.rank, self.every = recorder, folder, rank, every
        self.steps = first_step  # taken
        self.asked = self._asked()

    def __enter__(self) -> MemorySnapshots:
        self.folder.mkdir(parents=True, exist_ok=True)  # for who wants to ask
        self.recorder.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._write(f"iteration_{self.steps + 1}_exit")

    def step(self) -> None:
        """A step is done."""
        self.steps += 1
        asked, before = self._asked(), self.asked
        self.asked = asked
        if self.steps % self.every == 0 or asked != before:
            self._write(f"iteration_{self.steps}")

    def _asked(self) -> float:
        try:
            return (self.folder / "please").stat().st_mtime
        except OSError:
            return 0.0

    def _write(self, name: str) -> None:
        place = self.folder / name / f"rank{self.rank}_memory_snapshot.pickle"
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self.recorder.write(place)
        except OSError as problem:  # a full disk is no reason to stop, nor to hide why memory ended
            logger.warning("no memory snapshot: %s", problem)
        else:
            logger.info("memory snapshot written: %s", place)


def build_memory_snapshots(
    config: ProfilingConfig, folder: Path, rank: int, first_step: int
) -> MemorySnapshots:
    """Those that [profiling] asks for, on a CUDA device."""
    place = folder / config.save_memory_snapshot_folder
    return MemorySnapshots(CudaAllocationRecorder(), place, rank, first_step, config.profile_freq)
