"""The periodic action that evaluates checkpoints, on all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable

from titanlite.distributed.collectives import AsyncMax
from titanlite.training.evaluation.evaluator import CheckpointEvaluator
from titanlite.training.periodic import PeriodicAction, StepInfo

POLL_SECONDS = 1.0  # between two looks at the process, after the last step


def evaluate_checkpoints(
    evaluator: CheckpointEvaluator | None,
    freq: int,
    is_writing: Callable[[], bool],
    stop_reason: Callable[[], int],
    max_over_ranks: AsyncMax,
    set_phase: Callable[[int, str], None],
) -> PeriodicAction:
    """Evaluate the checkpoints of every `freq` steps, and the last one; `evaluator`: on rank 0.

    `is_writing`: whether this rank is still writing a checkpoint. After the last step the ranks
    wait for the evaluation, until one has a `stop_reason`.
    """

    def look(info: StepInfo) -> None:
        if evaluator is None:
            return
        if info.stop_reason:
            evaluator.stop()  # the next start evaluates that checkpoint
            return
        if info.is_last or info.step % freq == 0:
            evaluator.add(info.step)
        evaluator.poll(is_writing())

    def agree() -> tuple[int, int]:
        """(whether rank 0 is evaluating, why the run is to stop), on all ranks."""
        max_over_ranks.start(evaluator is not None and evaluator.busy, stop_reason())
        busy, reason = max_over_ranks.wait()
        return busy, reason

    def run(info: StepInfo) -> None:
        look(info)
        if info.stop_reason or not info.is_last:
            return
        busy, reason = agree()
        while busy and not reason:
            set_phase(info.step, "evaluate")
            time.sleep(POLL_SECONDS)
            if evaluator is not None:
                evaluator.poll(is_writing())
            busy, reason = agree()
        if evaluator is not None:
            evaluator.stop()

    def start_again(step: int) -> None:
        if evaluator is not None:
            evaluator.resume(step)

    return PeriodicAction("evaluate", lambda info: True, run, start_again=start_again)
