"""Optimizers, schedules, gradient clipping and loss scale."""

from __future__ import annotations

from titanlite.optim.adaptive_clip import AdaptiveClip, adaptive_clip
from titanlite.optim.build import build_optimizer, recipe_of_parameter
from titanlite.optim.checks import check_optimizer_config, whole_matrix_optimizers
from titanlite.optim.clip import clip_gradients, count_copies, shard_norms
from titanlite.optim.conditional import ConditionalOptimizer
from titanlite.optim.config import OPTIMIZERS, OptimizerConfig, ParameterGroupConfig
from titanlite.optim.in_backward import OptimizerInBackward
from titanlite.optim.loss_scale import LossScale, LossScaleConfig
from titanlite.optim.low_memory import moment_bytes, moment_format
from titanlite.optim.lr_schedule import (
    LR_DECAYS,
    LRSchedulerConfig,
    RateSchedule,
    ScheduleLength,
    StepSpan,
    build_rate_schedule,
    check_lr_scheduler_config,
    check_schedule_end,
)
from titanlite.optim.optimizer_set import OptimizerSet
from titanlite.optim.owned_matrices import assign_owners
from titanlite.optim.recipe import MatrixFacts, OptimizerRecipe

__all__ = [
    "LR_DECAYS",
    "OPTIMIZERS",
    "AdaptiveClip",
    "ConditionalOptimizer",
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "MatrixFacts",
    "OptimizerConfig",
    "OptimizerInBackward",
    "OptimizerRecipe",
    "OptimizerSet",
    "ParameterGroupConfig",
    "RateSchedule",
    "ScheduleLength",
    "StepSpan",
    "adaptive_clip",
    "assign_owners",
    "build_optimizer",
    "build_rate_schedule",
    "check_lr_scheduler_config",
    "check_optimizer_config",
    "check_schedule_end",
    "clip_gradients",
    "count_copies",
    "moment_bytes",
    "moment_format",
    "recipe_of_parameter",
    "shard_norms",
    "whole_matrix_optimizers",
]
