"""[evaluation]: its settings, and which of them are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from titanlite.checkpoint import CheckpointConfig
from titanlite.errors import ConfigError
from titanlite.settings import NotNegative, Positive


@dataclass(frozen=True)
class EvaluationConfig:
    """[evaluation] Evaluating checkpoints on downstream tasks while training, with lm-eval."""

    enable: bool = False  # evaluate checkpoints of the run, in a process of its own
    freq: Positive = 1000
    # steps between two evaluated checkpoints, a multiple of checkpoint.interval; the last
    # checkpoint is evaluated too
    tasks: list[str] = field(default_factory=lambda: ["python"])
    # tasks of titanlite (python: all of them) or of lm-eval; no YAML files, which can run code
    limit: NotNegative = 0  # documents of each task; 0: all
    batch_size: Positive = 8  # texts of one forward pass
    device: Literal["cpu", "cuda"] = "cpu"  # cuda: the GPU of rank 0, which needs free memory
    threads: Positive = 1  # CPU threads of the evaluation
    timeout_seconds: Positive = 3600  # limit for one evaluation, also after the last step


def check_evaluation_config(
    config: EvaluationConfig, checkpoint: CheckpointConfig, tokenizer: str | None
) -> Iterator[ConfigError]:
    """Reject settings under which nothing could be evaluated."""
    if not config.enable:
        return
    if not checkpoint.saves:
        yield _evaluation_error(
            "enable = true: the run saves no checkpoints, so there is nothing to evaluate.",
            "Set checkpoint.enable = true.",
            "enable",
        )
    if tokenizer is None:
        yield _evaluation_error(
            "enable = true: tasks are text, and data.tokenizer is not set.",
            "Set data.tokenizer.",
            "enable",
        )
    if config.freq % checkpoint.interval:
        below = config.freq - config.freq % checkpoint.interval
        nearest = [str(n) for n in (below, below + checkpoint.interval) if n]
        yield _evaluation_error(
            f"freq = {config.freq}: is not a multiple of checkpoint.interval ="
            f" {checkpoint.interval}.",
            f"Use {' or '.join(nearest)}.",
            "freq",
        )
    if not config.tasks:
        yield _evaluation_error("tasks = []: there is no task.", 'Use ["python"].', "tasks")
    if importlib.util.find_spec("lm_eval") is None:
        yield _evaluation_error(
            "enable = true, but lm-eval is not installed.",
            "pip install 'titanlite[eval]'",
            "enable",
        )


def _evaluation_error(problem: str, fix: str, key: str) -> ConfigError:
    return ConfigError(f"evaluation.{problem}", fix=fix, keys=(f"evaluation.{key}",))
