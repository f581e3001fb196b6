"""Evaluate checkpoints of a run on downstream tasks, each in a process of its own.

That process is `titanlite_lab.evaluation`. Only rank 0 starts it, and training waits for it after
the last step only. So an evaluation cannot change a bit of training, and its crash or its memory
cannot end the run.
"""

from __future__ import annotations

from titanlite.training.evaluation.action import evaluate_checkpoints
from titanlite.training.evaluation.config import EvaluationConfig, check_evaluation_config
from titanlite.training.evaluation.evaluator import CheckpointEvaluator

__all__ = [
    "CheckpointEvaluator",
    "EvaluationConfig",
    "check_evaluation_config",
    "evaluate_checkpoints",
]
