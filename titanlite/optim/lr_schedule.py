"""The learning rate as a pure function of the step: resuming needs nothing but the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from titanlite.errors import ConfigError
from titanlite.settings import Fraction, NotNegative, Positive


@dataclass(frozen=True)
class LRSchedulerConfig:
    """[lr_scheduler] Warmup, stable, decay (https://arxiv.org/abs/2404.06395)."""

    warmup_steps: NotNegative = 200
    # steps from 0 to the peak learning rate; at most the steps of the schedule
    total_steps: Positive | None = None
    # steps the schedule is drawn over, after which the rate stays; training.steps if unset
    decay_ratio: Fraction | None = (
        None  # share of the steps that decay; unset: all after the warmup
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"  # shape of the decay
    min_lr_factor: Fraction = 0.0  # share of the peak rate that the decay ends at


def lr_factor(step: int, total_steps: int, config: LRSchedulerConfig) -> float:
    """Share of the peak rate that step `step` (from 0) is taken with."""
    warmup_steps = min(config.warmup_steps, total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = total_steps - warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * config.decay_ratio))
    start = total_steps - decay_steps
    if step < start or decay_steps == 0:
        return 1.0
    progress = min(1.0, (step - start) / decay_steps)
    left = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": (1.0 + math.cos(math.pi * progress)) / 2,
    }[config.decay_type]
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * left


def check_lr_scheduler_config(config: LRSchedulerConfig, steps: int) -> Iterator[ConfigError]:
    """Steps of a run of `steps` that nothing would be learned from."""
    total_steps = config.total_steps or steps
    if lr_factor(steps - 1, total_steps, config) == 0:
        yield ConfigError(
            f"training.steps = {steps}: the learning rate is 0 after lr_scheduler.total_steps ="
            f" {total_steps}, so the last {steps - total_steps} steps would learn nothing.",
            fix=f"Set lr_scheduler.total_steps = {steps} or leave it out, use fewer training.steps,"
            " or an lr_scheduler.min_lr_factor above 0.",
            keys=("training.steps", "lr_scheduler.total_steps"),
        )


def schedule_warning(config: LRSchedulerConfig, steps: int) -> str:
    """What of the section is not followed to the letter in a run of `steps`, or nothing."""
    total_steps = config.total_steps or steps
    if config.warmup_steps <= total_steps:
        return ""
    return (
        f"lr_scheduler.warmup_steps = {config.warmup_steps} is more than all {total_steps} steps of"
        f" the schedule: the learning rate warms up over these {total_steps}, and never decays"
    )
