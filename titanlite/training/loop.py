"""The training loop: take a step, run the periodic actions that are due, repeat."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from titanlite.distributed.collectives import raise_on_all_ranks
from titanlite.errors import UserError
from titanlite.log import log_waiting, logger
from titanlite.runtime import stop_reason_name
from titanlite.training.engine import reshard
from titanlite.training.guard.handler import ViolationHandler
from titanlite.training.guard.pending import PendingSteps
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.run import Run
from titanlite.training.step import StepResult, take_step


def train(run: Run) -> int:
    """Train up to step `training.steps`; return the reason for an earlier stop, or 0.

    Raises CheckpointError if the last checkpoint could not be written, and TrainingDiverged if the
    guard gives up. A state with inf or NaN in a parameter is never saved.
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


class _StepAbandoned(Exception):
    """All ranks give up a step, whose end torchrun would not wait for."""


class _Loop:
    """The state of the training loop. One iteration is a step and the periodic actions after it."""

    def __init__(self, run: Run):
        self.run, self.first_step = run, run.state.step + 1
        # While they compute, ranks exchange what they must agree on, so no rank waits for it.
        self.max_over_ranks = run.max_over_ranks
        self.pending = PendingSteps()
        self.violations = ViolationHandler(run, self.max_over_ranks)
        self.timer = _IterationTimer()
        self.batches = run.open_batches()
        # Whether torchrun may kill a signalled rank before two steps and a save have ended. The
        # ranks then agree on stops within a step too, which waits for the device.
        self.can_abandon = run.stop_request.limit_seconds is not None
        self.last: StepInfo | None = None
        self.max_over_ranks.start(run.stop_request.reason(0.0), self.can_abandon)
        self.stop_reason, can_abandon = self.max_over_ranks.wait()
        self.can_abandon = bool(can_abandon)
        if not self.stop_reason or run.state.step >= run.config.steps:
            self._start_actions_again()

    def run_iteration(self) -> None:
        run, state = self.run, self.run.state
        run.watchdog.set_phase(state.step + 1, "data")
        own_problem = run.lost_folder()
        self._start_exchange(bool(own_problem))
        with run.meter.waiting():
            batch = next(self.batches)
        before = state.host_state()
        agreed = self.max_over_ranks.wait() if self.can_abandon else None
        try:
            with log_waiting("first step") if self.last is None else nullcontext():
                result = take_step(
                    state,
                    run.engine,
                    batch.to(run.device),
                    lr=run.peak_lr,
                    settings=run.step_settings,
                    set_phase=self._set_phase,
                )
        except _StepAbandoned:
            state.restore_host_state(before)
            self._save_before_step()
            return
        self.pending.add(state.step, before, result)
        run.meter.step_done(result.tokens)
        self.timer.step_done()
        stop_reason, is_saving, folder_lost, is_rejected, is_slow = (
            agreed or self.max_over_ranks.wait()
        )
        self.stop_reason = max(stop_reason, self._agree_to_stop()[0] if agreed else 0)
        self.can_abandon = bool(is_slow)
        if folder_lost:
            raise_on_all_ranks(UserError(own_problem) if own_problem else None)
        self.last = self._describe_step(result, bool(is_saving))
        with run.meter.paused():
            self._run_actions(self.last, bool(is_rejected))

    def _set_phase(self, phase: str) -> None:
        """Begin a phase of a step; raise _StepAbandoned if its end comes too late for a signal.

        The ranks agree on it before each micro-batch, and in a pipeline before each run of the
        schedule: until the update, the parameters are those of the step before.
        """
        run = self.run
        run.watchdog.set_phase(run.state.step + 1, phase)
        if phase.startswith("forward"):
            self.timer.start_forward()
        updates_in_backward = run.step_settings.optimizer_in_backward is not None
        if self.can_abandon and phase.startswith("forward") and not updates_in_backward:
            self.stop_reason, is_too_slow = self._agree_to_stop()
            if is_too_slow:
                raise _StepAbandoned

    def _agree_to_stop(self) -> list[int]:
        """[signal, whether the step would end too late to save it] on any rank."""
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)  # the host runs ahead
        request, save_seconds = self.run.stop_request, self.run.checkpointer.save_seconds
        is_too_slow = self.timer.step_seconds_left + save_seconds > request.seconds_left
        self.max_over_ranks.start(request.received, is_too_slow)
        return self.max_over_ranks.wait()

    def _save_before_step(self) -> None:
        """Save the state before an abandoned step, unless a checkpoint has it."""
        state = self.run.state
        logger.info(  # of rank 0 only
            "step %d is abandoned, because torchrun would kill the ranks before its end: the state"
            " after step %d is kept",
            state.step + 1,
            state.step,
        )
        state.optimizer.zero_grad()
        reshard([state.model])
        if self.last is None:  # no step was taken since the start
            return
        info = dataclasses.replace(
            self.last, step=state.step, stop_reason=self.stop_reason, is_saving=False
        )
        self._run_actions(info, False, only="save")  # the others have already run after that step

    def _start_exchange(self, folder_lost: bool) -> None:
        """Start to exchange the stop reason and other flags, while the step is computed."""
        run = self.run
        needed_seconds = self.timer.start_iteration() + run.checkpointer.save_seconds
        reason, saving = run.stop_request.reason(needed_seconds), run.checkpointer.writing
        limit, save_seconds = run.stop_request.limit_seconds, run.checkpointer.save_seconds
        two_steps = 2 * self.timer.step_seconds
        is_slow = limit is not None and save_seconds < limit < two_steps + save_seconds
        self.max_over_ranks.start(reason, saving, folder_lost, self.pending.poll(), is_slow)

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

    def _run_actions(self, info: StepInfo, is_rejected: bool, only: str = "") -> None:
        due = self._due_actions(info, only)
        if is_rejected or self._is_rejected(info, due):
            latest, settled = info.step, self._handle_violation(info.is_saving)
            if settled is None:
                return
            info, due = settled, self._due_actions(settled, only)
            if info.step < latest:  # the other actions have already run after that step
                due = [action for action in due if action.waits]
        needs_finite = any(action.needs_finite for action in due)
        if needs_finite and self.violations.check_parameters(info.step, info.result):
            self._start_again()
            return
        for action in due:
            self.run.watchdog.set_phase(info.step, action.name)
            action.run(info)

    def _due_actions(self, info: StepInfo, only: str = "") -> list[PeriodicAction]:
        actions = (action for action in self.run.actions if only in ("", action.name))
        return [action for action in actions if action.is_due(info)]

    def _is_rejected(self, info: StepInfo, due: list[PeriodicAction]) -> bool:
        """Whether a step so far was rejected; waits for the device.

        If no due action needs to know and the run goes on, returns False without waiting:
        `PendingSteps.poll` finds out one or a few steps later.
        """
        if not info.ends_run and not any(action.waits for action in due):
            return False
        self.max_over_ranks.start(self.pending.wait())
        return bool(self.max_over_ranks.wait()[0])

    def _handle_violation(self, is_saving: bool) -> StepInfo | None:
        """Replay the first rejected step, and accept or skip it; the loop then takes later ones.

        Returns None if the run was rolled back to a checkpoint instead.
        """
        first = self.violations.undo_rejected(self.pending)
        self.batches = self.run.open_batches()
        result = self.violations.replay(first, next(self.batches))
        if result is None:
            self._start_again()
            return None
        return self._describe_step(result, is_saving)

    def _start_again(self) -> None:
        """Continue from the state that a roll-back has loaded."""
        self.batches = self.run.open_batches()
        self._start_actions_again()

    def _start_actions_again(self) -> None:
        for action in self.run.actions:
            self.run.watchdog.set_phase(self.run.state.step, action.name)
            action.start_again(self.run.state.step)


class _IterationTimer:
    """Estimates the time that the next iterations take, so that a run stops before its deadline."""

    def __init__(self) -> None:
        self._started, self._iterations, self._longest = time.monotonic(), 0, 0.0
        self.step_seconds = math.inf  # of the latest step, without the actions after it
        # forward phases begun in this step, and those of the latest one
        self._forwards, self._forwards_of_step = 0, 0

    def start_forward(self) -> None:
        """Count a forward phase of the step."""
        self._forwards += 1

    def step_done(self) -> None:
        """The step of this iteration has been computed."""
        self.step_seconds = time.monotonic() - self._started
        self._forwards_of_step, self._forwards = self._forwards, 0

    @property
    def step_seconds_left(self) -> float:
        """Until the step of this iteration ends, if its parts take as long as in the latest one."""
        if self.step_seconds == math.inf:
            return math.inf
        return self.step_seconds * (1 - (self._forwards - 1) / max(self._forwards_of_step, 1))

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
