"""The training loop: take a step, run the periodic actions that are due, repeat."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from titanlite.distributed.collectives import raise_on_all_ranks
from titanlite.errors import UserError
from titanlite.log import log_waiting, logger
from titanlite.runtime import stop_reason_name
from titanlite.training.batch import Batch
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.run import Run
from titanlite.training.spmd_engine import reshard
from titanlite.training.step import StepResult, take_step
from titanlite.training.stopping import AgreedFlags, RankAgreement, StepAbandoned


def train(run: Run) -> int:
    """Train up to step `training.steps`; return the reason for an earlier stop, or 0.

    Raises CheckpointError if the last checkpoint could not be written, and TrainingDiverged if the
    guard gives up. A state with inf or NaN in a parameter is never saved.
    """
    loop = _Loop(run)
    with _manual_garbage_collection():
        while not loop.agreement.reason and run.state.step < run.training.steps:
            loop.run_iteration()
    if run.state.step >= run.training.steps:
        return 0
    reason = loop.agreement.reason
    run.sinks.event(run.state.step, "stopped", reason=stop_reason_name(reason))
    return reason


class _Loop:
    """The state of the training loop. One iteration is a step and the periodic actions after it."""

    def __init__(self, run: Run):
        self.run, self.first_step = run, run.state.step + 1
        self.batches = run.open_batches()
        self.last: StepInfo | None = None
        self.agreement = RankAgreement(run)
        # A run that stops at once starts nothing; one with all steps done may lack its validation.
        if not self.agreement.reason or run.state.step >= run.training.steps:
            self._start_actions()

    def run_iteration(self) -> None:
        run, state = self.run, self.run.state
        run.watchdog.set_phase(state.step + 1, "data")
        own_problem = run.lost_folder()
        # What all ranks must know after this step; exchanged while the device computes.
        self.agreement.begin_step(bool(own_problem), run.guard.poll())
        with run.throughput.waiting():
            batch = next(self.batches)
        before = state.host_state()
        self.agreement.before_compute()
        try:
            with log_waiting("first step") if self.last is None else nullcontext():
                result = take_step(
                    state,
                    run.engine,
                    batch.to(run.device),
                    settings=run.step_settings,
                    set_phase=self._set_phase,
                )
        except StepAbandoned:  # on all ranks: torchrun would kill them before the step ends
            state.restore_host_state(before)
            self._save_before_step()
            return
        run.guard.add(state.step, before, result)
        run.throughput.step_done(result.tokens)
        agreed = self.agreement.end_step()
        if agreed.lost_folder:
            raise_on_all_ranks(UserError(own_problem) if own_problem else None)
        self.last = self._describe_step(result, agreed)
        with run.throughput.paused():
            self._run_actions(self.last, agreed.is_rejected)

    def _set_phase(self, phase: str) -> None:
        self.run.watchdog.set_phase(self.run.state.step + 1, phase)
        self.agreement.begin_phase(phase)

    def _describe_step(self, result: StepResult, agreed: AgreedFlags | StepInfo) -> StepInfo:
        step = self.run.state.step
        return StepInfo(
            step=step,
            result=result,
            is_first=step == self.first_step,
            is_last=step == self.run.training.steps,
            stop_reason=self.agreement.reason,
            is_saving=agreed.is_saving,
            is_saving_in_memory=agreed.is_saving_in_memory,
        )

    def _run_actions(self, info: StepInfo, is_rejected: bool, only: str = "") -> None:
        due = self._due_actions(info, only)
        # Without an action that needs to know, the host does not wait for the device: it learns of
        # a rejected step one or a few steps later.
        waits = info.ends_run or any(action.waits for action in due)
        if is_rejected or (waits and self.run.guard.has_rejected()):
            result = self.run.guard.settle(self._reopen_batches)
            if result is None:  # the run was rolled back
                self._start_again()
                return
            latest = info.step
            info = self.last = self._describe_step(result, info)
            due = self._due_actions(info, only)
            if info.step < latest:  # the other actions have already run after that step
                due = [action for action in due if action.waits]
        needs_finite = any(action.needs_finite for action in due)
        if needs_finite and self.run.guard.check_parameters(info.step, info.result):
            self._start_again()
            return
        for action in due:
            self.run.watchdog.set_phase(info.step, action.name)
            action.run(info)

    def _due_actions(self, info: StepInfo, only: str = "") -> list[PeriodicAction]:
        actions = (action for action in self.run.actions if only in ("", action.name))
        return [action for action in actions if action.is_due(info)]

    def _save_before_step(self) -> None:
        """Save the state before an abandoned step, unless a checkpoint has it."""
        state = self.run.state
        text = "step %d is abandoned: torchrun would kill the ranks before its end"
        logger.info(text, state.step + 1)
        state.optimizer.zero_grad()
        reshard([state.model])
        if self.last is None:  # no step was taken since the start
            return
        self.run.finish_save(state.step)  # if it failed, this step is due again
        if self.run.guard.has_rejected():
            return  # a replay would add to the gradients that the abandoned step has left in FSDP
        info = dataclasses.replace(
            self.last,
            step=state.step,
            is_last=False,
            stop_reason=self.agreement.reason,
            is_saving=False,
        )
        self._run_actions(info, is_rejected=False, only="save")

    def _reopen_batches(self) -> Batch:
        """Open the batches at the position of the state; returns the first one."""
        self.batches = self.run.open_batches()
        return next(self.batches)

    def _start_again(self) -> None:
        """Continue from the state that a roll-back has loaded."""
        self.batches = self.run.open_batches()
        self._start_actions()

    def _start_actions(self) -> None:
        for action in self.run.actions:
            self.run.watchdog.set_phase(self.run.state.step, action.name)
            action.start(self.run.state.step)


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
