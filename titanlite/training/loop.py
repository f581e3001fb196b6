"""The training loop: take a step, run the periodic actions that are due, repeat."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from titanlite.distributed.collectives import AsyncMax, raise_on_all_ranks
from titanlite.errors import UserError
from titanlite.runtime import stop_reason_name
from titanlite.training.divergence import FiniteCheck
from titanlite.training.periodic import PeriodicAction, StepInfo, report_save
from titanlite.training.run import Run
from titanlite.training.step import StepResult, take_step


def train(run: Run) -> int:
    """Train up to step `training.steps`; return the reason for an earlier stop, or 0.

    Raises CheckpointError if the last checkpoint could not be written, and TrainingDiverged if a
    loss, gradient or parameter is inf or NaN, before that state is saved.
    """
    loop = _Loop(run)
    with _manual_garbage_collection():
        while not loop.stop_reason and run.state.step < run.config.steps:
            loop.run_iteration()
    if run.state.step == run.config.steps or not loop.stop_reason:
        return 0
    reason = stop_reason_name(loop.stop_reason)
    run.sinks.event(run.state.step, "stopped", reason=reason)
    return loop.stop_reason


class _Loop:
    """The state of the training loop. One iteration is a step and the periodic actions after it."""

    def __init__(self, run: Run):
        self.run, self.first_step = run, run.state.step + 1
        # While they compute, ranks exchange what they must agree on, so no rank waits for it.
        self.max_over_ranks = AsyncMax()
        self.finite = FiniteCheck(run.state.model, run.device)
        self.timer = _IterationTimer()
        self.batches = run.open_batches()
        self.max_over_ranks.start(run.stop_request.reason(0.0))
        (self.stop_reason,) = self.max_over_ranks.wait()

    def run_iteration(self) -> None:
        run, state = self.run, self.run.state
        run.watchdog.set_phase(state.step + 1, "data")
        own_problem = run.lost_folder()
        self._start_exchange(bool(own_problem))
        with run.meter.waiting():
            batch = next(self.batches)
        result = take_step(
            state,
            run.engine,
            batch.to(run.device),
            lr=run.peak_lr,
            settings=run.step_settings,
            set_phase=partial(run.watchdog.set_phase, state.step + 1),
        )
        run.meter.step_done(result.tokens)
        if not result.skipped:
            self.finite.record(state.step, result)
        self.stop_reason, is_saving, folder_lost, diverged = self.max_over_ranks.wait()
        if folder_lost:
            raise_on_all_ranks(UserError(own_problem) if own_problem else None)
        with run.meter.paused():
            self._run_actions(self._describe_step(result, bool(is_saving)), bool(diverged))

    def _start_exchange(self, folder_lost: bool) -> None:
        """Start to exchange the stop reason and other flags, while the step is computed."""
        run = self.run
        needed_seconds = self.timer.start_iteration() + run.checkpointer.save_seconds
        reason, saving = run.stop_request.reason(needed_seconds), run.checkpointer.writing
        self.max_over_ranks.start(reason, saving, folder_lost, self.finite.poll())

    def _describe_step(self, result: StepResult, is_saving: bool) -> StepInfo:
        step = self.run.state.step
        return StepInfo(
            step=step,
            result=result,
            is_first=step == self.first_step,
            is_last=step == self.run.config.steps,
            stop_reason=self.stop_reason,
            is_saving=is_saving,
        )

    def _run_actions(self, info: StepInfo, diverged: bool) -> None:
        due = [action for action in self.run.actions if action.is_due(info)]
        if diverged or self._is_diverged(info, due):
            self._end_diverged(info.step)
        for action in due:
            self.run.watchdog.set_phase(info.step, action.name)
            action.run(info)

    def _is_diverged(self, info: StepInfo, due: list[PeriodicAction]) -> bool:
        """Whether any rank has an inf or NaN; waits for the device.

        If no due action needs to know and the run goes on, returns False without waiting:
        `FiniteCheck.poll` detects the value one or a few steps later.
        """
        needs_finite = any(action.needs_finite for action in due)
        if not needs_finite and not info.ends_run:
            return False
        self.max_over_ranks.start(self.finite.wait(info.step, check_weights=needs_finite))
        return bool(self.max_over_ranks.wait()[0])

    def _end_diverged(self, step: int) -> NoReturn:
        """Finish the save in flight, which is of an earlier step, and raise TrainingDiverged."""
        run = self.run
        run.watchdog.set_phase(step, "save")
        finding = self.finite.broadcast_finding(self.max_over_ranks)
        report_save(run.checkpointer.wait(), run.checkpointer, run.sinks)
        fields = dataclasses.asdict(finding)
        run.sinks.event(fields.pop("step"), "diverged", **fields)
        raise finding.error()


class _IterationTimer:
    """Estimates the time that the next iterations take, so that a run stops before its deadline."""

    def __init__(self) -> None:
        self._started, self._iterations, self._longest = time.monotonic(), 0, 0.0

    def start_iteration(self) -> float:
        """Start an iteration; returns the seconds to reserve for it and the next one.

        A decision to stop takes effect at the end of the iteration in which it is made. So the
        duration of the latest iteration is reserved, plus that of the longest one, which may
        include a validation. The first iteration compiles and does not count as the longest.
        """
        now = time.monotonic()
        latest, self._started = now - self._started, now
        if self._iterations > 1:
            self._longest = max(self._longest, latest)
        self._iterations += 1
        return latest + self._longest


@contextmanager
def _manual_garbage_collection() -> Iterator[None]:
    """Disable automatic garbage collection in the block.

    Ranks that collect at different times stall each other's collectives.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
