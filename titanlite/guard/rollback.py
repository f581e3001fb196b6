"""Roll-back: load an earlier checkpoint into the running process, and skip samples.

What is loaded and skipped is a pure function of the run's progress. Nothing depends on when the
trouble was noticed, on the time, or on what an earlier process of the run did: until the next save,
a restart loads a checkpoint from before the roll-back, and meets and decides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NoReturn

from titanlite.checkpoint import FoundCheckpoint
from titanlite.data import PositionWindow
from titanlite.distributed.collectives import run_on_rank_0
from titanlite.errors import TrainingDiverged
from titanlite.guard.policy import GuardConfig
from titanlite.runtime import RunFolderLock
from titanlite.training.run import Run
from titanlite.training.state import Counters


@dataclass(frozen=True)
class Trouble:
    """The step that caused a roll-back."""

    step: int  # counted from 1
    position: int  # first position that it consumed
    samples: int  # that it consumed
    reason: str  # one line with values


@dataclass(frozen=True)
class RollbackTry:
    """A roll-back: its trouble, and what the run does with the positions around it."""

    number: int  # of this try for the same trouble, from 1
    trouble: Trouble
    window: PositionWindow

    def __str__(self) -> str:
        window, factor = self.window, self.window.lr_factor
        action = f"trained with learning rate x {factor:g}" if factor else "skipped"
        return (
            f"try {self.number}: step {self.trouble.step}, samples {self.trouble.position}…"
            f"{self.trouble.position + self.trouble.samples - 1}: {self.trouble.reason};"
            f" samples {window.start}…{window.end - 1} {action}"
        )


@dataclass(frozen=True)
class RollbackHistory:
    """The roll-backs of a run, oldest first. Checkpoints store it."""

    tries: tuple[RollbackTry, ...] = ()

    @cached_property
    def windows(self) -> tuple[PositionWindow, ...]:
        """The windows in force: of each trouble, that of its last try."""
        numbers = [*(later.number for later in self.tries[1:]), 1]  # of the try after each
        return tuple(t.window for t, after in zip(self.tries, numbers, strict=False) if after == 1)

    def tries_for(self, trouble: Trouble) -> tuple[RollbackTry, ...]:
        """The tries for the same trouble so far; empty if `trouble` is a new one.

        It is new once the run has trained as many samples after the last window as the window
        has. By then the run is past the earlier trouble, so it cannot roll back forever.
        """
        latest = self.tries[-1] if self.tries else None
        if latest is None or trouble.position >= 2 * latest.window.end - latest.window.start:
            return ()
        return self.tries[-latest.number :]

    def next_try(self, trouble: Trouble, config: GuardConfig) -> RollbackHistory | None:
        """The history with the next try; None if all tries for this trouble have failed.

        With the default `rollback_steps`, the first window has 201 batches: 100 before the trouble,
        its own, and 100 after it. PaLM's training skipped 200 to 500 batches by hand, from a
        checkpoint about 100 steps before the spike (https://arxiv.org/abs/2204.02311, section 5.1).
        """
        earlier = self.tries_for(trouble)
        if len(earlier) >= config.rollback_tries:
            return None
        first = earlier[0].trouble if earlier else trouble
        margin = (config.rollback_steps << len(earlier)) * trouble.samples
        window = PositionWindow(
            max(0, min(first.position, trouble.position) - margin),
            max(first.position, trouble.position) + trouble.samples + margin,
            config.rollback_lr_factor ** (len(earlier) + 1),
        )
        return RollbackHistory((*self.tries, RollbackTry(len(earlier) + 1, trouble, window)))


def steps_to_roll_back_to(
    positions: dict[int, int], attempt: RollbackTry, first: Trouble, interval: int
) -> list[int]:
    """Steps of the checkpoints to roll back to, in order of preference.

    `positions` are those of the checkpoints, by step. Preferred is the newest one from before the
    window: the run then repeats what it did up to the window, so that the result does not depend on
    which one it is. Where no checkpoint is that old, the oldest one from before the `first` trouble
    is used: one of a multiple of `interval`, because others are there only if the run was stopped.
    """
    start, end = attempt.window.start, first.position
    old = [step for step, at in positions.items() if at <= start]
    later = [step for step, at in positions.items() if start < at <= end and step % interval == 0]
    return sorted(old, reverse=True) + sorted(later)


class SavedRollbacks:
    """The history of roll-backs, a part of the training state; sets the windows of `counters`."""

    def __init__(self, counters: Counters):
        self.history, self._counters = RollbackHistory(), counters

    def record(self, history: RollbackHistory) -> None:
        """Replace the history, by one with one more entry or that of a checkpoint."""
        self.history = history
        self._counters.set_windows(history.windows)

    def state(self) -> list[dict[str, Any]] | None:
        """The history as JSON values; None if it is empty."""
        return [asdict(attempt) for attempt in self.history.tries] or None

    def restore(self, state: list[dict[str, Any]] | None) -> None:
        """Restore what `state` returned; raises ValueError, TypeError or KeyError for others."""
        tries: list[RollbackTry] = []
        for entry in state or []:
            trouble, window = Trouble(**entry["trouble"]), PositionWindow(**entry["window"])
            attempt = RollbackTry(entry["number"], trouble, window)
            counts = (trouble.step, trouble.position, trouble.samples, window.start, window.end)
            is_valid = (
                all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
                and attempt.number in (1, tries[-1].number + 1 if tries else 1)
                and window.start < window.end
                and type(trouble.reason) is str
                and 0 <= window.lr_factor < 1  # not NaN
            )
            if not is_valid:
                raise ValueError(f"{attempt} is not a roll-back")
            tries.append(attempt)
        self.record(RollbackHistory(tuple(tries)))


@dataclass(frozen=True)
class CheckpointRollback:
    """Rolls a run back to an earlier checkpoint."""

    config: GuardConfig
    past: SavedRollbacks
    run: Run
    lock: RunFolderLock
    load: Callable[[FoundCheckpoint], None]
    # reads a checkpoint into the state of the run, and sets aside the later ones

    def roll_back(self, trouble: Trouble) -> None:
        """Continue from a checkpoint from before the trouble. Collective.

        The caller opens its batches again. Raises TrainingDiverged if no try or checkpoint is left.
        """
        run = self.run
        run.finish_save(trouble.step)
        run.watchdog.set_phase(trouble.step, "load")
        history = self.past.history.next_try(trouble, self.config)
        if history is None:
            self._give_up(trouble, f"all {self.config.rollback_tries} tries have failed")
        found, refused = self._find_checkpoint(history.tries)
        if found is None:
            self._report_refused(trouble.step, refused)
            self._give_up(trouble, "there is no valid checkpoint from before it")
        run.state.optimizer.zero_grad()  # of the step that caused the trouble
        self.load(found)
        self.past.record(history)
        # Rank 0 rewrites metrics.jsonl, which takes as long as a disk needs: still in phase "load".
        run_on_rank_0(lambda: self._report(found, refused), run.checkpointer.group)
        run.watchdog.set_phase(run.state.step, "start")

    def _find_checkpoint(
        self, tries: tuple[RollbackTry, ...]
    ) -> tuple[FoundCheckpoint | None, list[str]]:
        """(the checkpoint to roll back to in the last of `tries`, why others were refused)."""
        attempt = tries[-1]
        first = tries[-attempt.number].trouble
        has_state = any(self.run.state.optimizer.state.values())  # plain SGD has none
        checkpointer = self.run.checkpointer
        positions, damaged = checkpointer.positions(with_optimizer=has_state)
        steps = steps_to_roll_back_to(positions, attempt, first, checkpointer.config.interval)
        found, refused = checkpointer.find_first_valid(steps)
        return found, [*damaged, *refused]

    def _report_refused(self, step: int, refused: list[str]) -> None:
        for reason in refused:
            self.run.sinks.event(step, "checkpoint_refused", reason=reason)

    def _report(self, found: FoundCheckpoint, refused: list[str]) -> None:
        """Write the event, to the log and the start log too; on rank 0."""
        number, attempt = len(self.past.history.tries), self.past.history.tries[-1]
        trouble, window, step = attempt.trouble, attempt.window, self.run.state.step
        self.run.sinks.roll_back(step, rollbacks=number - 1)
        self._report_refused(step, refused)
        self.run.sinks.event(
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

    def _give_up(self, trouble: Trouble, why: str) -> NoReturn:
        """End the run with exit code 3, and list the tries."""
        tries = self.past.history.tries_for(trouble)
        self.run.sinks.event(trouble.step, "rollback_failed", reason=f"{trouble.reason}: {why}")
        lines = "".join(f"\n    {attempt}" for attempt in tries)
        raise TrainingDiverged(
            f"training diverged at step {trouble.step} ({trouble.reason}), and {why}.{lines}\n ",
            fix="Look at the samples of these steps. To go on: raise guard.rollback_tries or"
            " guard.rollback_steps, lower optimizer.lr, or resume from an older checkpoint"
            " (checkpoint.load_step). The same command without a change repeats these tries.",
        ).mark_on_all_ranks()
