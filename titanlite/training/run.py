"""The components of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from titanlite.checkpoint import Checkpointer
from titanlite.distributed.collectives import AsyncMax
from titanlite.metrics import MetricSinks, ThroughputMeter
from titanlite.runtime import HeartbeatWatchdog, StopRequest
from titanlite.training.batch import Batch
from titanlite.training.checkpoint_rollback import CheckpointRollback
from titanlite.training.config import TrainingConfig
from titanlite.training.engine import Engine
from titanlite.training.periodic import PeriodicAction
from titanlite.training.state import TrainState
from titanlite.training.step import StepSettings


@dataclass(frozen=True)
class Run:
    """Everything that the training loop uses; `titanlite.job.build` builds it from a job."""

    config: TrainingConfig
    device: torch.device
    state: TrainState
    engine: Engine
    open_batches: Callable[[], Iterator[Batch]]
    # this rank's part of the global batch of each step, from the position of `state` on
    peak_lr: float  # learning rate that the schedules of `state.optimizer` multiply
    step_settings: StepSettings
    actions: tuple[PeriodicAction, ...]  # in the order in which they run after a step
    checkpointer: Checkpointer
    meter: ThroughputMeter
    sinks: MetricSinks
    watchdog: HeartbeatWatchdog
    stop_request: StopRequest
    rollback: CheckpointRollback
    dump_batch: Callable[[int, int, int], str]
    # (step, first position, samples) -> path of a new file with the global batch, or "" where none
    # is written, as on ranks other than 0
    compiles_layers: bool  # by torch.compile
    max_over_ranks: AsyncMax  # for what the ranks must agree on in each step
    lost_folder: Callable[[], str]  # why this rank may no longer write to the run's folders, or ""
