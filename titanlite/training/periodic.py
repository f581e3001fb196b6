"""Periodic actions: logging, validation, saving and others that run between two steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titanlite.checkpoint import Checkpointer, SaveRequest, SaveResult
from titanlite.errors import CheckpointError
from titanlite.metrics import MetricSinks, Profiler, ThroughputMeter
from titanlite.training.state import TrainState
from titanlite.training.step import StepResult
from titanlite.training.weight_average import average_of


@dataclass(frozen=True)
class StepInfo:
    """The step that was just taken, for periodic actions.

    The same on every rank, except `own_norms` and `own_losses` of the result, which are this
    rank's.
    """

    step: int  # counted from 1
    result: StepResult
    is_first: bool  # of this process
    is_last: bool  # training.steps is reached
    stop_reason: int  # nonzero: the run stops after this step
    is_saving: bool  # some rank is still writing the last checkpoint
    is_saving_in_memory: bool = False  # the same of a memory checkpoint

    @property
    def ends_run(self) -> bool:
        """Whether this is the last step of this process."""
        return self.is_last or bool(self.stop_reason)


@dataclass(frozen=True)
class PeriodicAction:
    """An action that runs after a step if it is due.

    Actions may call collectives, so `is_due` must return the same on every rank. The host runs
    ahead of the device, so a step may still turn out to violate the guard, and be replayed. An
    action that reads or stores anything of the step or the state must set `needs_accepted`: before
    it runs, the loop waits until the device has accepted the step, or the guard has skipped it.
    With `needs_finite` it also checks the parameters: inf or NaN ends the run or rolls it back.

    At the start of a process, and after a roll-back, the loop calls `start` with the number of
    steps taken; not in a process that stops at once, unless all steps are done. An action with
    state of its own must then reset it to that of a new process.
    """

    name: str  # the phase that the watchdog reports; "save": it also runs after an abandoned step
    is_due: Callable[[StepInfo], bool]
    run: Callable[[StepInfo], object]
    needs_accepted: bool = False
    needs_finite: bool = False  # includes `needs_accepted`
    start: Callable[[int], None] = lambda step: None

    @property
    def waits(self) -> bool:
        """Whether the loop waits for the device before the action runs."""
        return self.needs_accepted or self.needs_finite


def every_logged_step(freq: int) -> Callable[[StepInfo], bool]:
    """Whether a step has a step line: every `freq` steps, step 1 and the last step."""
    return lambda info: info.step == 1 or info.step % freq == 0 or info.ends_run


def log_metrics(
    state: TrainState, meter: ThroughputMeter, sinks: MetricSinks, freq: int
) -> PeriodicAction:
    """Write a step line every `freq` steps, after step 1 and after the last step."""

    def write(info: StepInfo) -> None:
        result, measured = info.result, meter.read()
        line = {
            "step": info.step,
            "loss": result.loss.item(),
            "z_loss": result.z_loss.item() or None,  # null if loss.z_loss = 0
            "grad_norm": result.grad_norm.item(),
            "lr": result.lr,
            "tokens": state.counters.tokens,
            "samples": state.counters.samples,
            "loss_scale": None if state.loss_scale is None else state.loss_scale.value,
        }
        sinks.step({**line, **measured})
        if result.mtp_losses is not None:
            losses = dict(enumerate(result.mtp_losses.tolist(), 1))
            sinks.event(info.step, "mtp_losses", **{f"depth_{n}": x for n, x in losses.items()})

    return PeriodicAction("log", every_logged_step(freq), write, needs_accepted=True)


def report_finished_save(checkpointer: Checkpointer, sinks: MetricSinks) -> PeriodicAction:
    """Log the result of an asynchronous save as soon as every rank has written its part."""
    return PeriodicAction(
        "save", lambda info: not info.is_saving, lambda info: finish_save(checkpointer, sinks)
    )


def request_save(step: int, state: TrainState, sinks: MetricSinks) -> SaveRequest:
    """What to save of a run; metrics up to this step reach the disk first."""
    average = average_of(state)
    weights = average.current() if average else None
    return SaveRequest(step, state.model, state.optimizer, state.progress(), weights, sinks.sync)


def save_checkpoints(
    state: TrainState, checkpointer: Checkpointer, sinks: MetricSinks
) -> PeriodicAction:
    """Save when the checkpointer is due, and before the run ends."""

    def save(info: StepInfo) -> None:
        finish_save(checkpointer, sinks)  # at most one save is in flight
        checkpointer.save(request_save(info.step, state, sinks), final=info.is_last)
        if info.ends_run or checkpointer.blocking:
            result = finish_save(checkpointer, sinks)
            if info.ends_run and result and result.problem:
                raise CheckpointError(result.problem).mark_on_all_ranks()

    def is_due(info: StepInfo) -> bool:
        return checkpointer.due(info.step, info.ends_run)

    return PeriodicAction("save", is_due, save, needs_finite=True)


def collect_garbage(freq: int) -> PeriodicAction:
    """Collect garbage every `freq` steps on all ranks together, so that none stalls the others."""
    # Not a full collection, which takes longer: old objects rarely become garbage.
    return PeriodicAction("gc", lambda info: info.step % freq == 0, lambda info: gc.collect(1))


def after_first_step(run: Callable[[], None]) -> PeriodicAction:
    """Call `run` after the first step of this process, also when a roll-back repeats that step."""
    return PeriodicAction("log", lambda info: info.is_first, lambda info: run())


def step_profiler(name: str, profiler: Profiler) -> PeriodicAction:
    """Let a profiler count the step; it decides when to write a trace or a snapshot."""
    return PeriodicAction(name, lambda info: True, lambda info: profiler.step())


def finish_save(checkpointer: Checkpointer, sinks: MetricSinks) -> SaveResult | None:
    """Wait for the save in flight, if there is one, and write an event for it."""
    result = checkpointer.wait()
    if result is None:
        return None
    fields: dict[str, Any] = {"path": str(result.folder), "seconds": result.seconds}
    fields["blocked_seconds"] = result.blocked_seconds
    if result.problem:
        fields |= {"problem": result.problem, "failures": checkpointer.failures}
    event = "checkpoint_failed" if result.problem else "checkpoint_saved"
    sinks.event(result.step, event, **fields)
    return result
