"""The learning rate as a pure function of the step: resuming needs nothing but the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from titanlite.settings import NotNegative, Positive, Share


@dataclass(frozen=True)
class LRSchedulerConfig:
    """[lr_scheduler] Warmup, stable, decay (https://arxiv.org/abs/2404.06395)."""

    warmup_steps: NotNegative = 200  # steps from 0 to the peak rate
    total_steps: Positive | None = None  # steps the schedule is drawn over; training.steps if unset
    decay_ratio: Share | None = None  # share of the steps that decay; unset: all after the warmup
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"  # shape of the decay
    min_lr_factor: Share = 0.0  # share of the peak rate that the decay ends at


def lr_share(step: int, total_steps: int, config: LRSchedulerConfig) -> float:
    """Share of the peak rate that step `step` (from 0) is taken with."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    decay_steps = total_steps - config.warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * config.decay_ratio))
    start = total_steps - decay_steps
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / decay_steps) if decay_steps > 0 else 1.0
    left = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": (1.0 + math.cos(math.pi * progress)) / 2,
    }[config.decay_type]
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * left
