"""Parameter groups: the optimizer settings of each parameter, by name pattern."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch

from titanlite.optim.lr_schedule import LR_DECAYS, weight_decay_types
from titanlite.settings import Fraction, NotNegative, OneOf, Range

SCHEDULE_KEYS = (  # keys of [lr_scheduler] that a group may set
    "warmup_steps",
    "warmup_tokens",
    "decay_ratio",
    "decay_type",
    "min_lr_factor",
    "weight_decay_type",
    "final_weight_decay_factor",
)


@dataclass(frozen=True)
class ParameterGroupConfig:
    """One entry of optimizer.groups; other keys are those of [optimizer] and [lr_scheduler]."""

    match: list[str]  # name patterns of its parameters; the first group that matches applies
    lr_factor: Annotated[float, Range(0)] = 1.0  # multiplies the learning rate
    name: Annotated[str, OneOf(_optimizer_names)] | None = None  # as optimizer.name
    weight_decay: Annotated[float, Range(0)] | None = None  # also for names in optimizer.no_decay
    beta1: Fraction | None = None  # as optimizer.beta1
    beta2: Fraction | None = None  # as optimizer.beta2
    eps: Annotated[float, Range(0)] | None = None  # as optimizer.eps
    momentum: Fraction | None = None  # as optimizer.momentum
    nesterov: bool | None = None  # as optimizer.nesterov
    beta2_decay: Annotated[float, Range(-1, -0.1)] | None = None  # as optimizer.beta2_decay
    clip_threshold: Annotated[float, Range(0.01)] | None = None  # as optimizer.clip_threshold
    scale_parameter: bool | None = None  # as optimizer.scale_parameter
    warmup_steps: NotNegative | None = None  # as lr_scheduler.warmup_steps
    warmup_tokens: NotNegative | None = None  # as lr_scheduler.warmup_tokens
    decay_ratio: Fraction | None = None  # as lr_scheduler.decay_ratio
    decay_type: Annotated[str, OneOf(LR_DECAYS.keys)] | None = None  # as lr_scheduler.decay_type
    min_lr_factor: Fraction | None = None  # as lr_scheduler.min_lr_factor
    weight_decay_type: Annotated[str, OneOf(weight_decay_types)] | None = None
    # as lr_scheduler.weight_decay_type
    final_weight_decay_factor: Annotated[float, Range(0)] | None = None
    # as lr_scheduler.final_weight_decay_factor

    def matches(self, name: str) -> bool:
        """Whether the group contains the parameter `name`."""
        return matches_any(name, self.match)

    def overrides(self) -> dict[str, Any]:
        """The keys of [optimizer] that this group sets."""
        own = {"match", "lr_factor", *SCHEDULE_KEYS}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: value for k, value in values.items() if k not in own and value is not None}

    def describe(self) -> str:
        """The keys that this group sets, and their values."""
        factor = {"lr_factor": self.lr_factor} if self.lr_factor != 1 else {}
        keys = {**factor, **self.overrides(), **self.schedule_overrides()}
        return ", ".join(f"{key} {value}" for key, value in keys.items())

    def schedule_overrides(self) -> dict[str, Any]:
        """The keys of [lr_scheduler] that this group sets."""
        values = {key: getattr(self, key) for key in SCHEDULE_KEYS}
        return {key: value for key, value in values.items() if value is not None}


def _optimizer_names() -> list[str]:
    from titanlite.optim.build import OPTIMIZERS  # which imports this module

    return list(OPTIMIZERS)


def matches_any(name: str, patterns: list[str]) -> bool:
    """Whether one of the patterns matches a parameter name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def only_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[None]:
    """Let the optimizer have only this group inside the block."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups[:] = [group]
    try:
        yield
    finally:
        optimizer.param_groups[:] = groups
