"""The training loop and the parts of one iteration."""

from __future__ import annotations

from titanlite.training.batch import Batch
from titanlite.training.batch_schedule import (
    BatchSchedule,
    build_batch_schedule,
    check_batch_size,
)
from titanlite.training.checkpoint_rollback import CheckpointRollback
from titanlite.training.config import TrainingConfig
from titanlite.training.engine import Engine, build_engine
from titanlite.training.evaluation import (
    CheckpointEvaluator,
    EvaluationConfig,
    check_evaluation_config,
    evaluate_checkpoints,
)
from titanlite.training.guard import GuardConfig, StepJudge, check_guard_config
from titanlite.training.layer_norms import LayerNorms, record_layer_norms
from titanlite.training.loop import train
from titanlite.training.noise_meter import NoiseScaleEngine, measure_noise_scale
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.replica_check import ReplicaCheck, ReplicaCheckConfig, check_replicas
from titanlite.training.run import Run
from titanlite.training.source_losses import record_source_losses
from titanlite.training.state import Counters, TrainState
from titanlite.training.step import StepResult, StepSettings, take_step
from titanlite.training.straggler import (
    SelfTest,
    StragglerConfig,
    StragglerMeter,
    report_stragglers,
)
from titanlite.training.validation import (
    ValidationConfig,
    ValidationResult,
    validate,
    validation_samples,
)

__all__ = [
    "Batch",
    "BatchSchedule",
    "CheckpointEvaluator",
    "CheckpointRollback",
    "Counters",
    "Engine",
    "EvaluationConfig",
    "GuardConfig",
    "LayerNorms",
    "NoiseScaleEngine",
    "PeriodicAction",
    "ReplicaCheck",
    "ReplicaCheckConfig",
    "Run",
    "SelfTest",
    "StepInfo",
    "StepJudge",
    "StepResult",
    "StepSettings",
    "StragglerConfig",
    "StragglerMeter",
    "TrainState",
    "TrainingConfig",
    "ValidationConfig",
    "ValidationResult",
    "build_batch_schedule",
    "build_engine",
    "check_batch_size",
    "check_evaluation_config",
    "check_guard_config",
    "check_replicas",
    "evaluate_checkpoints",
    "measure_noise_scale",
    "record_layer_norms",
    "record_source_losses",
    "report_stragglers",
    "take_step",
    "train",
    "validate",
    "validation_samples",
]
