"""Learning rate and weight decay as pure functions of the progress of a run.

Resuming therefore needs no scheduler state. A schedule never restarts: there are no cycles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from titanlite.errors import ConfigError
from titanlite.settings import Fraction, NotNegative, OneOf, Positive, Range

LR_DECAYS: dict[str, Callable[[float], float]] = {
    # values of lr_scheduler.decay_type: fraction of the decay phase that has passed -> fraction of
    # the peak learning rate, from 1 at 0 to 0 at 1; a new decay is one line here
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}


def weight_decay_types() -> list[str]:
    """The values of lr_scheduler.weight_decay_type."""
    return ["constant", *LR_DECAYS]


DEFAULT_WARMUP_STEPS = 200  # as in torchtitan


@dataclass(frozen=True)
class LRSchedulerConfig:
    """[lr_scheduler] Warmup, stable, decay (https://arxiv.org/abs/2404.06395); weight decay."""

    warmup_steps: NotNegative | None = None
    # steps of the linear warmup from 0 to the peak learning rate; limited to the schedule's steps;
    # default 200
    total_steps: Positive | None = None
    # length of the schedule, after which the learning rate is constant; default training.steps
    warmup_tokens: NotNegative | None = None
    # tokens of the warmup, instead of warmup_steps: the whole schedule is a function of the tokens
    # consumed
    total_tokens: Positive | None = None
    # with warmup_tokens: length of the schedule; default: the tokens of training.steps
    decay_ratio: Fraction | None = None
    # fraction of the schedule that decays, at its end: 0.2 is warmup-stable-decay (WSD), 0 a
    # constant learning rate; default: all after the warmup
    decay_type: Annotated[str, OneOf(LR_DECAYS.keys)] = "linear"  # shape of the decay
    min_lr_factor: Fraction = 0.0  # fraction of the peak learning rate that the decay ends at
    weight_decay_type: Annotated[str, OneOf(weight_decay_types)] = "constant"
    # shape of the change of the weight decay over the whole schedule, warmup included
    final_weight_decay_factor: Annotated[float, Range(0)] = 1.0
    # with a weight_decay_type: the weight decay at the end, relative to that at the start

    @property
    def in_tokens(self) -> bool:
        """Whether the schedule is a function of tokens, not of steps."""
        return self.warmup_tokens is not None

    @property
    def unit(self) -> str:
        """What the schedule counts: "tokens" or "steps"."""
        return "tokens" if self.in_tokens else "steps"


class ScheduleLength(NamedTuple):
    """Length of a schedule."""

    steps: int
    tokens: int


class StepSpan(NamedTuple):
    """Where one optimizer step begins, and the tokens that it consumes, over all ranks."""

    step: int  # steps before it
    tokens: int  # tokens before it
    step_tokens: int


@dataclass(frozen=True)
class RateSchedule:
    """Factors of the learning rate and the weight decay of a parameter group."""

    config: LRSchedulerConfig
    length: ScheduleLength

    def lr_factor(self, step: StepSpan) -> float:
        """Fraction of the peak learning rate."""
        config, decay, (start, end) = self.config, self._decay, self._in_unit(step)
        # warmup from the end of a step, decay from its start: no step has learning rate 0
        if start < self._warmup:
            return min(1.0, end / self._warmup)
        first_decayed = self.total - decay
        if start < first_decayed or decay == 0:
            return 1.0
        fraction = LR_DECAYS[config.decay_type](min(1.0, (start - first_decayed) / decay))
        return config.min_lr_factor + (1.0 - config.min_lr_factor) * fraction

    def weight_decay_factor(self, step: StepSpan) -> float:
        """The weight decay relative to that at the start."""
        if self.config.weight_decay_type == "constant":
            return 1.0
        start, _ = self._in_unit(step)
        final = self.config.final_weight_decay_factor
        fraction = LR_DECAYS[self.config.weight_decay_type](min(1.0, start / self.total))
        return final + (1.0 - final) * fraction

    def __str__(self) -> str:
        config, warmup = self.config, self._warmup
        unit_name = config.unit[:-1] if warmup == 1 else config.unit
        parts = [f"{warmup:,} {unit_name} of warmup" if warmup else "no warmup"]
        if self._decay:
            shape = f"{config.decay_type} decay to {config.min_lr_factor:g} x peak"
            parts.append(f"{shape} over the last {self._decay:,} of {self.total:,} {config.unit}")
        else:
            parts.append("then constant")
        if config.weight_decay_type != "constant":
            final = config.final_weight_decay_factor
            parts.append(f"weight decay {config.weight_decay_type} to {final:g} x")
        return ", ".join(parts)

    @property
    def total(self) -> int:
        """Length of the schedule, in its unit."""
        return self.length.tokens if self.config.in_tokens else self.length.steps

    @property
    def _configured_warmup(self) -> int:
        """Length of the warmup in the settings, which may be more than the schedule has."""
        config = self.config
        warmup = config.warmup_tokens if config.in_tokens else config.warmup_steps
        return DEFAULT_WARMUP_STEPS if warmup is None else warmup

    @property
    def _warmup(self) -> int:
        return min(self._configured_warmup, self.total)

    @property
    def _decay(self) -> int:
        """Length of the decay."""
        ratio, rest = self.config.decay_ratio, self.total - self._warmup
        return rest if ratio is None else min(rest, round(self.total * ratio))

    def _in_unit(self, step: StepSpan) -> tuple[int, int]:
        """(start, end) of a step, in steps or in tokens."""
        if self.config.in_tokens:
            return step.tokens, step.tokens + step.step_tokens
        return step.step, step.step + 1

    def replace(self, settings: Mapping[str, Any]) -> RateSchedule:
        """The schedule with other values of keys of [lr_scheduler]."""
        return RateSchedule(dataclasses.replace(self.config, **settings), self.length)

    def warning(self) -> str:
        """A warning where the warmup is longer than the schedule; otherwise an empty string."""
        unit, warmup, total = self.config.unit, self._configured_warmup, self.total
        if warmup <= total:
            return ""
        return (
            f"lr_scheduler.warmup_{unit} = {warmup} is more than all {total} {unit} of the"
            f" schedule: the learning rate warms up over these {total}, and never decays"
        )


UNSCHEDULED = RateSchedule(LRSchedulerConfig(warmup_steps=0, decay_ratio=0.0), ScheduleLength(1, 1))


def build_rate_schedule(config: LRSchedulerConfig, run: ScheduleLength) -> RateSchedule:
    return RateSchedule(
        config, ScheduleLength(config.total_steps or run.steps, config.total_tokens or run.tokens)
    )


def check_lr_scheduler_config(
    config: LRSchedulerConfig, group_settings: Iterable[Mapping[str, Any]] = ()
) -> Iterator[ConfigError]:
    """Reject a schedule in steps and in tokens, and one whose weight decay is not defined.

    `group_settings`: keys of [lr_scheduler] that each entry of optimizer.groups sets.
    """
    section = {
        f.name: value
        for f in dataclasses.fields(config)
        if (value := getattr(config, f.name)) is not None
    }
    yield from _check_units(section)
    yield from _check_weight_decay(config, "lr_scheduler")
    unit, other = ("tokens", "steps") if config.in_tokens else ("steps", "tokens")
    for number, settings in enumerate(group_settings):
        if f"warmup_{other}" in settings:
            yield ConfigError(
                f"optimizer.groups[{number}].warmup_{other} ="
                f" {settings[f'warmup_{other}']}: the schedule of [lr_scheduler] is in {unit}.",
                fix=f"Use warmup_{unit}.",
            )
        if settings.keys() & {"weight_decay_type", "final_weight_decay_factor"}:
            changed = dataclasses.replace(config, **settings)
            yield from _check_weight_decay(changed, f"optimizer.groups[{number}]")


def _check_units(section: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Reject steps and tokens in one schedule, and total_tokens without warmup_tokens."""
    in_steps = [k for k in ("warmup_steps", "total_steps") if k in section]
    in_tokens = [k for k in ("warmup_tokens", "total_tokens") if k in section]
    shown = " and ".join(f"lr_scheduler.{k} = {section[k]}" for k in (*in_tokens, *in_steps))
    if in_tokens and in_steps:
        yield ConfigError(
            f"{shown}: a schedule is in steps or in tokens, not in both.",
            fix="Leave out those in steps, or those in tokens, in included files too.",
        )
    elif in_tokens == ["total_tokens"]:
        yield ConfigError(
            f"{shown}: the warmup has no length in tokens.",
            fix="Set lr_scheduler.warmup_tokens (0: no warmup).",
        )


def _check_weight_decay(config: LRSchedulerConfig, where: str) -> Iterator[ConfigError]:
    """Reject a final weight decay without a shape, and a shape without a final weight decay."""
    kind, final = config.weight_decay_type, config.final_weight_decay_factor
    if (kind == "constant") != (final == 1.0):
        yield ConfigError(
            f'{where}.weight_decay_type = "{kind}" with final_weight_decay_factor = {final:g}:'
            " the weight decay would be constant.",
            fix=f"Set both: a final factor other than 1, and one of {', '.join(LR_DECAYS)}.",
        )


def check_schedule_end(schedule: RateSchedule, steps: int, last: StepSpan) -> Iterator[ConfigError]:
    """Reject a run of `steps` steps whose `last` step has learning rate 0."""
    if schedule.lr_factor(last) != 0:
        return
    unit, total = schedule.config.unit, schedule.total
    idle = "last steps" if unit == "tokens" else f"last {steps - total} steps"
    yield ConfigError(
        f"training.steps = {steps}: the learning rate is 0 after lr_scheduler.total_{unit} ="
        f" {total}, so the {idle} would learn nothing.",
        fix=f"Use a larger lr_scheduler.total_{unit} or leave it out, use fewer training.steps,"
        " or an lr_scheduler.min_lr_factor above 0.",
    )
