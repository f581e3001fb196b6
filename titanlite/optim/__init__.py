"""How gradients become updates."""

from __future__ import annotations

from titanlite.optim.adam import moment_bytes, moment_format
from titanlite.optim.build import (
    OptimizerConfig,
    build_optimizer,
    check_optimizer_config,
    set_lr,
)
from titanlite.optim.clip import clip_gradients, shard_norms
from titanlite.optim.in_backward import OptimizerInBackward
from titanlite.optim.loss_scale import LossScale, LossScaleConfig
from titanlite.optim.lr_schedule import (
    LRSchedulerConfig,
    check_lr_scheduler_config,
    lr_factor,
    schedule_warning,
)

__all__ = [
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "OptimizerConfig",
    "OptimizerInBackward",
    "build_optimizer",
    "check_lr_scheduler_config",
    "check_optimizer_config",
    "clip_gradients",
    "lr_factor",
    "moment_bytes",
    "moment_format",
    "schedule_warning",
    "set_lr",
    "shard_norms",
]
