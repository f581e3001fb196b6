"""The loop, and what one turn of it is."""

from __future__ import annotations

from titanlite.training.engine import Engine, Spmd
from titanlite.training.loop import Between, TrainingConfig, run
from titanlite.training.state import TrainState
from titanlite.training.step import StepResult, take_step
from titanlite.training.validate import ValidationConfig, samples_to_validate, validate

__all__ = [
    "Between",
    "Engine",
    "Spmd",
    "StepResult",
    "TrainState",
    "TrainingConfig",
    "ValidationConfig",
    "run",
    "samples_to_validate",
    "take_step",
    "validate",
]
