"""How gradients become updates."""

from __future__ import annotations

from titanlite.optim.adam import moment_bytes, storage_of
from titanlite.optim.build import (
    OptimizerConfig,
    build_optimizer,
    optimizer_problems,
    set_lr,
)
from titanlite.optim.clip import clip_gradients, shard_norms
from titanlite.optim.early import EarlySteps
from titanlite.optim.scale import LossScale, LossScaleConfig
from titanlite.optim.schedule import (
    LRSchedulerConfig,
    lr_share,
    schedule_problems,
    schedule_warning,
)

__all__ = [
    "EarlySteps",
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "OptimizerConfig",
    "build_optimizer",
    "clip_gradients",
    "lr_share",
    "moment_bytes",
    "optimizer_problems",
    "schedule_problems",
    "schedule_warning",
    "set_lr",
    "shard_norms",
    "storage_of",
]
