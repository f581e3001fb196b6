"""The components of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from titanlite.checkpoint import Checkpointer
from titanlite.distributed.collectives import AsyncMax
from titanlite.metrics import MetricSinks, ThroughputMeter
from titanlite.runtime import HeartbeatWatchdog, StopRequest
from titanlite.training.batch import Batch
from titanlite.training.config import TrainingConfig
from titanlite.training.engine import Engine
from titanlite.training.periodic import PeriodicAction, finish_save
from titanlite.training.state import HostState, TrainState
from titanlite.training.step import StepResult, StepSettings


class StepGuard:
    """What the loop needs of a guard; runs train with `titanlite.guard.handler.Guard`.

    The host runs ahead of the device, so it learns of a rejected step later. All methods but `add`
    and `poll` are called on all ranks together.
    """

    def add(self, step: int, before: HostState, result: StepResult) -> None:
        """Add the latest step, counted from 1; does not wait for the device."""

    def poll(self) -> bool:
        """Whether a rejected step is known on this rank; does not wait for the device."""
        return False

    def has_rejected(self) -> bool:
        """Whether a step so far was rejected; waits for the device."""
        return False

    def settle(self, first_batch: Callable[[], Batch]) -> StepResult | None:
        """Undo the first rejected step and those after it, replay the first, accept or skip it.

        `first_batch` opens the batches again at the position of the state; returns the first one.
        Returns the result of the replay, or None if the run was rolled back to a checkpoint.
        """
        raise AssertionError("no step was rejected")

    def check_parameters(self, step: int, result: StepResult) -> bool:
        """Whether a parameter was inf or NaN, and the run was rolled back."""
        return False


@dataclass(frozen=True)
class Run:
    """Everything that the training loop uses; `titanlite.job.build` builds it from a job."""

    training: TrainingConfig
    device: torch.device
    state: TrainState
    engine: Engine
    open_batches: Callable[[], Iterator[Batch]]
    # this rank's part of the global batch of each step, from the position of `state` on
    step_settings: StepSettings
    checkpointer: Checkpointer
    throughput: ThroughputMeter
    sinks: MetricSinks
    watchdog: HeartbeatWatchdog
    stop_request: StopRequest
    max_over_ranks: AsyncMax  # for what the ranks must agree on in each step
    lost_folder: Callable[[], str]  # why this rank may no longer write to the run's folders, or ""
    # What needs the run itself, and so is added to it:
    actions: tuple[PeriodicAction, ...] = ()  # in the order in which they run after a step
    guard: StepGuard = field(default_factory=StepGuard)

    def finish_save(self, step: int) -> None:
        """Wait for the save in flight, in the watchdog's phase for it, and report it."""
        self.watchdog.set_phase(step, "save")
        finish_save(self.checkpointer, self.sinks)
