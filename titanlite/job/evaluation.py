"""Build the periodic action that evaluates checkpoints on downstream tasks."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from titanlite.distributed.collectives import run_on_rank_0
from titanlite.job.job import Job
from titanlite.training import CheckpointEvaluator, PeriodicAction, Run, evaluate_checkpoints


def build_evaluation(job: Job, run: Run) -> list[PeriodicAction]:
    """The action, or none if [evaluation] is off; raises ConfigError for unknown tasks."""
    config = job.config.evaluation
    if not config.enable:
        return []
    evaluator = CheckpointEvaluator(
        config, job.folder / "evaluation", run.checkpointer.step_folders.of_step, run.sinks
    )
    run_on_rank_0(evaluator.check_tasks)
    return [
        evaluate_checkpoints(
            evaluator if dist.get_rank() == 0 else None,
            config.freq,
            is_writing=lambda: run.checkpointer.writing,
            stop_reason=partial(run.stop_request.reason, 0.0),
            max_over_ranks=run.max_over_ranks,
            set_phase=run.watchdog.set_phase,
        )
    ]
