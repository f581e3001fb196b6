"""Optimizers, schedules, gradient clipping and loss scale."""

from __future__ import annotations

from titanlite.optim.adam import moment_bytes, moment_format
from titanlite.optim.build import (
    OPTIMIZERS,
    OptimizerConfig,
    OptimizerRecipe,
    build_optimizer,
    check_optimizer_config,
    check_optimizer_device,
    settings_of,
)
from titanlite.optim.clip import clip_gradients, shard_norms
from titanlite.optim.groups import ParameterGroupConfig
from titanlite.optim.in_backward import OptimizerInBackward
from titanlite.optim.loss_scale import LossScale, LossScaleConfig
from titanlite.optim.lr_schedule import (
    LR_DECAYS,
    LRSchedulerConfig,
    Progress,
    RateSchedule,
    RunLength,
    build_rate_schedule,
    check_lr_scheduler_config,
    check_schedule_end,
)
from titanlite.optim.optimizer_set import ConditionalOptimizer, OptimizerSet

__all__ = [
    "LR_DECAYS",
    "OPTIMIZERS",
    "ConditionalOptimizer",
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "OptimizerConfig",
    "OptimizerInBackward",
    "OptimizerRecipe",
    "OptimizerSet",
    "ParameterGroupConfig",
    "Progress",
    "RateSchedule",
    "RunLength",
    "build_optimizer",
    "build_rate_schedule",
    "check_lr_scheduler_config",
    "check_optimizer_config",
    "check_optimizer_device",
    "check_schedule_end",
    "clip_gradients",
    "moment_bytes",
    "moment_format",
    "settings_of",
    "shard_norms",
]
