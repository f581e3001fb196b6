"""Optimizers, learning-rate schedule, gradient clipping and loss scale."""

from __future__ import annotations

from titanlite.optim.adam import moment_bytes, moment_format
from titanlite.optim.adaptive_clip import AdaptiveClip, adaptive_clip
from titanlite.optim.build import (
    OPTIMIZERS,
    OptimizerConfig,
    OptimizerRecipe,
    build_optimizer,
    check_optimizer_config,
    check_optimizer_device,
    settings_of,
)
from titanlite.optim.clip import clip_gradients, combine_norms, count_copies, shard_norms
from titanlite.optim.groups import ParameterGroupConfig
from titanlite.optim.in_backward import OptimizerInBackward
from titanlite.optim.loss_scale import LossScale, LossScaleConfig
from titanlite.optim.lr_schedule import (
    LR_DECAYS,
    LRSchedulerConfig,
    check_lr_scheduler_config,
    lr_factor,
    schedule_warning,
)
from titanlite.optim.noise_scale import NoiseScale, estimate_noise
from titanlite.optim.optimizer_set import ConditionalOptimizer, OptimizerSet

__all__ = [
    "LR_DECAYS",
    "OPTIMIZERS",
    "AdaptiveClip",
    "ConditionalOptimizer",
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "NoiseScale",
    "OptimizerConfig",
    "OptimizerInBackward",
    "OptimizerRecipe",
    "OptimizerSet",
    "ParameterGroupConfig",
    "adaptive_clip",
    "build_optimizer",
    "check_lr_scheduler_config",
    "check_optimizer_config",
    "check_optimizer_device",
    "clip_gradients",
    "combine_norms",
    "count_copies",
    "estimate_noise",
    "lr_factor",
    "moment_bytes",
    "moment_format",
    "schedule_warning",
    "settings_of",
    "shard_norms",
]
