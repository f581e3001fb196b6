"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from titanlite.errors import ConfigError
from titanlite.settings import Fraction, NotNegative, OneOf, Positive

LR_DECAYS: dict[str, Callable[[float], float]] = {
    # values of lr_scheduler.decay_type: fraction of the decay phase that has passed -> fraction of
    # the peak learning rate, from 1 at 0 to 0 at 1; a new decay is one line here
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}


@dataclass(frozen=True)
class LRSchedulerConfig:
    """[lr_scheduler] Warmup, stable, decay (https://arxiv.org/abs/2404.06395)."""

    warmup_steps: NotNegative = 200
    # steps of the linear warmup from 0 to the peak learning rate; limited to the schedule's steps
    total_steps: Positive | None = None
    # length of the schedule, after which the learning rate is constant; default training.steps
    decay_ratio: Fraction | None = None
    # fraction of the schedule's steps that decay; default: all steps after the warmup
    decay_type: Annotated[str, OneOf(LR_DECAYS.keys)] = "linear"  # shape of the decay
    min_lr_factor: Fraction = 0.0  # fraction of the peak learning rate that the decay ends at


def lr_factor(step: int, total_steps: int, config: LRSchedulerConfig) -> float:
    """Fraction of the peak learning rate at step `step`, counted from 0."""
    warmup_steps = min(config.warmup_steps, total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = total_steps - warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * config.decay_ratio))
    first_decay_step = total_steps - decay_steps
    if step < first_decay_step or decay_steps == 0:
        return 1.0
    progress = min(1.0, (step - first_decay_step) / decay_steps)
    decayed = LR_DECAYS[config.decay_type](progress)
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * decayed


def check_lr_scheduler_config(config: LRSchedulerConfig, steps: int) -> Iterator[ConfigError]:
    """Reject a run of `steps` whose last steps have learning rate 0."""
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
    """A warning where the warmup is longer than the schedule; otherwise an empty string."""
    total_steps = config.total_steps or steps
    if config.warmup_steps <= total_steps:
        return ""
    return (
        f"lr_scheduler.warmup_steps = {config.warmup_steps} is more than all {total_steps} steps of"
        f" the schedule: the learning rate warms up over these {total_steps}, and never decays"
    )
