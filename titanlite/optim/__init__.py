"""How gradients become updates."""

from __future__ import annotations

from titanlite.optim.build import OptimizerConfig, build_optimizer, set_lr
from titanlite.optim.clip import clip_gradients
from titanlite.optim.scale import LossScale, LossScaleConfig
from titanlite.optim.schedule import LRSchedulerConfig, lr_share

__all__ = [
    "LRSchedulerConfig",
    "LossScale",
    "LossScaleConfig",
    "OptimizerConfig",
    "build_optimizer",
    "clip_gradients",
    "lr_share",
    "set_lr",
]
