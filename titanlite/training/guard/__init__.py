"""The guard: detect steps that would damage the model, and handle them on all ranks together."""

from __future__ import annotations

from titanlite.training.guard.config import GuardConfig, check_guard_config
from titanlite.training.guard.history import (
    History,
    Observation,
    ReplayResult,
    StepVerdict,
    ViolationReason,
    decide,
)
from titanlite.training.guard.judge import NO_HISTORY, StepJudge

__all__ = [
    "NO_HISTORY",
    "GuardConfig",
    "History",
    "Observation",
    "ReplayResult",
    "StepJudge",
    "StepVerdict",
    "ViolationReason",
    "check_guard_config",
    "decide",
]
