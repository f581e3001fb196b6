"""The loop, and what one turn of it is."""

from __future__ import annotations

from titanlite.training.engine import Engine, build_engine
from titanlite.training.loop import Between, TrainingConfig, run
from titanlite.training.state import TrainState
from titanlite.training.step import StepResult, take_step
from titanlite.training.validation import ValidationConfig, samples_to_validate, validate

__all__ = [
    "Between",
    "Engine",
    "StepResult",
    "TrainState",
    "TrainingConfig",
    "ValidationConfig",
    "build_engine",
    "run",
    "samples_to_validate",
    "take_step",
    "validate",
]
