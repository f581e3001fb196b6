"""The training loop and the parts of one iteration."""

from __future__ import annotations

from titanlite.training.batch import Batch
from titanlite.training.config import TrainingConfig
from titanlite.training.engine import Engine, build_engine
from titanlite.training.loop import train
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.rewind import Rewinder
from titanlite.training.rollback import RollbackPolicy, Trouble
from titanlite.training.run import Run
from titanlite.training.state import Counters, TrainState
from titanlite.training.step import StepResult, StepSettings, take_step
from titanlite.training.validation import ValidationConfig, validate, validation_samples

__all__ = [
    "Batch",
    "Counters",
    "Engine",
    "PeriodicAction",
    "Rewinder",
    "RollbackPolicy",
    "Run",
    "StepInfo",
    "StepResult",
    "StepSettings",
    "TrainState",
    "TrainingConfig",
    "Trouble",
    "ValidationConfig",
    "build_engine",
    "take_step",
    "train",
    "validate",
    "validation_samples",
]
