"""Roll-back, the action: load an earlier checkpoint into the running process, and continue.

Only the checkpoints and the progress in them decide what happens, so a kill at any moment changes
nothing. Until the next save, a restart loads one of the checkpoints from before the roll-back,
meets the same trouble, and takes the same decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from titanlite.checkpoint import Checkpointer, FoundCheckpoint
from titanlite.distributed.collectives import run_on_rank_0
from titanlite.errors import TrainingDiverged
from titanlite.files import write_file_atomically
from titanlite.log import logger
from titanlite.metrics import MetricSinks
from titanlite.runtime import HeartbeatWatchdog, RunFolderLock
from titanlite.training.periodic import report_save
from titanlite.training.rollback import (
    RollbackHistory,
    RollbackPolicy,
    RollbackTry,
    Trouble,
    steps_to_roll_back_to,
)
from titanlite.training.state import TrainState

REPORT_FILE = "rollback.json"  # in job.dump_folder/guard, if a roll-back was not possible


@dataclass(frozen=True)
class CheckpointRollback:
    """Rolls a run back to an earlier checkpoint."""

    policy: RollbackPolicy
    state: TrainState
    checkpointer: Checkpointer
    sinks: MetricSinks
    watchdog: HeartbeatWatchdog
    lock: RunFolderLock
    load: Callable[[FoundCheckpoint], None]
    # reads a checkpoint of this run into `state`, and sets aside the later ones

    def roll_back(self, trouble: Trouble) -> None:
        """Continue `state` from a checkpoint from before the trouble. Collective.

        Raises TrainingDiverged on every rank if all tries have failed, or no checkpoint is old
        enough. The caller opens its batches again.
        """
        self.watchdog.set_phase(trouble.step, "save")
        report_save(self.checkpointer.wait(), self.checkpointer, self.sinks)
        self.watchdog.set_phase(trouble.step, "load")
        history = self.state.counters.rollbacks
        attempt = history.next_try(trouble, self.policy)
        if attempt is None:
            self._give_up(history, trouble, f"all {self.policy.max_tries} tries have failed")
        found, refused = self._find_checkpoint(history, attempt)
        if found is None:
            self._report_refused(trouble.step, refused)
            self._give_up(history, trouble, "there is no valid checkpoint from before it")
        self.state.optimizer.zero_grad()  # of the step that caused the trouble
        self.load(found)
        self.state.counters.record_rollback(history.with_try(attempt))
        # All ranks wait in phase "load", with the time limit of a disk: it rewrites metrics.jsonl.
        run_on_rank_0(lambda: self._report(found, refused, attempt), self.checkpointer.group)
        self.watchdog.set_phase(self.state.step, "start")

    def _find_checkpoint(
        self, history: RollbackHistory, attempt: RollbackTry
    ) -> tuple[FoundCheckpoint | None, list[str]]:
        """(the checkpoint to roll back to, why others were refused)."""
        tries = (*history.tries_for(attempt.trouble), attempt)
        has_state = any(self.state.optimizer.state.values())  # plain SGD has none
        positions, damaged = self.checkpointer.positions(with_optimizer=has_state)
        interval = self.checkpointer.config.interval
        steps = steps_to_roll_back_to(positions, attempt, tries[0].trouble, interval)
        found, refused = self.checkpointer.find_first_valid(steps)
        return found, [*damaged, *refused]

    def _report_refused(self, step: int, refused: list[str]) -> None:
        for reason in refused:
            self.sinks.event(step, "checkpoint_refused", reason=reason)

    def _report(self, found: FoundCheckpoint, refused: list[str], attempt: RollbackTry) -> None:
        """Write the event, to the log and the start log too; on rank 0."""
        trouble, window, step = attempt.trouble, attempt.window, self.state.step
        number = len(self.state.counters.rollbacks.tries)
        self.sinks.roll_back(step, rollbacks=number - 1)
        self._report_refused(step, refused)
        self.sinks.event(
            step,
            "rolled_back",
            number=number,
            from_step=trouble.step,
            attempt=attempt.number,
            reason=trouble.reason,
            path=str(found.folder),
            first_sample=window.start,
            last_sample=window.end - 1,
            lr_factor=window.lr_factor,
        )
        self.lock.record_rollback(trouble.step, step, trouble.reason)

    def _give_up(self, history: RollbackHistory, trouble: Trouble, why: str) -> NoReturn:
        """End the run with exit code 3, and a report of what was tried."""
        tries = history.tries_for(trouble)
        report = self.lock.folder / "guard" / REPORT_FILE
        if dist.get_rank() == 0:
            _write_report(report, trouble, why, tries)
        self.sinks.event(trouble.step, "rollback_failed", reason=f"{trouble.reason}: {why}")
        lines = "".join(f"\n    {attempt}" for attempt in tries)
        raise TrainingDiverged(
            f"training diverged at step {trouble.step} ({trouble.reason}), and {why}.{lines}\n ",
            fix=f"The report is in {report}. Look at the samples of these steps. To go on: raise"
            " guard.rollback_tries or guard.rollback_steps, lower optimizer.lr, or resume from an"
            " older checkpoint (checkpoint.load_step). The same command without a change repeats"
            " these tries.",
        ).mark_on_all_ranks()


def _write_report(path: Path, trouble: Trouble, why: str, tries: tuple[RollbackTry, ...]) -> None:
    content = {
        "step": trouble.step,
        "reason": trouble.reason,
        "ended_because": why,
        "tries": RollbackHistory(tries).to_json(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, json.dumps(content, indent=1).encode())
    except OSError as error:  # must not hide why the run ends
        logger.warning("%s: %s", path, error.strerror or error)
